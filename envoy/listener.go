package envoy

import (
	"net"
	"net/netip"
	"strconv"
	"time"

	mutationv3 "github.com/envoyproxy/go-control-plane/envoy/config/common/mutation_rules/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	listenerv3 "github.com/envoyproxy/go-control-plane/envoy/config/listener/v3"
	rbacconfigv3 "github.com/envoyproxy/go-control-plane/envoy/config/rbac/v3"
	routev3 "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"
	statev3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/common/set_filter_state/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	rbacv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/rbac/v3"
	routerv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/router/v3"
	setstatev3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/set_filter_state/v3"
	proxyv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/listener/proxy_protocol/v3"
	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	matcherv3 "github.com/envoyproxy/go-control-plane/envoy/type/matcher/v3"
	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

// connectionBuffer is small because a gateway holds very many connections and streams.
const connectionBuffer = 32 << 10

// maxHeaders bounds the number of headers of a request and of an answer.
const maxHeaders = 200

// statusRouterError is Envoy's status for an ext_proc error, before the local reply mapping.
// No other failure has it. Nothing else identifies these errors, because they set no response
// flag.
const statusRouterError = 511

func (b *builder) listeners() []*listenerv3.Listener {
	chain := &listenerv3.FilterChain{Filters: []*listenerv3.Filter{{
		Name:       "envoy.filters.network.http_connection_manager",
		ConfigType: &listenerv3.Filter_TypedConfig{TypedConfig: b.any(b.httpConnectionManager())},
	}}}
	if b.TLS != nil {
		chain.TransportSocket, chain.TransportSocketConnectTimeout = b.tls(), seconds(tlsHandshakeTimeout)
	}
	ingress := &listenerv3.Listener{
		Name:                          "ingress",
		Address:                       socketAddress(b.Listen),
		PerConnectionBufferLimitBytes: wrapperspb.UInt32(connectionBuffer),
		FilterChains:                  []*listenerv3.FilterChain{chain},
	}
	if b.ProxyProtocol {
		// The header also sets the address that ORIGINAL_DST falls back to. The guard prevents
		// that fallback.
		ingress.ListenerFilters = []*listenerv3.ListenerFilter{{
			Name:       "envoy.filters.listener.proxy_protocol",
			ConfigType: &listenerv3.ListenerFilter_TypedConfig{TypedConfig: b.any(&proxyv3.ProxyProtocol{})},
		}}
	}
	all := []*listenerv3.Listener{ingress}
	if b.HealthListen.IsValid() {
		all = append(all, b.healthListener())
	}
	return all
}

func socketAddress(a netip.AddrPort) *corev3.Address {
	return &corev3.Address{Address: &corev3.Address_SocketAddress{SocketAddress: &corev3.SocketAddress{
		Address:       a.Addr().String(),
		PortSpecifier: &corev3.SocketAddress_PortValue{PortValue: uint32(a.Port())},
		Ipv4Compat:    a.Addr() == netip.IPv6Unspecified(), // all IPv4 and IPv6 addresses
	}}}
}

func (b *builder) httpConnectionManager() *hcmv3.HttpConnectionManager {
	return &hcmv3.HttpConnectionManager{
		StatPrefix: "ingress",
		CodecType:  hcmv3.HttpConnectionManager_AUTO,

		// Envoy obeys x-envoy-* headers of internal clients, so no client is internal. The list
		// has one address reserved for documentation (RFC 5737), because an empty list would
		// make loopback internal.
		UseRemoteAddress: wrapperspb.Bool(true),
		InternalAddressConfig: &hcmv3.HttpConnectionManager_InternalAddressConfig{CidrRanges: []*corev3.CidrRange{
			{AddressPrefix: "192.0.2.255", PrefixLen: wrapperspb.UInt32(32)},
		}},
		XffNumTrustedHops:             b.TrustedHops,
		EarlyHeaderMutationExtensions: []*corev3.TypedExtensionConfig{b.mutateEarly()},

		// On sandbox hosts the path passes unchanged.
		NormalizePath:              wrapperspb.Bool(false),
		GenerateRequestId:          wrapperspb.Bool(true), // for the requestID of refusals
		SchemeHeaderTransformation: b.scheme(),
		ServerHeaderTransformation: hcmv3.HttpConnectionManager_PASS_THROUGH,

		// An idle WebSocket is not an error. The idle timeout of the sandbox applies instead.
		StreamIdleTimeout:     seconds(0),
		RequestTimeout:        seconds(0),
		RequestHeadersTimeout: seconds(10 * time.Second),
		DrainTimeout:          seconds(5 * time.Second),
		DelayedCloseTimeout:   seconds(time.Second),

		MaxRequestHeadersKb: wrapperspb.UInt32(64),
		CommonHttpProtocolOptions: &corev3.HttpProtocolOptions{
			IdleTimeout:                  seconds(300 * time.Second),
			HeadersWithUnderscoresAction: corev3.HttpProtocolOptions_ALLOW,
			MaxHeadersCount:              wrapperspb.UInt32(maxHeaders),
		},
		HttpProtocolOptions: &corev3.Http1ProtocolOptions{EnableTrailers: true}, // HTTP/1.0 stays refused
		Http2ProtocolOptions: &corev3.Http2ProtocolOptions{
			AllowConnect: true, // WebSocket over HTTP/2 (RFC 8441)
			// An invalid request ends only its own stream, not the connection.
			OverrideStreamErrorOnInvalidHttpMessage: wrapperspb.Bool(true),
			MaxConcurrentStreams:                    wrapperspb.UInt32(1024),
			InitialStreamWindowSize:                 wrapperspb.UInt32(64 << 10),
			InitialConnectionWindowSize:             wrapperspb.UInt32(1 << 20),
		},
		UpgradeConfigs: []*hcmv3.HttpConnectionManager_UpgradeConfig{{UpgradeType: "websocket"}},

		LocalReplyConfig: b.localReplies(),
		HttpFilters: []*hcmv3.HttpFilter{
			b.mutate(),
			b.ownCookies(),
			b.httpFilter("envoy.filters.http.ext_proc", b.extProc()),
			b.httpFilter("envoy.filters.http.rbac", guard()),
			b.httpFilter("envoy.filters.http.set_filter_state", poolPerSandbox()),
			b.httpFilter("envoy.filters.http.router", &routerv3.Router{SuppressEnvoyHeaders: true}),
		},
		RouteSpecifier: &hcmv3.HttpConnectionManager_RouteConfig{RouteConfig: b.routes()},
	}
}

// scheme replaces the client's :scheme, and X-Forwarded-Proto, by the scheme of the listener,
// unless there are trusted proxies.
func (b *builder) scheme() *corev3.SchemeHeaderTransformation {
	if b.TrustedHops > 0 {
		return nil
	}
	scheme := "http"
	if b.TLS != nil {
		scheme = "https"
	}
	return &corev3.SchemeHeaderTransformation{
		Transformation: &corev3.SchemeHeaderTransformation_SchemeToOverwrite{SchemeToOverwrite: scheme},
	}
}

func (b *builder) httpFilter(name string, config proto.Message) *hcmv3.HttpFilter {
	return &hcmv3.HttpFilter{Name: name, ConfigType: &hcmv3.HttpFilter_TypedConfig{TypedConfig: b.any(config)}}
}

func (b *builder) extProc() *extprocv3.ExternalProcessor {
	return &extprocv3.ExternalProcessor{
		FailureModeAllow: false,
		// Also bounds the retries below.
		MessageTimeout: seconds(MessageTimeout),
		// Lets the router ask once for a longer hold.
		MaxMessageTimeout: seconds(MaxHold + MessageTimeout),
		StatusOnError:     &typev3.HttpStatus{Code: statusRouterError},
		ProcessingMode: &extprocv3.ProcessingMode{
			RequestHeaderMode:   extprocv3.ProcessingMode_SEND,
			ResponseHeaderMode:  extprocv3.ProcessingMode_SKIP,
			RequestBodyMode:     extprocv3.ProcessingMode_NONE,
			ResponseBodyMode:    extprocv3.ProcessingMode_NONE,
			RequestTrailerMode:  extprocv3.ProcessingMode_SKIP,
			ResponseTrailerMode: extprocv3.ProcessingMode_SKIP,
		},
		AllowModeOverride: false,
		RouteCacheAction:  extprocv3.ExternalProcessor_RETAIN,
		MetadataOptions: &extprocv3.MetadataOptions{ReceivingNamespaces: &extprocv3.MetadataOptions_MetadataNamespaces{
			Untyped: []string{MetadataNamespace},
		}},
		// The router receives only the headers that it reads. None is secret, and the cost does
		// not grow with the client's headers.
		ForwardRules: &extprocv3.HeaderForwardingRules{AllowedHeaders: b.routerHeaders()},
		MutationRules: &mutationv3.HeaderMutationRules{
			AllowAllRouting: wrapperspb.Bool(false),
			AllowEnvoy:      wrapperspb.Bool(false),
			// Envoy applies these rules to the router's own answers too, so they allow the
			// headers of those.
			DisallowAll:     wrapperspb.Bool(true),
			AllowExpression: &matcherv3.RegexMatcher{Regex: b.routerMayChange()},
			DisallowIsError: wrapperspb.Bool(false),
		},
		GrpcService: grpcService(clusterRouter, &corev3.RetryPolicy{
			RetryOn:    "connect-failure,refused-stream,reset,unavailable,cancelled",
			NumRetries: wrapperspb.UInt32(30),
			RetryBackOff: &corev3.BackoffStrategy{
				BaseInterval: seconds(20 * time.Millisecond), MaxInterval: seconds(250 * time.Millisecond),
			},
		}),
	}
}

// routerHeaders are the headers that the router receives: those that may name a sandbox, and
// those that select the form of a refusal.
func (b *builder) routerHeaders() *matcherv3.ListStringMatcher {
	names := []string{
		":authority", ":method", "x-request-id",
		"e2b-sandbox-id", "e2b-sandbox-port", "x-sandbox-id", "x-sandbox-port",
		"accept", "sec-fetch-mode", "content-type",
	}
	if b.Paths {
		names = append(names, ":path")
	}
	var all matcherv3.ListStringMatcher
	for _, name := range names {
		all.Patterns = append(all.Patterns, exact(name))
	}
	return &all
}

// routerMayChange matches the headers that the router may set: in its own answers, and in
// requests the path if Paths is set.
func (b *builder) routerMayChange() string {
	names := "content-type|retry-after|cache-control|content-security-policy|" + ReasonHeader
	if b.Paths {
		names += "|:path"
	}
	return names
}

// Patterns of a valid destination. They match no destination that Envoy cannot use, because
// Envoy would then use the connection's original destination, which a peer may choose. Each
// pattern is small, because Envoy limits the size of a regular expression.
const (
	shapeIPv4  = `[0-9]+(\.[0-9]+){3}:[0-9]+`
	octetsIPv4 = `((25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])[.:])+[0-9]+`
	shapeIPv6  = `\[([0-9a-f]{4}:){7}[0-9a-f]{4}\]:[0-9]+` // written out, see Destination
	validPort  = `.*:([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])`
)

// Destination returns an address in the form that the guard accepts in MetadataDst. IPv6 is
// written without abbreviation, so that a simple pattern matches only valid addresses.
func Destination(a netip.AddrPort) string {
	host := a.Addr().String()
	if a.Addr().Is6() {
		host = a.Addr().StringExpanded()
	}
	return net.JoinHostPort(host, strconv.Itoa(int(a.Port())))
}

// guard refuses every request that the router has not explicitly admitted.
func guard() *rbacv3.RBAC {
	all := func(ids ...*rbacconfigv3.Principal) *rbacconfigv3.Principal {
		set := &rbacconfigv3.Principal_Set{Ids: ids}
		return &rbacconfigv3.Principal{Identifier: &rbacconfigv3.Principal_AndIds{AndIds: set}}
	}
	// The router checks the length of the ID.
	id, port := metadataMatches(MetadataID, `[a-z0-9]+`), metadataMatches(MetadataDst, validPort)
	return &rbacv3.RBAC{Rules: &rbacconfigv3.RBAC{
		Action: rbacconfigv3.RBAC_ALLOW,
		Policies: map[string]*rbacconfigv3.Policy{"admitted": {
			Permissions: []*rbacconfigv3.Permission{{Rule: &rbacconfigv3.Permission_Any{Any: true}}},
			Principals: []*rbacconfigv3.Principal{
				all(id, port, metadataMatches(MetadataDst, shapeIPv4), metadataMatches(MetadataDst, octetsIPv4)),
				all(id, port, metadataMatches(MetadataDst, shapeIPv6)),
			},
		}},
	}}
}

// metadataMatches matches requests whose metadata has key with a text that regex matches
// completely.
func metadataMatches(key, regex string) *rbacconfigv3.Principal {
	return &rbacconfigv3.Principal{Identifier: &rbacconfigv3.Principal_SourcedMetadata{SourcedMetadata: &rbacconfigv3.SourcedMetadata{
		MetadataSource: rbacconfigv3.MetadataSource_DYNAMIC,
		MetadataMatcher: &matcherv3.MetadataMatcher{
			Filter: MetadataNamespace,
			Path:   []*matcherv3.MetadataMatcher_PathSegment{{Segment: &matcherv3.MetadataMatcher_PathSegment_Key{Key: key}}},
			Value: &matcherv3.ValueMatcher{MatchPattern: &matcherv3.ValueMatcher_StringMatch{StringMatch: &matcherv3.StringMatcher{
				MatchPattern: &matcherv3.StringMatcher_SafeRegex{SafeRegex: &matcherv3.RegexMatcher{Regex: regex}},
			}}},
		},
	}}}
}

// poolPerSandbox makes the sandbox ID part of the key of upstream connection pools, so that two
// sandboxes that use one address in turn never share a connection. Envoy hashes only this kind
// of filter state.
func poolPerSandbox() *setstatev3.Config {
	return &setstatev3.Config{OnRequestHeaders: []*statev3.FilterStateValue{{
		Key:        &statev3.FilterStateValue_ObjectKey{ObjectKey: "berth.sandbox"},
		FactoryKey: "envoy.hashable_string",
		Value: &statev3.FilterStateValue_FormatString{FormatString: &corev3.SubstitutionFormatString{
			Format: &corev3.SubstitutionFormatString_TextFormatSource{TextFormatSource: &corev3.DataSource{
				Specifier: &corev3.DataSource_InlineString{InlineString: "%DYNAMIC_METADATA(" + MetadataNamespace + ":" + MetadataID + ")%"},
			}},
		}},
		SharedWithUpstream: statev3.FilterStateValue_ONCE,
	}}}
}

func (b *builder) routes() *routev3.RouteConfiguration {
	to := func(cluster string) *routev3.Route_Route {
		return &routev3.Route_Route{Route: &routev3.RouteAction{
			ClusterSpecifier: &routev3.RouteAction_Cluster{Cluster: cluster},
			Timeout:          seconds(0),
			IdleTimeout:      seconds(0),
			// A request is retried only while Envoy has sent no part of it. "reset" would send it
			// to any program that listens at that address later.
			RetryPolicy: &routev3.RetryPolicy{
				RetryOn:    "connect-failure,reset-before-request",
				NumRetries: wrapperspb.UInt32(Retries),
				RetryBackOff: &routev3.RetryPolicy_RetryBackOff{
					BaseInterval: seconds(retryBackOffBase), MaxInterval: seconds(retryBackOffMax),
				},
			},
		}}
	}
	all := &routev3.RouteMatch_Prefix{Prefix: "/"}
	return &routev3.RouteConfiguration{
		Name: "all",
		VirtualHosts: []*routev3.VirtualHost{{
			Name: "all", Domains: []string{"*"},
			RequestHeadersToRemove:  []string{"x-envoy-external-address"},
			ResponseHeadersToRemove: sandboxMayNotSend(),
			Routes: append(webSockets(to(clusterPodsHTTP1)), []*routev3.Route{
				{Match: &routev3.RouteMatch{PathSpecifier: all, Headers: []*routev3.HeaderMatcher{isGRPC()}}, Action: to(clusterPodsHTTP2)},
				{Match: &routev3.RouteMatch{PathSpecifier: all}, Action: to(clusterPodsHTTP1)},
			}...),
		}},
	}
}

// grpcService is the gRPC service of a filter. GrpcService_EnvoyGrpc has a retry policy too,
// but Envoy applies that one only to xDS.
func grpcService(cluster string, retry *corev3.RetryPolicy) *corev3.GrpcService {
	return &corev3.GrpcService{
		TargetSpecifier: &corev3.GrpcService_EnvoyGrpc_{EnvoyGrpc: &corev3.GrpcService_EnvoyGrpc{ClusterName: cluster}},
		RetryPolicy:     retry,
	}
}

func exact(s string) *matcherv3.StringMatcher {
	return &matcherv3.StringMatcher{MatchPattern: &matcherv3.StringMatcher_Exact{Exact: s}}
}
