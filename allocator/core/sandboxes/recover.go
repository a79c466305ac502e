package sandboxes

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/core/step"
	"github.com/berth-sandbox/berth/api/activity"
)

// What a new leader learns. First come the objects and the journal, then Recover for each sandbox.

// MergeObject enters what the object of a sandbox shows.
func (t *Table) MergeObject(shown fact.Sandbox) {
	t.byID[shown.ID] = &Sandbox{Sandbox: shown, objectRevision: shown.Revision}
}

// MergeFact merges the journaled state of a sandbox into what its object shows. The higher revision counts. there: its
// pod exists. One that was released more than keepFor ago, without either, has been forgotten.
func (t *Table) MergeFact(f *fact.SandboxFact, there bool, keepFor time.Duration) {
	sb := t.byID[f.ID]
	switch {
	case sb == nil && f.Phase == fact.Released && !there && t.Now.Wall.Sub(f.ReleasedAt) > keepFor:
		// Its record was dropped, and no later fact has overwritten its slot.
		t.Emit(step.Settle{Thing: f.Thing(), Revision: f.Revision})
		return
	case sb == nil:
		sb = &Sandbox{}
		t.byID[f.ID] = sb
	case (sb.Pod != f.Pod || sb.IP != f.IP) && sb.Incarnation == f.Incarnation:
		// A claim is never changed, and a pod that follows a stop has another number. So an allocator did not write one of
		// the two.
		other := f.Sandbox
		if sb.Revision.Less(f.Revision) {
			other = sb.Sandbox
		}
		sb.addConflict(other.Pod, other.IP)
		t.Emit(step.Repaired{Pod: other.Pod, What: "the journal and a Sandbox object name different pods, or addresses, for one sandbox: none of them is used any more"})
	}
	// An allocator of an earlier version writes neither the record nor the object with it, and a pod never loses it. Nor
	// does it write rules, so those beside it count. Of one revision the record counts, not the object.
	egress, network := f.Agent.Egress, f.Network
	switch {
	case sb.Incarnation == f.Incarnation:
		egress = sb.Agent.Egress || f.Agent.Egress
	case f.Revision.Less(sb.Revision): // in another pod
		egress = sb.Agent.Egress
	}
	if !f.Agent.Egress || sb.Agent.Egress && f.Revision.Less(sb.Revision) {
		network = sb.Network
	}
	if !sb.Revision.Less(f.Revision) {
		sb.Agent.Egress, sb.Network = egress, network
		t.Emit(step.Settle{Thing: f.Thing(), Revision: f.Revision})
		return
	}
	shown := sb.Sandbox
	sb.Sandbox, sb.ungranted = f.Sandbox, f.Ungranted
	sb.LastActive, sb.Workload = shown.LastActive, shown.Workload // the journal does not have them
	sb.Agent.Egress, sb.Network = egress, network
}

// MergeConflict notes a pod that an earlier leader has found to conflict with the record of a sandbox.
func (t *Table) MergeConflict(f *fact.RetirementFact) {
	if sb := t.byID[f.After]; sb != nil {
		for _, at := range f.At {
			sb.addConflict(f.Pod, at)
		}
	}
}

// addConflict notes that another record names this pod and address for the sandbox.
func (sb *Sandbox) addConflict(pod fact.PodKey, ip netip.Addr) {
	if d := (Conflict{pod, ip}); !slices.Contains(sb.conflicts, d) {
		sb.conflicts = append(sb.conflicts, d)
	}
}

