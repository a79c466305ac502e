package pods_test

import (
	"context"
	"errors"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"go.uber.org/zap/zaptest"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/kube"
	"github.com/berth-sandbox/berth/allocator/pods"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/devcluster"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// faults stands between the writer and the API server.
type faults struct {
	next http.RoundTripper
	// lose is how many more PATCH or DELETE requests have their answer thrown
	// away after the API server has carried them out; drop how many never reach it.
	lose, drop atomic.Int32
}

var errFault = errors.New("the connection broke")

func (f *faults) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Method != http.MethodPatch && r.Method != http.MethodDelete {
		return f.next.RoundTrip(r)
	}
	if f.drop.Add(-1) >= 0 {
		return nil, errFault
	}
	response, err := f.next.RoundTrip(r)
	if f.lose.Add(-1) >= 0 && err == nil {
		response.Body.Close()
		return nil, errFault
	}
	return response, err
}

// sink collects the events.
type sink struct {
	mu     sync.Mutex
	events []core.Event
}

func (s *sink) Submit(ev core.Event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.events = append(s.events, ev)
}

// take returns the events so far and forgets them.
func (s *sink) take() []core.Event {
	s.mu.Lock()
	defer s.mu.Unlock()
	events := s.events
	s.events = nil
	return events
}

func (s *sink) PodKeys() []core.PodKey { return nil }

type fixture struct {
	*testing.T
	clients *kube.Clients
	faults  *faults
	sink    *sink
	writer  *pods.Writer
	pool    *v1alpha1.SandboxPool
}

func setUp(t *testing.T) *fixture {
	cluster := devcluster.Start(t, devcluster.Options{})
	f := &fixture{T: t, sink: &sink{}, faults: &faults{}}
	config := cluster.RestConfig()
	config.Wrap(func(next http.RoundTripper) http.RoundTripper {
		f.faults.next = next
		return f.faults
	})
	var err error
	f.clients, err = kube.NewClients(config, 0, 0)
	require.NoError(t, err)
	f.writer = &pods.Writer{Client: f.clients.Kubernetes, Submit: f.sink.Submit, Log: zaptest.NewLogger(t)}
	f.pool = &v1alpha1.SandboxPool{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "pool", UID: "pool-uid"},
		Spec: v1alpha1.SandboxPoolSpec{Template: v1alpha1.PodTemplate{Spec: corev1.PodSpec{
			Containers: []corev1.Container{{Name: "sandbox", Image: "none"}},
		}}},
	}
	return f
}

// create makes a warm pod through the writer.
func (f *fixture) create(name string) core.PodKey {
	f.Helper()
	require.NoError(f, f.writer.Create(f.Context(), f.pool, core.CreatePod{Pool: core.PoolKey{Namespace: "default", Name: "pool"}, Name: name}))
	seen := f.sink.take()
	require.Len(f, seen, 1)
	pod := seen[0].(core.PodSeen).Pod
	require.True(f, pod.Free)
	require.Nil(f, pod.Binding)
	require.Equal(f, pods.TemplateHash(f.pool), pod.Template)
	return pod.Key
}

func (f *fixture) get(name string) *corev1.Pod {
	f.Helper()
	p, err := f.clients.Kubernetes.CoreV1().Pods("default").Get(f.Context(), name, metav1.GetOptions{})
	require.NoError(f, err)
	return p
}

// remove deletes a pod at once, behind the writer's back.
func (f *fixture) remove(name string) {
	f.Helper()
	zero := int64(0)
	f.faults.lose.Store(0)
	require.NoError(f, f.clients.Kubernetes.CoreV1().Pods("default").Delete(f.Context(), name, metav1.DeleteOptions{GracePeriodSeconds: &zero}))
}

func binding(id string) core.Binding {
	return core.Binding{ID: id, ClaimedAt: time.Unix(1_700_000_000, 0).UTC(), EndAt: time.Unix(1_700_000_300, 0).UTC(), Metadata: map[string]string{"k": "v"}}
}

// requireBound requires that the core was told of the pod as it is now, and then
// that it is bound, once.
func (f *fixture) requireBound(key core.PodKey, id string) {
	f.Helper()
	events := f.sink.take()
	require.Len(f, events, 2)
	require.Equal(f, id, events[0].(core.PodSeen).Pod.Binding.ID)
	require.Equal(f, core.BindDone{Pod: key, ID: id, Bound: true}, events[1])
}

