package allocator

import (
	"context"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"github.com/berth-sandbox/berth/agent"
	"github.com/berth-sandbox/berth/agent/accounts"
	"github.com/berth-sandbox/berth/agent/children"
	"github.com/berth-sandbox/berth/agent/freeze"
	"github.com/berth-sandbox/berth/agent/initbox"
	"github.com/berth-sandbox/berth/allocator/agents"
	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/guard"
	"github.com/berth-sandbox/berth/allocator/snapshots"
	_ "github.com/berth-sandbox/berth/allocator/snapshots/drivers"
	"github.com/berth-sandbox/berth/api/sandboxaccess"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/devcluster/stack"
)

// stopping is a term with a store in a directory, and a pool whose snapshots have the directory files.
type stopping struct {
	*term
	store *snapshots.Store
	key   *sandboxaccess.Key
	dir   string // of the store
	files string
}

func newStopping(t *testing.T) *stopping {
	t.Helper()
	a, tm := leading(t)
	tm.log = zap.NewNop()
	s := &stopping{term: tm, dir: t.TempDir(), files: filepath.Join(t.TempDir(), "files")}
	var err error
	s.store, err = snapshots.Open(t.Context(), "file://"+s.dir, snapshots.Options{MaxPerTeam: 9, MaxBytesPerTeam: 1 << 30})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.store.Close()) })
	s.key, err = sandboxaccess.NewKey([]byte(strings.Repeat("k", 32)))
	require.NoError(t, err)
	tm.agents, err = agents.New(agents.Options{Key: s.key, Leads: func() bool { return true }})
	require.NoError(t, err)
	require.NoError(t, os.Mkdir(s.files, 0o755))
	pool := stack.DemoPool(poolKey.Namespace, poolKey.Name, 1)
	pool.Spec.Snapshot = &v1alpha1.PoolSnapshot{Paths: []string{s.files}}
	a.o.Snapshots = s.store
	a.watches.pools = newPools(t, fakeAPI(func(*http.Request) (int, any) {
		return 200, v1alpha1.SandboxPoolList{Items: []v1alpha1.SandboxPool{*pool}}
	}).clients(t), tm.Submit)
	_, _, err = a.watches.pools.List(t.Context())
	require.NoError(t, err)
	return s
}

// pod returns a sandbox with an agent that is not configured.
func (s *stopping) pod(t *testing.T) (core.Sandbox, *agent.Agent) {
	t.Helper()
	sealer, err := agents.SealerOf(s.key)
	require.NoError(t, err)
	keys, err := initbox.NewKeys(sealer.PublicKey())
	require.NoError(t, err)
	directory, err := accounts.New(false)
	require.NoError(t, err)
	freezer, err := freeze.New(freeze.Options{Children: children.New(), Hold: time.Hour})
	require.NoError(t, err)
	a, err := agent.New(agent.Options{Log: slog.New(slog.DiscardHandler), Keys: keys, Accounts: directory, Freezer: freezer,
		WriteFile: func(accounts.Account, initbox.File) error { return nil }})
	require.NoError(t, err)
	server := httptest.NewServer(a)
	t.Cleanup(server.Close)
	at := netip.MustParseAddrPort(server.Listener.Addr().String())
	return core.Sandbox{
		Binding: core.Binding{ID: "k3x9", Team: "red", Agent: core.Agent{Port: at.Port()}}, Pool: poolKey, IP: at.Addr(),
		Pod: core.PodKey{Namespace: poolKey.Namespace, Name: at.String()}, Revision: core.Revision{Term: 1, Counter: 7},
	}, a
}

// asleep is a sandbox with values of a claim, and a file.
func (s *stopping) asleep(t *testing.T) core.Sandbox {
	t.Helper()
	sandbox, _ := s.pod(t)
	require.NoError(t, os.WriteFile(filepath.Join(s.files, "file"), []byte("archived"), 0o640))
	values := &agents.Values{Envs: map[string]string{"A": "1"}, Secrets: map[string]string{"KEY": "canary"}}
	require.NoError(t, s.agents.Configure(t.Context(), sandbox, values))
	require.NoError(t, s.agents.Freeze(t.Context(), sandbox, true))
	return sandbox
}

func (s *stopping) archive(t *testing.T, sandbox core.Sandbox) core.ArchiveWritten {
	t.Helper()
	s.writeStopped(t.Context(), core.WriteArchive{Sandbox: sandbox, Cause: "stopAfter"})
	return (<-s.loop.in).(core.ArchiveWritten)
}

func (s *stopping) wake(t *testing.T, sandbox core.Sandbox) core.Configured {
	t.Helper()
	s.configure(t.Context(), core.Configure{Sandbox: sandbox})
	return (<-s.loop.in).(core.Configured)
}

// objects returns the files of the store.
func (s *stopping) objects(t *testing.T) (all []string) {
	t.Helper()
	require.NoError(t, filepath.WalkDir(s.dir, func(path string, d os.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			all = append(all, path)
		}
		return err
	}))
	return all
}

