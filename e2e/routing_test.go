package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/devcluster/stack"
	"github.com/berth-sandbox/berth/e2e/harness"
	"github.com/berth-sandbox/berth/e2e/history"
	"github.com/berth-sandbox/berth/envoy"
	"github.com/berth-sandbox/berth/internal/bootclock"
)

// newHistory begins a history with the claims of sandboxes.
func newHistory(t *testing.T, claimed []openapi.Sandbox) *harness.Run {
	t.Helper()
	run := harness.NewRun(t, history.Settings{Suite: history.Routing}, "")
	for _, s := range claimed {
		now := bootclock.Now()
		run.History.Add(history.Event{
			Kind: history.Claim, Began: now, Ended: now, Claim: s.SandboxID, Code: http.StatusCreated,
			Sandbox: s.SandboxID, Pod: s.PodName,
		})
	}
	return run
}

// judged judges a history and counts the requests that were served and refused.
func judged(run *harness.Run) (served, refused int) {
	run.Helper()
	for _, e := range run.Judge().Events {
		switch {
		case e.Kind != history.Request:
		case e.Code == http.StatusOK:
			served++
		default:
			refused++
		}
	}
	return served, refused
}

// send sends a request to a random one of the sandboxes and records it.
func (e *env) send(ctx context.Context, client *http.Client, run *harness.Run, sandboxes []openapi.Sandbox) {
	s := sandboxes[rand.IntN(len(sandboxes))]
	ports := stack.DemoPorts()
	port := int(ports[rand.IntN(len(ports))])
	r := history.Event{
		Kind: history.Request, Began: bootclock.Now(), Request: strconv.FormatUint(names.Add(1), 10),
		Sandbox: s.SandboxID, What: fmt.Sprintf("port %d", port),
	}
	a, err := do(ctx, client, http.MethodGet, "http://gateway/", e.host(port, s.SandboxID), "")
	r.Ended = bootclock.Now()
	if err != nil {
		r.Error = err.Error()
	} else if r.Code = a.code; a.code == http.StatusOK {
		i := a.identity(e.t)
		r.Pod, r.PodUID = i.Pod, i.PodUID
		if i.Port != port {
			r.Error = fmt.Sprintf("port %d answered a request for port %d", i.Port, port)
		}
	} else {
		r.Reason = a.header.Get(envoy.ReasonHeader)
	}
	run.History.Add(r)
}

// names of requests in histories.
var names atomic.Uint64

// Invariant: I1
func TestRequestsReachTheirPodAndNoneAfterRelease(t *testing.T) {
	const sandboxes, requests, senders = 50, 2000, 8
	e := startDisturbing(t, sandboxes)
	client := e.client()

	claimed := make([]openapi.Sandbox, 0, sandboxes)
	pods := map[string]string{}
	for range sandboxes {
		s := e.claim()
		require.Empty(t, pods[s.PodName], "pod %s was handed out twice", s.PodName)
		pods[s.PodName] = s.SandboxID
		claimed = append(claimed, s)
		e.reachable(client, s)
	}

	run := newHistory(t, claimed)
	var left atomic.Int64
	left.Store(requests)
	var all sync.WaitGroup
	for range senders {
		all.Go(func() {
			for left.Add(-1) >= 0 {
				e.send(t.Context(), client, run, claimed)
			}
		})
	}
	all.Wait()
	served, refused := judged(run)
	require.Equal(t, requests, served)
	require.Zero(t, refused)

	// Half are released while requests run, and go on for a while after that.
	ctx, stop := context.WithCancel(t.Context())
	run = newHistory(t, claimed)
	for range senders {
		all.Go(func() {
			for ctx.Err() == nil {
				e.send(t.Context(), client, run, claimed)
			}
		})
	}
	for _, s := range claimed[:sandboxes/2] {
		// From its answer on no request is served.
		r := history.Event{Kind: history.Release, Sandbox: s.SandboxID, Code: http.StatusNoContent, Began: bootclock.Now()}
		e.release(s.SandboxID)
		r.Ended = bootclock.Now()
		run.History.Add(r)
	}
	// After the fence, other pods have the addresses, and none of them answers for a
	// released ID.
	e.waitWarm(sandboxes)
	e.eventually(func() error {
		if n := e.readPool(e.pool).Status.Releasing; n > 0 {
			return fmt.Errorf("%d pods are still being released", n)
		}
		return nil
	})
	stop()
	all.Wait()
	served, refused = judged(run)
	t.Logf("%d requests while releasing: %d served, %d refused", served+refused, served, refused)
	require.Positive(t, served)
	require.Positive(t, refused)

	// The records say so too.
	for _, s := range claimed[:sandboxes/2] {
		require.Equal(t, http.StatusNotFound, e.api(http.MethodGet, "/sandboxes/"+s.SandboxID, "").code)
	}
	for _, s := range claimed[sandboxes/2:] {
		require.Equal(t, http.StatusOK, e.api(http.MethodGet, "/sandboxes/"+s.SandboxID, "").code)
	}
}

