package children_test

import (
	"context"
	"os"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/agent/children"
)

// start starts a shell without standard streams.
func start(t *testing.T, table *children.Table, script string) *children.Child {
	c, err := table.Start("/bin/sh", []string{"sh", "-c", script}, &syscall.ProcAttr{Env: os.Environ(),
		Sys: &syscall.SysProcAttr{Setsid: true}})
	if !assert.NoError(t, err) {
		return nil
	}
	return c
}

// One test, because there can be one reaper in a process.
func TestReaperKeepsEachStatusBesideOrphans(t *testing.T) {
	table := children.New()
	ctx, cancel := context.WithCancel(t.Context())
	reaped := make(chan error)
	go func() { reaped <- table.Run(ctx) }()

	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for n := range 25 {
				want := (i*25 + n) % 256
				// Each leaves two orphans, of which one ends at once.
				c := start(t, table, "(:; true) & (sleep 1000 &) ; exit "+strconv.Itoa(want))
				if c == nil {
					return
				}
				<-c.Done()
				assert.Equal(t, want, c.Status().ExitStatus())
				assert.ErrorIs(t, c.Signal(syscall.SIGTERM), children.ErrEnded)
			}
		})
	}
	wg.Wait()
	living := start(t, table, "exec sleep 1000")
	require.NoError(t, living.SignalGroup(0))
	table.KillAll(time.Minute)
	<-living.Done()
	require.Equal(t, syscall.SIGKILL, living.Status().Signal())
	require.ErrorIs(t, living.SignalGroup(0), children.ErrEnded)
	// None is left, not even as a zombie.
	_, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil)
	require.ErrorIs(t, err, syscall.ECHILD)
	cancel()
	require.NoError(t, <-reaped)
}
