package envoy

import (
	"net/http"
	"time"

	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	endpointv3 "github.com/envoyproxy/go-control-plane/envoy/config/endpoint/v3"
	listenerv3 "github.com/envoyproxy/go-control-plane/envoy/config/listener/v3"
	routev3 "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"
	routerv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/router/v3"
	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	matcherv3 "github.com/envoyproxy/go-control-plane/envoy/type/matcher/v3"
)

const clusterAdmin = "envoy_admin"

// healthPaths are the pages of Envoy's admin interface that the health listener serves. Other
// pages can change Envoy or show data of clients.
func healthPaths() []string { return []string{"/ready", "/stats/prometheus"} }

// healthListener serves a few pages of the admin interface to probes and Prometheus. The
// admin interface itself stays on a unix socket.
func (b *builder) healthListener() *listenerv3.Listener {
	get := &routev3.HeaderMatcher{Name: ":method", HeaderMatchSpecifier: &routev3.HeaderMatcher_StringMatch{
		StringMatch: &matcherv3.StringMatcher{MatchPattern: &matcherv3.StringMatcher_Exact{Exact: http.MethodGet}},
	}}
	var pages []*routev3.Route
	for _, path := range healthPaths() {
		pages = append(pages, &routev3.Route{
			Match: &routev3.RouteMatch{PathSpecifier: &routev3.RouteMatch_Path{Path: path}, Headers: []*routev3.HeaderMatcher{get}},
			Action: &routev3.Route_Route{Route: &routev3.RouteAction{
				ClusterSpecifier: &routev3.RouteAction_Cluster{Cluster: clusterAdmin}, Timeout: seconds(5 * time.Second),
			}},
		})
	}
	pages = append(pages, &routev3.Route{
		Match:  &routev3.RouteMatch{PathSpecifier: &routev3.RouteMatch_Prefix{Prefix: "/"}},
		Action: &routev3.Route_DirectResponse{DirectResponse: &routev3.DirectResponseAction{Status: http.StatusNotFound}},
	})
	return &listenerv3.Listener{
		Name:    "health",
		Address: socketAddress(b.HealthListen),
		// Probes are answered even when Envoy refuses the traffic of sandboxes.
		IgnoreGlobalConnLimit: true,
		BypassOverloadManager: true,
		FilterChains: []*listenerv3.FilterChain{{Filters: []*listenerv3.Filter{{
			Name: "envoy.filters.network.http_connection_manager",
			ConfigType: &listenerv3.Filter_TypedConfig{TypedConfig: b.any(&hcmv3.HttpConnectionManager{
				StatPrefix:            "health",
				CodecType:             hcmv3.HttpConnectionManager_AUTO,
				RequestHeadersTimeout: seconds(5 * time.Second),
				RequestTimeout:        seconds(5 * time.Second),
				CommonHttpProtocolOptions: &corev3.HttpProtocolOptions{
					IdleTimeout: seconds(time.Minute),
				},
				HttpFilters: []*hcmv3.HttpFilter{b.httpFilter("envoy.filters.http.router", &routerv3.Router{})},
				RouteSpecifier: &hcmv3.HttpConnectionManager_RouteConfig{RouteConfig: &routev3.RouteConfiguration{
					Name: "health", VirtualHosts: []*routev3.VirtualHost{{Name: "health", Domains: []string{"*"}, Routes: pages}},
				}},
			})},
		}}}},
	}
}

func (b *builder) admin() *clusterv3.Cluster {
	return &clusterv3.Cluster{
		Name:                 clusterAdmin,
		ClusterDiscoveryType: &clusterv3.Cluster_Type{Type: clusterv3.Cluster_STATIC},
		ConnectTimeout:       seconds(250 * time.Millisecond),
		LoadAssignment: &endpointv3.ClusterLoadAssignment{
			ClusterName: clusterAdmin,
			Endpoints: []*endpointv3.LocalityLbEndpoints{{LbEndpoints: []*endpointv3.LbEndpoint{{
				HostIdentifier: &endpointv3.LbEndpoint_Endpoint{Endpoint: &endpointv3.Endpoint{Address: pipe(b.AdminSocket)}},
			}}}},
		},
	}
}
