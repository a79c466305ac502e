package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

// sandboxOf reads the answer to a claim.
func sandboxOf(t *testing.T, a answer) (s openapi.Sandbox) {
	t.Helper()
	require.Equal(t, http.StatusCreated, a.code, a.body)
	require.NoError(t, json.Unmarshal([]byte(a.body), &s))
	return s
}

// record reads the Sandbox object, which follows in the background.
func (e *env) record(id string) (r v1alpha1.Sandbox, err error) {
	err = e.clients.Berth.Get().Namespace(e.site.namespace()).Resource("sandboxes").Name(id).Do(e.t.Context()).Into(&r)
	return r, err
}

func TestClaimWaitsWhenItsPoolIsEmpty(t *testing.T) {
	e := start(t, 1)
	e.waitWarm(1)
	e.scrape()         // the series of deleted pools of other tests go, which bound those of this one
	first := e.claim() // its pod is being replaced
	second := sandboxOf(t, e.api(http.MethodPost, "/sandboxes", `{"templateID":"`+e.pool+`","waitTimeout":60}`))
	require.NotEqual(t, first.PodName, second.PodName)
	e.reaches(e.client(), second)

	e.patchPool(e.pool, `{"spec":{"maxPods":2}}`) // nothing more will come
	e.eventually(func() error {
		if n := len(e.pods(nil)); n != 2 {
			return fmt.Errorf("%d pods", n)
		}
		return nil
	})
	refused := e.api(http.MethodPost, "/sandboxes", `{"templateID":"`+e.pool+`","waitTimeout":1}`).refusal(t)
	require.Equal(t, apierror.PoolEmpty, refused.Reason)
	require.Contains(t, refused.Message, "2 claimed")
	if page := e.scrape(); page != "" {
		require.Regexp(t, `berth_allocator_pool_claims_total{pool="`+e.pool+`",result="refused"} 1\n`, page)
		for _, result := range []string{"warm", "waited"} {
			require.Regexp(t, `berth_allocator_pool_claim_wait_seconds_count{pool="`+e.pool+`",result="`+result+`"} 1\n`, page)
		}
		require.Regexp(t, `berth_allocator_pool_target_pods{part="warm",pool="`+e.pool+`"} 1\n`, page)
		require.Regexp(t, `berth_allocator_pool_start_seconds{pool="`+e.pool+`"} [0-9]`, page)
	}
}

// scrape reads the metrics of the leader, where Berth's programs are processes.
func (e *env) scrape() string {
	e.t.Helper()
	if e.processes == nil {
		return ""
	}
	leader, err := e.stack.Leader(e.t.Context())
	require.NoError(e.t, err)
	page, err := do(e.t.Context(), http.DefaultClient, http.MethodGet, leader.Admin+"/metrics", "", "")
	require.NoError(e.t, err)
	require.Equal(e.t, http.StatusOK, page.code, page.body)
	return page.body
}

func TestRepeatedKeyNamesOneClaimUnderEveryLeader(t *testing.T) {
	e := startHere(t, 2)
	e.waitWarm(2)
	post := func(path, key, body string) answer {
		var a answer
		e.eventually(func() (err error) {
			a, err = e.callAPI(http.MethodPost, path, body, e.site.key(), "Idempotency-Key", key)
			if err == nil && a.code == http.StatusServiceUnavailable {
				err = fmt.Errorf("%d %s", a.code, a.body)
			}
			return err
		})
		return a
	}
	claim := func(key, body string) answer { return post("/sandboxes", key, body) }
	batch := func() (ids []string) {
		var all openapi.Claims
		a := post("/v1/claims", "batch", `{"pool":"`+e.pool+`","count":3,"waitTimeout":60,`+
			`"network":{"maskRequestHost":"localhost:${PORT}"}}`)
		require.Equal(t, http.StatusCreated, a.code, a.body)
		require.NoError(t, json.Unmarshal([]byte(a.body), &all))
		for _, s := range all.Sandboxes {
			ids = append(ids, s.SandboxID)
			require.Equal(t, "localhost:${PORT}", s.Network.MaskRequestHost)
		}
		require.Len(t, ids, 3)
		return ids
	}
	body := `{"templateID":"` + e.pool + `","timeout":3600,"user":"ada","metadata":{"k":"v"}}`
	s := sandboxOf(t, claim("one", body))
	require.Equal(t, s.SandboxID, sandboxOf(t, claim("one", body)).SandboxID)
	require.Equal(t, apierror.KeyReused, claim("one", `{"templateID":"`+e.pool+`"}`).refusal(t).Reason)

	together := batch()
	waits, starting := e.waitsForColdPod("cold")
	require.NoError(t, e.site.killLeader(t.Context()))
	require.Equal(t, starting, sandboxOf(t, claim("cold", waits)).PodName, "the next leader keeps the pod")
	require.ElementsMatch(t, together, batch())
	again := sandboxOf(t, claim("one", body))
	require.Equal(t, s.SandboxID, again.SandboxID)
	require.Equal(t, "ada", again.User)
	require.Equal(t, map[string]string{"k": "v"}, again.Metadata)
	other := sandboxOf(t, claim("two", body))
	require.NotEqual(t, s.SandboxID, other.SandboxID)
	e.reaches(e.client(), again)

	e.release(s.SandboxID)
	gone := claim("one", body).refusal(t)
	require.Equal(t, apierror.SandboxGone, gone.Reason)
	require.Equal(t, s.SandboxID, gone.SandboxID)
}

