package e2e

import (
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"

	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/devcluster/conformance"
)

func TestTrafficContinuesThroughTheOtherGateway(t *testing.T) {
	e := startDisturbing(t, 2)
	client := e.clientOf(e.site.front, 0) // each request may take another gateway
	s := e.claim()
	e.reaches(client, s)
	require.NoError(t, e.site.killGateway(t.Context()))
	// Until the Service has noticed, a connection may end nowhere. Then all is
	// well again, for the sandbox that was there and for a new one.
	e.steady(client, s)
	another := e.claim()
	e.steady(client, another)
	e.release(s.SandboxID)
	e.gone(client, s)
}

// steady waits until many requests in a row reach the sandbox. What answers
// must be the right pod at any time.
func (e *env) steady(client *http.Client, s openapi.Sandbox) {
	e.t.Helper()
	const enough = 50
	row := 0
	e.eventually(func() error {
		for row < enough {
			a, err := do(e.t.Context(), client, http.MethodGet, "http://gateway/", e.host(8080, s.SandboxID), "")
			if err != nil {
				row = 0
				return err
			}
			require.Equal(e.t, http.StatusOK, a.code, a.body)
			require.Equal(e.t, s.PodName, a.identity(e.t).Pod)
			row++
		}
		return nil
	})
}

// The process node of devcluster stands in for a kubelet in all other tests, so
// it is judged by the same table as a real one.
// Invariant: P13
func TestRealKubeletBehavesLikeTheProcessNode(t *testing.T) {
	onACluster(t, "needs a kubelet (the process node is judged in devcluster/conformance)")
	turn(t, guests)
	conformance.RunInCluster(t, shared.config, shared.image)
}

// Invariant: P6
func TestAPIRefusesCallsWithoutAKey(t *testing.T) {
	e := start(t, 0)
	for _, key := range []string{"", "0123456789abcdef"} {
		a, err := e.callAPI(http.MethodGet, "/sandboxes", "", key)
		require.NoError(t, err)
		require.Equal(t, http.StatusUnauthorized, a.code, a.body)
		require.Equal(t, apierror.Unauthorized, a.refusal(t).Reason)
	}
	require.Equal(t, http.StatusOK, e.api(http.MethodGet, "/sandboxes", "").code)
}

// Invariant: P7
func TestSandboxPodsHaveNoCredentials(t *testing.T) {
	e := start(t, 1)
	s := e.claim()
	e.waitWarm(1)
	for _, p := range e.pods(nil) {
		for _, v := range p.Spec.Volumes {
			require.Nil(t, v.Projected, "volume %s of pod %s", v.Name, p.Name)
			require.Nil(t, v.Secret, "volume %s of pod %s", v.Name, p.Name)
		}
		require.Equal(t, corev1.SeccompProfileTypeRuntimeDefault, p.Spec.SecurityContext.SeccompProfile.Type)
		require.False(t, *p.Spec.EnableServiceLinks)
	}
	// The annotations follow the claim, in the background.
	require.Eventually(t, func() bool {
		kept := map[bool]bool{}
		for _, p := range e.pods(nil) {
			kept[p.Name == s.PodName] = p.Annotations["cluster-autoscaler.kubernetes.io/safe-to-evict"] == "false" &&
				p.Annotations["karpenter.sh/do-not-disrupt"] == "true"
		}
		return kept[true] && !kept[false]
	}, time.Minute, 10*time.Millisecond, "the claimed pod, and no other, keeps its node")
}
