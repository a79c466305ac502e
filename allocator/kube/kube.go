// Package kube makes the clients with which the allocator talks to the API
// server, and repeats what fails.
package kube

import (
	"context"
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/berth-sandbox/berth/api/v1alpha1"
)

// CallTimeout bounds every single call to the API server but lists and watches.
const CallTimeout = 5 * time.Second

// Clients are the clients the allocator uses.
type Clients struct {
	Kubernetes kubernetes.Interface
	// Berth serves group berth.sh.
	Berth rest.Interface
}

// NewClients returns clients for config. qps and burst are the client-side rate
// limit, in requests a second and requests; a qps of 0 means none, which leaves
// it to the API server's priority and fairness.
func NewClients(config *rest.Config, qps float32, burst int) (*Clients, error) {
	if qps < 0 || burst < 0 {
		return nil, fmt.Errorf("client rate limit: qps %v and burst %d must not be negative", qps, burst)
	}
	config = rest.CopyConfig(config)
	config.RateLimiter = nil
	config.QPS, config.Burst = qps, burst
	if qps == 0 {
		config.QPS = -1 // client-go's spelling of no limit; 0 would mean 5
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

// ListTimeout bounds the reading of everything that there is of some kinds, page
// by page.
const ListTimeout = time.Minute

// Retry calls f until it returns nil or ctx ends, pausing longer and longer
// between the calls. Each call's context ends after CallTimeout. failed is told
// every error but the last.
func Retry(ctx context.Context, f func(context.Context) error, failed func(error)) error {
	return RetryWithin(ctx, CallTimeout, f, failed)
}

// RetryWithin is Retry with another bound of each call.
func RetryWithin(ctx context.Context, timeout time.Duration, f func(context.Context) error, failed func(error)) error {
	const first, most = 50 * time.Millisecond, 5 * time.Second
	for pause := first; ; pause = min(2*pause, most) {
		call, cancel := context.WithTimeout(ctx, timeout)
		err := f(call)
		cancel()
		if err == nil {
			return nil
		}
		if ctx.Err() != nil {
			return err
		}
		failed(err)
		select {
		case <-ctx.Done():
			return err
		case <-time.After(pause):
		}
	}
}
