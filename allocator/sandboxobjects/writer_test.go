package sandboxobjects_test

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest"
	"go.uber.org/zap/zaptest/observer"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/yaml"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/kube"
	"github.com/berth-sandbox/berth/allocator/sandboxobjects"
	"github.com/berth-sandbox/berth/api/crd"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/devcluster"
)

var shared = devcluster.Shared{Options: devcluster.Options{CRDs: crd.All()}}

func TestMain(m *testing.M) { goleak.VerifyTestMain(shared.Tests(m)) }

func sandbox(phase core.Phase, term, counter uint64) core.Sandbox {
	s := core.Sandbox{
		Binding: core.Binding{
			ID: "abcdefghijklmnopqrst", ClaimedAt: time.Unix(1_700_000_000, 0).UTC(),
			EndAt: time.Unix(1_700_000_300, 0).UTC(), Metadata: map[string]string{"k": "v"},
			LifetimeEnd: time.Unix(1_700_086_400, 0).UTC(), StartBy: time.Unix(1_700_000_120, 0).UTC(), IdleTimeout: 90 * time.Second, MinBytes: 2048,
			Team: "team", User: "user", IdempotencyKey: "key", RequestHash: [32]byte{1, 2, 3}, Batch: "batch",
			Lifetime: time.Hour, Sleep: core.SleepPolicy{WhenIdle: true, AtEnd: true, WakeOnTraffic: true, StopAfter: time.Minute},
			Access: core.AccessTeam, MaskHost: "localhost:${PORT}", Agent: core.Agent{Port: 49983, Public: true, Egress: true}, HTTPSPorts: []uint16{443, 8443},
			Network: core.EgressRules{Allow: []string{"*.example.com", "192.0.2.1"}, Deny: []string{"0.0.0.0/0"}, Headers: []byte("sealed")},
		},
		AsleepAt: time.Unix(1_700_000_070, 0).UTC(), Wakeable: true, Incarnation: 2, Archive: "archives/team/a",
		LastActive:  time.Unix(1_700_000_060, 0).UTC(),
		DefaultPort: 8080, Ports: []uint16{80, 8080}, Restarts: 3,
		Pool: core.PoolKey{Namespace: "default", Name: "pool"}, Pod: core.PodKey{Namespace: "default", Name: "pod", UID: "uid"},
		StartedAt: time.Unix(1_700_000_010, 0).UTC(),
		Workload: &core.Workload{
			Images:   []string{"python:3", "proxy"},
			Requests: core.Resources{CPU: "500m", Memory: "1Gi"}, Limits: core.Resources{Memory: "2Gi"},
		},
		IP: netip.MustParseAddr("127.1.2.3"), Phase: phase, Revision: core.Revision{Term: term, Counter: counter},
	}
	if phase == core.Released || phase == core.Ended {
		s.Cause = core.Cause{Reason: fact.ReasonFailed, Message: "container main: exit code 3 Error", ExitCode: new(int32(3))}
		s.ReleasedAt = time.Unix(1_700_000_100, 0).UTC()
	}
	return s
}

// writer is a Writer that runs until the test ends.
type writer struct {
	*sandboxobjects.Writer
	*testing.T
	clients  *kube.Clients
	recorded chan core.ObjectWritten
	logs     *observer.ObservedLogs
}

func newWriter(t *testing.T, cluster *devcluster.Cluster) *writer {
	clients, err := kube.NewClients(cluster.RestConfig(), 0, 0)
	require.NoError(t, err)
	p := &writer{T: t, clients: clients, recorded: make(chan core.ObjectWritten, 100)}
	logger, logs := observer.New(zapcore.WarnLevel)
	p.logs = logs
	p.Writer = objectWriter(t, clients, zap.New(logger), func(ev core.Event) { p.recorded <- ev.(core.ObjectWritten) })
	ctx, stop := context.WithCancel(context.Background())
	var working sync.WaitGroup
	working.Go(func() { p.Writer.Run(ctx, 4) })
	t.Cleanup(func() { stop(); working.Wait() })
	return p
}

