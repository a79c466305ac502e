package extproc

import (
	"context"
	"io"
	"net/netip"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/metric"
	"github.com/berth-sandbox/berth/api/sandboxid"
	"github.com/berth-sandbox/berth/envoy"
	"github.com/berth-sandbox/berth/extproc/admission"
	"github.com/berth-sandbox/berth/extproc/wire"
	"github.com/berth-sandbox/berth/routecache"
)

// soon bounds how long a test waits for an expected event.
const soon = 10 * time.Second

// newOptions returns the options of a router that knows no sandbox.
func newOptions(socket string) (Options, *admission.Sandboxes) {
	sandboxes := newSandboxes()
	return optionsWith(socket, sandboxes), sandboxes
}

func optionsWith(socket string, sandboxes *admission.Sandboxes) Options {
	return Options{
		Socket: socket, Hosts: Hosts{Domain: domain}, PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.1.0.0/16")},
		GRPCGo: grpcGo, Routes: sandboxes.Routes(), Sandboxes: sandboxes, TeamKeys: &TeamKeys{}, Metrics: prometheus.NewRegistry(), Log: zap.NewNop(),
	}
}

// running is a server on its socket.
type running struct {
	*Server
	t      *testing.T
	served chan error
}

func serve(t *testing.T, o Options) *running {
	server, err := New(o)
	require.NoError(t, err)
	r := &running{Server: server, t: t, served: make(chan error, 1)}
	l, err := server.Listen(t.Context())
	require.NoError(t, err)
	go func() { r.served <- server.Serve(l) }()
	return r
}

// stop stops the server and returns how long that took.
func (r *running) stop(limit time.Duration) time.Duration {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	began := time.Now()
	r.Stop(ctx)
	require.NoError(r.t, <-r.served)
	return time.Since(began)
}

// dial is Envoy's connection.
func dial(t *testing.T, socket string) *grpc.ClientConn {
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	require.NoError(t, err)
	t.Cleanup(func() { conn.Close() })
	return conn
}

// within returns a context that ends with the test and bounds its duration.
func within(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), soon)
	t.Cleanup(cancel)
	return ctx
}

// headersOf returns the message that Envoy sends about a request.
func headersOf(keysAndValues ...string) *extprocv3.ProcessingRequest {
	headers := &corev3.HeaderMap{}
	for i := 0; i < len(keysAndValues); i += 2 {
		headers.Headers = append(headers.Headers, &corev3.HeaderValue{Key: keysAndValues[i], RawValue: []byte(keysAndValues[i+1])})
	}
	return &extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_RequestHeaders{
		RequestHeaders: &extprocv3.HttpHeaders{Headers: headers},
	}}
}

// headersIn returns the headers that the router reads from a message.
func headersIn(t *testing.T, message *extprocv3.ProcessingRequest) []wire.Header {
	b, err := proto.Marshal(message)
	require.NoError(t, err)
	var r wire.Request
	require.NoError(t, wire.Codec{}.Unmarshal(mem.BufferSlice{mem.SliceBuffer(b)}, &r))
	return r.Headers
}

func get(host string) *extprocv3.ProcessingRequest {
	return headersOf(":method", "GET", ":authority", host, "x-request-id", "req-1")
}

// ask behaves like Envoy: it reads one answer, and ends the stream of an admitted request.
func ask(t *testing.T, conn *grpc.ClientConn, message *extprocv3.ProcessingRequest) (*extprocv3.ProcessingResponse, error) {
	ctx, cancel := context.WithCancel(within(t))
	defer cancel()
	stream, err := extprocv3.NewExternalProcessorClient(conn).Process(ctx)
	require.NoError(t, err)
	require.NoError(t, stream.Send(message))
	response, err := stream.Recv()
	if err != nil {
		return nil, err
	}
	if response.GetImmediateResponse() != nil {
		_, err = stream.Recv()
		require.ErrorIs(t, err, io.EOF, "one answer, and then the end of the stream")
	}
	return response, nil
}

