package envoy_test

import (
	"encoding/json"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"testing"
	"time"

	bootstrapv3 "github.com/envoyproxy/go-control-plane/envoy/config/bootstrap/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	listenerv3 "github.com/envoyproxy/go-control-plane/envoy/config/listener/v3"
	rbacv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/rbac/v3"
	originaldstv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/listener/original_dst/v3"
	proxyprotocolv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/listener/proxy_protocol/v3"
	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/envoy"
)

// wrongs has the faults of a router by name.
func (g *gateway) wrongs() map[string]play {
	dst := g.podAddr.String()
	to := func(dst, id *structpb.Value) play {
		return admit(map[string]*structpb.Value{envoy.MetadataDst: dst, envoy.MetadataID: id})
	}
	return map[string]play{
		"closes the stream without an answer": func(extprocv3.ExternalProcessor_ProcessServer, *extprocv3.ProcessingRequest) error { return nil },
		"ends the stream with an error": func(extprocv3.ExternalProcessor_ProcessServer, *extprocv3.ProcessingRequest) error {
			return status.Error(codes.Internal, "boom")
		},
		"says that it is not there, again and again": func(extprocv3.ExternalProcessor_ProcessServer, *extprocv3.ProcessingRequest) error {
			return status.Error(codes.Unavailable, "boom")
		},
		"never answers": func(stream extprocv3.ExternalProcessor_ProcessServer, _ *extprocv3.ProcessingRequest) error {
			<-stream.Context().Done()
			return nil
		},
		"answers with nothing in it": func(stream extprocv3.ExternalProcessor_ProcessServer, _ *extprocv3.ProcessingRequest) error {
			return stream.Send(&extprocv3.ProcessingResponse{DynamicMetadata: metadata(g.admitted("abc"))})
		},
		"answers with another kind of message, and valid metadata": func(stream extprocv3.ExternalProcessor_ProcessServer, _ *extprocv3.ProcessingRequest) error {
			return stream.Send(&extprocv3.ProcessingResponse{
				Response:        &extprocv3.ProcessingResponse_ResponseHeaders{ResponseHeaders: &extprocv3.HeadersResponse{}},
				DynamicMetadata: metadata(g.admitted("abc")),
			})
		},
		"answers for the body, and valid metadata": func(stream extprocv3.ExternalProcessor_ProcessServer, _ *extprocv3.ProcessingRequest) error {
			return stream.Send(&extprocv3.ProcessingResponse{
				Response:        &extprocv3.ProcessingResponse_RequestBody{RequestBody: &extprocv3.BodyResponse{}},
				DynamicMetadata: metadata(g.admitted("abc")),
			})
		},
		"the answer in another namespace": func(stream extprocv3.ExternalProcessor_ProcessServer, _ *extprocv3.ProcessingRequest) error {
			return stream.Send(&extprocv3.ProcessingResponse{
				Response:        &extprocv3.ProcessingResponse_RequestHeaders{RequestHeaders: &extprocv3.HeadersResponse{}},
				DynamicMetadata: &structpb.Struct{Fields: map[string]*structpb.Value{"other": structpb.NewStructValue(&structpb.Struct{Fields: g.admitted("abc")})}},
			})
		},
		"metadata without a namespace": func(stream extprocv3.ExternalProcessor_ProcessServer, _ *extprocv3.ProcessingRequest) error {
			return stream.Send(&extprocv3.ProcessingResponse{
				Response:        &extprocv3.ProcessingResponse_RequestHeaders{RequestHeaders: &extprocv3.HeadersResponse{}},
				DynamicMetadata: &structpb.Struct{Fields: g.admitted("abc")},
			})
		},
		"no metadata":                        admit(nil),
		"no ID":                              admit(map[string]*structpb.Value{envoy.MetadataDst: text(dst)}),
		"no destination":                     admit(map[string]*structpb.Value{envoy.MetadataID: text("abc")}),
		"an empty ID":                        to(text(dst), text("")),
		"an ID of other characters":          to(text(dst), text("a/b")),
		"an ID that is no text":              to(text(dst), structpb.NewBoolValue(true)),
		"an empty destination":               to(text(""), text("abc")),
		"a destination that is no address":   to(text("localhost:80"), text("abc")),
		"an address without a port":          to(text(g.podAddr.Addr().String()), text("abc")),
		"Envoy's own admin socket":           to(text(g.settings.AdminSocket), text("abc")),
		"that socket as a URL":               to(text("unix://"+g.settings.AdminSocket), text("abc")),
		"octets above 255":                   to(text("127.0.0.256:80"), text("abc")),
		"octets with leading zeros":          to(text("127.0.0.01:80"), text("abc")),
		"three octets":                       to(text("127.0.1:80"), text("abc")),
		"no IPv6 address":                    to(text("[:::1]:80"), text("abc")),
		"nine groups":                        to(text("[0000:0000:0000:0000:0000:0000:0000:0000:0001]:80"), text("abc")),
		"IPv6 with a zone":                   to(text("[fe80:0000:0000:0000:0000:0000:0000:0001%lo]:80"), text("abc")),
		"port 0":                             to(text("127.0.0.1:0"), text("abc")),
		"a port above 65535":                 to(text("127.0.0.1:70000"), text("abc")),
		"something behind the destination":   to(text(dst+","), text("abc")),
		"something before the destination":   to(text(" "+dst), text("abc")),
		"a list that begins with a good one": to(structpb.NewListValue(&structpb.ListValue{Values: []*structpb.Value{text(dst)}}), text("abc")),
		"a number":                           to(structpb.NewNumberValue(80), text("abc")),
	}
}

