package stack

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/berth-sandbox/berth/devcluster"
	"github.com/berth-sandbox/berth/devcluster/proc"
	"github.com/berth-sandbox/berth/envoy"
)

// leaderLimit bounds the wait for a leader.
const leaderLimit = time.Minute

// localDomain is the default domain. Browsers and curl resolve any name below it to this
// machine (RFC 6761, section 6.3).
const localDomain = "localhost"

// Options configures a Stack. Only BinDir is required.
type Options struct {
	// BinDir holds the programs allocator and extproc.
	BinDir string
	// Allocators and Gateways are how many to run. Default 1 each.
	Allocators, Gateways int
	// Domain of the sandboxes. Default localhost. With TLS it has two labels or more, because TLS
	// clients accept no wildcard directly below a top-level name.
	Domain string
	// TLS has the gateways serve HTTPS. The certificate is for Domain, the names below it,
	// localhost and 127.0.0.1. Stack.CAFile has its authority.
	TLS bool
	// APITLS has the HTTP API speak TLS too, with the certificate of the gateways. It needs TLS, and the flag
	// --control-tls-dir in AllocatorArgs.
	APITLS bool
	// GatewayHosts are hosts beside Domain at which headers name the sandbox.
	GatewayHosts []string
	// E2BStatuses answers every client as E2B does for sandboxes that are unknown or have ended, and for closed ports.
	E2BStatuses bool
	// Egress adds an egress gateway. Optional.
	Egress *Egress
	// Traces has the Envoys send spans. Optional.
	Traces *envoy.Traces
	// MaxStale is that of routers and allocators. Default 15 min.
	MaxStale time.Duration
	// LeaseDuration of the allocators; renewal and retry follow from it.
	// Default 3 s, so that a killed allocator is replaced soon.
	LeaseDuration time.Duration
	// Kubeconfig, if set, returns the kubeconfig of allocator i, counted from 0. A test
	// may route allocators through a proxy that fails. Default: the cluster's.
	Kubeconfig func(i int) (string, error)
	// ControlOf, if set, gets the address on which allocator i listens for routers and
	// returns the one to which routers connect. A test may put a proxy that fails
	// between the two. Default: the same address.
	ControlOf func(i int, listens netip.AddrPort) (netip.AddrPort, error)
	// AllocatorArgs and RouterArgs are further flags.
	AllocatorArgs, RouterArgs []string
	// AllocatorLaunchArgs, if set, returns further flags each time allocator i is
	// started.
	AllocatorLaunchArgs func(i int) []string
}

// Stack is a running Berth.
type Stack struct {
	Allocators []*Allocator
	Gateways   []*Gateway
	// Egress is nil without Options.Egress.
	Egress *EgressGateway
	// Domain of the sandboxes. The gateways serve the API at api.<Domain>.
	Domain string
	// CAFile has the certificate of the authority that signed the gateways', with Options.TLS.
	CAFile string
}

// Scheme is that of the gateways' URLs.
func (s *Stack) Scheme() string {
	if s.CAFile != "" {
		return "https"
	}
	return "http"
}

// Allocator is one replica.
type Allocator struct {
	*proc.Server
	// API is the URL of its HTTP API, Admin that of its admin listener, and Console that of its web console.
	API, Admin, Console string
	// Control is where routers reach its control server.
	Control netip.AddrPort
}

// Gateway is one Envoy with its router.
type Gateway struct {
	Envoy, Router *proc.Server
	// Successor is another router for the same Envoy, with the same flags. Start does
	// not start it. A test may run both, as a rollout does for a while.
	Successor *proc.Server
	// Addr is the address on which Envoy takes requests: 127.0.0.1 and a free port.
	Addr netip.AddrPort
	// Admin is the URL of the admin listener of Router.
	Admin string
	// EnvoyAdmin sends requests to Envoy's admin socket, which allows the pages in use only.
	EnvoyAdmin *http.Client
	// RouterSocket and AdminSocket are where Envoy finds the router, and the router Envoy.
	RouterSocket, AdminSocket string
}

