package core

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/core/taint"
	"github.com/berth-sandbox/berth/allocator/core/warm"
)

type podPhase int

const (
	podPending podPhase = iota
	podWarm
	podClaiming
	podClaimed
	podReleased
	podDeleting
)

var everyPhase = []podPhase{podPending, podWarm, podClaiming, podClaimed, podReleased, podDeleting}

type pod struct {
	pool     *pool
	seen     Pod // the latest observation
	node     *node
	phase    podPhase
	outdated bool // made from an older template
	// away: its node became unusable after the creation of the pod was asked for. The pool creates another
	// pod for it. A pod that was asked for later is not away, because its template chooses such nodes, and
	// its replacement would be scheduled to the same node.
	away bool
	// tainted: requests of an earlier sandbox may have reached it, because it was idle at an
	// address while that was tainted. It is never handed out, and the pool creates another one.
	tainted bool
	// quarantined: the same for sandboxes of an earlier journal. The pool creates no other pod until
	// the session of that journal ends.
	quarantined bool
	// recycling: a RecyclePod is under way. It ends with this life.
	recycling bool
	// awaited: it is or was in Core.unproven. proven: it was ready after that.
	awaited, proven bool
	askedAt         time.Duration // boot clock: when its creation was asked for; 0: not known
	warmAt          time.Duration // boot clock: when it was warm for the first time; 0: never
	// unreadySince is when a node got it, or it was ready last, on the boot clock; 0: it is ready, or no node
	// has it.
	unreadySince time.Duration
	// synced is the Metadata that the last SyncPod was for since the pod is idle; nil: none was.
	synced  *string
	addr    *taint.Pod[PodKey]
	claim   *claim   // while claiming
	sandbox *sandbox // from claimed on
}

// node is a node. One that pods name and that was not seen is not usable.
type node struct {
	name     string
	usable   bool
	cordoned bool // ready, and not usable because of that alone
	pods     map[*pod]struct{}
	// lostAt is when it became unusable, on the boot clock. It is 0 after bindingLag, and if it was not usable in
	// this term.
	lostAt time.Duration
}

// bindingLag is how long after the loss of a node the watch may still show bindings to it.
const bindingLag = time.Minute

// idle reports whether no claim and no sandbox has the pod, and it is not about to be deleted.
func (p *pod) idle() bool { return p.phase == podPending || p.phase == podWarm }

// strayed reports whether the creation of the pod was asked for before its node became unusable.
func (p *pod) strayed() bool { return !p.node.usable && p.askedAt != 0 && p.askedAt < p.node.lostAt }

// stranded reports whether the pod is idle and the pool creates another pod for it.
func (p *pod) stranded() bool { return p.phase == podPending && (p.away || p.tainted) }

// usable reports whether the pod can be handed out.
func (p *pod) usable() bool {
	return p.seen.Ready && !p.seen.Deleting && !p.seen.Finished && p.node.usable && p.seen.IP.IsValid() && !p.tainted && !p.quarantined &&
		!p.addr.Contested()
}

// restarted reports whether a container of the pod has restarted since the claim, and the sandbox ends
// for that: an agent that starts again is not configured any more.
func (p *pod) restarted(sb *sandbox) bool {
	return p.seen.Restarts > sb.Restarts && (!p.pool.KeepOnRestart || sb.Agent.Port != 0)
}

// granted reports whether a claim was granted that got the pod.
func (p *pod) granted() bool { return p.sandbox != nil && p.sandbox.claim == nil }

// recount runs f, which changes a field that the pool counts its pods by.
func (p *pod) recount(f func()) {
	p.pool.pods.remove(p)
	f()
	p.pool.pods.add(p)
	p.pool.touch()
}

// enter gives a pod another phase. The queue of its pool has it while it is warm.
func (p *pod) enter(phase podPhase, now time.Duration) {
	if p.phase == podWarm {
		p.pool.queue.Remove(p.seen.Key)
	}
	p.recount(func() { p.phase = phase })
	if !p.idle() {
		p.synced = nil
	}
	p.unreadySince = 0
	if phase == podPending {
		p.waits(now)
	}
	if phase == podWarm {
		p.becameWarm(now)
		p.pool.queue.Put(warm.Pod[PodKey]{Key: p.seen.Key, Node: p.seen.Node, CreatedAt: p.seen.CreatedAt, Name: p.seen.Key.Name})
	}
}

