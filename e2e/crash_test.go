package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/devcluster/proc"
	"github.com/berth-sandbox/berth/devcluster/stack"
)

// reaches requires that a sandbox answers, as soon as it can be reached at all.
func (e *env) reaches(client *http.Client, s openapi.Sandbox) {
	e.t.Helper()
	e.eventually(func() error {
		a := e.get(client, e.host(8080, s.SandboxID), "/")
		if a.code == http.StatusServiceUnavailable {
			return fmt.Errorf("%d %s", a.code, a.body)
		}
		require.Equal(e.t, http.StatusOK, a.code, a.body)
		require.Equal(e.t, s.PodName, a.identity(e.t).Pod)
		return nil
	})
}

// gone requires that a sandbox is gone. Like reaches, it waits for a router without a session.
func (e *env) gone(client *http.Client, s openapi.Sandbox) {
	e.t.Helper()
	e.eventually(func() error {
		a := e.get(client, e.host(8080, s.SandboxID), "/")
		if a.code == http.StatusServiceUnavailable {
			return fmt.Errorf("%d %s", a.code, a.body)
		}
		require.Equal(e.t, http.StatusGone, a.code, a.body)
		return nil
	})
}

// Invariant: I5
func TestStateSurvivesACrashOfEachProcess(t *testing.T) {
	e := startAlone(t, 3, stack.Options{})
	client := e.client()
	live, dead := e.claim(), e.claim()
	e.reaches(client, live)
	e.release(dead.SandboxID)
	e.gone(client, dead)

	gateway := e.stack.Gateways[0]
	for _, p := range []*proc.Server{gateway.Router, gateway.Envoy, e.stack.Allocators[0].Server} {
		t.Run(p.Name, func(t *testing.T) {
			require.NoError(t, p.Kill())
			require.NoError(t, p.Start(t.Context()))
			_, err := e.stack.Leader(t.Context())
			require.NoError(t, err)
			e.reaches(client, live)
			e.gone(client, dead)
			// It goes on: another sandbox can be claimed, used and released.
			e.waitWarm(3)
			another := e.claim()
			require.NotEqual(t, live.PodName, another.PodName)
			e.reaches(client, another)
			e.release(another.SandboxID)
			e.gone(client, another)
		})
	}
	var all []openapi.Sandbox
	require.NoError(t, json.Unmarshal([]byte(e.api(http.MethodGet, "/sandboxes", "").body), &all))
	require.Len(t, all, 1, "the only live sandbox")
	require.Equal(t, live.SandboxID, all[0].SandboxID)
}

// Invariant: I5
func TestAnotherAllocatorTakesOverTheLead(t *testing.T) {
	e := startDisturbing(t, 3)
	client := e.client()
	live, dead := e.claim(), e.claim()
	e.release(dead.SandboxID)

	require.NoError(t, e.site.killLeader(t.Context()))
	require.NoError(t, e.site.waitLeader(t.Context()))
	e.reaches(client, live)
	e.gone(client, dead)
	another := e.claim()
	e.reaches(client, another)
	e.release(live.SandboxID)
	e.gone(client, live)
}

// Invariant: I7
func TestPodDeletedByForceIsReplaced(t *testing.T) {
	e := start(t, 1)
	client := e.client()
	s := e.claim()
	e.reaches(client, s)
	zero := int64(0)
	require.NoError(t,
		e.clients.Kubernetes.CoreV1().Pods(e.site.namespace()).Delete(t.Context(), s.PodName,
			metav1.DeleteOptions{GracePeriodSeconds: &zero}))
	e.eventually(func() error {
		if a := e.get(client, e.host(8080, s.SandboxID), "/"); a.code != http.StatusGone {
			return fmt.Errorf("%d %s", a.code, a.body)
		}
		return nil
	})
	e.waitWarm(1)
	e.eventually(func() error {
		record, err := e.record(s.SandboxID)
		if err != nil {
			return err
		}
		if record.Status.Phase != v1alpha1.SandboxEnded {
			return fmt.Errorf("%+v", record.Status)
		}
		require.Equal(t, "PodDeleted", record.Status.Reason)
		return nil
	})
}