// Start runs Berth, with pools and pods in the namespace default, and waits until sandboxes can be
// claimed and reached. The processes end with the cluster's supervisor at the latest.
func Start(ctx context.Context, c *devcluster.Cluster, o Options) (_ *Stack, err error) {
	o.Allocators, o.Gateways = cmp.Or(o.Allocators, 1), cmp.Or(o.Gateways, 1)
	o.MaxStale, o.LeaseDuration = cmp.Or(o.MaxStale, 15*time.Minute), cmp.Or(o.LeaseDuration, 3*time.Second)
	o.Domain = cmp.Or(o.Domain, localDomain)
	s := &Stack{Domain: o.Domain}
	defer func() {
		if err != nil {
			limit, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
			defer cancel()
			err = errors.Join(err, s.Stop(limit))
		}
	}()
	envoyBin, err := c.EnvoyBin(ctx)
	if err != nil {
		return nil, err
	}
	// Only programs of this machine call an API below localhost, unless someone leads others to it on purpose. With
	// another domain, which may be the name of a tunnel, an API without keys answers no client of a gateway.
	local := o.Domain == localDomain || strings.HasSuffix(o.Domain, "."+localDomain)
	settings := envoy.Settings{
		API: &envoy.API{Domain: o.Domain, LocalClients: local}, E2BStatuses: o.E2BStatuses, Traces: o.Traces,
	}
	if o.TLS {
		if settings.TLS, s.CAFile, err = newCertificate(filepath.Join(c.Dir(), "gateway-tls"), o.Domain); err != nil {
			return nil, err
		}
	}
	if o.APITLS {
		if settings.API.TLS, err = o.apiTLS(filepath.Join(c.Dir(), "gateway-tls")); err != nil {
			return nil, err
		}
		o.AllocatorArgs = append(slices.Clone(o.AllocatorArgs),
			"--api-tls-cert="+settings.TLS.CertFile, "--api-tls-key="+settings.TLS.KeyFile)
	}
	apis := make([]netip.AddrPort, o.Allocators)
	for i := range apis {
		if apis[i], err = c.FreeAddr(); err != nil {
			return nil, err
		}
		endpoint := envoy.Endpoint{Host: apis[i].Addr().String(), Port: apis[i].Port()}
		settings.API.Endpoints = append(settings.API.Endpoints, endpoint)
	}
	// Envoy first: its port is part of every URL.
	for i := range o.Gateways {
		g, err := newGateway(ctx, c, i, envoyBin, settings)
		if err != nil {
			return nil, err
		}
		s.Gateways = append(s.Gateways, g)
	}
	if err := writeAccessKey(c); err != nil {
		return nil, err
	}
	if o.Egress != nil {
		if s.Egress, err = newEgress(ctx, c, envoyBin); err != nil {
			return nil, err
		}
		o.AllocatorArgs = append(slices.Clone(o.AllocatorArgs), "--egress-proxy=http://"+s.Egress.Addr.String())
	}
	for i := range o.Allocators {
		a, err := newAllocator(c, i, apis[i], fmt.Sprintf("%s://%s:%d", s.Scheme(), o.Domain, s.Gateways[0].Addr.Port()), o)
		if err != nil {
			return nil, err
		}
		s.Allocators = append(s.Allocators, a)
		if err := a.Start(ctx); err != nil {
			return nil, err
		}
	}
	if _, err := s.Leader(ctx); err != nil {
		return nil, err
	}
	for i, g := range s.Gateways {
		if err := g.addRouter(c, i, s.Allocators, o); err != nil {
			return nil, err
		}
		if err := g.Router.Start(ctx); err != nil {
			return nil, err
		}
	}
	if s.Egress != nil {
		if err := s.Egress.startRouter(ctx, c, s.Allocators, o); err != nil {
			return nil, err
		}
	}
	return s, nil
}

// agentImage is that of the agent in pods. A process node runs no image.
const agentImage = "berth.sh/agent:dev"

// accessKeyFile has the key of the sandboxes' tokens.
func accessKeyFile(c *devcluster.Cluster) string { return filepath.Join(c.Dir(), "access.key") }