// ownWriter is a writer on a cluster of its own, whose CRDs the test may change.
func ownWriter(t *testing.T) (*writer, dynamic.NamespaceableResourceInterface) {
	cluster := devcluster.Start(t, devcluster.Options{CRDs: crd.All()})
	client, err := dynamic.NewForConfig(cluster.RestConfig())
	require.NoError(t, err)
	return newWriter(t, cluster), client.Resource(schema.GroupVersionResource{
		Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions",
	})
}

// write has a state written and returns the event that the core gets.
func (p *writer) write(s core.Sandbox) core.ObjectWritten {
	p.Helper()
	p.Record(core.WriteObject{Sandbox: s})
	for {
		select {
		case r := <-p.recorded:
			if s.Revision != r.Revision {
				require.True(p, r.Revision.Less(s.Revision), "%+v was recorded", r)
				continue // a state that was recorded before
			}
			return r
		case <-time.After(time.Minute):
			p.Fatal("not recorded within a minute")
		}
	}
}

func (p *writer) list() sandboxobjects.Listed {
	p.Helper()
	all, err := newWatcher(p.T, p.clients).List(p.Context())
	require.NoError(p, err)
	return all
}

// Invariant: I9
func TestObjectsOnlyMoveForwardsAndCanBeRead(t *testing.T) {
	p := newWriter(t, shared.Start(t))
	write := func(s core.Sandbox) {
		t.Helper()
		require.Equal(t, core.ObjectWritten{ID: s.ID, Revision: s.Revision}, p.write(s))
	}
	read := func() core.Sandbox {
		t.Helper()
		all := p.list()
		require.Len(t, all.Sandboxes, 1)
		return all.Sandboxes[0]
	}

	running := sandbox(core.Running, 2, 1)
	write(running)
	require.Equal(t, running, read())

	released := sandbox(core.Released, 2, 2)
	write(released)
	require.Equal(t, released, read())

	// What an older term writes late changes nothing.
	write(sandbox(core.Running, 1, 99))
	require.Equal(t, released, read())

	ended := sandbox(core.Ended, 3, 1)
	write(ended)
	require.Equal(t, ended, read())
	write(released)
	require.Equal(t, ended, read())

	// Of many states that come at once, the last one is there in the end.
	for counter := uint64(3); counter <= 50; counter++ {
		p.Record(core.WriteObject{Sandbox: sandbox(core.Ended, 3, counter)})
	}
	for last := (core.Revision{Term: 3, Counter: 50}); (<-p.recorded).Revision != last; {
	}
	require.Equal(t, core.Revision{Term: 3, Counter: 50}, read().Revision)
	forget := func(counter uint64) error {
		return p.Forget(t.Context(), core.DeleteObject{ID: ended.ID, Revision: core.Revision{Term: 3, Counter: counter}})
	}
	require.NoError(t, forget(49)) // the request of a deposed leader
	require.Equal(t, core.Revision{Term: 3, Counter: 50}, read().Revision)
	require.NoError(t, forget(50))
	require.Empty(t, p.list().Sandboxes)
	require.NoError(t, forget(50)) // once more is no error

	// One that a leader wrote late, and that no leader knows, still has its finalizer.
	write(sandbox(core.Running, 3, 100))
	require.NoError(t, forget(100))
	require.Empty(t, p.list().Sandboxes)
}