// Invariant: P4
func TestBadRequestsAreRefusedAndReachNoPod(t *testing.T) {
	e := start(t, 1)
	client := e.client()
	s := e.claim()
	before := e.hits(client, s)

	for _, c := range []struct {
		name, host string
		code       int
		reason     string
	}{
		{"bare domain", e.site.domain(), 404, "not_found"},
		{"another domain", "8080-" + s.SandboxID + ".example.com", 400, "bad_host"},
		{"something before the sandbox", "x." + e.host(8080, s.SandboxID), 400, "bad_port"},
		{"two hosts", e.host(8080, s.SandboxID) + "," + e.host(8080, s.SandboxID), 400, "bad_host"},
		{"port 0", e.host(0, s.SandboxID), 400, "bad_port"},
		{"port above 65535", e.host(65536, s.SandboxID), 400, "bad_port"},
		{"port with a leading zero", "0" + e.host(8080, s.SandboxID), 400, "bad_port"},
		{"no port number", "http-" + s.SandboxID + "." + e.site.domain(), 400, "bad_port"},
		{"unknown sandbox", e.host(8080, "aaaaaaaaaaaaaaaaaaaa"), 404, "sandbox_not_found"},
	} {
		a := e.get(client, c.host, "/")
		refusal := a.refusal(t)
		require.Equal(t, c.code, a.code, "%s: %s", c.name, a.body)
		require.Equal(t, c.reason, string(refusal.Reason), c.name)
		require.NotEmpty(t, refusal.RequestID, c.name)
		require.Equal(t, c.reason, a.header.Get("x-berth-reason"), c.name)
	}
	require.Equal(t, before, e.hits(client, s), "no refused request reached the pod")

	// Upper case, a trailing dot and a port in the Host are all the same name.
	for _, host := range []string{
		e.host(8080, s.SandboxID), upper(e.host(8080, s.SandboxID)), e.host(8080, s.SandboxID) + ".",
		e.host(8080, s.SandboxID) + ":8080", s.SandboxID + "." + e.site.domain(),
	} {
		a := e.get(client, host, "/")
		require.Equal(t, http.StatusOK, a.code, "%s: %s", host, a.body)
		require.Equal(t, s.PodName, a.identity(t).Pod)
	}

	// At the bare domain the headers of the E2B SDKs name the sandbox; at another
	// sandbox's host they name nothing.
	for host, want := range map[string]int{e.site.domain(): http.StatusOK,
		e.host(8080, "aaaaaaaaaaaaaaaaaaaa"): http.StatusBadGateway} {
		a, err := do(t.Context(), client, http.MethodGet, "http://gateway/", host, "", "E2b-Sandbox-Id", s.SandboxID,
			"E2b-Sandbox-Port", "8080")
		require.NoError(t, err)
		require.Equal(t, want, a.code, a.body)
		if want == http.StatusOK {
			require.Equal(t, s.PodName, a.identity(t).Pod)
		} else {
			require.JSONEq(t, `{"sandboxId":"aaaaaaaaaaaaaaaaaaaa","message":"The sandbox was not found","code":502}`, a.body)
			require.Equal(t, "sandbox_not_found", a.header.Get("x-berth-reason"))
		}
	}

	// A port on which nothing listens: the sandbox's own failure, said as such.
	a := e.get(client, e.host(9, s.SandboxID), "/")
	require.Equal(t, http.StatusBadGateway, a.code, a.body)
	require.Equal(t, "sandbox_unreachable", string(a.refusal(t).Reason))

	e.release(s.SandboxID)
	a = e.get(client, e.host(8080, s.SandboxID), "/")
	require.Equal(t, http.StatusGone, a.code, a.body)
	require.Equal(t, "sandbox_gone", string(a.refusal(t).Reason))
	require.Regexp(t, `^this sandbox was released at 2\S+Z: Killed$`, a.refusal(t).Message)
}

