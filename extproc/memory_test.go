package extproc

import (
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"github.com/stretchr/testify/require"

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
	socket := filepath.Join(t.TempDir(), "s")
	o, cache, _ := newOptions(t, socket)
	server := serve(t, o)
	cache.Resolve("abc", routecache.Answer{Status: routecache.Starting, Hold: 30 * time.Second})
	conn := dial(t, socket)
	message := headersOf(":method", "GET", ":authority", "9000-abc."+domain, ":path", "/"+strings.Repeat("a", 60_000))
	before := inUse()
	for range maxHeld {
		stream, err := extprocv3.NewExternalProcessorClient(conn).Process(t.Context())
		require.NoError(t, err)
		require.NoError(t, stream.Send(message))
		more, err := stream.Recv()
		require.NoError(t, err)
		require.NotNil(t, more.GetOverrideMessageTimeout())
	}
	require.EqualValues(t, maxHeld, server.held.Load())
	grown := inUse() - before
	t.Logf("%d bytes for each of %d", grown/maxHeld, maxHeld)
	require.Less(t, grown, int64(maxHeld*each))
	server.stop(10 * time.Millisecond)
	require.Zero(t, server.waiting.Load())
}

// A header that a decision reads may be large too.
// Invariant: P8
func TestBytesOfWaitingRequestsAreBounded(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	o, cache, _ := newOptions(t, socket)
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
