package rest

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/api/openapi"
)

// phaseNames are the words for phases in records. A release that is on its way into the journal is
// not a phase: it may still fail.
var phaseNames = map[core.Phase]openapi.RecordPhase{
	core.Starting: openapi.RecordPhaseStarting, core.Running: openapi.RecordPhaseRunning, core.Releasing: openapi.RecordPhaseRunning,
	core.FallingAsleep: openapi.RecordPhaseFallingAsleep, core.Asleep: openapi.RecordPhaseAsleep, core.Waking: openapi.RecordPhaseWaking,
	core.Stopped:  openapi.RecordPhaseStopped,
	core.Released: openapi.RecordPhaseReleased, core.Ended: openapi.RecordPhaseEnded,
}

// toRecord returns the operators' form of a sandbox.
func (a *api) toRecord(s core.Sandbox) openapi.SandboxRecord {
	pod, ip := podOf(&s)
	return openapi.SandboxRecord{
		SandboxID: s.ID, Pool: s.Pool.Name, Team: s.Team, User: s.User, Phase: phaseNames[s.Phase], Reason: s.Reason,
		Message: s.Message, ExitCode: s.ExitCode, Workload: toWorkload(s.Workload),
		ClaimedAt: s.ClaimedAt, StartedAt: optional(s.StartedAt), ReleasedAt: optional(s.ReleasedAt), EndAt: optional(s.EndAt), LifetimeEnd: optional(s.LifetimeEnd),
		IdleTimeout: seconds(s.IdleTimeout), Metadata: s.Metadata, PodName: pod, PodIP: ip,
		URL: a.url(s), DefaultPort: int(s.DefaultPort), Ports: portsOf(s.Ports),
	}
}

func toWorkload(w *core.Workload) *openapi.Workload {
	if w == nil {
		return nil
	}
	images := w.Images
	if images == nil {
		images = []string{}
	}
	return &openapi.Workload{Images: images, Requests: openapi.Resources(w.Requests), Limits: openapi.Resources(w.Limits)}
}

func portsOf(ports []uint16) []int {
	all := make([]int, 0, len(ports))
	for _, p := range ports {
		all = append(all, int(p))
	}
	return all
}

// url is the address of the default port of a sandbox.
func (a *api) url(s core.Sandbox) string {
	return fmt.Sprintf("%s://%d-%s.%s/", a.PublicScheme, s.DefaultPort, s.ID, a.PublicHost)
}

// find answers with one page of records.
func (a *api) find(w *reply, r *http.Request) error {
	filter, err := filterOf(r)
	if err != nil {
		return err
	}
	query := r.URL.Query()
	filter.Pool, filter.Team, filter.user, filter.prefix = query.Get("pool"), query.Get("team"), query.Get("user"), query.Get("prefix")
	if filter.metadata, err = decodeMetadata(query.Get("metadata")); err != nil {
		return err
	}
	wanted := map[string]bool{}
	for name := range strings.SplitSeq(query.Get("phase"), ",") {
		wanted[name] = true
	}
	if !query.Has("phase") {
		for phase, name := range phaseNames {
			wanted[string(name)] = phase < core.Released
		}
	}
	all := map[bool]bool{true: true, false: true} // whether every live phase is wanted, and every other one
	for phase, name := range phaseNames {
		live := phase < core.Released
		if wanted[string(name)] {
			filter.phases = append(filter.phases, phase)
			filter.Live, filter.Gone = filter.Live || live, filter.Gone || !live
		} else {
			all[live] = false
		}
	}
	if (all[true] || !filter.Live) && (all[false] || !filter.Gone) {
		filter.phases = nil // the query selects them
	}
	page, next, err := a.page(w, r, filter)
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = io.WriteString(w, `{"sandboxes":[`)
	err = writeEach(w, page, func(s core.Sandbox) any { return a.toRecord(s) })
	if _, _ = io.WriteString(w, "]"); next != "" {
		_, _ = fmt.Fprintf(w, `,"nextToken":%q`, next)
	}
	_, _ = io.WriteString(w, "}")
	return err
}