// unavailable requires the answer for a missing router, and that no request reached the pod.
func (g *gateway) unavailable(t *testing.T, header http.Header) {
	t.Helper()
	before := g.hits.Load()
	code, body := g.get(header)
	require.Equal(t, http.StatusServiceUnavailable, code, body)
	var e struct {
		Code      int
		Reason    apierror.Reason
		RequestID string
	}
	require.NoError(t, json.Unmarshal([]byte(body), &e), body)
	require.Equal(t, http.StatusServiceUnavailable, e.Code)
	require.Equal(t, apierror.RouterUnavailable, e.Reason)
	require.NotEmpty(t, e.RequestID)
	require.Equal(t, before, g.hits.Load(), "the request reached the pod")
}

// Invariant: P4
func TestFaultyRouterServesNoRequest(t *testing.T) {
	g := startGatewayWith(t, config{mistaken: true})
	dst := g.podAddr.String()
	for name, play := range g.wrongs() {
		t.Run(name, func(t *testing.T) {
			g.router.set(play)
			// A client that tries to name the destination itself changes nothing.
			g.unavailable(t, http.Header{
				"X-Envoy-Original-Dst-Host": {dst}, "x-ENVOY-original-DST-host": {dst}, "X-Berth-Dst": {dst}, "Berth": {dst},
			})
		})
	}
	g.serves(t)
}

// serves requires that the same gateway serves admitted requests, so that the counter is valid.
func (g *gateway) serves(t *testing.T) {
	t.Helper()
	g.router.set(admit(g.admitted("abc")))
	before := g.hits.Load()
	code, body := g.get(nil)
	require.Equal(t, http.StatusOK, code, body)
	require.Equal(t, before+1, g.hits.Load())
}