// A call replaces the rules and can take them away. An edit of the object, which has no new revision, is refused.
//
// Invariant: I5
func TestOnlyNewRevisionsChangeTheRulesOfAnObject(t *testing.T) {
	p := newWriter(t, shared.Start(t))
	ruled := func(counter uint64, rules core.EgressRules) core.Sandbox {
		s := sandbox(core.Running, 1, counter)
		s.Network = rules
		return s
	}
	for counter, rules := range []core.EgressRules{
		{Allow: []string{"a.example"}, Deny: []string{"0.0.0.0/0"}}, {Deny: []string{"192.0.2.0/24"}}, {}, {Allow: []string{"192.0.2.1"}}, {},
		{Headers: []byte("sealed")}, {}, {Allow: []string{"a.example"}, Deny: []string{"0.0.0.0/0"}, Headers: []byte("sealed")},
	} {
		s := ruled(uint64(counter)+1, rules)
		p.write(s)
		require.Equal(t, []core.Sandbox{s}, p.list().Sandboxes)
	}
	before := p.list().Sandboxes
	for _, edit := range []string{
		`{"spec":{"networkAllow":["b.example"]}}`, `{"spec":{"networkAllow":null}}`, `{"spec":{"networkDeny":null}}`, `{"spec":{"networkDeny":["0.0.0.0/0","192.0.2.1"]}}`,
		`{"spec":{"networkHeaders":null}}`, `{"spec":{"networkHeaders":"b3RoZXI="}}`,
	} {
		err := p.clients.Berth.Patch(types.MergePatchType).Namespace("default").Resource("sandboxes").Name(before[0].ID).Body([]byte(edit)).Do(t.Context()).Error()
		require.ErrorContains(t, err, "change them with PUT /sandboxes/{id}/network", edit)
	}
	require.Equal(t, before, p.list().Sandboxes)
	p.write(ruled(9, core.EgressRules{}))
}

func TestFinalizerKeepsDeletedObjectsWhileNeeded(t *testing.T) {
	p := newWriter(t, shared.Start(t))
	for name, key := range map[string]string{"without a key until it has ended": "", "with an internal key too": fact.InternalKeys + "k", "with a key until it is forgotten": "key"} {
		t.Run(name, func(t *testing.T) {
			write := func(phase core.Phase, counter uint64) string {
				s := sandbox(phase, 1, counter)
				s.IdempotencyKey = key
				if key == "" {
					s.RequestHash = [32]byte{}
				}
				p.write(s)
				return s.ID
			}
			id := write(core.Running, 1)
			require.NoError(t, p.clients.Berth.Delete().Namespace("default").Resource("sandboxes").Name(id).Do(t.Context()).Error())
			write(core.Released, 2)
			require.Len(t, p.list().Deleting, 1)
			write(core.Ended, 3)
			if key == "key" {
				require.Len(t, p.list().Deleting, 1)
				require.NoError(t, p.Forget(t.Context(), core.DeleteObject{ID: id, Revision: core.Revision{Term: 1, Counter: 3}}))
			}
			require.Empty(t, p.list().Sandboxes)
		})
	}
}

// A stop takes the pod from a sandbox, and the wake gives it another one.
// Invariant: P33
func TestStoppedSandboxMovesToAnotherPod(t *testing.T) {
	p := newWriter(t, shared.Start(t))
	for counter, phase := range []core.Phase{core.FallingAsleep, core.Asleep, core.Stopped, core.Waking, core.Running} {
		s := sandbox(phase, 2, uint64(counter+1))
		if phase == core.Waking || phase == core.Running {
			s.Incarnation, s.Pod.Name, s.Pod.UID, s.IP = 3, "pod-2", "uid-2", netip.MustParseAddr("127.1.2.4")
			s.AsleepAt, s.Wakeable, s.StartBy = time.Time{}, false, time.Time{}
		}
		p.write(s)
		require.Equal(t, []core.Sandbox{s}, p.list().Sandboxes)
	}
}

