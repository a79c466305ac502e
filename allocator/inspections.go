package allocator

import (
	"context"
	"errors"
	"io"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/berth-sandbox/berth/allocator/agents"
	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/inspect"
	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/openapi"
)

// Pod implements rest.Allocator.
func (a *Allocator) Pod(ctx context.Context, key core.PodKey) (inspect.Pod, error) {
	p, err := a.inspect.Pod(ctx, key)
	return p, unanswered(err)
}

// LogLines implements rest.Allocator.
func (a *Allocator) LogLines(ctx context.Context, s core.Sandbox) ([]string, error) {
	lines, err := a.watches.records.LogLines(ctx, s.ID)
	return lines, unanswered(err)
}

// EgressUsage implements rest.Allocator.
func (a *Allocator) EgressUsage(ctx context.Context, id string) (openapi.SandboxEgress, error) {
	if _, err := a.leadingTerm(); err != nil {
		return openapi.SandboxEgress{}, notLeading(err)
	}
	return a.control.EgressUsage(ctx, id), nil
}

// PendingPods implements rest.Allocator.
func (a *Allocator) PendingPods(ctx context.Context, pool string, most int) ([]core.PodKey, int, error) {
	key := core.PoolKey{Namespace: a.o.Namespace, Name: pool}
	return read(ctx, a, func(c core.View) ([]core.PodKey, int) { return c.PendingPods(key, most) })
}

// PodFailures implements rest.Allocator.
func (a *Allocator) PodFailures(ctx context.Context, pool string) ([]core.PodFailure, error) {
	key := core.PoolKey{Namespace: a.o.Namespace, Name: pool}
	all, _, err := read(ctx, a, func(c core.View) ([]core.PodFailure, bool) { return c.PodFailures(key), true })
	return all, err
}

// Logs implements rest.Allocator.
func (a *Allocator) Logs(ctx context.Context, key core.PodKey, o inspect.LogOptions) (io.ReadCloser, error) {
	log, err := a.inspect.Logs(ctx, key, o)
	return log, unanswered(err)
}

// maxMeasuring is how many agents a call asks at one time what their sandboxes use.
const maxMeasuring = 16

// measureWait bounds the time that a call spends on all agents. Those that do not answer use configureWait each.
const measureWait = 3 * time.Second

// Usage implements rest.Allocator. Agents measure their own sandboxes: they know more, such as the disk. The
// cluster is asked about those without an agent, and those whose agent does not answer.
func (a *Allocator) Usage(ctx context.Context, sandboxes []core.Sandbox) (map[string]inspect.Usage, error) {
	t, err := a.leadingTerm()
	if err != nil {
		return nil, notLeading(err)
	}
	all := t.measure(ctx, sandboxes)
	var others []string
	for _, s := range sandboxes {
		if _, ok := all[s.ID]; !ok {
			others = append(others, s.ID)
		}
	}
	if len(others) == 0 {
		return all, nil
	}
	byPod, err := a.inspect.Usage(ctx, a.o.Namespace, others)
	if err != nil && len(all) > 0 {
		return all, nil // what was measured is worth an answer
	}
	for _, s := range sandboxes {
		if u, ok := byPod[s.Pod.Name]; ok {
			all[s.ID] = u
		}
	}
	return all, unanswered(err)
}

// measure returns what those sandboxes use whose agents answer.
func (t *term) measure(ctx context.Context, sandboxes []core.Sandbox) map[string]inspect.Usage {
	ctx, cancel := context.WithTimeout(ctx, measureWait)
	defer cancel()
	all := map[string]inspect.Usage{}
	var mu sync.Mutex
	var asking errgroup.Group
	asking.SetLimit(maxMeasuring)
	for _, s := range sandboxes {
		if s.Agent.Port == 0 || t.agents == nil {
			continue
		}
		asking.Go(func() error {
			call, cancel := context.WithTimeout(ctx, configureWait)
			defer cancel()
			m, err := t.agents.Measure(call, s)
			if err != nil {
				return nil
			}
			mu.Lock()
			defer mu.Unlock()
			all[s.ID] = usageOf(&m)
			return nil
		})
	}
	_ = asking.Wait() // none has an error
	return all
}

func usageOf(m *agents.Measurement) inspect.Usage {
	return inspect.Usage{
		At: time.Unix(m.Unix, 0), CPU: m.CPUUsedPct / 100 * float64(m.CPUCount), Memory: m.MemUsed,
		CPUs: m.CPUCount, MemoryTotal: m.MemTotal, Cache: m.MemCache, Disk: m.DiskUsed, DiskTotal: m.DiskTotal,
	}
}

// UsageOver implements rest.Allocator. Agents keep their measurements themselves, so that nothing is measured of a sandbox
// whose usage no caller asks for, and a new leader has them too.
func (a *Allocator) UsageOver(ctx context.Context, s core.Sandbox) ([]inspect.Usage, error) {
	t, err := a.leadingTerm()
	if err != nil {
		return nil, notLeading(err)
	}
	if s.Agent.Port != 0 && t.agents != nil {
		call, cancel := context.WithTimeout(ctx, configureWait)
		defer cancel()
		if measured, err := t.agents.MeasureOver(call, s); err == nil {
			all := make([]inspect.Usage, 0, len(measured))
			for i := range measured {
				all = append(all, usageOf(&measured[i]))
			}
			return all, nil
		}
	}
	byPod, err := a.inspect.Usage(ctx, a.o.Namespace, []string{s.ID})
	if u, ok := byPod[s.Pod.Name]; ok {
		return []inspect.Usage{u}, nil
	}
	return nil, unanswered(err)
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
