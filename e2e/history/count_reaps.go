package history

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"
)

// near is how near to a deadline a request counts as sent near it.
const near = 200 * time.Millisecond

// Reaps counts what happened while sandboxes were used and left alone.
type Reaps struct {
	// Claims were answered. Sandboxes are on record, more if answers were lost.
	Claims, Sandboxes int
	// Reaps are sandboxes that were released for being idle, and whose last use is known;
	// Troubled those of them in whose last seconds, from the last use to the release, a
	// fault had effects.
	Reaps, Troubled int
	// Near are requests that were sent within 200 ms of the moment at which their sandbox
	// would have been idle for its timeout, by outcome; Verge those that were sent within
	// 200 ms of the release.
	Near, Verge map[string]int
	// Requests are all, by outcome, and Received what pods received, by kind. Long are
	// those of them that were in progress for longer than the idle timeout.
	Requests, Received map[string]int
	Long               int
	// KeepAlives were answered with 204.
	KeepAlives int
	// Late is how long sandboxes were idle beyond their timeout when they were released,
	// Seen when the first request was answered so; where no fault had effects. Ascending.
	Late, Seen []time.Duration
	// Faults are counted by what was done, Failed those that could not be done.
	Faults, Failed map[string]int
}

// CountReaps counts a history.
func CountReaps(h *History) Reaps {
	c := Reaps{Near: map[string]int{}, Verge: map[string]int{}, Requests: map[string]int{}, Received: map[string]int{}}
	for i := range h.Events {
		switch e := &h.Events[i]; e.Kind {
		case Claim:
			if e.Code == http.StatusCreated {
				c.Claims++
			}
		case Record:
			c.Sandboxes++
		case KeepAlive:
			if e.Code == http.StatusNoContent {
				c.KeepAlives++
			}
		case Received:
			c.Received[e.What]++
		case Request:
			c.Requests[e.outcome()]++
		}
	}
	for _, s := range h.sorted {
		c.sandbox(h, s)
	}
	c.Faults, c.Failed = h.countFaults()
	slices.Sort(c.Late)
	slices.Sort(c.Seen)
	return c
}

func (c *Reaps) sandbox(h *History, s *sandbox) {
	claim := s.claim()
	at, reaped := h.reaped(s)
	var seen *Event
	for _, r := range s.asked {
		last, by := s.lastUse(r.Began)
		if by != nil && claim != nil && last < r.Began && (r.Began-last-claim.IdleTimeout).Abs() <= near {
			c.Near[r.outcome()]++
		}
		if reaped && (r.Began-at).Abs() <= near {
			c.Verge[r.outcome()]++
		}
		if r.Code == http.StatusGone && (seen == nil || r.Ended < seen.Ended) {
			seen = r
		}
	}
	if !reaped {
		return
	}
	c.Reaps++
	for _, u := range s.used {
		if u.Kind == Received && u.Ended-u.Began > claim.IdleTimeout {
			c.Long++
		}
	}
	last, _ := s.lastUse(at)
	deadline := last + claim.IdleTimeout
	if h.quiet(last, at) {
		c.Late = append(c.Late, at-deadline)
	} else {
		c.Troubled++
	}
	if seen != nil && h.quiet(last, seen.Ended) {
		c.Seen = append(c.Seen, seen.Ended-deadline)
	}
}

// String is the summary that people read.
func (c Reaps) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "sandboxes   %d, %d of them answered\n", c.Sandboxes, c.Claims)
	fmt.Fprintf(&b, "reaps       %d, %d of them while a fault had effects\n", c.Reaps, c.Troubled)
	fmt.Fprintf(&b, "requests    %d: %s\n", Total(c.Requests), list(c.Requests))
	fmt.Fprintf(&b, "received    %d by pods: %s; %d for longer than the idle timeout; %d keep-alives\n",
		Total(c.Received), list(c.Received), c.Long, c.KeepAlives)
	fmt.Fprintf(&b, "near        %d within 200 ms of the deadline: %s\n", Total(c.Near), list(c.Near))
	fmt.Fprintf(&b, "verge       %d within 200 ms of the release: %s\n", Total(c.Verge), list(c.Verge))
	fmt.Fprintf(&b, "lateness    of the release p50 %v p99 %v of %d; of the first 410 p50 %v p99 %v of %d\n",
		percentile(c.Late, 50), percentile(c.Late, 99), len(c.Late), percentile(c.Seen, 50), percentile(c.Seen,
			99), len(c.Seen))
	printFaults(&b, c.Faults, c.Failed)
	return b.String()
}

// percentile is one of values that ascend, 0 if there are none.
func percentile(all []time.Duration, percent int) time.Duration {
	if len(all) == 0 {
		return 0
	}
	return all[min(len(all)*percent/100, len(all)-1)].Round(time.Millisecond)
}