// waits notes since when a pod could become ready.
func (p *pod) waits(now time.Duration) {
	if p.phase == podPending && p.seen.Node != "" && p.unreadySince == 0 {
		p.unreadySince = now
	}
}

// nodeTable has the nodes that are usable, that pods name, or that were usable a short while ago.
type nodeTable map[string]*node

// of returns the node of that name, and creates an entry if there is none.
func (t nodeTable) of(name string) *node {
	if t[name] == nil {
		t[name] = &node{name: name, pods: map[*pod]struct{}{}}
	}
	return t[name]
}

// join puts a pod on the node where it was seen, leave takes it off.
func (t nodeTable) join(p *pod, name string) {
	p.node = t.of(name)
	p.node.pods[p] = struct{}{}
}

func (t nodeTable) leave(p *pod) {
	delete(p.node.pods, p)
	t.prune(p.node)
}

// prune drops a node that has no pods, is not ready, and gets none any more.
func (t nodeTable) prune(n *node) {
	if len(n.pods) == 0 && !n.usable && !n.cordoned && n.lostAt == 0 {
		delete(t, n.name)
	}
}

func (c *Core) nodeSeen(ev NodeSeen) {
	n := c.nodes.of(ev.Name)
	n.cordoned = ev.Cordoned
	if n.usable != ev.Usable {
		there := sortedPods(n.pods)
		n.usable, n.lostAt = ev.Usable, 0
		if !ev.Usable {
			n.lostAt = c.now.Boot
			c.lostNodes = append(c.lostNodes, lostNode{n, n.lostAt})
		}
		for _, p := range there {
			p.recount(func() { p.away = !n.usable })
			p.unreadySince = 0
			p.waits(c.now.Boot)
		}
		for _, p := range there {
			c.consider(p)
		}
	}
	c.nodes.prune(n)
}

// lostNode is a node that became unusable then.
type lostNode struct {
	*node
	at time.Duration
}

// forgetLost ends the time in which bindings to lost nodes are expected.
func (c *Core) forgetLost() {
	for len(c.lostNodes) > 0 && c.now.Boot-c.lostNodes[0].at >= bindingLag {
		n := c.lostNodes[0]
		c.lostNodes = c.lostNodes[1:]
		if n.lostAt == n.at { // else it has returned meanwhile
			n.lostAt = 0
			c.nodes.prune(n.node)
		}
	}
}

// sortedPods lists pods by UID, so that the same events have the same effects.
func sortedPods(set map[*pod]struct{}) []*pod {
	return slices.SortedFunc(maps.Keys(set), func(a, b *pod) int { return fact.ComparePods(a.seen.Key, b.seen.Key) })
}

func (c *Core) podSeen(seen Pod) {
	p := c.pods[seen.Key]
	if life, known := c.lives[seen.Key.Whole()]; known && life != seen.Key {
		c.endLife(life)
	}
	if p == nil {
		// A pod that is on record, for a sandbox or as one to be deleted, is ours even if its owner
		// reference was removed.
		owner := PoolKey{Namespace: seen.Key.Namespace, Name: seen.Pool}
		onRecord, retired := c.sandboxes.byPod[seen.Key], c.retirements[seen.Key] != nil
		switch {
		case seen.Pool == "" && onRecord != nil:
			owner = onRecord.Pool
		case seen.Pool == "" && !retired:
			return
		}
		pool := c.pools.of(owner)
		p = &pod{pool: pool, seen: seen, askedAt: pool.creating[seen.Key.Name], outdated: pool.known && seen.Template != pool.Template, addr: &taint.Pod[PodKey]{Key: seen.Key}}
		pool.made(seen.Key.Name)
		c.nodes.join(p, seen.Node)
		p.away = c.recovering && seen.Node != "" && !p.node.usable || p.strayed()
		c.pods[seen.Key], c.lives[seen.Key.Whole()] = p, seen.Key
		pool.pods.add(p)
		pool.touch()
		switch sb := onRecord; {
		case sb != nil:
			// The pod is used, even if this observation does not show it: it may be older.
			c.hold(p, sb)
		case retired:
			p.enter(podDeleting, c.now.Boot)
			c.advanceRetirement(seen.Key)
		}
	}
	if p.seen.Node != seen.Node { // it was scheduled
		c.nodes.leave(p)
		c.nodes.join(p, seen.Node)
		p.recount(func() { p.away = p.strayed() })
	}
	p.seen = seen
	if p.phase == podPending && seen.Reason != "" {
		p.pool.unready = p
	}
	p.waits(c.now.Boot)
	c.locate(p)
	c.awaitProof(p)
	if seen.Mislabelled && !seen.Deleting {
		c.emit(p.label())
	}
	c.consider(p)
}