func TestPodWithoutItsLabelKeepsItsSandbox(t *testing.T) {
	e := start(t, 1)
	client := e.client()
	s := e.claim()
	e.reaches(client, s)
	var idle string
	e.eventually(func() error { // labels are written in the background
		warm, all := e.pods(map[string]string{v1alpha1.LabelPhase: v1alpha1.PhaseWarm}), e.pods(nil)
		if len(warm) != 1 || len(all) != 2 || warm[0].Name == s.PodName {
			return fmt.Errorf("%d of %d pods are warm", len(warm), len(all))
		}
		idle = warm[0].Name
		return nil
	})
	pods := e.clients.Kubernetes.CoreV1().Pods(e.site.namespace())
	for name, label := range map[string]string{s.PodName: "null", idle: `"another"`} {
		_, err := pods.Patch(t.Context(), name, types.MergePatchType,
			[]byte(`{"metadata":{"labels":{"berth.sh/pool":`+label+`}}}`), metav1.PatchOptions{})
		require.NoError(t, err)
	}
	e.eventually(func() error {
		// On a busy machine the warm pod may miss a probe, and the pool makes another one.
		var found []string
		for _, p := range e.pods(nil) {
			found = append(found, p.Name)
		}
		if !slices.Contains(found, s.PodName) || !slices.Contains(found, idle) {
			return fmt.Errorf("%v have the label", found)
		}
		return nil
	})
	e.reaches(client, s)
	e.release(s.SandboxID)
	e.eventually(func() error {
		p, err := pods.Get(t.Context(), s.PodName, metav1.GetOptions{})
		switch {
		case apierrors.IsNotFound(err):
			return nil
		case err != nil:
			return err
		}
		return fmt.Errorf("pod %s is still there: %v", p.Name, p.Labels)
	})
}

func TestContainerRestartEndsSandboxUnlessPoolKeepsIt(t *testing.T) {
	e := start(t, 1)
	client := e.client()
	crash := func(s openapi.Sandbox) {
		e.eventually(func() error {
			if a := e.get(client, e.host(8080, s.SandboxID), "/exit?code=7"); a.code != http.StatusOK {
				return fmt.Errorf("%d %s", a.code, a.body)
			}
			return nil
		})
	}
	s := e.claim()
	crash(s)
	e.eventually(func() error {
		if a := e.get(client, e.host(8080, s.SandboxID), "/"); a.code != http.StatusGone {
			return fmt.Errorf("%d %s", a.code, a.body)
		}
		return nil
	})
	e.eventually(func() error {
		record, err := e.record(s.SandboxID)
		if err == nil && record.Status.Reason != "UnexpectedRestart" {
			err = fmt.Errorf("%+v", record.Status)
		}
		return err
	})

	keeps := e.newPool(e.pool+"-keeps", 1)
	keeps.Spec.OnRestart = v1alpha1.KeepOnRestart
	e.createPool(keeps)
	var kept openapi.Sandbox
	e.eventually(func() error {
		a := e.api(http.MethodPost, "/sandboxes", `{"templateID":"`+keeps.Name+`","waitTimeout":60}`)
		if a.code == http.StatusNotFound { // the allocator learns of pools by a watch
			return fmt.Errorf("%d %s", a.code, a.body)
		}
		kept = sandboxOf(t, a)
		return nil
	})
	crash(kept)
	e.eventually(func() error {
		pod, err := e.clients.Kubernetes.CoreV1().Pods(e.site.namespace()).Get(t.Context(), kept.PodName, metav1.GetOptions{})
		if err == nil && pod.Status.ContainerStatuses[0].RestartCount != 1 {
			err = fmt.Errorf("%+v", pod.Status.ContainerStatuses)
		}
		return err
	})
	e.eventually(func() error { // its pod listens again
		if a := e.get(client, e.host(8080, kept.SandboxID), "/"); a.code != http.StatusOK {
			return fmt.Errorf("%d %s", a.code, a.body)
		}
		return nil
	})
}

