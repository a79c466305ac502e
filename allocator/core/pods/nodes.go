package pods

import (
	"maps"
	"slices"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/fact"
)

// node is a node. One that pods name and that was not seen is not usable.
type node struct {
	name     string
	usable   bool
	cordoned bool // ready, and not usable because of that alone
	pods     map[*Pod]struct{}
	// lostAt is when it became unusable, on the boot clock. It is 0 after BindingLag, and if it was not usable in
	// this term.
	lostAt time.Duration
}

// lost is a node that became unusable then.
type lost struct {
	*node
	at time.Duration
}

// BindingLag is how long after the loss of a node the watch may still show bindings to it.
const BindingLag = time.Minute

// nodeTable has the nodes that are usable, that pods name, or that were usable a short while ago.
type nodeTable struct {
	byName map[string]*node
	lost   []lost // those that became unusable within BindingLag, in that order
}

// of returns the node of that name, and creates an entry if there is none.
func (t *nodeTable) of(name string) *node {
	if t.byName[name] == nil {
		t.byName[name] = &node{name: name, pods: map[*Pod]struct{}{}}
	}
	return t.byName[name]
}

// join puts a pod on the node where it was seen, leave takes it off.
func (t *nodeTable) join(p *Pod, name string) {
	p.node = t.of(name)
	p.node.pods[p] = struct{}{}
}

func (t *nodeTable) leave(p *Pod) {
	delete(p.node.pods, p)
	t.prune(p.node)
}

// prune drops a node that has no pods, is not ready, and gets none any more.
func (t *nodeTable) prune(n *node) {
	if len(n.pods) == 0 && !n.usable && !n.cordoned && n.lostAt == 0 {
		delete(t.byName, n.name)
	}
}

// forgetLost ends the time in which bindings to lost nodes are expected.
func (t *nodeTable) forgetLost(now time.Duration) {
	for len(t.lost) > 0 && now-t.lost[0].at >= BindingLag {
		n := t.lost[0]
		t.lost = t.lost[1:]
		if n.lostAt == n.at { // else it has returned meanwhile
			n.lostAt = 0
			t.prune(n.node)
		}
	}
}

// NodeSeen acts on an observation of a node. usable: it is ready and not cordoned. cordoned: it is ready, and it is
// cordoned or being deleted.
func (t *Table) NodeSeen(name string, usable, cordoned bool) {
	n := t.nodes.of(name)
	n.cordoned = cordoned
	if n.usable != usable {
		there := slices.SortedFunc(maps.Keys(n.pods), byKey)
		n.usable, n.lostAt = usable, 0
		if !usable {
			n.lostAt = t.Now.Boot
			t.nodes.lost = append(t.nodes.lost, lost{n, n.lostAt})
		}
		for _, p := range there {
			p.away, p.unreadySince = !usable, 0
			t.recount(p)
			t.waits(p)
		}
		for _, p := range there {
			t.consider(p)
		}
	}
	t.nodes.prune(n)
}

// Nodes lists the nodes whose pods can be handed out, in no order.
func (t *Table) Nodes() (names []string) {
	for name, n := range t.nodes.byName {
		if n.usable {
			names = append(names, name)
		}
	}
	return names
}

// byKey orders pods by UID and life, so that the same events have the same effects.
func byKey(a, b *Pod) int { return fact.ComparePods(a.seen.Key, b.seen.Key) }
