package history

import (
	"fmt"
	"net/http"
	"strings"
)

// Traffic counts what happened while sandboxes were claimed, used and released.
type Traffic struct {
	// Requests were sent, Received were received by pods, and Outcomes are what clients
	// saw: a sandbox's status, the reason that Berth gave, or "no answer".
	Requests, Received int
	Outcomes           map[string]int
	// What are requests by kind.
	What map[string]int
	// Claims were answered with a sandbox. Sandboxes are on record.
	Claims, Sandboxes int
	// Acknowledged releases had no router outstanding.
	Releases, Acknowledged int
	// Reuses are how often an address had another sandbox.
	Reuses int
	// After are requests that were sent when their sandbox was gone for every router.
	// Tempted are those for a sandbox that was over while another one lived at its
	// address: a route that was kept would have taken them to the wrong pod.
	After, Tempted int
	// Strays are requests that reached a pod that never held a sandbox, see WrongPod.
	Strays int
	// Faults are counted by what was done, Failed those that could not be done.
	Faults, Failed map[string]int
	// Stalled are the pauses of an Envoy that took longer than the stall budget, for
	// which Berth promises nothing. The test means to make none.
	Stalled int
}

// CountTraffic counts a history.
func CountTraffic(h *History) Traffic {
	c := Traffic{Outcomes: map[string]int{}, What: map[string]int{}}
	at := h.byAddress()
	for i := range h.Events {
		switch e := &h.Events[i]; e.Kind {
		case Claim:
			if e.Code == http.StatusCreated {
				c.Claims++
			}
		case Release:
			if h.sandboxes[e.Sandbox].recorded() && released(e) {
				c.Releases++
			}
			if h.sandboxes[e.Sandbox].recorded() && acknowledged(e) {
				c.Acknowledged++
			}
		case Record:
			c.Sandboxes++
		case Request:
			c.request(h, e, at)
		case Received:
			c.Received++
			if !h.rightPod(e) && h.stray(e) {
				c.Strays++
			}
		}
	}
	for _, all := range at {
		c.Reuses += len(all) - 1
	}
	c.Faults, c.Failed = h.countFaults()
	for what, n := range c.Failed {
		if c.Faults[what] -= n; c.Faults[what] == 0 {
			delete(c.Faults, what)
		}
	}
	for _, e := range h.faults {
		if e.Error == "" && strings.HasPrefix(e.What, EnvoyPaused) && e.Ended-e.Began > h.Settings.StallBudget {
			c.Stalled++
		}
	}
	return c
}

// recorded reports whether anything but calls is known about a sandbox.
func (s *sandbox) recorded() bool { return s != nil && (s.claim() != nil || s.record() != nil) }

func (c *Traffic) request(h *History, e *Event, at map[string][]*sandbox) {
	c.Requests++
	c.What[e.What]++
	switch {
	case e.Code == 0:
		c.Outcomes["no answer"]++
	case e.served():
		c.Outcomes[fmt.Sprint(e.Code)]++
	default:
		c.Outcomes[e.Reason]++
	}
	if h.after(e) {
		c.After++
	}
	s := h.sandboxes[e.Sandbox]
	if s == nil || s.record() == nil || !s.overAt(e.Began) {
		return
	}
	for _, other := range at[s.record().Address] {
		if other != s && other.claim().Ended <= e.Began && !other.overAt(e.Began) {
			c.Tempted++
			return
		}
	}
}

// String is the summary that people read.
func (c Traffic) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "requests    %d: %s\n", c.Requests, list(c.What))
	fmt.Fprintf(&b, "outcomes    %s\n", list(c.Outcomes))
	fmt.Fprintf(&b, "received    %d by pods\n", c.Received)
	fmt.Fprintf(&b, "sandboxes   %d, %d of them answered; %d released, %d acknowledged by all routers\n",
		c.Sandboxes, c.Claims, c.Releases, c.Acknowledged)
	fmt.Fprintf(&b, "addresses   %d times used again\n", c.Reuses)
	fmt.Fprintf(&b, "temptation  %d requests when their sandbox was gone, %d while another one was at its address\n",
		c.After, c.Tempted)
	fmt.Fprintf(&b, "strays      %d requests to pods that never held a sandbox\n", c.Strays)
	printFaults(&b, c.Faults, c.Failed)
	if c.Stalled > 0 {
		fmt.Fprintf(&b, "STALLED     %d pauses of an Envoy for longer than the stall budget: Berth promises nothing\n",
			c.Stalled)
	}
	return b.String()
}
