package envoy_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	bootstrapv3 "github.com/envoyproxy/go-control-plane/envoy/config/bootstrap/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/connection_limit/v3"
	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/encoding/protojson"
	"sigs.k8s.io/yaml"

	"github.com/berth-sandbox/berth/envoy"
	"github.com/berth-sandbox/berth/lastactive/look"
)

// inEnvoy says whose Envoy serves the sandboxes.
type inEnvoy string

const (
	own inEnvoy = "of Berth"
	// These have the configuration of another gateway, to which the test applies the object.
	inEnvoyGateway inEnvoy = "of Envoy Gateway"
	inIstio        inEnvoy = "of Istio"
)

// isBerths: it has Berth's bootstrap.
func (in inEnvoy) isBerths() bool { return in == own || in == behindEnvoyGateway }

// inEachEnvoy runs a test in Berth's Envoy and in those of other gateways, or in those of a real Envoy Gateway.
func inEachEnvoy(t *testing.T, test func(t *testing.T, in inEnvoy)) {
	all := []inEnvoy{own, inEnvoyGateway, inIstio}
	if *envoyGateway != "" {
		all = []inEnvoy{inRealEnvoyGateway, behindEnvoyGateway}
	}
	runIn(t, all, test)
}

// inEachOtherEnvoy is inEachEnvoy without Berth's.
func inEachOtherEnvoy(t *testing.T, test func(t *testing.T, in inEnvoy)) {
	all := []inEnvoy{inEnvoyGateway, inIstio}
	if *envoyGateway != "" {
		all = []inEnvoy{inRealEnvoyGateway}
	}
	runIn(t, all, test)
}

func runIn(t *testing.T, all []inEnvoy, test func(t *testing.T, in inEnvoy)) {
	for _, in := range all {
		t.Run(string(in), func(t *testing.T) { test(t, in) })
	}
}

// otherListener is the listener of other gateways.
const otherListener = "default/public/sandboxes"

// otherConfig is what the Envoy of another gateway has before it gets Berth's part: one route, which the test must not see,
// and a network filter before the connection manager, which both gateways may add.
const otherConfig = `
node: {id: other, cluster: other}
admin: {address: {socket_address: {address: 127.0.0.1, port_value: %d}}}
layered_runtime: {layers: [{name: other, static_layer: {re2.max_program_size.error_level: 32768}}]}
static_resources:
  clusters: []
  listeners:
  - name: ` + otherListener + `
    address: {socket_address: {address: 127.0.0.1, port_value: 0}}
    %s:
      name: ` + otherListener + `
      filters:
      - name: envoy.filters.network.connection_limit
        typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.network.connection_limit.v3.ConnectionLimit, stat_prefix: a, max_connections: 10000}
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: other
          http_filters:
          - {name: envoy.filters.http.router, typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}}
          route_config: {virtual_hosts: [{name: a, domains: ["*"], routes: [{match: {prefix: /}, direct_response: {status: 418}}]}]}
`

type object = map[string]any