// With these listener filters a connection has an "original destination", which the cluster of
// pods uses if no other destination is set.
// Invariant: P4
func TestListenerFilterSetsNoDestination(t *testing.T) {
	for name, c := range map[string]struct {
		config config
		// preamble is what a peer sends to choose the destination.
		preamble func(*gateway) string
	}{
		"PROXY protocol": {
			config{settings: func(s *envoy.Settings) { s.ProxyProtocol = true }},
			proxyHeader,
		},
		"original_dst": {
			config{patch: func(b *bootstrapv3.Bootstrap) {
				filter, err := anypb.New(&originaldstv3.OriginalDst{})
				if err != nil {
					panic(err)
				}
				b.StaticResources.Listeners[0].ListenerFilters = []*listenerv3.ListenerFilter{{
					Name: "envoy.filters.listener.original_dst", ConfigType: &listenerv3.ListenerFilter_TypedConfig{TypedConfig: filter},
				}}
			}},
			func(*gateway) string { return "" },
		},
	} {
		t.Run(name, func(t *testing.T) {
			c.config.mistaken = true // the router answers what Envoy does not expect
			g := startGatewayWith(t, c.config)
			for wrong, play := range g.wrongs() {
				g.router.set(play)
				a := g.answer(c.preamble(g) + "GET / HTTP/1.1\r\nHost: " + host + "\r\nX-Envoy-Original-Dst-Host: " + g.podAddr.String() + "\r\nConnection: close\r\n\r\n")
				require.Equal(t, http.StatusServiceUnavailable, a.code, "%s: %s", wrong, a.body)
				require.Zero(t, g.hits.Load(), wrong)
			}
			// Envoy has not connected to itself either.
			require.LessOrEqual(t, g.counter(`http\.ingress\.downstream_rq_total`), len(g.wrongs()))
			g.router.set(admit(g.admitted("abc")))
			a := g.answer(c.preamble(g) + "GET / HTTP/1.1\r\nHost: " + host + "\r\nConnection: close\r\n\r\n")
			require.Equal(t, http.StatusOK, a.code, a.body)
			require.EqualValues(t, 1, g.hits.Load())
		})
	}
}

// proxyHeader claims that the pod is the destination of the connection.
func proxyHeader(g *gateway) string {
	return "PROXY TCP4 192.0.2.1 " + g.podAddr.Addr().String() + " 1024 " + portOf(g.podAddr) + "\r\n"
}

// A gateway may have listener filters, and policies that set the configuration of a filter for each route by its name.
// Invariant: P4
func TestPolicyOfAnotherGatewayLeavesTheGuard(t *testing.T) {
	c := config{in: inRealEnvoyGateway, attacked: true, mistaken: true}
	if *envoyGateway == "" {
		c.in, c.patch = inEnvoyGateway, func(b *bootstrapv3.Bootstrap) {
			listener := b.StaticResources.Listeners[0]
			listener.ListenerFilters = []*listenerv3.ListenerFilter{{
				Name:       "envoy.filters.listener.proxy_protocol",
				ConfigType: &listenerv3.ListenerFilter_TypedConfig{TypedConfig: anything(t, &proxyprotocolv3.ProxyProtocol{})},
			}}
			filters := listener.DefaultFilterChain.Filters
			at := filters[len(filters)-1].GetTypedConfig()
			var manager hcmv3.HttpConnectionManager
			require.NoError(t, at.UnmarshalTo(&manager))
			for _, host := range manager.GetRouteConfig().VirtualHosts {
				host.TypedPerFilterConfig = map[string]*anypb.Any{"envoy.filters.http.rbac": anything(t, &rbacv3.RBACPerRoute{})} // no rules
			}
			require.NoError(t, at.MarshalFrom(&manager))
		}
	}
	g := startGatewayWith(t, c)
	ask := func() answer {
		return g.answer(proxyHeader(g) + "GET / HTTP/1.1\r\nHost: " + host + "\r\nConnection: close\r\n\r\n")
	}
	g.router.set(func(extprocv3.ExternalProcessor_ProcessServer, *extprocv3.ProcessingRequest) error { return nil }) // closes the stream
	a := ask()
	require.Equal(t, http.StatusServiceUnavailable, a.code, a.body)
	require.Equal(t, string(apierror.RouterUnavailable), a.header.Get(envoy.ReasonHeader))
	require.Zero(t, g.hits.Load())
	g.router.set(admit(g.admitted("abc")))
	require.Equal(t, http.StatusOK, ask().code)
	require.EqualValues(t, 1, g.hits.Load())
}

func anything(t *testing.T, m proto.Message) *anypb.Any {
	t.Helper()
	packed, err := anypb.New(m)
	require.NoError(t, err)
	return packed
}

