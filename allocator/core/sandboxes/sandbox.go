package sandboxes

import (
	"cmp"
	"container/list"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/core/step"
)

// How a sandbox ends: see the package comment. The zero How is that of one that does not end.
type How int

// How a sandbox ends. Of several calls of End the last one in this order counts.
const (
	Serving How = iota + 1
	Lost
	Rejected
	Idle
)

// Sandbox is a sandbox. Only its Table changes it.
type Sandbox struct {
	fact.Sandbox

	bound bool // its claim is not granted
	// doomed is the cause for which a sandbox must end that is bound, or that cannot end yet: see Table.defers.
	doomed   *fact.Cause
	how      How  // since End
	readying bool // the fact that it runs is on its way into the journal
	ran      bool // it was running before its release began
	sleep    *sleep
	// stopped: no pod serves it, and routers have no route of it. Pod and IP are those of its former pod.
	stopped bool
	// failures is how often it has failed to fall asleep since it was asleep last. notBefore is when it may try to sleep
	// at its end.
	failures int
	// stopAt is when it is to be stopped if it is asleep then, on the boot clock; 0: never.
	stopAt time.Duration
	// arriving: the fact that it runs again is on its way into the journal.
	arriving  bool
	notBefore time.Duration
	// The times of the same names in Binding and Sandbox, on the boot clock; 0: none. A step of
	// the wall clock must not end a sandbox, or keep it for ever.
	endAt, lifetimeEnd, startBy, releasedAt time.Duration
	// pendingTimeouts is how many changes of its end are on their way into the journal. nextEnd is the
	// end that the last one sets, and nextEndAt the same on the boot clock; 0: none.
	pendingTimeouts int
	nextEnd         time.Time
	nextEndAt       time.Duration
	// pendingRules is how many changes of its rules are on their way into the journal. nextNetwork are those that the
	// last one sets.
	pendingRules int
	nextNetwork  fact.EgressRules
	// ungranted is SandboxFact.Ungranted of an earlier term: it is not known whether the claim was granted. The object
	// is not written then, because it says that the claim was. asking: the agent has not answered whether it
	// is configured. No router gets the route before.
	ungranted int
	asking    bool
	// dueAt is when it was to end, on the boot clock, if that is why its release began; else 0.
	dueAt time.Duration
	// durableAt is when the writer learned that its release is durable, on the boot clock; 0: in
	// an earlier term, or not yet.
	durableAt      time.Duration
	objectRevision fact.Revision // what the Sandbox object is known to show
	// deleting: a user has deleted the object. A finalizer keeps it while needsObject. dropped: it was deleted, and must
	// not be written again.
	deleting, dropped bool
	waiters           []uint64 // tokens of callers of Release
	// conflicts are the pods and addresses that conflicting records name for it. None of these
	// pods serves it. Its fence covers all of them, because routes are keyed by sandbox ID.
	conflicts []Conflict
	elem      *list.Element // in Table.ended
}

// Conflict is a pod that one record names for a sandbox while another record names another pod.
type Conflict struct {
	Pod fact.PodKey
	IP  netip.Addr
}

// Conflicts are the pods and addresses that conflicting records name for the sandbox.
func (sb *Sandbox) Conflicts() []Conflict { return sb.conflicts }

// addresses are those to which routers may send the requests of a sandbox.
func (sb *Sandbox) addresses() []netip.Addr {
	all := []netip.Addr{sb.IP}
	for _, d := range sb.conflicts {
		all = append(all, d.IP)
	}
	return all
}

// Over reports whether the release of the sandbox is durable.
func (sb *Sandbox) Over() bool { return sb.Phase == fact.Released || sb.Phase == fact.Ended }

// Lives reports whether the sandbox starts, runs or sleeps, and its end is not on its way.
func (sb *Sandbox) Lives() bool { return sb.Phase >= fact.Starting && sb.Phase < fact.Releasing }

// Listed reports whether calls list the sandbox as live: it starts, runs or sleeps, and its pod serves it.
func (sb *Sandbox) Listed() bool {
	return sb.Routable() || sb.Lives() && !sb.IsLost() && (sb.Phase == fact.Starting || sb.Sleeps())
}

// Routable reports whether routers may receive its route.
func (sb *Sandbox) Routable() bool {
	return (sb.Phase == fact.Running || sb.Phase == fact.Releasing && sb.ran) && sb.how <= Serving && !sb.bound && !sb.asking && !sb.Sleeps()
}

// IsLost reports whether its pod cannot serve it any more.
func (sb *Sandbox) IsLost() bool { return sb.how == Lost || sb.how == Rejected }

// FoundIdle reports whether a verdict has found it idle.
func (sb *Sandbox) FoundIdle() bool { return sb.how == Idle }

// HasPod reports whether its pod serves it, or did that until its release.
func (sb *Sandbox) HasPod() bool { return !sb.stopped }

// Ran reports whether it was running before its release began.
func (sb *Sandbox) Ran() bool { return sb.ran }

// Bound reports whether its claim is not granted yet. Doomed is the cause for which it must end then; nil: none.
func (sb *Sandbox) Bound() bool { return sb.bound }

// Doomed is the cause for which a bound sandbox must end; nil: there is none.
func (sb *Sandbox) Doomed() *fact.Cause { return sb.doomed }

