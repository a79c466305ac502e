package devcluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/dynamic"
)

// emptyLimit bounds the removal of what an earlier test has left.
const emptyLimit = 30 * time.Second

// Shared is one cluster for the tests of a package, which use it one after the other. The
// cluster starts with the first test that asks for it. TestMain gives Tests(m) to goleak, or runs
// it.
type Shared struct {
	Options Options

	mu      sync.Mutex
	cluster *Cluster
}

// Start returns the cluster. The namespace default has no pods, events and custom resources. Like the
// function Start it skips the test with -short.
func (s *Shared) Start(t testing.TB) *Cluster {
	t.Helper()
	skipShort(t)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.cluster == nil {
		if s.Options.Progress == nil {
			s.Options.Progress = os.Stderr
		}
		c, err := Up(t.Context(), s.Options)
		if err != nil {
			t.Fatalf("start the shared cluster: %v", err)
		}
		s.cluster = c
		return c
	}
	if err := s.cluster.empty(t.Context()); err != nil {
		t.Fatalf("empty the shared cluster: %v", err)
	}
	return s.cluster
}

// Tests returns what runs the tests of a package and then ends the cluster.
func (s *Shared) Tests(m *testing.M) interface{ Run() int } { return sharedTests{s, m} }

type sharedTests struct {
	shared *Shared
	m      *testing.M
}

func (r sharedTests) Run() int {
	code := r.m.Run()
	if c := r.shared.cluster; c != nil {
		ctx, cancel := context.WithTimeout(context.Background(), downLimit)
		defer cancel()
		if err := c.Down(ctx); err != nil {
			fmt.Fprintln(os.Stderr, "stop the shared cluster:", err)
			code = max(code, 1)
		}
	}
	return code
}

// empty removes pods, events and custom resources, also those that a finalizer keeps, from the namespace
// default.
func (c *Cluster) empty(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, emptyLimit)
	defer cancel()
	client, err := dynamic.NewForConfig(c.RestConfig())
	if err != nil {
		return err
	}
	kinds := []schema.GroupVersionResource{{Version: "v1", Resource: "pods"}, {Version: "v1", Resource: "events"}}
	kinds = append(kinds, c.served...)
	for _, kind := range kinds {
		err = errors.Join(err, wait.PollUntilContextCancel(ctx, readyPoll, true, func(ctx context.Context) (bool, error) {
			return emptied(ctx, client.Resource(kind).Namespace(metav1.NamespaceDefault))
		}))
	}
	return err
}

func emptied(ctx context.Context, objects dynamic.ResourceInterface) (bool, error) {
	left, err := objects.List(ctx, metav1.ListOptions{})
	if err != nil {
		return false, err
	}
	for _, o := range left.Items {
		if len(o.GetFinalizers()) > 0 {
			none := []byte(`{"metadata":{"finalizers":null}}`)
			_, _ = objects.Patch(ctx, o.GetName(), types.MergePatchType, none, metav1.PatchOptions{})
		}
		_ = objects.Delete(ctx, o.GetName(), *metav1.NewDeleteOptions(0)) // the next list says whether it worked
	}
	return len(left.Items) == 0, nil
}