// What the object does not show is forgotten when nothing of the sandbox is in the
// journal any more.
func TestObjectHoldsEveryFieldOfASandbox(t *testing.T) {
	full := sandbox(core.Ended, 2, 1)
	full.PoolEgress = &core.PoolEgress{} // the pool has it
	for _, v := range []reflect.Value{reflect.ValueOf(full), reflect.ValueOf(full.Binding)} {
		for i := range v.NumField() {
			require.False(t, v.Field(i).IsZero(), "%s: this test does not know it yet", v.Type().Field(i).Name)
		}
	}
	full.PoolEgress = nil
	p := newWriter(t, shared.Start(t))
	for i, edit := range []func(*core.Sandbox){
		func(*core.Sandbox) {},
		func(s *core.Sandbox) { s.MinBytes = 0 },
		func(s *core.Sandbox) { s.IdleTimeout = 0 },
		func(s *core.Sandbox) { s.MinBytes, s.IdleTimeout = 0, 0 },
		func(s *core.Sandbox) {
			s.EndAt, s.LifetimeEnd, s.StartBy, s.LastActive = time.Time{}, time.Time{}, time.Time{}, time.Time{}
		},
	} {
		s := full
		s.ID = fmt.Sprintf("k3x9k3x9k3x9k3x9k3x%d", i)
		edit(&s)
		p.write(s)
		require.Equal(t, s, p.list().Sandboxes[i])
	}
	s := sandbox(core.Running, 1, 1)
	s.IdleTimeout = 1500 * time.Millisecond
	p.write(s)
	require.Equal(t, 2*time.Second, p.list().Sandboxes[0].IdleTimeout, "a whole number, and not less")
}

// The end can be moved. The last activity goes forwards only, also when a leader that knows
// an earlier one writes it.
func TestObjectShowsTheMovedEndAndLatestActivity(t *testing.T) {
	cluster := shared.Start(t)
	p := newWriter(t, cluster)
	counter := uint64(0)
	write := func(p *writer, end, active time.Time) core.Sandbox {
		t.Helper()
		counter++
		s := sandbox(core.Running, 2, counter)
		s.EndAt, s.LastActive = end, active
		p.write(s)
		all := p.list().Sandboxes
		require.Len(t, all, 1)
		require.Equal(t, s.Revision, all[0].Revision)
		return all[0]
	}
	first, later := time.Unix(1_700_000_300, 0).UTC(), time.Unix(1_700_000_900, 0).UTC()
	next := newWriter(t, cluster) // the next leader's, which has to read what is there
	require.Equal(t, first, write(p, first, first).LastActive)
	s := write(p, later, later)
	require.Equal(t, later, s.EndAt)
	require.Equal(t, later, s.LastActive)
	s = write(p, first, first) // shorter, and by one that knows of less
	require.Equal(t, first, s.EndAt)
	require.Equal(t, later, s.LastActive)
	require.Equal(t, later, write(next, later, first).LastActive)
	s = write(next, time.Time{}, time.Time{})
	require.Zero(t, s.EndAt)
	require.Equal(t, later, s.LastActive)
}

// Log lines may have secrets, and leaders read all objects when they begin: only LogLines returns them.
func TestLogLinesStayInTheObjectAlone(t *testing.T) {
	cluster := shared.Start(t)
	p, next := newWriter(t, cluster), newWriter(t, cluster)
	w := newWatcher(t, p.clients)
	lines := func() []string {
		t.Helper()
		all, err := w.LogLines(t.Context(), sandbox(core.Running, 2, 1).ID)
		require.NoError(t, err)
		return all
	}
	require.Empty(t, lines(), "there is no object")
	p.write(sandbox(core.Released, 2, 1))
	require.Empty(t, lines())
	longest := append(slices.Repeat([]string{""}, 99), strings.Repeat("\x00", 8192))
	p.Record(core.WriteObject{Sandbox: sandbox(core.Released, 2, 2), LogLines: longest})
	p.write(sandbox(core.Released, 2, 3)) // it may come before the lines are written
	require.Equal(t, longest, lines())
	next.write(sandbox(core.Ended, 3, 1))
	require.Equal(t, longest, lines())
	require.Equal(t, []core.Sandbox{sandbox(core.Ended, 3, 1)}, p.list().Sandboxes)
	next.Record(core.WriteObject{Sandbox: sandbox(core.Ended, 3, 2), LogLines: []string{"a"}})
	<-next.recorded
	require.Equal(t, []string{"a"}, lines())
}

