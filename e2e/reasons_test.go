package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/berth-sandbox/berth/api/openapi"
)

// Invariant: I5
func TestNextLeaderSaysWhySandboxesEnded(t *testing.T) {
	e := startDisturbing(t, 3)
	client := e.client()
	never := e.newPool(e.pool+"-never", 1)
	never.Spec.Template.Spec.RestartPolicy = corev1.RestartPolicyNever
	e.createPool(never)
	crash := func(s openapi.Sandbox) {
		e.eventually(func() error {
			switch a := e.get(client, e.host(8080, s.SandboxID), "/exit?code=7"); a.code {
			case http.StatusOK, http.StatusNotFound, http.StatusGone: // the answer to an earlier one was lost
				return nil
			default:
				return fmt.Errorf("%d %s", a.code, a.body)
			}
		})
	}
	killed, restarted, evicted := e.claim(), e.claim(), e.claim()
	failed, _ := e.claimOf(never.Name, `"timeout":3600`)
	e.release(killed.SandboxID)
	crash(restarted)
	crash(failed)
	require.NoError(t, e.clients.Kubernetes.CoreV1().Pods(e.site.namespace()).EvictV1(t.Context(),
		&policyv1.Eviction{ObjectMeta: metav1.ObjectMeta{Name: evicted.PodName}}))
	expect := func() {
		t.Helper()
		for _, c := range []struct {
			s       openapi.Sandbox
			reason  string
			message string
			code    *int32
		}{
			{killed, "Killed", "", nil},
			{restarted, "UnexpectedRestart", "exit code 7", new(int32(7))},
			{failed, "Failed", "exit code 7", new(int32(7))},
			{evicted, "Evicted", "EvictionByEvictionAPI", nil},
		} {
			e.eventually(func() error {
				var d openapi.SandboxDiagnostics
				a := e.api(http.MethodGet, "/v1/sandboxes/"+c.s.SandboxID+"/diagnostics", "")
				require.Equal(t, http.StatusOK, a.code, a.body)
				require.NoError(t, json.Unmarshal([]byte(a.body), &d))
				if d.Sandbox.ReleasedAt == nil {
					return errors.New("it lives")
				}
				require.Equal(t, c.reason, d.Sandbox.Reason)
				require.Contains(t, d.Sandbox.Message, c.message)
				require.Equal(t, c.code, d.Sandbox.ExitCode)
				require.NotNil(t, d.Sandbox.StartedAt)
				require.NotEmpty(t, d.Sandbox.Workload.Images)
				return nil
			})
		}
	}
	expect()
	require.NoError(t, e.site.killLeader(t.Context()))
	require.NoError(t, e.site.waitLeader(t.Context()))
	expect()
}