// Invariant: P31
func TestStoppedSandboxIsArchivedAndWakesElsewhere(t *testing.T) {
	s := newStopping(t)
	sandbox := s.asleep(t)
	written := s.archive(t, sandbox)
	require.Regexp(t, `^[a-z0-9/-]{1,64}$`, written.Archive)
	require.Equal(t, core.ArchiveWritten{ID: "k3x9", Order: sandbox.Revision, Archive: written.Archive}, written)
	for _, name := range s.objects(t) {
		text, err := os.ReadFile(name)
		require.NoError(t, err)
		require.NotContains(t, string(text), "canary")
	}

	require.NoError(t, os.WriteFile(filepath.Join(s.files, "file"), []byte("of the image"), 0o600))
	next, a := s.pod(t)
	next.Archive, next.Incarnation = written.Archive, 1
	require.Equal(t, core.Configured{ID: "k3x9", OK: true}, s.wake(t, next))
	require.Equal(t, &initbox.Config{SandboxID: "k3x9", AccessToken: s.key.Secret("k3x9").AgentToken("k3x9"),
		Envs: map[string]string{"A": "1"}, Secrets: map[string]string{"KEY": "canary"}}, a.Config())
	text, err := os.ReadFile(filepath.Join(s.files, "file"))
	require.NoError(t, err)
	require.Equal(t, "archived", string(text))
	m := s.a.metrics
	require.EqualValues(t, 1, testutil.ToFloat64(m.stopArchives.WithLabelValues("done", "stopAfter")))
	require.EqualValues(t, 1, testutil.ToFloat64(m.restores.WithLabelValues("done")))
	require.Zero(t, testutil.CollectAndCount(m.snapshots))
}

// Invariant: P31
func TestWakeWithoutItsArchiveStartsNothing(t *testing.T) {
	s := newStopping(t)
	name := s.archive(t, s.asleep(t)).Archive
	elsewhere := strings.Repeat("a", len(name))
	for want, change := range map[string]func(*core.Sandbox){
		"not in the object store":   func(b *core.Sandbox) { b.Archive = elsewhere },
		"not valid":                 func(b *core.Sandbox) { b.Archive = "../" + name },
		"is not in":                 func(b *core.Sandbox) { b.Team = "blue" },
		"has failed":                func(*core.Sandbox) { s.broken(t) },
		"damaged":                   func(*core.Sandbox) { s.cutOff(t) },
		"start all of them with":    func(*core.Sandbox) { s.a.o.Snapshots = nil },
		"its pool \"gone\" is gone": func(b *core.Sandbox) { b.Pool.Name = "gone" },
	} {
		next, a := s.pod(t)
		next.Archive = name
		change(&next)
		got := s.wake(t, next)
		s.a.o.Snapshots = s.store
		require.False(t, got.OK, want)
		require.Contains(t, got.Why, want)
		require.NotContains(t, got.Why, s.dir)
		require.Equal(t, next.Pool.Name != "gone", got.Hopeless, want)
		require.Nil(t, a.Config(), want)
	}

	// The agent has restored nothing, but the allocator would have it start.
	next, a := s.pod(t)
	next.Archive = name
	require.Error(t, s.agents.Configure(t.Context(), next, nil))
	require.Nil(t, a.Config())
}

// broken has the store of one call fail.
func (s *stopping) broken(t *testing.T) {
	t.Helper()
	dir := t.TempDir()
	var err error
	s.a.o.Snapshots, err = snapshots.Open(t.Context(), "file://"+dir, snapshots.Options{MaxPerTeam: 9, MaxBytesPerTeam: 9})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.Remove(dir)) })
	require.NoError(t, os.Remove(dir))
	require.NoError(t, os.WriteFile(dir, nil, 0o600))
}

// cutOff has the store of one call have shorter archives.
func (s *stopping) cutOff(t *testing.T) {
	t.Helper()
	dir := t.TempDir()
	require.NoError(t, os.CopyFS(dir, os.DirFS(s.dir)))
	require.NoError(t, filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err == nil && !d.IsDir() && !strings.HasSuffix(path, ".json") {
			err = os.Truncate(path, 9)
		}
		return err
	}))
	var err error
	s.a.o.Snapshots, err = snapshots.Open(t.Context(), "file://"+dir, snapshots.Options{MaxPerTeam: 9, MaxBytesPerTeam: 9})
	require.NoError(t, err)
}

func TestSandboxThatIsNotArchivedIsNotStopped(t *testing.T) {
	s := newStopping(t)
	sandbox := s.asleep(t)
	sandbox.Revision.Counter--
	got := s.archive(t, sandbox)
	require.Equal(t, core.ArchiveWritten{ID: "k3x9", Order: sandbox.Revision, Err: got.Err}, got)
	require.ErrorIs(t, got.Err, agents.ErrSuperseded)
	sandbox.Revision.Counter += 2
	require.NoError(t, s.agents.Thaw(t.Context(), sandbox))
	require.ErrorContains(t, s.archive(t, sandbox).Err, "the processes of the sandbox run")
	require.Empty(t, s.objects(t))
	s.a.o.Snapshots = nil
	require.Equal(t, errNoStore, s.archive(t, sandbox).Err)
	require.EqualValues(t, 3, testutil.ToFloat64(s.a.metrics.stopArchives.WithLabelValues("failed", "stopAfter")))
}

