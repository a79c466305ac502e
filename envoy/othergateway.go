package envoy

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"text/template"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"sigs.k8s.io/yaml"
)

// OtherGateway is a gateway that the cluster has, whose Envoy serves the sandboxes itself. A router runs beside it.
type OtherGateway struct {
	// TLS: the gateway ends TLS for the sandboxes.
	TLS bool
	// Admin is where its Envoy has the admin interface, on loopback.
	Admin netip.AddrPort
}

// PatchTarget is a listener of a Gateway of Envoy Gateway. The names are names of Kubernetes, but EnvoyListener.
type PatchTarget struct {
	Namespace, Gateway, Listener string
	// EnvoyListener is what Envoy calls the listener of the port. Empty: namespace/gateway/listener, which it is called
	// if Listener is the first one of the Gateway with that port.
	EnvoyListener string
}

// FilterTarget is a port of a gateway of Istio. Namespace is a name of Kubernetes.
type FilterTarget struct {
	Namespace string
	// Labels select the pods of the gateway.
	Labels map[string]string
	// Port is the one at which Envoy listens.
	Port uint16
	// Domain of the sandboxes, in lower case. With TLS the gateway has the host *.<Domain>.
	Domain string
}

// EnvoyPatchPolicy returns Settings.Other as one object for Envoy Gateway, in YAML. It begins with comments that say what
// it costs. Equal arguments give equal bytes.
func EnvoyPatchPolicy(s Settings, to PatchTarget) ([]byte, error) {
	if to.EnvoyListener == "" {
		to.EnvoyListener = to.Namespace + "/" + to.Gateway + "/" + to.Listener
	}
	return otherGateway("EnvoyPatchPolicy", s, to)
}

// EnvoyFilter returns Settings.Other as one object for Istio, as EnvoyPatchPolicy does.
func EnvoyFilter(s Settings, to FilterTarget) ([]byte, error) {
	return otherGateway("EnvoyFilter", s, to)
}

// part is a part of the configuration, in JSON.
type part struct{ Type, Name, JSON string }

// otherGateway executes the template of an object with what the Envoy of another gateway needs: all clusters, the
// listener for looks, and the connection manager with its routes.
func otherGateway(kind string, s Settings, to any) ([]byte, error) {
	if s.Other == nil {
		return nil, errors.New("envoy settings: Other: not set")
	}
	config, err := Bootstrap(s)
	if err != nil {
		return nil, err
	}
	values := struct {
		Settings
		Version             string
		To                  any
		Clusters, Listeners []part
		Filter, Manager     string
	}{Settings: s, Version: Version, To: to}
	var errs []error
	text := func(m proto.Message) string {
		raw, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(m)
		errs = append(errs, err)
		return string(raw)
	}
	typeURL := func(m proto.Message) string {
		return "type.googleapis.com/" + string(m.ProtoReflect().Descriptor().FullName())
	}
	for _, c := range config.StaticResources.Clusters {
		values.Clusters = append(values.Clusters, part{typeURL(c), c.Name, text(c)})
	}
	listeners := config.StaticResources.Listeners
	for _, l := range listeners[1:] {
		values.Listeners = append(values.Listeners, part{typeURL(l), l.Name, text(l)})
	}
	manager := listeners[0].FilterChains[0].Filters[0]
	values.Filter, values.Manager = manager.Name, text(manager.GetTypedConfig())
	if err := errors.Join(errs...); err != nil {
		return nil, fmt.Errorf("render envoy configuration: %w", err)
	}
	parsed, err := template.New("").Funcs(functions()).ParseFS(templates, "othergateway.yaml")
	if err != nil {
		return nil, err
	}
	var head, object bytes.Buffer
	if err := errors.Join(parsed.ExecuteTemplate(&head, "costs", values), parsed.ExecuteTemplate(&object, kind, values)); err != nil {
		return nil, err
	}
	raw, err := yaml.YAMLToJSONStrict(object.Bytes())
	if err == nil {
		raw, err = yaml.JSONToYAML(raw)
	}
	if err != nil {
		return nil, fmt.Errorf("othergateway.yaml: %w", err)
	}
	return append(head.Bytes(), raw...), nil
}
