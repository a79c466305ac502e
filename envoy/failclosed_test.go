package envoy_test

import (
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/devcluster"
	"github.com/berth-sandbox/berth/devcluster/proc"
	"github.com/berth-sandbox/berth/devcluster/stack"
	"github.com/berth-sandbox/berth/envoy"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// script is an ext_proc server that does what a test wants, well or badly.
type script struct {
	extprocv3.UnimplementedExternalProcessorServer
	mu   sync.Mutex
	play func(extprocv3.ExternalProcessor_ProcessServer, *extprocv3.ProcessingRequest) error
}

func (s *script) set(play func(extprocv3.ExternalProcessor_ProcessServer, *extprocv3.ProcessingRequest) error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.play = play
}

func (s *script) Process(stream extprocv3.ExternalProcessor_ProcessServer) error {
	s.mu.Lock()
	play := s.play
	s.mu.Unlock()
	m, err := stream.Recv()
	if err != nil {
		return nil // Envoy went away
	}
	return play(stream, m)
}

// gateway is a real Envoy with the real bootstrap, a scripted router, and a
// server that stands for a pod and counts.
type gateway struct {
	*testing.T
	router *script
	// addr and health are the addresses of the listeners.
	addr, health string
	admin        *http.Client
	adminSocket  string
	podAddr      netip.AddrPort
	// hits are requests that reached the pod, connections those it accepted.
	hits, connections atomic.Int64
}

func startGateway(t *testing.T) *gateway {
	if testing.Short() {
		t.Skip("needs real Envoy; not under -short")
	}
	g := &gateway{T: t, router: &script{}}
	bin, err := devcluster.EnvoyBinary(t.Context(), nil)
	require.NoError(t, err)
	dir, err := os.MkdirTemp("", "berth-")
	require.NoError(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	settings := envoy.Settings{
		Listen: netip.MustParseAddrPort("127.0.0.1:0"), HealthListen: netip.MustParseAddrPort("127.0.0.1:0"),
		RouterSocket: filepath.Join(dir, "router.sock"), AdminSocket: filepath.Join(dir, "admin.sock"),
	}
	raw, err := envoy.YAML(settings)
	require.NoError(t, err)
	config := filepath.Join(dir, "envoy.yaml")
	require.NoError(t, os.WriteFile(config, raw, 0o600))

	socket, err := net.Listen("unix", settings.RouterSocket)
	require.NoError(t, err)
	server := grpc.NewServer()
	extprocv3.RegisterExternalProcessorServer(server, g.router)
	var serving sync.WaitGroup
	serving.Go(func() { _ = server.Serve(socket) }) // ends with Stop
	t.Cleanup(serving.Wait)
	t.Cleanup(server.Stop)

	pod, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	g.podAddr = netip.MustParseAddrPort(pod.Addr().String())
	podServer := &http.Server{
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			g.hits.Add(1)
			_ = json.NewEncoder(w).Encode(r.Header)
		}),
		ConnState: func(_ net.Conn, s http.ConnState) {
			if s == http.StateNew {
				g.connections.Add(1)
			}
		},
	}
	serving.Go(func() { _ = podServer.Serve(pod) }) // ends with Close
	t.Cleanup(func() { podServer.Close() })

	supervisor, err := proc.New()
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, supervisor.Close()) })
	cmd := exec.Command(bin, "-c", config, "--disable-hot-restart", "--concurrency", "1", "--log-level", "error")
	cmd.Stderr = os.Stderr
	_, err = supervisor.Start(cmd)
	require.NoError(t, err)
	g.adminSocket, g.admin = settings.AdminSocket, stack.EnvoyAdmin(settings.AdminSocket)
	require.Eventually(t, func() bool {
		listeners := g.listeners()
		g.addr, g.health = listeners["ingress"], listeners["health"]
		return g.addr != "" && g.health != ""
	}, time.Minute, 20*time.Millisecond)
	return g
}

