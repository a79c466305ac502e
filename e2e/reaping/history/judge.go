package history

import (
	"cmp"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/api/apierror"
)

const (
	// near is how near to a deadline a request counts as sent near it.
	near = 200 * time.Millisecond
	// driftMost is how far the machine's clocks may drift apart in a run. What Berth takes
	// for the end of a use is later than it was by more than that.
	driftMost = 20 * time.Millisecond
	// Idle is the reason of a release for being idle.
	Idle = core.ReasonIdle
)

// What of requests that are not followed to their end.
const Abandoned = "abandoned"

// Verdict is what a history comes down to.
type Verdict struct {
	// Mismatches are what must never be, each with the word for it first.
	Mismatches []string
	// Claims were answered. Sandboxes are on record, more if answers were lost.
	Claims, Sandboxes int
	// Reaps are sandboxes that were released for being idle, and whose last use is known;
	// Troubled those of them in whose last seconds, from the last use to the verdict,
	// something was wrong.
	Reaps, Troubled int
	// Near are requests that were sent within 200 ms of the moment at which their sandbox
	// would have been idle for its timeout, by outcome; Verge those that were sent within
	// 200 ms of the verdict.
	Near, Verge map[string]int
	// Requests are all, by outcome, and Received what pods received, by what it was. Long
	// are those of them that were in progress for longer than the idle timeout.
	Requests, Received map[string]int
	Long               int
	// KeepAlives were answered with 204.
	KeepAlives int
	// Late is for how long sandboxes were idle beyond their timeout when they were
	// released, Told when the first request was answered so; while nothing was wrong.
	// Ascending.
	Late, Told []time.Duration
	// Faults by what was done, and Failed: what could not be.
	Faults, Failed map[string]int
}

// Total adds up.
func Total(m map[string]int) (sum int) {
	for _, n := range m {
		sum += n
	}
	return sum
}

// String is the summary that people read.
func (v Verdict) String() string {
	var b strings.Builder
	counts := func(m map[string]int) string {
		var all []string
		for _, k := range slices.Sorted(maps.Keys(m)) {
			all = append(all, fmt.Sprintf("%s %d", k, m[k]))
		}
		return strings.Join(all, ", ")
	}
	fmt.Fprintf(&b, "sandboxes   %d, %d of them answered\n", v.Sandboxes, v.Claims)
	fmt.Fprintf(&b, "reaps       %d, %d of them while something was wrong\n", v.Reaps, v.Troubled)
	fmt.Fprintf(&b, "requests    %d: %s\n", Total(v.Requests), counts(v.Requests))
	fmt.Fprintf(&b, "received    %d by pods: %s; %d for longer than the idle timeout; %d keep-alives\n", Total(v.Received), counts(v.Received), v.Long, v.KeepAlives)
	fmt.Fprintf(&b, "near        %d within 200 ms of the deadline: %s\n", Total(v.Near), counts(v.Near))
	fmt.Fprintf(&b, "verge       %d within 200 ms of the verdict: %s\n", Total(v.Verge), counts(v.Verge))
	fmt.Fprintf(&b, "lateness    of the verdict p50 %v p99 %v of %d; of the first request that was told p50 %v p99 %v of %d\n",
		at(v.Late, 50), at(v.Late, 99), len(v.Late), at(v.Told, 50), at(v.Told, 99), len(v.Told))
	fmt.Fprintf(&b, "faults      %s\n", counts(v.Faults))
	if len(v.Failed) > 0 {
		fmt.Fprintf(&b, "not done    %s\n", counts(v.Failed))
	}
	fmt.Fprintf(&b, "mismatches  %d", len(v.Mismatches))
	return b.String()
}

// at is a percentile of what is ascending.
func at(all []time.Duration, percent int) time.Duration {
	if len(all) == 0 {
		return 0
	}
	return all[min(len(all)*percent/100, len(all)-1)].Round(time.Millisecond)
}

// fate is what is known of one sandbox.
type fate struct {
	id            string
	claim, record *Event
	used          []*Event // in the order in which they began
	requests      []*Event
	// released: it was, for being idle, at verdict.
	released bool
	verdict  time.Duration
}

type judge struct {
	run       Run
	v         Verdict
	sandboxes map[string]*fate
	faults    []*Event
	lastFault time.Duration // the end of it
}

