package sandboxes

import (
	"cmp"
	"slices"
	"strings"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/core/pods"
	"github.com/berth-sandbox/berth/allocator/core/step"
)

// Pressure: a pool bounds how many of its sandboxes are asleep, and some of those above that are stopped. Each look counts
// them anew, so nothing is kept for it, and a new leader, a change of the pool and a stop that fails need nothing of their
// own.

const (
	// relieveEvery is the interval between two looks.
	relieveEvery = time.Second
	// maxPressed bounds the stops that are under way in a pool when pressure adds one. The object store takes four archives
	// at one time, two of them of one team, and a stop that waits for that too long fails.
	maxPressed = 4
)

// RelieveDue reports whether Relieve is due for all pools.
func (t *Table) RelieveDue() bool {
	due := t.Now.Boot >= t.relieveAt
	if due {
		t.relieveAt = t.Now.Boot + relieveEvery
	}
	return due
}

// Relieve has sandboxes of a pool stopped while more are asleep than may be: one of the team that has the most asleep
// there, and of that team the one that has slept for longest. Sandboxes without a team count as one team.
//
// A stop that is under way counts as done. One that has failed and is to be tried again later has no other sandbox stopped
// instead until then, but its sandbox counts for its team: a team whose stops fail takes nothing from others. A pool that
// may make no pods has none stopped, because nothing could wake them.
func (t *Table) Relieve(g *pods.Group) {
	if g.MaxAsleep == 0 || g.Deleting || g.Refused != "" {
		return
	}
	live := t.live.Of(step.Selection{Scope: step.Scope{All: true}, Pool: g.Key})
	over, places := -g.MaxAsleep, maxPressed
	for _, sb := range live {
		switch {
		case sb.Phase != fact.Asleep:
		case sb.sleep.stop:
			places--
		case sb.staysAsleep() && !t.backsOff(sb):
			over++
		}
	}
	if over = min(over, places); over <= 0 {
		return
	}
	asleep, fit := map[string]int{}, []*Sandbox(nil)
	for _, sb := range live {
		if sb.staysAsleep() {
			asleep[sb.Team]++
			if sb.sleep.archive == nil && !t.backsOff(sb) {
				fit = append(fit, sb)
			}
		}
	}
	for range min(over, len(fit)) {
		next := slices.MinFunc(fit, func(a, b *Sandbox) int {
			return cmp.Or(cmp.Compare(asleep[b.Team], asleep[a.Team]), a.AsleepAt.Compare(b.AsleepAt), strings.Compare(a.ID, b.ID))
		})
		t.Stop(next, 0)
		asleep[next.Team]--
		fit = slices.DeleteFunc(fit, func(sb *Sandbox) bool { return sb == next })
	}
}

// staysAsleep reports whether a sandbox is asleep, and is about neither to wake nor to be stopped.
func (sb *Sandbox) staysAsleep() bool {
	return sb.Phase == fact.Asleep && sb.sleep.pending == 0 && !sb.sleep.wake && !sb.sleep.stop
}

// backsOff reports whether the last stop of a sandbox that is asleep has failed, and the next one is not due yet.
func (t *Table) backsOff(sb *Sandbox) bool { return sb.sleep.tries > 0 && t.Now.Boot < sb.notBefore }
