package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/allocator/rest"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/devcluster/stack"
)

// request is one line of the history.
type request struct {
	sandbox rest.Sandbox
	port    int
	sent    time.Time
	code    int
	pod     string
	said    string // if it is not 200
	err     error
}

// history is written by many and judged at the end.
type history struct {
	mu       sync.Mutex
	requests []request
	released map[string]time.Time // when the release of an ID had been acknowledged
}

func (h *history) add(r request) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.requests = append(h.requests, r)
}

func (h *history) acknowledge(id string, at time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.released[id] = at
}

// check judges the history: a 200 comes from the pod that holds the ID and was
// not sent after the release was acknowledged; before it, nothing fails.
func (h *history) check(t *testing.T) (served, refused int) {
	t.Helper()
	for _, r := range h.requests {
		at, released := h.released[r.sandbox.SandboxID]
		after := released && r.sent.After(at)
		switch {
		case r.err != nil:
			t.Errorf("request to %s failed: %v", r.sandbox.SandboxID, r.err)
		case r.code == http.StatusOK && r.pod != r.sandbox.PodName:
			t.Errorf("request for %s, held by %s, was answered by %s", r.sandbox.SandboxID, r.sandbox.PodName, r.pod)
		case r.code == http.StatusOK && after:
			t.Errorf("request for %s was served, sent %v after its release was acknowledged", r.sandbox.SandboxID, r.sent.Sub(at))
		case r.code == http.StatusOK:
			served++
		case r.code == http.StatusGone && released:
			refused++
		case r.code == http.StatusBadGateway && released && !after:
			refused++ // admitted before the release, and the pod went while it was under way
		default:
			t.Errorf("request for %s, port %d, at %v got %d %.300s (released: %v, sent after: %v)", r.sandbox.SandboxID, r.port, r.sent.Format(time.StampMilli), r.code, r.said, released, after)
		}
	}
	return served, refused
}

// send sends a request to a random one of the sandboxes and writes it down.
func (e *env) send(ctx context.Context, client *http.Client, h *history, sandboxes []rest.Sandbox) {
	s := sandboxes[rand.IntN(len(sandboxes))]
	ports := stack.DemoPorts()
	port := int(ports[rand.IntN(len(ports))])
	r := request{sandbox: s, port: port, sent: time.Now()}
	a, err := do(ctx, client, http.MethodGet, "http://gateway/", e.host(port, s.SandboxID), "")
	if err != nil {
		r.err = err
	} else if r.code = a.code; a.code == http.StatusOK {
		i := a.identity(e.t)
		r.pod = i.Pod
		if i.Port != port {
			r.err = fmt.Errorf("port %d answered a request for port %d", i.Port, port)
		}
	} else {
		r.said = a.body
	}
	h.add(r)
}

func TestEveryRequestReachesThePodThatHoldsItsSandboxAndNoneAfterTheRelease(t *testing.T) {
	const sandboxes, requests, senders = 50, 2000, 8
	e := startDisturbing(t, sandboxes, 1)
	client := e.client()

	claimed := make([]rest.Sandbox, 0, sandboxes)
	pods := map[string]string{}
	for range sandboxes {
		s := e.claim()
		require.Empty(t, pods[s.PodName], "pod %s was handed out twice", s.PodName)
		pods[s.PodName] = s.SandboxID
		claimed = append(claimed, s)
		e.reachable(client, s)
	}

	h := &history{released: map[string]time.Time{}}
	var left atomic.Int64
	left.Store(requests)
	var all sync.WaitGroup
	for range senders {
		all.Go(func() {
			for left.Add(-1) >= 0 {
				e.send(t.Context(), client, h, claimed)
			}
		})
	}
	all.Wait()
	served, refused := h.check(t)
	require.Equal(t, requests, served)
	require.Zero(t, refused)

	// Half are released while requests run, and go on for a while after that.
	ctx, stop := context.WithCancel(t.Context())
	h = &history{released: map[string]time.Time{}}
	for range senders {
		all.Go(func() {
			for ctx.Err() == nil {
				e.send(t.Context(), client, h, claimed)
			}
		})
	}
	for _, s := range claimed[:sandboxes/2] {
		e.release(s.SandboxID)
		h.acknowledge(s.SandboxID, time.Now())
	}
	// Beyond the fence: the pods have been deleted and replaced on their
	// addresses, and still nobody else answers for the released IDs.
	e.waitWarm(sandboxes)
	e.eventually(func() error {
		if n := e.readPool(e.pool).Status.Releasing; n > 0 {
			return fmt.Errorf("%d pods are still being released", n)
		}
		return nil
	})
	stop()
	all.Wait()
	served, refused = h.check(t)
	t.Logf("%d requests while releasing: %d served, %d refused", len(h.requests), served, refused)
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

func TestBadRequestsAreRefusedClearlyAndReachNoPod(t *testing.T) {
	e := start(t, 1, 1)
	client := e.client()
	s := e.claim()
	before := e.hits(client, s)

	for _, c := range []struct {
		name, host string
		code       int
		reason     string
	}{
		{"bare domain", e.site.domain(), 400, "bad_target"},
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
	for host, want := range map[string]int{e.site.domain(): http.StatusOK, e.host(8080, "aaaaaaaaaaaaaaaaaaaa"): http.StatusBadGateway} {
		a, err := do(t.Context(), client, http.MethodGet, "http://gateway/", host, "", "E2b-Sandbox-Id", s.SandboxID, "E2b-Sandbox-Port", "8080")
		require.NoError(t, err)
		require.Equal(t, want, a.code, a.body)
		if want == http.StatusOK {
			require.Equal(t, s.PodName, a.identity(t).Pod)
		} else {
			require.Contains(t, a.refusal(t).Message, "was not found", "what the SDKs look for")
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
}

func TestOnlyThePortsThatThePoolOpensAreReached(t *testing.T) {
	e := start(t, 0, 1)
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
		require.Equal(t, fmt.Sprintf("port %d of this sandbox is not open to the outside; its pool opens 8080", port), refusal.Message)
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

func TestWithoutTheAllocatorOnlyWhatIsKnownIsServed(t *testing.T) {
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
func (e *env) hits(client *http.Client, s rest.Sandbox) int {
	e.t.Helper()
	a := e.get(client, e.host(8080, s.SandboxID), "/hits")
	require.Equal(e.t, http.StatusOK, a.code, a.body)
	var counted struct{ Hits int }
	require.NoError(e.t, json.Unmarshal([]byte(a.body), &counted), a.body)
	return counted.Hits
}
