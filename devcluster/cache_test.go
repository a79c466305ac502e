package devcluster

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/devcluster/proc"
)

func TestArtifactIsMadeOnce(t *testing.T) {
	useCache(t)
	var made atomic.Int32
	a := artifact{name: "thing", recipe: []string{"1"},
		make: func(_ context.Context, _ *proc.Supervisor, out, _ string) error {
			made.Add(1)
			return os.WriteFile(filepath.Join(out, "file"), []byte("content"), 0o600)
		}}
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			dir, err := a.get(t.Context(), io.Discard)
			if err != nil {
				t.Error(err)
				return
			}
			if b, err := os.ReadFile(filepath.Join(dir, "file")); err != nil || string(b) != "content" {
				t.Errorf("%q, %v", b, err)
			}
		})
	}
	all.Wait()
	require.EqualValues(t, 1, made.Load())

	before, err := a.dir()
	require.NoError(t, err)
	a.recipe = []string{"2"}
	after, err := a.get(t.Context(), io.Discard)
	require.NoError(t, err)
	require.NotEqual(t, before, after, "another recipe is another artifact")
	require.EqualValues(t, 2, made.Load())
}

func TestFailedArtifactLeavesNothing(t *testing.T) {
	cache := useCache(t)
	fail := errors.New("no such luck")
	a := artifact{name: "thing", make: func(_ context.Context, _ *proc.Supervisor, out, _ string) error {
		return errors.Join(os.WriteFile(filepath.Join(out, "half"), nil, 0o600), fail)
	}}
	_, err := a.get(t.Context(), io.Discard)
	require.ErrorIs(t, err, fail)
	require.Empty(t, artifactsIn(t, cache))
}

func TestWaitForAnotherBuilderIsReportedAndCancellable(t *testing.T) {
	useCache(t)
	a := artifact{name: "thing"}
	dir, err := a.dir()
	require.NoError(t, err)
	lock, err := tryLock(dir + ".lock")
	require.NoError(t, err)
	defer lock.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 2*lockPoll)
	defer cancel()
	var progress bytes.Buffer
	_, err = a.get(ctx, &progress)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.Equal(t, "devcluster: another process is making thing, waiting for it\n", progress.String())
}

// actBuild makes an artifact that takes longer than any test.
func actBuild() error {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	a := artifact{name: "slow", make: func(ctx context.Context, sup *proc.Supervisor, out, _ string) error {
		// As the go command does, it has children and stops them when it is interrupted.
		cmd := exec.Command("/bin/sh", "-c", `touch half; sleep 1000 & echo $! >child; mv child pids; wait`)
		cmd.Dir = out
		watch := make(chan error, 1)
		go func() { watch <- announce(ctx, filepath.Join(out, "pids")) }()
		err := run(ctx, sup, cmd, io.Discard, "working")
		return errors.Join(err, <-watch)
	}}
	_, err := a.get(ctx, io.Discard)
	return err
}

func announce(ctx context.Context, file string) error {
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		if b, err := os.ReadFile(file); err == nil {
			fmt.Print(string(b))
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func TestInterruptedBuildLeavesNothing(t *testing.T) {
	for _, sig := range []syscall.Signal{syscall.SIGINT, syscall.SIGKILL} {
		t.Run(sig.String(), func(t *testing.T) {
			cache := useCache(t)
			a := startActor(t, "build")
			child, err := strconv.Atoi(a.line(t))
			require.NoError(t, err)
			require.True(t, running(child))
			require.NotEmpty(t, artifactsIn(t, cache))
			require.NoError(t, syscall.Kill(-a.cmd.Process.Pid, sig))
			a.awaitEnd(t)
			require.Eventually(t, func() bool { return !running(child) }, testLimit, 5*time.Millisecond)
			require.Eventually(t, func() bool { return len(artifactsIn(t, cache)) == 0 }, testLimit, 5*time.Millisecond)
		})
	}
}

// artifactsIn lists the cache without the lock files, which stay.
func artifactsIn(t *testing.T, cache string) (found []string) {
	t.Helper()
	entries, err := os.ReadDir(cache)
	require.NoError(t, err)
	for _, e := range entries {
		if e.IsDir() {
			found = append(found, e.Name())
		}
	}
	return found
}