func TestWriter(t *testing.T) {
	f := setUp(t)

	t.Run("a claim whose answer was lost is known to be written", func(t *testing.T) {
		key := f.create("lost-answer")
		f.faults.lose.Store(1)
		f.writer.Bind(t.Context(), core.BindPod{Pod: key, Binding: binding("id1")})
		f.requireBound(key, "id1")
		require.Equal(t, "id1", f.get(key.Name).Labels[v1alpha1.LabelSandbox])
	})

	t.Run("a claim that did not reach the API server is written again", func(t *testing.T) {
		key := f.create("not-sent")
		f.faults.drop.Store(3)
		f.writer.Bind(t.Context(), core.BindPod{Pod: key, Binding: binding("id2")})
		f.requireBound(key, "id2")
	})

	t.Run("a node is not removed under a pod that is or was in use, whatever the template says", func(t *testing.T) {
		const safe, disrupt = "cluster-autoscaler.kubernetes.io/safe-to-evict", "karpenter.sh/do-not-disrupt"
		pool := f.pool
		defer func() { f.pool = pool }()
		for name, annotations := range map[string]map[string]string{"plain": nil, "says-otherwise": {safe: "true", disrupt: "false", "note": "x"}} {
			f.pool = pool.DeepCopy()
			f.pool.Spec.Template.Metadata.Annotations = annotations
			key := f.create(name)
			for id, want := range annotations {
				require.Equal(t, want, f.get(name).Annotations[id], "a warm pod is the template's")
			}
			require.Len(t, f.get(name).Annotations, 1+len(annotations))
			f.writer.Bind(t.Context(), core.BindPod{Pod: key, Binding: binding(name)})
			f.requireBound(key, name)
			claimed := f.get(name).Annotations
			require.Equal(t, "false", claimed[safe])
			require.Equal(t, "true", claimed[disrupt])
			require.Equal(t, annotations["note"], claimed["note"])
			f.writer.MarkReleased(t.Context(), core.MarkReleased{Pod: key, ID: name, Reason: core.ReasonKilled})
			f.sink.take()
			released := f.get(name).Annotations // its address is not free yet
			require.Equal(t, "false", released[safe])
			require.Equal(t, "true", released[disrupt])
		}
	})

	t.Run("a pod that is taken is never bound a second time", func(t *testing.T) {
		key := f.create("taken")
		f.writer.Bind(t.Context(), core.BindPod{Pod: key, Binding: binding("first")})
		f.sink.take()
		f.writer.Bind(t.Context(), core.BindPod{Pod: key, Binding: binding("second")})
		events := f.sink.take()
		require.Len(t, events, 2)
		seen := events[0].(core.PodSeen).Pod
		require.Equal(t, binding("first"), *seen.Binding, "the core is told who has it, all of it")
		require.False(t, seen.Free)
		require.Equal(t, core.BindDone{Pod: key, ID: "second", Bound: false}, events[1])
		require.Equal(t, "first", f.get(key.Name).Labels[v1alpha1.LabelSandbox])
	})

	t.Run("a pod made again under the same name is another pod", func(t *testing.T) {
		old := f.create("again")
		f.remove("again")
		again := f.create("again")
		require.NotEqual(t, old.UID, again.UID)
		f.writer.Bind(t.Context(), core.BindPod{Pod: old, Binding: binding("id3")})
		require.Equal(t, []core.Event{core.PodGone{Key: old}, core.BindDone{Pod: old, ID: "id3", Bound: false}}, f.sink.take())
		f.writer.MarkReleased(t.Context(), core.MarkReleased{Pod: old, ID: "id3", Reason: core.ReasonKilled})
		require.Equal(t, []core.Event{core.PodGone{Key: old}, core.ReleaseDone{ID: "id3"}}, f.sink.take())
		f.writer.Delete(t.Context(), core.DeletePod{Pod: old})
		require.Equal(t, []core.Event{core.PodGone{Key: old}}, f.sink.take())
		p := f.get("again")
		require.Equal(t, again.UID, string(p.UID))
		require.Equal(t, v1alpha1.PhaseWarm, p.Labels[v1alpha1.LabelPhase])
		require.Nil(t, p.DeletionTimestamp)
	})

	t.Run("a release is repeated until it is written, and can be read back", func(t *testing.T) {
		key := f.create("release")
		f.writer.Bind(t.Context(), core.BindPod{Pod: key, Binding: binding("id4")})
		f.sink.take()
		f.faults.drop.Store(2)
		f.faults.lose.Store(1)
		f.writer.MarkReleased(t.Context(), core.MarkReleased{Pod: key, ID: "id4", Reason: core.ReasonTimeout})
		require.Equal(t, []core.Event{core.ReleaseDone{ID: "id4"}}, f.sink.take())
		w := &pods.Watcher{Client: f.clients.Kubernetes, Namespace: "default", Sink: f.sink, Log: zaptest.NewLogger(t)}
		all, err := w.List(t.Context())
		require.NoError(t, err)
		for _, p := range all {
			if p.Key == key {
				require.True(t, p.Released)
				require.Equal(t, core.ReasonTimeout, p.ReleaseReason)
				require.Equal(t, "id4", p.Binding.ID)
				require.False(t, p.Free)
				return
			}
		}
		t.Fatal("the pod is not in the list")
	})

	t.Run("a pod that changed since it was judged idle is not deleted", func(t *testing.T) {
		key := f.create("changed")
		version := f.get(key.Name).ResourceVersion
		f.writer.Bind(t.Context(), core.BindPod{Pod: key, Binding: binding("id5")})
		f.sink.take()
		f.writer.Delete(t.Context(), core.DeletePod{Pod: key, IfVersion: version})
		events := f.sink.take()
		require.Len(t, events, 2)
		require.Equal(t, "id5", events[0].(core.PodSeen).Pod.Binding.ID)
		require.Equal(t, core.DeleteFailed{Key: key}, events[1])
		require.Nil(t, f.get(key.Name).DeletionTimestamp)

		f.writer.Delete(t.Context(), core.DeletePod{Pod: key, IfVersion: f.get(key.Name).ResourceVersion})
		_, err := f.clients.Kubernetes.CoreV1().Pods("default").Get(t.Context(), key.Name, metav1.GetOptions{})
		require.True(t, apierrors.IsNotFound(err), "a pod without a node goes at once")
	})

	t.Run("a refused pod says why, and the core is told", func(t *testing.T) {
		bad := f.pool.DeepCopy()
		bad.Spec.Template.Spec.Containers[0].Name = "Not A Name"
		pool := core.PoolKey{Namespace: "default", Name: "pool"}
		err := f.writer.Create(t.Context(), bad, core.CreatePod{Pool: pool, Name: "bad"})
		require.ErrorContains(t, err, "spec.containers[0].name")
		require.Equal(t, []core.Event{core.CreateFailed{Pool: pool, Name: "bad"}}, f.sink.take())
	})
}

