package pods

import (
	"cmp"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/core/step"
	"github.com/berth-sandbox/berth/allocator/core/taint"
	"github.com/berth-sandbox/berth/allocator/core/warm"
)

// Table has all pods.
type Table struct {
	*step.Current
	outbox *fact.Outbox
	// recovering: not everything was read yet, so no failure is counted and no pod gets new labels.
	recovering bool
	// earlier says whether routers of an earlier journal may serve routes.
	earlier func() bool

	groups      map[fact.PoolKey]*Group
	touched     []*Group
	byKey       map[fact.PodKey]*Pod
	lives       map[fact.PodKey]fact.PodKey // the whole pod -> its present life
	nodes       nodeTable
	addresses   *taint.Ledger[fact.PodKey]
	retirements map[fact.PodKey]*retirement // of idle pods that are there or wait for a fence, or whose fact is not durable yet
	orphans     []*Pod                      // marked as used and on no record
	unproven    []unproven                  // lives that are to end or began with a restart, in the order in which they were seen
	step.Notices[Notice]
}

// New returns an empty table. earlier says whether routers of an earlier journal may serve routes.
func New(current *step.Current, outbox *fact.Outbox, earlier func() bool) *Table {
	return &Table{
		Current: current, outbox: outbox, earlier: earlier, groups: map[fact.PoolKey]*Group{}, byKey: map[fact.PodKey]*Pod{},
		lives: map[fact.PodKey]fact.PodKey{}, nodes: nodeTable{byName: map[string]*node{}}, addresses: taint.New[fact.PodKey](),
		retirements: map[fact.PodKey]*retirement{},
	}
}

// Get returns the pod of that key; nil: it is not there.
func (t *Table) Get(key fact.PodKey) *Pod { return t.byKey[key] }

// Len is how many pods there are.
func (t *Table) Len() int { return len(t.byKey) }

// Keys lists all pods, in no order.
func (t *Table) Keys() []fact.PodKey {
	keys := make([]fact.PodKey, 0, len(t.byKey))
	for key := range t.byKey {
		keys = append(keys, key)
	}
	return keys
}

// Origin is what is known of a pod before it is observed for the first time.
type Origin struct {
	// Pool is its owner. Its name is empty if the pod names none and is on no record.
	Pool fact.PoolKey
	// AskedAt is when its creation was asked for, on the boot clock; 0: not known.
	AskedAt time.Duration
	// Sandbox is the one that is on record with it; empty: none is. Released: it was released.
	Sandbox  string
	Released bool
}

// Seen acts on an observation of a pod, which ends every other life of it. isNew: the pod was not known before. A pod
// without an owner that is on no record is ignored.
func (t *Table) Seen(seen step.Pod, from Origin) (p *Pod, isNew bool) {
	p = t.byKey[seen.Key]
	if life, known := t.lives[seen.Key.Whole()]; known && life != seen.Key {
		t.end(life)
	}
	if p == nil {
		if from.Pool.Name == "" && t.retirements[seen.Key] == nil {
			return nil, false
		}
		p, isNew = t.add(seen, from), true
	}
	if p.seen.Node != seen.Node { // it was scheduled
		t.nodes.leave(p)
		t.nodes.join(p, seen.Node)
		p.away = p.strayed()
	}
	p.seen = seen
	t.recount(p)
	if p.state == Pending && seen.Reason != "" {
		p.group.unready = p
	}
	t.waits(p)
	t.locate(p)
	t.awaitProof(p)
	if seen.Mislabelled && !seen.Deleting {
		t.label(p, true)
	}
	t.consider(p)
	return p, isNew
}

