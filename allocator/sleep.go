package allocator

import (
	"context"
	"errors"
	"time"

	"go.uber.org/zap"

	"github.com/berth-sandbox/berth/allocator/agents"
	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/api/sandboxid"
	"github.com/berth-sandbox/berth/internal/wait"
)

const (
	// orderWait bounds one attempt to give an agent an order, orderPause is between two of them, and ordersFor bounds all
	// of one order, but for one to keep a freeze: an agent that is told so too late freezes again.
	orderWait  = 6 * time.Second
	orderPause = 200 * time.Millisecond
	ordersFor  = 20 * time.Second
	// keepPause is the longest pause between two attempts to have a freeze kept.
	keepPause = 10 * time.Second
)

// agentOrder is a core.Freeze, or a core.Thaw.
type agentOrder struct {
	sandbox    core.Sandbox
	thaw, keep bool
}

func (o agentOrder) String() string {
	switch {
	case o.thaw:
		return "thaw"
	case o.keep:
		return "keep"
	}
	return "freeze"
}

// give queues the next order of a sandbox. Those to keep a freeze have places of their own: they are repeated for as long
// as an agent does not answer, and must not keep others from waking.
func (t *term) give(o agentOrder) {
	t.dropOrders(o.sandbox)
	if o.keep {
		t.keeps.add(o)
	} else {
		t.orders.add(o)
	}
}

func (t *term) dropOrders(s core.Sandbox) {
	t.orders.drop(s)
	t.keeps.drop(s)
}

// order gives the agent of a sandbox an order, until it has answered or the next order of the sandbox comes.
func (t *term) order(ctx context.Context, o agentOrder) {
	err := t.deliver(ctx, o)
	if ctx.Err() != nil {
		return
	}
	if err != nil {
		t.log.Warn("the agent of a sandbox has not obeyed", zap.String("order", o.String()), zap.String("pool", o.sandbox.Pool.Name),
			zap.String("sandboxID", sandboxid.Short(o.sandbox.ID)), zap.String("pod", o.sandbox.Pod.Name), zap.Error(err))
	}
	s := o.sandbox
	if o.thaw {
		t.Submit(core.Thawed{ID: s.ID, Revision: s.Revision, OK: err == nil, Why: reasonOf(err)})
	} else {
		t.Submit(core.Frozen{ID: s.ID, Revision: s.Revision, OK: err == nil, Why: reasonOf(err)})
	}
}

func (t *term) deliver(ctx context.Context, o agentOrder) error {
	if t.agents == nil { // a replica with a key has made the claim
		return errors.New("the allocator has no --access-key-file")
	}
	for began, pause := time.Now(), orderPause; ; {
		attempt, cancel := context.WithTimeout(ctx, orderWait)
		var err error
		if o.thaw {
			err = t.agents.Thaw(attempt, o.sandbox)
		} else {
			err = t.agents.Freeze(attempt, o.sandbox, o.keep)
		}
		cancel()
		refused := (*agents.RefusedError)(nil)
		final := err == nil || errors.Is(err, agents.ErrSuperseded) || errors.As(err, &refused)
		if final || !o.keep && time.Since(began) > ordersFor || !wait.Sleep(ctx, pause) {
			return err
		}
		if o.keep {
			pause = min(2*pause, keepPause)
		}
	}
}