// otherEnvoy applies the object for another gateway as the control plane of that gateway does.
func (g *gateway) otherEnvoy(in inEnvoy) *bootstrapv3.Bootstrap {
	g.Helper()
	chain := "default_filter_chain"
	if g.settings.Other.TLS || in == inIstio {
		chain = "filter_chains"
	}
	var config object
	require.NoError(g, yaml.Unmarshal(fmt.Appendf(nil, otherConfig, g.settings.Other.Admin.Port(), chain), &config))
	resources := config["static_resources"].(object)
	listener := resources["listeners"].([]any)[0].(object)
	if chain == "filter_chains" {
		listener[chain] = []any{listener[chain]}
	}
	add := func(kind string, value any) { resources[kind] = append(resources[kind].([]any), value) }
	replaced := 0
	replace := func(chain object, name string, by func(filter object)) {
		for _, f := range chain["filters"].([]any) {
			if f.(object)["name"] == name {
				by(f.(object))
				replaced++
			}
		}
	}
	switch in {
	case inEnvoyGateway:
		raw, err := envoy.EnvoyPatchPolicy(g.settings, envoy.PatchTarget{Namespace: "default", Gateway: "public", Listener: "sandboxes"})
		require.NoError(g, err)
		var policy struct {
			Spec struct {
				JSONPatches []struct {
					Type, Name string
					Operation  struct {
						Op, JSONPath string
						Path         *string
						Value        any
					}
				}
			}
		}
		require.NoError(g, yaml.Unmarshal(raw, &policy))
		for _, p := range policy.Spec.JSONPatches {
			o := p.Operation
			kind := map[string]string{
				"type.googleapis.com/envoy.config.listener.v3.Listener": "listeners", "type.googleapis.com/envoy.config.cluster.v3.Cluster": "clusters",
			}[p.Type]
			if o.Op == "add" && o.Path != nil && *o.Path == "" {
				add(kind, o.Value)
				continue
			}
			require.Equal(g, "replace", o.Op)
			require.Equal(g, otherListener, p.Name)
			path := regexp.MustCompile(`^\$\.(default_filter_chain|filter_chains\[\?\(@\.name=='` + otherListener + `'\)\])\.filters\[\?\(@\.name=='([^']+)'\)\]\.typed_config$`).FindStringSubmatch(o.JSONPath)
			require.NotNil(g, path, o.JSONPath)
			at, _ := listener["default_filter_chain"].(object)
			if strings.HasPrefix(path[1], "filter_chains") {
				at = listener["filter_chains"].([]any)[0].(object)
			}
			replace(at, path[2], func(filter object) { filter["typed_config"] = o.Value })
		}
	case inIstio:
		raw, err := envoy.EnvoyFilter(g.settings, envoy.FilterTarget{Namespace: "edge", Labels: map[string]string{"istio": "edge"}, Port: 8080, Domain: sandboxDomain})
		require.NoError(g, err)
		var filter struct {
			Spec struct {
				ConfigPatches []struct {
					ApplyTo string
					Match   struct {
						Context  string
						Listener struct {
							PortNumber  int
							FilterChain struct {
								SNI    string
								Filter struct{ Name string }
							}
						}
					}
					Patch struct {
						Operation string
						Value     any
					}
				}
			}
		}
		require.NoError(g, yaml.Unmarshal(raw, &filter))
		for _, p := range filter.Spec.ConfigPatches {
			require.Equal(g, "GATEWAY", p.Match.Context)
			switch p.ApplyTo + " " + p.Patch.Operation {
			case "CLUSTER ADD":
				add("clusters", p.Patch.Value)
			case "LISTENER ADD":
				add("listeners", p.Patch.Value)
			case "NETWORK_FILTER REPLACE":
				require.Equal(g, 8080, p.Match.Listener.PortNumber)
				require.Equal(g, g.settings.Other.TLS, p.Match.Listener.FilterChain.SNI == "*."+sandboxDomain)
				replace(listener["filter_chains"].([]any)[0].(object), p.Match.Listener.FilterChain.Filter.Name, func(filter object) {
					clear(filter)
					for k, v := range p.Patch.Value.(object) {
						filter[k] = v
					}
				})
			default:
				g.Fatal(p.ApplyTo, p.Patch.Operation)
			}
		}
	}
	require.Equal(g, 1, replaced)
	raw, err := json.Marshal(config)
	require.NoError(g, err)
	var bootstrap bootstrapv3.Bootstrap
	require.NoError(g, protojson.Unmarshal(raw, &bootstrap))
	return &bootstrap
}

// tcpAdmin is a client of an admin interface that has an address.
func tcpAdmin(at netip.AddrPort) *http.Client {
	return &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "tcp", at.String())
	}}}
}

// The router of another gateway's Envoy sees what is open, and can change nothing.
func TestRouterSeesWhatOtherEnvoysHoldOpen(t *testing.T) {
	inEachOtherEnvoy(t, func(t *testing.T, in inEnvoy) {
		g := startGatewayWith(t, config{in: in})
		reader, err := look.New(g.settings.AdminSocket, func() int { return 1 })
		require.NoError(t, err)
		_, err = reader.Look(t.Context())
		require.ErrorContains(t, err, "first look")
		opened, end := make(chan struct{}), make(chan struct{})
		p := listen(t, "127.0.0.1:0", http.HandlerFunc(func(_ http.ResponseWriter, _ *http.Request) {
			close(opened)
			<-end
		}))
		g.router.set(g.to(p.addr.String()))
		done := make(chan answer, 1)
		go func() { done <- g.do(g.request(host, "/", nil)) }()
		<-opened
		l, err := reader.Look(t.Context())
		require.NoError(t, err)
		require.Equal(t, 1, l.Hosts[look.Host{AddrPort: p.addr}])
		close(end)
		require.Equal(t, http.StatusOK, (<-done).code)
		require.Eventually(t, func() bool {
			l, err := reader.Look(t.Context())
			return err == nil && l.Hosts[look.Host{AddrPort: p.addr}] == 0
		}, time.Minute, 10*time.Millisecond)

		socket := envoy.AdminClient(g.settings.AdminSocket)
		for _, page := range adminPages() {
			for _, method := range []string{http.MethodGet, http.MethodPost} {
				if page == "/clusters" && method == http.MethodGet {
					continue
				}
				r, err := http.NewRequestWithContext(t.Context(), method, "http://envoy"+page, http.NoBody)
				require.NoError(t, err)
				response, err := socket.Do(r)
				require.NoError(t, err)
				response.Body.Close()
				require.Equal(t, http.StatusNotFound, response.StatusCode, "%s %s", method, page)
			}
		}
		require.ErrorIs(t, envoy.Resume(t.Context(), socket), fs.ErrNotExist, "a router that begins has nothing to undo")
		g.serves(t)
	})
}

