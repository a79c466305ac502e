package rest

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/berth-sandbox/berth/allocator/core"
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
	refusal(t, call(handler(t, f), "POST", "/sandboxes/k3x9/pause", `{"memory":false}`), 501, apierror.NotImplemented)
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
	require.Equal(t, openapi.SandboxPhaseAsleep, shown.Phase)
	require.Equal(t, asleep.AsleepAt.Unix(), shown.AsleepAt.Unix())
	require.Equal(t, &openapi.SandboxLifecycle{OnTimeout: openapi.Kill}, shown.Lifecycle)
}

func TestListSelectsSandboxesByTheirState(t *testing.T) {
	f := &fake{sandboxes: map[string]core.Sandbox{}}
	for id, phase := range map[string]core.Phase{"a": core.Starting, "b": core.Running, "c": core.FallingAsleep, "d": core.Asleep, "e": core.Waking} {
		s := core.Sandbox{Binding: core.Binding{ID: id}, Phase: phase}
		f.sandboxes[id], f.live = s, append(f.live, s)
	}
	for query, want := range map[string]int{"": 5, "?state=running": 3, "?state=paused": 2, "?state=running,paused": 5} {
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
	f := &fake{pools: []*v1alpha1.SandboxPool{pool(true)}}
	refusal(t, call(handler(t, f), "POST", "/sandboxes", `{"templateID":"python","autoPauseMemory":false}`), 501, apierror.NotImplemented)
}
