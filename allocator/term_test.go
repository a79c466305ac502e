package allocator

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/eventlog"
	"github.com/berth-sandbox/berth/allocator/guard"
	"github.com/berth-sandbox/berth/allocator/sandboxobjects"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/devcluster/stack"
)

func TestFailingPodDeletionsBlockNothingElse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pool := stack.DemoPool(poolKey.Namespace, poolKey.Name, 1)
		made, deleted := make(chan struct{}, 100), make(chan struct{}, 100)
		clients := fakeAPI(func(r *http.Request) (int, any) {
			name := r.URL.Path[strings.LastIndex(r.URL.Path, "/")+1:]
			switch {
			case strings.HasSuffix(r.URL.Path, "/sandboxpools"):
				return 200, v1alpha1.SandboxPoolList{Items: []v1alpha1.SandboxPool{*pool}}
			case r.Method == http.MethodDelete && name == "other":
				deleted <- struct{}{}
				return 200, corev1.Pod{}
			case r.Method == http.MethodDelete:
				return 403, nil // a webhook that protects these pods
			case r.Method == http.MethodGet:
				return 200, corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default", UID: types.UID(name)}}
			}
			made <- struct{}{}
			return 201, corev1.Pod{}
		}).clients(t)
		a := &Allocator{limits: &teamLimits{}, watches: &watches{}, control: newControl(t)}
		tm := &term{a: a, loop: newTestLoop(t, nil), log: zap.NewNop(), creates: newWorkers(zap.NewNop()), deletes: newWorkers(zap.NewNop())}
		tm.writer = newPodWriter(t, clients, tm)
		a.watches.pools = newPools(t, clients, tm.Submit)
		_, _, err := a.watches.pools.List(t.Context())
		require.NoError(t, err)
		ctx, stop := context.WithCancel(t.Context())
		var working sync.WaitGroup
		working.Go(func() { tm.creates.run(ctx, createWorkers) })
		working.Go(func() { tm.deletes.run(ctx, deleteWorkers) })
		for n := range deleteWorkers {
			name := fmt.Sprintf("protected-%d", n)
			tm.do(core.DeletePod{Pod: core.PodKey{Namespace: "default", Name: name, UID: name}})
		}
		tm.do(core.DeletePod{Pod: core.PodKey{Namespace: "default", Name: "other", UID: "other"}})
		tm.do(core.CreatePod{Pool: poolKey, Name: "python-1"})
		synctest.Wait()
		require.Len(t, made, 1)
		require.Len(t, deleted, 1)
		require.Equal(t, deleteWorkers, tm.deletes.waiting(), "they are tried again")
		stop()
		working.Wait()
	})
}

// Invariant: P16
func TestLogIsReadOnlyIfThePoolAsksForIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		asks, silent := stack.DemoPool(poolKey.Namespace, poolKey.Name, 1), stack.DemoPool(poolKey.Namespace, "silent", 1)
		asks.Spec.Records, silent.Spec.Records = &v1alpha1.PoolRecords{LogLines: 3}, &v1alpha1.PoolRecords{}
		var calls []string
		clients := fakeAPI(func(r *http.Request) (int, any) {
			if strings.HasSuffix(r.URL.Path, "/sandboxpools") {
				return 200, v1alpha1.SandboxPoolList{Items: []v1alpha1.SandboxPool{*asks, *silent}}
			}
			calls = append(calls, r.URL.Path)
			return 503, nil // no kubelet answers
		}).clients(t)
		seen, logs := observer.New(zap.WarnLevel)
		a := &Allocator{limits: &teamLimits{}, watches: &watches{}, control: newControl(t)}
		tm := &term{a: a, loop: newTestLoop(t, nil), log: zap.New(seen), logs: newWorkers(zap.NewNop())}
		tm.writer = newPodWriter(t, clients, tm)
		a.watches.pools = newPools(t, clients, tm.Submit)
		_, _, err := a.watches.pools.List(t.Context())
		require.NoError(t, err)
		ctx, stop := context.WithCancel(t.Context())
		var working sync.WaitGroup
		working.Go(func() { tm.logs.run(ctx, logWorkers) })
		for _, pool := range []string{"silent", "gone", poolKey.Name} {
			tm.do(core.ReadLog{Sandbox: core.Sandbox{
				Binding: core.Binding{ID: pool}, Pool: core.PoolKey{Namespace: poolKey.Namespace, Name: pool}, Pod: core.PodKey{Namespace: "default", Name: pool},
			}})
		}
		time.Sleep(time.Hour)
		synctest.Wait()
		require.Equal(t, slices.Repeat([]string{"/api/v1/namespaces/default/pods/" + poolKey.Name}, maxLogTries), calls)
		require.Equal(t, 1, logs.Len())
		require.Zero(t, tm.logs.waiting())
		stop()
		working.Wait()
	})
}

