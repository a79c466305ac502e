package rest

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/berth-sandbox/berth/allocator/agents"
	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/inspect"
	"github.com/berth-sandbox/berth/allocator/snapshots"
	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

func TestPauseAnswersAsTheSandboxStands(t *testing.T) {
	for status, want := range map[core.CallStatus]struct {
		code   int
		reason apierror.Reason
	}{
		core.CallUnknown: {404, apierror.SandboxNotFound}, core.CallGone: {404, apierror.SandboxGone},
		core.CallAsleep: {409, apierror.SandboxState}, core.CallNotReady: {503, apierror.SandboxBusy},
		core.CallRefused: {502, apierror.SleepFailed}, core.CallUnfit: {501, apierror.NotImplemented},
	} {
		f := &fake{status: status, why: "process 5 of user 0"}
		e := refusal(t, call(handler(t, f), "POST", "/sandboxes/k3x9/pause", "{}"), want.code, want.reason)
		require.Contains(t, e.Message, "process 5 of user 0")
	}
	f := &fake{status: core.CallOK}
	for _, body := range []string{"", "{}", `{"memory":true}`} {
		w := call(handler(t, f), "POST", "/sandboxes/k3x9/pause", body)
		require.Equal(t, 204, w.Code, w.Body)
	}
	require.Equal(t, []bool{false, false, false}, f.stops)
	e := refusal(t, call(handler(t, f), "POST", "/sandboxes/k3x9/pause", `{"memory":false}`), 501, apierror.NotImplemented)
	require.Contains(t, e.Message, "memory: false: ")
	require.Contains(t, e.Message, "--snapshots")
}

func TestPauseWithoutMemoryStopsTheSandbox(t *testing.T) {
	f := withStore(t)
	w := call(handler(t, f), "POST", "/sandboxes/k3x9/pause", `{"memory":false,"requireHealthyGuest":true}`)
	require.Equal(t, 204, w.Code, w.Body)
	require.Equal(t, []bool{true}, f.stops)
	f.why = "no bytes are left"
	for _, c := range []struct {
		status core.CallStatus
		phase  core.Phase
		err    error
		code   int
		reason apierror.Reason
	}{
		{core.CallAsleep, core.Stopped, nil, 409, apierror.SandboxState}, {core.CallUnfit, core.Running, nil, 501, apierror.NotImplemented},
		{core.CallRefused, core.Running, nil, 502, apierror.SleepFailed},
		{core.CallRefused, core.Asleep, errors.New("files changed meanwhile"), 502, apierror.SnapshotFailed},
		{core.CallRefused, core.Asleep, snapshots.ErrFull, 429, apierror.QuotaExceeded},
		{core.CallRefused, core.Asleep, snapshots.ErrBusy, 503, apierror.Overloaded},
		{core.CallRefused, core.Asleep, snapshots.ErrTooLarge, 413, apierror.SnapshotTooLarge},
		{core.CallRefused, core.Asleep, snapshots.ErrStore, 503, apierror.StoreUnavailable},
		{core.CallRefused, core.Asleep, fmt.Errorf("%w: no", agents.ErrUnreachable), 502, apierror.SandboxUnreachable},
	} {
		f.notArchived = c.err
		f.status, f.sandboxes = c.status, map[string]core.Sandbox{"k3x9": {Phase: c.phase}}
		e := refusal(t, call(handler(t, f), "POST", "/sandboxes/k3x9/pause", `{"memory":false}`), c.code, c.reason)
		require.Regexp(t, "^this sandbox .*: no bytes are left$", e.Message)
	}
}