func TestAdmittedReplyNamesOnlyPodAndSandbox(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	o, cache := newOptions(socket)
	metrics := o.Metrics.(*prometheus.Registry)
	server := serve(t, o)
	cache.Put("abc", podRoute)
	conn := dial(t, socket)
	for _, message := range []*extprocv3.ProcessingRequest{
		get("9000-ABC." + domain + ":8443"),
		{Request: &extprocv3.ProcessingRequest_RequestHeaders{RequestHeaders: &extprocv3.HttpHeaders{Headers: &corev3.HeaderMap{
			Headers: []*corev3.HeaderValue{{Key: ":authority", Value: "9000-abc." + domain}}, // as text, not raw
		}}}},
	} {
		response, err := ask(t, conn, message)
		require.NoError(t, err)
		require.NotNil(t, response.GetRequestHeaders())
		require.Nil(t, response.GetRequestHeaders().GetResponse(), "the request was changed")
		require.Equal(t, map[string]any{"berth": map[string]any{"dst": "10.1.2.3:9000", "id": "abc"}}, response.GetDynamicMetadata().AsMap())
	}
	require.Equal(t, 1, cache.Uses().Len())
	require.NoError(t, testutil.GatherAndCompare(metrics, strings.NewReader(`
# HELP berth_router_requests_total Requests Envoy asked about, by outcome: admitted, link (the redirection of a link), preflight (of CORS, for the port of agents), or the reason of the refusal.
# TYPE berth_router_requests_total counter
berth_router_requests_total{outcome="admitted"} 2
`), "berth_router_requests_total"))
	server.stop(soon)
}

func TestRefusalAnswersInPlaceOfSandbox(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	o, cache := newOptions(socket)
	server := serve(t, o)
	cache.Release("gone", routecache.End{})
	cache.Release("idle", routecache.End{Reason: "Idle", AtUnix: 1700000000})
	server.held.fill()
	conn := dial(t, socket)
	for host, c := range map[string]struct {
		code int
		grpc codes.Code
		word string
		body string
	}{
		"8080-gone." + domain: {410, codes.NotFound, "sandbox_gone", `{"code":410,"reason":"sandbox_gone","message":"this sandbox has been released","sandboxID":"gone","requestID":"req-1"}`},
		"8080-idle." + domain: {410, codes.NotFound, "sandbox_gone", `{"code":410,"reason":"sandbox_gone","message":"this sandbox was released at 2023-11-14T22:13:20Z: Idle","sandboxID":"idle","requestID":"req-1"}`},
		// Without a stream and without room to wait for one, the router answers, and never with gRPC's
		// Unavailable, which Envoy retries.
		"8080-other." + domain:            {503, codes.Unavailable, "router_not_ready", ""},
		"8080-a." + domain + "," + domain: {400, codes.InvalidArgument, "bad_host", ""},
	} {
		response, err := ask(t, conn, get(host))
		require.NoError(t, err, host)
		reply := response.GetImmediateResponse()
		require.EqualValues(t, c.code, reply.GetStatus().GetCode(), host)
		require.EqualValues(t, c.grpc, reply.GetGrpcStatus().GetStatus(), host)
		require.Equal(t, "berth_"+c.word, reply.GetDetails())
		if c.body != "" {
			require.JSONEq(t, c.body, string(reply.GetBody()))
		}
		require.Equal(t, map[string]any{"berth": map[string]any{"reply": c.word}}, response.GetDynamicMetadata().AsMap(), "a refusal must name no destination")
	}
	require.Zero(t, cache.Uses().Len())
	server.stop(soon)
}

// A client must not be able to fill the log. The metric counts all refusals.
func TestRefusalLogIsRateLimited(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o, _ := newOptions("unused")
		core, observed := observer.New(zap.InfoLevel)
		o.Log = zap.New(core)
		server, err := New(o)
		require.NoError(t, err)
		reasons := []apierror.Reason{apierror.SandboxNotFound, apierror.BadHost}
		for second := 1; second <= 3; second++ {
			for range 1000 {
				for _, reason := range reasons {
					server.logRefusal(apierror.New(reason, "no"))
					o.Log.Info("anything else")
				}
			}
			for _, reason := range reasons {
				require.Equal(t, maxRefusalsLogged*second, observed.FilterField(zap.String("reason", string(reason))).Len())
			}
			require.Equal(t, 2000*second, observed.FilterMessage("anything else").Len(), "nothing else is dropped")
			time.Sleep(time.Second) // the bubble's
		}
	})
}

