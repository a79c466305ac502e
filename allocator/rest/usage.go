package rest

import (
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/inspect"
	"github.com/berth-sandbox/berth/api/openapi"
)

// unmeasured makes the error of a cluster without metrics the documented one.
func unmeasured(err error) error {
	if errors.Is(err, inspect.ErrNoMetrics) {
		return notImplemented("the sandbox has no agent that answers, and the cluster does not serve metrics.k8s.io to the allocator; " +
			"give its pool an agent, install metrics-server, or measure the pod that podName names")
	}
	return err
}

// metrics answers with the measurements of a sandbox in the last hour.
func (a *api) metrics(w *reply, r *http.Request) error {
	from, to, err := span(r)
	if err != nil {
		return err
	}
	s, err := a.live(r)
	if err != nil {
		return err
	}
	if s.Phase == core.Stopped { // it uses nothing
		return writeJSON(w, http.StatusOK, []openapi.SandboxMetric{})
	}
	all, err := a.Allocator.UsageOver(r.Context(), s)
	if err != nil {
		return unmeasured(err)
	}
	shown := []openapi.SandboxMetric{}
	for _, u := range all {
		if !u.At.Before(from) && !u.At.After(to) {
			shown = append(shown, a.toMetric(s, u))
		}
	}
	return writeJSON(w, http.StatusOK, shown)
}

// span reads the parameters start and end, in Unix seconds.
func span(r *http.Request) (from, to time.Time, err error) {
	query := r.URL.Query()
	to = noEnd
	for name, at := range map[string]*time.Time{"start": &from, "end": &to} {
		if text := query.Get(name); text != "" {
			n, err := strconv.ParseInt(text, 10, 64)
			if err != nil {
				return from, to, invalid("%s: %q: must be an integer", name, text)
			}
			*at = time.Unix(n, 0)
		}
	}
	return from, to, nil
}

// maxMeasured is how many sandboxes one call measures, as the document says.
const maxMeasured = 100

// metricsOfAll answers with the latest measurements of several sandboxes.
func (a *api) metricsOfAll(w *reply, r *http.Request) error {
	text := r.URL.Query().Get("sandbox_ids")
	if text == "" {
		return invalid("sandbox_ids: required: IDs of sandboxes, separated by commas")
	}
	var sandboxes []core.Sandbox
	ids := slices.Compact(slices.Sorted(strings.SplitSeq(text, ",")))
	if len(ids) > maxMeasured {
		return invalid("sandbox_ids: has %d IDs, at most %d are possible", len(ids), maxMeasured)
	}
	for _, id := range ids {
		s, known, err := a.Allocator.Sandbox(r.Context(), id)
		if err != nil {
			return err
		}
		if known && s.Phase < core.Released && s.Phase != core.Stopped {
			sandboxes = append(sandboxes, s)
		}
	}
	shown := openapi.SandboxesWithMetrics{Sandboxes: map[string]openapi.SandboxMetric{}}
	if len(sandboxes) == 0 {
		return writeJSON(w, http.StatusOK, shown)
	}
	all, err := a.Allocator.Usage(r.Context(), sandboxes)
	if err != nil {
		return unmeasured(err)
	}
	for _, s := range sandboxes {
		if u, ok := all[s.ID]; ok {
			shown.Sandboxes[s.ID] = a.toMetric(s, u)
		}
	}
	return writeJSON(w, http.StatusOK, shown)
}

func (a *api) toMetric(s core.Sandbox, u inspect.Usage) openapi.SandboxMetric {
	shown := openapi.SandboxMetric{
		Timestamp: u.At.UTC(), TimestampUnix: u.At.Unix(), CPUCount: u.CPUs, MemUsed: u.Memory, MemTotal: u.MemoryTotal,
		MemCache: u.Cache, DiskUsed: u.Disk, DiskTotal: u.DiskTotal,
	}
	if pool, ok := a.Allocator.Pool(s.Pool.Name); ok && u.CPUs == 0 {
		shown.CPUCount, _, _ = resourcesOf(pool)
		shown.MemTotal = int64(limitOf(pool, corev1.ResourceMemory))
		shown.DiskTotal = int64(limitOf(pool, corev1.ResourceEphemeralStorage))
	}
	shown.CPUUsedPct = 100 * u.CPU / float64(max(1, shown.CPUCount))
	return shown
}

func noLogs(id string, err error) error {
	switch {
	case errors.Is(err, inspect.ErrNoLogs):
		return notImplemented("%v; read the log where the pod runs", err)
	case errors.Is(err, inspect.ErrGone):
		return notImplemented("the log of sandbox %s cannot be read: %v", id, err)
	}
	return fmt.Errorf("read the log: %w", err)
}