func TestWatcherTellsDeletionAndReplacementByUID(t *testing.T) {
	f := setUp(t)
	w := &pods.Watcher{Client: f.clients.Kubernetes, Namespace: "default", Sink: f.sink, Log: zaptest.NewLogger(t)}
	var watching sync.WaitGroup
	ctx, stop := context.WithCancel(t.Context())
	watching.Go(func() {
		if err := w.Run(ctx); err != nil {
			t.Error(err)
		}
	})
	defer watching.Wait()
	defer stop()

	var all []core.Event
	until := func(what string, found func() bool) {
		t.Helper()
		require.Eventually(t, func() bool {
			all = append(all, f.sink.take()...)
			return found()
		}, time.Minute, 10*time.Millisecond, what)
	}
	create := func(name string) core.PodKey {
		t.Helper()
		p, err := f.clients.Kubernetes.CoreV1().Pods("default").Create(t.Context(), &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{v1alpha1.LabelPool: "pool", v1alpha1.LabelPhase: v1alpha1.PhaseWarm}},
			Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "none"}}},
		}, metav1.CreateOptions{})
		require.NoError(t, err)
		return core.PodKey{Namespace: p.Namespace, Name: p.Name, UID: string(p.UID)}
	}
	seen := func(key core.PodKey) func() bool {
		return func() bool {
			for _, ev := range all {
				if s, ok := ev.(core.PodSeen); ok && s.Pod.Key == key {
					return true
				}
			}
			return false
		}
	}
	gone := func(key core.PodKey) func() bool {
		return func() bool {
			for _, ev := range all {
				if ev == (core.Event(core.PodGone{Key: key})) {
					return true
				}
			}
			return false
		}
	}
	first := create("p")
	until("the pod is seen", seen(first))
	f.remove("p")
	second := create("p")
	until("the new pod is seen", seen(second))
	until("the old pod is gone", gone(first))
	require.False(t, gone(second)(), "the new pod is there")
}