// Invariant: P1
func TestOnlyPortsOfThePoolAreReached(t *testing.T) {
	e := start(t, 0)
	p := e.newPool(e.pool+"-ports", 1)
	p.Spec.Ports = []int32{8080}
	e.createPool(p)
	e.pool = p.Name
	e.waitWarm(1)
	client := e.client()
	s := e.claim()
	reached := func(host string, port int) {
		t.Helper()
		a := e.get(client, host, "/")
		require.Equal(t, http.StatusOK, a.code, a.body)
		i := a.identity(t)
		require.Equal(t, s.PodName, i.Pod)
		require.Equal(t, port, i.Port)
	}
	reached(e.host(8080, s.SandboxID), 8080)
	reached(s.SandboxID+"."+e.site.domain(), 8080)
	for _, port := range []int{8081, 22} { // something listens on the first
		a := e.get(client, e.host(port, s.SandboxID), "/")
		require.Equal(t, http.StatusForbidden, a.code, a.body)
		refusal := a.refusal(t)
		require.Equal(t, "port_private", string(refusal.Reason))
		require.Equal(t, s.SandboxID, refusal.SandboxID)
		require.Equal(t, fmt.Sprintf("port %d of this sandbox is not open to the outside; its pool opens 8080", port),
			refusal.Message)
	}

	// What the pool's owner opens and closes counts for the sandbox that is there.
	becomes := func(port, code int) (a answer) {
		t.Helper()
		e.eventually(func() error {
			if a = e.get(client, e.host(port, s.SandboxID), "/hits"); a.code != code {
				return fmt.Errorf("port %d: %d %s", port, a.code, a.body)
			}
			return nil
		})
		return a
	}
	e.patchPool(e.pool, `{"spec":{"ports":[8081,8080]}}`)
	require.JSONEq(t, `{"hits":0}`, becomes(8081, http.StatusOK).body, "a request for a private port had reached the pod")
	reached(e.host(8081, s.SandboxID), 8081)
	e.patchPool(e.pool, `{"spec":{"defaultPort":8081,"ports":[8081]}}`)
	becomes(8080, http.StatusForbidden)
	reached(s.SandboxID+"."+e.site.domain(), 8081)
	e.patchPool(e.pool, `{"spec":{"ports":null}}`)
	becomes(8080, http.StatusOK)
	e.eventually(func() error { // labels follow in the background
		if n := len(e.pods(map[string]string{v1alpha1.LabelPhase: v1alpha1.PhaseClaimed})); n != 1 {
			return fmt.Errorf("%d claimed pods", n)
		}
		return nil
	})
}

// Invariant: I8
func TestOnlyKnownSandboxesAreServedWithoutAllocator(t *testing.T) {
	e := startAlone(t, 1, stack.Options{})
	client := e.client()
	s := e.claim()
	require.Equal(t, http.StatusOK, e.get(client, e.host(8080, s.SandboxID), "/").code)
	require.NoError(t, e.stack.Allocators[0].Kill())
	e.eventually(func() error {
		a := e.get(client, e.host(8080, "bbbbbbbbbbbbbbbbbbbb"), "/")
		if a.code != http.StatusServiceUnavailable {
			return fmt.Errorf("the router has not noticed: %d %s", a.code, a.body)
		}
		require.Equal(t, "router_not_ready", string(a.refusal(t).Reason))
		require.Equal(t, "1", a.header.Get("Retry-After"))
		return nil
	})
	require.Equal(t, http.StatusOK, e.get(client, e.host(8080, s.SandboxID), "/").code)
}

func upper(s string) string {
	b := []byte(s)
	for i, c := range b {
		if c >= 'a' && c <= 'z' {
			b[i] = c - 'a' + 'A'
		}
	}
	return string(b)
}

// hits is how many requests the sandbox has received so far: this one and
// probes are not counted.
func (e *env) hits(client *http.Client, s openapi.Sandbox) int {
	e.t.Helper()
	a := e.get(client, e.host(8080, s.SandboxID), "/hits")
	require.Equal(e.t, http.StatusOK, a.code, a.body)
	var counted struct{ Hits int }
	require.NoError(e.t, json.Unmarshal([]byte(a.body), &counted), a.body)
	return counted.Hits
}