// The record of a stopped sandbox names the pod that it had, whose address another one may get.
// Invariant: P33
func TestStoppedSandboxShowsAndUsesNoPod(t *testing.T) {
	pod := core.PodKey{Namespace: "ns", Name: "python-x", UID: "uid"}
	stopped := core.Sandbox{
		Binding: core.Binding{ID: "k3x9", Agent: core.Agent{Port: 49983}, Sleep: core.SleepPolicy{StopAfter: 90 * time.Second}},
		Phase:   core.Stopped, AsleepAt: time.Unix(1700000000, 0), Pod: pod, IP: netip.MustParseAddr("10.1.2.3"),
	}
	f := &fake{
		status: core.CallOK, sandboxes: map[string]core.Sandbox{"k3x9": stopped}, live: []core.Sandbox{stopped}, log: "of another one",
		inspected: map[string]inspect.Pod{pod.Name: {Object: &corev1.Pod{Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "main"}}}}}},
		usage:     map[string]inspect.Usage{"k3x9": {CPU: 1}}, series: []inspect.Usage{{CPU: 1}},
		routes: map[string]core.RouteStatus{"k3x9": {Sandbox: stopped, Why: core.RouteAsleep, NotReady: "it is being deleted"}},
	}
	shown := bodyAs[openapi.Sandbox](t, call(handler(t, f), "GET", "/sandboxes/k3x9", "").Body)
	require.Equal(t, openapi.SandboxStatePaused, shown.State)
	require.Equal(t, openapi.Filesystem, shown.PauseMode)
	require.Equal(t, openapi.SandboxPhaseStopped, shown.Phase)
	require.EqualValues(t, 90, shown.StopAfter)
	route := bodyAs[openapi.RouteExplanation](t, call(handler(t, f), "GET", "/v1/sandboxes/k3x9/route", "").Body)
	require.Equal(t, openapi.RecordPhaseStopped, route.Phase)
	require.Contains(t, route.Why, "it is stopped")
	diagnosed := bodyAs[openapi.SandboxDiagnostics](t, call(handler(t, f), "GET", "/v1/sandboxes/k3x9/diagnostics", "").Body)
	require.Nil(t, diagnosed.Pod)
	require.Contains(t, diagnosed.PodProblem, "stopped")
	for _, path := range []string{
		"/sandboxes/k3x9", "/v2/sandboxes?state=paused", "/v1/sandboxes", "/v1/sandboxes?phase=stopped", "/v1/sandboxes/k3x9", "/v1/sandboxes/k3x9/route",
		"/v1/sandboxes/k3x9/diagnostics", "/sandboxes/k3x9/metrics", "/sandboxes/metrics?sandbox_ids=k3x9",
	} {
		w := call(handler(t, f), "GET", path, "")
		require.Equal(t, 200, w.Code, w.Body)
		if strings.Contains(path, "metrics") {
			require.NotContains(t, w.Body.String(), "cpuCount", path)
			continue
		}
		require.Contains(t, w.Body.String(), "k3x9", path)
		require.NotContains(t, w.Body.String(), pod.Name, path)
		require.NotContains(t, w.Body.String(), "10.1.2.3", path)
	}
	for _, path := range []string{"/sandboxes/k3x9/logs", "/v2/sandboxes/k3x9/logs"} {
		e := refusal(t, call(handler(t, f), "GET", path, ""), 409, apierror.SandboxState)
		require.Contains(t, e.Message, "stopped")
	}
	require.Empty(t, f.measured)
	refusal(t, call(handler(t, f), "POST", "/sandboxes/k3x9/refreshes", "{}"), 409, apierror.SandboxState)
	require.Equal(t, 201, call(handler(t, f), "POST", "/v2/sandboxes/k3x9/connect", "{}").Code)
	f.why, f.status = "its pool has no pod for it", core.CallRefused
	for _, path := range []string{"/v2/sandboxes/k3x9/connect", "/sandboxes/k3x9/resume"} {
		e := refusal(t, call(handler(t, f), "POST", path, "{}"), 502, apierror.StartFailed)
		require.Equal(t, "this sandbox is stopped, and could not be woken: its pool has no pod for it", e.Message)
	}
	f.status = core.CallNotReady
	e := refusal(t, call(handler(t, f), "POST", "/sandboxes/k3x9/connect", "{}"), 429, apierror.PoolEmpty)
	require.Contains(t, e.Message, "its pool has no pod for it")
}

// In an outage of the API server, a call for a sandbox that runs does not wait as long as one for a wake.
func TestOnlyAWakeMayTakeMinutes(t *testing.T) {
	for phase, most := range map[core.Phase]time.Duration{core.Running: answerWait, core.Asleep: wakeWait, core.Stopped: wakeWait, core.Starting: wakeWait} {
		f := &fake{status: core.CallOK, sandboxes: map[string]core.Sandbox{"k3x9": {Binding: core.Binding{ID: "k3x9"}, Phase: phase}}}
		require.Less(t, call(handler(t, f), "POST", "/v2/sandboxes/k3x9/connect", "{}").Code, 300)
		require.InDelta(t, most, f.extending, float64(answerWait)/2)
	}
}

