package egress_test

import (
	"context"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	bootstrapv3 "github.com/envoyproxy/go-control-plane/envoy/config/bootstrap/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	ratelimitv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/berth-sandbox/berth/envoy"
	"github.com/berth-sandbox/berth/extproc/wire"
)

// script is a router that answers every request alike, or with an error.
type script struct {
	extprocv3.UnimplementedExternalProcessorServer
	ratelimitv3.UnimplementedRateLimitServiceServer
	mu     sync.Mutex
	fields map[string]string // of the metadata
	ends   error
	newest mem.SliceBuffer
}

func (s *script) set(ends error, keysAndValues ...string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fields, s.ends = map[string]string{}, ends
	for i := 0; i < len(keysAndValues); i += 2 {
		s.fields[keysAndValues[i]] = keysAndValues[i+1]
	}
}

func (s *script) Process(stream extprocv3.ExternalProcessor_ProcessServer) error {
	if _, err := stream.Recv(); err != nil {
		return nil
	}
	s.mu.Lock()
	fields, ends := map[string]*structpb.Value{}, s.ends
	for name, value := range s.fields {
		fields[name] = structpb.NewStringValue(value)
	}
	s.mu.Unlock()
	if ends != nil {
		return ends
	}
	common := &extprocv3.CommonResponse{
		HeaderMutation: &extprocv3.HeaderMutation{}, ClearRouteCache: fields[envoy.MetadataTLS] != nil,
	}
	err := stream.Send(&extprocv3.ProcessingResponse{
		Response: &extprocv3.ProcessingResponse_RequestHeaders{RequestHeaders: &extprocv3.HeadersResponse{Response: common}},
		DynamicMetadata: &structpb.Struct{Fields: map[string]*structpb.Value{
			envoy.MetadataNamespace: structpb.NewStructValue(&structpb.Struct{Fields: fields}),
		}},
	})
	if err != nil {
		return err
	}
	<-stream.Context().Done()
	return nil
}

// ShouldRateLimit admits every connection.
func (s *script) ShouldRateLimit(
	context.Context, *ratelimitv3.RateLimitRequest,
) (*ratelimitv3.RateLimitResponse, error) {
	return &ratelimitv3.RateLimitResponse{OverallCode: ratelimitv3.RateLimitResponse_OK}, nil
}

// Name, Marshal and Unmarshal make script the codec of its server. It keeps the newest message.
func (s *script) Name() string { return proto.Name }
func (s *script) Marshal(v any) (mem.BufferSlice, error) {
	return encoding.GetCodecV2(proto.Name).Marshal(v)
}

func (s *script) Unmarshal(data mem.BufferSlice, v any) error {
	if _, ok := v.(*extprocv3.ProcessingRequest); ok {
		s.mu.Lock()
		s.newest = data.Materialize()
		s.mu.Unlock()
	}
	return encoding.GetCodecV2(proto.Name).Unmarshal(data, v)
}

func startScript(
	t testing.TB, secure *httptest.Server, patches ...func(*bootstrapv3.Bootstrap),
) (*script, *gateway) {
	s := &script{}
	server := grpc.NewServer(grpc.ForceServerCodecV2(s))
	extprocv3.RegisterExternalProcessorServer(server, s)
	ratelimitv3.RegisterRateLimitServiceServer(server, s)
	socket := filepath.Join(socketDir(t), "router.sock")
	l, err := net.Listen("unix", socket)
	require.NoError(t, err)
	var serving sync.WaitGroup
	serving.Go(func() { _ = server.Serve(l) }) // ends with Stop
	t.Cleanup(serving.Wait)
	t.Cleanup(server.Stop)
	return s, startEnvoy(t, socket, caFile(t, secure), patches...)
}

