package envoy

import (
	"encoding/json"
	"flag"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/pmezard/go-difflib/difflib"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"sigs.k8s.io/yaml"
)

var update = flag.Bool("update", false, "write the golden files anew")

func defaults() Settings {
	return Settings{
		Listen:       netip.MustParseAddrPort("0.0.0.0:8080"),
		RouterSocket: "/run/berth/router.sock",
		AdminSocket:  "/run/berth/envoy-admin.sock",
	}
}

func withHealth() Settings {
	s := defaults()
	s.HealthListen = netip.MustParseAddrPort("0.0.0.0:8082")
	return s
}

func with(change func(*Settings)) Settings {
	s := defaults()
	change(&s)
	return s
}

// golden are the settings that people run Envoy with, and what is rendered.
func golden() map[string]Settings {
	return map[string]Settings{
		// One node; a gateway host, at which headers name the sandbox, needs
		// nothing more.
		"default": defaults(),
		"health":  withHealth(),
		"tls": with(func(s *Settings) {
			s.Listen = netip.MustParseAddrPort("[::]:8443")
			s.TLS = &TLS{CertFile: "/etc/berth/tls/tls.crt", KeyFile: "/etc/berth/tls/tls.key", SecretFile: "/run/berth/envoy-tls.yaml"}
			s.API = &API{Domain: "sandbox.example.com", Endpoints: []Endpoint{{"berth-allocator-api.berth-system.svc", 80}}, TLS: &APITLS{
				CAFile: "/etc/berth/api-ca/ca.crt", ServerName: "allocator.berth.sh", SecretFile: "/run/berth/envoy-api.yaml",
			}}
		}),
		"load-balancer": with(func(s *Settings) {
			s.TrustedHops, s.ProxyProtocol, s.MaxHeap = 1, true, 1<<30
		}),
		"paths": with(func(s *Settings) { s.Paths = true }),
	}
}

func isGolden(t *testing.T, name string, got []byte) {
	t.Helper()
	file := filepath.Join("testdata", name)
	if *update {
		require.NoError(t, os.WriteFile(file, got, 0o644))
	}
	want, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Equal(t, string(want), string(got), "run make golden and read the difference")
}

// The other settings have the difference to the default as their golden file.
func TestBootstrapIsTheGoldenFile(t *testing.T) {
	plain, err := YAML(defaults())
	require.NoError(t, err)
	isGolden(t, "default.yaml", plain)
	for name, settings := range golden() {
		if name == "default" {
			continue
		}
		got, err := YAML(settings)
		require.NoError(t, err)
		text, err := difflib.GetUnifiedDiffString(difflib.UnifiedDiff{
			A: difflib.SplitLines(string(plain)), B: difflib.SplitLines(string(got)),
			FromFile: "default.yaml", ToFile: name, Context: 3,
		})
		require.NoError(t, err)
		isGolden(t, name+".diff", []byte(text))
	}
	check := func(name string, got []byte, err error) {
		require.NoError(t, err)
		isGolden(t, name, got)
	}
	got, err := EgressYAML(egressDefaults())
	check("egress.yaml", got, err)
	secret, err := TLSSecret(golden()["tls"])
	check("tls-secret.yaml", secret, err)
	secret, err = APISecret(golden()["tls"])
	check("api-secret.yaml", secret, err)
}

// Nothing else may differ: the sandboxes' traffic has nothing to do with it.
func TestHealthIsOneListenerAndOneClusterMore(t *testing.T) {
	without, err := Bootstrap(defaults())
	require.NoError(t, err)
	with, err := Bootstrap(withHealth())
	require.NoError(t, err)
	listeners, clusters := with.StaticResources.Listeners, with.StaticResources.Clusters
	require.Equal(t, "health", listeners[len(listeners)-1].Name)
	require.Equal(t, "envoy_admin", clusters[len(clusters)-1].Name)
	with.StaticResources.Listeners, with.StaticResources.Clusters = listeners[:len(listeners)-1], clusters[:len(clusters)-1]
	want, err := protojson.Marshal(without)
	require.NoError(t, err)
	got, err := protojson.Marshal(with)
	require.NoError(t, err)
	require.JSONEq(t, string(want), string(got)) // the order of maps inside packed messages is not fixed
}

