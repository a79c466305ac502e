package allocator

import (
	"context"
	"errors"
	"io"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/inspect"
	"github.com/berth-sandbox/berth/api/apierror"
)

// Pod implements rest.Allocator.
func (a *Allocator) Pod(ctx context.Context, key core.PodKey) (inspect.Pod, error) {
	p, err := a.inspect.Pod(ctx, key)
	return p, unanswered(err)
}

// PendingPods implements rest.Allocator.
func (a *Allocator) PendingPods(ctx context.Context, pool string, most int) ([]core.PodKey, int, error) {
	key := core.PoolKey{Namespace: a.o.Namespace, Name: pool}
	return read(ctx, a, func(c core.View) ([]core.PodKey, int) { return c.PendingPods(key, most) })
}

// Logs implements rest.Allocator.
func (a *Allocator) Logs(ctx context.Context, key core.PodKey, o inspect.LogOptions) (io.ReadCloser, error) {
	log, err := a.inspect.Logs(ctx, key, o)
	return log, unanswered(err)
}

// Usage implements rest.Allocator.
func (a *Allocator) Usage(ctx context.Context, sandboxes []string) (map[string]inspect.Usage, error) {
	all, err := a.inspect.Usage(ctx, a.o.Namespace, sandboxes)
	return all, unanswered(err)
}

// unanswered makes an error of the API server one of the API. Those of package inspect stay.
func unanswered(err error) error {
	for _, known := range []error{nil, inspect.ErrGone, inspect.ErrNoLogs, inspect.ErrNoMetrics, context.Canceled} {
		if errors.Is(err, known) {
			return err
		}
	}
	return apierror.New(apierror.Timeout, "the Kubernetes API server did not answer: %v; try again", err)
}
