package process

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/agent/agentpb/process"
	"github.com/berth-sandbox/berth/agent/children"
)

func TestExpiredProcessIsAnsweredWithDeadlineExceeded(t *testing.T) {
	p := &running{child: &children.Child{PID: 1}, drained: make(chan struct{})}
	expired := make(chan struct{})
	close(p.drained)
	close(expired)
	attached := p.attach()
	defer attached.leave()
	for range 100 { // it has ended, too
		err := attached.stream(t.Context(), expired, time.Minute, func(*processpb.ProcessEvent) error { return nil })
		require.Equal(t, connect.CodeDeadlineExceeded, connect.CodeOf(err), "%v", err)
	}
}

// Invariant: P28
func TestSilentStreamStaysSilentWhileAsleep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var awake atomic.Bool
		asleep := func() bool { return !awake.Load() }
		p := &running{child: &children.Child{PID: 1}, drained: make(chan struct{}), asleep: asleep}
		attached := p.attach()
		defer attached.leave()
		ctx, leave := context.WithTimeout(t.Context(), time.Hour+time.Second)
		defer leave()
		sent := 0
		time.AfterFunc(time.Hour-time.Second, func() { awake.Store(true) })
		err := attached.stream(ctx, nil, time.Minute, func(*processpb.ProcessEvent) error {
			sent++
			return nil
		})
		require.Equal(t, connect.CodeCanceled, connect.CodeOf(err), "%v", err)
		require.Equal(t, 2, sent, "the start, and one keepalive after the wake")
	})
}

// A process can stay while it waits for a device.
func TestWaitForTheEndHasItsBound(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		begun := time.Now()
		(&running{child: &children.Child{}}).awaitEnd(t.Context(), killWait)
		require.Equal(t, killWait, time.Since(begun))
	})
}
