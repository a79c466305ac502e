package process

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/agent/agentpb/process"
	"github.com/berth-sandbox/berth/agent/children"
)

// overdue is a context after its deadline whose own timer has not fired.
type overdue struct{ context.Context }

func (overdue) Deadline() (time.Time, bool) { return time.Now().Add(-time.Millisecond), true }

// The timer that kills the process and that of the context fire in either order.
func TestExpiredProcessIsAnsweredWithDeadlineExceeded(t *testing.T) {
	p := &running{child: &children.Child{PID: 1}, drained: make(chan struct{})}
	p.expired.Store(true)
	close(p.drained)
	attached := p.attach()
	defer attached.leave()
	err := attached.stream(overdue{t.Context()}, time.Minute, func(*processpb.ProcessEvent) error { return nil })
	require.Equal(t, connect.CodeDeadlineExceeded, connect.CodeOf(err), "%v", err)
}

// A process can stay while it waits for a device.
func TestWaitForTheEndHasItsBound(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		begun := time.Now()
		(&running{child: &children.Child{}}).awaitEnd(t.Context(), killWait)
		require.Equal(t, killWait, time.Since(begun))
	})
}
