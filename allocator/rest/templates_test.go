package rest

import (
	"context"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

func poolOf(name string, limits ...corev1.ResourceList) *v1alpha1.SandboxPool {
	p := &v1alpha1.SandboxPool{ObjectMeta: metav1.ObjectMeta{Name: name, UID: "u-1", CreationTimestamp: metav1.NewTime(noon)}}
	for _, l := range limits {
		p.Spec.Template.Spec.Containers = append(p.Spec.Template.Spec.Containers, corev1.Container{Resources: corev1.ResourceRequirements{Limits: l}})
	}
	return p
}

func TestSandboxShowsLimitsOfItsPool(t *testing.T) {
	limit := func(cpu, memory string) corev1.ResourceList {
		return corev1.ResourceList{corev1.ResourceCPU: resource.MustParse(cpu), corev1.ResourceMemory: resource.MustParse(memory)}
	}
	f := &fake{pools: []*v1alpha1.SandboxPool{poolOf("python", limit("500m", "256Mi"), limit("1", "1G"))}}
	w := call(handler(t, f), "POST", "/sandboxes", `{"templateID":"python"}`)
	require.Equal(t, http.StatusCreated, w.Code, w.Body)
	require.Contains(t, w.Body.String(), `"cpuCount":2,"diskSizeMB":0,`)
	require.Contains(t, w.Body.String(), `"memoryMB":1210,`)
	f.pools = []*v1alpha1.SandboxPool{poolOf("python", limit("1", "1G"), nil)}
	w = call(handler(t, f), "POST", "/sandboxes", `{"templateID":"python"}`)
	require.Contains(t, w.Body.String(), `"cpuCount":0,`, "a container without a limit")
}

func TestPoolsAreShownAsTemplates(t *testing.T) {
	refused := poolOf("node")
	refused.Status.Conditions = []metav1.Condition{{Type: v1alpha1.PoolDegraded, Status: metav1.ConditionTrue, Reason: v1alpha1.PoolPodSecurity}}
	h := handler(t, &fake{pools: []*v1alpha1.SandboxPool{refused, poolOf("python")}})
	w := call(h, "GET", "/templates", "")
	require.JSONEq(t, `[
		{"templateID": "node", "buildID": "u-1", "aliases": ["node"], "names": ["node"], "buildStatus": "error", "public": false,
		 "createdAt": "2030-01-01T12:00:00Z", "updatedAt": "2030-01-01T12:00:00Z", "createdBy": null, "lastSpawnedAt": null,
		 "spawnCount": 0, "buildCount": 1, "cpuCount": 0, "memoryMB": 0, "diskSizeMB": 0, "envdVersion": "0.1.0"},
		{"templateID": "python", "buildID": "u-1", "aliases": ["python"], "names": ["python"], "buildStatus": "ready", "public": false,
		 "createdAt": "2030-01-01T12:00:00Z", "updatedAt": "2030-01-01T12:00:00Z", "createdBy": null, "lastSpawnedAt": null,
		 "spawnCount": 0, "buildCount": 1, "cpuCount": 0, "memoryMB": 0, "diskSizeMB": 0, "envdVersion": "0.1.0"}
	]`, w.Body.String())
	require.JSONEq(t, `{"templateID": "python", "public": false}`, call(h, "GET", "/v2/templates/aliases/python", "").Body.String())
	refusal(t, call(h, "GET", "/templates/aliases/ruby", ""), 404, apierror.PoolNotFound)
}

func TestTeamIsTheNameOfTheKey(t *testing.T) {
	keys := keysIn(map[string]string{"ann": keyOne})
	w := callWith(handlerWithKeys(t, &fake{}, keys), "GET", "/teams", http.Header{"X-Api-Key": {keyOne}})
	require.JSONEq(t, `[{"teamID": "ann", "name": "ann", "apiKey": "", "isDefault": true}]`, w.Body.String())
	require.Contains(t, call(handler(t, &fake{}), "GET", "/teams", "").Body.String(), `"name":"default"`)
}

func TestConnectExtendsAndShowsTheSandbox(t *testing.T) {
	s := core.Sandbox{Binding: core.Binding{ID: "k3x9", EndAt: noon.Add(time.Hour)}}
	for _, c := range []struct {
		path, body string
		code       int
		want       string
	}{
		{"/sandboxes/k3x9/connect", `{"timeout":60}`, 200, "k3x9 at least 1m0s"},
		{"/v2/sandboxes/k3x9/connect", ``, 200, "k3x9 at least 5m0s"},
		{"/v2/sandboxes/k3x9/connect", `{"timeout":null,"memory":false}`, 200, "k3x9 at least 5m0s"},
		{"/sandboxes/k3x9/resume", `{"timeout":15,"autoPause":false}`, 201, "k3x9 at least 15s"},
		{"/sandboxes/k3x9/refreshes", `{"duration":600}`, 204, "k3x9 at least 10m0s"},
	} {
		f := &fake{status: core.CallOK, sandboxes: map[string]core.Sandbox{"k3x9": s}}
		w := call(handler(t, f), "POST", c.path, c.body)
		require.Equal(t, c.code, w.Code, w.Body)
		require.Equal(t, []string{c.want}, f.kept, c.path)
		if c.code == 204 {
			require.Empty(t, w.Body.String())
		} else {
			require.Contains(t, w.Body.String(), `"endAt":"2030-01-01T13:00:00Z"`)
		}
	}
	for _, path := range []string{"/sandboxes/k3x9/connect", "/sandboxes/k3x9/refreshes"} {
		refusal(t, call(handler(t, &fake{status: core.CallGone}), "POST", path, `{}`), 404, apierror.SandboxGone)
	}
	refusal(t, call(handler(t, &fake{}), "POST", "/sandboxes/k3x9/connect", `{"timeout":0}`), 400, apierror.BadRequest)
}

// A client must not repeat a call that may have taken effect.
func TestUnknownOutcomeForbidsARetry(t *testing.T) {
	w := call(handler(t, &fake{err: context.DeadlineExceeded}), "DELETE", "/sandboxes/x", "")
	require.Equal(t, 503, w.Code)
	require.Equal(t, "false", w.Header().Get("Should-Retry"))
	synctest.Test(t, func(t *testing.T) {
		for why, f := range map[string]*fake{"no leader": {followers: true}, "the leader is away": {leader: "127.0.0.1:1"}} {
			w := call(handler(t, f), "DELETE", "/sandboxes/x", "")
			require.Equal(t, 503, w.Code)
			require.Empty(t, w.Header().Get("Should-Retry"), "nothing was done: %s", why)
		}
	})
}
