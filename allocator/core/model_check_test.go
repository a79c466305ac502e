package core

import (
	"fmt"
	"maps"
	"slices"

	"github.com/berth-sandbox/berth/allocator/core/pods"
	"github.com/berth-sandbox/berth/allocator/core/pools"
	"github.com/berth-sandbox/berth/allocator/core/sandboxes"
)

// ---- what must always hold

func (w *world) check() {
	w.checkTruth()
	w.checkSent()
	checkTables(w.t, w.core)
	w.checkUnderWay()
}

// checkTruth compares the core and the routers with the API server.
func (w *world) checkTruth() {
	inPool := map[PoolKey]int{}
	for _, p := range w.pods {
		if len(p.bound) > 1 {
			w.t.Fatalf("pod %s was bound to %v", p.Key.Name, p.bound)
		}
		if !p.exists {
			continue
		}
		inPool[p.pool()]++
	}
	for id := range w.answered {
		if s := w.core.sandboxes.Get(id); s == nil && !w.forgotten[id] && !w.unwanted[id] {
			w.t.Fatalf("%s was answered, and the core does not know it", id)
		}
	}
	for _, p := range w.pools {
		if p.MaxPods > 0 && inPool[p.Key] > p.MaxPods+w.extra {
			w.t.Fatalf("pool %s has %d pods, at most %d are allowed", p.Key.Name, inPool[p.Key], p.MaxPods+w.extra)
		}
	}
	for _, r := range w.routers {
		if fresh := !r.dead && w.now.Boot < r.freshUntil; fresh != r.fresh() {
			w.t.Fatalf("router %s is fresh: %v, it should be until %v and it is %v", r.id, r.fresh(), r.freshUntil, w.now.Boot)
		}
		if !r.dead && r.stream != 0 && r.joined && len(r.in) == 0 && !r.small {
			w.checkKnown(r)
		}
		for id := range w.doomed {
			if r.routable(id) {
				w.t.Fatalf("router %s can route to %s, whose pod is being deleted", r.id, id)
			}
		}
	}
}

// checkKnown: a router that has heard everything knows all routes, and no others.
func (w *world) checkKnown(r *router) {
	for _, e := range r.entries {
		if sent, ok := r.sent[e.ID]; !ok || routeTo(sent) != e.Route {
			w.t.Fatalf("%s knows the route %+v to %s; it was sent: %v, %+v", r.id, e.Route, e.ID, ok, sent)
		}
	}
	if len(r.entries) != len(r.sent) {
		w.t.Fatalf("%s knows %d routes, it was sent %d", r.id, len(r.entries), len(r.sent))
	}
}

// checkSent: every connected router was last sent, of each sandbox that may be
// routed to, where it is and the ports that its pool asks for now.
func (w *world) checkSent() {
	for _, s := range w.core.View().Running() {
		pool := w.pool(s.Pool)
		if !pool.seen {
			continue // nothing is asked for; its sandboxes are being released
		}
		for _, r := range w.routers {
			if session := w.core.routers.members.Get(r.id); !connected(r) || session == nil || !session.Durable { // the last two: it was sent nothing yet
				continue
			}
			if r.egress && !s.Agent.Egress {
				continue
			}
			sent, ok := r.sent[s.ID]
			if !ok || sent.IP != s.IP || sent.DefaultPort != pool.sent.DefaultPort || !slices.Equal(sent.Ports, pool.sent.Ports) {
				w.t.Fatalf("%s was last sent %s: %v, at %v with default port %d and ports %v; it is at %v, and pool %s asks for %d and %v",
					r.id, s.ID, ok, sent.IP, sent.DefaultPort, sent.Ports, s.IP, s.Pool.Name, pool.sent.DefaultPort, pool.sent.Ports)
			}
		}
	}
}

// checkUnderWay: whatever the core waits for is under way.
func (w *world) checkUnderWay() {
	under := map[string]bool{}
	for _, j := range w.jobs {
		if j.term == w.term {
			under[j.String()] = true
		}
	}
	must := func(what string, args ...any) {
		if s := fmt.Sprintf(what, args...); !under[s] {
			w.t.Fatalf("the core waits for %q, which is not under way", s)
		}
	}
	for p := range w.core.pools.All() {
		for name := range p.Creating() {
			must("create %s", name)
		}
	}
	for _, key := range w.core.pods.Keys() {
		p := w.pod(key)
		if !p.exists || len(p.watch) > 0 { // it will be heard of
			continue
		}
		if w.core.pods.Due(key) && !p.Deleting {
			must("delete %s", key.Name)
		}
	}
	for s := range w.core.sandboxes.All() {
		if s.Asking() && w.pod(s.Pod).exists {
			must("configure %s", s.ID)
		}
		if s.Ungranted() > 0 && s.Phase < Released {
			if !slices.ContainsFunc(w.core.sandboxes.Granted(s.Grant()), func(o *sandboxes.Sandbox) bool { return o.Asking() || o.StopsNow() || o.Phase == Releasing }) {
				w.t.Fatalf("%s has no object, and no agent of its claim is asked", s.ID)
			}
			continue
		}
		hook, record := s.Owed()
		if record {
			must("record %s", s.ID)
		}
		if hook {
			must("start %s", s.ID)
		}
	}
	for id := range w.core.claims.Configuring() {
		must("configure %s", id)
	}
	if err := w.core.outbox.Check(w.leader.committing != nil || w.leader.written); err != nil {
		w.t.Fatal(err)
	}
	for token, c := range w.claims {
		if !w.core.claims.Has(token) && !c.abandoned {
			w.t.Fatalf("claim %d has no answer and is not under way", token)
		}
	}
	for token, id := range w.releases {
		if !slices.Contains(w.core.sandboxes.Get(id).Waiting(), token) {
			w.t.Fatalf("release %d of %s has no answer and does not wait for one", token, id)
		}
	}
}

