package extproc

import (
	"strconv"
	"time"

	"github.com/berth-sandbox/berth/api/sandboxid"
)

// Traced is a decision about a request that Envoy traces.
type Traced struct {
	// Parent is the span of the request, as a traceparent (W3C Trace Context). It is not checked.
	Parent string
	// Began is when the router had read the request, Ended when it had decided.
	Began, Ended time.Time
	// Outcome is that of the metric berth_router_requests_total.
	Outcome string
	// WakeWait is how long the request waited for a sandbox that was asleep.
	WakeWait time.Duration
	// SandboxID is shortened, as in logs. "" if the request names no sandbox.
	SandboxID, RequestID string
}

// traceparentLength is the length of a traceparent of version 00, and its last digits are the flags.
const traceparentLength = len("00-00000000000000000000000000000000-0000000000000000-00")

// sampledFlag is set in a traceparent whose trace is kept.
const sampledFlag = 1

// traced notes that the call has a traceparent. Envoy has decided whether the request is sampled.
func (c *call) traced(parent string) {
	if c.server.decider.o.Trace == nil || len(parent) != traceparentLength {
		return
	}
	if flags, err := strconv.ParseUint(parent[traceparentLength-2:], 16, 8); err == nil && flags&sampledFlag != 0 {
		c.trace = parent
	}
}

// traceID returns the second part of the traceparent, "" if the request is not traced.
func (c *call) traceID() string {
	if c.trace == "" {
		return ""
	}
	return c.trace[len("00-"):][:len("00000000000000000000000000000000")]
}

// tellTrace reports the decision, if the request is traced.
func (c *call) tellTrace(outcome, id string) {
	if c.trace == "" {
		return
	}
	c.server.decider.o.Trace(Traced{
		Parent: c.trace, Began: c.server.started.Add(c.began), Ended: time.Now(), Outcome: outcome,
		WakeWait: c.decision.wakeWait, SandboxID: sandboxid.Short(id), RequestID: string(c.request.requestID),
	})
}