// A user who edits an object must not be able to keep every leader from beginning.
func TestSchemaRejectsUnreadableObjects(t *testing.T) {
	cluster := shared.Start(t)
	p := newWriter(t, cluster)
	p.write(sandbox(core.Running, 3, 4))
	for name, c := range map[string]struct{ patch, want string }{
		"no address":                    {`{"spec":{"podIP":null}}`, "spec.podIP"},
		"an address of a range":         {`{"spec":{"podIP":"10.0.0.0/8"}}`, "spec.podIP"},
		"another address":               {`{"spec":{"podIP":"10.0.0.1"}}`, "moves to another address"},
		"another pod":                   {`{"spec":{"podUID":"x"}}`, "moves to another pod"},
		"no hash":                       {`{"spec":{"requestHash":"x"}}`, "spec.requestHash"},
		"no revision":                   {`{"status":{"revision":null}}`, "cannot be taken away"},
		"no status":                     {`{"status":null}`, "cannot be taken away"},
		"no phase":                      {`{"status":{"phase":null}}`, "written together"},
		"a phase of its own":            {`{"status":{"phase":"dreaming"}}`, "status.phase"},
		"a revision in words":           {`{"status":{"revision":"latest"}}`, "status.revision"},
		"too high a term":               {`{"status":{"revision":"9007199254740993.1"}}`, "the term must be 9007199254740992 at most"},
		"an earlier term":               {`{"status":{"revision":"2.9"}}`, "only a later state"},
		"an earlier state":              {`{"status":{"revision":"3.3"}}`, "only a later state"},
		"another state":                 {`{"status":{"phase":"ended"}}`, "only a later state"},
		"an earlier activity":           {`{"status":{"revision":"3.5","lastActive":"2020-01-01T00:00:00.000000Z"}}`, "status.lastActive: never goes back"},
		"a pod of no other incarnation": {`{"spec":{"podUID":"x"},"status":{"revision":"3.5","incarnation":2}}`, "moves to another pod"},
		"an earlier incarnation":        {`{"status":{"revision":"3.5","incarnation":1}}`, "status.incarnation: never goes back"},
		"no activity":                   {`{"status":{"revision":"3.5","lastActive":null}}`, "status.lastActive: never goes back"},
		"a negative timeout":            {`{"spec":{"idleTimeoutSeconds":-1}}`, "spec.idleTimeoutSeconds"},
		"a half timeout":                {`{"spec":{"idleTimeoutSeconds":1.5}}`, "spec.idleTimeoutSeconds"},
		"negative bytes":                {`{"spec":{"minBytesPerMinute":-1}}`, "spec.minBytesPerMinute"},
		"no moment":                     {`{"spec":{"lifetimeEnd":"soon"}}`, "spec.lifetimeEnd"},
	} {
		t.Run(name, func(t *testing.T) {
			err := p.clients.Berth.Patch(types.MergePatchType).Namespace("default").Resource("sandboxes").Name("abcdefghijklmnopqrst").
				Body([]byte(c.patch)).Do(t.Context()).Error()
			require.ErrorContains(t, err, c.want)
		})
	}
	require.Equal(t, []core.Sandbox{sandbox(core.Running, 3, 4)}, p.list().Sandboxes)
	p.write(sandbox(core.Running, 3, 10)) // not a number of one digit
	p.write(sandbox(core.Released, 10, 1))
}

