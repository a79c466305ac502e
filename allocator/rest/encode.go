package rest

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"time"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/egress/policy"
	"github.com/berth-sandbox/berth/internal/printable"
)

// encode returns a value in JSON, which a terminal can show whatever is in it: objects may be older than the
// checks of this API, or be written by others.
func encode(v any) ([]byte, error) {
	raw, err := json.Marshal(v)
	if err != nil {
		return nil, fmt.Errorf("encode answer: %w", err)
	}
	return printable.JSON(raw), nil
}

func writeJSON(w *reply, code int, v any) error {
	raw, err := encode(v)
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_, _ = w.Write(raw)
	return nil
}

// answer answers r with an error.
func answer(w http.ResponseWriter, r *http.Request, e *apierror.Error) {
	e.RequestID = r.Header.Get("X-Request-Id")
	e.Write(w)
}

func seconds(d time.Duration) float64 { return d.Round(time.Millisecond).Seconds() }

// nonzero returns nil for the zero value.
func nonzero[T comparable](v T) *T {
	if v == *new(T) {
		return nil
	}
	return &v
}

// optional returns nil for the zero time.
func optional(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	return &t
}

// earliestEnd returns when s ends at the latest, the zero time for never.
func earliestEnd(s *core.Sandbox) time.Time {
	if !s.LifetimeEnd.IsZero() && (s.EndAt.IsZero() || s.LifetimeEnd.Before(s.EndAt)) {
		return s.LifetimeEnd
	}
	return s.EndAt
}

// noEnd stands for "never": the E2B SDKs cannot read a sandbox without an end.
var noEnd = time.Date(9999, 12, 31, 23, 59, 59, 0, time.UTC)

func agentVersionOf(pool *v1alpha1.SandboxPool) string {
	if pool.Spec.AgentEnabled() != nil {
		return cmp.Or(pool.Spec.EnvdVersion, berthAgentVersion)
	}
	return cmp.Or(pool.Spec.EnvdVersion, agentVersion)
}

// agentVersion is the reported envdVersion of a pool that names none. The SDKs refuse sandboxes below 0.1.0, and a higher
// version would promise features of an agent in the pod.
const agentVersion = "0.1.0"

// berthAgentVersion is that of a pool with Berth's agent: the newest version whose features it has.
const berthAgentVersion = "0.6.4"

// sandboxPhases are the phases of live sandboxes. One that has ended since it was read counts as running.
var sandboxPhases = map[core.Phase]openapi.SandboxPhase{
	core.Starting: openapi.SandboxPhaseStarting, core.Running: openapi.SandboxPhaseRunning,
	core.FallingAsleep: openapi.SandboxPhaseFallingAsleep, core.Asleep: openapi.SandboxPhaseAsleep, core.Waking: openapi.SandboxPhaseWaking,
	core.Stopped: openapi.SandboxPhaseStopped,
}

// toSandbox returns the API's form of a sandbox.
func (a *api) toSandbox(s core.Sandbox) openapi.Sandbox {
	shown := openapi.Sandbox{
		SandboxID: s.ID, TemplateID: s.Pool.Name, Alias: s.Pool.Name, ClientID: "berth", EnvdVersion: agentVersion,
		Domain: a.PublicHost, URL: a.url(s),
		State:     openapi.SandboxStateRunning,
		StartedAt: s.ClaimedAt, EndAt: noEnd, IdleTimeout: seconds(s.IdleTimeout), Metadata: s.Metadata, User: s.User,
		Access: openapi.Access(s.Access.String()), Network: a.networkOf(&s),
	}
	if len(s.Network.Allow) == 0 && slices.Contains(s.Network.Deny, policy.All) {
		shown.AllowInternetAccess = new(bool)
	}
	shown.PodName, _ = podOf(&s)
	shown.Phase = cmp.Or(sandboxPhases[s.Phase], openapi.SandboxPhaseRunning)
	if isPaused(&s) {
		shown.State, shown.PauseMode = openapi.SandboxStatePaused, openapi.Full
		if s.Phase == core.Stopped {
			shown.PauseMode = openapi.Filesystem
		}
	}
	shown.AsleepAt, shown.StopAfter = optional(s.AsleepAt), seconds(s.Sleep.StopAfter)
	if s.Agent.Port != 0 {
		shown.Lifecycle = &openapi.SandboxLifecycle{OnTimeout: openapi.Kill, AutoResume: s.Sleep.WakeOnTraffic}
		if s.Sleep.AtEnd {
			shown.Lifecycle.OnTimeout = openapi.Pause
		}
	}
	if end := earliestEnd(&s); !end.IsZero() {
		shown.EndAt = end
	}
	if pool, ok := a.Allocator.Pool(s.Pool.Name); ok {
		shown.CPUCount, shown.MemoryMB, shown.DiskSizeMB = resourcesOf(pool)
		shown.EnvdVersion = agentVersionOf(pool)
	}
	return shown
}
