package main

import (
	"fmt"
	"slices"
	"strings"
)

// ablations are Berth without one part each, for `make bench-hop ABLATE=1`. They show what each part costs, and
// give up its guarantee.
func ablations() []*scenario {
	var all []*scenario
	without := func(name, about string, change func(config node) error) {
		all = append(all, &scenario{name: name, about: about, kind: kindBerth, change: change})
	}
	withEnv := func(name, about string, env ...string) {
		all = append(all, &scenario{name: name, about: about, kind: kindBerth, env: env})
	}
	filter := func(names ...string) func(node) error {
		return func(c node) error {
			for _, name := range names {
				if err := dropFilter(c, name); err != nil {
					return err
				}
			}
			return nil
		}
	}
	manager := func(fields ...string) func(node) error {
		return func(c node) error { return drop(connectionManagerOf(c), fields...) }
	}
	processor := func(fields ...string) func(node) error {
		return func(c node) error { return drop(filterOf(c, "router"), fields...) }
	}
	without("early-mutations", "no removal of request headers before the filters",
		manager("early_header_mutation_extensions"))
	without("mutations", "no removal of headers of answers and trailers by expression", filter("headers"))
	without("scripts", "no script for credentials, none for cookies", filter("credentials", "cookies"))
	without("guard", "no guard behind ext_proc", filter("guard"))
	without("pool-per-sandbox", "no filter state that splits the connection pools", filter("pool"))
	without("one-route", "one route, and no removal of headers by the virtual host", oneRoute)
	without("retries", "no retries of a request to a pod", func(c node) error {
		return eachRoute(c, func(r node) { delete(r["route"].(node), "retry_policy") })
	})
	without("question-retries", "no retries of a question to the router", func(c node) error {
		return drop(optionsOf(c, "router"), "retry_policy")
	})
	without("question-retries-at-filter", "the retry policy of a question is at the filter", func(c node) error {
		options := optionsOf(c, "router")
		filterOf(c, "router")["grpc_service"].(node)["retry_policy"] = options["retry_policy"]
		return drop(options, "retry_policy")
	})
	without("forward-rules", "the router gets all headers", processor("forward_rules"))
	without("mutation-rules", "no rules for what the router may change", processor("mutation_rules"))
	without("local-replies", "Envoy's own local replies", manager("local_reply_config"))
	without("timeouts", "the default timeouts of the listener", manager(
		"stream_idle_timeout", "request_timeout", "request_headers_timeout", "drain_timeout", "delayed_close_timeout"))
	without("caller", "the default account of the caller: address, scheme", manager(
		"use_remote_address", "internal_address_config", "scheme_header_transformation"))
	without("protocol-options", "the default options of HTTP", manager(
		"common_http_protocol_options", "http_protocol_options", "http2_protocol_options", "max_request_headers_kb"))
	without("request-id", "no request IDs", func(c node) error {
		connectionManagerOf(c)["generate_request_id"] = false
		return nil
	})
	without("buffers", "the default buffers of connections", func(c node) error {
		all := append(clusters(c), listeners(c)...)
		for _, of := range all {
			delete(of, "per_connection_buffer_limit_bytes")
		}
		return nil
	})
	without("pod-options", "the default connection options of pods", eachPods(
		"upstream_connection_options", "typed_extension_protocol_options"))
	without("router-options", "the default HTTP/2 options of the router's cluster", func(c node) error {
		optionsOf(c, "router")["explicit_http_config"] = node{"http2_protocol_options": node{}}
		return nil
	})
	without("overload", "no overload manager", func(c node) error { return drop(c, "overload_manager") })
	without("no-statistics", "Envoy without statistics", func(c node) error {
		c["stats_config"] = node{"stats_matcher": node{"reject_all": true}}
		return nil
	})
	without("code-statistics", "with statistics of pods by status code", func(c node) error {
		return drop(filterOf(c, "upstream"), "dynamic_stats")
	})
	without("graceful-close", "Envoy half-closes ext_proc streams instead of resetting them", func(c node) error {
		return setRuntime(c, "envoy.reloadable_features.ext_proc_graceful_grpc_close", true)
	})
	all = append(all, &scenario{
		name: "looks", about: "the router does not look at Envoy's open requests", kind: kindBerth,
		args: []string{"--envoy-admin=/nowhere"},
	})
	all = append(all, &scenario{name: "one-worker", about: "Envoy with one worker", kind: kindBerth, concurrency: 1})
	all = append(all,
		&scenario{name: "traces-1", about: "traces of 1 % of the requests", kind: kindBerth, traces: 1},
		&scenario{name: "traces-100", about: "traces of all requests", kind: kindBerth, traces: 100})
	withEnv("gogc-100", "the router with GOGC=100", "GOGC=100")
	withEnv("gogc-400", "the router with GOGC=400", "GOGC=400")
	withEnv("procs-1", "the router with GOMAXPROCS=1", "GOMAXPROCS=1")
	withEnv("procs-2", "the router with GOMAXPROCS=2", "GOMAXPROCS=2")
	all = append(all,
		&scenario{name: "stock-envoy", about: "the stock configuration with Berth's router", kind: kindBerth, crossed: true},
		&scenario{name: "stock-router", about: "Berth's configuration with the stock router", kind: kindStock, crossed: true})
	return all
}