// sync has an idle pod get the labels and annotations of the template. Sandboxes keep theirs, and a pod of an older
// template is replaced.
func (c *Core) sync(p *pod) {
	want := p.pool.Metadata
	switch {
	case c.recovering || !p.pool.known || p.pool.Deleting || p.pool.Refused != "" || p.outdated || !p.idle():
		return
	case p.seen.Metadata == want:
		p.synced = nil
		return
	case p.synced != nil && *p.synced == want:
		return
	}
	p.synced = &want
	c.emit(SyncPod{Pod: p.seen.Key, Pool: p.pool.Key})
}

// label restores the pool's label of a pod. The effect names the sandbox too, because it replaces
// an earlier LabelPod that is not carried out yet.
func (p *pod) label() LabelPod {
	e := LabelPod{Pod: p.seen.Key, Pool: p.seen.Pool, Restored: true}
	if sb := p.sandbox; sb != nil {
		e.ID, e.Released = sb.ID, sb.Phase == Released || sb.Phase == Ended
	}
	return e
}

// consider acts on the latest observation of a pod.
func (c *Core) consider(p *pod) {
	seen := p.seen
	switch p.phase {
	case podPending, podWarm:
		switch {
		case seen.Deleting || seen.Finished || p.addr.Contested():
			if !c.recovering && (seen.Deleting || seen.Finished) {
				c.failed(p)
			}
			c.retire(p)
		case p.tainted && !p.addr.AddressTainted():
			// Not while the address is tainted: the next pod there would be tainted too.
			c.retire(p)
		case seen.Pool == "" && !p.tainted:
			// The next leader cannot find it without an owner.
			c.retire(p)
		case seen.Used && p.askedAt != 0 && p.warmAt == 0 && !p.stranded():
			// Admission has changed it when this leader created it. Others would be changed too.
			const why = "an admission webhook or policy has changed its label berth.sh/phase or its host network"
			p.endedEarly(c.now, PodFailed, why)
			c.recordFailure(p, PodFailed, why)
			c.retire(p)
		case seen.Used:
			c.emit(Repaired{Pod: seen.Key, What: "a pod of this pool is marked as used, and no record says by whom: it will be deleted"})
			p.enter(podDeleting, c.now.Boot)
			c.orphans = append(c.orphans, p)
		case p.usable() && p.phase == podPending:
			p.enter(podWarm, c.now.Boot)
		case !p.usable() && p.phase == podWarm:
			p.enter(podPending, c.now.Boot)
		}
	case podClaiming:
		if !p.claim.Request.handed() && (!p.usable() || seen.Used) {
			c.takeBack(p)
			p.enter(podPending, c.now.Boot)
			c.consider(p)
		}
	case podClaimed:
		switch cause, lost := p.unfit(p.sandbox); {
		case lost:
			c.lost(p.sandbox, cause)
		case cause != (Cause{}):
			c.startRelease(p.sandbox, cause)
		default:
			p.sandbox.Restarts = max(p.sandbox.Restarts, seen.Restarts) // they were kept
		}
	case podReleased, podDeleting:
	}
	c.sync(p)
}

