package pods_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"go.uber.org/zap/zaptest"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/client-go/rest"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/kube"
	"github.com/berth-sandbox/berth/allocator/pods"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/devcluster"
)

var shared devcluster.Shared

func TestMain(m *testing.M) { goleak.VerifyTestMain(shared.Tests(m)) }

// faults stands between the writer and the API server.
type faults struct {
	next http.RoundTripper
	// lose is how many more PATCH or DELETE requests have their answer thrown
	// away after the API server has carried them out; drop how many never reach it.
	lose, drop atomic.Int32
	before     func() // a PATCH, if set
}

var errFault = errors.New("the connection broke")

func (f *faults) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Method != http.MethodPatch && r.Method != http.MethodDelete {
		return f.next.RoundTrip(r)
	}
	if f.before != nil && r.Method == http.MethodPatch {
		f.before()
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

type fixture struct {
	*testing.T
	clients *kube.Clients
	faults  *faults
	sink    *sink
	writer  *pods.Writer
	pool    *v1alpha1.SandboxPool
}

func setUp(t *testing.T) *fixture {
	cluster := shared.Start(t)
	f := &fixture{T: t, sink: &sink{}, faults: &faults{}}
	config := cluster.RestConfig()
	config.Wrap(func(next http.RoundTripper) http.RoundTripper {
		f.faults.next = next
		return f.faults
	})
	var err error
	f.clients, err = kube.NewClients(config, 0, 0)
	require.NoError(t, err)
	f.writer, err = pods.NewWriter(pods.WriterOptions{Settings: pods.Settings{ServeOn: serveOn, AgentImage: "agent", AsleepCPU: resource.MustParse("20m")}, Options: kube.Options{
		Clients: f.clients, Namespace: "default", Submit: f.sink.Submit, Log: zaptest.NewLogger(t),
	}})
	require.NoError(t, err)
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
	require.NotEmpty(f, seen) // a watch may have seen it as well by now
	pod := seen[0].(core.PodSeen).Pod
	require.Equal(f, name, pod.Key.Name)
	require.False(f, pod.Used)
	require.Equal(f, pods.TemplateHash(f.pool, pods.Settings{ServeOn: serveOn}), pod.Template)
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

// in is f for a subtest.
func (f *fixture) in(t *testing.T) *fixture {
	g := *f
	g.T = t
	return &g
}

// removeAtAdmission has the API server remove a field of each pod of that name.
func (f *fixture) removeAtAdmission(pod, path string) {
	f.Helper()
	api := f.clients.Kubernetes.AdmissionregistrationV1()
	_, err := api.MutatingAdmissionPolicies().Create(f.Context(), &admissionv1.MutatingAdmissionPolicy{
		ObjectMeta: metav1.ObjectMeta{Name: pod},
		Spec: admissionv1.MutatingAdmissionPolicySpec{
			MatchConstraints: &admissionv1.MatchResources{ResourceRules: []admissionv1.NamedRuleWithOperations{{
				ResourceNames: []string{pod},
				RuleWithOperations: admissionv1.RuleWithOperations{
					Operations: []admissionv1.OperationType{admissionv1.Create},
					Rule:       admissionv1.Rule{APIGroups: []string{""}, APIVersions: []string{"v1"}, Resources: []string{"pods"}},
				},
			}}},
			Mutations: []admissionv1.Mutation{{
				PatchType: admissionv1.PatchTypeJSONPatch,
				JSONPatch: &admissionv1.JSONPatch{Expression: fmt.Sprintf("[JSONPatch{op: 'remove', path: '%s'}]", path)},
			}},
			ReinvocationPolicy: admissionv1.NeverReinvocationPolicy,
		},
	}, metav1.CreateOptions{})
	require.NoError(f, err)
	_, err = api.MutatingAdmissionPolicyBindings().Create(f.Context(), &admissionv1.MutatingAdmissionPolicyBinding{
		ObjectMeta: metav1.ObjectMeta{Name: pod}, Spec: admissionv1.MutatingAdmissionPolicyBindingSpec{PolicyName: pod},
	}, metav1.CreateOptions{})
	require.NoError(f, err)
}

func TestWriter(t *testing.T) {
	f := setUp(t)

	t.Run("a pod is deleted although the answer was lost, or the request", func(t *testing.T) {
		for name, fault := range map[string]*atomic.Int32{"lost": &f.faults.lose, "dropped": &f.faults.drop} {
			key := f.create(name)
			fault.Store(2)
			attempts := 1
			for f.writer.Delete(t.Context(), core.DeletePod{Pod: key}) != nil {
				attempts++
			}
			require.Equal(t, map[string]int{"lost": 1, "dropped": 3}[name], attempts)
			_, err := f.clients.Kubernetes.CoreV1().Pods("default").Get(t.Context(), key.Name, metav1.GetOptions{})
			require.True(t, apierrors.IsNotFound(err), "a pod without a node goes at once: %v", err)
			f.sink.take()
		}
	})

	t.Run("a pod made again under the same name is another pod", func(t *testing.T) {
		old := f.create("again")
		f.remove("again")
		again := f.create("again")
		require.NotEqual(t, old.UID, again.UID)
		require.NoError(t, f.writer.Delete(t.Context(), core.DeletePod{Pod: old}))
		require.Equal(t, []core.Event{core.PodGone{Key: old}}, f.sink.take())
		p := f.get("again")
		require.Equal(t, again.UID, string(p.UID))
		require.Nil(t, p.DeletionTimestamp)
	})

	t.Run("a refused pod says why, and the core gets the failure", func(t *testing.T) {
		bad := f.pool.DeepCopy()
		bad.Spec.Template.Spec.Containers[0].Name = "Not A Name"
		pool := core.PoolKey{Namespace: "default", Name: "pool"}
		err := f.writer.Create(t.Context(), bad, core.CreatePod{Pool: pool, Name: "bad"})
		require.ErrorContains(t, err, "spec.containers[0].name")
		require.Equal(t, []core.Event{core.CreateFailed{Pool: pool, Name: "bad"}}, f.sink.take())
	})

	t.Run("a warm pod gets changed labels and annotations of the template", func(t *testing.T) {
		f := f.in(t)
		pool := f.pool
		defer func() { f.pool = pool }()
		template := func(labels, annotations map[string]string) {
			f.pool = pool.DeepCopy()
			f.pool.Spec.Template.Metadata = v1alpha1.PodTemplateMetadata{Labels: labels, Annotations: annotations}
		}
		template(map[string]string{"team": "a", "dropped": "x", "berth.sh/phase": "claimed"},
			map[string]string{"note": "1", "gone": "y", "kubernetes.io/x": "at the creation"})
		key := f.create("synced")
		f.patch("synced", `{"metadata":{"labels":{"foreign":"1"},"annotations":{"foreign":"2"}}}`)
		own := func() (labels, annotations map[string]string) {
			p := f.get("synced")
			for _, own := range []string{v1alpha1.LabelPool, v1alpha1.LabelPhase, v1alpha1.LabelTemplate} {
				require.Contains(t, p.Labels, own)
				delete(p.Labels, own)
			}
			require.Equal(t, pods.Metadata(f.pool), p.Annotations[v1alpha1.AnnotationMetadata])
			delete(p.Annotations, v1alpha1.AnnotationMetadata)
			require.Equal(t, string(p.UID), key.UID)
			return p.Labels, p.Annotations
		}
		sync := func() error { return f.writer.Sync(t.Context(), f.pool, core.SyncPod{Pod: key}) }

		template(map[string]string{"team": "b", "new": "z"}, map[string]string{"note": "2", "kubernetes.io/x": "later"})
		require.NoError(t, sync())
		labels, annotations := own()
		require.Equal(t, map[string]string{"team": "b", "new": "z", "foreign": "1"}, labels)
		require.Equal(t, map[string]string{"note": "2", "kubernetes.io/x": "at the creation", "foreign": "2"}, annotations)
		version := f.get("synced").ResourceVersion
		require.NoError(t, sync())
		require.Equal(t, version, f.get("synced").ResourceVersion, "there was nothing to write")

		template(nil, nil)
		require.NoError(t, sync())
		labels, annotations = own()
		require.Equal(t, map[string]string{"foreign": "1"}, labels)
		require.Equal(t, map[string]string{"kubernetes.io/x": "at the creation", "foreign": "2"}, annotations)

		template(map[string]string{"team": strings.Repeat("x", 64)}, nil)
		require.True(t, apierrors.IsInvalid(sync()))
		template(map[string]string{"team": "c"}, nil)
		version = f.patch("synced", `{"metadata":{"labels":{"berth.sh/phase":"claimed"}}}`)
		require.NoError(t, sync())
		require.Equal(t, version, f.get("synced").ResourceVersion, "a claimed pod has changed")
		f.remove("synced")
		require.NoError(t, sync())
	})

	t.Run("a pod whose marks admission removes is deleted", func(t *testing.T) {
		f := f.in(t)
		f.pool = f.pool.DeepCopy()
		f.pool.Spec.Agent = &v1alpha1.PoolAgent{Enabled: true, Port: 49983}
		f.pool.Spec.Egress = &v1alpha1.PoolEgress{Mode: v1alpha1.EgressGateway}
		pool := core.PoolKey{Namespace: "default", Name: "pool"}
		for name, c := range map[string]struct{ path, says string }{
			"no-owner": {"/metadata/ownerReferences", "owner reference"},
			"no-phase": {"/metadata/labels/berth.sh~1phase", "berth.sh/phase"},

			"no-egress":   {"/metadata/labels/berth.sh~1egress", "label berth.sh/egress"},
			"no-variable": {"/spec/containers/0/env", "variable BERTH_EGRESS"},
		} {
			f.removeAtAdmission(name, c.path)
			var err error
			require.Eventually(t, func() bool {
				f.sink.take()
				if err = f.writer.Create(t.Context(), f.pool, core.CreatePod{Pool: pool, Name: name}); err == nil {
					f.remove(name) // the API server has not watched the policy yet
				}
				return err != nil && !errors.Is(err, context.DeadlineExceeded) // a busy machine may not answer in time
			}, time.Minute, 10*time.Millisecond)
			require.ErrorContains(t, err, "an admission webhook or policy has removed")
			require.ErrorContains(t, err, c.says)
			require.Equal(t, []core.Event{core.CreateFailed{Pool: pool, Name: name}}, f.sink.take())
			_, err = f.clients.Kubernetes.CoreV1().Pods("default").Get(t.Context(), name, metav1.GetOptions{})
			require.True(t, apierrors.IsNotFound(err), "%v", err)
		}
	})

	t.Run("a pod that an earlier attempt created is found", func(t *testing.T) {
		first := f.create("twice")
		again := core.CreatePod{Pool: core.PoolKey{Namespace: "default", Name: "pool"}, Name: "twice"}
		require.NoError(t, f.writer.Create(t.Context(), f.pool, again))
		require.Equal(t, first, f.sink.take()[0].(core.PodSeen).Pod.Key)
		other := f.pool.DeepCopy() // of another object with that name
		other.UID = "other"
		require.ErrorContains(t, f.writer.Create(t.Context(), other, again), "another pod has the name")
		require.Equal(t, []core.Event{core.CreateFailed{Pool: again.Pool, Name: "twice", Taken: true}}, f.sink.take())
	})
}

// Invariant: I7
func TestWatcherReportsDeletionAndReplacementByUID(t *testing.T) {
	f := setUp(t)
	w := newWatcher(t, f.clients, f.sink.Submit)
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
			ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{v1alpha1.LabelPhase: v1alpha1.PhaseWarm}},
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

	// What is listed is as it was at the version that is returned.
	listed, version, err := w.List(t.Context())
	require.NoError(t, err)
	require.Len(t, listed, 1)
	require.Equal(t, second, listed[0].Key)
	require.NotEmpty(t, version)
}

// After a gap the watch reports only the new pod, as a change of the old one.
// Invariant: I7
func TestPodRecreatedDuringAWatchGapIsNew(t *testing.T) {
	pod := func(uid, version string) corev1.Pod {
		return corev1.Pod{
			TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"},
			ObjectMeta: metav1.ObjectMeta{Name: "p", Namespace: "default", UID: types.UID(uid), ResourceVersion: version, Labels: map[string]string{v1alpha1.LabelPool: "pool"}},
		}
	}
	var lists atomic.Int32
	first := make(chan struct{}) // closed after the event of the first pod
	apiServer := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		switch q := r.URL.Query(); {
		case q.Get("sendInitialEvents") != "":
			w.WriteHeader(http.StatusBadRequest) // list, then watch
		case q.Get("watch") != "" && lists.Load() == 1:
			<-first
			w.WriteHeader(http.StatusGone) // the changes since are unknown
			_ = json.NewEncoder(w).Encode(metav1.Status{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}, Status: "Failure", Code: http.StatusGone, Reason: metav1.StatusReasonExpired})
		case q.Get("watch") != "":
			<-r.Context().Done()
		case lists.Add(1) == 1:
			_ = json.NewEncoder(w).Encode(corev1.PodList{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "PodList"}, ListMeta: metav1.ListMeta{ResourceVersion: "5"}, Items: []corev1.Pod{pod("one", "4")}})
		default:
			_ = json.NewEncoder(w).Encode(corev1.PodList{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "PodList"}, ListMeta: metav1.ListMeta{ResourceVersion: "9"}, Items: []corev1.Pod{pod("two", "8")}})
		}
	}))
	defer apiServer.Close()
	clients, err := kube.NewClients(&rest.Config{Host: apiServer.URL, Transport: &http.Transport{DisableKeepAlives: true}}, 0, 0)
	require.NoError(t, err)
	events := make(chan core.Event, 10)
	w := newWatcher(t, clients, func(ev core.Event) { events <- ev })
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- w.Run(ctx) }()
	next := func() core.Event {
		select {
		case ev := <-events:
			return ev
		case <-time.After(time.Minute):
			t.Fatal("no event")
			return nil
		}
	}
	require.Equal(t, "one", next().(core.PodSeen).Pod.Key.UID)
	close(first)
	require.Equal(t, core.PodGone{Key: core.PodKey{Namespace: "default", Name: "p", UID: "one"}}, next())
	require.Equal(t, "two", next().(core.PodSeen).Pod.Key.UID)
	stop()
	require.NoError(t, <-ended)
}

