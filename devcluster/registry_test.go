package devcluster

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func useCache(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	t.Setenv("BERTH_CACHE", dir)
	return dir
}

// actOwn owns the name "other" until it gets a signal to end.
func actOwn() error {
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM)
	r, err := Acquire("other")
	if err != nil {
		return err
	}
	if err := r.Publish(State{Kubeconfig: "/k", URLs: map[string]string{"api": "http://api"}}); err != nil {
		return err
	}
	fmt.Println("published")
	<-stop
	return r.Close()
}

func TestNameHasOneOwner(t *testing.T) {
	useCache(t)
	r, err := Acquire("a")
	require.NoError(t, err)
	_, err = Acquire("a")
	require.ErrorIs(t, err, ErrRunning)
	b, err := Acquire("b")
	require.NoError(t, err, "another name is free")
	require.NoError(t, b.Close())
	require.NoError(t, r.Close())
	r, err = Acquire("a")
	require.NoError(t, err)
	require.NoError(t, r.Close())
}

func TestOtherProcessesSeeThePublishedState(t *testing.T) {
	useCache(t)
	_, err := Lookup("a")
	require.ErrorIs(t, err, ErrNotRunning)
	r, err := Acquire("a")
	require.NoError(t, err)
	s, err := Lookup("a")
	require.NoError(t, err)
	require.Equal(t, os.Getpid(), s.PID)
	require.False(t, s.Ready)
	require.NoError(t, r.Publish(State{Kubeconfig: "/k", URLs: map[string]string{"api": "http://api"}}))
	s, err = Lookup("a")
	require.NoError(t, err)
	require.True(t, s.Ready)
	require.Equal(t, "/k", s.Kubeconfig)
	require.Equal(t, map[string]string{"api": "http://api"}, s.URLs)
	all, err := List()
	require.NoError(t, err)
	require.Equal(t, []State{s}, all)
	require.NoError(t, r.Close())
	all, err = List()
	require.NoError(t, err)
	require.Empty(t, all)
}

func TestAcquireEmptiesTheClusterDirectory(t *testing.T) {
	useCache(t)
	r, err := Acquire("a")
	require.NoError(t, err)
	require.NoError(t, os.MkdirAll(filepath.Join(r.Dir(), "etcd"), 0o755))
	require.NoError(t, r.Close())
	r, err = Acquire("a")
	require.NoError(t, err)
	require.NoDirExists(t, r.Dir())
	require.NoError(t, r.Close())
}

func TestRequestStopEndsTheOwner(t *testing.T) {
	useCache(t)
	a := startActor(t, "own")
	require.Equal(t, "published", a.line(t))
	ctx, cancel := context.WithTimeout(t.Context(), testLimit)
	defer cancel()
	require.NoError(t, RequestStop(ctx, "other"))
	a.awaitEnd(t)
	require.Equal(t, 0, a.cmd.ProcessState.ExitCode(), "it ended by itself")
	require.ErrorIs(t, RequestStop(ctx, "other"), ErrNotRunning)
}

func TestKilledOwnerIsNotRunning(t *testing.T) {
	useCache(t)
	a := startActor(t, "own")
	require.Equal(t, "published", a.line(t))
	require.NoError(t, a.cmd.Process.Kill())
	a.awaitEnd(t)
	_, err := Lookup("other")
	require.ErrorIs(t, err, ErrNotRunning)
	r, err := Acquire("other")
	require.NoError(t, err)
	require.NoError(t, r.Close())
}

// An owner that stands still publishes nothing and waits for no child.
func TestEndedPartsAreDownAtOnce(t *testing.T) {
	useCache(t)
	r, err := Acquire("a")
	require.NoError(t, err)
	defer r.Close()
	a := startActor(t, "own")
	require.Equal(t, "published", a.line(t))
	require.NoError(t, r.Publish(State{Parts: []Part{{Name: "x", PID: a.cmd.Process.Pid, Restarts: 2}}}))
	x := func() Part {
		s, err := Lookup("a")
		require.NoError(t, err)
		require.Len(t, s.Parts, 1)
		require.Equal(t, 2, s.Parts[0].Restarts)
		return s.Parts[0]
	}
	require.True(t, x().Running)
	require.NoError(t, a.cmd.Process.Kill())
	// It stays as a zombie.
	require.NoError(t, unix.Waitid(unix.P_PID, a.cmd.Process.Pid, nil, unix.WEXITED|unix.WNOWAIT, nil))
	require.False(t, x().Running)
}

// A part's PID may have become another process's.
func TestReusedPIDIsNotThePart(t *testing.T) {
	cache := useCache(t)
	r, err := Acquire("a")
	require.NoError(t, err)
	defer r.Close()
	require.NoError(t, r.Publish(State{Parts: []Part{{Name: "x", PID: os.Getpid()}}}))
	s, err := Lookup("a")
	require.NoError(t, err)
	require.True(t, s.Parts[0].Running)
	s.Parts[0].Process = "an earlier one"
	stale, err := json.Marshal(s)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(cache, "dev", "a", "state.json"), stale, 0o600))
	s, err = Lookup("a")
	require.NoError(t, err)
	require.False(t, s.Parts[0].Running)
}

// A state file of a former owner must not lead a signal to the process that has its PID
// now.
func TestRequestStopNeverSignalsAStranger(t *testing.T) {
	cache := useCache(t)
	stop := make(chan os.Signal, 1) // the stranger is this process
	signal.Notify(stop, syscall.SIGTERM)
	defer signal.Stop(stop)
	r, err := Acquire("a")
	require.NoError(t, err)
	stale, err := json.Marshal(State{Name: "a", PID: os.Getpid(), Process: "an earlier one", Ready: true})
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(cache, "dev", "a", "state.json"), stale, 0o600))
	s, err := Lookup("a")
	require.NoError(t, err)
	require.Equal(t, State{Name: "a"}, s)
	ctx, cancel := context.WithTimeout(t.Context(), 3*lockPoll)
	defer cancel()
	require.ErrorIs(t, RequestStop(ctx, "a"), context.DeadlineExceeded)
	select {
	case got := <-stop:
		t.Fatalf("got %v", got)
	default:
	}
	require.NoError(t, r.Close())
}

func TestBadNamesAreRefused(t *testing.T) {
	useCache(t)
	for _, name := range []string{"", "..", "a/b", "A", "-a", "a-", "a b", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"} {
		_, err := Acquire(name)
		require.ErrorContains(t, err, "cluster name", name)
		_, err = Lookup(name)
		require.ErrorContains(t, err, "cluster name", name)
	}
}