// waitsForColdPod makes a claim with the key that waits for the first pod of a cold pool. It returns the claim and the
// pod.
func (e *env) waitsForColdPod(key string) (body, pod string) {
	e.t.Helper()
	cold := e.newPool(e.pool+"-cold", 0)
	cold.Spec.Template.Spec.Containers[0].ReadinessProbe.InitialDelaySeconds = 5
	e.createPool(cold)
	e.eventually(func() error { // the allocators have seen it
		if a := e.api(http.MethodGet, "/v1/pools/"+cold.Name, ""); a.code != http.StatusOK {
			return fmt.Errorf("%d %s", a.code, a.body)
		}
		return nil
	})
	body = `{"templateID":"` + cold.Name + `","timeout":3600,"waitTimeout":60}`
	// If a follower forwards it, it repeats the claim to the next leader, which must not be a second one for the pod.
	go func() { _, _ = e.callAPI(http.MethodPost, "/sandboxes", body, e.site.key(), "Idempotency-Key", key) }()
	e.eventually(func() error {
		all := e.podsIn(cold.Name, "")
		if len(all) != 1 {
			return fmt.Errorf("%d pods", len(all))
		}
		pod = all[0].Name
		return nil
	})
	return body, pod
}

func TestDeletingTheSandboxObjectReleasesTheSandbox(t *testing.T) {
	e := start(t, 1)
	s := e.claim()
	e.reaches(e.client(), s)
	var record v1alpha1.Sandbox
	e.eventually(func() (err error) {
		if record, err = e.record(s.SandboxID); err == nil && record.Status.Phase != v1alpha1.SandboxRunning {
			err = fmt.Errorf("phase %q", record.Status.Phase)
		}
		return err
	})
	require.Equal(t, e.pool, record.Spec.Pool)
	require.Equal(t, s.PodName, record.Spec.PodName)
	require.Equal(t, []string{v1alpha1.SandboxFinalizer}, record.Finalizers)
	require.NoError(t, e.clients.Berth.Delete().Namespace(e.site.namespace()).Resource("sandboxes").Name(s.SandboxID).
		Body(&metav1.DeleteOptions{}).Do(t.Context()).Error())
	client := e.client()
	e.eventually(func() error {
		if a := e.get(client, e.host(8080, s.SandboxID), "/"); a.code == http.StatusOK {
			return fmt.Errorf("it is still there: %d", a.code)
		}
		return nil
	})
	e.gone(client, s)
	e.eventually(func() error {
		r, err := e.record(s.SandboxID)
		if err == nil && r.Status.Reason != "ObjectDeleted" {
			return fmt.Errorf("reason %q, phase %q", r.Status.Reason, r.Status.Phase)
		}
		return nil // it says why it was released, or is gone already
	})
	e.eventually(func() error {
		if r, err := e.record(s.SandboxID); err == nil {
			return fmt.Errorf("the object is still there: %+v", r.Status)
		}
		return nil
	})
}

