package main

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"regexp"
	"slices"

	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/berth-sandbox/berth/envoy"
)

// otherGatewayFlags are those of berth envoy-config that describe a gateway which the cluster has.
type otherGatewayFlags struct {
	For              *string           `enum:"envoy-gateway,istio" help:"Print a part of the configuration, for the Envoy of a gateway that the cluster has: an EnvoyPatchPolicy for Envoy Gateway, or an EnvoyFilter for Istio. Its first lines say what it costs."`
	GatewayNamespace string            `placeholder:"NAMESPACE" help:"With --for: namespace of that gateway."`
	GatewayTLS       bool              `name:"gateway-tls" help:"With --for: that gateway ends TLS for the sandboxes."`
	GatewayAdmin     string            `placeholder:"IP:PORT" help:"With --for: the admin interface of its Envoy, on loopback. Default: 127.0.0.1:19000 with envoy-gateway, 127.0.0.1:15000 with istio."`
	Gateway          string            `placeholder:"NAME" help:"With --for=envoy-gateway: name of the Gateway."`
	GatewayListener  string            `placeholder:"NAME" help:"With --for=envoy-gateway: name of its listener for the sandboxes."`
	EnvoyListener    string            `placeholder:"NAME" help:"With --for=envoy-gateway: what Envoy calls the listener of that port. Default: NAMESPACE/GATEWAY/LISTENER. Another listener of the Gateway stands there if it is the first one with the port. With the flag XDSNameSchemeV2 of Envoy Gateway it is tcp-PORT."`
	GatewayLabels    map[string]string `mapsep:"," placeholder:"NAME=VALUE" help:"With --for=istio: labels of the gateway's pods, comma-separated."`
	GatewayPort      uint16            `placeholder:"PORT" help:"With --for=istio: the port at which its Envoy listens, which may differ from that of its Service."`
}

// envoyListenerName matches the names of Envoy's listeners in Envoy Gateway.
var envoyListenerName = regexp.MustCompile(`^[a-z0-9]([a-z0-9./-]*[a-z0-9])?$`)

// print returns the object for the other gateway.
func (f otherGatewayFlags) print(c *envoyConfigCommand, settings envoy.Settings) ([]byte, error) {
	isEnvoyGateway := *f.For == "envoy-gateway"
	var errs []error
	check := func(ok bool, flag string, value any, must string) {
		if !ok {
			errs = append(errs, fmt.Errorf("--%s %q: %s", flag, fmt.Sprint(value), must))
		}
	}
	name := func(flag, value string) {
		check(len(validation.IsDNS1123Subdomain(value)) == 0, flag, value, "must be the name of an object of Kubernetes, with --for="+*f.For)
	}
	unused := map[string]bool{
		"listen": c.Listen != defaultListen, "health-listen": c.HealthListen != "", "tls-dir": c.TLSDir != "", "proxy-protocol": c.ProxyProtocol,
		"api": len(c.API) > 0, "api-ca": c.APICA != "", "mcp": len(c.MCP) > 0, "max-heap": c.MaxHeap != 0,
		"gateway": f.Gateway != "" && !isEnvoyGateway, "gateway-listener": f.GatewayListener != "" && !isEnvoyGateway,
		"envoy-listener": f.EnvoyListener != "" && !isEnvoyGateway,
		"gateway-labels": len(f.GatewayLabels) > 0 && isEnvoyGateway, "gateway-port": f.GatewayPort != 0 && isEnvoyGateway,
	}
	for _, flag := range slices.Sorted(maps.Keys(unused)) {
		if unused[flag] {
			errs = append(errs, fmt.Errorf("--%s: has no meaning with --for=%s", flag, *f.For))
		}
	}
	admin, err := netip.ParseAddrPort(cmp.Or(f.GatewayAdmin, map[bool]string{true: "127.0.0.1:19000", false: "127.0.0.1:15000"}[isEnvoyGateway]))
	check(err == nil && admin.Addr().IsLoopback() && admin.Port() != 0, "gateway-admin", f.GatewayAdmin, "must be ip:port on loopback")
	settings.Other = &envoy.OtherGateway{TLS: f.GatewayTLS, Admin: admin}
	name("gateway-namespace", f.GatewayNamespace)
	if isEnvoyGateway {
		name("gateway", f.Gateway)
		name("gateway-listener", f.GatewayListener)
		check(f.EnvoyListener == "" || envoyListenerName.MatchString(f.EnvoyListener), "envoy-listener", f.EnvoyListener, "must be a name as namespace/gateway/listener, or tcp-80")
		if err := errors.Join(errs...); err != nil {
			return nil, err
		}
		return envoy.EnvoyPatchPolicy(settings, envoy.PatchTarget{
			Namespace: f.GatewayNamespace, Gateway: f.Gateway, Listener: f.GatewayListener, EnvoyListener: f.EnvoyListener,
		})
	}
	check(len(f.GatewayLabels) > 0, "gateway-labels", "", "must have the labels of the gateway's pods, with --for=istio")
	for label, value := range f.GatewayLabels {
		check(len(validation.IsQualifiedName(label)) == 0 && len(validation.IsValidLabelValue(value)) == 0, "gateway-labels", label+"="+value, "must be a label of Kubernetes")
	}
	check(f.GatewayPort != 0, "gateway-port", f.GatewayPort, "must be 1 to 65535, with --for=istio")
	if f.GatewayTLS {
		name("domain", c.Domain)
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return envoy.EnvoyFilter(settings, envoy.FilterTarget{
		Namespace: f.GatewayNamespace, Labels: f.GatewayLabels, Port: f.GatewayPort, Domain: c.Domain,
	})
}