// explain answers why a sandbox is alive, or when and why it was released.
func (a *api) explain(w *reply, r *http.Request) error {
	s, err := a.known(r)
	if err != nil {
		return err
	}
	list, _, err := a.Allocator.Activities(r.Context(), Filter{ID: r.PathValue("sandboxID")}, 1)
	if err != nil {
		return err
	}
	now := time.Now().UTC()
	shown := openapi.SandboxExplanation{Now: now, DryRun: a.ReapDryRun}
	if len(list) > 0 {
		s = list[0].Sandbox
		activity := toActivity(list[0], now)
		shown.Activity = &activity
	}
	shown.Sandbox = a.toRecord(s)
	return writeJSON(w, http.StatusOK, shown)
}

// routeWhy says why requests reach a sandbox, or do not.
var routeWhy = map[core.RouteWhy]string{
	core.RouteServed:   "it runs, and routers send requests to its pod",
	core.RouteEnding:   "it is being released; routers send requests to its pod until the release is in the journal",
	core.RouteStarting: "its PostStart hook has not succeeded yet; routers hold requests for it for the hold time of its pool",
	core.RouteReaped:   "it was found idle, and its release is on its way into the journal",
	core.RouteLost:     "its pod has ended, is being deleted or has another address, and its release is on its way into the journal",
	core.RouteNotBegun: "it is being released, and its PostStart hook had not succeeded",
	core.RouteAsleep:   "it is asleep, or about to be; routers hold requests that may wake it, and refuse others",
	core.RouteWaking:   "it is asleep and is being woken; routers hold requests for it",
	core.RouteReleased: "it was released",
	core.RouteEnded:    "it was released, and its pod is gone",
}

// explainRoute answers whether requests reach a sandbox.
func (a *api) explainRoute(w *reply, r *http.Request) error {
	id := r.PathValue("sandboxID")
	st, known, err := a.Allocator.Route(r.Context(), id)
	if err != nil {
		return err
	}
	if !known {
		return notFound(id, st.Sandbox, known)
	}
	s := st.Sandbox
	pod, ip := podOf(&s)
	shown := openapi.RouteExplanation{
		SandboxID: s.ID, Routable: st.Why.Routable(), Why: routeWhy[st.Why], Phase: phaseNames[s.Phase], Reason: s.Reason,
		ReleasedAt: optional(s.ReleasedAt), PodName: pod, PodIP: ip, PodNotReady: st.NotReady,
		DefaultPort: int(s.DefaultPort), Ports: portsOf(s.Ports), Routers: []openapi.RouterOfRoute{}, RoutersOthers: st.Others,
	}
	if s.Phase == core.Stopped {
		shown.PodNotReady = "" // it is that of its former pod
		shown.Why = "it is stopped, and has no pod; routers hold requests that may wake it, and refuse others"
		if st.Why == core.RouteWaking {
			shown.Why = "it is stopped and is being woken; routers hold requests until its next pod has its files"
		}
	}
	if !s.ReleasedAt.IsZero() {
		shown.Why += fmt.Sprintf("; released at %s: %s", s.ReleasedAt.UTC().Format(time.RFC3339), s.Reason)
	}
	for _, router := range st.Routers {
		state := openapi.RouterOfRouteStateSent
		switch {
		case router.Acknowledged:
			state = openapi.RouterOfRouteStateAcknowledged
		case !router.Connected:
			state = openapi.RouterOfRouteStateUnknown
		}
		shown.Routers = append(shown.Routers, openapi.RouterOfRoute{
			SessionID: router.ID, Address: router.From, Connected: router.Connected, State: state,
		})
	}
	if st.Fence != nil {
		fence := toFence(*st.Fence)
		shown.Fence = &fence
	}
	return writeJSON(w, http.StatusOK, shown)
}