// Judge judges a whole history: nothing is in progress any more.
func Judge(run Run, events []Event) Verdict {
	j := &judge{run: run, sandboxes: map[string]*fate{}, v: Verdict{
		Near: map[string]int{}, Verge: map[string]int{}, Requests: map[string]int{}, Received: map[string]int{}, Faults: map[string]int{}, Failed: map[string]int{},
	}}
	for i := range events {
		j.sort(&events[i])
	}
	for _, id := range slices.Sorted(maps.Keys(j.sandboxes)) {
		f := j.sandboxes[id]
		slices.SortStableFunc(f.used, func(a, b *Event) int { return cmp.Compare(a.Began, b.Began) })
		j.released(f)
		j.reaped(f)
		for _, r := range f.requests {
			j.answered(f, r)
		}
	}
	slices.Sort(j.v.Late)
	slices.Sort(j.v.Told)
	return j.v
}

func (j *judge) mismatch(format string, args ...any) {
	j.v.Mismatches = append(j.v.Mismatches, fmt.Sprintf(format, args...))
}

// sort puts an event to what it is about, and counts it.
func (j *judge) sort(e *Event) {
	switch e.Kind {
	case Fault:
		j.v.Faults[e.What]++
		if e.Error != "" {
			j.v.Failed[e.What]++
		}
		j.faults = append(j.faults, e)
		j.lastFault = max(j.lastFault, e.Ended)
		return
	case Clock:
		if drift := (e.Wall.Sub(j.run.Wall) - (e.Began - j.run.Boot)).Abs(); drift > driftMost {
			j.mismatch("clock: the machine's wall clock has moved by %v: nothing is known", drift)
		}
		return
	}
	f := j.sandboxes[e.Sandbox]
	if f == nil {
		f = &fate{id: e.Sandbox}
		j.sandboxes[e.Sandbox] = f
	}
	switch e.Kind {
	case Claim:
		j.v.Claims++
		f.claim = e
		f.used = append(f.used, e)
	case Record:
		j.v.Sandboxes++
		f.record = e
	case KeepAlive:
		if e.Code == http.StatusNoContent {
			j.v.KeepAlives++
			f.used = append(f.used, e)
		}
	case Received:
		j.v.Received[e.What]++
		f.used = append(f.used, e)
	case Request:
		j.v.Requests[outcome(e)]++
		f.requests = append(f.requests, e)
	}
}

// usedUntil is the end of the use. Of calls it is not known when they had their effect:
// not before they began.
func usedUntil(e *Event) time.Duration {
	if e.Kind == Received {
		return e.Ended
	}
	return e.Began
}

// lastUse is the latest moment, not after t, at which a sandbox was in use.
func (f *fate) lastUse(t time.Duration) (last time.Duration, by *Event) {
	for _, u := range f.used {
		if u.Began > t {
			break
		}
		if until := min(t, usedUntil(u)); by == nil || until >= last {
			last, by = until, u
		}
	}
	return last, by
}

// quiet reports whether nothing was wrong from one moment to another, nor for a while
// before.
func (j *judge) quiet(from, to time.Duration) bool {
	return !slices.ContainsFunc(j.faults, func(e *Event) bool { return e.Began <= to && e.Ended+j.run.Settle >= from })
}

// released finds out when a sandbox was released. Of what the record can mean, as many
// moments as there are offsets, the first that is after the claim is meant.
func (j *judge) released(f *fate) {
	switch {
	case f.record == nil:
		if f.claim != nil {
			j.mismatch("lost: sandbox %s was answered and has no record", f.id)
		} else {
			j.mismatch("lost: sandbox %s was answered by nobody and has no record", f.id)
		}
		return
	case f.record.Released.IsZero():
		j.mismatch("never reaped: sandbox %s", f.id)
		return
	case f.claim == nil && f.record.Reason == core.ReasonAbandoned: // the claim's caller had gone
		return
	case f.record.Reason != Idle:
		j.mismatch("other reason: sandbox %s was released: %s", f.id, f.record.Reason)
		return
	case f.claim == nil: // nobody has ever heard of it
		return
	}
	for _, offset := range j.run.Offsets {
		moment := j.run.Boot + f.record.Released.Sub(j.run.Wall) - offset
		if moment >= f.claim.Began && (!f.released || moment < f.verdict) {
			f.released, f.verdict = true, moment
		}
	}
	if !f.released {
		j.mismatch("clock: sandbox %s was released at %v, which is before its claim on every clock", f.id, f.record.Released)
	}
}