func portOf(a netip.AddrPort) string {
	_, port, _ := net.SplitHostPort(a.String())
	return port
}

// Invariant: P4
func TestWithoutARouterNothingIsServed(t *testing.T) {
	t.Run("never started", func(t *testing.T) {
		startGatewayWith(t, config{noRouter: true}).unavailable(t, nil)
	})
	t.Run("its cluster is missing", func(t *testing.T) {
		g := startGatewayWith(t, config{patch: func(b *bootstrapv3.Bootstrap) {
			for i, c := range b.StaticResources.Clusters {
				if c.Name == "router" {
					b.StaticResources.Clusters = append(b.StaticResources.Clusters[:i:i], b.StaticResources.Clusters[i+1:]...)
					return
				}
			}
			panic("there is no such cluster")
		}})
		g.router.set(admit(g.admitted("abc")))
		g.unavailable(t, nil)
	})
	t.Run("killed while it decides", func(t *testing.T) {
		g := startGateway(t)
		asked := make(chan struct{})
		g.router.set(func(stream extprocv3.ExternalProcessor_ProcessServer, _ *extprocv3.ProcessingRequest) error {
			close(asked)
			<-stream.Context().Done()
			return nil
		})
		stopped := make(chan struct{})
		go func() {
			defer close(stopped)
			<-asked
			g.routerServer.Stop()
		}()
		g.unavailable(t, nil)
		<-stopped
	})
}

// Invariant: P5
func TestInternalClientHeadersNeverReachAPod(t *testing.T) {
	g := startGateway(t)
	g.router.set(admit(g.admitted("abc")))
	code, body := g.get(http.Header{
		"X-Envoy-Attempt-Count": {"9"}, "x-eNvOy-Anything": {"1"}, "X-Berth-Reason": {"1"}, "X_envoy_original_dst_host": {"1"}, "x-BERTH_dst": {"1"},
		"X-Forwarded-For": {"198.51.100.7"}, "X-Forwarded-Host": {"x"}, "x_forwarded_proto": {"x"}, "X-Forwarded-Proto": {"https"}, "Forwarded": {"for=x"}, "X-Real-Ip": {"198.51.100.7"},
		"X-Request-Id": {"mine"}, "X-Own": {"kept"}, "X-Envoyish": {"kept"},
	})
	require.Equal(t, http.StatusOK, code, body)
	var seen http.Header
	require.NoError(t, json.Unmarshal([]byte(body), &seen))
	require.Equal(t, "kept", seen.Get("X-Own"))
	require.Equal(t, "kept", seen.Get("X-Envoyish"))
	for name := range seen {
		require.NotRegexp(t, `(?i)^x[-_](envoy|berth)[-_]`, name)
	}
	peer := seen.Get("X-Forwarded-For") // of a peer on loopback, Envoy writes an address of this machine
	_, err := netip.ParseAddr(peer)
	require.NoError(t, err, "one entry")
	require.NotEqual(t, "198.51.100.7", peer)
	require.Equal(t, []string{"http"}, seen["X-Forwarded-Proto"])
	for _, name := range []string{"X-Forwarded-Host", "X_forwarded_proto", "Forwarded", "X-Real-Ip"} {
		require.NotContains(t, seen, name)
	}
	require.NotEqual(t, "mine", seen.Get("X-Request-Id"), "the router and the log tell requests apart by it")
	require.Len(t, seen["X-Request-Id"], 1)
}

func TestTrustedProxyHeadersAreKept(t *testing.T) {
	g := startGatewayWith(t, config{settings: func(s *envoy.Settings) { s.TrustedHops = 1 }})
	g.router.set(admit(g.admitted("abc")))
	code, body := g.get(http.Header{
		"X-Forwarded-For": {"198.51.100.7"}, "X-Forwarded-Proto": {"https"}, "X-Forwarded-Host": {"x"}, "X-Envoy-Attempt-Count": {"9"}, "X-Request-Id": {"mine"},
	})
	require.Equal(t, http.StatusOK, code, body)
	var seen http.Header
	require.NoError(t, json.Unmarshal([]byte(body), &seen))
	require.Regexp(t, `^198\.51\.100\.7,[0-9.]+$`, seen.Get("X-Forwarded-For"))
	require.Equal(t, "https", seen.Get("X-Forwarded-Proto"))
	require.Equal(t, "x", seen.Get("X-Forwarded-Host"))
	require.NotContains(t, seen, "X-Envoy-Attempt-Count")
	require.NotEqual(t, "mine", seen.Get("X-Request-Id"))
}

