package kube

import (
	"context"
	"fmt"
	"net/url"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/util/workqueue"

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
	// Host is the host, or host:port, of the API server.
	Host string
}

// Config returns the configuration of a kubeconfig file, or that of the pod's service account for
// an empty name.
func Config(kubeconfig string) (*rest.Config, error) {
	if kubeconfig != "" {
		return clientcmd.BuildConfigFromFlags("", kubeconfig)
	}
	config, err := rest.InClusterConfig()
	if err != nil {
		return nil, fmt.Errorf("not set, and not in a cluster: %w", err)
	}
	return config, nil
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
	host := config.Host
	if u, err := url.Parse(host); err == nil && u.Host != "" {
		host = u.Host
	}
	return &Clients{Kubernetes: k, Berth: b, Host: host}, nil
}

// NewQueue returns a queue. An item that fails comes back after a pause, which grows from least to
// most with each failure in a row.
func NewQueue[T comparable](least, most time.Duration) workqueue.TypedRateLimitingInterface[T] {
	return workqueue.NewTypedRateLimitingQueue(workqueue.NewTypedItemExponentialFailureRateLimiter[T](least, most))
}

// Work calls do with each item of the queue, in n goroutines, and adds the item again if do fails.
// When ctx ends it shuts the queue down, works off the rest and waits for the goroutines.
func Work[T comparable](
	ctx context.Context, queue workqueue.TypedRateLimitingInterface[T], n int, do func(context.Context, T) error,
) {
	stop := context.AfterFunc(ctx, queue.ShutDown)
	defer stop()
	var all sync.WaitGroup
	for range n {
		all.Go(func() {
			for {
				item, ended := queue.Get()
				if ended {
					return
				}
				if do(ctx, item) != nil {
					queue.AddRateLimited(item)
				} else {
					queue.Forget(item)
				}
				queue.Done(item)
			}
		})
	}
	all.Wait()
}

// Bounded cuts a text for people to at most limit bytes and a mark. It drops what is not UTF-8, which the journal
// cannot hold: the API server stores what a node says, in protobuf, without a look at it.
func Bounded(text string, limit int) string {
	if len(text) <= limit {
		return strings.ToValidUTF8(text, "")
	}
	return strings.ToValidUTF8(text[:limit], "") + "..."
}