// Recover enters a sandbox of an earlier term. It may have been used for unseen longer than its object shows.
func (t *Table) Recover(sb *Sandbox, unseen time.Duration) error {
	if other := t.byPod[sb.Pod]; other != nil {
		return contradiction(other, sb, sb.Pod)
	}
	t.add(sb)
	if sb.stopped = sb.Phase == fact.Stopped; sb.HasPod() && sb.Phase != fact.Ended {
		t.addRoutes(sb)
	}
	switch sb.Phase {
	case fact.Released, fact.Ended:
		sb.releasedAt = t.Now.Boot - t.Now.Wall.Sub(sb.ReleasedAt)
		if sb.Phase == fact.Ended {
			sb.elem = t.ended.PushBack(sb)
		}
	case fact.FallingAsleep, fact.Asleep, fact.Waking, fact.Stopped:
		sb.sleep = &sleep{}
		sb.setTimes(t.Now)
		t.setStop(sb)
		t.idle.Expect(sb.ID)
		t.schedule(sb)
	case fact.Starting, fact.Running, fact.Releasing:
		sb.Phase = max(sb.Phase, fact.Starting)
		sb.asking = sb.ungranted > 0 && sb.Agent.Port != 0
		if sb.Phase == fact.Starting && sb.Archive != "" {
			sb.sleep = &sleep{}
			sb.sleep.toWake(t.Now.Boot)
		}
		sb.setTimes(t.Now)
		switch {
		case sb.Phase != fact.Running:
		case sb.asking: // the earlier leader may have granted it, and sent its route
			t.idle.Expect(sb.ID)
		default:
			t.recoverActivity(sb, unseen)
		}
		t.schedule(sb)
	}
	return nil
}

// recoverActivity reads the activity of a running sandbox from its object. It may have been used
// later, through routers that never report to this leader.
func (t *Table) recoverActivity(sb *Sandbox, unseen time.Duration) {
	last, kind := sb.ClaimedAt, activity.Claim
	if sb.LastActive.After(last) {
		last, kind = sb.LastActive, activity.Record
	}
	t.markRunning(sb, min(t.Now.Boot, t.Now.BootOf(last)+unseen), kind)
}

// RetireConflicts takes the pods out of use for good that conflicting records name for a sandbox.
func (t *Table) RetireConflicts(sb *Sandbox) error {
	at := map[fact.PodKey][]netip.Addr{}
	var conflicting []fact.PodKey
	for _, d := range sb.conflicts {
		if other := t.byPod[d.Pod]; other != nil && other != sb {
			return contradiction(other, sb, d.Pod)
		}
		if len(at[d.Pod]) == 0 {
			conflicting = append(conflicting, d.Pod)
		}
		at[d.Pod] = append(at[d.Pod], d.IP)
	}
	for _, key := range conflicting {
		t.pods.RetireConflict(key, sb.ID, at[key])
	}
	return nil
}

// goneBefore is the message of a PodDeleted that no leader has observed.
const goneBefore = "the pod did not exist any more when this allocator began to lead"

// Resume goes on with a sandbox of an earlier term, when its pod was looked for. It reports whether its fence is to
// begin, because Found has not done that.
func (t *Table) Resume(sb *Sandbox) (fence bool) {
	if sb.objectRevision.Less(sb.Revision) {
		t.Show(sb)
	}
	switch gone := t.pods.Get(sb.Pod) == nil; {
	case sb.Phase == fact.Ended, sb.Phase == fact.Stopped:
	case sb.Phase == fact.Released && gone:
		return true
	case sb.Phase != fact.Released && len(sb.conflicts) > 0:
		t.End(sb, Lost, fact.Because(fact.ReasonDuplicate))
	case gone:
		t.End(sb, Lost, fact.Cause{Reason: fact.ReasonPodDeleted, Message: goneBefore})
	case sb.Asking():
		t.Emit(step.Configure{Sandbox: sb.Sandbox, Ask: true})
	case sb.Phase == fact.Starting:
		t.Emit(step.StartSandbox{Sandbox: sb.Sandbox})
	case sb.Sleeps() && sb.Lives():
		t.setStop(sb) // its pod was not there before
		t.schedule(sb)
		t.recoverSleep(sb)
	}
	return false
}

func contradiction(one, other *Sandbox, pod fact.PodKey) error {
	return fmt.Errorf("core: sandboxes %s and %s are both on record with pod %s (UID %s): this is not of our making; delete the Sandbox object that is wrong", one.ID, other.ID, pod.Name, pod.UID)
}
