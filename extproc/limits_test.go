package extproc

import (
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"

	"github.com/berth-sandbox/berth/api/sandboxid"
	"github.com/berth-sandbox/berth/extproc/admission"
	"github.com/berth-sandbox/berth/internal/rate"
	"github.com/berth-sandbox/berth/routecache"
)

// Invariant: P25
func TestLimitedSandboxIsRefusedAndItsNeighbourIsNot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const atOnce = 2000
		server, cache := limitedServer(t, rate.PerSecond(0.4), nil)
		private := podRoute
		private.Ports = routecache.NewPorts([]uint16{9000})
		private.Terms = &routecache.Terms{Access: routecache.Token, Secret: accessKey(t).Secret("abc")}
		cache.Put("abc", private)
		cache.Put("def", podRoute)
		ask := func(host string, more ...string) (reply string, headers map[string]string) {
			t.Helper()
			return answerTo(t, server, headersOf(append([]string{":authority", host + "." + domain, ":method", "GET", ":path", "/"}, more...)...))
		}
		token := []string{"e2b-traffic-access-token", accessKey(t).Token("abc")}
		for range 10 { // what is refused for another reason costs nothing
			reply, _ := ask("9000-abc")
			require.Equal(t, "access_denied", reply)
			reply, _ = ask("9001-abc", token...)
			require.Equal(t, "port_private", reply)
		}
		for range atOnce {
			reply, _ := ask("9000-abc", token...)
			require.Empty(t, reply)
		}
		for range 3 {
			reply, headers := ask("9000-abc", token...)
			require.Equal(t, "rate_limited", reply)
			require.Equal(t, "3", headers["retry-after"], "2.5 s, rounded up")
			require.Equal(t, "rate_limited", headers["x-berth-reason"])
		}
		require.Zero(t, cache.Unread())
		reply, _ := ask("9000-abc")
		require.Equal(t, "access_denied", reply, "a client without access does not learn of the limit")
		reply, _ = ask("9000-def")
		require.Empty(t, reply)
		time.Sleep(2500 * time.Millisecond)
		reply, _ = ask("9000-abc", token...)
		require.Empty(t, reply)
		reply, _ = ask("9000-abc", token...)
		require.Equal(t, "rate_limited", reply)
	})
}

// A request that is decided several times costs as much as any other.
// Invariant: P25
func TestRequestThatIsDecidedTwiceCostsOnce(t *testing.T) {
	const atOnce, firstRequests, waiting = 2000, 512, 20
	server, cache := limitedServer(t, rate.PerSecond(0.001), nil)
	server.calls.New = func() any { return &call{server: server} }
	cache.Put("abc", podRoute)
	left := atOnce
	for ; left > atOnce-firstRequests; left-- { // Envoy's threads do not know the port yet
		reply, _ := answerTo(t, server, fromEnvoy("9001-abc."+domain))
		require.Empty(t, reply)
	}
	var all sync.WaitGroup
	for range waiting {
		all.Go(func() { _, _ = server.ask(encoded(t, fromEnvoy("9001-abc."+domain))) })
	}
	all.Wait()
	for left -= waiting; left > 0; left-- {
		reply, _ := answerTo(t, server, fromEnvoy("9000-abc."+domain))
		require.Empty(t, reply, "%d are left", left)
	}
	reply, _ := answerTo(t, server, fromEnvoy("9000-abc."+domain))
	require.Equal(t, "rate_limited", reply)
}

func TestSandboxWithTooManyOpenRequestsIsRefused(t *testing.T) {
	h := always(routeTo("10.1.2.3", 8080), nil)
	d := h.decider()
	d.o.Sandboxes = crowded{h}
	_, refusal := d.decide(t.Context(), &request{authority: []byte("9000-abc." + domain), method: []byte("GET")}, unheld)
	require.Equal(t, []string{"lookup abc"}, h.events)
	require.EqualValues(t, "too_many_open", refusal.Reason)
	require.Equal(t, 429, refusal.Code)
	require.Equal(t, 1, refusal.RetryAfter)
	require.Equal(t, "abc", refusal.SandboxID)
}

// crowded admits nothing, because as much is open as may be.
type crowded struct{ Sandboxes }

func (crowded) Admit(sandboxid.Key, routecache.Route, uint16, bool) (admission.Admission, admission.Why, time.Duration) {
	return admission.Admission{}, admission.TooManyOpen, 0
}

// answerTo returns the word of the refusal of a request, and the headers of the answer.
func answerTo(t *testing.T, server *Server, m *extprocv3.ProcessingRequest) (reply string, headers map[string]string) {
	t.Helper()
	answer, err := server.ask(encoded(t, m))
	require.NoError(t, err)
	r := decoded(t, answer)
	headers = map[string]string{}
	for _, h := range r.GetImmediateResponse().GetHeaders().GetSetHeaders() {
		headers[h.GetHeader().GetKey()] = string(h.GetHeader().GetRawValue())
	}
	reply, _ = r.GetDynamicMetadata().AsMap()["berth"].(map[string]any)["reply"].(string)
	if reply == "rate_limited" {
		require.EqualValues(t, 429, r.GetImmediateResponse().GetStatus().GetCode())
		require.EqualValues(t, codes.ResourceExhausted, r.GetImmediateResponse().GetGrpcStatus().GetStatus())
	}
	return reply, headers
}

func TestRefusalsOfLimitsAreCountedByPool(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server, cache := limitedServer(t, rate.PerSecond(0.001), nil)
		of := func(pool string) (route routecache.Route) {
			route = podRoute
			route.Pool = pool
			return route
		}
		cache.Put("abc", of("python"))
		cache.Put("def", of("node"))
		for range 2003 {
			answerTo(t, server, fromEnvoy("9000-abc."+domain))
		}
		answerTo(t, server, fromEnvoy("9000-def."+domain))
		require.NoError(t, testutil.CollectAndCompare(server.metrics.limited, strings.NewReader(`
# HELP berth_router_requests_limited_total Requests that a limit of their sandbox has refused, by pool and reason. Pools after the first 100 are summed as _other.
# TYPE berth_router_requests_limited_total counter
berth_router_requests_limited_total{pool="python",reason="rate_limited"} 3
`)))
		for i := range 2 * limitedPools {
			server.metrics.countLimited(fmt.Sprint("pool", i), "rate_limited")
		}
		require.Equal(t, limitedPools+1, testutil.CollectAndCount(server.metrics.limited))
		require.InDelta(t, limitedPools+1, testutil.ToFloat64(server.metrics.limited.WithLabelValues("_other", "rate_limited")), 0)
	})
}
