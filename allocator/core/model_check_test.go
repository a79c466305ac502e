package core

import (
	"fmt"
	"maps"
	"slices"

	"github.com/berth-sandbox/berth/allocator/core/claims"
	"github.com/berth-sandbox/berth/allocator/core/taint"
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
		if s := w.core.sandboxes.byID[id]; s == nil && !w.forgotten[id] && !w.unwanted[id] {
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
			if s := w.core.routers.members.Get(r.id); !connected(r) || s == nil || !s.Durable { // the last two: it was sent nothing yet
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
	for _, p := range w.core.pools.byKey {
		for name := range p.creating {
			must("create %s", name)
		}
	}
	for key := range w.core.pods {
		p := w.pod(key)
		if !p.exists || len(p.watch) > 0 { // it will be heard of
			continue
		}
		if d := w.core.retirements[key]; d != nil && d.durable && !p.Deleting && (d.after == nil || !w.core.taints.Routed(d.after.ID)) {
			must("delete %s", key.Name)
		}
	}
	for _, s := range w.core.sandboxes.byID {
		if s.asking && s.Phase < Releasing && w.pod(s.Pod).exists {
			must("configure %s", s.ID)
		}
		if s.ungranted > 0 && s.Phase < Released {
			if !slices.ContainsFunc(w.core.sandboxes.granted(s.Grant()), func(o *sandbox) bool { return o.asking || o.Phase == Releasing }) {
				w.t.Fatalf("%s has no object, and no agent of its claim is asked", s.ID)
			}
			continue
		}
		if neverShown := s.lost && s.Phase == Releasing && s.objectRevision == (Revision{}); s.objectRevision.Less(s.Revision) && !neverShown {
			must("record %s", s.ID)
		}
		if s.Phase == Starting && !s.readying && !s.lost {
			must("start %s", s.ID)
		}
	}
	for id := range w.core.configuring {
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
	for _, p := range w.core.pools.byKey {
		if n := p.line.Callers(); n > 0 && (p.queue.Len() > 0 || w.core.closing) {
			w.t.Fatalf("%d callers wait while %d pods are warm", n, p.queue.Len())
		}
	}
	for token, id := range w.releases {
		if !slices.Contains(w.core.sandboxes.byID[id].waiters, token) {
			w.t.Fatalf("release %d of %s has no answer and does not wait for one", token, id)
		}
	}
}

type fataler interface{ Fatalf(string, ...any) }

// checkSettled settles the fences and every pool again. It demands that this has no effect, because a
// step ends when they are settled.
func checkSettled(t fataler, c *Core) {
	facts := c.outbox.Len()
	for _, p := range c.pools.byKey {
		p.touch()
	}
	c.advanceFences()
	c.settlePools()
	c.routers.sendReleases()
	if len(c.out) > 0 || c.outbox.Len() > facts {
		t.Fatalf("settling again has the effects %+v and %d facts", c.out, c.outbox.Len()-facts)
	}
}

// checkTables counts again what the core keeps count of.
func checkTables(t fataler, c *Core) {
	checkSettled(t, c)
	located, lines := checkPools(t, c)
	checkSandboxes(t, c)
	for _, err := range []error{
		c.fences.Check(), c.routers.members.Check(), c.sandboxes.deadlines.Check(), c.idle.Check(), c.taints.Check(located), c.claims.Check(lines), c.claims.limits.Check(c.now.Boot),
	} {
		if err != nil {
			t.Fatalf("%v", err)
		}
	}
	if c.outbox.Empty() {
		var bound []*claim
		for _, s := range c.configuring {
			if !slices.Contains(bound, s.claim) {
				bound = append(bound, s.claim)
			}
		}
		if err := c.claims.CheckAsked(lines, bound); err != nil {
			t.Fatalf("%v", err)
		}
	}
	checkFences(t, c)
	checkStatus(t, c)
}

func checkPools(t fataler, c *Core) (located []*taint.Pod[PodKey], lines []*claims.Line[claimState]) {
	all := 0
	for key, p := range c.pools.byKey {
		if p.Key != key {
			t.Fatalf("pool %v is kept as %v", p.Key, key)
		}
		for of, pods := range p.pods {
			for q := range pods {
				if q.class() != of {
					t.Fatalf("pod %s is counted as %+v, and is %+v", q.seen.Key.Name, of, q.class())
				}
				located = append(located, q.addr)
				checkPod(t, c, p, q)
			}
		}
		if p.queue.Len() != p.pods.count(podWarm) {
			t.Fatalf("pool %s has %d warm pods, and %d in its queue", key.Name, p.pods.count(podWarm), p.queue.Len())
		}
		if err := p.queue.Check(); err != nil {
			t.Fatalf("pool %s: %v", key.Name, err)
		}
		lines = append(lines, p.line)
		if f := p.filling; f != nil && (!f.Waits() || len(f.Request.pods) == 0 || len(f.Request.pods) >= f.Request.count) {
			t.Fatalf("pool %s fills a batch that does not wait: %+v", key.Name, f.Request)
		}
		all += p.pods.total()
	}
	if all != len(c.pods) {
		t.Fatalf("%d pods, %d in pools", len(c.pods), all)
	}
	return located, lines
}

func checkPod(t fataler, c *Core, p *pool, q *pod) {
	if q.away && q.node.usable {
		t.Fatalf("pod %s is away from a node that is usable", q.seen.Key.Name)
	}
	if q.addr.IP() != q.seen.IP || q.tainted != q.addr.Tainted() {
		t.Fatalf("pod %s was seen at %v, and is tainted: %v; kept is %+v", q.seen.Key.Name, q.seen.IP, q.tainted, q.addr)
	}
	if q.phase == podPending && q.tainted && !q.addr.AddressTainted() {
		t.Fatalf("pod %s is tainted at an address that is not, and is not deleted", q.seen.Key.Name)
	}
	if c.pods[q.seen.Key] != q || q.pool != p {
		t.Fatalf("pool %s holds a pod %s that is not its own", p.Key.Name, q.seen.Key.Name)
	}
	if c.nodes[q.seen.Node] != q.node || q.node.name != q.seen.Node {
		t.Fatalf("pod %s is kept with node %q, it is on %q", q.seen.Key.Name, q.node.name, q.seen.Node)
	}
	if withheld := p.known && p.Refused != "" && !p.Deleting; withheld && (q.phase == podPending || q.phase == podWarm && !q.outdated) {
		t.Fatalf("pod %s is kept in phase %d, outdated %v, though the template is refused", q.seen.Key.Name, q.phase, q.outdated)
	}
	if p.queue.Has(q.seen.Key) != (q.phase == podWarm) {
		t.Fatalf("pod %s is in the queue: %v, phase %d", q.seen.Key.Name, p.queue.Has(q.seen.Key), q.phase)
	}
	if (q.claim != nil) != (q.phase == podClaiming) {
		t.Fatalf("pod %s has a claim: %v, phase %d", q.seen.Key.Name, q.claim != nil, q.phase)
	}
	if q.claim != nil && (!slices.Contains(q.claim.Request.pods, q) || q.claim.Waits() && p.filling != q.claim || !q.claim.Request.handed() && (!q.usable() || q.seen.Used)) {
		t.Fatalf("pod %s is given to a claim that does not have it: %+v", q.seen.Key.Name, q.claim)
	}
	if held := q.phase == podClaimed || q.phase == podReleased; held && q.sandbox == nil {
		t.Fatalf("pod %s holds no sandbox, phase %d", q.seen.Key.Name, q.phase)
	}
	if s := q.sandbox; s != nil && (s.Pod != q.seen.Key || (c.sandboxes.byID[s.ID] == s) == (s.claim != nil)) {
		t.Fatalf("pod %s holds %s, which is on %s", q.seen.Key.Name, s.ID, s.Pod.Name)
	}
	if q.phase == podWarm && (q.sandbox != nil || !q.usable() || q.seen.Used) {
		t.Fatalf("pod %s is warm: %+v", q.seen.Key.Name, q.seen)
	}
}

func checkSandboxes(t fataler, c *Core) {
	holds := map[PodKey]string{}
	live, withdrawn, ended, deadlines := 0, 0, 0, 0
	for id, s := range c.sandboxes.byID {
		if s.ID != id {
			t.Fatalf("%s is kept as %s", s.ID, id)
		}
		if _, listed := slices.BinarySearchFunc(c.sandboxes.live.of(everything()), s.mark(), byClaim); !listed && s.Phase == Releasing && s.lost {
			withdrawn++ // grant has dropped it
		} else if s.Phase < Released {
			live++
		}
		if _, queued := c.sandboxes.deadlines.At(id); queued {
			deadlines++
		}
		if s.Phase == Ended {
			ended++
		} else if holds[s.Pod] != "" {
			t.Fatalf("pod %s holds %s and %s", s.Pod.Name, id, holds[s.Pod])
		}
		holds[s.Pod] = id
		checkSandbox(t, c, s)
	}
	checkLists(t, c, c.sandboxes.live, false)
	checkLists(t, c, c.sandboxes.gone, true)
	all, gone := len(c.sandboxes.live.of(everything())), len(c.sandboxes.gone.of(everything()))
	if live != all || len(c.sandboxes.byID)-live-withdrawn != gone || ended != c.sandboxes.ended.Len() || deadlines != c.sandboxes.deadlines.Len() {
		t.Fatalf("%d live, %d ended and %d deadlines, kept are %d, %d and %d",
			live, ended, deadlines, all, c.sandboxes.ended.Len(), c.sandboxes.deadlines.Len())
	}
}

func checkLists(t fataler, c *Core, l lists, gone bool) {
	for sel, list := range l {
		for i, s := range list {
			selected := sel.Sees(s.Team) && (sel.Pool == PoolKey{} || sel.Pool == s.Pool)
			if c.sandboxes.byID[s.ID] != s || gone != (s.Phase >= Released) || !selected || i > 0 && byClaim(list[i-1], s.mark()) >= 0 {
				t.Fatalf("sandbox %s in the list of %v is not known, or not in its place", s.ID, sel)
			}
		}
	}
	for _, s := range l.of(everything()) {
		for _, sel := range s.selections() {
			if _, found := slices.BinarySearchFunc(l[sel], s.mark(), byClaim); !found {
				t.Fatalf("sandbox %s is not in the list of %v", s.ID, sel)
			}
		}
	}
}

func checkSandbox(t fataler, c *Core, s *sandbox) {
	id, q := s.ID, c.pods[s.Pod]
	if routed := s.Phase != Ended && !c.fences.Complete(id); routed != c.taints.Routed(id) {
		t.Fatalf("%s has routes: %v, in phase %d", id, c.taints.Routed(id), s.Phase)
	}
	if k := c.claims.Of(claimKey(&s.Binding)); k != nil && k.Grant == s.Grant() && c.claims.Keeps(id) != (s.Phase == Released || s.Phase == Ended) && (s.Batch == "" || c.claims.Keeps(id)) {
		t.Fatalf("the key of %s is kept: %v, in phase %d", id, c.claims.Keeps(id), s.Phase)
	}
	if s.Phase != Ended && q != nil && q.sandbox != s {
		t.Fatalf("%s is in phase %d, but its pod does not hold it", id, s.Phase)
	}
	if q == nil && (s.Phase == Starting || s.Phase == Running || s.Phase == Released && c.fences.Complete(s.ID) && !c.taints.Blocked(s.ID)) {
		t.Fatalf("%s is in phase %d, and its pod is gone", id, s.Phase)
	}
	switch s.Phase {
	case Starting, Running, Releasing:
		if q != nil && q.phase != podClaimed {
			t.Fatalf("%s is in phase %d, its pod in %d", id, s.Phase, q.phase)
		}
	case Released:
		if q != nil && q.phase != podReleased && q.phase != podDeleting {
			t.Fatalf("%s is released, its pod in phase %d", id, q.phase)
		}
	case Ended:
	}
	deadline, queued := c.sandboxes.deadlines.At(id)
	if queued && s.Phase >= Released {
		t.Fatalf("%s still has a deadline in phase %d", id, s.Phase)
	}
	end, reason := s.ends()
	if live := s.Phase == Running || s.Phase == Starting; reason != "" && live && (!queued || deadline > end) {
		t.Fatalf("%s ends at %v (%s), and is looked at: %v, at %v", id, end, reason, queued, deadline)
	}
	use, known := c.idle.Use(id)
	if known && s.Phase != Running && s.Phase != Releasing || !known && s.Phase == Running && !s.asking {
		t.Fatalf("%s in phase %d, reaped: %v, has the activity %+v: %v", id, s.Phase, s.reaped, use, known)
	}
	if s.reaped && s.Phase < Releasing {
		t.Fatalf("%s is released by a verdict, and in phase %d", id, s.Phase)
	}
}

// checkFences: every fence waits for sessions that exist. A connected router that a fence waits for
// owes the acknowledgement of a message that it was sent.
func checkFences(t fataler, c *Core) {
	for id := range c.fences.UnderWay() {
		if c.sandboxes.byID[id] == nil {
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