// writeAccessKey makes a key, unless an earlier Stack on the cluster has made one.
func writeAccessKey(c *devcluster.Cluster) error {
	f, err := os.OpenFile(accessKeyFile(c), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if errors.Is(err, os.ErrExist) {
		return nil
	}
	if err != nil {
		return err
	}
	_, err = f.WriteString(rand.Text() + rand.Text())
	return errors.Join(err, f.Close())
}

func newAllocator(c *devcluster.Cluster, i int, api netip.AddrPort, publicURL string, o Options) (*Allocator, error) {
	addresses := [4]netip.AddrPort{api}
	for j := 1; j < len(addresses); j++ {
		var err error
		if addresses[j], err = c.FreeAddr(); err != nil {
			return nil, err
		}
	}
	name := fmt.Sprintf("allocator-%d", i)
	scheme := "http"
	if o.APITLS {
		scheme = "https"
	}
	a := &Allocator{
		API: scheme + "://" + addresses[0].String(), Control: addresses[1], Admin: "http://" + addresses[2].String(),
		Console: "http://" + addresses[3].String() + "/console/",
	}
	var err error
	if o.ControlOf != nil {
		if a.Control, err = o.ControlOf(i, addresses[1]); err != nil {
			return nil, err
		}
	}
	kubeconfig := c.Kubeconfig()
	if o.Kubeconfig != nil {
		if kubeconfig, err = o.Kubeconfig(i); err != nil {
			return nil, err
		}
	}
	a.Server = &proc.Server{
		Name: name, Supervisor: c.Supervisor(), Log: filepath.Join(c.Dir(), name+".log"),
		Argv: append([]string{
			filepath.Join(o.BinDir, "allocator"),
			"--kubeconfig=" + kubeconfig, "--namespace=default",
			"--public-url=" + publicURL,
			"--api-listen=" + addresses[0].String(), "--control-listen=" + addresses[1].String(),
			"--admin-listen=" + addresses[2].String(), "--console-listen=" + addresses[3].String(),
			"--access-key-file=" + accessKeyFile(c),
			"--agent-image=" + agentImage,
			"--control-advertise=" + a.Control.String(),
			"--max-stale=" + o.MaxStale.String(),
			"--lease-duration=" + o.LeaseDuration.String(), "--lease-renew=" + (o.LeaseDuration * 2 / 3).String(),
			"--lease-retry=" + (o.LeaseDuration / 10).String(),
		}, o.AllocatorArgs...),
		Check: func(ctx context.Context) error { return proc.GetOK(ctx, http.DefaultClient, a.Admin+"/healthz") },
	}
	if o.AllocatorLaunchArgs != nil {
		a.LaunchArgs = func() []string { return o.AllocatorLaunchArgs(i) }
	}
	return a, nil
}

// Leader waits for an allocator that leads and returns it.
func (s *Stack) Leader(ctx context.Context) (*Allocator, error) {
	var leader *Allocator
	ctx, cancel := context.WithTimeout(ctx, leaderLimit)
	defer cancel()
	err := wait.PollUntilContextCancel(ctx, 20*time.Millisecond, true, func(ctx context.Context) (bool, error) {
		for _, a := range s.Allocators {
			if a.Running() && proc.GetOK(ctx, http.DefaultClient, a.Admin+"/leaderz") == nil {
				leader = a
				return true, nil
			}
		}
		return false, nil
	})
	if err != nil {
		return nil, fmt.Errorf("no allocator leads: %w\n%s", err, s.Allocators[0].LogTail())
	}
	return leader, nil
}

func newGateway(
	ctx context.Context, c *devcluster.Cluster, i int, envoyBin string, settings envoy.Settings,
) (g *Gateway, err error) {
	name := fmt.Sprintf("envoy-%d", i)
	addr, free, err := reserve()
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, free()) }()
	// The directory of its sockets tells one gateway from another. It is short, because the
	// path of a Unix socket has at most 107 bytes.
	sockets, err := c.Supervisor().TempDir("", "berth-")
	if err != nil {
		return nil, err
	}
	settings.Listen = addr
	settings.RouterSocket = filepath.Join(sockets, "router.sock")
	settings.AdminSocket = filepath.Join(sockets, "envoy.sock")
	if settings.TLS != nil {
		secret, err := envoy.TLSSecret(settings)
		if err != nil {
			return nil, err
		}
		if err := os.WriteFile(settings.TLS.SecretFile, secret, 0o600); err != nil {
			return nil, err
		}
	}
	if settings.API.TLS != nil {
		secret, err := envoy.APISecret(settings)
		if err != nil {
			return nil, err
		}
		if err := os.WriteFile(settings.API.TLS.SecretFile, secret, 0o600); err != nil {
			return nil, err
		}
	}
	config := filepath.Join(c.Dir(), name+".yaml")
	raw, err := envoy.YAML(settings)
	if err != nil {
		return nil, err
	}
	if err := os.WriteFile(config, raw, 0o644); err != nil {
		return nil, err
	}
	g = &Gateway{
		Addr: addr, EnvoyAdmin: envoy.AdminClient(settings.AdminSocket),
		RouterSocket: settings.RouterSocket, AdminSocket: settings.AdminSocket,
	}
	g.Envoy = &proc.Server{
		Name: name, Supervisor: c.Supervisor(), Log: filepath.Join(c.Dir(), name+".log"),
		Argv:  []string{envoyBin, "-c", config, "--disable-hot-restart", "--concurrency", "2", "--log-level", "warn"},
		Check: func(ctx context.Context) error { return proc.GetOK(ctx, g.EnvoyAdmin, "http://envoy/ready") },
	}
	return g, g.Envoy.Start(ctx)
}