func TestSandboxIsHandedOutAfterItsHookSucceeded(t *testing.T) {
	e := start(t, 0)
	hooked := func(name, path string, policy v1alpha1.FailurePolicy) string {
		p := e.newPool(e.pool+"-"+name, 1)
		p.Spec.PostStart = &v1alpha1.PostStartHook{Path: path, TimeoutSeconds: 30, FailurePolicy: policy}
		e.createPool(p)
		return p.Name
	}
	claim := func(pool string) (a answer) {
		e.eventually(func() error { // the allocator learns of pools by a watch
			if a = e.api(http.MethodPost, "/sandboxes",
				`{"templateID":"`+pool+`","waitTimeout":60}`); a.code == http.StatusNotFound {
				return fmt.Errorf("%d %s", a.code, a.body)
			}
			return nil
		})
		return a
	}
	client := e.client()
	s := sandboxOf(t, claim(hooked("hooked", "/any/path?hook=1", v1alpha1.Fail)))
	require.Equal(t, openapi.SandboxPhaseRunning, s.Phase)
	require.JSONEq(t, `{"hits":1}`, e.get(client, e.host(8080, s.SandboxID), "/hits").body,
		"the hook was the only request")

	const refuses = "/ready?value=neither" // 400
	failed := claim(hooked("fails", refuses, v1alpha1.Fail)).refusal(t)
	require.Equal(t, apierror.StartFailed, failed.Reason)
	require.Contains(t, failed.Message, "StartFailed (postStart: the sandbox answered 400)")
	require.NotEmpty(t, failed.SandboxID)
	require.Contains(t, e.api(http.MethodGet, "/v1/sandboxes/"+failed.SandboxID+"/diagnostics", "").body,
		`"message":"postStart: the sandbox answered 400"`)
	gone := e.api(http.MethodGet, "/sandboxes/"+failed.SandboxID, "").refusal(t)
	require.Equal(t, apierror.SandboxGone, gone.Reason)

	e.reaches(client, sandboxOf(t, claim(hooked("ignored", refuses, v1alpha1.Ignore))))
}

func TestRequestWaitsForItsStartingSandbox(t *testing.T) {
	e := start(t, 0)
	slow := func(name string, holdSeconds int32) openapi.Sandbox {
		p := e.newPool(e.pool+"-"+name, 1)
		p.Spec.PostStart = &v1alpha1.PostStartHook{Path: "/sleep?ms=6000", TimeoutSeconds: 30, FailurePolicy: v1alpha1.Fail}
		p.Spec.HoldSeconds = &holdSeconds
		e.createPool(p)
		var s openapi.Sandbox
		e.eventually(func() error { // until it has a pod, which then starts for longer than the claim waits
			a := e.api(http.MethodPost, "/sandboxes", `{"templateID":"`+p.Name+`","waitTimeout":1}`)
			if a.code == http.StatusNotFound || a.code == http.StatusTooManyRequests {
				return fmt.Errorf("%d %s", a.code, a.body)
			}
			s = sandboxOf(t, a)
			return nil
		})
		require.Equal(t, openapi.SandboxPhaseStarting, s.Phase)
		return s
	}
	client := e.client()
	s := slow("held", 20)
	a := e.get(client, e.host(8080, s.SandboxID), "/")
	require.Equal(t, http.StatusOK, a.code, a.body)
	require.Equal(t, s.PodName, a.identity(t).Pod)

	s = slow("refused", 0)
	require.Equal(t, apierror.SandboxStarting, e.get(client, e.host(8080, s.SandboxID), "/").refusal(t).Reason)
	e.reaches(client, s)
}

// Invariant: P3
func TestBatchIsClaimedAndRepeatedAsOne(t *testing.T) {
	e := start(t, 3)
	e.waitWarm(3)
	key := "batch " + e.pool
	claim := func(count int) answer {
		body := fmt.Sprintf(`{"pool":%q,"count":%d,"waitTimeout":30}`, e.pool, count)
		var a answer
		e.eventually(func() (err error) {
			a, err = e.callAPI(http.MethodPost, "/v1/claims", body, e.site.key(), "Idempotency-Key", key)
			return err
		})
		return a
	}
	read := func(a answer) (ids []string) {
		var all openapi.Claims
		require.Equal(t, http.StatusCreated, a.code, a.body)
		require.NoError(t, json.Unmarshal([]byte(a.body), &all))
		for _, s := range all.Sandboxes {
			ids = append(ids, s.SandboxID)
		}
		require.Len(t, append(ids, all.Ended...), 3)
		return ids
	}
	first := claim(3)
	ids := read(first)
	require.ElementsMatch(t, ids, read(claim(3)))
	require.Equal(t, http.StatusConflict, claim(2).code, "another body")
	require.Equal(t, http.StatusNoContent, e.api(http.MethodDelete, "/sandboxes/"+ids[0], "").code)
	require.ElementsMatch(t, ids[1:], read(claim(3)))
}
