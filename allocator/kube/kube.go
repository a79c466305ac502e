package kube

import (
	"context"
	"fmt"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/berth-sandbox/berth/api/v1alpha1"
)

// CallTimeout bounds one call to the API server. Lists, watches and the journal's calls have bounds
// of their own.
const CallTimeout = 5 * time.Second

// Clients are the API server clients of the allocator.
type Clients struct {
	Kubernetes kubernetes.Interface
	// Berth serves the API group berth.sh.
	Berth rest.Interface
}

// NewClients returns clients for config. qps (requests per second) and burst (requests) are the
// client-side rate limit. A qps of 0 means no limit: the API server's priority and fairness then
// applies alone. Negative values are an error.
func NewClients(config *rest.Config, qps float32, burst int) (*Clients, error) {
	if qps < 0 || burst < 0 {
		return nil, fmt.Errorf("client rate limit: qps %v and burst %d must not be negative", qps, burst)
	}
	config = rest.CopyConfig(config)
	config.RateLimiter = nil
	config.QPS, config.Burst = qps, burst
	if qps == 0 {
		config.QPS = -1 // client-go: no limit; 0 would mean 5
	}
	config.UserAgent = rest.DefaultKubernetesUserAgent() + " berth-allocator"

	builtin := rest.CopyConfig(config)
	builtin.ContentType = "application/vnd.kubernetes.protobuf"
	builtin.AcceptContentTypes = "application/vnd.kubernetes.protobuf,application/json"
	k, err := kubernetes.NewForConfig(builtin)
	if err != nil {
		return nil, fmt.Errorf("kubernetes client: %w", err)
	}
	scheme := runtime.NewScheme()
	if err := v1alpha1.AddToScheme(scheme); err != nil {
		return nil, fmt.Errorf("register types: %w", err)
	}
	gv := v1alpha1.GroupVersion()
	config.GroupVersion, config.APIPath = &gv, "/apis"
	config.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	b, err := rest.RESTClientFor(config)
	if err != nil {
		return nil, fmt.Errorf("berth.sh client: %w", err)
	}
	return &Clients{Kubernetes: k, Berth: b}, nil
}

// ListTimeout bounds one page of a list. It is the API server's own limit of a request.
const ListTimeout = time.Minute

// PageSize is the number of objects in one page of a list.
const PageSize = 1000

// List reads a list page by page from the API server's store. page gets the continue token, "" for
// the first page, and returns the token of the next one. List retries a failed page after a growing
// pause and with twice the timeout, from CallTimeout up to ListTimeout. It starts again when the
// API server no longer has the snapshot that the list was read from. failed gets every error. List
// itself returns an error only when ctx has ended.
func List[T any](ctx context.Context, page func(ctx context.Context, next string) ([]T, string, error), failed func(error)) ([]T, error) {
	const first, most = 50 * time.Millisecond, 5 * time.Second
	pause, timeout := first, CallTimeout
	var all []T
	for next := ""; ; {
		call, cancel := context.WithTimeout(ctx, timeout)
		items, following, err := page(call, next)
		cancel()
		switch {
		case err == nil:
			if all, next, pause = append(all, items...), following, first; next == "" {
				return all, nil
			}
			continue
		case ctx.Err() != nil:
			return nil, err
		case apierrors.IsResourceExpired(err):
			all, next = nil, ""
		}
		failed(err)
		select {
		case <-ctx.Done():
			return nil, err
		case <-time.After(pause):
		}
		pause, timeout = min(2*pause, most), min(2*timeout, ListTimeout)
	}
}

// Work calls next in n goroutines until it returns false, and waits for them. It shuts the queue
// down when ctx ends, so that next, which takes from that queue, returns false.
func Work(ctx context.Context, queue interface{ ShutDown() }, n int, next func(context.Context) bool) {
	stop := context.AfterFunc(ctx, queue.ShutDown)
	defer stop()
	var all sync.WaitGroup
	for range n {
		all.Go(func() {
			for next(ctx) {
			}
		})
	}
	all.Wait()
}
