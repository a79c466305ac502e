package devcluster

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func useCache(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	t.Setenv("BERTH_CACHE", dir)
	return dir
}

// actOwn owns the name "other" until it is asked to end.
func actOwn() error {
	ctx, stop := context.WithCancel(context.Background())
	r, err := Acquire("other", stop)
	if err != nil {
		return err
	}
	fmt.Println("owned")
	<-ctx.Done()
	return r.Close()
}

// own makes this process the owner of a name that may not be asked to end.
func own(t *testing.T, name string) (*Registration, error) {
	return Acquire(name, func() { t.Error("asked to end") })
}

func TestNameHasOneOwner(t *testing.T) {
	useCache(t)
	r, err := own(t, "a")
	require.NoError(t, err)
	_, err = own(t, "a")
	require.ErrorIs(t, err, ErrRunning)
	b, err := own(t, "b")
	require.NoError(t, err, "another name is free")
	require.NoError(t, b.Close())
	require.NoError(t, r.Close())
	r, err = own(t, "a")
	require.NoError(t, err)
	require.NoError(t, r.Close())
}

func TestOtherProcessesSeeTheStateOfACluster(t *testing.T) {
	useCache(t)
	_, err := Lookup("a")
	require.ErrorIs(t, err, ErrNotRunning)
	r, err := own(t, "a")
	require.NoError(t, err)
	s, err := Lookup("a")
	require.NoError(t, err)
	require.Equal(t, os.Getpid(), s.PID)
	require.False(t, s.Ready)
	r.Serve(func() State { return State{Kubeconfig: "/k", URLs: map[string]string{"api": "http://api"}} })
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
	r, err := own(t, "a")
	require.NoError(t, err)
	require.NoError(t, os.MkdirAll(filepath.Join(r.Dir(), "etcd"), 0o755))
	require.NoError(t, r.Close())
	r, err = own(t, "a")
	require.NoError(t, err)
	require.NoDirExists(t, r.Dir())
	require.NoError(t, r.Close())
}

func TestRequestStopEndsTheOwner(t *testing.T) {
	useCache(t)
	a := startActor(t, "own")
	require.Equal(t, "owned", a.line(t))
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
	require.Equal(t, "owned", a.line(t))
	require.NoError(t, a.cmd.Process.Kill())
	a.awaitEnd(t)
	_, err := Lookup("other")
	require.ErrorIs(t, err, ErrNotRunning)
	r, err := own(t, "other")
	require.NoError(t, err)
	require.NoError(t, r.Close())
}

// A name belongs to a directory in a cache: another cache has another cluster of that name.
func TestNamesOfAnotherCacheAreOthers(t *testing.T) {
	useCache(t)
	r, err := own(t, "a")
	require.NoError(t, err)
	defer r.Close()
	useCache(t)
	_, err = Lookup("a")
	require.ErrorIs(t, err, ErrNotRunning)
	ctx, cancel := context.WithTimeout(t.Context(), testLimit)
	defer cancel()
	require.ErrorIs(t, RequestStop(ctx, "a"), ErrNotRunning)
}

func TestBadNamesAreRefused(t *testing.T) {
	useCache(t)
	for _, name := range []string{"", "..", "a/b", "A", "-a", "a-", "a b", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"} {
		_, err := own(t, name)
		require.ErrorContains(t, err, "cluster name", name)
		_, err = Lookup(name)
		require.ErrorContains(t, err, "cluster name", name)
	}
}