// reaped judges the release.
func (j *judge) reaped(f *fate) {
	if !f.released {
		return
	}
	j.v.Reaps++
	timeout := f.claim.IdleTimeout
	last, by := f.lastUse(f.verdict)
	idle := f.verdict - last
	if idle < timeout {
		j.mismatch("false reap: sandbox %s, with an idle timeout of %v, was released at %v, %v after %s", f.id, timeout, f.verdict, idle, describe(by))
	}
	for _, u := range f.used {
		if u.Began > f.verdict {
			j.mismatch("after the verdict: sandbox %s was released at %v, %v before %s", f.id, f.verdict, u.Began-f.verdict, describe(u))
		}
		if u.Kind == Received {
			if u.Ended-u.Began > timeout {
				j.v.Long++
			}
			if u.Address != f.record.Address {
				j.mismatch("wrong pod: sandbox %s is at %s: %s", f.id, f.record.Address, describe(u))
			}
		}
	}
	// When a fault ends, what it has left may take its time.
	from := last + timeout
	if late := f.verdict - max(from, j.lastFaultBefore(f.verdict)); late > j.run.Guard {
		j.mismatch("never reaped: sandbox %s was released %v later than it might have been", f.id, late)
	}
	if j.quiet(last, f.verdict) {
		j.v.Late = append(j.v.Late, f.verdict-from)
	} else {
		j.v.Troubled++
	}
	var told *Event
	for _, r := range f.requests {
		if r.Code == http.StatusGone && (told == nil || r.Ended < told.Ended) {
			told = r
		}
	}
	if told != nil && j.quiet(last, told.Ended) {
		j.v.Told = append(j.v.Told, told.Ended-from)
	}
}

// lastFaultBefore is the latest moment, not after t, at which a fault was going on.
func (j *judge) lastFaultBefore(t time.Duration) (last time.Duration) {
	for _, e := range j.faults {
		if e.Began <= t {
			last = max(last, min(e.Ended, t))
		}
	}
	return last
}

// outcome is what became of a request.
func outcome(r *Event) string {
	switch {
	case r.What == Abandoned:
		return "abandoned"
	case r.Code == 0:
		return "no answer"
	case r.Reason != "":
		return fmt.Sprintf("%d %s", r.Code, r.Reason)
	case r.Error != "":
		return fmt.Sprintf("%d, cut short", r.Code)
	}
	return "answered"
}

// answered judges a request by its answer.
func (j *judge) answered(f *fate, r *Event) {
	got := outcome(r)
	gone := r.Code == http.StatusGone && r.Reason == string(apierror.SandboxGone)
	if last, by := f.lastUse(r.Began); by != nil && f.claim != nil && last < r.Began && (r.Began-last-f.claim.IdleTimeout).Abs() <= near {
		j.v.Near[got]++
	}
	if f.released && (r.Began-f.verdict).Abs() <= near {
		j.v.Verge[got]++
	}
	if r.Address != "" && (f.record != nil && r.Address != f.record.Address || r.Answered != f.id) {
		j.mismatch("wrong pod: sandbox %s: %s was answered by %s, for %s", f.id, describe(r), r.Address, r.Answered)
	}
	switch {
	case gone:
		if last, by := f.lastUse(r.Ended); by != nil && f.claim != nil && r.Ended-last < f.claim.IdleTimeout {
			j.mismatch("false reap: sandbox %s, with an idle timeout of %v: %s was answered that it is gone, %v after %s", f.id, f.claim.IdleTimeout, describe(r), r.Ended-last, describe(by))
		}
	case r.Code == http.StatusNotFound && r.Reason != "":
		j.mismatch("unknown: sandbox %s: %s was answered %s", f.id, describe(r), got)
	case got != "answered" && r.What != Abandoned && j.quiet(r.Began, r.Ended):
		j.mismatch("error: sandbox %s: %s was answered %s %s while nothing was wrong", f.id, describe(r), got, r.Error)
	}
}

func describe(e *Event) string {
	switch e.Kind {
	case Claim:
		return fmt.Sprintf("its claim from %v to %v", e.Began, e.Ended)
	case KeepAlive:
		return fmt.Sprintf("a keep-alive from %v to %v", e.Began, e.Ended)
	case Received:
		return fmt.Sprintf("its pod %s had request %d (%s) from %v to %v", e.Address, e.Request, e.What, e.Began, e.Ended)
	}
	return fmt.Sprintf("request %d (%s) through %s from %v to %v", e.Request, e.What, e.Gateway, e.Began, e.Ended)
}
