package envoy

import (
	"bytes"
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"regexp"
	"strconv"
	"text/template"
	"time"

	bootstrapv3 "github.com/envoyproxy/go-control-plane/envoy/config/bootstrap/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"sigs.k8s.io/yaml"

	"github.com/berth-sandbox/berth/api/sandboxaccess"

	// The messages that the templates name.
	_ "github.com/envoyproxy/go-control-plane/envoy/config/trace/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/access_loggers/filters/cel/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/access_loggers/grpc/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/common/matching/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/common/matcher/action/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/header_mutation/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/lua/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/rbac/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/router/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/set_filter_state/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/listener/proxy_protocol/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/ratelimit/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/http/early_header_mutation/header_mutation/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/resource_monitors/downstream_connections/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/resource_monitors/fixed_heap/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/transport_sockets/tls/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/upstreams/http/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/type/matcher/v3"
)

// statusRouterError is Envoy's status for an ext_proc error, before the local reply mapping.
// No other failure has it. Nothing else identifies these errors, because they set no response
// flag.
const statusRouterError = 511

const (
	// guard names the filter behind ext_proc, and its only policy.
	guard = "berth/guard"
	// sandboxRoute is the name of the routes to sandboxes.
	sandboxRoute = "sandbox"
)

// Regular expressions of headers and trailers that only Berth's own parts and proxies may send. Any character but a
// letter or digit counts as the separator between words, because programs that turn names into variables (CGI, WSGI)
// map all of them to "_". An expression matches the whole name. One alternation costs one match for each header.
const (
	berthNames = `x[^a-z0-9]berth([^a-z0-9].*)?`
	envoyNames = `x[^a-z0-9]envoy([^a-z0-9].*)?`
)

// validDestination matches what AppendDestination writes. It matches no destination that Envoy cannot use, because
// Envoy would then use the connection's original destination, which a peer may choose.
const (
	octet            = `(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])`
	writtenIPv6      = `\[([0-9a-f]{4}:){7}[0-9a-f]{4}\]`
	validPort        = `([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])`
	validDestination = `((` + octet + `\.){3}` + octet + `|` + writtenIPv6 + `):` + validPort
)

//go:embed parts.yaml bootstrap.yaml egress.yaml tls-secret.yaml api-secret.yaml othergateway.yaml
var templates embed.FS

// Bootstrap returns Envoy's configuration.
func Bootstrap(s Settings) (*bootstrapv3.Bootstrap, error) {
	var config bootstrapv3.Bootstrap
	if err := read("bootstrap.yaml", s, &config); err != nil {
		return nil, err
	}
	if err := config.ValidateAll(); err != nil {
		return nil, fmt.Errorf("envoy settings: %w", err)
	}
	return &config, nil
}

// YAML renders Envoy's configuration. Equal settings give equal bytes.
func YAML(s Settings) ([]byte, error) {
	if s.Other != nil {
		return nil, errors.New("envoy settings: Other: its Envoy has a bootstrap already")
	}
	config, err := Bootstrap(s)
	if err != nil {
		return nil, err
	}
	return render(config)
}

// TLSSecret renders the file for Settings.TLS.SecretFile.
func TLSSecret(s Settings) ([]byte, error) {
	if s.TLS == nil {
		return nil, errors.New("envoy settings: TLS: not set")
	}
	var secret discoveryv3.DiscoveryResponse
	if err := read("tls-secret.yaml", s, &secret); err != nil {
		return nil, err
	}
	return render(&secret)
}

// APISecret renders the file for Settings.API.TLS.SecretFile.
func APISecret(s Settings) ([]byte, error) {
	if s.API == nil || s.API.TLS == nil {
		return nil, errors.New("envoy settings: API.TLS: not set")
	}
	var secret discoveryv3.DiscoveryResponse
	if err := read("api-secret.yaml", s, &secret); err != nil {
		return nil, err
	}
	return render(&secret)
}

// read executes a template and decodes the result, which must be valid for the type of config.
func read(name string, s Settings, config proto.Message) error {
	s, err := s.withDefaults()
	if err != nil {
		return fmt.Errorf("envoy settings: %w", err)
	}
	return execute(name, s, config)
}

// execute executes a template with valid settings and decodes the result.
func execute(name string, settings any, config proto.Message) error {
	parsed, err := template.New(name).Funcs(functions()).ParseFS(templates, "parts.yaml", name)
	if err != nil {
		return err
	}
	var text bytes.Buffer
	if err := parsed.Execute(&text, settings); err != nil {
		return err
	}
	raw, err := yaml.YAMLToJSONStrict(text.Bytes())
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	if err := protojson.Unmarshal(raw, config); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}

// render writes a configuration without template, comments and defaults.
func render(config proto.Message) ([]byte, error) {
	raw, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(config)
	if err != nil {
		return nil, fmt.Errorf("render envoy configuration: %w", err)
	}
	// JSONToYAML sorts the keys and removes protojson's deliberately unstable spacing.
	return yaml.JSONToYAML(raw)
}

