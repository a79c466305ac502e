package core

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/demand"
	"github.com/berth-sandbox/berth/allocator/core/fact"
)

// State is what exists when a term begins. It is read after the journal was taken over: first the
// journal, then the rest.
type State struct {
	// Facts are the latest of the journal, of each thing.
	Facts []Fact
	// Objects are the Sandbox objects.
	Objects []Sandbox
	Pools   []Pool
	// Nodes are those that are usable, Cordoned those that would be if they were not cordoned.
	Nodes, Cordoned []string
	Pods            []Pod
}

// Recover gives a new Core the state that exists. It is called once, before Step. An error means
// that the records contradict each other and that an operator must repair them.
func (c *Core) Recover(st State) ([]Effect, error) {
	c.recovering = true
	if err := c.recoverSandboxes(st); err != nil {
		return nil, err
	}
	for _, n := range st.Nodes {
		c.nodeSeen(NodeSeen{Name: n, Usable: true})
	}
	for _, n := range st.Cordoned {
		c.nodeSeen(NodeSeen{Name: n, Cordoned: true})
	}
	for _, p := range st.Pools {
		c.poolSeen(p)
	}
	for _, p := range st.Pods {
		c.podSeen(p)
	}
	for _, sb := range c.sandboxes.byEnd() {
		if sb.objectRevision.Less(sb.Revision) {
			c.show(sb)
		}
		switch gone := c.pods[sb.Pod] == nil; {
		case sb.Phase == Ended:
		case sb.Phase == Released && gone:
			c.startFence(sb)
		case sb.Phase != Released && len(sb.conflicts) > 0:
			c.lost(sb, because(ReasonDuplicate))
		case gone:
			c.lost(sb, Cause{Reason: ReasonPodDeleted, Message: goneBefore})
		case sb.asking && sb.Phase < Releasing:
			c.emit(Configure{Sandbox: sb.Sandbox, Ask: true})
		case sb.Phase == Starting:
			c.emit(StartSandbox{sb.Sandbox})
		}
	}
	for _, key := range slices.SortedFunc(maps.Keys(c.retirements), fact.ComparePods) {
		if c.pods[key] == nil {
			c.advanceRetirement(key)
		}
	}
	c.recovering = false
	for _, pool := range c.pools.sorted() {
		if !pool.known { // its object is gone, only its pods are left
			pool.Deleting = true
		}
		pool.demand.Found(c.ticked, pool.pods.count(podPending, podWarm), pool.maybeLacked(c.now.Wall))
		for _, p := range pool.pods.sorted(podPending, podWarm) {
			c.sync(p)
		}
		pool.touch()
	}
	return c.take(), nil
}

// maybeLacked is how many idle pods the claims of an earlier leader may have lacked: those above what the pool keeps
// that are not ready, or were created a short while ago. The callers of those claims come again.
func (pool *pool) maybeLacked(now time.Time) int {
	recent := pool.pods.count(podPending)
	for p := range pool.pods.in(podWarm) {
		if now.Sub(p.seen.CreatedAt) < demand.Spare {
			recent++
		}
	}
	return max(0, min(recent, pool.pods.count(podPending, podWarm)-pool.Warm))
}

// recoverSandboxes merges the journal and the objects, and recovers what was merged.
func (c *Core) recoverSandboxes(st State) error {
	for _, r := range st.Objects {
		c.sandboxes.byID[r.ID] = &sandbox{Sandbox: r, objectRevision: r.Revision}
	}
	c.mergeFacts(st)
	for _, f := range st.Facts {
		c.routers.longest = max(c.routers.longest, f.MaxStale())
	}
	for _, sb := range c.sandboxes.byEnd() {
		if other := c.sandboxes.byPod[sb.Pod]; other != nil {
			return contradiction(other, sb, sb.Pod)
		}
		c.recoverSandbox(sb)
	}
	for _, f := range st.Facts {
		if s, ok := f.Subject.(*SessionFact); ok {
			c.routers.recover(s, f.Revision)
		}
	}
	for _, sb := range c.sandboxes.byEnd() {
		for _, d := range sb.conflicts {
			if other := c.sandboxes.byPod[d.pod]; other != nil && other != sb {
				return contradiction(other, sb, d.pod)
			}
		}
		c.retireConflicts(sb)
	}
	return nil
}

