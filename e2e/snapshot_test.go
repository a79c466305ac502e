package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/johannesboyne/gofakes3"
	"github.com/johannesboyne/gofakes3/backend/s3mem"
	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/devcluster/stack"
)

// objects is an S3 server of this process. While it stalls, it takes archives and answers none. While it holds, it
// answers no question for an archive. While it refuses, it forbids everything.
type objects struct {
	*httptest.Server
	bucket  *s3mem.Backend
	stalls  atomic.Bool
	holds   atomic.Bool
	refuses atomic.Bool
	stalled chan struct{} // holds a value when an archive, or a question, has come meanwhile
	goOn    chan struct{}
}

func newObjects(t *testing.T) *objects {
	t.Helper()
	o := &objects{bucket: s3mem.New(), stalled: make(chan struct{}, 1), goOn: make(chan struct{})}
	require.NoError(t, o.bucket.CreateBucket("berth"))
	s3 := gofakes3.New(o.bucket).Server()
	o.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if o.refuses.Load() {
			w.WriteHeader(http.StatusForbidden)
			return
		}
		key, object := strings.CutPrefix(r.URL.Path, "/berth/")
		object = object && key != "" && !strings.HasSuffix(key, ".json")
		if object && (r.Method == http.MethodPut && o.stalls.Load() || r.Method == http.MethodGet && o.holds.Load()) {
			select {
			case o.stalled <- struct{}{}:
			default:
			}
			select {
			case <-o.goOn:
			case <-r.Context().Done():
				return
			}
		}
		s3.ServeHTTP(w, r)
	}))
	t.Cleanup(o.Close)
	return o
}

// flag has an allocator use the server.
func (o *objects) flag() string {
	return "--snapshots=s3://berth?region=us-east-1&use_path_style=true&anonymous=true&endpoint=" + url.QueryEscape(o.URL)
}

// keys lists what the server has below a prefix.
func (o *objects) keys(t *testing.T, prefix string) (keys []string) {
	t.Helper()
	list, err := o.bucket.ListBucket("berth", &gofakes3.Prefix{HasPrefix: true, Prefix: prefix}, gofakes3.ListBucketPage{})
	require.NoError(t, err)
	for _, c := range list.Contents {
		keys = append(keys, c.Key)
	}
	return keys
}

// snapshotPool makes a pool whose snapshots have the files of dir. Sandboxes here share the files of this machine,
// so dir is never the home of the user.
func (e *env) snapshotPool(name, dir string) string {
	e.t.Helper()
	return e.otherPool(name, 2, func(s *v1alpha1.SandboxPoolSpec) {
		agentPool(s)
		s.Snapshot = &v1alpha1.PoolSnapshot{Paths: []string{dir}}
	})
}

func write(t *testing.T, file, text string) {
	t.Helper()
	require.NoError(t, os.MkdirAll(filepath.Dir(file), 0o755))
	require.NoError(t, os.WriteFile(file, []byte(text), 0o644))
}

func read(t *testing.T, file string) string {
	t.Helper()
	raw, err := os.ReadFile(file)
	require.NoError(t, err)
	return string(raw)
}

func (e *env) snapshot(id, body string) openapi.Snapshot {
	e.t.Helper()
	a := e.api(http.MethodPost, "/sandboxes/"+id+"/snapshots", body)
	require.Equal(e.t, http.StatusCreated, a.code, a.body)
	var s openapi.Snapshot
	require.NoError(e.t, json.Unmarshal([]byte(a.body), &s))
	return s
}

