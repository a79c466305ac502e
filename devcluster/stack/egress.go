package stack

import (
	"context"
	"errors"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"

	"github.com/berth-sandbox/berth/devcluster"
	"github.com/berth-sandbox/berth/devcluster/proc"
	"github.com/berth-sandbox/berth/envoy"
)

// Egress configures an egress gateway.
type Egress struct {
	// RouterArgs are further flags of its router.
	RouterArgs []string
}

// EgressGateway is one Envoy through which pods send requests to others, with its router.
type EgressGateway struct {
	Envoy, Router *proc.Server
	// Addr is the address of the proxy: 127.0.0.1 and a free port.
	Addr netip.AddrPort
	// Admin is the URL of the admin listener of Router.
	Admin string
	// Origin is the certificate of a host that Envoy trusts: origin.example and the names below it.
	Origin *envoy.TLS

	envoyAdmin  *http.Client
	socket      string // of the router
	adminSocket string // of Envoy
}

// newEgress starts the Envoy of an egress gateway. Pods reach it by its address.
func newEgress(ctx context.Context, c *devcluster.Cluster, envoyBin string) (g *EgressGateway, err error) {
	addr, free, err := reserve()
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, free()) }()
	sockets, err := c.Supervisor().TempDir("", "berth-")
	if err != nil {
		return nil, err
	}
	origin, authority, err := newCertificate(filepath.Join(c.Dir(), "egress-tls"), "origin.example")
	if err != nil {
		return nil, err
	}
	g = &EgressGateway{
		Addr: addr, socket: filepath.Join(sockets, "router.sock"), adminSocket: filepath.Join(sockets, "envoy.sock"),
		Origin: origin,
	}
	raw, err := envoy.EgressYAML(envoy.EgressSettings{
		Listen: addr, RouterSocket: g.socket, AdminSocket: g.adminSocket, CAFile: authority,
	})
	if err != nil {
		return nil, err
	}
	config := filepath.Join(c.Dir(), "egress-envoy.yaml")
	if err := os.WriteFile(config, raw, 0o644); err != nil {
		return nil, err
	}
	g.envoyAdmin = envoy.AdminClient(g.adminSocket)
	g.Envoy = &proc.Server{
		Name: "egress-envoy", Supervisor: c.Supervisor(), Log: filepath.Join(c.Dir(), "egress-envoy.log"),
		Argv:  []string{envoyBin, "-c", config, "--disable-hot-restart", "--concurrency", "2", "--log-level", "warn"},
		Check: func(ctx context.Context) error { return proc.GetOK(ctx, g.envoyAdmin, "http://envoy/ready") },
	}
	return g, g.Envoy.Start(ctx)
}

// startRouter starts the router of an egress gateway.
func (g *EgressGateway) startRouter(
	ctx context.Context, c *devcluster.Cluster, allocators []*Allocator, o Options,
) error {
	admin, err := c.FreeAddr()
	if err != nil {
		return err
	}
	g.Admin = "http://" + admin.String()
	control, cidrs := routerPeers(c, allocators)
	g.Router = &proc.Server{
		Name: "egress-router", Supervisor: c.Supervisor(), Log: filepath.Join(c.Dir(), "egress-router.log"),
		Argv: append([]string{
			filepath.Join(o.BinDir, "extproc"), "--mode=Egress", "--allocator=" + control, "--pod-cidrs=" + cidrs,
			"--socket=" + g.socket, "--admin-listen=" + admin.String(), "--envoy-admin=" + g.adminSocket,
		}, o.Egress.RouterArgs...),
		Check: func(ctx context.Context) error { return proc.GetOK(ctx, http.DefaultClient, g.Admin+"/readyz") },
	}
	return g.Router.Start(ctx)
}

// routerPeers are the values of the flags by which a router finds the allocators, and knows the pods.
func routerPeers(c *devcluster.Cluster, allocators []*Allocator) (control, podCIDRs string) {
	var addrs, cidrs []string
	for _, a := range allocators {
		addrs = append(addrs, a.Control.String())
	}
	for _, p := range c.PodCIDRs() {
		cidrs = append(cidrs, p.String())
	}
	return strings.Join(addrs, ","), strings.Join(cidrs, ",")
}