// An API server without our schema, or a writer past it.
func TestUnreadableObjectsAreListedByState(t *testing.T) {
	whole := v1alpha1.Sandbox{
		Spec:   v1alpha1.SandboxSpec{Pool: "p", PodName: "p-1", PodUID: "u", PodIP: "10.0.0.1"},
		Status: v1alpha1.SandboxStatus{Phase: v1alpha1.SandboxEnded, Revision: "1.1"},
	}
	for name, edit := range map[string]func(*v1alpha1.Sandbox){
		"no address":       func(o *v1alpha1.Sandbox) { o.Spec.PodIP = "" },
		"another revision": func(o *v1alpha1.Sandbox) { o.Status.Revision = "latest" },
		"too high a term":  func(o *v1alpha1.Sandbox) { o.Status.Revision = "9007199254740993.1" },
		"another request":  func(o *v1alpha1.Sandbox) { o.Spec.RequestHash = "x" },
	} {
		t.Run(name, func(t *testing.T) {
			ended, live := *whole.DeepCopy(), *whole.DeepCopy()
			ended.Name, live.Name, live.Status.Phase = "ended", "live", v1alpha1.SandboxRunning
			edit(&ended)
			edit(&live)
			apiServer := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("Content-Type", "application/json")
				_ = json.NewEncoder(w).Encode(v1alpha1.SandboxList{Items: []v1alpha1.Sandbox{ended, live, whole}})
			}))
			defer apiServer.Close()
			clients, err := kube.NewClients(&rest.Config{Host: apiServer.URL, Transport: &http.Transport{DisableKeepAlives: true}}, 0, 0)
			require.NoError(t, err)
			listed, err := newWatcher(t, clients).List(t.Context())
			require.NoError(t, err)
			require.Len(t, listed.Sandboxes, 1)
			require.Len(t, listed.Unreadable, 1)
			require.ErrorContains(t, listed.Unreadable["live"], "sandbox object live")
		})
	}
}

func TestUnreadableObjectIsRewritten(t *testing.T) {
	var schemaless [][]byte
	for _, raw := range crd.All() {
		var c map[string]any
		require.NoError(t, yaml.Unmarshal(raw, &c))
		for _, version := range c["spec"].(map[string]any)["versions"].([]any) {
			version.(map[string]any)["schema"] = map[string]any{"openAPIV3Schema": map[string]any{"type": "object", "x-kubernetes-preserve-unknown-fields": true}}
		}
		raw, err := yaml.Marshal(c)
		require.NoError(t, err)
		schemaless = append(schemaless, raw)
	}
	p := newWriter(t, devcluster.Start(t, devcluster.Options{CRDs: schemaless}))
	running := sandbox(core.Running, 1, 1)
	p.write(running)
	require.NoError(t, p.clients.Berth.Patch(types.MergePatchType).Namespace("default").Resource("sandboxes").Name(running.ID).
		Body([]byte(`{"spec":{"podIP":""},"status":{"revision":"latest"}}`)).Do(t.Context()).Error())
	require.Len(t, p.list().Unreadable, 1)
	p.write(sandbox(core.Running, 2, 1))
	require.Equal(t, []core.Sandbox{sandbox(core.Running, 2, 1)}, p.list().Sandboxes)
}

// One object that a webhook refuses is not what keeps all claims waiting.
func TestFewRefusedObjectsDoNotCountForTheLag(t *testing.T) {
	var refuse atomic.Int32
	refuse.Store(http.StatusForbidden)
	apiServer := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		code := int(refuse.Load())
		w.WriteHeader(code)
		_ = json.NewEncoder(w).Encode(metav1.Status{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}, Status: "Failure", Code: int32(code)})
	}))
	defer apiServer.Close()
	clients, err := kube.NewClients(&rest.Config{Host: apiServer.URL, Transport: &http.Transport{DisableKeepAlives: true}}, 0, 0)
	require.NoError(t, err)
	p := objectWriter(t, clients, zaptest.NewLogger(t), func(core.Event) {})
	ctx, stop := context.WithCancel(t.Context())
	var working sync.WaitGroup
	working.Go(func() { p.Run(ctx, 4) })
	defer working.Wait()
	defer stop()
	add := func(n int) {
		s := sandbox(core.Running, 1, 1)
		s.ID = fmt.Sprintf("s%03d", n)
		p.Record(core.WriteObject{Sandbox: s})
	}
	settled := func(refused, objects int) sandboxobjects.Backlog {
		t.Helper()
		require.Eventually(t, func() bool { b := p.Backlog(); return b.Refused == refused && b.Objects == objects }, time.Minute, time.Millisecond)
		return p.Backlog()
	}
	for n := range 100 {
		add(n)
	}
	require.Zero(t, settled(100, 100).Lag)
	add(100)
	require.NotZero(t, settled(101, 101).Lag, "it concerns all")
	refuse.Store(http.StatusServiceUnavailable)
	require.NotZero(t, settled(0, 101).Lag, "they are waited for")
}

