package rest

import (
	"net/http"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

// PoolScale is a change of a pool's spec.
type PoolScale struct {
	// Warm, MaxWarm and MaxPods are the new values, nil for no change. MaxWarm 0 and MaxPods 0 remove the bound.
	Warm, MaxWarm, MaxPods *int
	// Generation is that of the pool which the caller has read, 0 for any.
	Generation int64
}

func noPool(name string) *apierror.Error {
	return apierror.New(apierror.PoolNotFound, "there is no pool %q; GET /v1/pools lists all", name)
}

// toPool shows a pool, with conditions that follow from the counts beside them: those of the object are older.
func (a *api) toPool(p *v1alpha1.SandboxPool, all map[string]core.Counts) openapi.Pool {
	spec, conditions := &p.Spec, p.Status.Conditions
	counts, known := all[p.Name]
	if known { // to the core, which may not have seen a new pool yet
		conditions = a.Allocator.Conditions(p, counts)
	}
	shown := openapi.Pool{
		Name: p.Name, CreatedAt: p.CreationTimestamp.UTC(), Generation: p.Generation, Deleting: p.DeletionTimestamp != nil,
		Spec: openapi.PoolSpec{
			Warm: int(spec.Warm), MaxWarm: int(deref(spec.MaxWarm, 0)), MaxPods: int(deref(spec.MaxPods, 0)), Images: []string{}, DefaultPort: int(spec.DefaultPort), Ports: []int{},
			IdleTimeout: float64(deref(spec.IdleTimeoutSeconds, 0)), Activity: openapi.ActivityMode(spec.Activity),
			MaxLifetime: float64(deref(spec.MaxLifetimeSeconds, 0)), Hold: float64(deref(spec.HoldSeconds, 0)),
			PostStart: spec.PostStart != nil, EnvdVersion: agentVersionOf(p), OnRestart: openapi.PoolSpecOnRestart(spec.OnRestart),
		},
		Counts: openapi.PoolCounts{
			Warm: counts.Warm, Pending: counts.Pending, Claimed: counts.Claimed, Releasing: counts.Releasing, WaitingClaims: counts.Waiting,
		},
		Conditions: []openapi.Condition{},
	}
	shown.Spec.EgressMode = openapi.PoolSpecEgressMode(v1alpha1.EgressNone)
	if spec.EgressEnabled() != nil {
		shown.Spec.EgressMode = openapi.PoolSpecEgressMode(v1alpha1.EgressGateway)
	}
	for _, port := range spec.Ports {
		shown.Spec.Ports = append(shown.Spec.Ports, int(port))
	}
	for i := range spec.Template.Spec.Containers {
		shown.Spec.Images = append(shown.Spec.Images, spec.Template.Spec.Containers[i].Image)
	}
	if spec.Activity == v1alpha1.ActivityBytes {
		shown.Spec.MinBytesPerMinute = int64(deref(spec.MinBytesPerMinute, defaultMinBytes))
	}
	shown.Spec.CPUCount, shown.Spec.MemoryMB, shown.Spec.DiskSizeMB = resourcesOf(p)
	for _, c := range conditions {
		shown.Conditions = append(shown.Conditions, openapi.Condition{
			Type: c.Type, Status: string(c.Status), Reason: c.Reason, Message: c.Message, Since: optional(c.LastTransitionTime.UTC()),
		})
	}
	return shown
}

func (a *api) listPools(w *reply, r *http.Request) error {
	pools := a.Allocator.Pools()
	if err := w.rows(len(pools)); err != nil {
		return err
	}
	counts, err := a.Allocator.Counts(r.Context())
	if err != nil {
		return err
	}
	all := openapi.Pools{Pools: []openapi.Pool{}}
	for _, p := range pools {
		all.Pools = append(all.Pools, a.toPool(p, counts))
	}
	return writeJSON(w, http.StatusOK, all)
}

func (a *api) getPool(w *reply, r *http.Request) error {
	name := r.PathValue("pool")
	p, ok := a.Allocator.Pool(name)
	if !ok {
		return noPool(name)
	}
	return a.answerPool(w, r, p)
}

func (a *api) answerPool(w *reply, r *http.Request, p *v1alpha1.SandboxPool) error {
	counts, err := a.Allocator.Counts(r.Context())
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, a.toPool(p, counts))
}

// scale changes the size of a pool.
func (a *api) scale(w *reply, r *http.Request) error {
	var request openapi.ScalePoolJSONBody
	if err := decodeBody(r, &request); err != nil {
		return err
	}
	if request.Warm == nil && request.MaxWarm == nil && request.MaxPods == nil {
		return invalid("body: must have warm, maxWarm or maxPods")
	}
	p, err := a.Allocator.ScalePool(r.Context(), r.PathValue("pool"), PoolScale{
		Warm: request.Warm, MaxWarm: request.MaxWarm, MaxPods: request.MaxPods, Generation: deref(request.Generation, 0),
	})
	if err != nil {
		return err
	}
	return a.answerPool(w, r, p)
}