func TestWrongMessageIsNotRetriedByEnvoy(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	o, cache := newOptions(socket)
	server := serve(t, o)
	cache.Put("abc", podRoute)
	conn := dial(t, socket)
	for name, message := range map[string]*extprocv3.ProcessingRequest{
		"nothing":          {},
		"response headers": {Request: &extprocv3.ProcessingRequest_ResponseHeaders{ResponseHeaders: get("8080-abc." + domain).GetRequestHeaders()}},
		"request body":     {Request: &extprocv3.ProcessingRequest_RequestBody{RequestBody: &extprocv3.HttpBody{}}},
		"request trailers": {Request: &extprocv3.ProcessingRequest_RequestTrailers{RequestTrailers: &extprocv3.HttpTrailers{}}},
	} {
		_, err := ask(t, conn, message)
		require.Equal(t, codes.InvalidArgument, status.Code(err), name)
	}
	// No headers at all is a request without a host.
	response, err := ask(t, conn, &extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_RequestHeaders{}})
	require.NoError(t, err)
	require.EqualValues(t, 400, response.GetImmediateResponse().GetStatus().GetCode())

	stream, err := extprocv3.NewExternalProcessorClient(conn).Process(within(t))
	require.NoError(t, err)
	require.NoError(t, stream.CloseSend()) // the client left before Envoy asked
	_, err = stream.Recv()
	require.ErrorIs(t, err, io.EOF)
	server.stop(soon)
}

// held is a cache in which a lookup waits until the test releases it.
type held struct {
	admission.Routes
	began chan struct{}
	let   chan struct{}
}

func (h held) Find(sandboxid.Key) (routecache.Route, bool) {
	return routecache.Route{}, false
}

func (h held) Lookup(ctx context.Context, id sandboxid.Key) (routecache.Answer, error) {
	close(h.began)
	select {
	case <-h.let:
	case <-ctx.Done():
	}
	return h.Routes.Lookup(ctx, id)
}

func TestStopAnswersRequestsInProgress(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	o, cache := newOptions(socket)
	cache.Put("abc", podRoute)
	h := held{cache.Routes(), make(chan struct{}), make(chan struct{})}
	o.Routes, o.LookupTimeout = h, soon
	server := serve(t, o)
	ctx, cancel := context.WithCancel(within(t))
	stream, err := extprocv3.NewExternalProcessorClient(dial(t, socket)).Process(ctx)
	require.NoError(t, err)
	require.NoError(t, stream.Send(get("8080-abc."+domain)))
	<-h.began
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		server.stop(soon)
	}()
	require.Eventually(t, func() bool {
		r, err := server.health.Check(t.Context(), &healthv1.HealthCheckRequest{})
		return err == nil && r.GetStatus() == healthv1.HealthCheckResponse_NOT_SERVING
	}, soon, time.Millisecond)
	close(h.let)
	response, err := stream.Recv()
	require.NoError(t, err)
	require.NotNil(t, response.GetRequestHeaders())
	cancel() // it has read the answer
	<-stopped
}

// Invariant: I2, I3
func TestOnlyEnvoyEndingAStreamProvesReading(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	o, cache := newOptions(socket)
	server := serve(t, o)
	cache.Put("abc", podRoute)
	conn := dial(t, socket)
	admitted := func() (readByEnvoy func()) {
		ctx, cancel := context.WithCancel(within(t))
		stream, err := extprocv3.NewExternalProcessorClient(conn).Process(ctx)
		require.NoError(t, err)
		require.NoError(t, stream.Send(get("9000-abc."+domain)))
		response, err := stream.Recv()
		require.NoError(t, err)
		require.NotNil(t, response.GetRequestHeaders())
		require.NoError(t, stream.CloseSend()) // may have crossed the answer, so it proves nothing
		return cancel
	}
	first, second := admitted(), admitted()
	_, err := ask(t, conn, get("no sandbox")) // the server has read what came before
	require.NoError(t, err)
	for range 1000 {
		require.Equal(t, 2, o.Sandboxes.Unread())
		runtime.Gosched()
	}
	passed := make(chan struct{})
	cache.Barrier(func() { close(passed) })
	first()
	require.Eventually(t, func() bool { return o.Sandboxes.Unread() == 1 }, soon, time.Millisecond)
	select {
	case <-passed:
		t.Fatal("the second answer was not read")
	default:
	}
	_, err = ask(t, conn, get("no sandbox")) // refused, so no stream stays open
	require.NoError(t, err)
	require.Equal(t, 1, o.Sandboxes.Unread())
	second()
	<-passed

	defer admitted()()
	server.stop(10 * time.Millisecond)
	require.Equal(t, 1, o.Sandboxes.Unread(), "our own end was taken for Envoy's")
}

