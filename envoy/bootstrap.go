package envoy

import (
	"fmt"
	"time"

	bootstrapv3 "github.com/envoyproxy/go-control-plane/envoy/config/bootstrap/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	matcherv3 "github.com/envoyproxy/go-control-plane/envoy/type/matcher/v3"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/durationpb"
	"sigs.k8s.io/yaml"
)

// Bootstrap returns Envoy's configuration.
func Bootstrap(s Settings) (*bootstrapv3.Bootstrap, error) {
	s, err := s.withDefaults()
	if err != nil {
		return nil, fmt.Errorf("envoy settings: %w", err)
	}
	b := builder{Settings: s}
	config := &bootstrapv3.Bootstrap{
		// Envoy reloads files only if its node has a name.
		Node:  &corev3.Node{Id: "gateway", Cluster: "berth"},
		Admin: admin(s.AdminSocket),
		StaticResources: &bootstrapv3.Bootstrap_StaticResources{
			Listeners: b.listeners(),
			Clusters:  b.clusters(),
		},
		OverloadManager: b.overload(),
	}
	if b.err != nil {
		return nil, fmt.Errorf("envoy settings: %w", b.err)
	}
	if err := config.ValidateAll(); err != nil {
		return nil, fmt.Errorf("envoy settings: %w", err)
	}
	return config, nil
}

// YAML renders Envoy's configuration. Equal settings give equal bytes.
func YAML(s Settings) ([]byte, error) {
	config, err := Bootstrap(s)
	if err != nil {
		return nil, err
	}
	return render(config)
}

func render(config proto.Message) ([]byte, error) {
	raw, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(config)
	if err != nil {
		return nil, fmt.Errorf("render envoy configuration: %w", err)
	}
	// JSONToYAML sorts the keys and removes protojson's deliberately unstable spacing.
	return yaml.JSONToYAML(raw)
}

// builder keeps the first error of packing messages into Any, so that the configuration can
// be written as one expression.
type builder struct {
	Settings
	err error
}

func (b *builder) any(m proto.Message) *anypb.Any {
	a, err := anypb.New(m)
	if err != nil && b.err == nil {
		b.err = err
	}
	return a
}

// clustersPath is the page of the admin interface that shows open requests.
const clustersPath = "/clusters"

// adminMode lets only the user and group of Envoy connect.
const adminMode = 0o660

// admin is Envoy's admin interface, limited to the pages in use: the router reads /clusters,
// and the health listener forwards the other two. Envoy compares paths including the query.
func admin(socket string) *bootstrapv3.Admin {
	address := pipe(socket)
	address.GetPipe().Mode = adminMode
	paths := []*matcherv3.StringMatcher{exact(clustersPath)}
	for _, path := range healthPaths() {
		withQuery := &matcherv3.StringMatcher{MatchPattern: &matcherv3.StringMatcher_Prefix{Prefix: path + "?"}}
		paths = append(paths, exact(path), withQuery)
	}
	return &bootstrapv3.Admin{Address: address, AllowPaths: paths}
}

func pipe(path string) *corev3.Address {
	return &corev3.Address{Address: &corev3.Address_Pipe{Pipe: &corev3.Pipe{Path: path}}}
}

func seconds(d time.Duration) *durationpb.Duration { return durationpb.New(d) }
