package rest

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"net/http"
	"strconv"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/api/apierror"
)

const (
	// holdWait is how long a call waits for a leader. A claim that may wait for a pod until later waits until then. After
	// the crash of a leader the next one leads within 5.5 s with the default timings (docs/design/recovery.md), and
	// clients give up after 30 s or more.
	holdWait = 10 * time.Second
	// askAgain is the pause before a leader is asked again that has not taken a call. Usually another one is elected
	// earlier.
	askAgain = time.Second
)

// hold leads one call to the replica that leads. While none does, the call waits here: a change of leaders refuses
// nothing. The slots and the bytes of its class bound what waits, in total and for each team.
type hold struct {
	api   *api
	r     *http.Request
	claim bool
	began time.Time // when the call came, to the first replica
	// leader is set by next.
	leader Leader
	key    string          // the internal key of a claim, from the first attempt to forward it on
	failed *apierror.Error // of the last attempt; nil: there was none
	again  time.Time       // when the same leader can be asked again; zero: not at all
	held   bool            // it has waited
	until  time.Time       // when it is refused; zero: it has not waited
}

func (a *api) newHold(r *http.Request, claim bool) *hold {
	h := &hold{api: a, r: r, claim: claim, began: time.Now()}
	if h.passedOn() {
		ms, _ := strconv.ParseUint(r.Header.Get(waitedHeader), 10, 32) // absent: 0
		h.began = h.began.Add(-time.Duration(ms) * time.Millisecond)
		h.held = ms > 0
	}
	return h
}

// passedOn reports whether another replica has forwarded the call.
func (h *hold) passedOn() bool { return h.r.Header.Get(forwardedHeader) != "" }

// waited is for how long the call has waited already; 0: it was not held.
func (h *hold) waited() time.Duration {
	if !h.held {
		return 0
	}
	return time.Since(h.began)
}

// next waits for a leader that can be given the call, and sets h.leader. An error is the answer of the call, or that of
// the context of a client that has gone.
func (h *hold) next() error {
	last, answering := h.leader.Left, h.api.Allocator.Answering()
	for {
		h.leader = h.api.Allocator.Leader()
		now := time.Now()
		known := h.leader.Here || h.leader.Address != "" && !h.passedOn()
		if !known && h.passedOn() && !h.leader.Elected {
			return h.refusal("the replica that this call was forwarded to no longer leads; try again")
		}
		if (!known || h.failed != nil) && h.until.IsZero() {
			h.until = now.Add(holdWait)
			if end := h.began.Add(h.wait()); end.After(h.until) {
				h.until = end
			}
		}
		switch {
		case answering.Err() != nil && !h.leader.Here:
			return apierror.New(apierror.NotLeader, "this replica is shutting down; try again")
		case !h.until.IsZero() && !now.Before(h.until):
			return h.refusal("this replica does not lead, and no leader is known yet; try again")
		case !known || h.failed != nil && h.leader.Left == last && (h.again.IsZero() || now.Before(h.again)):
		case h.held && !h.api.still(h.r):
			return apierror.New(apierror.Unauthorized, "the key was revoked or changed during the call")
		default:
			return nil
		}
		h.held = true
		timer := time.NewTimer(min(h.until.Sub(now), askAgain))
		select {
		case <-h.leader.Changed:
		case <-timer.C:
		case <-answering.Done():
		case <-h.r.Context().Done():
			timer.Stop()
			if h.api.Allocator.Serving().Err() != nil { // it ends streams
				return apierror.New(apierror.NotLeader, "this replica is shutting down; try again")
			}
			return h.r.Context().Err()
		}
		timer.Stop()
	}
}

// wait is how long a claim may wait for a pod; 0 for other calls.
func (h *hold) wait() time.Duration {
	if !h.claim {
		return 0
	}
	var body struct{ WaitTimeout *float64 }
	if json.Unmarshal(bodyOf(h.r), &body) != nil || body.WaitTimeout == nil { // the leader says what is wrong with it
		return h.api.Allocator.ClaimWait()
	}
	return time.Duration(min(max(*body.WaitTimeout, 0), MaxWait.Seconds()) * float64(time.Second))
}

// refusal is the answer of a call that no leader has taken.
func (h *hold) refusal(message string) error {
	if h.failed != nil {
		return h.failed
	}
	return apierror.New(apierror.NotLeader, "%s", message)
}

// hasFailed notes that the leader has not answered the call. It reports whether the call may be given to a leader
// again: nothing was done, or the call can be repeated. It is repeated at another leader only. Until the connection to
// this one has ended, it may be carrying the call out.
func (h *hold) hasFailed(e *apierror.Error, repeatable bool) bool {
	h.failed, h.held, h.again = e, true, time.Time{}
	if !e.OutcomeUnknown {
		h.again = time.Now().Add(askAgain)
	}
	return repeatable || !e.OutcomeUnknown
}

// makeKey gives a claim without an Idempotency-Key an internal one before it is forwarded.
func (h *hold) makeKey() {
	if _, given := h.r.Header[keyHeader]; h.claim && !given && h.key == "" {
		h.key = fact.InternalKeys + rand.Text()
	}
}

type waitedKey struct{}

// lessWaited returns the rest of a claim's wait for a pod.
func lessWaited(ctx context.Context, wait time.Duration) time.Duration {
	waited, _ := ctx.Value(waitedKey{}).(time.Duration)
	return max(0, wait-waited)
}
