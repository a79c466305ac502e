package nodes_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/berth-sandbox/berth/devcluster"
	"github.com/berth-sandbox/berth/devcluster/nodes"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	limit    = time.Minute
	ofKind   = "wanted"
	creators = 8
)

// TestScheduler has nodes and pods that are objects only. The tests of package
// processnode have cordons.
func TestScheduler(t *testing.T) {
	c := devcluster.Start(t, devcluster.Options{})
	client, err := kubernetes.NewForConfig(c.RestConfig())
	require.NoError(t, err)
	w := &world{t, client}
	for _, name := range []string{"a", "b", "c"} {
		w.node(name, ofKind)
	}
	w.node("foreign", "other")
	for _, test := range []struct {
		name  string
		judge func(*world, *rest.Config)
	}{
		{"NodesFillEvenly", nodesFillEvenly},
		{"BindingThatFailedTakesNoRoom", bindingThatFailedTakesNoRoom},
		{"PodWithAnUnknownRuleSaysSo", podWithAnUnknownRuleSaysSo},
	} {
		t.Run(test.name, func(t *testing.T) {
			w := &world{t, client}
			t.Cleanup(func() { w.clear() })
			test.judge(w, c.RestConfig())
		})
	}
}

type world struct {
	t      *testing.T
	client kubernetes.Interface
}

func (w *world) ctx() context.Context {
	ctx, cancel := context.WithTimeout(w.t.Context(), limit)
	w.t.Cleanup(cancel)
	return ctx
}

func (w *world) node(name, kind string) {
	w.t.Helper()
	require.NoError(w.t, nodes.Register(w.ctx(), w.client, name, kind))
}

func (w *world) run(config *rest.Config) {
	w.t.Helper()
	client, err := kubernetes.NewForConfig(config)
	require.NoError(w.t, err)
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() {
		scheduler := nodes.Scheduler{Client: client, Kind: ofKind, Log: zap.NewNop()}
		if err := scheduler.Run(ctx); err != nil {
			w.t.Errorf("scheduler: %v", err)
		}
	})
	w.t.Cleanup(func() { cancel(); running.Wait() })
}

func (w *world) create(prefix string, from, to int, change func(*corev1.PodSpec)) {
	w.t.Helper()
	ctx := w.ctx()
	var next atomic.Int32
	next.Store(int32(from))
	var all sync.WaitGroup
	for range creators {
		all.Go(func() {
			for i := next.Add(1) - 1; i < int32(to); i = next.Add(1) - 1 {
				pod := &corev1.Pod{
					ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint(prefix, i)},
					Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "main", Image: "none"}}},
				}
				if change != nil {
					change(&pod.Spec)
				}
				if _, err := w.client.CoreV1().Pods("default").Create(ctx, pod, metav1.CreateOptions{}); err != nil {
					w.t.Errorf("create a pod: %v", err)
				}
			}
		})
	}
	all.Wait()
}

func (w *world) clear() {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	require.NoError(w.t, w.client.CoreV1().Pods("default").DeleteCollection(ctx,
		metav1.DeleteOptions{GracePeriodSeconds: new(int64)}, metav1.ListOptions{}))
}

// pods lists them by their node; those without one and with the reason
// Unschedulable are at "none".
func (w *world) pods() map[string][]corev1.Pod {
	list, err := w.client.CoreV1().Pods("default").List(w.ctx(), metav1.ListOptions{})
	require.NoError(w.t, err)
	at := map[string][]corev1.Pod{}
	for _, p := range list.Items {
		node := p.Spec.NodeName
		for _, c := range p.Status.Conditions {
			if node == "" && c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse &&
				c.Reason == corev1.PodReasonUnschedulable {
				node = "none"
			}
		}
		at[node] = append(at[node], p)
	}
	return at
}

func (w *world) await(want map[string]int) {
	w.t.Helper()
	require.EventuallyWithT(w.t, func(t *assert.CollectT) {
		last := map[string]int{}
		for node, pods := range w.pods() {
			last[node] = len(pods)
		}
		assert.Equal(t, want, last, "pods by node")
	}, limit, 50*time.Millisecond)
}

func nodesFillEvenly(w *world, config *rest.Config) {
	w.run(config)
	w.create("pod-", 0, 30, nil)
	w.await(map[string]int{"a": 10, "b": 10, "c": 10})

	ended := w.pods()["c"][0]
	ended.Status.Phase = corev1.PodSucceeded
	pods := w.client.CoreV1().Pods("default")
	_, err := pods.UpdateStatus(w.ctx(), &ended, metav1.UpdateOptions{})
	require.NoError(w.t, err)
	w.create("pod-", 30, 31, nil)
	w.await(map[string]int{"a": 10, "b": 10, "c": 11}) // one of them has ended

	nowhere := func(s *corev1.PodSpec) { s.NodeSelector = map[string]string{corev1.LabelHostname: "d"} }
	w.create("selective-", 0, 8, nowhere)
	w.await(map[string]int{"a": 10, "b": 10, "c": 11, "none": 8})
	require.Contains(w.t, w.pods()["none"][0].Status.Conditions[0].Message, "0/4 nodes are available")
	w.node("d", ofKind)
	w.await(map[string]int{"a": 10, "b": 10, "c": 11, "d": 8})
	require.NoError(w.t, w.client.CoreV1().Nodes().Delete(w.ctx(), "d", metav1.DeleteOptions{}))
}

// lossy fails two of three bindings: one before the API server sees it, one after
// that did it. What the watch shows comes late, so that the answers to bindings
// are first.
type lossy struct {
	http.RoundTripper
	bindings *atomic.Int32
}

func (l lossy) RoundTrip(r *http.Request) (*http.Response, error) {
	if !strings.HasSuffix(r.URL.Path, "/binding") {
		resp, err := l.RoundTripper.RoundTrip(r)
		if err == nil && r.URL.Query().Get("watch") == "true" {
			resp.Body = late{resp.Body}
		}
		return resp, err
	}
	n := l.bindings.Add(1)
	if n%3 == 1 {
		if r.Body != nil {
			r.Body.Close()
		}
		return nil, errors.New("lost on the way")
	}
	resp, err := l.RoundTripper.RoundTrip(r)
	if n%3 == 2 && err == nil {
		resp.Body.Close()
		return nil, errors.New("lost on the way back")
	}
	return resp, err
}

type late struct{ io.ReadCloser }

func (l late) Read(b []byte) (int, error) {
	n, err := l.ReadCloser.Read(b)
	time.Sleep(10 * time.Millisecond)
	return n, err
}

func bindingThatFailedTakesNoRoom(w *world, config *rest.Config) {
	config.WrapTransport = func(rt http.RoundTripper) http.RoundTripper { return lossy{rt, new(atomic.Int32)} }
	w.run(config)
	for i := range 2 { // a place that one round keeps would be missing in the other
		w.create(fmt.Sprintf("round-%d-", i), 0, 60, nil)
		w.await(map[string]int{"a": 20, "b": 20, "c": 20})
		w.clear()
	}
}

func podWithAnUnknownRuleSaysSo(w *world, config *rest.Config) {
	w.run(config)
	w.create("apart-", 0, 1, func(s *corev1.PodSpec) {
		s.Affinity = &corev1.Affinity{PodAntiAffinity: &corev1.PodAntiAffinity{
			RequiredDuringSchedulingIgnoredDuringExecution: []corev1.PodAffinityTerm{{TopologyKey: corev1.LabelHostname}},
		}}
	})
	w.await(map[string]int{"none": 1})
	require.Contains(w.t, w.pods()["none"][0].Status.Conditions[0].Message, "spec.affinity is not known")
}