func TestMissingOrDeletedCRDIsRecognised(t *testing.T) {
	p, crds := ownWriter(t)
	live := sandbox(core.Running, 1, 1)
	p.write(live) // its finalizer keeps the CRD
	definition, err := crds.Get(t.Context(), "sandboxes.berth.sh", metav1.GetOptions{})
	require.NoError(t, err)
	require.NoError(t, crds.Delete(t.Context(), definition.GetName(), metav1.DeleteOptions{}))
	ended := live
	ended.Phase, ended.Revision.Counter, ended.IdempotencyKey, ended.RequestHash = core.Ended, 2, "", [32]byte{}
	ended.Cause, ended.ReleasedAt = core.Cause{Reason: fact.ReasonKilled}, ended.ClaimedAt.Add(time.Minute)
	refused := ended // without a finalizer: one that is created all the same must not keep the CRD
	n := 0
	record := func(s core.Sandbox) { p.Record(core.WriteObject{Sandbox: s}) }
	noCRD := func() bool { return p.Backlog().NoCRD }

	require.Eventually(t, func() bool { // the API server learns of the deletion by a watch, and serves until then
		n++
		refused.ID = fmt.Sprintf("k3x9k3x9k3x9k3x9k%03d", n)
		record(refused)
		return noCRD()
	}, time.Minute, 200*time.Millisecond, "it is being deleted")

	record(ended) // the last object goes, and the CRD with it
	require.Eventually(t, func() bool {
		_, err := crds.Get(t.Context(), definition.GetName(), metav1.GetOptions{})
		return apierrors.IsNotFound(err)
	}, time.Minute, 50*time.Millisecond)
	require.Eventually(t, noCRD, time.Minute, 50*time.Millisecond, "it is missing")

	definition.SetResourceVersion("")
	_, err = crds.Create(t.Context(), definition, metav1.CreateOptions{})
	require.NoError(t, err)
	require.Eventually(t, func() bool { b := p.Backlog(); return b.Objects == 0 && !b.NoCRD }, time.Minute, 50*time.Millisecond)
}