func TestClaimSaysWhenItsSandboxIsStopped(t *testing.T) {
	yes, no, never, soon, later := true, false, time.Duration(0), time.Second, 10*time.Minute
	for body, want := range map[string]core.SleepAsk{
		`,"stopAfter":600`:                                               {StopAfter: &later},
		`,"stopAfter":0`:                                                 {StopAfter: &never},
		`,"onIdle":"Sleep","stopAfter":1`:                                {WhenIdle: &yes, StopAfter: &soon},
		`,"autoPauseMemory":false`:                                       {},
		`,"autoPause":true,"autoPauseMemory":false`:                      {AtEnd: &yes, StopAfter: &soon},
		`,"autoPause":true,"autoPauseMemory":true`:                       {AtEnd: &yes},
		`,"autoPause":true,"autoPauseMemory":false,"stopAfter":600`:      {AtEnd: &yes, StopAfter: &later},
		`,"autoPause":true,"autoPauseMemory":false,"wakeOnTraffic":true`: {AtEnd: &yes, WakeOnTraffic: &yes, StopAfter: &soon},
		`,"onTimeout":"Sleep","autoPauseMemory":false`:                   {AtEnd: &yes, StopAfter: &soon},
		`,"onTimeout":"Release","autoPause":true,"autoPauseMemory":false,"autoResume":{"enabled":false}`: {AtEnd: &no},
	} {
		f := withStore(t)
		w := call(handler(t, f), "POST", "/sandboxes", `{"templateID":"python"`+body+`}`)
		require.Equal(t, 201, w.Code, "%s: %s", body, w.Body)
		require.Equal(t, want, f.claim.Sleep, body)
	}
	e := refusal(t, call(handler(t, withStore(t)), "POST", "/sandboxes", `{"templateID":"python","autoPause":true,"autoPauseMemory":false,"autoResume":{"enabled":true}}`), 400, apierror.BadRequest)
	require.Regexp(t, "^autoPauseMemory: false: .*autoResume", e.Message)
	for _, after := range []string{"-1", "31536001", "1.5", `"1h"`} {
		e := refusal(t, call(handler(t, withStore(t)), "POST", "/sandboxes", `{"templateID":"python","stopAfter":`+after+`}`), 400, apierror.BadRequest)
		require.Contains(t, e.Message, "stopAfter")
	}
	for body, field := range map[string]string{`,"stopAfter":600`: "stopAfter", `,"autoPause":true,"autoPauseMemory":false`: "autoPauseMemory"} {
		f := withStore(t)
		f.store = nil
		e := refusal(t, call(handler(t, f), "POST", "/sandboxes", `{"templateID":"python"`+body+`}`), 501, apierror.NotImplemented)
		require.Regexp(t, "^"+field+": .*--snapshots", e.Message)
	}
	for ends, code := range map[v1alpha1.AcceptPause]int{v1alpha1.PauseRefused: 501, v1alpha1.PauseEnds: 201} {
		f := withStore(t)
		f.pools[0].Spec.Agent, f.pools[0].Spec.AcceptPause = nil, ends
		w := call(handler(t, f), "POST", "/sandboxes", `{"templateID":"python","stopAfter":600}`)
		require.Equal(t, code, w.Code, w.Body)
		if code == 501 {
			require.Regexp(t, "^stopAfter: .*no agent", refusal(t, w, 501, apierror.NotImplemented).Message)
		} else {
			require.Equal(t, core.SleepAsk{}, f.claim.Sleep)
		}
	}
}

func TestOnlyConnectAndResumeWakeASandbox(t *testing.T) {
	asleep := core.Sandbox{Binding: core.Binding{ID: "k3x9", Agent: core.Agent{Port: 49983}}, Phase: core.Asleep, AsleepAt: time.Unix(1700000000, 0)}
	f := &fake{status: core.CallOK, sandboxes: map[string]core.Sandbox{"k3x9": asleep}}
	for _, path := range []string{"/v2/sandboxes/k3x9/connect", "/sandboxes/k3x9/resume"} {
		w := call(handler(t, f), "POST", path, "{}")
		require.Equal(t, 201, w.Code, w.Body)
	}
	refusal(t, call(handler(t, f), "POST", "/sandboxes/k3x9/refreshes", "{}"), 409, apierror.SandboxState)
	w := call(handler(t, f), "GET", "/sandboxes/k3x9", "")
	var shown openapi.Sandbox
	require.NoError(t, json.Unmarshal(w.Body.Bytes(), &shown))
	require.Equal(t, openapi.SandboxStatePaused, shown.State)
	require.Equal(t, openapi.Full, shown.PauseMode)
	require.Equal(t, openapi.SandboxPhaseAsleep, shown.Phase)
	require.Equal(t, asleep.AsleepAt.Unix(), shown.AsleepAt.Unix())
	require.Equal(t, &openapi.SandboxLifecycle{OnTimeout: openapi.Kill}, shown.Lifecycle)
}