func (g *Gateway) addRouter(c *devcluster.Cluster, i int, allocators []*Allocator, o Options) (err error) {
	control, cidrs := routerPeers(c, allocators)
	router := func(name string) (_ *proc.Server, url string, err error) {
		admin, err := c.FreeAddr()
		if err != nil {
			return nil, "", err
		}
		url = "http://" + admin.String()
		var more []string
		if len(o.GatewayHosts) > 0 {
			more = append(more, "--gateway-hosts="+strings.Join(o.GatewayHosts, ","))
		}
		if o.E2BStatuses {
			more = append(more, "--e2b-statuses")
		}
		return &proc.Server{
			Name: name, Supervisor: c.Supervisor(), Log: filepath.Join(c.Dir(), name+".log"),
			Argv: append([]string{
				filepath.Join(o.BinDir, "extproc"),
				"--domain=" + o.Domain, "--allocator=" + control, "--pod-cidrs=" + cidrs,
				"--socket=" + g.RouterSocket, "--admin-listen=" + admin.String(),
				"--envoy-admin=" + g.AdminSocket, "--max-stale=" + o.MaxStale.String(),
			}, slices.Concat(more, o.RouterArgs)...),
			Check: func(ctx context.Context) error { return proc.GetOK(ctx, http.DefaultClient, url+"/readyz") },
		}, url, nil
	}
	if g.Router, g.Admin, err = router(fmt.Sprintf("router-%d", i)); err != nil {
		return err
	}
	g.Successor, _, err = router(fmt.Sprintf("router-%d-successor", i))
	return err
}

// Stop ends the processes in order: Envoys first, so that no more requests are
// admitted, and allocators last. When ctx ends, the rest is killed. Stop returns the Mistakes
// of the Envoys too.
func (s *Stack) Stop(ctx context.Context) error {
	const grace, look = 5 * time.Second, 15 * time.Second // Envoy's admin is slow on a busy machine
	var errs []error
	for _, g := range s.Gateways {
		looking, cancel := context.WithTimeout(ctx, look)
		errs = append(errs, Mistakes(looking, g.EnvoyAdmin))
		cancel()
		errs = append(errs, g.Envoy.Stop(ctx, grace))
		for _, router := range []*proc.Server{g.Router, g.Successor} {
			if router != nil {
				errs = append(errs, router.Stop(ctx, grace))
			}
		}
	}
	if g := s.Egress; g != nil {
		errs = append(errs, g.Envoy.Stop(ctx, grace))
		if g.Router != nil {
			errs = append(errs, g.Router.Stop(ctx, grace))
		}
	}
	for _, a := range s.Allocators {
		errs = append(errs, a.Stop(ctx, grace))
	}
	return errors.Join(errs...)
}