func TestInvalidSettingsAreNamed(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*Settings)
		want   string
	}{
		"no listen address":             {func(s *Settings) { s.Listen = netip.AddrPort{} }, "listen address"},
		"health where clients connect":  {func(s *Settings) { s.HealthListen = s.Listen }, "health listen address 0.0.0.0:8080"},
		"relative router socket":        {func(s *Settings) { s.RouterSocket = "router.sock" }, "router socket"},
		"no admin socket":               {func(s *Settings) { s.AdminSocket = "" }, "admin socket"},
		"certificate at no fixed place": {func(s *Settings) { s.TLS = &TLS{CertFile: "c", KeyFile: "/k", SecretFile: "/s"} }, "certificate file \"c\""},
		"key elsewhere":                 {func(s *Settings) { s.TLS = &TLS{CertFile: "/a/c", KeyFile: "/b/k", SecretFile: "/s"} }, "must be in one directory"},
		"no TLS secret file":            {func(s *Settings) { s.TLS = &TLS{CertFile: "/a/c", KeyFile: "/a/k"} }, "TLS secret file"},
		"no domain for the API":         {func(s *Settings) { s.API = &API{Endpoints: []Endpoint{{"a", 1}}} }, "domain \"\""},
		"an API without addresses":      {func(s *Settings) { s.API = &API{Domain: "a.b"} }, "API: at least one address"},
		"local clients elsewhere":       {func(s *Settings) { s.API = &API{Domain: "a.b", LocalClients: true, Endpoints: []Endpoint{{"a", 1}}} }, "must be on loopback"},
		"too many hops":                 {func(s *Settings) { s.TrustedHops = 101 }, "trusted hops 101"},
		"health check elsewhere": {func(s *Settings) {
			s.HealthListen = s.Listen
			s.Other = &OtherGateway{Admin: netip.MustParseAddrPort("127.0.0.1:1")}
		}, "another gateway"},
		"no admin interface": {func(s *Settings) { s.Other = &OtherGateway{} }, "admin interface"},
		"too little memory":  {func(s *Settings) { s.MaxHeap = 1 << 20 }, "max heap 1048576"},
	} {
		t.Run(name, func(t *testing.T) {
			s := defaults()
			c.change(&s)
			_, err := Bootstrap(s)
			require.ErrorContains(t, err, c.want)
		})
	}
}

func TestConnectWindowCoversEveryAttempt(t *testing.T) {
	require.Equal(t, 5*time.Second, ConnectWindow, "the default that design and documentation state")
	require.Greater(t, ConnectWindow, (1+Retries)*ConnectTimeout+Retries*retryBackOffMax)
}

// The objects for other gateways have parts of the bootstrap and nothing else of their own. The golden files have their names
// in their place.
func TestObjectsForOtherGatewaysAreTheGoldenFiles(t *testing.T) {
	plain, tls := defaults(), defaults()
	plain.Other = &OtherGateway{Admin: netip.MustParseAddrPort("127.0.0.1:19000")}
	tls.Other = &OtherGateway{Admin: netip.MustParseAddrPort("127.0.0.1:15000"), TLS: true}
	target := PatchTarget{Namespace: "edge", Gateway: "public", Listener: "sandboxes"}
	later := target
	later.EnvoyListener = "edge/public/first"
	port := FilterTarget{Namespace: "edge", Labels: map[string]string{"istio": "edge"}, Port: 8443, Domain: "sandbox.example.com"}
	for name, c := range map[string]struct {
		settings Settings
		render   func(Settings) ([]byte, error)
	}{
		"envoy-gateway.yaml":     {plain, func(s Settings) ([]byte, error) { return EnvoyPatchPolicy(s, target) }},
		"envoy-gateway-tls.yaml": {tls, func(s Settings) ([]byte, error) { return EnvoyPatchPolicy(s, later) }},
		"istio.yaml":             {plain, func(s Settings) ([]byte, error) { return EnvoyFilter(s, port) }},
		"istio-tls.yaml":         {tls, func(s Settings) ([]byte, error) { return EnvoyFilter(s, port) }},
	} {
		t.Run(name, func(t *testing.T) {
			raw, err := c.render(c.settings)
			require.NoError(t, err)
			again, err := c.render(c.settings)
			require.NoError(t, err)
			require.Equal(t, string(raw), string(again))
			bootstrap, err := Bootstrap(c.settings)
			require.NoError(t, err)
			part := func(m proto.Message) (part any) {
				raw, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(m)
				require.NoError(t, err)
				require.NoError(t, json.Unmarshal(raw, &part))
				return part
			}
			parts := map[string]any{}
			for _, c := range bootstrap.StaticResources.Clusters {
				parts["cluster "+c.Name] = part(c)
			}
			listeners := bootstrap.StaticResources.Listeners
			require.Len(t, listeners, 2)
			parts["listener "+listeners[1].Name] = part(listeners[1])
			parts["connection manager"] = part(listeners[0].FilterChains[0].Filters[0].GetTypedConfig())

			var object any
			require.NoError(t, yaml.Unmarshal(raw, &object))
			var named func(any) any
			named = func(in any) any {
				for name, part := range parts {
					if reflect.DeepEqual(in, part) {
						delete(parts, name)
						return "the " + name
					}
				}
				switch in := in.(type) {
				case map[string]any:
					for key, value := range in {
						in[key] = named(value)
					}
				case []any:
					for i, value := range in {
						in[i] = named(value)
					}
				}
				return in
			}
			rest, err := yaml.Marshal(named(object))
			require.NoError(t, err)
			require.Empty(t, parts, "not in the object")
			costs, _, _ := strings.Cut(string(raw), "apiVersion:")
			isGolden(t, name, append([]byte(costs), rest...))
		})
	}
}
