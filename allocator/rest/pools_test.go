package rest

import (
	"encoding/json"
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

func fullPool(name string) *v1alpha1.SandboxPool {
	mostWarm, most, idle, hold := int32(5), int32(9), int32(3600), int32(30)
	return &v1alpha1.SandboxPool{
		ObjectMeta: metav1.ObjectMeta{Name: name, Generation: 4, CreationTimestamp: metav1.NewTime(noon)},
		Spec: v1alpha1.SandboxPoolSpec{
			Warm: 3, MaxWarm: &mostWarm, MaxPods: &most, DefaultPort: 8080, Ports: []int32{8080, 9090}, IdleTimeoutSeconds: &idle, HoldSeconds: &hold,
			Activity: v1alpha1.ActivityBytes, OnRestart: v1alpha1.ReleaseOnRestart,
			Template: v1alpha1.PodTemplate{Spec: corev1.PodSpec{Containers: []corev1.Container{{Image: "python:3"}}}},
		},
		Status: v1alpha1.SandboxPoolStatus{Conditions: []metav1.Condition{
			{Type: "Ready", Status: metav1.ConditionFalse, Reason: "Filling", Message: "1 of 3 pods are warm", LastTransitionTime: metav1.NewTime(noon)},
		}},
	}
}

func TestPoolShowsWhetherItEnforcesRules(t *testing.T) {
	for mode, want := range map[v1alpha1.EgressMode]string{"": "None", v1alpha1.EgressNone: "None", v1alpha1.EgressGateway: "Gateway"} {
		var shown openapi.Pool
		require.NoError(t, json.Unmarshal(call(handler(t, gatewayPool(mode)), "GET", "/v1/pools/python", "").Body.Bytes(), &shown))
		require.Equal(t, want, string(shown.Spec.EgressMode))
	}
}

func TestPoolsShowSpecCountsAndConditions(t *testing.T) {
	f := &fake{pools: []*v1alpha1.SandboxPool{fullPool("go"), fullPool("python")}, counts: map[string]core.Counts{"python": {Pending: 2, Warm: 1, Claimed: 4, Releasing: 5, Waiting: 6}}}
	w := call(handler(t, f), "GET", "/v1/pools/python", "")
	require.Equal(t, http.StatusOK, w.Code, w.Body)
	require.JSONEq(t, `{"name": "python", "createdAt": "2030-01-01T12:00:00Z", "generation": 4, "deleting": false,
		"spec": {"warm": 3, "maxWarm": 5, "maxPods": 9, "images": ["python:3"], "envdVersion": "0.1.0", "defaultPort": 8080, "ports": [8080, 9090], "idleTimeout": 3600, "activity": "Bytes", "minBytesPerMinute": 1024,
			"hold": 30, "postStart": false, "onRestart": "Release", "egressMode": "None", "cpuCount": 0, "memoryMB": 0, "diskSizeMB": 0},
		"counts": {"warm": 1, "pending": 2, "claimed": 4, "releasing": 5, "waitingClaims": 6},
		"conditions": [{"type": "Ready", "status": "False", "reason": "Filling", "message": "1 of 3 pods are warm", "since": "2030-01-01T12:00:00Z"},
			{"type": "Counted", "status": "", "message": "1"}]}`, w.Body.String())
	var all openapi.Pools
	require.NoError(t, json.Unmarshal(call(handler(t, f), "GET", "/v1/pools", "").Body.Bytes(), &all))
	require.Len(t, all.Pools, 2)
	require.Equal(t, 6, all.Pools[1].Counts.WaitingClaims)
	require.Len(t, all.Pools[0].Conditions, 1, "those of the object, because the counts are not known")
	refusal(t, call(handler(t, f), "GET", "/v1/pools/ruby", ""), 404, apierror.PoolNotFound)
}

func TestScaleChangesWhatItsBodyNames(t *testing.T) {
	f := &fake{pools: []*v1alpha1.SandboxPool{fullPool("python")}}
	for body, want := range map[string]string{
		`{"warm":0}`: "python 0 -1 -1 0", `{"maxPods":0}`: "python -1 -1 0 0", `{"maxWarm":0}`: "python -1 0 -1 0",
		`{"warm":5,"maxWarm":6,"maxPods":7,"generation":4}`: "python 5 6 7 4",
	} {
		f.scaled = nil
		w := call(handler(t, f), "POST", "/v1/pools/python/scale", body)
		require.Equal(t, http.StatusOK, w.Code, w.Body)
		require.Equal(t, []string{want}, f.scaled)
	}
	f.scaled = nil
	for body, says := range map[string]string{
		"": "body", "{}": "body", `{"generation":4}`: "warm", `{"warm":-1}`: "warm", `{"warm":10001}`: "warm", `{"maxWarm":10001}`: "maxWarm", `{"maxPods":100001}`: "maxPods", `{"warm":"1"}`: "warm", `{"worm":1}`: "warm",
	} {
		require.Contains(t, refusal(t, call(handler(t, f), "POST", "/v1/pools/python/scale", body), 400, apierror.BadRequest).Message, says, body)
	}
	require.Empty(t, f.scaled)
}
