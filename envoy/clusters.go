package envoy

import (
	"math"
	"time"

	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	endpointv3 "github.com/envoyproxy/go-control-plane/envoy/config/endpoint/v3"
	httpv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/upstreams/http/v3"
	metadatav3 "github.com/envoyproxy/go-control-plane/envoy/type/metadata/v3"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

const (
	clusterPodsHTTP1 = "pods_h1"
	clusterPodsHTTP2 = "pods_h2" // gRPC needs HTTP/2 to the pod; most servers in sandboxes speak 1.1
	clusterRouter    = "router"

	// podStreams is how many requests share an HTTP/2 connection to a pod: the number that
	// every server should allow (RFC 9113, section 6.5.2). Envoy may send that many before the
	// server has announced its own limit, and a server refuses streams above its limit.
	// Further requests open further connections and do not wait.
	podStreams = 100

	// A connection to a pod that has vanished, for example with its node, ends after 30 s of
	// silence. Otherwise an open request on it would count as use of the next sandbox at that
	// address. The kernel of a running pod answers the probes even if its programs are silent.
	keepaliveSeconds         = 15
	keepaliveIntervalSeconds = 5
	keepaliveProbes          = 3

	httpOptions = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
)

func (b *builder) clusters() []*clusterv3.Cluster {
	all := []*clusterv3.Cluster{
		b.pods(clusterPodsHTTP1, &httpv3.HttpProtocolOptions_ExplicitHttpConfig{
			ProtocolConfig: &httpv3.HttpProtocolOptions_ExplicitHttpConfig_HttpProtocolOptions{
				HttpProtocolOptions: &corev3.Http1ProtocolOptions{EnableTrailers: true},
			},
		}),
		b.pods(clusterPodsHTTP2, &httpv3.HttpProtocolOptions_ExplicitHttpConfig{
			ProtocolConfig: &httpv3.HttpProtocolOptions_ExplicitHttpConfig_Http2ProtocolOptions{
				Http2ProtocolOptions: &corev3.Http2ProtocolOptions{
					MaxConcurrentStreams:                    wrapperspb.UInt32(podStreams),
					InitialStreamWindowSize:                 wrapperspb.UInt32(64 << 10),
					InitialConnectionWindowSize:             wrapperspb.UInt32(1 << 20),
					OverrideStreamErrorOnInvalidHttpMessage: wrapperspb.Bool(true),
				},
			},
		}),
		b.router(),
	}
	if b.HealthListen.IsValid() {
		all = append(all, b.admin())
	}
	return all
}

// pods is a cluster whose destination is in the metadata. use_http_header stays off.
func (b *builder) pods(name string, protocol *httpv3.HttpProtocolOptions_ExplicitHttpConfig) *clusterv3.Cluster {
	return &clusterv3.Cluster{
		Name:                 name,
		ClusterDiscoveryType: &clusterv3.Cluster_Type{Type: clusterv3.Cluster_ORIGINAL_DST},
		LbPolicy:             clusterv3.Cluster_CLUSTER_PROVIDED,
		LbConfig: &clusterv3.Cluster_OriginalDstLbConfig_{OriginalDstLbConfig: &clusterv3.Cluster_OriginalDstLbConfig{
			MetadataKey: &metadatav3.MetadataKey{
				Key: MetadataNamespace,
				Path: []*metadatav3.MetadataKey_PathSegment{
					{Segment: &metadatav3.MetadataKey_PathSegment_Key{Key: MetadataDst}},
				},
			},
		}},
		ConnectTimeout:                seconds(ConnectTimeout),
		CleanupInterval:               seconds(5 * time.Second),
		PerConnectionBufferLimitBytes: wrapperspb.UInt32(connectionBuffer),
		UpstreamConnectionOptions: &clusterv3.UpstreamConnectionOptions{TcpKeepalive: &corev3.TcpKeepalive{
			KeepaliveTime:     wrapperspb.UInt32(keepaliveSeconds),
			KeepaliveInterval: wrapperspb.UInt32(keepaliveIntervalSeconds),
			KeepaliveProbes:   wrapperspb.UInt32(keepaliveProbes),
		}},
		CircuitBreakers: b.breakers(math.MaxUint32, 1000),
		TypedExtensionProtocolOptions: b.protocol(&httpv3.HttpProtocolOptions{
			CommonHttpProtocolOptions: &corev3.HttpProtocolOptions{
				IdleTimeout: seconds(30 * time.Second), MaxHeadersCount: wrapperspb.UInt32(maxHeaders),
			},
			UpstreamProtocolOptions: &httpv3.HttpProtocolOptions_ExplicitHttpConfig_{ExplicitHttpConfig: protocol},
		}),
	}
}

func (b *builder) router() *clusterv3.Cluster {
	return &clusterv3.Cluster{
		Name:                 clusterRouter,
		ClusterDiscoveryType: &clusterv3.Cluster_Type{Type: clusterv3.Cluster_STATIC},
		ConnectTimeout:       seconds(250 * time.Millisecond),
		// max_retries bounds concurrent retries. Its default of 3 would defeat the retry policy
		// of ext_proc while a router restarts.
		CircuitBreakers: b.breakers(b.MaxConnections, b.MaxConnections),
		TypedExtensionProtocolOptions: b.protocol(&httpv3.HttpProtocolOptions{
			UpstreamProtocolOptions: &httpv3.HttpProtocolOptions_ExplicitHttpConfig_{
				ExplicitHttpConfig: &httpv3.HttpProtocolOptions_ExplicitHttpConfig{
					ProtocolConfig: &httpv3.HttpProtocolOptions_ExplicitHttpConfig_Http2ProtocolOptions{
						Http2ProtocolOptions: &corev3.Http2ProtocolOptions{MaxConcurrentStreams: wrapperspb.UInt32(b.MaxConnections)},
					},
				},
			},
		}),
		LoadAssignment: &endpointv3.ClusterLoadAssignment{
			ClusterName: clusterRouter,
			Endpoints: []*endpointv3.LocalityLbEndpoints{{LbEndpoints: []*endpointv3.LbEndpoint{{
				HostIdentifier: &endpointv3.LbEndpoint_Endpoint{Endpoint: &endpointv3.Endpoint{Address: pipe(b.RouterSocket)}},
			}}}},
		},
	}
}

// breakers refuse requests above the limit. A limit on connections would make requests wait
// instead. An admitted request must not wait, so the clusters of pods have no such limit.
func (b *builder) breakers(connections, retries uint32) *clusterv3.CircuitBreakers {
	return &clusterv3.CircuitBreakers{Thresholds: []*clusterv3.CircuitBreakers_Thresholds{{
		MaxConnections:     wrapperspb.UInt32(connections),
		MaxPendingRequests: wrapperspb.UInt32(b.MaxConnections),
		MaxRequests:        wrapperspb.UInt32(b.MaxConnections),
		MaxRetries:         wrapperspb.UInt32(retries),
	}}}
}

func (b *builder) protocol(o *httpv3.HttpProtocolOptions) map[string]*anypb.Any {
	return map[string]*anypb.Any{httpOptions: b.any(o)}
}
