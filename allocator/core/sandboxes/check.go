package sandboxes

import (
	"errors"
	"fmt"
	"slices"

	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/core/pods"
)

// Check returns the first contradiction between the tables. It is for tests.
func (t *Table) Check() error {
	holds := map[fact.PodKey]string{}
	live, rejected, ended, deadlines, woken := 0, 0, 0, 0, 0
	for id, sb := range t.byID {
		if sb.ID != id || sb.bound {
			return fmt.Errorf("sandboxes: %s is kept as %s, bound: %v", sb.ID, id, sb.bound)
		}
		if _, listed := slices.BinarySearchFunc(t.live.Of(Everything()), sb.Mark(), byClaim); !listed && sb.Phase == fact.Releasing && sb.how == Rejected {
			rejected++
		} else if sb.Phase < fact.Released {
			live++
		}
		if _, queued := t.deadlines.At(id); queued {
			deadlines++
		}
		if sb.sleep != nil && sb.sleep.place {
			woken++
		}
		if sb.Phase == fact.Ended {
			ended++
		} else if holds[sb.Pod] != "" {
			return fmt.Errorf("sandboxes: pod %s has %s and %s", sb.Pod.Name, id, holds[sb.Pod])
		}
		holds[sb.Pod] = id
		if err := t.check(sb); err != nil {
			return fmt.Errorf("sandboxes: %s in phase %d, which ends as %d: %w", id, sb.Phase, sb.how, err)
		}
	}
	all, gone := len(t.live.Of(Everything())), len(t.gone.Of(Everything()))
	if live != all || len(t.byID)-live-rejected != gone || ended != t.ended.Len() || deadlines != t.deadlines.Len() || woken != t.places.taken {
		return fmt.Errorf("sandboxes: %d live, %d ended, %d deadlines and %d woken by requests, kept are %d, %d, %d and %d",
			live, ended, deadlines, woken, all, t.ended.Len(), t.deadlines.Len(), t.places.taken)
	}
	return errors.Join(t.Notices.Check(), t.deadlines.Check(), t.checkLists(t.live, false), t.checkLists(t.gone, true))
}

func (t *Table) checkLists(l Lists, gone bool) error {
	for sel, list := range l {
		for i, sb := range list {
			selected := sel.Sees(sb.Team) && (sel.Pool == fact.PoolKey{} || sel.Pool == sb.Pool)
			if t.byID[sb.ID] != sb || gone != sb.Over() || !selected || i > 0 && byClaim(list[i-1], sb.Mark()) >= 0 {
				return fmt.Errorf("sandboxes: %s in the list of %v is not known, or not in its place", sb.ID, sel)
			}
		}
	}
	for _, sb := range l.Of(Everything()) {
		for _, sel := range sb.selections() {
			if _, found := slices.BinarySearchFunc(l[sel], sb.Mark(), byClaim); !found {
				return fmt.Errorf("sandboxes: %s is not in the list of %v", sb.ID, sel)
			}
		}
	}
	return nil
}

func (t *Table) check(sb *Sandbox) error {
	p, complete := t.pods.Get(sb.Pod), t.fences.Complete(sb.ID)
	deadline, queued := t.deadlines.At(sb.ID)
	end, reason := sb.Ends()
	use, known := t.idle.Use(sb.ID)
	switch routed := t.pods.Routed(sb.ID); {
	case sb.stopped != (sb.Phase == fact.Stopped) && sb.Lives():
		return fmt.Errorf("it is stopped: %v", sb.stopped)
	case sb.HasPod() && routed != (sb.Phase != fact.Ended && !complete):
		return fmt.Errorf("it has routes: %v", routed)
	case sb.Phase != fact.Ended && p != nil && p.Sandbox() != sb.ID:
		return fmt.Errorf("its pod does not have it")
	case p == nil && sb.HasPod() && (sb.Lives() && !sb.StopsNow() || sb.Phase == fact.Released && complete && !t.pods.Blocked(sb.ID)):
		return fmt.Errorf("its pod is gone")
	case p != nil && sb.HasPod() && sb.Phase < fact.Released && p.State() != pods.Claimed, p != nil && !sb.HasPod() && p.State() != pods.Going, p != nil && sb.Phase == fact.Released && p.State() < pods.Released:
		return fmt.Errorf("its pod is in state %d", p.State())
	case queued && sb.Over():
		return fmt.Errorf("it still has a deadline")
	case reason != "" && sb.Lives() && (!queued || deadline > end):
		return fmt.Errorf("it ends at %v (%s), and is looked at: %v, at %v", end, reason, queued, deadline)
	case known && (sb.Phase != fact.Running || sb.Sleeps()) && sb.Phase != fact.Releasing,
		!known && sb.Phase == fact.Running && !sb.asking && !sb.Sleeps():
		return fmt.Errorf("it has the activity %+v: %v", use, known)
	case !sb.Sleeps() && sb.Phase > fact.Running && sb.Phase < fact.Releasing || sb.Sleeps() && (sb.Over() || sb.Phase < fact.Running && sb.Archive == ""):
		return fmt.Errorf("it sleeps: %v", sb.Sleeps())
	case (sb.how != 0) != (sb.Phase >= fact.Releasing) && sb.Phase < fact.Released:
		return fmt.Errorf("it ends, or does not")
	}
	return nil
}

// Owed returns the effects whose answers a sandbox waits for. It is for tests.
func (sb *Sandbox) Owed() (hook, record bool) {
	neverShown := sb.IsLost() && sb.Phase == fact.Releasing && sb.objectRevision == (fact.Revision{})
	return sb.Phase == fact.Starting && !sb.readying && !sb.IsLost(), sb.objectRevision.Less(sb.Revision) && !neverShown
}

// Waiting has the tokens of the callers of Release. It is for tests.
func (sb *Sandbox) Waiting() []uint64 { return sb.waiters }