// mergeFacts merges the journal into what the objects show. Of each sandbox the higher revision
// counts.
func (c *Core) mergeFacts(st State) {
	there := make(map[PodKey]bool, len(st.Pods))
	for _, p := range st.Pods {
		there[p.Key] = true
	}
	var conflicts []*RetirementFact
	for _, f := range st.Facts {
		switch s := f.Subject.(type) {
		case *SandboxFact:
			c.mergeSandbox(s, there[s.Pod])
		case *RetirementFact:
			c.retirements[s.Pod] = &retirement{revision: f.Revision, durable: true}
			if s.After != "" {
				conflicts = append(conflicts, s)
			}
		}
	}
	for _, f := range conflicts { // an earlier leader found them; retireConflicts renews the intents
		if sb := c.sandboxes.byID[f.After]; sb != nil {
			for _, at := range f.At {
				sb.addConflict(f.Pod, at)
			}
		}
	}
}

// mergeSandbox merges the journaled state of a sandbox into what its object shows. there: its pod exists.
func (c *Core) mergeSandbox(f *SandboxFact, there bool) {
	sb := c.sandboxes.byID[f.ID]
	switch {
	case sb == nil && f.Phase == Released && !there && c.now.Wall.Sub(f.ReleasedAt) > c.cfg.KeepEndedFor:
		// Its record was dropped, and no later fact has overwritten its slot.
		c.emit(Settle{f.Thing(), f.Revision})
		return
	case sb == nil:
		sb = &sandbox{}
		c.sandboxes.byID[f.ID] = sb
	case sb.Pod != f.Pod || sb.IP != f.IP:
		// A claim is never changed, so an allocator did not write one of the two.
		other := f.Sandbox
		if sb.Revision.Less(f.Revision) {
			other = sb.Sandbox
		}
		sb.addConflict(other.Pod, other.IP)
		c.emit(Repaired{Pod: other.Pod, What: "the journal and a Sandbox object name different pods, or addresses, for one sandbox: none of them is used any more"})
	}
	if !sb.Revision.Less(f.Revision) {
		c.emit(Settle{f.Thing(), f.Revision})
		return
	}
	shown := sb.Sandbox
	sb.Sandbox, sb.ungranted = f.Sandbox, f.Ungranted
	sb.LastActive, sb.Workload = shown.LastActive, shown.Workload // the journal does not have them
}

// recoverSandbox recovers a sandbox of an earlier term.
func (c *Core) recoverSandbox(sb *sandbox) {
	c.sandboxes.add(sb)
	if sb.Phase != Ended {
		c.addRoutes(sb)
	}
	c.sandboxes.join(sb)
	c.claims.Recover(claimKey(&sb.Binding), sb.RequestHash, sb.Grant())
	switch sb.Phase {
	case Released, Ended:
		sb.releasedAt = c.now.Boot - c.now.Wall.Sub(sb.ReleasedAt)
		c.claims.Keep(claimKey(&sb.Binding), sb.Grant(), sb.ID, sb.releasedAt)
		if sb.Phase == Ended {
			c.sandboxes.end(sb)
		}
	case Starting, Running, Releasing:
		sb.Phase = max(sb.Phase, Starting)
		sb.asking = sb.ungranted > 0 && sb.Agent.Port != 0
		sb.setTimes(c.now)
		switch {
		case sb.Phase != Running:
		case sb.asking: // the earlier leader may have granted it, and sent its route
			c.idle.Expect(sb.ID)
		default:
			c.recoverActivity(sb)
		}
		c.sandboxes.schedule(sb)
	}
}

func contradiction(one, other *sandbox, pod PodKey) error {
	return fmt.Errorf("core: sandboxes %s and %s are both on record with pod %s (UID %s): this is not of our making; delete the Sandbox object that is wrong", one.ID, other.ID, pod.Name, pod.UID)
}
