package conformance

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/rand"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/berth-sandbox/berth/internal/options"
)

// Options names the cluster and what its pods run.
type Options struct {
	// RestConfig reaches the cluster. Required.
	RestConfig *rest.Config
	// Namespace in which pods are made; it must exist. Default: default.
	Namespace string
	// Image that holds the demo-sandbox binary on its PATH. A process node
	// ignores it. Default: demo-sandbox.
	Image string
	// Client reaches the addresses of pods. Required.
	Client *http.Client
	// Guard is the longest that one expected change may take. Default: 90 s.
	Guard time.Duration
}

// behaviour is one row of the table.
type behaviour struct {
	name string
	// pod is what is created first.
	pod podSpec
	// judge acts and expects. The pod exists.
	judge func(s *subject)
}

// Run judges every behaviour in a parallel subtest of its own. The subtests mostly
// wait, so -parallel should be well above the number of cores. Run deletes the pods
// that it has made.
func Run(t *testing.T, o Options) {
	t.Helper()
	require.NoError(t, options.Require(o, "RestConfig", "Client"))
	o.Namespace, o.Image = cmp.Or(o.Namespace, metav1.NamespaceDefault), cmp.Or(o.Image, "demo-sandbox")
	o.Guard = cmp.Or(o.Guard, 90*time.Second)
	config := rest.CopyConfig(o.RestConfig)
	config.QPS = -1
	client, err := kubernetes.NewForConfig(config)
	require.NoError(t, err)
	seen := observe(t, client, o.Namespace, "conformance-"+rand.String(6))
	table := slices.Concat(readinessTable(), restartTable(), endTable(), addressTable())
	t.Run("behaviours", func(t *testing.T) { // returns when all parallel ones have, before the observer ends
		for _, b := range table {
			t.Run(strings.ReplaceAll(b.name, " ", "-"), func(t *testing.T) {
				t.Parallel()
				s := &subject{t: t, o: o, client: client, seen: seen}
				b.judge(s.create(b.pod))
			})
		}
	})
}

// subject is one pod of a behaviour, with the position up to which its history has
// been judged.
type subject struct {
	t      *testing.T
	o      Options
	client kubernetes.Interface
	seen   *observer

	name string
	spec podSpec
	made *corev1.Pod
	next int // first observation that is not judged yet
}

// create makes another pod, with a history of its own.
func (s *subject) create(spec podSpec) *subject {
	s.t.Helper()
	return s.createNamed("c-"+rand.String(8), spec)
}

func (s *subject) createNamed(name string, spec podSpec) *subject {
	s.t.Helper()
	n := &subject{t: s.t, o: s.o, client: s.client, seen: s.seen, name: name, spec: spec}
	ctx, cancel := n.limit()
	defer cancel()
	pod := spec.build(n)
	var err error
	n.made, err = n.client.CoreV1().Pods(n.o.Namespace).Create(ctx, pod, metav1.CreateOptions{})
	require.NoError(n.t, err, "create pod")
	n.t.Cleanup(func() {
		if n.t.Failed() {
			n.t.Logf("history of %s:\n%s", n.name, n.seen.history(n.name))
		}
		ctx, cancel := context.WithTimeout(context.Background(), n.o.Guard)
		defer cancel()
		// Gone in most cases.
		_ = n.client.CoreV1().Pods(n.o.Namespace).Delete(ctx, n.name, metav1.DeleteOptions{GracePeriodSeconds: new(int64)})
	})
	return n
}

func (s *subject) limit() (context.Context, context.CancelFunc) {
	return context.WithTimeout(s.t.Context(), s.o.Guard)
}

// until waits for the next version that has the properties and returns it. The next
// call starts after that version, so a sequence of calls expects an order.
func (s *subject) until(what string, holds ...property) version {
	s.t.Helper()
	ctx, cancel := s.limit()
	defer cancel()
	at, v, ok := s.seen.await(ctx, s.name, s.next, s.ours(holds))
	require.True(s.t, ok, "pod %s: expected in vain: %s", s.name, what)
	s.next = at + 1
	return v
}

