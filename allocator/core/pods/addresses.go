package pods

import (
	"net/netip"

	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/core/taint"
)

// locate notes at which address a pod was seen.
func (t *Table) locate(p *Pod) {
	tainted, others := t.addresses.Seen(p.addr, taint.Observation{
		IP: p.seen.IP, Used: p.sandbox != "", Ending: p.seen.Deleting || p.seen.Finished,
	})
	p.quarantined = p.quarantined || !p.granted() && p.seen.IP.IsValid() && t.earlier()
	if tainted {
		t.recount(p)
	}
	t.reconsider(others)
}

// AddRoutes notes that routers may receive routes of a sandbox to these addresses from now on. pod serves it.
func (t *Table) AddRoutes(sandbox string, pod fact.PodKey, to []netip.Addr) {
	tainted, others := t.addresses.AddRoutes(sandbox, pod, to)
	for _, a := range tainted {
		t.recount(t.byKey[a.Key])
	}
	t.reconsider(others)
}

// Fenced notes that no router has a route of a sandbox any more.
func (t *Table) Fenced(sandbox string) { t.reconsider(t.addresses.Fenced(sandbox, t.retired)) }

// Routed reports whether routers may have routes of a sandbox.
func (t *Table) Routed(sandbox string) bool { return t.addresses.Routed(sandbox) }

// Blocked reports whether a sandbox whose routes are fenced must not be forgotten: an idle pod that its requests may
// have reached is neither retired nor gone.
func (t *Table) Blocked(sandbox string) bool { return t.addresses.Blocked(sandbox) }

// reconsider considers pods again, because something about their address has changed.
func (t *Table) reconsider(pods []*taint.Pod[fact.PodKey]) {
	for _, a := range pods {
		if p := t.byKey[a.Key]; p != nil {
			t.consider(p)
		}
	}
}

// Quarantine withholds all pods that have an address and were not granted, because routers of an earlier journal may
// serve routes to them.
func (t *Table) Quarantine(g *Group) {
	for _, p := range g.Sorted(All...) {
		p.quarantined = p.quarantined || p.seen.IP.IsValid() && !p.granted()
		t.consider(p)
	}
}

// RetireQuarantined retires the idle pods of a group that are quarantined. That intent must be durable no later than
// the end of the earlier journal's session, because the next leader cannot know it otherwise.
func (t *Table) RetireQuarantined(g *Group) {
	for _, p := range g.Sorted(Pending) {
		if p.quarantined && !p.addr.Tainted() { // tainted pods keep their address until its fences are complete
			t.Retire(p)
		}
	}
}
