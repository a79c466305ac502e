package extproc

import (
	"fmt"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/envoy"
	"github.com/berth-sandbox/berth/routecache"
)

// inUse is the memory that is in use, without garbage.
func inUse() int64 {
	runtime.GC()
	runtime.GC() // what pools kept
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc + m.StackInuse)
}

// Invariant: P8
func TestHeldRequestsKeepWhatDecisionsRead(t *testing.T) {
	const each = 40 << 10 // bytes for one request, with the client's part
	const n = maxHeld / 4 // a busy machine needs a part of maxHold for them
	socket := filepath.Join(t.TempDir(), "s")
	o, cache := newOptions(socket)
	server := serve(t, o)
	conn := dial(t, socket)
	path := "/" + strings.Repeat("a", 60_000)
	before := inUse()
	for i := range n {
		id := fmt.Sprintf("s%d", i)
		cache.Resolve(id, routecache.Answer{Status: routecache.Starting, Hold: maxHold})
		message := headersOf(":method", "GET", ":authority", "9000-"+id+"."+domain, ":path", path)
		stream, err := extprocv3.NewExternalProcessorClient(conn).Process(t.Context())
		require.NoError(t, err)
		require.NoError(t, stream.Send(message))
		more, err := stream.Recv()
		require.NoError(t, err)
		require.NotNil(t, more.GetOverrideMessageTimeout())
	}
	require.EqualValues(t, n, server.held.len())
	grown := inUse() - before
	t.Logf("%d bytes for each of %d", grown/n, n)
	require.Less(t, grown, int64(n*each))
	server.stop(10 * time.Millisecond)
	require.Zero(t, server.waiting.Load())
}

// A header that a decision reads may be large too.
// Invariant: P8
func TestBytesOfWaitingRequestsAreBounded(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	o, cache := newOptions(socket)
	server := serve(t, o)
	cache.Resolve("abc", routecache.Answer{Status: routecache.Starting, Hold: 30 * time.Second})
	cache.Put("def", podRoute)
	conn := dial(t, socket)
	message := headersOf(":method", "GET", ":authority", "9000-abc."+domain, "origin", strings.Repeat("a", 60_000))
	waiting := 0
	for refused := false; !refused; {
		stream, err := extprocv3.NewExternalProcessorClient(conn).Process(t.Context())
		require.NoError(t, err)
		require.NoError(t, stream.Send(message))
		m, err := stream.Recv()
		require.NoError(t, err)
		if refused = m.GetImmediateResponse() != nil; refused {
			require.EqualValues(t, 503, m.GetImmediateResponse().GetStatus().GetCode())
			break
		}
		waiting++
		require.Less(t, waiting, maxHeld)
	}
	require.InDelta(t, maxWaiting, waiting*(60_000+waitCost), 100_000)
	_, err := ask(t, conn, get("9000-def."+domain)) // needs no wait
	require.NoError(t, err)
	server.stop(10 * time.Millisecond)
	require.Zero(t, server.waiting.Load())
}

// What needs no wait needs no memory for long.
// Invariant: P8
func TestFullRouterRefusesOnlyWhatWouldWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o, cache := newOptions("unused")
		server, err := New(o)
		require.NoError(t, err)
		closed, private := podRoute, podRoute
		closed.Ports = routecache.NewPorts([]uint16{8080})
		secret := accessKey(t).Secret("private")
		private.Terms = &routecache.Terms{Access: routecache.Token, Secret: secret}
		cache.Put("open", podRoute)
		cache.Put("closed", closed)
		cache.Put("private", private)
		cache.Put("quiesced", podRoute)
		cache.Quiesce("quiesced")
		cache.Release("gone", routecache.End{})
		cache.Resolve("unknown", routecache.Answer{Status: routecache.Unknown})
		cache.Resolve("starting", routecache.Answer{Status: routecache.Starting, Hold: time.Second})
		hits := cache.Routes().Stats().Hits
		for range 512 { // Envoy's threads do not know the port yet
			answer, err := server.ask(encoded(t, get("9000-open."+domain)))
			require.NoError(t, err)
			require.NotNil(t, decoded(t, answer).GetRequestHeaders())
		}
		server.waiting.Store(maxWaiting)
		began, requests := time.Now(), uint64(512)
		for host, want := range map[string]string{
			"8080-open": "", "9000-open": "too_many_ports", "9000-closed": "port_private", "8080-private": "access_denied",
			"8080-gone": "sandbox_gone", "8080-unknown": "sandbox_not_found",
			"8080-quiesced": "router_not_ready", "8080-starting": "router_not_ready", "8080-other": "router_not_ready",
		} {
			answer, err := server.ask(encoded(t, get(host+"."+domain)))
			require.NoError(t, err)
			reply, _ := decoded(t, answer).GetDynamicMetadata().AsMap()["berth"].(map[string]any)["reply"].(string)
			require.Equal(t, want, reply, host)
			if want != "router_not_ready" {
				requests++
			}
		}
		link := secret.Link("private", 8080, time.Now().Add(time.Hour), "/")
		answer, err := server.ask(encoded(t, headersOf(":method", "GET", ":authority", "8080-private."+domain, envoy.LinkHeader, link)))
		require.NoError(t, err)
		require.EqualValues(t, 303, decoded(t, answer).GetImmediateResponse().GetStatus().GetCode())
		require.Zero(t, time.Since(began))
		require.Equal(t, requests+1, cache.Routes().Stats().Hits-hits, "each request that the cache answers is one hit")
	})
}