// Asking reports whether an agent that an earlier leader may have configured has not answered yet.
func (sb *Sandbox) Asking() bool { return sb.asking && sb.Phase < fact.Releasing && !sb.StopsNow() }

// Ungranted is how many sandboxes its claim needs, if it is not known whether an earlier leader has granted it; else 0.
func (sb *Sandbox) Ungranted() int { return sb.ungranted }

// DurableAt is when the writer learned that its release is durable, on the boot clock; 0: in an earlier term, or not yet.
func (sb *Sandbox) DurableAt() time.Duration { return sb.durableAt }

// ReleasedSince is when its release was known to be durable, on the boot clock.
func (sb *Sandbox) ReleasedSince() time.Duration { return sb.releasedAt }

// TakeWaiters returns the tokens of the callers of Release, and forgets them.
func (sb *Sandbox) TakeWaiters() []uint64 {
	waiters := sb.waiters
	sb.waiters = nil
	return waiters
}

// Waited reports whether a caller of Release waits.
func (sb *Sandbox) Waited() bool { return len(sb.waiters) > 0 }

// Shown reports whether its object shows its latest revision, and was not deleted.
func (sb *Sandbox) Shown() bool { return !sb.objectRevision.Less(sb.Revision) && !sb.dropped }

// Mark is the position of a sandbox in lists. It does not change.
func (sb *Sandbox) Mark() Mark { return Mark{sb.ClaimedAt, sb.ID} }

// next returns the state that the next fact of a sandbox starts from: its state, with the changes
// that are on their way into the journal.
func (sb *Sandbox) next() fact.Sandbox {
	next := sb.Sandbox
	next.EndAt, next.Network = sb.nextEnd, sb.nextNetwork
	switch {
	case sb.readying:
		next.Phase, next.AsleepAt, next.Wakeable = fact.Running, time.Time{}, false
	case sb.sleep != nil && sb.sleep.pending != 0:
		next.Phase = sb.sleep.pending
	}
	return next
}

// Mark is a position in a list of sandboxes: after a sandbox of this ID that was claimed then. The
// sandbox need not exist. The zero Mark is the beginning of the list in either order.
type Mark struct {
	ClaimedAt time.Time
	ID        string
}

// Order is an order of a list of sandboxes, by the time of the claim.
type Order bool

// The orders.
const (
	OldestFirst Order = false
	NewestFirst Order = true
)

// byClaim orders sandboxes by Mark.
func byClaim(sb *Sandbox, m Mark) int { return sb.Mark().Compare(m) }

// Compare orders marks in microseconds. The journal and the objects keep microseconds, so the next
// leader has the same order.
func (m Mark) Compare(o Mark) int {
	return cmp.Or(cmp.Compare(m.ClaimedAt.UnixMicro(), o.ClaimedAt.UnixMicro()), strings.Compare(m.ID, o.ID))
}

// Lists has sandboxes in the order of their marks: for each selection that a call can make, so that a
// call passes over no others.
type Lists map[step.Selection][]*Sandbox

// Everything selects all sandboxes.
func Everything() step.Selection { return step.Selection{Scope: step.Scope{All: true}} }

// selections are those that a sandbox belongs to.
func (sb *Sandbox) selections() [4]step.Selection {
	all, team := step.Scope{All: true}, step.Scope{Team: sb.Team}
	return [...]step.Selection{{Scope: all}, {Scope: all, Pool: sb.Pool}, {Scope: team}, {Scope: team, Pool: sb.Pool}}
}

// Of returns the sandboxes of a selection.
func (l Lists) Of(sel step.Selection) []*Sandbox {
	if sel.All {
		sel.Team = ""
	}
	return l[sel]
}

// After returns the sandboxes of a selection that follow a mark in an order, and were claimed since a time.
// They are in the order of their marks.
func (l Lists) After(sel step.Selection, since time.Time, m Mark, order Order) []*Sandbox {
	list := l.Of(sel)
	if at, found := slices.BinarySearchFunc(list, m, byClaim); order == NewestFirst && m != (Mark{}) {
		list = list[:at]
	} else if order == OldestFirst {
		if found {
			at++
		}
		list = list[at:]
	}
	at, _ := slices.BinarySearchFunc(list, Mark{ClaimedAt: since}, byClaim)
	return list[at:]
}

// Teams calls f with each team that has sandboxes, in no order.
func (l Lists) Teams(f func(team string)) {
	for sel := range l {
		if !sel.All && sel.Pool == (fact.PoolKey{}) {
			f(sel.Team)
		}
	}
}

func (l Lists) add(sb *Sandbox) {
	for _, sel := range sb.selections() {
		at, _ := slices.BinarySearchFunc(l[sel], sb.Mark(), byClaim)
		l[sel] = slices.Insert(l[sel], at, sb)
	}
}

func (l Lists) remove(sb *Sandbox) {
	for _, sel := range sb.selections() {
		at, found := slices.BinarySearchFunc(l[sel], sb.Mark(), byClaim)
		switch {
		case !found:
		case len(l[sel]) == 1:
			delete(l, sel)
		default:
			l[sel] = slices.Delete(l[sel], at, at+1)
		}
	}
}
