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
	// maxPressed bounds the stops for pressure that are under way in all pools. The object store takes four archives at one
	// time, two of them of one team, and a stop that waits for that too long fails. Stops of other causes do not count: a
	// team could have the bounds of all pools not kept with calls.
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

// pressed is a pool in which more sandboxes are asleep than may be.
type pressed struct {
	over, underWay int            // how many are to be stopped, and are being stopped
	asleep         map[string]int // by team
	fit            []*Sandbox
	next           *Sandbox // of fit, the one to be stopped first
}

// Relieve has sandboxes of pools stopped while more are asleep there than may be: of a pool one of the team that has
// the most asleep there, and of that team the one that has slept for longest. Sandboxes without a team count as one
// team. The next place goes to the pool that has the fewest stops under way, and among such pools to the one whose
// sandbox has slept for longest. So no pool takes all the places while another one waits.
//
// A stop that is under way counts as done. One that has failed and is to be tried again later has no other sandbox stopped
// instead until then, but its sandbox counts for its team: a team whose stops fail takes nothing from others. A pool that
// may make no pods has none stopped, because nothing could wake them.
func (t *Table) Relieve(groups []*pods.Group) {
	var all []*pressed
	for _, g := range groups {
		if p := t.pressureOf(g); p.over > 0 && p.choose() {
			all = append(all, p)
		}
	}
	if len(all) == 0 {
		return
	}
	places := maxPressed
	for _, sb := range t.live.Of(Everything()) {
		if sb.isBeingStopped() && sb.sleep.stop == step.StopForPressure {
			places--
		}
	}
	for ; places > 0 && len(all) > 0; places-- {
		p := slices.MinFunc(all, func(a, b *pressed) int {
			return cmp.Or(cmp.Compare(a.underWay, b.underWay), bySleep(a.next, b.next))
		})
		t.Stop(p.next, 0, step.StopForPressure)
		p.asleep[p.next.Team]--
		p.fit = slices.DeleteFunc(p.fit, func(sb *Sandbox) bool { return sb == p.next })
		p.underWay++
		if p.over--; p.over == 0 || !p.choose() {
			all = slices.DeleteFunc(all, func(other *pressed) bool { return other == p })
		}
	}
}

// pressureOf looks at a pool.
func (t *Table) pressureOf(g *pods.Group) *pressed {
	p := &pressed{over: -g.MaxAsleep, asleep: map[string]int{}}
	if g.MaxAsleep == 0 || g.Deleting || g.Refused != "" {
		return p
	}
	live := t.live.Of(step.Selection{Scope: step.Scope{All: true}, Pool: g.Key})
	for _, sb := range live {
		switch {
		case sb.isBeingStopped():
			p.underWay++
		case sb.staysAsleep() && !t.backsOff(sb):
			p.over++
		}
	}
	if p.over <= 0 {
		return p
	}
	for _, sb := range live {
		if sb.staysAsleep() {
			p.asleep[sb.Team]++
			if sb.sleep.archive == nil && !t.backsOff(sb) {
				p.fit = append(p.fit, sb)
			}
		}
	}
	return p
}

// choose sets next. It returns false if no sandbox is fit.
func (p *pressed) choose() bool {
	if len(p.fit) == 0 {
		return false
	}
	p.next = slices.MinFunc(p.fit, func(a, b *Sandbox) int {
		return cmp.Or(cmp.Compare(p.asleep[b.Team], p.asleep[a.Team]), bySleep(a, b))
	})
	return true
}

// bySleep orders sandboxes by when they fell asleep.
func bySleep(a, b *Sandbox) int {
	return cmp.Or(a.AsleepAt.Compare(b.AsleepAt), strings.Compare(a.ID, b.ID))
}

// isBeingStopped reports whether a sandbox is asleep and its files are archived for a stop, or are to be.
func (sb *Sandbox) isBeingStopped() bool { return sb.Phase == fact.Asleep && sb.sleep.stop != "" }

// staysAsleep reports whether a sandbox is asleep, and is about neither to wake nor to be stopped.
func (sb *Sandbox) staysAsleep() bool {
	return sb.Phase == fact.Asleep && sb.sleep.pending == 0 && !sb.sleep.wake && sb.sleep.stop == ""
}

// backsOff reports whether the last stop of a sandbox that is asleep has failed, and the next one is not due yet.
func (t *Table) backsOff(sb *Sandbox) bool { return sb.sleep.tries > 0 && t.Now.Boot < sb.notBefore }