// unfit returns the cause for which a sandbox must end, as far as its pod is concerned; zero: there is none.
// lost: the pod cannot serve it any more. p may be nil.
func (p *pod) unfit(sb *sandbox) (cause Cause, lost bool) {
	switch {
	case p == nil:
		return because(ReasonPodDeleted), true
	case p.seen.Deleting:
		return p.removed(), true
	case p.seen.Finished:
		cause = p.seen.Cause
		cause.Reason = cmp.Or(cause.Reason, ReasonFailed)
		cause.Message = cmp.Or(cause.Message, p.seen.Why)
		return cause, true
	case p.seen.IP != sb.IP:
		// The address of the route may belong to another pod already, even if this pod has none
		// at the moment.
		return because(ReasonPodMoved), true
	case p.addr.Contested():
		return because(ReasonAddressShared), true
	case p.restarted(sb):
		if cause = p.seen.Cause; cause.Reason != ReasonOOMKilled {
			cause.Reason = ReasonRestart
		}
		return cause, false
	}
	return Cause{}, false
}

// removed returns why a pod that is being deleted, or is gone, was deleted. The cluster writes that into the
// status before it deletes a pod. Otherwise another client did, for reasons of its own.
func (p *pod) removed() Cause {
	cause := p.seen.Cause
	switch {
	case p.seen.NoExecute && (p.seen.Ready || p.node.usable || p.node.cordoned):
		cause.Reason = ReasonEvicted
	case p.seen.NoExecute: // Kubernetes marks the pods of a node that does not answer as not ready
		cause.Reason = ReasonNodeLost
	case cause.Reason != ReasonEvicted && cause.Reason != ReasonNodeLost:
		return because(ReasonPodDeleted)
	}
	return cause
}

// goneBefore is the message of a PodDeleted that no leader has observed.
const goneBefore = "the pod did not exist any more when this allocator began to lead"

// hold ties a pod that was found again to its sandbox.
func (c *Core) hold(p *pod, sb *sandbox) {
	p.sandbox = sb
	sb.Workload = cmp.Or(sb.Workload, p.seen.Workload)
	if p.pool.known {
		sb.takePorts(p.pool)
	}
	if sb.Phase != Released && sb.Phase != Ended {
		p.enter(podClaimed, c.now.Boot)
		c.routers.sendRoute(sb)
		return
	}
	p.enter(podReleased, c.now.Boot)
	if sb.elem != nil { // it had ended, but its pod exists
		c.sandboxes.revive(sb)
		sb.Phase = Released
		c.revise(sb)
		c.addRoutes(sb)
	}
	c.readLog(sb) // the earlier leader may not have done it
	c.startFence(sb)
}

// podGone ends a pod. key is that of the pod in all of its lives.
func (c *Core) podGone(key PodKey) {
	life := c.lives[key]
	if p := c.pods[life]; p != nil && p.recycling {
		c.emit(RecycleEnded{NotFit})
	}
	c.endLife(life)
}

// endLife ends a life of a pod.
func (c *Core) endLife(key PodKey) {
	p := c.pods[key]
	if p == nil {
		return
	}
	if p.claim != nil {
		p.seen.Ready = false // so that it is not answered, when it is being written
		if !p.claim.Request.handed() {
			c.takeBack(p)
		}
	}
	sb := p.sandbox
	if p.phase == podPending || p.phase == podWarm {
		c.failed(p)
	}
	cause := p.removed()             // while it is on its node
	p.enter(podDeleting, c.now.Boot) // out of the queue
	p.pool.pods.remove(p)
	p.pool.touch()
	delete(c.pods, key)
	delete(c.lives, key.Whole())
	c.nodes.leave(p)
	others, done := c.taints.Gone(p.addr)
	c.reconsider(others)
	if sb != nil {
		c.lost(sb, cause)
	}
	c.advanceRetirement(key)
	for _, id := range done {
		c.tryEnd(c.sandboxes.byID[id])
	}
}