// Invariant: P31, P32
func TestSnapshotBringsFilesIntoNewSandboxes(t *testing.T) {
	store := newObjects(t)
	e := startAlone(t, 0, stack.Options{Allocators: 2, AllocatorArgs: []string{store.flag()}})
	dir := filepath.Join(t.TempDir(), "work")
	write(t, filepath.Join(dir, "a/notes.txt"), "first")
	write(t, filepath.Join(dir, "gone.txt"), "x")
	pool := e.snapshotPool("snap", dir)
	b := e.sleeper(pool, `"timeout":3600`)
	end := b.state().EndAt

	// Requests wait while the files are archived, and none fails.
	client, done := e.client(), make(chan struct{})
	var failed []string
	var sent int
	var all sync.WaitGroup
	all.Go(func() {
		for ; ; sent++ {
			select {
			case <-done:
				return
			default:
			}
			a, err := do(t.Context(), client, http.MethodGet, "http://gateway/", e.host(8080, b.SandboxID), "")
			if err != nil || a.code != http.StatusOK {
				failed = append(failed, fmt.Sprint(a.code, a.body, err))
			}
		}
	})
	made := e.snapshot(b.SandboxID, `{"name":"mine"}`)
	close(done)
	all.Wait()
	require.Empty(t, failed)
	require.NotZero(t, sent)
	require.Equal(t, "mine:default", made.SnapshotID)
	require.Equal(t, []string{dir}, made.Paths)
	require.Len(t, store.keys(t, "snapshots/"), 1)
	require.Equal(t, openapi.SandboxStateRunning, b.state().State)
	require.Equal(t, end, b.state().EndAt, "a snapshot moves no end")
	b.beats(true)

	write(t, filepath.Join(dir, "a/notes.txt"), "second")
	write(t, filepath.Join(dir, "later.txt"), "x")
	require.NoError(t, os.Remove(filepath.Join(dir, "gone.txt")))
	again, _ := e.claimOf("mine:default", `"timeout":600`)
	require.NotEqual(t, b.SandboxID, again.SandboxID)
	require.Equal(t, pool, again.TemplateID)
	require.Equal(t, "first", read(t, filepath.Join(dir, "a/notes.txt")))
	require.Equal(t, "x", read(t, filepath.Join(dir, "gone.txt")))
	require.NoFileExists(t, filepath.Join(dir, "later.txt"))
	e.reaches(client, again)

	// One that is asleep sleeps on.
	b.pause()
	e.snapshot(b.SandboxID, `{"name":"mine","memory":false}`)
	require.Equal(t, openapi.SandboxStatePaused, b.state().State)
	b.beats(false)
	require.Len(t, store.keys(t, "archives/"), 1, "the one that was replaced is gone")

	require.Equal(t, http.StatusNoContent, e.api(http.MethodDelete, "/templates/mine:default", "").code)
	require.Empty(t, store.keys(t, ""))
	a := e.api(http.MethodPost, "/sandboxes", `{"templateID":"mine:default"}`)
	require.Equal(t, http.StatusNotFound, a.code, a.body)
	require.Contains(t, a.body, string(apierror.SnapshotNotFound))
}

// Invariant: P31, P32
func TestSnapshotOfADeadLeaderLeavesItsSandboxRunning(t *testing.T) {
	store := newObjects(t)
	e := startAlone(t, 0, stack.Options{Allocators: 2, AllocatorArgs: []string{store.flag()}})
	dir := filepath.Join(t.TempDir(), "work")
	write(t, filepath.Join(dir, "notes.txt"), "first")
	b := e.sleeper(e.snapshotPool("dead", dir), `"timeout":3600`)
	e.snapshot(b.SandboxID, `{"name":"mine"}`)
	before := store.keys(t, "")
	store.stalls.Store(true)
	answered := make(chan answer, 1)
	go func() {
		a, _ := e.callAPI(http.MethodPost, "/sandboxes/"+b.SandboxID+"/snapshots", `{"name":"mine"}`, e.site.key())
		answered <- a
	}()
	select {
	case <-store.stalled:
	case <-time.After(time.Minute):
		t.Fatal("no archive comes")
	}
	b.beats(false)
	require.NoError(t, e.site.killLeader(t.Context()))
	close(store.goOn)
	store.stalls.Store(false)
	require.NoError(t, e.site.waitLeader(t.Context()))
	require.NotEqual(t, http.StatusCreated, (<-answered).code)
	b.beats(true)
	e.reaches(e.client(), b.Sandbox)
	for _, key := range before {
		require.Contains(t, store.keys(t, ""), key, "the earlier snapshot is whole")
	}
	write(t, filepath.Join(dir, "notes.txt"), "second")
	e.claimOf("mine", `"timeout":600`)
	require.Equal(t, "first", read(t, filepath.Join(dir, "notes.txt")))
}

func TestStockSDKsMakeSnapshotsAndSandboxesFromThem(t *testing.T) {
	e := startAlone(t, 0, stack.Options{AllocatorArgs: []string{newObjects(t).flag()}})
	dir := filepath.Join(t.TempDir(), "work")
	environment := append(e.overHTTP(), "DIR="+dir, "POOL="+e.snapshotPool("sdk", dir))
	e.eachSDK(newSDKs, "snapshots", environment)
}

func TestStoreThatIsAwayFailsSnapshotsAlone(t *testing.T) {
	store := newObjects(t)
	e := startAlone(t, 0, stack.Options{AllocatorArgs: []string{store.flag()}})
	dir := filepath.Join(t.TempDir(), "work")
	write(t, filepath.Join(dir, "notes.txt"), "first")
	pool := e.snapshotPool("away", dir)
	b := e.sleeper(pool, `"timeout":3600`)
	e.snapshot(b.SandboxID, `{"name":"mine"}`)
	store.refuses.Store(true)
	for _, c := range []struct{ method, path, body string }{
		{http.MethodPost, "/sandboxes/" + b.SandboxID + "/snapshots", `{}`}, {http.MethodGet, "/snapshots", ""},
		{http.MethodDelete, "/templates/mine:default", ""}, {http.MethodPost, "/sandboxes", `{"templateID":"mine"}`},
	} {
		a := e.api(c.method, c.path, c.body)
		require.Equal(t, http.StatusServiceUnavailable, a.code, a.body)
		require.Contains(t, a.body, string(apierror.StoreUnavailable))
	}
	b.beats(true)
	e.reaches(e.client(), b.Sandbox)
	e.claimOf(pool, `"timeout":600`)
}