// listeners asks Envoy which addresses its listeners got. There is none as long
// as it does not answer.
func (g *gateway) listeners() map[string]string {
	response, err := g.admin.Get("http://envoy/listeners")
	if err != nil {
		return nil
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	require.NoError(g, err)
	all := map[string]string{}
	for line := range strings.Lines(string(body)) {
		if name, addr, ok := strings.Cut(strings.TrimSpace(line), "::"); ok && !strings.HasSuffix(addr, ":0") {
			all[name] = addr
		}
	}
	return all
}

func (g *gateway) get(header http.Header) (int, string) {
	g.Helper()
	r, err := http.NewRequestWithContext(g.Context(), http.MethodGet, "http://"+g.addr+"/", http.NoBody)
	require.NoError(g, err)
	r.Host = "8080-abc.sandbox.example.com"
	for name, values := range header {
		r.Header[name] = values
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: time.Minute}
	response, err := client.Do(r)
	require.NoError(g, err)
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	require.NoError(g, err)
	return response.StatusCode, string(body)
}

// admit answers with this metadata; a nil value is left out.
func admit(fields map[string]*structpb.Value) func(extprocv3.ExternalProcessor_ProcessServer, *extprocv3.ProcessingRequest) error {
	return func(stream extprocv3.ExternalProcessor_ProcessServer, _ *extprocv3.ProcessingRequest) error {
		return stream.Send(&extprocv3.ProcessingResponse{
			Response: &extprocv3.ProcessingResponse_RequestHeaders{RequestHeaders: &extprocv3.HeadersResponse{}},
			DynamicMetadata: &structpb.Struct{Fields: map[string]*structpb.Value{
				envoy.MetadataNamespace: structpb.NewStructValue(&structpb.Struct{Fields: fields}),
			}},
		})
	}
}

func text(s string) *structpb.Value { return structpb.NewStringValue(s) }

func (g *gateway) admitted(id string) map[string]*structpb.Value {
	return map[string]*structpb.Value{envoy.MetadataDst: text(g.podAddr.String()), envoy.MetadataID: text(id)}
}

func TestWhateverTheRouterDoesWrongNothingIsServed(t *testing.T) {
	g := startGateway(t)
	dst := g.podAddr.String()
	type play = func(extprocv3.ExternalProcessor_ProcessServer, *extprocv3.ProcessingRequest) error
	for name, p := range map[string]play{
		"closes the stream without an answer": func(extprocv3.ExternalProcessor_ProcessServer, *extprocv3.ProcessingRequest) error { return nil },
		"ends the stream with an error": func(extprocv3.ExternalProcessor_ProcessServer, *extprocv3.ProcessingRequest) error {
			return status.Error(codes.Internal, "boom")
		},
		"never answers": func(stream extprocv3.ExternalProcessor_ProcessServer, _ *extprocv3.ProcessingRequest) error {
			<-stream.Context().Done()
			return nil
		},
		"answers with another kind of message, and valid metadata": func(stream extprocv3.ExternalProcessor_ProcessServer, _ *extprocv3.ProcessingRequest) error {
			return stream.Send(&extprocv3.ProcessingResponse{
				Response:        &extprocv3.ProcessingResponse_ResponseHeaders{ResponseHeaders: &extprocv3.HeadersResponse{}},
				DynamicMetadata: &structpb.Struct{Fields: map[string]*structpb.Value{envoy.MetadataNamespace: structpb.NewStructValue(&structpb.Struct{Fields: g.admitted("abc")})}},
			})
		},
		"no metadata":                        admit(nil),
		"no ID":                              admit(map[string]*structpb.Value{envoy.MetadataDst: text(dst)}),
		"no destination":                     admit(map[string]*structpb.Value{envoy.MetadataID: text("abc")}),
		"an empty ID":                        admit(map[string]*structpb.Value{envoy.MetadataDst: text(dst), envoy.MetadataID: text("")}),
		"a destination that is no address":   admit(map[string]*structpb.Value{envoy.MetadataDst: text("localhost:80"), envoy.MetadataID: text("abc")}),
		"Envoy's own admin socket":           admit(map[string]*structpb.Value{envoy.MetadataDst: text(g.adminSocket), envoy.MetadataID: text("abc")}),
		"that socket as a URL":               admit(map[string]*structpb.Value{envoy.MetadataDst: text("unix://" + g.adminSocket), envoy.MetadataID: text("abc")}),
		"port 0":                             admit(map[string]*structpb.Value{envoy.MetadataDst: text("127.0.0.1:0"), envoy.MetadataID: text("abc")}),
		"something behind the destination":   admit(map[string]*structpb.Value{envoy.MetadataDst: text(dst + ","), envoy.MetadataID: text("abc")}),
		"a list that begins with a good one": admit(map[string]*structpb.Value{envoy.MetadataDst: structpb.NewListValue(&structpb.ListValue{Values: []*structpb.Value{text(dst)}}), envoy.MetadataID: text("abc")}),
		"a number":                           admit(map[string]*structpb.Value{envoy.MetadataDst: structpb.NewNumberValue(80), envoy.MetadataID: text("abc")}),
		"the answer in another namespace": func(stream extprocv3.ExternalProcessor_ProcessServer, _ *extprocv3.ProcessingRequest) error {
			return stream.Send(&extprocv3.ProcessingResponse{
				Response:        &extprocv3.ProcessingResponse_RequestHeaders{RequestHeaders: &extprocv3.HeadersResponse{}},
				DynamicMetadata: &structpb.Struct{Fields: map[string]*structpb.Value{"other": structpb.NewStructValue(&structpb.Struct{Fields: g.admitted("abc")})}},
			})
		},
	} {
		t.Run(name, func(t *testing.T) {
			g.router.set(p)
			before := g.hits.Load()
			// A client that tries to name the destination itself changes nothing.
			code, body := g.get(http.Header{
				"X-Envoy-Original-Dst-Host": {dst}, "x-ENVOY-original-DST-host": {dst}, "X-Berth-Dst": {dst}, "Berth": {dst},
			})
			require.Equal(t, http.StatusServiceUnavailable, code, body)
			var e apierror.Error
			require.NoError(t, json.Unmarshal([]byte(body), &e), body)
			require.Equal(t, http.StatusServiceUnavailable, e.Code)
			require.Equal(t, "router_unavailable", string(e.Reason))
			require.NotEmpty(t, e.RequestID)
			require.Equal(t, before, g.hits.Load(), "the request reached the pod")
		})
	}
	// And the same gateway serves what is admitted: the counter counts.
	g.router.set(admit(g.admitted("abc")))
	before := g.hits.Load()
	code, body := g.get(nil)
	require.Equal(t, http.StatusOK, code, body)
	require.Equal(t, before+1, g.hits.Load())
}

func TestInternalHeadersOfAClientNeverReachAPod(t *testing.T) {
	g := startGateway(t)
	g.router.set(admit(g.admitted("abc")))
	code, body := g.get(http.Header{"X-Envoy-Attempt-Count": {"9"}, "x-eNvOy-Anything": {"1"}, "X-Berth-Reason": {"1"}, "X-Own": {"kept"}})
	require.Equal(t, http.StatusOK, code, body)
	var seen http.Header
	require.NoError(t, json.Unmarshal([]byte(body), &seen))
	require.Equal(t, "kept", seen.Get("X-Own"))
	for name := range seen {
		require.NotRegexp(t, `(?i)^x-(envoy|berth)-`, name)
	}
}

func TestTheRouterCannotChangeARequest(t *testing.T) {
	g := startGateway(t)
	set := func(name, value string) *corev3.HeaderValueOption {
		return &corev3.HeaderValueOption{
			Header:       &corev3.HeaderValue{Key: name, RawValue: []byte(value)},
			AppendAction: corev3.HeaderValueOption_OVERWRITE_IF_EXISTS_OR_ADD,
		}
	}
	g.router.set(func(stream extprocv3.ExternalProcessor_ProcessServer, _ *extprocv3.ProcessingRequest) error {
		return stream.Send(&extprocv3.ProcessingResponse{
			Response: &extprocv3.ProcessingResponse_RequestHeaders{RequestHeaders: &extprocv3.HeadersResponse{
				Response: &extprocv3.CommonResponse{HeaderMutation: &extprocv3.HeaderMutation{
					SetHeaders:    []*corev3.HeaderValueOption{set("x-added", "1"), set("x-own", "changed"), set("authorization", "other")},
					RemoveHeaders: []string{"x-removed"},
				}},
			}},
			DynamicMetadata: &structpb.Struct{Fields: map[string]*structpb.Value{
				envoy.MetadataNamespace: structpb.NewStructValue(&structpb.Struct{Fields: g.admitted("abc")}),
			}},
		})
	})
	code, body := g.get(http.Header{"X-Own": {"kept"}, "X-Removed": {"not"}, "Authorization": {"mine"}})
	require.Equal(t, http.StatusOK, code, body)
	var seen http.Header
	require.NoError(t, json.Unmarshal([]byte(body), &seen))
	require.Equal(t, "kept", seen.Get("X-Own"))
	require.Equal(t, "not", seen.Get("X-Removed"))
	require.Equal(t, "mine", seen.Get("Authorization"))
	require.Empty(t, seen.Get("X-Added"))
}

func TestSandboxesNeverShareAConnection(t *testing.T) {
	g := startGateway(t)
	for range 5 {
		for _, id := range []string{"one", "two", "three"} {
			g.router.set(admit(g.admitted(id)))
			code, body := g.get(nil)
			require.Equal(t, http.StatusOK, code, body)
		}
	}
	require.Equal(t, int64(15), g.hits.Load())
	require.Equal(t, int64(3), g.connections.Load(), "one connection for each ID, though the address is one")
}