// watching runs a Watcher until the test has ended.
func (f *fixture) watching() *pods.Watcher {
	w := newWatcher(f.T, f.clients, f.sink.Submit)
	ctx, stop := context.WithCancel(f.Context())
	ended := make(chan error, 1)
	go func() { ended <- w.Run(ctx) }()
	f.Cleanup(func() {
		stop()
		require.NoError(f, <-ended)
	})
	return w
}

// latest returns what is known of a pod: its newest PodSeen, or PodGone. Two watches report
// it, one later than the other, and the allocator drops what is older.
func (f *fixture) latest(name string) (ev core.Event) {
	f.sink.mu.Lock()
	defer f.sink.mu.Unlock()
	for _, e := range f.sink.events {
		switch e := e.(type) {
		case core.PodSeen:
			if e.Pod.Key.Name != name {
				continue
			}
			if known, ok := ev.(core.PodSeen); ok {
				if order, err := resourceversion.CompareResourceVersion(e.Pod.Version, known.Pod.Version); err == nil && order < 0 {
					continue
				}
			}
			ev = e
		case core.PodGone:
			if e.Key.Name == name {
				ev = e
			}
		}
	}
	return ev
}

// patch changes a pod behind everybody's back and returns its new version.
func (f *fixture) patch(name, patch string) string {
	f.Helper()
	p, err := f.clients.Kubernetes.CoreV1().Pods("default").Patch(f.Context(), name, types.MergePatchType, []byte(patch), metav1.PatchOptions{})
	require.NoError(f, err)
	return p.ResourceVersion
}