// add enters a pod.
func (t *Table) add(seen step.Pod, from Origin) *Pod {
	p := &Pod{seen: seen, group: t.Group(from.Pool), askedAt: from.AskedAt, sandbox: from.Sandbox, addr: &taint.Pod[fact.PodKey]{Key: seen.Key}}
	t.nodes.join(p, seen.Node)
	p.away = t.recovering && seen.Node != "" && !p.node.usable || p.strayed()
	t.byKey[seen.Key], t.lives[seen.Key.Whole()] = p, seen.Key
	switch {
	case from.Released:
		p.state = Released
	case from.Sandbox != "": // it is used, even if this observation does not show it: it may be older
		p.state = Claimed
	case t.retirements[seen.Key] != nil:
		p.state = Going
	}
	t.recount(p)
	if p.state == Going {
		t.AdvanceRetirement(seen.Key)
	}
	return p
}

// PodGone notes that a pod does not exist any more. key is that of the pod in all of its lives.
func (t *Table) PodGone(key fact.PodKey) {
	life := t.lives[key]
	if p := t.byKey[life]; p != nil && p.state == Recycling {
		t.Emit(step.RecycleEnded{Outcome: step.NotFit})
	}
	t.end(life)
}

// end ends a life of a pod.
func (t *Table) end(key fact.PodKey) {
	p := t.byKey[key]
	if p == nil {
		return
	}
	if p.Idle() {
		t.failed(p)
	}
	p.gone = true
	t.Notify(Disturbed{p})
	t.enter(p, Going) // out of the queue
	t.uncount(p)
	delete(t.byKey, key)
	delete(t.lives, key.Whole())
	t.nodes.leave(p)
	others, done := t.addresses.Gone(p.addr)
	t.reconsider(others)
	t.AdvanceRetirement(key)
	t.unblock(done)
}

// unblock lists sandboxes whose last idle pod is retired or gone.
func (t *Table) unblock(sandboxes []string) {
	for _, id := range sandboxes {
		t.Notify(Unblocked{id})
	}
}

// enter gives a pod another state. The queue of its pool has it while it is warm.
func (t *Table) enter(p *Pod, state State) {
	if p.state == Warm {
		p.group.queue.Remove(p.seen.Key)
	}
	p.state, p.unreadySince = state, 0
	t.recount(p)
	if !p.Idle() {
		p.synced = nil
	}
	t.waits(p)
	if state != Warm {
		return
	}
	if p.warmAt == 0 {
		p.warmAt = t.Now.Boot
		t.Notify(Warmed{p})
	}
	p.group.queue.Put(warm.Pod[fact.PodKey]{Key: p.seen.Key, Node: p.seen.Node, CreatedAt: p.seen.CreatedAt, Name: p.seen.Key.Name})
}

// waits notes since when a pod could become ready.
func (t *Table) waits(p *Pod) {
	if p.state == Pending && p.seen.Node != "" && p.unreadySince == 0 {
		p.unreadySince = t.Now.Boot
	}
}

// consider acts on what is known of a pod now.
func (t *Table) consider(p *Pod) {
	switch p.state {
	case Pending, Warm:
		t.considerIdle(p)
	case Claiming, Bound, Claimed:
		t.Notify(Disturbed{p})
	case Released, Recycling, Going:
	}
	t.sync(p)
}

func (t *Table) considerIdle(p *Pod) {
	seen, tainted := &p.seen, p.addr.Tainted()
	switch why := p.Withheld(); {
	case why&(Ending|Contested) != 0:
		if !t.recovering && why&Ending != 0 {
			t.failed(p)
		}
		t.Retire(p)
	case tainted && !p.addr.AddressTainted():
		// Not while the address is tainted: the next pod there would be tainted too.
		t.Retire(p)
	case seen.Pool == "" && !tainted:
		// The next leader cannot find it without an owner.
		t.Retire(p)
	case seen.Used && p.askedAt != 0 && p.warmAt == 0 && !p.Stranded():
		// Admission has changed it when this leader created it. Others would be changed too.
		t.Notify(Failed{
			Pod: p, Reason: step.PodFailed, Early: p.counts(),
			Why: "an admission webhook or policy has changed its label berth.sh/phase or its host network",
		})
		t.Retire(p)
	case seen.Used:
		t.Emit(step.Repaired{Pod: seen.Key, What: "a pod of this pool is marked as used, and no record says by whom: it will be deleted"})
		t.enter(p, Going)
		t.orphans = append(t.orphans, p)
	case why == 0 && p.state == Pending:
		t.enter(p, Warm)
	case why != 0 && p.state == Warm:
		t.enter(p, Pending)
	}
}