// foreign are filters of another gateway that refuse every request, and what they answer.
var foreign = map[string]struct {
	filter string
	code   int
	body   string
}{
	"by a rule": {
		`{name: envoy.filters.http.rbac, typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.http.rbac.v3.RBAC, rules: {}}}`,
		http.StatusForbidden, "RBAC: access denied",
	},
	"by a script": {
		`{name: envoy.filters.http.lua, typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.http.lua.v3.Lua, default_source_code: {
		inline_string: 'function envoy_on_request(h) h:respond({[":status"] = "401"}, "who?") end'}}}`,
		http.StatusUnauthorized, "who?",
	},
}

// What is not Berth's must not look so: a client would repeat a request that is refused for ever.
func TestRefusalOfAnotherGatewayPassesUnchanged(t *testing.T) {
	for name, c := range foreign {
		for _, before := range []bool{true, false} { // Berth's filters
			t.Run(fmt.Sprintf("%s, before Berth %v", name, before), func(t *testing.T) {
				g := startGatewayWith(t, config{in: inIstio, patch: func(b *bootstrapv3.Bootstrap) {
					raw, err := yaml.YAMLToJSON([]byte(c.filter))
					require.NoError(t, err)
					var filter hcmv3.HttpFilter
					require.NoError(t, protojson.Unmarshal(raw, &filter))
					at := b.StaticResources.Listeners[0].FilterChains[0].Filters[1]
					var manager hcmv3.HttpConnectionManager
					require.NoError(t, at.GetTypedConfig().UnmarshalTo(&manager))
					i := 0
					if !before {
						i = len(manager.HttpFilters) - 1
					}
					manager.HttpFilters = slices.Insert(manager.HttpFilters, i, &filter)
					require.NoError(t, at.GetTypedConfig().MarshalFrom(&manager))
				}})
				g.router.set(admit(g.admitted("abc")))
				a := g.do(g.request(host, "/", nil))
				require.Equal(t, c.code, a.code, a.body)
				require.Equal(t, c.body, a.body)
				require.Empty(t, a.header.Get(envoy.ReasonHeader))
				if !before {
					g.router.set(admit(nil))
					g.unavailable(t, nil)
				}
				require.Zero(t, g.hits.Load())
			})
		}
	}
}

func TestSchemeIsThatOfTheOtherGateway(t *testing.T) {
	inEachOtherEnvoy(t, func(t *testing.T, in inEnvoy) {
		for tls, scheme := range map[bool]string{false: "http", true: "https"} {
			t.Run(scheme, func(t *testing.T) {
				// The chain of the test has no TLS: the scheme is the one that the object says.
				g := startGatewayWith(t, config{in: in, settings: func(s *envoy.Settings) { s.Other.TLS = tls }})
				g.router.set(admit(g.admitted("abc")))
				code, body := g.get(http.Header{"X-Forwarded-Proto": {"ftp"}})
				require.Equal(t, http.StatusOK, code, body)
				require.Contains(t, body, `"X-Forwarded-Proto":["`+scheme+`"]`)
			})
		}
	})
}

// Invariant: P5
func TestEachEnvoyTellsPathsAndClientsUnchanged(t *testing.T) {
	inEachEnvoy(t, func(t *testing.T, in inEnvoy) {
		e := startEdgeIn(t, in, echoing)
		for path, behind := range map[string]string{
			"/a//b": "", "/a%2Fb": "", "/a%2fb": "", "/%C3%A9%41": "/%C3%A9A", "/a/%2e%2e/b": "/b", "//a/../b": "//b", "/a;b=c?d=%2F": "", `/a\b`: "/a/b", "/a?b=../c&d=//": "",
		} {
			want := path
			if in == behindEnvoyGateway && behind != "" {
				want = behind // that gateway always normalizes the path
			}
			a := e.answer("GET " + path + " HTTP/1.1\r\nHost: " + e.host("abc") + "\r\nConnection: close\r\nX-Own_Header: kept\r\n\r\n")
			seen := a.seen(t)
			require.Equal(t, want, seen.Path)
			require.Equal(t, e.host("abc"), seen.Host)
			require.Equal(t, []string{"kept"}, seen.Header["X-Own_header"])
			client := strings.Split(strings.Join(seen.Header["X-Forwarded-For"], ","), ",")
			require.Len(t, client, map[bool]int{true: 2, false: 1}[in == behindEnvoyGateway], "the client, and what is in front of Berth")
		}
	})
}