// httptest's certificate is for example.com and 127.0.0.1.
func TestTLSToOriginsIsVerifiedForTheHost(t *testing.T) {
	var mu sync.Mutex
	var sni []string
	handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		sni = append(sni, r.TLS.ServerName)
		w.WriteHeader(http.StatusNoContent)
	})
	secure := httptest.NewUnstartedServer(handler)
	secure.Config.ErrorLog = log.New(io.Discard, "", 0) // handshakes fail
	secure.StartTLS()
	defer secure.Close()
	plain := httptest.NewServer(http.NotFoundHandler())
	defer plain.Close()
	s, g := startScript(t, secure)
	get := func(host string) answer { return g.raw(abcAddr, "GET http://"+host+"/ HTTP/1.1\r\nHost: a\r\n\r\n") }

	admit := func(to *httptest.Server, more ...string) {
		s.set(nil, append(more, envoy.MetadataDst, to.Listener.Addr().String(),
			envoy.MetadataID, "abc", envoy.MetadataIncarnation, "0")...)
	}
	admit(secure, envoy.MetadataTLS, "yes")
	for _, host := range []string{"example.com", "example.com:80", "127.0.0.1"} {
		require.Equal(t, http.StatusNoContent, get(host).code, host)
	}
	for _, host := range []string{"example.org", "127.0.0.2", "com"} {
		a := get(host)
		require.Equal(t, http.StatusBadGateway, a.code, host)
		require.Equal(t, "egress_unreachable", a.reason(), host)
	}
	mu.Lock()
	require.Equal(t, []string{"example.com", "example.com", ""}, sni)
	mu.Unlock()
	admit(plain, envoy.MetadataTLS, "yes")
	require.Equal(t, http.StatusBadGateway, get("example.com").code, "it never falls back to plain HTTP")
	admit(plain)
	require.Equal(t, http.StatusNotFound, get("example.com").code)
}

func TestNothingLeavesWithoutACompleteAdmission(t *testing.T) {
	hits := make(chan struct{}, 1000)
	origin := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { hits <- struct{}{} }))
	defer origin.Close()
	secure := httptest.NewTLSServer(http.NotFoundHandler())
	defer secure.Close()
	s, g := startScript(t, secure)
	dst := origin.Listener.Addr().String()
	const id, incarnation = envoy.MetadataID, envoy.MetadataIncarnation
	for name, c := range map[string]struct {
		ends   error
		fields []string
	}{
		"nothing":               {nil, nil},
		"no ID":                 {nil, []string{envoy.MetadataDst, dst, incarnation, "0"}},
		"an odd ID":             {nil, []string{envoy.MetadataDst, dst, id, "a/b", incarnation, "0"}},
		"no incarnation":        {nil, []string{envoy.MetadataDst, dst, id, "abc"}},
		"an odd incarnation":    {nil, []string{envoy.MetadataDst, dst, id, "abc", incarnation, "x"}},
		"no destination":        {nil, []string{id, "abc", incarnation, "0"}},
		"a name":                {nil, []string{envoy.MetadataDst, "localhost:80", id, "abc", incarnation, "0"}},
		"the admin socket":      {nil, []string{envoy.MetadataDst, g.settings.AdminSocket, id, "abc", incarnation, "0"}},
		"no port":               {nil, []string{envoy.MetadataDst, "127.0.0.1", id, "abc", incarnation, "0"}},
		"an error":              {status.Error(codes.Internal, "boom"), nil},
		"an error that repeats": {status.Error(codes.Unavailable, "boom"), nil},
	} {
		t.Run(name, func(t *testing.T) {
			s.set(c.ends, c.fields...)
			for _, head := range []string{"GET http://" + dst + "/ HTTP/1.1\r\n", "CONNECT " + dst + " HTTP/1.1\r\n"} {
				a := g.raw(abcAddr, head+"Host: a\r\nX-Berth-Dst: "+dst+"\r\nX-Envoy-Original-Dst-Host: "+dst+"\r\n\r\n")
				require.Equal(t, http.StatusServiceUnavailable, a.code, a.body)
				require.Equal(t, "router_unavailable", a.reason())
			}
		})
	}
	require.Empty(t, hits)
	s.set(nil, envoy.MetadataDst, dst, id, "abc", incarnation, "0")
	require.Equal(t, http.StatusOK, g.raw(abcAddr, "GET http://"+dst+"/ HTTP/1.1\r\nHost: a\r\n\r\n").code)
}

// Only the generated types allocate, so a message that allocates has taken the slow way.
func TestMessagesOfEnvoyTakeTheQuickWay(t *testing.T) {
	secure := httptest.NewTLSServer(http.NotFoundHandler())
	defer secure.Close()
	s, g := startScript(t, secure)
	s.set(status.Error(codes.Aborted, ""))
	for _, line := range []string{"GET http://example.com/?x", "CONNECT example.com:443"} {
		g.raw(abcAddr, head(line, "abc", "X-Other: "+strings.Repeat("x", 100)))
		var request wire.Request
		require.NotEmpty(t, s.newest, line)
		read := func() {
			if err := request.Read(s.newest); err != nil {
				t.Error(err)
			}
		}
		read() // takes memory for the message
		require.LessOrEqual(t, len(request.Headers), 5, "the router gets what it reads, and nothing else")
		require.Zero(t, testing.AllocsPerRun(100, read))
	}
}
