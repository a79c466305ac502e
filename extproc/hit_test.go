package extproc

import (
	"bytes"
	"context"
	"fmt"
	"net/netip"
	"path/filepath"
	"testing"
	"time"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/berth-sandbox/berth/envoy"
	"github.com/berth-sandbox/berth/extproc/admission"
	"github.com/berth-sandbox/berth/internal/bootclock"
	"github.com/berth-sandbox/berth/internal/rate"
	"github.com/berth-sandbox/berth/lastactive"
	"github.com/berth-sandbox/berth/lastactive/look"
	"github.com/berth-sandbox/berth/routecache"
)

// ask returns the encoded answer to an encoded message, without a transport. Envoy has read it.
func (s *Server) ask(message []byte) ([]byte, error) {
	h := asker{s}
	reply, later := h.Now(message, "")
	if later != nil {
		reply = later(context.Background(), func([]byte) error { return nil })
	}
	answer := bytes.Clone(reply.Message)
	if reply.Open != nil {
		reply.Open.Ended(true)
	}
	if reply.Status != codes.OK {
		return nil, status.Error(reply.Status, reply.Text)
	}
	return answer, nil
}

func encoded(tb testing.TB, m *extprocv3.ProcessingRequest) []byte {
	tb.Helper()
	b, err := proto.Marshal(m)
	require.NoError(tb, err)
	return b
}

func decoded(tb testing.TB, answer []byte) *extprocv3.ProcessingResponse {
	tb.Helper()
	var m extprocv3.ProcessingResponse
	require.NoError(tb, proto.Unmarshal(answer, &m))
	return &m
}

// fromEnvoy is the message about a usual request.
func fromEnvoy(host string) *extprocv3.ProcessingRequest {
	return headersOf(":authority", host, ":path", "/x?y", ":method", "GET", "x-request-id", "2b0e2b5e-6a5d-4c8e-9a54-6a8b1d0f6f3e", "accept", "*/*")
}

// hitServer is a server with real sandboxes. Envoy lists port 9000 of podRoute.
func hitServer(tb testing.TB, change func(o *Options)) (*Server, *admission.Sandboxes) {
	tb.Helper()
	return limitedServer(tb, rate.Limit{}, change)
}

// limitedServer is hitServer with a limit of the rate of each sandbox.
func limitedServer(tb testing.TB, limit rate.Limit, change func(o *Options)) (*Server, *admission.Sandboxes) {
	tb.Helper()
	hosts := map[look.Host]int{{AddrPort: netip.AddrPortFrom(podRoute.Addr, 9000)}: 1}
	sandboxes, err := admission.New(admission.Options{
		Routes: routecache.Options{Now: bootclock.Now, Ask: func(string, bool) bool { return false }},
		Uses: lastactive.Options{
			ConnectWindow: envoy.ConnectWindow, Now: bootclock.Now, Rate: limit,
			Look: func(context.Context) (look.Look, error) { return look.Look{Gateway: "this", Hosts: hosts}, nil },
		},
	})
	require.NoError(tb, err)
	sandboxes.SetFreshUntil(1<<63 - 1)
	require.Empty(tb, sandboxes.Uses().FinalReport(context.Background()).LookError) // it has looked
	o := optionsWith("unused", sandboxes)
	if change != nil {
		change(&o)
	}
	server, err := New(o)
	require.NoError(tb, err)
	one := &call{server: server}
	server.calls.New = func() any { return one } // the race detector makes a pool forget at random
	return server, sandboxes
}

func TestHitAllocatesNothing(t *testing.T) {
	const id = "abcdefghijklmnopqrst"
	for name, m := range map[string]*extprocv3.ProcessingRequest{
		"by host": fromEnvoy("9000-" + id + "." + domain),
		"by header": headersOf(":authority", domain, ":path", "/x", ":method", "POST", "e2b-sandbox-id", id, "e2b-sandbox-port", "9000",
			"content-type", "application/json"),
	} {
		t.Run(name, func(t *testing.T) {
			server, cache := hitServer(t, nil)
			cache.Put(id, podRoute)
			message := encoded(t, m)
			answer, err := server.ask(message)
			require.NoError(t, err)
			require.Equal(t, "10.1.2.3:9000", decoded(t, answer).GetDynamicMetadata().AsMap()["berth"].(map[string]any)["dst"])
			require.Zero(t, testing.AllocsPerRun(200, func() {
				if reply, later := (asker{server}).Now(message, ""); later != nil {
					t.Error("no hit")
				} else {
					reply.Open.Ended(true)
				}
			}))
			require.Zero(t, cache.Unread())
		})
	}
}

