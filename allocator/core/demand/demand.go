package demand

import (
	"cmp"
	"slices"
	"time"
)

const (
	// History is for how long, at least, a pool stays ready for its busiest stretch. At most it is a minute more.
	History = 15 * time.Minute
	// Spare is for how long, at least, the pods that waiting claims lacked are kept when the claims have gone. At
	// most it is twice that.
	Spare = 30 * time.Second
	// FirstStart is the assumed start time of pods before one was measured.
	FirstStart = 5 * time.Second
	// MaxStart bounds the start time that counts.
	MaxStart = 2 * time.Minute

	slot    = time.Second // the unit of stretches
	slots   = int64(MaxStart / slot)
	period  = time.Minute // the unit of the history
	periods = int64(History/period) + 1

	// Of the last measured start times, the one of rank slow from the longest counts.
	measured = 32
	slow     = 4
)

// Limits are the least and the most warm pods that the owner of a pool asks for. A pool whose Max is not above its Min
// has Min. Spare bounds the pods that are kept for claims that have gone.
type Limits struct{ Min, Max, Spare int }

// Target is what a pool should have.
type Target struct {
	// Warm is how many warm pods it keeps.
	Warm int
	// Lacking is how many pods more it creates for the claims that wait.
	Lacking int
	// Spare is how many more pods it does not delete, although it would not create them.
	Spare int
}

// Tracker follows the demand for the pods of one pool. The zero value has no history. Times are those of one clock,
// and must not go back.
type Tracker struct {
	claims [slots]int   // pods that claims asked for, by slot modulo slots
	slot   int64        // the latest
	busy   int          // pods asked for in the stretch that ends with slot
	peaks  [periods]int // the most that busy was, by period modulo periods
	period int64        // the latest

	starts [measured]time.Duration // the last start times
	n      int                     // how many were measured

	found      int // see Found
	foundUntil time.Duration
	lacked     [2]int // the most pods that were lacking in this interval of Spare, and in the one before
	interval   int64
}

// Claimed notes that pods were asked for.
func (t *Tracker) Claimed(now time.Duration, pods int) {
	t.advance(now)
	t.claims[t.slot%slots] += pods
	t.busy += pods
	t.peaks[t.period%periods] = max(t.peaks[t.period%periods], t.busy)
}

// Started notes how long a pod took from its creation until it was warm.
func (t *Tracker) Started(took time.Duration) {
	t.starts[t.n%measured] = took
	t.n++
}

// Found has a pool keep idle pods for a History, within its limits. A new leader knows no earlier claims, and starts
// from the idle pods that it finds. lacking is how many of them the claims of an earlier leader may have lacked. They
// are kept for Spare, beyond the limits too.
func (t *Tracker) Found(now time.Duration, idle, lacking int) {
	t.found, t.foundUntil = idle, now+History
	t.lack(now, lacking)
}

// Target returns what the pool should have. lacking is how many pods the waiting claims still need.
func (t *Tracker) Target(now time.Duration, limits Limits, lacking int) Target {
	t.lack(now, min(lacking, limits.Spare))
	t.advance(now)
	want := slices.Max(t.peaks[:])
	if now < t.foundUntil {
		want = max(want, t.found)
	}
	return Target{
		Warm:    max(limits.Min, min(want, limits.Max)),
		Lacking: lacking,
		Spare:   max(0, slices.Max(t.lacked[:])-lacking),
	}
}

// lack notes how many pods are lacking.
func (t *Tracker) lack(now time.Duration, pods int) {
	switch at := int64(now / Spare); at - t.interval {
	case 0:
	case 1:
		t.lacked, t.interval = [2]int{0, t.lacked[0]}, at
	default:
		t.lacked, t.interval = [2]int{}, at
	}
	t.lacked[0] = max(t.lacked[0], pods)
}

// advance begins the slot and the period of a time.
func (t *Tracker) advance(now time.Duration) {
	if at := int64(now / slot); at != t.slot {
		clear := min(at-t.slot, slots)
		for i := range clear {
			t.claims[(at-i)%slots] = 0
		}
		t.slot, t.busy = at, 0
		for i := range min(t.stretch(), at+1) {
			t.busy += t.claims[(at-i)%slots]
		}
	}
	if at := int64(now / period); at != t.period {
		for i := range min(at-t.period, periods) {
			t.peaks[(at-i)%periods] = 0
		}
		t.period = at
		t.peaks[at%periods] = t.busy
	}
}

// Start is the start time that counts; 0: none was measured.
func (t *Tracker) Start() time.Duration {
	n := min(t.n, measured)
	if n == 0 {
		return 0
	}
	known := t.starts
	slices.Sort(known[:n])
	return known[max(0, n-slow)]
}

// stretch is the start time that counts, in slots.
func (t *Tracker) stretch() int64 {
	return min(int64(cmp.Or(t.Start(), FirstStart)/slot)+1, slots)
}