func TestStopWaitsForAPlaceToWrite(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStopping(t)
		var err error
		s.agents, err = agents.New(agents.Options{Key: s.key, Leads: func() bool { return true },
			Dial: func(context.Context, string, string) (net.Conn, error) { return nil, io.ErrClosedPipe }})
		require.NoError(t, err)
		release, ended := make(chan struct{}), make(chan struct{}, 2)
		for range 2 {
			go func() {
				_, _ = s.store.WriteStopped(t.Context(), snapshots.Snapshot{Team: "red", Pool: "p", SandboxID: "other"}, 1<<20,
					func(context.Context, string, io.Writer) (snapshots.Contents, error) {
						<-release
						return snapshots.Contents{}, io.ErrClosedPipe
					})
				ended <- struct{}{}
			}()
		}
		synctest.Wait()
		sandbox := core.Sandbox{Binding: core.Binding{ID: "k3x9", Team: "red"}, Pool: poolKey}
		began := time.Now()
		require.ErrorIs(t, s.archive(t, sandbox).Err, snapshots.ErrBusy)
		require.Equal(t, stopWait, time.Since(began))
		require.EqualValues(t, 1, testutil.ToFloat64(s.a.metrics.stopArchives.WithLabelValues("busy", "stopAfter")))

		go s.writeStopped(t.Context(), core.WriteArchive{Sandbox: sandbox})
		time.Sleep(stopWait / 2)
		require.Empty(t, s.loop.in)
		close(release)
		<-ended
		<-ended
		require.ErrorIs(t, (<-s.loop.in).(core.ArchiveWritten).Err, agents.ErrUnreachable)
	})
}

// Invariant: P31
func TestSweepAsksTheLeaderWhichArchivesAreNamed(t *testing.T) {
	s := newStopping(t)
	sandbox := s.asleep(t)
	kept, left := s.archive(t, sandbox).Archive, s.archive(t, sandbox).Archive
	old := time.Now().Add(-2 * time.Hour)
	for _, name := range s.objects(t) {
		require.NoError(t, os.Chtimes(name, old, old))
	}
	c, err := core.New(core.Config{Term: 2, MaxStale: time.Minute, ConnectWindow: time.Second, Lease: time.Second,
		NewID: func() string { return "x" }, NewSuffix: func() string { return "x" }}, now(time.Now))
	require.NoError(t, err)
	live, ended := sandbox, sandbox
	live.Phase, live.Archive = core.Running, kept
	ended.Pod.Name = "ended"
	ended.ID, ended.Phase, ended.Archive, ended.ReleasedAt = "ended", core.Ended, left, time.Now()
	_, err = c.Recover(core.State{Facts: []core.Fact{
		{Revision: live.Revision, Subject: &fact.SandboxFact{Sandbox: live}}, {Revision: ended.Revision, Subject: &fact.SandboxFact{Sandbox: ended}},
	}})
	require.NoError(t, err)
	s.loop = newLoop(c, guard.New(time.Second), time.Now, func(core.Effect) {})
	s.loop.running(t)

	named, err := s.archivesOf(t.Context(), []string{"k3x9", "ended", "unknown"})
	require.NoError(t, err)
	require.Equal(t, map[string]string{"k3x9": kept}, named)
	renewed := s.a.lock.renewed.Swap(0)
	_, err = s.archivesOf(t.Context(), []string{"k3x9"})
	require.ErrorIs(t, err, agents.ErrDeposed)
	s.sweepStopped(t.Context())
	require.Len(t, s.objects(t), 4)
	s.a.lock.renewed.Store(renewed)
	s.sweepStopped(t.Context())
	require.Len(t, s.objects(t), 2)
	_, err = s.store.GetStopped(t.Context(), "red", "k3x9", kept)
	require.NoError(t, err)
	_, err = s.store.GetStopped(t.Context(), "red", "k3x9", left)
	require.ErrorIs(t, err, snapshots.ErrGone)
}

func TestArchiveIsDroppedWithoutWaitingForTheStore(t *testing.T) {
	s := newStopping(t)
	sandbox := s.asleep(t)
	kept, dropped := s.archive(t, sandbox).Archive, s.archive(t, sandbox).Archive
	s.drops = newWorkers(zap.NewNop())
	sandbox.Archive = dropped
	s.do(core.DropArchive{Sandbox: sandbox})
	sandbox.Archive = "../x" // is tried once
	s.do(core.DropArchive{Sandbox: sandbox})
	require.Len(t, s.objects(t), 4)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { s.drops.run(ctx, 1); close(done) }()
	require.Eventually(t, func() bool { return s.drops.waiting() == 0 }, time.Minute, time.Millisecond)
	cancel()
	<-done
	require.Len(t, s.objects(t), 2)
	_, err := s.store.GetStopped(t.Context(), "red", "k3x9", kept)
	require.NoError(t, err)
}