// Spans and exemplars cost requests nothing that are not sampled, and sampled ones nothing in a router without tracing.
func TestTracingAllocatesNothingForUnsampledHits(t *testing.T) {
	const id, parent = "abcdefghijklmnopqrst", "00-0123456789abcdef0123456789abcdef-0123456789abcdef-"
	told := func(Traced) {}
	for name, c := range map[string]struct {
		trace     func(Traced)
		parent    string
		allocates bool
	}{
		"off": {nil, parent + "01", false}, "not sampled": {told, parent + "00", false}, "no trace": {told, "", false},
		"sampled": {told, parent + "01", true}, // so the test sees what tracing costs
	} {
		t.Run(name, func(t *testing.T) {
			server, cache := hitServer(t, func(o *Options) { o.Trace = c.trace })
			cache.Put(id, podRoute)
			message := encoded(t, fromEnvoy("9000-"+id+"."+domain))
			n := testing.AllocsPerRun(200, func() {
				reply, _ := asker{server}.Now(message, c.parent)
				reply.Open.Ended(true)
			})
			require.Equal(t, c.allocates, n > 0, n)
		})
	}
}

func TestEachRequestCountsAsOneHit(t *testing.T) {
	server, cache := hitServer(t, nil)
	closed := podRoute
	closed.Ports = routecache.NewPorts([]uint16{8080})
	cache.Put("abc", podRoute)
	cache.Put("def", closed)
	cache.Put("ghi", podRoute)
	cache.Release("ghi", routecache.End{})
	for i, host := range []string{"9000-abc", "9000-abc", "9000-def", "9000-ghi"} {
		_, err := server.ask(encoded(t, fromEnvoy(host+"."+domain)))
		require.NoError(t, err)
		require.Equal(t, uint64(i+1), cache.Routes().Stats().Hits, host)
	}
}

// BenchmarkHit is what the router does for a request whose route is known, without HTTP/2.
func BenchmarkHit(b *testing.B) {
	for name, perSecond := range map[string]float64{"unlimited": 0, "limited": 1_000_000} {
		b.Run(name, func(b *testing.B) { benchmarkHit(b, rate.PerSecond(perSecond)) })
	}
}

func benchmarkHit(b *testing.B, limit rate.Limit) {
	const sandboxes = 10_000
	server, cache := limitedServer(b, limit, nil)
	messages := make([][]byte, sandboxes)
	for i := range messages {
		id := fmt.Sprintf("%020d", i)
		cache.Put(id, podRoute)
		messages[i] = encoded(b, fromEnvoy("9000-"+id+"."+domain))
	}
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		reply, _ := asker{server}.Now(messages[i%sandboxes], "")
		reply.Open.Ended(true)
	}
}

// Invariant: I1
func TestHitAnswersWithPresentRouteAndPort(t *testing.T) {
	server, cache := hitServer(t, func(o *Options) { o.Hosts.Paths = true })
	metadata := func(m *extprocv3.ProcessingRequest) map[string]any {
		t.Helper()
		answer, err := server.ask(encoded(t, m))
		require.NoError(t, err)
		berth, ok := decoded(t, answer).GetDynamicMetadata().AsMap()["berth"].(map[string]any)
		require.True(t, ok)
		return berth
	}
	at := func(host string) map[string]any { return metadata(fromEnvoy(host + "." + domain)) }
	cache.Put("abc", podRoute)
	moved := podRoute
	moved.Addr = netip.MustParseAddr("10.1.9.9")
	cache.Put("def", moved)
	for range 2 {
		require.Equal(t, map[string]any{"dst": "10.1.2.3:9000", "id": "abc"}, at("9000-abc"))
		require.Equal(t, map[string]any{"dst": "10.1.2.3:9001", "id": "abc"}, at("9001-abc"))
		require.Equal(t, map[string]any{"dst": "10.1.2.3:8080", "id": "abc"}, at("abc"))
		require.Equal(t, map[string]any{"dst": "10.1.9.9:9000", "id": "def"}, at("9000-def"))
	}

	// The same ID gets another route: other address, other open ports, TLS, no access any more.
	cache.Put("abc", moved)
	require.Equal(t, map[string]any{"dst": "10.1.9.9:9000", "id": "abc"}, at("9000-abc"))
	closed := moved
	closed.Ports = routecache.NewPorts([]uint16{8080})
	cache.Put("abc", closed)
	require.Equal(t, map[string]any{"reply": "port_private"}, at("9000-abc"))
	secure := moved
	secure.Terms = &routecache.Terms{HTTPSPorts: routecache.NewPorts([]uint16{9000})}
	cache.Put("abc", secure)
	for range 2 {
		require.Equal(t, map[string]any{"dst": "10.1.9.9:9000", "id": "abc", "tls": "yes"}, at("9000-abc"))
		require.Equal(t, map[string]any{"dst": "10.1.9.9:9001", "id": "abc"}, at("9001-abc"))
	}
	private := moved
	private.Terms = &routecache.Terms{Access: routecache.Token, Secret: accessKey(t).Secret("abc")}
	cache.Put("abc", private)
	withToken := headersOf(":authority", "9000-abc."+domain, ":method", "GET", "e2b-traffic-access-token", accessKey(t).Token("abc"))
	for range 2 {
		require.Equal(t, map[string]any{"dst": "10.1.9.9:9000", "id": "abc"}, metadata(withToken))
		require.Equal(t, map[string]any{"reply": "access_denied"}, at("9000-abc"), "each request needs a credential")
	}

	cache.Quiesce("def")
	_, found := cache.Routes().Find(key("def"))
	require.False(t, found)
	cache.Resume("def")
	require.Equal(t, map[string]any{"dst": "10.1.9.9:9000", "id": "def"}, at("9000-def"))
	cache.Release("def", routecache.End{})
	require.Equal(t, map[string]any{"reply": "sandbox_gone"}, at("9000-def"))
	cache.Expire()
	server.held.fill() // no request may wait for a leader
	require.Equal(t, map[string]any{"reply": "router_not_ready"}, at("9000-abc"))
}