// Invariant: P4
func TestNothingIsServedWithoutARouter(t *testing.T) {
	e := startAlone(t, 1, stack.Options{})
	client := e.client()
	s := e.claim()
	before := e.hits(client, s)
	router := e.stack.Gateways[0].Router

	require.NoError(t, router.Kill())
	a := e.get(client, e.host(8080, s.SandboxID), "/")
	require.Equal(t, http.StatusServiceUnavailable, a.code, a.body)
	require.Equal(t, "router_unavailable", string(a.refusal(t).Reason))
	require.Equal(t, "1", a.header.Get("Retry-After"))

	require.NoError(t, router.Start(t.Context()))
	require.NoError(t, router.Pause()) // hangs instead of being gone
	a = e.get(client, e.host(8080, s.SandboxID), "/")
	require.NoError(t, router.Resume())
	require.Equal(t, http.StatusServiceUnavailable, a.code, a.body)
	require.Equal(t, "router_unavailable", string(a.refusal(t).Reason))

	e.reaches(client, s) // the only request that reaches the pod
	after := e.hits(client, s)
	require.Equal(t, before+1, after)
}

// The next leader may answer a claim before the routers have found it. They hold the request meanwhile.
// Invariant: I8
func TestFirstRequestAfterAChangeOfLeadersIsServed(t *testing.T) {
	e := startAlone(t, 2, stack.Options{Allocators: 2})
	client := e.client()
	known := e.claim()
	e.reaches(client, known)
	for range 3 {
		e.waitWarm(2)
		e.reaches(client, e.claim()) // a router has joined this leader
		leader, err := e.stack.Leader(t.Context())
		require.NoError(t, err)
		require.NoError(t, leader.Kill())
		var a answer
		require.Eventually(t, func() bool { // at once: the claim must come before the routers
			a, err = e.callAPI(http.MethodPost, "/sandboxes",
				fmt.Sprintf(`{"templateID":%q,"timeout":3600,"waitTimeout":20}`, e.pool), e.site.key())
			return err == nil && a.code == http.StatusCreated
		}, time.Minute, 5*time.Millisecond)
		var s openapi.Sandbox
		require.NoError(t, json.Unmarshal([]byte(a.body), &s))
		first := e.get(client, e.host(8080, s.SandboxID), "/")
		require.Equal(t, http.StatusOK, first.code, first.body)
		require.Equal(t, s.PodName, first.identity(t).Pod)
		require.Equal(t, http.StatusOK, e.get(client, e.host(8080, known.SandboxID), "/").code)
		require.NoError(t, leader.Start(t.Context()))
	}
}

// Invariant: I8
func TestKnownSandboxesKeepTrafficWithoutTheAPIServer(t *testing.T) {
	e := startAlone(t, 2, stack.Options{})
	client := e.client()
	s := e.claim()
	e.reaches(client, s)

	// The API server hangs. The leader cannot renew its lease, and a process
	// that may not be the leader any more ends.
	require.NoError(t, e.cluster.APIServer().Pause())
	leader := e.stack.Allocators[0]
	e.eventually(func() error {
		if leader.Running() {
			return errors.New("the allocator still runs, without a lease")
		}
		return nil
	})
	for range 100 {
		a := e.get(client, e.host(8080, s.SandboxID), "/")
		require.Equal(t, http.StatusOK, a.code, a.body)
		require.Equal(t, s.PodName, a.identity(t).Pod)
	}

	require.NoError(t, e.cluster.APIServer().Resume())
	require.NoError(t, leader.Start(t.Context()))
	e.eventually(func() error { // it reads the API keys first
		if a := e.api(http.MethodGet, "/sandboxes/"+s.SandboxID, ""); a.code != http.StatusOK {
			return fmt.Errorf("%d %s", a.code, a.body)
		}
		return nil
	})
	another := e.claim()
	e.reaches(client, another)
	e.reaches(client, s)
	e.release(s.SandboxID)
	e.gone(client, s)
}