// Take takes a warm pod out of the queue for a claim. The turn of its node is over.
func (t *Table) Take(p *Pod) {
	p.group.queue.Passed(p.seen.Key)
	t.enter(p, Claiming)
}

// Return returns pods that no claim has any more to their places in the queue, or to pending.
func (t *Table) Return(pods ...*Pod) {
	for _, p := range pods {
		if !p.gone {
			t.enter(p, Pending)
			t.consider(p)
		}
	}
}

// Bind gives a pod to a sandbox, Grant when the claim of that is granted, Release when the sandbox is released.
func (t *Table) Bind(p *Pod, sandbox string) {
	p.sandbox = sandbox
	t.enter(p, Bound)
}

// Grant notes that the claim of the sandbox of a pod is granted.
func (t *Table) Grant(p *Pod) { t.enter(p, Claimed) }

// Release notes that the sandbox of a pod is released.
func (t *Table) Release(p *Pod) {
	t.enter(p, Released)
	t.Emit(step.LabelPod{Pod: p.seen.Key, Pool: p.group.Key.Name, ID: p.sandbox, Released: true})
}

// sync has an idle pod get the labels and annotations of the template. Sandboxes keep theirs, and a pod of an older
// template is replaced.
func (t *Table) sync(p *Pod) {
	g, want := p.group, p.group.Metadata
	switch {
	case t.recovering || !g.Known || g.Deleting || g.Refused != "" || p.Outdated() || !p.Idle():
		return
	case p.seen.Metadata == want:
		p.synced = nil
		return
	case p.synced != nil && *p.synced == want:
		return
	}
	p.synced = &want
	t.Emit(step.SyncPod{Pod: p.seen.Key, Pool: g.Key})
}

// label labels a pod. The effect names the sandbox too, because it replaces an earlier LabelPod that is not carried
// out yet.
func (t *Table) label(p *Pod, restored bool) {
	t.Emit(step.LabelPod{
		Pod: p.seen.Key, Pool: p.seen.Pool, ID: p.sandbox, Released: p.sandbox != "" && p.state >= Released, Restored: restored,
	})
}

// StableAfter is how long a pod must have been warm, so that its end is not early.
const StableAfter = 10 * time.Second

// Why an idle pod ended that was deleted.
const (
	deletedEarly = "it was deleted before it was ready"
	deletedWarm  = "it was deleted, and not by its pool"
)

// failed lists an idle pod that is seen to end. A pod that was warm for StableAfter, or was deleted after it was warm,
// has not ended early.
func (t *Table) failed(p *Pod) {
	f := Failed{Pod: p, Reason: step.PodDeleted, Why: deletedEarly}
	switch seen := &p.seen; {
	case seen.Finished:
		f.Reason, f.Why = cmp.Or(seen.Reason, step.PodFailed), cmp.Or(seen.Why, "its containers have ended")
	case seen.NoExecute && (seen.Ready || p.node.usable): // as for a sandbox: see Removed
		f.Reason, f.Why = step.PodEvicted, seen.Why
	case seen.Reason == step.PodEvicted || seen.Reason == step.PodPreempted || seen.Reason == step.PodNodeLost:
		f.Reason, f.Why = seen.Reason, seen.Why
	case p.warmAt != 0:
		f.Why = deletedWarm
	}
	f.Early = p.counts() && (p.warmAt == 0 || p.seen.Finished && t.Now.Boot-p.warmAt < StableAfter)
	t.Notify(f)
}

// counts reports whether the early end of a pod counts for the back-off of its pool. That of a stranded pod does not:
// its replacement was created when it was stranded.
func (p *Pod) counts() bool { return !p.Outdated() && !p.Stranded() }
