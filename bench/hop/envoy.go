package main

import (
	"encoding/json"
	"fmt"
	"net/netip"

	"google.golang.org/protobuf/encoding/protojson"

	"github.com/berth-sandbox/berth/envoy"
)

// node is a part of an Envoy configuration in JSON, with the names of the proto fields.
type node = map[string]any

// sockets are the unix sockets of one Envoy and its router.
type sockets struct{ router, admin string }

// berthConfig is Berth's own bootstrap. Its admin interface shows in addition what the benchmark reads.
func berthConfig(s sockets, traces *envoy.Traces) (node, error) {
	bootstrap, err := envoy.Bootstrap(envoy.Settings{
		Listen:       netip.MustParseAddrPort("127.0.0.1:0"),
		RouterSocket: s.router, AdminSocket: s.admin, Traces: traces,
	})
	if err != nil {
		return nil, err
	}
	raw, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(bootstrap)
	if err != nil {
		return nil, err
	}
	var config node
	if err := json.Unmarshal(raw, &config); err != nil {
		return nil, err
	}
	paths := config["admin"].(node)["allow_paths"].([]any)
	config["admin"].(node)["allow_paths"] = append(paths,
		node{"prefix": "/listeners"}, node{"prefix": "/stats"}, node{"prefix": "/clusters?"}, node{"exact": "/memory"})
	return config, nil
}

// plainConfig is the least configuration of an Envoy in front of the sandboxes. With a namespace ext_proc names the
// destination there; without one the client names it in a header.
func plainConfig(s sockets, namespace string) (config node, err error) {
	filters, destination, clusters := "", `"use_http_header": true`, ""
	if namespace != "" {
		filters, destination = fmt.Sprintf(stockFilter, namespace), fmt.Sprintf(stockDestination, namespace)
		clusters = fmt.Sprintf(stockCluster, s.router)
	}
	text := fmt.Sprintf(plainTemplate, s.admin, filters, limits, destination, clusters)
	if err := json.Unmarshal([]byte(text), &config); err != nil {
		return nil, fmt.Errorf("the configuration of the plain Envoy: %w", err)
	}
	return config, nil
}

// limits are large enough for every load, so that a plain Envoy refuses nothing.
const limits = `"circuit_breakers": {"thresholds": [{"max_connections": 100000, "max_pending_requests": 100000,
	"max_requests": 100000, "max_retries": 1000}]}`

const plainTemplate = `{
  "admin": {"address": {"pipe": {"path": %q}}},
  "static_resources": {
    "listeners": [{
      "name": "ingress",
      "address": {"socket_address": {"address": "127.0.0.1", "port_value": 0}},
      "filter_chains": [{"filters": [{
        "name": "envoy.filters.network.http_connection_manager",
        "typed_config": {
          "@type": "type.googleapis.com/` + connectionManager + `",
          "stat_prefix": "ingress",
          "upgrade_configs": [{"upgrade_type": "websocket"}],
          "http_filters": [%s{
            "name": "envoy.filters.http.router",
            "typed_config": {"@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"}
          }],
          "route_config": {"virtual_hosts": [{
            "name": "all", "domains": ["*"],
            "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "pods", "timeout": "0s"}}]
          }]}
        }
      }]}]
    }],
    "clusters": [{
      "name": "pods", "type": "ORIGINAL_DST", "lb_policy": "CLUSTER_PROVIDED", "connect_timeout": "1s", %s,
      "original_dst_lb_config": {%s}
    }%s]
  }
}`

const connectionManager = "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"

const stockDestination = `"metadata_key": {"key": %q, "path": [{"key": "dst"}]}`

const stockFilter = `{
            "name": "envoy.filters.http.ext_proc",
            "typed_config": {
              "@type": "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor",
              "message_timeout": "5s",
              "processing_mode": {"request_header_mode": "SEND", "response_header_mode": "SKIP"},
              "metadata_options": {"receiving_namespaces": {"untyped": [%q]}},
              "grpc_service": {"envoy_grpc": {"cluster_name": "router"}}
            }
          }, `

const stockCluster = `, {
      "name": "router", "type": "STATIC", "connect_timeout": "1s", ` + limits + `,
      "typed_extension_protocol_options": {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
        "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}}
      }},
      "load_assignment": {"cluster_name": "router", "endpoints": [{"lb_endpoints": [
        {"endpoint": {"address": {"pipe": {"path": %q}}}}]}]}
    }`