// functions are what the templates use besides the settings.
func functions() template.FuncMap {
	value := func(v any) func() any { return func() any { return v } }
	seconds := func(d time.Duration) func() any { return value(fmt.Sprint(d.Seconds(), "s")) }
	return template.FuncMap{
		"namespace": value(MetadataNamespace), "dst": value(MetadataDst), "id": value(MetadataID), "reply": value(MetadataReply), "tls": value(MetadataTLS),
		"accessToken": value(sandboxaccess.TokenHeader), "agentToken": value(sandboxaccess.AgentHeader),
		"agentPort":    value(sandboxaccess.AgentPort),
		"accessCookie": value(sandboxaccess.CookieName), "accessHeader": value(CookieHeader),
		"keyHeader": value(sandboxaccess.KeyHeader), "keyPrefix": value(sandboxaccess.KeyPrefix), "accessKey": value(KeyHeader),
		"accessPath": value(sandboxaccess.LinkPath), "accessLink": value(LinkHeader),
		// upstreams are the suffixes of the clusters of pods: TLS to the pod, and none.
		"upstreams": value([]string{"_tls", ""}),
		"podTLS": func(suffix, protocol string) any {
			return struct {
				TLS      bool
				Protocol string
			}{suffix != "", protocol}
		},
		"reasonHeader": value(ReasonHeader), "e2bID": value(headerE2BID),
		"berthNames": value(berthNames), "envoyNames": value(envoyNames), "validDestination": value(validDestination),
		"connectTimeout": seconds(ConnectTimeout), "retries": value(Retries),
		"backOffBase": seconds(retryBackOffBase), "backOffMax": seconds(retryBackOffMax),
		"messageTimeout": seconds(MessageTimeout), "maxMessageTimeout": seconds(MaxHold + MessageTimeout),
		"routerError": value(statusRouterError),
		// connectionBuffer bounds what Envoy keeps for a peer that does not read. Bodies of 64 KB and
		// more cost a fifth less CPU than with 32 KB, and more than this saves nothing.
		"connectionBuffer": value(128 << 10),
		// egressBuffer is the same at an egress gateway, where each connection of a sandbox may have one to an origin, and
		// both peers may be hostile. See EgressConnectionMemory.
		"egressBuffer": value(16 << 10),
		// maxHeaders bounds the number of headers of a request and of an answer.
		"maxHeaders": value(200),
		// Other pages of the admin interface can change Envoy or show data of clients.
		"healthPages": value([]string{"/ready", "/stats/prometheus"}),
		// operatorPages change nothing, and have no private key.
		"operatorPages": value([]string{"/config_dump", "/server_info"}),
		"drainPages":    value([]string{drainPage, resumePage}),
		"lookPages":     value([]string{"/clusters"}),
		"pages": func(name string, pages []string) any {
			return struct {
				Name  string
				Pages []string
			}{name, pages}
		},
		"replies": replies, "egressReplies": egressReplies,
		"peerHeader": value(PeerHeader), "schemeHeader": value(SchemeHeader), "incarnation": value(MetadataIncarnation),
		"peerKey": value(PeerKey), "portKey": value(PortKey), "egressAccept": seconds(egressAccept),
		// egressUpstreamIdle is how long a connection with TLS to an origin waits for the next request of its sandbox. It
		// takes memory and does not count as one of the sandbox.
		"egressUpstreamIdle":   value("5s"),
		"egressConnectTimeout": seconds(egressConnectTimeout), "egressIdle": seconds(EgressIdle),
		"egressStreams": value(egressStreams), "egressCountsAge": seconds(EgressCountsAge), "egressLogFlush": seconds(egressLogFlush),
		"egressPing": seconds(egressPing), "egressPingTimeout": seconds(egressPingTimeout),
		// egressRoutes are the suffixes of the clusters of origins, and whether their requests lack MetadataTLS.
		"egressRoutes": value(map[string]bool{"_tls": false, "": true}),
		"guard":        value(guard), "sandboxRoute": value(sandboxRoute),
		"apiRoute": value(apiRoute), "apiClusters": apiClusters, "apiIdle": seconds(apiIdle), "apiRequests": value(apiRequests),
		"quoteMeta": regexp.QuoteMeta,
		"isGRPC":    value(isGRPC),
		"directory": filepath.Dir,
		"json": func(text string) (string, error) {
			raw, err := json.Marshal(text)
			return string(raw), err
		},
		// match has the values of the template metadata.
		"match": func(key, regex string) struct{ Key, Regex string } { return struct{ Key, Regex string }{key, regex} },
	}
}

// AppendDestination appends an address in the form that the guard accepts in MetadataDst. IPv6 is
// written without abbreviation, so that a simple pattern matches only valid addresses.
func AppendDestination(b []byte, a netip.AddrPort) []byte {
	if !a.Addr().Is6() {
		return a.AppendTo(b)
	}
	b = append(append(b, '['), a.Addr().StringExpanded()...)
	return strconv.AppendUint(append(b, "]:"...), uint64(a.Port()), 10)
}
