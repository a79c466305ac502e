package agents

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"

	"github.com/berth-sandbox/berth/agent/initbox"
	"github.com/berth-sandbox/berth/allocator/core"
)

// ErrSuperseded is the error of an order if the agent has obeyed a newer one.
var ErrSuperseded = errors.New("the agent has obeyed a newer order")

// RefusedError is the error of an order that the agent has refused. After a Freeze all processes run.
type RefusedError struct {
	// Reason is empty if the agent has named none that is known.
	Reason initbox.Reason
	// Why is for people. It has nothing in it that the pod has chosen but two numbers.
	Why string
}

func (e *RefusedError) Error() string { return e.Why }

// Freeze has the agent of a sandbox stop all processes. Without keep the agent continues them after a time. The order has the
// revision of the sandbox. The error is ErrSuperseded, a *RefusedError, or one after which the order can be repeated.
func (c *Caller) Freeze(ctx context.Context, s core.Sandbox, keep bool) error {
	if keep {
		return c.order(ctx, s, initbox.Keep)
	}
	return c.order(ctx, s, initbox.Freeze)
}

// Thaw has the agent of a sandbox continue all processes. The order and the errors are as those of Freeze.
func (c *Caller) Thaw(ctx context.Context, s core.Sandbox) error {
	return c.order(ctx, s, initbox.Thaw)
}

func (c *Caller) order(ctx context.Context, s core.Sandbox, kind initbox.Kind) error {
	o := &initbox.Order{SandboxID: s.ID, Kind: kind, Term: s.Revision.Term, Counter: s.Revision.Counter}
	now := incarnation{s.Pod.Whole(), s.Restarts}
	peer, _ := c.known.Get(now)
	return c.call(ctx, at(s), func(l *line) error {
		known := peer
		code, answer, err := c.deliver(l, &peer, func() ([]byte, error) { return peer.SealOrder(o) },
			l.post(initbox.SleepPath))
		if peer != known {
			c.known.Add(now, peer)
		}
		if err != nil {
			return err
		}
		switch code {
		case http.StatusOK:
			return nil
		case http.StatusConflict:
			return ErrSuperseded
		case http.StatusUnprocessableEntity:
			var refusal initbox.Refusal
			_ = json.Unmarshal(answer, &refusal) // its sentence for an unknown reason is right, too
			return &RefusedError{Why: refusal.Error()}
		case http.StatusNotFound:
			return &RefusedError{Why: "the agent of this sandbox has a version that cannot sleep: sandboxes that are claimed from now on can"}
		}
		return fmt.Errorf("the agent answered %d to the order %s", code, kind)
	})
}