// admissions returns how many admissions have been timed.
func admissions(t *testing.T, o Options) (n uint64) {
	t.Helper()
	families, err := o.Metrics.(*prometheus.Registry).Gather()
	require.NoError(t, err)
	for _, f := range families {
		if f.GetName() == metric.AdmissionSeconds.Name {
			return f.GetMetric()[0].GetHistogram().GetSampleCount()
		}
	}
	t.Fatal("no histogram")
	return 0
}

func TestHeldRequestContinuesWhenSandboxRuns(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	o, cache := newOptions(socket)
	server := serve(t, o)
	conn := dial(t, socket)
	cache.Resolve("abc", routecache.Answer{Status: routecache.Starting, Hold: 20 * time.Second})
	ctx, cancel := context.WithCancel(within(t))
	defer cancel()
	stream, err := extprocv3.NewExternalProcessorClient(conn).Process(ctx)
	require.NoError(t, err)
	require.NoError(t, stream.Send(get("9000-abc."+domain)))
	response, err := stream.Recv()
	require.NoError(t, err)
	require.Nil(t, response.GetResponse(), "that would be the answer")
	require.Nil(t, response.GetDynamicMetadata())
	require.Equal(t, 20*time.Second+envoy.MessageTimeout, response.GetOverrideMessageTimeout().AsDuration())
	require.EqualValues(t, 1, server.held.len())
	cache.Put("abc", podRoute)
	response, err = stream.Recv()
	require.NoError(t, err)
	require.Equal(t, "10.1.2.3:9000", response.GetDynamicMetadata().AsMap()["berth"].(map[string]any)["dst"])
	require.Zero(t, server.held.len())
	require.Zero(t, admissions(t, o), "the start of the sandbox is no part of the admission")
	_, err = ask(t, conn, get("9000-abc."+domain))
	require.NoError(t, err)
	require.EqualValues(t, 1, admissions(t, o))

	// Too long for Envoy, or too many: refused at once.
	cache.Resolve("def", routecache.Answer{Status: routecache.Starting, Hold: maxHold + 1})
	response, err = ask(t, conn, get("9000-def."+domain))
	require.NoError(t, err)
	require.EqualValues(t, 503, response.GetImmediateResponse().GetStatus().GetCode())
	cache.Resolve("ghi", routecache.Answer{Status: routecache.Starting, Hold: time.Second})
	server.held.fill()
	response, err = ask(t, conn, get("9000-ghi."+domain))
	require.NoError(t, err)
	require.EqualValues(t, 503, response.GetImmediateResponse().GetStatus().GetCode())
	require.EqualValues(t, maxHeld, server.held.len())
	cancel()
	server.stop(soon)
}

// Envoy repeats a question that got no answer, and its successor answers it.
func TestForcedStopRefusesNoHeldRequest(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	o, cache := newOptions(socket)
	server := serve(t, o)
	cache.Resolve("abc", routecache.Answer{Status: routecache.Starting, Hold: 20 * time.Second})
	var streams []extprocv3.ExternalProcessor_ProcessClient
	for range 16 {
		stream, err := extprocv3.NewExternalProcessorClient(dial(t, socket)).Process(within(t))
		require.NoError(t, err)
		require.NoError(t, stream.Send(get("9000-abc."+domain)))
		_, err = stream.Recv() // more time
		require.NoError(t, err)
		streams = append(streams, stream)
	}
	server.stop(10 * time.Millisecond)
	for _, stream := range streams {
		_, err := stream.Recv()
		require.Equal(t, codes.Unavailable, status.Code(err))
	}
}