// The memory of a call is used again, and nothing of an earlier answer is in the next one.
func TestAnswerHasNothingOfAnotherRequest(t *testing.T) {
	server, cache := hitServer(t, func(o *Options) { o.Hosts.Paths = true })
	masked := podRoute
	masked.Terms = &routecache.Terms{MaskHost: "localhost:${PORT}"}
	cache.Put("abc", podRoute)
	cache.Put("def", masked)
	set := func(m *extprocv3.ProcessingRequest) map[string]string {
		t.Helper()
		answer, err := server.ask(encoded(t, m))
		require.NoError(t, err)
		headers := map[string]string{}
		for _, h := range decoded(t, answer).GetRequestHeaders().GetResponse().GetHeaderMutation().GetSetHeaders() {
			headers[h.GetHeader().GetKey()] = string(h.GetHeader().GetRawValue())
		}
		return headers
	}
	for range 2 {
		require.Empty(t, set(fromEnvoy("9000-abc."+domain)))
		for _, path := range []string{"/one", "/two"} {
			require.Equal(t, map[string]string{":path": path}, set(headersOf(":authority", domain, ":method", "GET", ":path", "/sandboxes/abc/9000"+path)))
		}
		for _, host := range []string{"9000-def." + domain, "9000-def." + domain + ":8443"} {
			require.Equal(t, map[string]string{":authority": "localhost:9000", "x-forwarded-host": host}, set(fromEnvoy(host)))
		}
	}
}

// After Barrier has called its function, Envoy gets no answer that names the released sandbox.
// Invariant: I2
func TestNoAdmissionFollowsAnAcknowledgedRelease(t *testing.T) {
	server, cache := hitServer(t, nil)
	server.calls.New = func() any { return &call{server: server} }
	const rounds, clients = 30, 4
	for round := range rounds {
		id := fmt.Sprintf("s%d", round)
		cache.Put(id, podRoute)
		acknowledged := make(chan struct{})
		results := make(chan error, clients)
		asked := make(chan struct{}, clients)
		for range clients {
			message := encoded(t, fromEnvoy("9000-"+id+"."+domain))
			go func() {
				for {
					over := false
					select {
					case <-acknowledged:
						over = true
					default:
					}
					answer, _ := server.ask(message)
					admitted := bytes.Contains(answer, []byte("10.1.2.3"))
					switch {
					case over && admitted:
						results <- fmt.Errorf("%s is admitted after the acknowledgement", id)
						return
					case over:
						results <- nil
						return
					}
					select {
					case asked <- struct{}{}:
					default:
					}
				}
			}()
		}
		<-asked
		cache.Release(id, routecache.End{})
		cache.Barrier(func() { close(acknowledged) })
		for range clients {
			require.NoError(t, <-results)
		}
	}
}

// A request that waits keeps what it needs while others are answered.
// Invariant: I1
func TestWaitingRequestKeepsItsOwnHeaders(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	o, cache := newOptions(socket)
	server := serve(t, o)
	conn := dial(t, socket)
	cache.Resolve("slow", routecache.Answer{Status: routecache.Starting, Hold: 20 * time.Second})
	cache.Put("other", podRoute)
	stream, err := extprocv3.NewExternalProcessorClient(conn).Process(within(t))
	require.NoError(t, err)
	require.NoError(t, stream.Send(headersOf(":method", "GET", ":authority", "9000-slow."+domain, "x-request-id", "the slow one")))
	_, err = stream.Recv() // more time
	require.NoError(t, err)
	for i := range 100 {
		_, err := ask(t, conn, headersOf(":method", "GET", ":authority", "9000-other."+domain, "x-request-id", fmt.Sprintf("another %4d", i)))
		require.NoError(t, err)
	}
	cache.Release("slow", routecache.End{})
	response, err := stream.Recv()
	require.NoError(t, err)
	require.JSONEq(t, `{"code":410,"reason":"sandbox_gone","message":"this sandbox has been released","sandboxID":"slow","requestID":"the slow one"}`,
		string(response.GetImmediateResponse().GetBody()))
	server.stop(soon)
}