// never requires that no version so far has the properties.
func (s *subject) never(what string, holds ...property) {
	s.t.Helper()
	require.False(s.t, slices.ContainsFunc(s.seen.all(s.name), s.ours(holds)), "pod %s: must never be: %s", s.name, what)
}

// first returns the first version of all that has the property.
func (s *subject) first(holds property) version {
	s.t.Helper()
	all := s.seen.all(s.name)
	i := slices.IndexFunc(all, s.ours([]property{holds}))
	require.GreaterOrEqual(s.t, i, 0, "no such version")
	return all[i]
}

// ours is the property of a version of this pod that has all of holds.
func (s *subject) ours(holds []property) property {
	return func(v version) bool {
		return v.UID == s.made.UID && !slices.ContainsFunc(holds, func(p property) bool { return !p(v) })
	}
}

// delete deletes the pod with a grace period in seconds, or with the pod's own.
func (s *subject) delete(grace ...int64) {
	s.t.Helper()
	ctx, cancel := s.limit()
	defer cancel()
	o := metav1.DeleteOptions{Preconditions: metav1.NewUIDPreconditions(string(s.made.UID))}
	if len(grace) > 0 {
		o.GracePeriodSeconds = &grace[0]
	}
	require.NoError(s.t, s.client.CoreV1().Pods(s.o.Namespace).Delete(ctx, s.name, o), "delete pod")
}

// ends deletes the pod once it is ready and returns its last version, with the end of
// its container and the time from the deletion request to that end.
func (s *subject) ends(grace ...int64) (end *corev1.ContainerStateTerminated, after time.Duration, last version) {
	s.t.Helper()
	s.until("ready", ready)
	s.delete(grace...)
	end, after, last = s.ended()
	return end, after, last
}

// ended waits until the deleted pod is gone and returns the same.
func (s *subject) ended() (end *corev1.ContainerStateTerminated, after time.Duration, last version) {
	s.t.Helper()
	last = s.until("gone", gone)
	end = last.main().State.Terminated
	require.NotNil(s.t, end, "the last version says how the container ended")
	return end, end.FinishedAt.Sub(s.first(deleting).asked()), last
}

// do sends a request to a pod and decodes the answer into into, unless that is nil.
func (s *subject) do(method, ip string, port int, path string, into any) error {
	ctx, cancel := s.limit()
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, fmt.Sprintf("http://%s:%d%s", ip, port, path), http.NoBody)
	if err != nil {
		return err
	}
	resp, err := s.o.Client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s %s answers %s", method, path, resp.Status)
	}
	if into == nil {
		return nil
	}
	return json.NewDecoder(resp.Body).Decode(into)
}

// setReady decides what the pod's readiness probe finds.
func (s *subject) setReady(v version, value bool) {
	s.t.Helper()
	require.NoError(s.t, s.do(http.MethodPost, v.Status.PodIP, mainPort, fmt.Sprintf("/ready?value=%v", value), nil))
}

// reachable waits until a port of an address answers, or does not answer. A missing
// answer counts only if another pod still answers.
func (s *subject) reachable(ip string, port int, want bool) {
	s.t.Helper()
	answers := func(ip string, port int) bool { return s.do(http.MethodGet, ip, port, "/", nil) == nil }
	require.Eventually(s.t, func() bool { return answers(ip, port) == want }, s.o.Guard, 50*time.Millisecond,
		"%s:%d answers: expected %v", ip, port, want)
	if !want {
		witness := s.create(podSpec{probe: "/healthz"})
		require.True(s.t, answers(witness.until("ready", ready).Status.PodIP, mainPort), "no pod can be reached any more")
	}
}

// serves requires that a port of the pod answers every request, one per period, until
// end.
func (s *subject) serves(pod version, port int, period time.Duration, end time.Time) {
	s.t.Helper()
	ticker := time.NewTicker(period)
	defer ticker.Stop()
	for now := time.Now(); now.Before(end); now = <-ticker.C {
		var who struct{ PodUID string }
		require.NoError(s.t, s.do(http.MethodGet, pod.Status.PodIP, port, "/", &who))
		require.Equal(s.t, string(pod.UID), who.PodUID)
	}
}