// Each answer is in time, all of them together are not.
// Invariant: I6
func TestRecoveryMayOutlastACallTimeout(t *testing.T) {
	for _, slow := range []time.Duration{2 * time.Second, 7 * time.Second, 50 * time.Second} {
		synctest.Test(t, func(t *testing.T) { recoverSlowly(t, slow) })
	}
}

func recoverSlowly(t *testing.T, slow time.Duration) {
	clients := fakeAPI(func(r *http.Request) (int, any) {
		select { // each single answer is in time
		case <-time.After(slow):
		case <-r.Context().Done():
		}
		switch path := r.URL.Path; {
		case strings.HasSuffix(path, "/sandboxes"):
			return 200, v1alpha1.SandboxList{}
		case strings.HasSuffix(path, "/sandboxpools"):
			return 200, v1alpha1.SandboxPoolList{}
		case strings.HasSuffix(path, "/nodes"):
			return 200, corev1.NodeList{}
		}
		return 200, corev1.PodList{}
	}).clients(t)
	a := &Allocator{limits: &teamLimits{}, o: Options{Clients: clients, Namespace: "default", Log: zap.NewNop()}}
	a.watches = newTestWatches(t, a)
	c, err := core.New(core.Config{Term: 1, MaxStale: 1, ConnectWindow: 1, Lease: 1, NewID: func() string { return "" }, NewSuffix: func() string { return "" }}, now(time.Now))
	require.NoError(t, err)
	tm := &term{number: 1, a: a, eventLog: &eventlog.Log{}, log: zap.NewNop()}
	tm.loop = newLoop(c, guard.New(time.Second), time.Now, tm.do)
	done := make(chan error, 1)
	go func() { done <- tm.recover(t.Context(), nil) }()
	select {
	case err := <-done:
		require.NoError(t, err)
	case <-time.After(time.Hour):
		t.Error("not recovered after an hour")
	}
}