type fataler interface{ Fatalf(string, ...any) }

// checkEnded advances the fences and adjusts every pool again. It demands that this has no effect, because a
// step ends when nothing is left to do.
func checkEnded(t fataler, c *Core) {
	facts := c.outbox.Len()
	for p := range c.pools.All() {
		p.Touch()
	}
	c.advanceFences()
	c.heed()
	c.adjustPools()
	c.routers.sendReleases()
	if effects := c.Take(); len(effects) > 0 || c.outbox.Len() > facts {
		t.Fatalf("another adjustment has the effects %+v and %d facts", effects, c.outbox.Len()-facts)
	}
}

// checkTables counts again what the core keeps count of.
func checkTables(t fataler, c *Core) {
	checkEnded(t, c)
	checkPools(t, c)
	for _, err := range []error{
		c.fences.Check(), c.routers.members.Check(), c.pods.Check(), c.sandboxes.Check(), c.idle.Check(), c.claims.Check(),
	} {
		if err != nil {
			t.Fatalf("%v", err)
		}
	}
	checkFences(t, c)
	checkStatus(t, c)
}

func checkPools(t fataler, c *Core) {
	all := 0
	for p := range c.pools.All() {
		if p.Group != c.pods.Group(p.Key) {
			t.Fatalf("pool %v is kept as another", p.Key)
		}
		for q := range p.In(pods.All...) {
			checkPod(t, c, p, q)
		}
		all += p.Total()
	}
	if all != c.pods.Len() {
		t.Fatalf("%d pods, %d in pools", c.pods.Len(), all)
	}
}

func checkPod(t fataler, c *Core, p *pools.Pool, q *pods.Pod) {
	name := q.Key().Name
	if withheld := p.Known && p.Refused != "" && !p.Deleting; withheld && (q.State() == pods.Pending || q.State() == pods.Warm && !q.Outdated()) {
		t.Fatalf("pod %s is kept in state %d, outdated %v, though the template is refused", name, q.State(), q.Outdated())
	}
	if q.Sandbox() == "" {
		return
	}
	s := c.sandboxes.Of(q.Key())
	if now := c.sandboxes.Get(q.Sandbox()); s == nil && q.State() == pods.Going && (now == nil || now.Incarnation > 0) {
		return // it was stopped, and has another pod since
	}
	if s == nil || s.ID != q.Sandbox() || s.Pod != q.Key() || (c.sandboxes.Get(s.ID) == s) == s.Bound() || s.Bound() != (q.State() == pods.Bound) {
		t.Fatalf("pod %s holds %s, on record is %+v, state %d", name, q.Sandbox(), s, q.State())
	}
}

// checkFences: every fence waits for sessions that exist. A connected router that a fence waits for
// owes the acknowledgement of a message that it was sent.
func checkFences(t fataler, c *Core) {
	for id := range c.fences.UnderWay() {
		if c.sandboxes.Get(id) == nil {
			t.Fatalf("the fence of %s is under way, which is not known", id)
		}
		for router, sequence := range c.fences.Waiting(id) {
			s := c.routers.members.Get(router)
			if s == nil {
				t.Fatalf("the fence of %s waits for session %s, which has ended", id, router)
			}
			if s.Stream != 0 && s.Durable && (sequence <= s.Acked || sequence > s.Sequence) {
				t.Fatalf("the fence of %s waits for message %d of %s, which was sent up to %d and has acknowledged up to %d",
					id, sequence, router, s.Sequence, s.Acked)
			}
		}
	}
}

// checkStatus compares what is shown of fences and sessions with the tables.
func checkStatus(t fataler, c *Core) {
	const most = 1 << 20
	fences, others := c.View().Fences(most)
	sessions, more := c.View().Sessions(most)
	if len(fences) != c.fences.Len() || len(sessions) != len(c.routers.members.All()) || others+more != 0 {
		t.Fatalf("%d fences and %d sessions are shown, and %d and %d others; there are %d and %d", len(fences), len(sessions), others, more, c.fences.Len(), len(c.routers.members.All()))
	}
	waits := map[string]int{}
	for _, f := range fences {
		id := f.Sandbox.ID
		waiting := maps.Collect(c.fences.Waiting(id))
		if c.fences.Complete(id) || len(f.Waiting)+f.Others != len(waiting) || len(f.Waiting) != min(len(waiting), maxAwaited) || len(waiting) > 0 && f.Window != 0 {
			t.Fatalf("the fence of %s is shown as %+v, and waits for %v", id, f, waiting)
		}
		for _, a := range f.Waiting {
			needed, ok := waiting[a.ID]
			if !ok || a.Connected && (a.Needed != needed || needed <= a.Acked || needed > a.Sent) || !a.Connected && a.Needed+a.Sent+a.Acked != 0 {
				t.Fatalf("the fence of %s is shown to wait for %+v, and does: %v, for message %d", f.Sandbox.ID, a, ok, needed)
			}
		}
		for s := range waiting {
			waits[s]++
		}
	}
	for _, s := range sessions {
		kept := c.routers.members.Get(s.ID)
		if s.Fences != waits[s.ID] || s.Connected != (kept.Stream != 0) {
			t.Fatalf("session %s is shown as %+v, %d fences wait for it, kept is %+v", s.ID, s, waits[s.ID], kept)
		}
	}
}