func TestListSelectsSandboxesByTheirState(t *testing.T) {
	f := &fake{sandboxes: map[string]core.Sandbox{}}
	for id, phase := range map[string]core.Phase{"a": core.Starting, "b": core.Running, "c": core.FallingAsleep, "d": core.Asleep, "e": core.Waking, "f": core.Stopped} {
		s := core.Sandbox{Binding: core.Binding{ID: id}, Phase: phase}
		f.sandboxes[id], f.live = s, append(f.live, s)
	}
	for query, want := range map[string]int{"": 6, "?state=running": 3, "?state=paused": 3, "?state=running,paused": 6} {
		var shown []openapi.Sandbox
		require.NoError(t, json.Unmarshal(call(handler(t, f), "GET", "/v2/sandboxes"+query, "").Body.Bytes(), &shown))
		require.Len(t, shown, want, query)
	}
}

func TestClaimSaysWhenItsSandboxSleeps(t *testing.T) {
	yes, no := true, false
	pool := func(agent bool) *v1alpha1.SandboxPool {
		p := &v1alpha1.SandboxPool{ObjectMeta: metav1.ObjectMeta{Name: "python"}}
		if agent {
			p.Spec.Agent = &v1alpha1.PoolAgent{Enabled: true}
		}
		return p
	}
	for body, want := range map[string]core.SleepAsk{
		``:                  {},
		`,"autoPause":true`: {AtEnd: &yes},
		`,"autoPause":false,"autoResume":{"enabled":false}`:    {},
		`,"autoPause":true,"autoResume":{"enabled":true}`:      {AtEnd: &yes, WakeOnTraffic: &yes},
		`,"onTimeout":"Release","autoPause":true`:              {AtEnd: &no},
		`,"onIdle":"Sleep","wakeOnTraffic":false`:              {WhenIdle: &yes, WakeOnTraffic: &no},
		`,"onTimeout":"Sleep","autoPauseMemory":true`:          {AtEnd: &yes},
		`,"wakeOnTraffic":true,"autoResume":{"enabled":false}`: {WakeOnTraffic: &yes},
	} {
		f := &fake{pools: []*v1alpha1.SandboxPool{pool(true)}}
		w := call(handler(t, f), "POST", "/sandboxes", `{"templateID":"python"`+body+`}`)
		require.Equal(t, 201, w.Code, "%s: %s", body, w.Body)
		require.Equal(t, want, f.claim.Sleep, body)
	}
	for body, field := range map[string]string{
		`,"autoPause":true`: "autoPause", `,"onIdle":"Sleep"`: "onIdle", `,"onTimeout":"Sleep"`: "onTimeout", `,"autoResume":{"enabled":true}`: "autoResume.enabled",
	} {
		f := &fake{pools: []*v1alpha1.SandboxPool{pool(false)}}
		e := refusal(t, call(handler(t, f), "POST", "/sandboxes", `{"templateID":"python"`+body+`}`), 501, apierror.NotImplemented)
		require.Regexp(t, "^"+field+": .*no agent", e.Message)
	}
	for ends, code := range map[v1alpha1.AcceptPause]int{v1alpha1.PauseRefused: 501, v1alpha1.PauseEnds: 201} {
		unfit := pool(true)
		unfit.Spec.AcceptPause = ends
		unfit.Spec.Template.Spec.Containers = []corev1.Container{{Name: "sandbox"}, {Name: "proxy"}}
		f := &fake{pools: []*v1alpha1.SandboxPool{unfit}}
		w := call(handler(t, f), "POST", "/sandboxes", `{"templateID":"python","autoPause":true}`)
		require.Equal(t, code, w.Code, w.Body)
		if code == 501 {
			e := refusal(t, w, 501, apierror.NotImplemented)
			require.Regexp(t, `^autoPause: spec\.template\.spec\.containers\[1\]: `, e.Message)
		} else {
			require.Equal(t, core.SleepAsk{}, f.claim.Sleep)
		}
	}
}