// The CRD of an earlier version does not have a field. What it would drop stays in the journal, and is written when the
// CRD is replaced.
//
// Invariant: I5
func TestFieldsThatTheCRDLacksAreNotLost(t *testing.T) {
	p, crds := ownWriter(t)
	change := func(version func(schema map[string]any)) {
		definition, err := crds.Get(t.Context(), "sandboxes.berth.sh", metav1.GetOptions{})
		require.NoError(t, err)
		versions, _, err := unstructured.NestedSlice(definition.Object, "spec", "versions")
		require.NoError(t, err)
		schema, _, err := unstructured.NestedMap(versions[0].(map[string]any), "schema", "openAPIV3Schema")
		require.NoError(t, err)
		version(schema)
		require.NoError(t, unstructured.SetNestedMap(versions[0].(map[string]any), schema, "schema", "openAPIV3Schema"))
		require.NoError(t, unstructured.SetNestedSlice(definition.Object, versions, "spec", "versions"))
		_, err = crds.Update(t.Context(), definition, metav1.UpdateOptions{})
		require.NoError(t, err)
	}
	var whole map[string]any
	change(func(schema map[string]any) {
		whole = runtime.DeepCopyJSON(schema)
		unstructured.RemoveNestedField(schema, "x-kubernetes-validations") // they name the field
		unstructured.RemoveNestedField(schema, "properties", "spec", "properties", "networkHeaders")
	})
	probe := `{"apiVersion":"berth.sh/v1alpha1","kind":"Sandbox","metadata":{"name":"probe"},"spec":{"networkHeaders":"YQ=="}}`
	require.Eventually(t, func() bool { // the API server learns of the change by a watch
		err := p.clients.Berth.Post().Namespace("default").Resource("sandboxes").Param("fieldValidation", "Strict").
			Body([]byte(probe)).Do(t.Context()).Error()
		return err != nil && strings.Contains(err.Error(), "unknown field")
	}, time.Minute, 50*time.Millisecond)
	refused := sandbox(core.Running, 1, 1)
	refused.ID = "k3x9k3x9k3x9k3x9k3x9"
	p.Record(core.WriteObject{Sandbox: refused})
	require.Eventually(t, func() bool { b := p.Backlog(); return b.Refused+b.Objects != 1 }, time.Minute, time.Millisecond)
	require.Equal(t, 1, p.Backlog().Refused)
	without := sandbox(core.Running, 1, 1)
	without.Network.Headers, without.Revision.Counter = nil, 2
	p.write(without)
	require.Equal(t, 1, p.Backlog().Refused)
	patched := sandbox(core.Running, 1, 3)
	p.Record(core.WriteObject{Sandbox: patched})
	require.Eventually(t, func() bool { b := p.Backlog(); return b.Refused+b.Objects != 3 }, time.Minute, time.Millisecond)
	require.Equal(t, 2, p.Backlog().Refused)

	for _, line := range p.logs.All() { // the API server repeats the object, whose content is in no log
		said := fmt.Sprint(line.ContextMap()["error"])
		require.Contains(t, said, `version: unknown field "spec.networkHeaders"`)
		require.NotContains(t, said, refused.ID[:12])
	}

	change(func(schema map[string]any) { maps.Copy(schema, whole) })
	require.Eventually(t, func() bool { return p.Backlog().Objects == 0 }, time.Minute, 50*time.Millisecond)
	require.Contains(t, p.list().Sandboxes, refused)
	require.Contains(t, p.list().Sandboxes, patched)
}

// A leader that was deposed and goes on for a moment must not bring back the object of a
// sandbox that has ended since.
func TestTouchCreatesNoMissingObject(t *testing.T) {
	p := newWriter(t, shared.Start(t))
	p.Record(core.WriteObject{Sandbox: sandbox(core.Running, 2, 1), Touch: true})
	other := sandbox(core.Running, 2, 2)
	other.ID += "x"
	p.write(other) // by then the first has had its turn
	require.Eventually(t, func() bool { return p.Backlog().Objects == 0 }, time.Minute, time.Millisecond)
	require.Len(t, p.list().Sandboxes, 1)
	p.write(sandbox(core.Running, 2, 3))
	require.Len(t, p.list().Sandboxes, 2)
	p.Record(core.WriteObject{Sandbox: sandbox(core.Running, 2, 4), Touch: true})
	require.Equal(t, core.ObjectWritten{ID: sandbox(core.Running, 2, 4).ID, Revision: core.Revision{Term: 2, Counter: 4}}, <-p.recorded)
}

func newWatcher(t *testing.T, clients *kube.Clients) *sandboxobjects.Watcher {
	t.Helper()
	w, err := sandboxobjects.NewWatcher(kube.Options{
		Clients: clients, Namespace: "default", Submit: func(core.Event) {}, Log: zaptest.NewLogger(t),
	})
	require.NoError(t, err)
	return w
}

func objectWriter(t *testing.T, clients *kube.Clients, log *zap.Logger, submit func(core.Event)) *sandboxobjects.Writer {
	t.Helper()
	w, err := sandboxobjects.NewWriter(sandboxobjects.WriterOptions{
		Options: kube.Options{Clients: clients, Namespace: "default", Submit: submit, Log: log},
		Yield:   func(context.Context) {},
	})
	require.NoError(t, err)
	return w
}
