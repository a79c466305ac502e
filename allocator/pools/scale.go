package pools

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/kube"
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

// ErrChanged means that a pool's spec is not of the generation that the caller has read.
var ErrChanged = errors.New("the pool has changed")

// Scale is a change of a pool's spec.
type Scale struct {
	// Warm, MaxWarm and MaxPods are the new values, nil for no change. MaxWarm 0 and MaxPods 0 remove the bound.
	Warm, MaxWarm, MaxPods *int
	// Generation is that of the pool which the caller has read, 0 for any.
	Generation int64
}

// maxConflicts is how often Scale tries a pool whose status or metadata changes meanwhile.
const maxConflicts = 5

// Scale changes the size of a pool and returns the changed pool. It reads the pool and patches that
// version of it, so that it overwrites no other change of the spec. Errors are ErrChanged or the API
// server's.
func (p *Pools) Scale(ctx context.Context, key core.PoolKey, s Scale) (*v1alpha1.SandboxPool, error) {
	ctx, cancel := context.WithTimeout(ctx, kube.CallTimeout)
	defer cancel()
	for attempt := 1; ; attempt++ {
		changed, err := p.scale(ctx, key, s)
		if !apierrors.IsConflict(err) || attempt == maxConflicts {
			return changed, err
		}
	}
}

func (p *Pools) scale(ctx context.Context, key core.PoolKey, s Scale) (*v1alpha1.SandboxPool, error) {
	var pool, changed v1alpha1.SandboxPool
	if err := p.o.Clients.Berth.Get().Namespace(key.Namespace).Resource(resource).Name(key.Name).Do(ctx).Into(&pool); err != nil {
		return nil, fmt.Errorf("read pool %s: %w", key.Name, err)
	}
	if s.Generation != 0 && s.Generation != pool.Generation {
		return nil, fmt.Errorf("%w: its generation is %d", ErrChanged, pool.Generation)
	}
	spec := map[string]any{}
	if s.Warm != nil {
		spec["warm"] = *s.Warm
	}
	for field, bound := range map[string]*int{"maxWarm": s.MaxWarm, "maxPods": s.MaxPods} {
		switch {
		case bound == nil:
		case *bound == 0:
			spec[field] = nil
		default:
			spec[field] = *bound
		}
	}
	raw, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"uid": pool.UID, "resourceVersion": pool.ResourceVersion}, "spec": spec,
	})
	if err != nil {
		return nil, fmt.Errorf("encode patch: %w", err)
	}
	if err := p.o.Clients.Berth.Patch(types.MergePatchType).Namespace(key.Namespace).Resource(resource).Name(key.Name).Body(raw).
		Do(ctx).Into(&changed); err != nil {
		return nil, fmt.Errorf("patch pool %s: %w", key.Name, err)
	}
	return &changed, nil
}