func TestOwnerReferenceDecidesThePoolOfAPod(t *testing.T) {
	f := setUp(t)
	w := f.watching()
	owned := f.create("owned")
	// A foreign pod with our labels, and with an owner of another kind.
	_, err := f.clients.Kubernetes.CoreV1().Pods("default").Create(t.Context(), &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Name: "foreign", Labels: map[string]string{v1alpha1.LabelPool: "pool", v1alpha1.LabelPhase: v1alpha1.PhaseWarm},
			OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(f.pool, corev1.SchemeGroupVersion.WithKind("ReplicationController"))},
		},
		Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "none"}}},
	}, metav1.CreateOptions{})
	require.NoError(t, err)

	seenAt := func(name, version string) core.Pod {
		t.Helper()
		var seen core.Pod
		require.Eventually(t, func() bool {
			ev := f.latest(name)
			if gone, ok := ev.(core.PodGone); ok {
				t.Fatalf("%s is said to be gone", gone.Key.Name)
			}
			s, ok := ev.(core.PodSeen)
			seen = s.Pod
			return ok && s.Pod.Version == version
		}, time.Minute, 10*time.Millisecond, "%s at %s", name, version)
		return seen
	}
	for _, label := range []string{`null`, `"other"`, `"pool"`} { // each differs from the one before
		mislabelled := label != `"pool"`
		seen := seenAt("owned", f.patch("owned", `{"metadata":{"labels":{"berth.sh/pool":`+label+`}}}`))
		require.Equal(t, owned, seen.Key)
		require.Equal(t, "pool", seen.Pool)
		require.Equal(t, mislabelled, seen.Mislabelled, label)
	}
	seen := seenAt("foreign", f.get("foreign").ResourceVersion)
	require.Empty(t, seen.Pool)
	require.False(t, seen.Mislabelled)

	// A leader that begins reads the same.
	f.patch("owned", `{"metadata":{"labels":{"berth.sh/pool":null}}}`)
	listed, _, err := w.List(t.Context())
	require.NoError(t, err)
	found := map[string]core.Pod{}
	for _, p := range listed {
		found[p.Key.Name] = p
	}
	require.Equal(t, "pool", found["owned"].Pool)
	require.True(t, found["owned"].Mislabelled)
	require.Empty(t, found["foreign"].Pool)

	// One that has really gone is.
	f.remove("owned")
	require.Eventually(t, func() bool { return f.latest("owned") == core.Event(core.PodGone{Key: owned}) }, time.Minute, 10*time.Millisecond)
}

func newWatcher(t *testing.T, clients *kube.Clients, submit func(core.Event)) *pods.Watcher {
	t.Helper()
	w, err := pods.NewWatcher(kube.Options{
		Clients: clients, Namespace: "default", Submit: submit, Log: zaptest.NewLogger(t),
	})
	require.NoError(t, err)
	return w
}