// While a term recovers, the watches may wait for room in the queue of a loop that
// does not run yet, or never will.
func TestRunReturnsWhenRecoveryFails(t *testing.T) {
	var many v1alpha1.SandboxList
	many.APIVersion, many.Kind, many.ResourceVersion = v1alpha1.GroupVersion().String(), "SandboxList", "10"
	for n := range eventQueue + 10 { // 10,000 ended ones are kept as a matter of course
		s := v1alpha1.Sandbox{Spec: v1alpha1.SandboxSpec{Pool: "python", PodName: "p", PodUID: fmt.Sprint(n), PodIP: "10.0.0.1", ClaimedAt: metav1.NowMicro()}}
		s.Name, s.Namespace, s.ResourceVersion = fmt.Sprintf("s%d", n), "default", "5"
		s.Status = v1alpha1.SandboxStatus{Phase: v1alpha1.SandboxRunning, Revision: "0.1"}
		many.Items = append(many.Items, s)
	}
	many.Items[1].Spec.PodUID = many.Items[0].Spec.PodUID // a client has copied an object
	slots := map[string]*v1alpha1.JournalSlot{}
	for n := range 2 {
		s := &v1alpha1.JournalSlot{Spec: v1alpha1.JournalSlotSpec{Slots: 2, Format: 1}}
		s.Name, s.ResourceVersion = fmt.Sprintf("berth-%03d", n), "1"
		slots[s.Name] = s
	}
	var mu sync.Mutex
	recovering, full := make(chan struct{}), make(chan struct{})
	var once sync.Once
	api := func(r *http.Request) (int, any) {
		path, query := r.URL.Path, r.URL.Query()
		switch {
		case query.Get("sendInitialEvents") != "":
			return 400, nil // list, then watch
		case query.Get("watch") != "":
			<-r.Context().Done()
			return 500, nil
		}
		switch {
		case r.Method == http.MethodPost: // the lease
			return 201, coordinationv1.Lease{}
		case strings.HasSuffix(path, "/berth-allocator"):
			if r.Method == http.MethodGet {
				return 404, nil
			}
			return 200, coordinationv1.Lease{}
		}
		mu.Lock()
		defer mu.Unlock()
		switch base := path[strings.LastIndex(path, "/")+1:]; base {
		case "journalslots":
			var l v1alpha1.JournalSlotList
			for _, s := range slots {
				l.Items = append(l.Items, *s)
			}
			return 200, l
		case "berth-000", "berth-001": // the term record
			slots[base].Spec.Position, slots[base].Spec.Term, slots[base].ResourceVersion = 1, 1, "2"
			return 200, metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{ResourceVersion: "2"}}
		case "sandboxes":
			mu.Unlock()
			defer mu.Lock()
			if query.Get("limit") == "1000" { // the recovery's
				once.Do(func() { close(recovering) })
				<-full
			} else {
				<-recovering
			}
			return 200, many
		case "nodes":
			return 200, corev1.NodeList{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "NodeList"}, ListMeta: metav1.ListMeta{ResourceVersion: "10"}}
		case "pods":
			return 200, corev1.PodList{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "PodList"}, ListMeta: metav1.ListMeta{ResourceVersion: "10"}}
		}
		return 200, v1alpha1.SandboxPoolList{TypeMeta: metav1.TypeMeta{APIVersion: v1alpha1.GroupVersion().String(), Kind: "SandboxPoolList"}, ListMeta: metav1.ListMeta{ResourceVersion: "10"}}
	}
	log, err := zap.NewDevelopment()
	require.NoError(t, err)
	if !testing.Verbose() {
		log = zap.NewNop()
	}
	a, err := New(Options{
		Clients: fakeAPI(api).clients(t), Namespace: "default", ControlAddress: "127.0.0.1:1", APIAddress: "127.0.0.1:2",
		MaxStale: time.Minute, ConnectWindow: time.Second, Policy: baseline(t), Metrics: prometheus.NewRegistry(), Log: log, PublicScheme: "http", PublicHost: "x",
	})
	require.NoError(t, err)
	done := make(chan error, 1)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	go func() { done <- a.Run(ctx) }()
	// The watches fill the queue before the lists are read.
	require.Eventually(t, func() bool {
		a.watches.mu.Lock()
		defer a.watches.mu.Unlock()
		return a.watches.term != nil && len(a.watches.term.loop.in) == eventQueue
	}, 2*time.Minute, time.Millisecond, "the queue was never full: this test proves nothing")
	close(full)
	select {
	case err := <-done:
		require.ErrorContains(t, err, "are both on record with pod")
	case <-time.After(2 * time.Minute):
		t.Fatal("recovery has failed, and Run has not returned")
	}
}

// A sandbox whose object cannot be read may be live. Its pod is not touched, unless the
// journal still has its record.
// Invariant: I6
func TestUnreadableObjectNeedsItsJournalRecord(t *testing.T) {
	tm := &term{a: &Allocator{o: Options{Namespace: "sandboxes"}}, log: zap.NewNop()}
	listed := func(ids ...string) sandboxobjects.Listed {
		l := sandboxobjects.Listed{Unreadable: map[string]error{}}
		for _, id := range ids {
			l.Unreadable[id] = errors.New("sandbox object " + id + ": spec.podIP: no")
		}
		return l
	}
	fact := core.Fact{Subject: &core.SandboxFact{Sandbox: core.Sandbox{Binding: core.Binding{ID: "a"}, IP: netip.MustParseAddr("10.0.0.1")}}}
	require.NoError(t, tm.unreadable(listed(), []core.Fact{fact}))
	require.NoError(t, tm.unreadable(listed("a"), []core.Fact{{Subject: &core.RetirementFact{Pod: core.PodKey{UID: "u"}}}, fact}))
	err := tm.unreadable(listed("b", "a", "c"), []core.Fact{fact})
	require.ErrorContains(t, err, "2 Sandbox objects in namespace sandboxes")
	require.ErrorContains(t, err, "sandbox object b: spec.podIP: no\nsandbox object c")
}