func TestStopCutsOffSlowRequests(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	o, cache := newOptions(socket)
	h := held{cache.Routes(), make(chan struct{}), make(chan struct{})}
	o.Routes, o.LookupTimeout = h, 2*soon
	server := serve(t, o)
	stream, err := extprocv3.NewExternalProcessorClient(dial(t, socket)).Process(within(t))
	require.NoError(t, err)
	require.NoError(t, stream.Send(get("8080-abc."+domain)))
	<-h.began
	require.Less(t, server.stop(time.Millisecond), soon)
	_, err = stream.Recv()
	require.Error(t, err)
}

func TestMissingOptionsAreNamed(t *testing.T) {
	_, err := New(Options{Hosts: Hosts{Domain: "Upper.example"}})
	for _, name := range []string{"Socket", "domain", "PodCIDRs", "Routes", "Sandboxes", "Metrics", "Log"} {
		require.ErrorContains(t, err, name)
	}
	o, _ := newOptions("s")
	_, err = New(o)
	require.NoError(t, err)
	_, err = New(o) // the same registry
	require.ErrorContains(t, err, "register metrics")
}

func TestUseIsReadWhenEnvoyEndsTheStream(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	o, cache := newOptions(socket)
	cache.Put("abc", podRoute)
	server := serve(t, o)
	ctx, cancel := context.WithCancel(within(t))
	defer cancel()
	stream, err := extprocv3.NewExternalProcessorClient(dial(t, socket)).Process(ctx)
	require.NoError(t, err)
	require.NoError(t, stream.Send(get("8080-abc."+domain)))
	_, err = stream.Recv()
	require.NoError(t, err)
	unread := func() int { return cache.Uses().Dump()[0].Unread }
	require.Equal(t, 1, unread(), "Envoy may be stopped before it reads")
	cancel()
	require.Eventually(t, func() bool { return unread() == 0 }, soon, time.Millisecond)
	server.stop(soon)
}

func TestHeldRequestContinuesAfterResumeAndIsMeasured(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	o, cache := newOptions(socket)
	cache.Put("abc", podRoute)
	cache.Quiesce("abc")
	server := serve(t, o)
	answers := make(chan *extprocv3.ProcessingResponse, 1)
	conn := dial(t, socket)
	go func() {
		answer, err := ask(t, conn, get("8080-abc."+domain))
		if err != nil {
			t.Error(err)
		}
		answers <- answer
	}()
	require.Eventually(t, func() bool { return server.held.len() == 1 }, soon, time.Millisecond)
	require.Empty(t, answers)
	cache.Resume("abc")
	require.NotNil(t, (<-answers).GetRequestHeaders(), "nothing else was said: Envoy was not asked for more time")
	require.Zero(t, server.held.len())
	require.Equal(t, 1, testutil.CollectAndCount(server.metrics.quiesced))
	server.stop(soon)
}

// While no allocator leads, no verdict arrives.
func TestQuiescedSandboxIsRefusedAfterTheWait(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	o, cache := newOptions(socket)
	cache.Put("abc", podRoute)
	cache.Quiesce("abc")
	cache.Disconnected()
	server := serve(t, o)
	answer, err := ask(t, dial(t, socket), get("8080-abc."+domain))
	require.NoError(t, err)
	refusal := answer.GetImmediateResponse()
	require.NotNil(t, refusal)
	require.EqualValues(t, 503, refusal.GetStatus().GetCode())
	require.Contains(t, string(refusal.GetBody()), `"reason":"sandbox_quiesced"`)
	headers := map[string]string{}
	for _, h := range refusal.GetHeaders().GetSetHeaders() {
		headers[strings.ToLower(h.GetHeader().GetKey())] = string(h.GetHeader().GetRawValue())
	}
	require.Equal(t, "1", headers["retry-after"], headers)
	server.stop(soon)
}