func set(name, value string) *corev3.HeaderValueOption {
	return &corev3.HeaderValueOption{
		Header:       &corev3.HeaderValue{Key: name, RawValue: []byte(value)},
		AppendAction: corev3.HeaderValueOption_OVERWRITE_IF_EXISTS_OR_ADD,
	}
}

// change admits the request and tries to change it.
func (g *gateway) change(m *extprocv3.HeaderMutation) play {
	return func(stream extprocv3.ExternalProcessor_ProcessServer, _ *extprocv3.ProcessingRequest) error {
		return stream.Send(&extprocv3.ProcessingResponse{
			Response: &extprocv3.ProcessingResponse_RequestHeaders{RequestHeaders: &extprocv3.HeadersResponse{
				Response: &extprocv3.CommonResponse{HeaderMutation: m},
			}},
			DynamicMetadata: metadata(g.admitted("abc")),
		})
	}
}

func TestRouterChangesOnlyHostAndPath(t *testing.T) {
	for name, paths := range map[string]bool{"the host": false, "the host, and the path in path mode": true} {
		t.Run(name, func(t *testing.T) {
			var path, masked string
			g := startGatewayWith(t, config{mistaken: true, settings: func(s *envoy.Settings) { s.Paths = paths }})
			pod := listen(t, "127.0.0.1:0", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				path = r.URL.Path
				masked = r.Host
				_ = json.NewEncoder(w).Encode(r.Header)
			}))
			g.podAddr = pod.addr
			g.router.set(g.change(&extprocv3.HeaderMutation{
				SetHeaders: []*corev3.HeaderValueOption{
					set("x-added", "1"), set("x-own", "changed"), set("authorization", "other"), set(":path", "/changed"), set(":authority", "other"), set(":method", "PUT"),
				},
				RemoveHeaders: []string{"x-removed"},
			}))
			code, body := g.get(http.Header{"X-Own": {"kept"}, "X-Removed": {"not"}, "Authorization": {"mine"}})
			require.Equal(t, http.StatusOK, code, body)
			var seen http.Header
			require.NoError(t, json.Unmarshal([]byte(body), &seen))
			require.Equal(t, "kept", seen.Get("X-Own"))
			require.Equal(t, "not", seen.Get("X-Removed"))
			require.Equal(t, "mine", seen.Get("Authorization"))
			require.Empty(t, seen.Get("X-Added"))
			require.Equal(t, paths, path == "/changed", path)
			require.Equal(t, "other", masked)
		})
	}
}

// Invariant: I1
func TestSandboxesNeverShareAConnection(t *testing.T) {
	g := startGateway(t)
	require.Eventually(t, func() bool { // Envoy needs a moment to count an address as a known one
		before := g.connections.Load()
		g.serves(t)
		return g.connections.Load() == before
	}, time.Minute, time.Millisecond)
	hits, connections := g.hits.Load(), g.connections.Load()
	for range 5 {
		for _, id := range []string{"one", "two", "three"} {
			g.router.set(admit(g.admitted(id)))
			code, body := g.get(nil)
			require.Equal(t, http.StatusOK, code, body)
		}
	}
	require.Equal(t, int64(15), g.hits.Load()-hits)
	require.Equal(t, int64(3), g.connections.Load()-connections, "one connection for each ID, though the address is one")
}

func TestPodsWithIPv6AddressesAreReached(t *testing.T) {
	g := startGatewayWith(t, config{podAddress: "[::1]:0"})
	g.serves(t)
	require.True(t, strings.HasPrefix(g.podAddr.String(), "[::1]:"))
}