// The parts of a configuration. They panic if it has another shape, which is an error in this program.

func nodes(list any) (all []node) {
	for _, one := range list.([]any) {
		all = append(all, one.(node))
	}
	return all
}

func clusters(c node) []node  { return nodes(c["static_resources"].(node)["clusters"]) }
func listeners(c node) []node { return nodes(c["static_resources"].(node)["listeners"]) }

func connectionManagerOf(c node) node {
	chain := nodes(listeners(c)[0]["filter_chains"])[0]
	return nodes(chain["filters"])[0]["typed_config"].(node)
}

func filterOf(c node, name string) node {
	all := nodes(connectionManagerOf(c)["http_filters"])
	i := slices.IndexFunc(all, func(f node) bool { return f["name"] == "berth/"+name })
	return all[i]["typed_config"].(node)
}

// optionsOf are the HTTP options of a cluster.
func optionsOf(c node, cluster string) node {
	all := clusters(c)
	i := slices.IndexFunc(all, func(of node) bool { return of["name"] == cluster })
	const options = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
	return all[i]["typed_extension_protocol_options"].(node)[options].(node)
}

func virtualHost(c node) node {
	return nodes(connectionManagerOf(c)["route_config"].(node)["virtual_hosts"])[0]
}

// drop removes fields. A field that is missing is an error, so that an ablation cannot become one of nothing.
func drop(from node, fields ...string) error {
	for _, f := range fields {
		if _, ok := from[f]; !ok {
			return fmt.Errorf("the configuration has no %s", f)
		}
		delete(from, f)
	}
	return nil
}

func dropFilter(c node, name string) error {
	manager := connectionManagerOf(c)
	all := manager["http_filters"].([]any)
	kept := slices.DeleteFunc(slices.Clone(all), func(f any) bool {
		return f.(node)["name"] == "berth/"+name
	})
	if len(kept) == len(all) {
		return fmt.Errorf("the configuration has no filter %s", name)
	}
	manager["http_filters"] = kept
	return nil
}

func oneRoute(c node) error {
	host := virtualHost(c)
	if err := drop(host, "request_headers_to_remove", "response_headers_to_remove"); err != nil {
		return err
	}
	all := host["routes"].([]any)
	last := all[len(all)-1].(node)
	last["match"] = node{"prefix": "/"}
	host["routes"] = []any{last}
	return nil
}

func eachRoute(c node, change func(route node)) error {
	for _, r := range nodes(virtualHost(c)["routes"]) {
		change(r)
	}
	return nil
}

// eachPods removes fields of all clusters of pods.
func eachPods(fields ...string) func(c node) error {
	return func(c node) error {
		for _, of := range clusters(c) {
			if !strings.HasPrefix(of["name"].(string), "pods_h1") {
				continue
			}
			if err := drop(of, fields...); err != nil {
				return err
			}
		}
		return nil
	}
}

func setRuntime(c node, key string, value any) error {
	c["layered_runtime"] = node{"layers": []any{node{"name": "bench", "static_layer": node{key: value}}}}
	return nil
}
