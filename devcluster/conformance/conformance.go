package conformance

import (
	"context"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/rand"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
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
	// NodeName binds the pods where no scheduler runs. Default: none.
	NodeName string
	// Dial reaches a port of a pod. If nil, the behaviours that need it are
	// skipped.
	Dial func(ctx context.Context, podIP string, port int) (net.Conn, error)
	// Guard is the longest that one expected change may take. Default: 90 s.
	Guard time.Duration
}

// behaviour is one row of the table.
type behaviour struct {
	name string
	// pod is what is created first; its name is set by Run.
	pod podSpec
	// dials: there is nothing to judge without Options.Dial.
	dials bool
	// judge acts and expects. The pod exists.
	judge func(s *subject)
}

// Run judges every behaviour in a parallel subtest of its own. The subtests mostly
// wait, so -parallel should be well above the number of cores. Run deletes the pods
// that it has made.
func Run(t *testing.T, o Options) {
	t.Helper()
	require.NotNil(t, o.RestConfig, "conformance.Options.RestConfig is required")
	if o.Namespace == "" {
		o.Namespace = metav1.NamespaceDefault
	}
	if o.Image == "" {
		o.Image = "demo-sandbox"
	}
	if o.Guard == 0 {
		o.Guard = 90 * time.Second
	}
	config := rest.CopyConfig(o.RestConfig)
	config.QPS = -1
	client, err := kubernetes.NewForConfig(config)
	require.NoError(t, err)
	seen := observe(t, client, o.Namespace, "conformance-"+rand.String(6))
	var table []behaviour
	for _, part := range [][]behaviour{readinessTable(), restartTable(), startTable(), endTable(), addressTable()} {
		table = append(table, part...)
	}
	t.Run("behaviours", func(t *testing.T) { // returns when all parallel ones have, before the observer ends
		for _, b := range table {
			t.Run(strings.ReplaceAll(b.name, " ", "-"), func(t *testing.T) {
				t.Parallel()
				if b.dials && o.Dial == nil {
					t.Skip("judged at the pod's address, and no Options.Dial is given")
				}
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

// until waits for the next version that has the property and returns it. The next
// call starts after that version, so a sequence of calls expects an order.
func (s *subject) until(what string, holds func(o observation) bool) *corev1.Pod {
	s.t.Helper()
	ctx, cancel := s.limit()
	defer cancel()
	at, o, ok := s.seen.await(ctx, s.name, s.next, func(o observation) bool {
		return o.pod.UID == s.made.UID && holds(o)
	})
	require.True(s.t, ok, "pod %s: expected in vain: %s", s.name, what)
	s.next = at + 1
	return o.pod
}

// never requires that no version so far has the property.
func (s *subject) never(what string, holds func(o observation) bool) {
	s.t.Helper()
	for _, o := range s.seen.all(s.name) {
		require.False(s.t, o.pod.UID == s.made.UID && holds(o), "pod %s: must never be: %s", s.name, what)
	}
}

// delete deletes the pod with a grace period in seconds; nil: the pod's own.
func (s *subject) delete(grace *int64) {
	s.t.Helper()
	ctx, cancel := s.limit()
	defer cancel()
	require.NoError(s.t, s.client.CoreV1().Pods(s.o.Namespace).Delete(ctx, s.name, metav1.DeleteOptions{
		GracePeriodSeconds: grace, Preconditions: metav1.NewUIDPreconditions(string(s.made.UID)),
	}), "delete pod")
}

// patch merges a change into the object.
func (s *subject) patch(change string) {
	s.t.Helper()
	ctx, cancel := s.limit()
	defer cancel()
	_, err := s.client.CoreV1().Pods(s.o.Namespace).Patch(ctx, s.name, types.MergePatchType, []byte(change),
		metav1.PatchOptions{})
	require.NoError(s.t, err, "patch pod")
}
