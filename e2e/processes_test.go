package e2e

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/berth-sandbox/berth/allocator/access"
	"github.com/berth-sandbox/berth/allocator/kube"
	"github.com/berth-sandbox/berth/api/crd"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/devcluster"
	"github.com/berth-sandbox/berth/devcluster/proc"
	"github.com/berth-sandbox/berth/devcluster/stack"
	"github.com/berth-sandbox/berth/e2e/harness"
	"github.com/berth-sandbox/berth/internal/controltls"
)

// processes is a site of Berth's programs as processes, on a devcluster.
type processes struct {
	cluster *devcluster.Cluster
	stack   *stack.Stack
}

// processesKey is the API key of all devclusters, of an admin.
const processesKey = "e2b_0123456789abcdef0123456789abcdef01234567"

// limitedTeam is a team of all devclusters that may have one sandbox.
const limitedTeam = "limited"

// secure writes certificates and limits of teams to dir, and returns the flags with which allocators
// and routers of both kinds use them, and allocators the API keys of the namespace default.
func secure(dir string) (allocator, router, egress []string, err error) {
	var errs []error
	write := func(name, file string, content []byte) {
		errs = append(errs, os.MkdirAll(filepath.Join(dir, name), 0o700),
			os.WriteFile(filepath.Join(dir, name, file), content, 0o600))
	}
	authority, err := controltls.NewAuthority(time.Now())
	if err != nil {
		return nil, nil, nil, err
	}
	for _, role := range []string{controltls.AllocatorName, controltls.RouterName, controltls.EgressName} {
		f, err := authority.Issue(role, time.Now())
		if err != nil {
			return nil, nil, nil, err
		}
		write(role, controltls.CertFile, f.Cert)
		write(role, controltls.KeyFile, f.Key)
		write(role, controltls.CAFile, f.CA)
	}
	limits := filepath.Join(dir, "limits.yaml")
	errs = append(errs, os.WriteFile(limits, []byte("named: {"+limitedTeam+": {maxSandboxes: 1}}\n"), 0o600))
	return []string{"--api-keys-namespace=default", "--team-limits=" + limits,
			"--control-tls-dir=" + filepath.Join(dir, controltls.AllocatorName)},
		[]string{"--control-tls-dir=" + filepath.Join(dir, controltls.RouterName)},
		[]string{"--control-tls-dir=" + filepath.Join(dir, controltls.EgressName)}, errors.Join(errs...)
}

// createKey stores an API key.
func createKey(ctx context.Context, c *kube.Clients, namespace, key string, caller access.Caller) error {
	secret, err := access.NewSecret(key, caller)
	if err != nil {
		return err
	}
	_, err = c.Kubernetes.CoreV1().Secrets(namespace).Create(ctx, secret, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) { // Berth was started before on this cluster
		return nil
	}
	return err
}

// upProcesses starts a devcluster and Berth on it. The caller must call down, also after an
// error, if the result is not nil.
func upProcesses(ctx context.Context, o stack.Options) (*processes, error) {
	cluster, err := devcluster.Up(ctx, devcluster.Options{
		Nodes: 1, NodePath: []string{binDir}, CRDs: crd.All(), Progress: os.Stderr,
	})
	if err != nil {
		return nil, err
	}
	p := &processes{cluster: cluster}
	return p, p.start(ctx, o)
}

// start starts Berth, secured as it must be outside loopback.
func (p *processes) start(ctx context.Context, o stack.Options) error {
	o.BinDir = binDir
	allocator, router, egress, err := secure(filepath.Join(p.cluster.Dir(), "secure"))
	if err != nil {
		return err
	}
	clients, err := kube.NewClients(p.restConfig(), 0, 0)
	if err != nil {
		return err
	}
	suite := access.Caller{Key: "suite", Team: "suite", Role: access.Admin}
	if err := createKey(ctx, clients, p.namespace(), processesKey, suite); err != nil {
		return err
	}
	o.AllocatorArgs, o.RouterArgs = append(allocator, o.AllocatorArgs...), append(router, o.RouterArgs...)
	if o.Egress != nil {
		o.Egress = &stack.Egress{RouterArgs: append(egress, o.Egress.RouterArgs...)}
	}
	p.stack, err = stack.Start(ctx, p.cluster, o)
	return err
}

// down ends Berth and its cluster. It fails if a program has reported a data race or has
// panicked.
func (p *processes) down() error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	var errs []error
	if p.stack != nil {
		if err := p.stack.Stop(ctx); err != nil {
			errs = append(errs, fmt.Errorf("stop Berth: %w", err))
		}
	}
	return errors.Join(append(errs, harness.CheckLogs(p.cluster.Dir()), p.cluster.Down(ctx))...)
}

// restore starts what a test has ended, and waits until nothing of the test is left.
func (p *processes) restore(ctx context.Context) error {
	var all []*proc.Server
	for _, a := range p.stack.Allocators {
		all = append(all, a.Server)
	}
	for _, g := range p.stack.Gateways {
		all = append(all, g.Envoy, g.Router)
	}
	for _, process := range all {
		if !process.Running() {
			if err := process.Launch(); err != nil {
				return err
			}
		}
	}
	for _, process := range all {
		if err := process.Wait(ctx, process.Check); err != nil {
			return err
		}
	}
	if err := p.waitLeader(ctx); err != nil {
		return err
	}
	clients, err := kube.NewClients(p.restConfig(), 0, 0)
	if err != nil {
		return err
	}
	return harness.Wait(ctx, func(ctx context.Context) error {
		var left v1alpha1.SandboxPoolList
		err := clients.Berth.Get().Namespace(p.namespace()).Resource("sandboxpools").Do(ctx).Into(&left)
		if err == nil && len(left.Items) > 0 {
			err = fmt.Errorf("%d pools are left", len(left.Items))
		}
		return err
	})
}

func (p *processes) restConfig() *rest.Config { return p.cluster.RestConfig() }
func (p *processes) namespace() string        { return "default" }
func (p *processes) domain() string           { return p.stack.Domain }
func (p *processes) sandboxImage() string     { return "" } // the process node runs the command
func (p *processes) key() string              { return processesKey }

// front connects to the first gateway that takes connections.
func (p *processes) front(ctx context.Context) (net.Conn, error) {
	var errs []error
	for _, g := range p.stack.Gateways {
		c, err := dialerOf(g)(ctx)
		if err == nil {
			return c, nil
		}
		errs = append(errs, err)
	}
	return nil, errors.Join(errs...)
}

// api connects to the last allocator that takes connections. The first one is the first that
// can lead, so the last one often does not.
func (p *processes) api(ctx context.Context) (net.Conn, error) {
	var errs []error
	for i := range p.stack.Allocators {
		a := p.stack.Allocators[len(p.stack.Allocators)-1-i]
		c, err := dialURL(ctx, a.API)
		if err == nil {
			return c, nil
		}
		errs = append(errs, err)
	}
	return nil, errors.Join(errs...)
}

func (p *processes) fronts(context.Context) ([]dialer, error) {
	var all []dialer
	for _, g := range p.stack.Gateways {
		if g.Envoy.Running() {
			all = append(all, dialerOf(g))
		}
	}
	return all, nil
}

// dialerOf connects to one gateway.
func dialerOf(g *stack.Gateway) dialer {
	return func(ctx context.Context) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "tcp", g.Addr.String())
	}
}

func (p *processes) admins(context.Context) ([]dialer, error) {
	var all []dialer
	for _, g := range p.stack.Gateways {
		if g.Router.Running() {
			all = append(all, func(ctx context.Context) (net.Conn, error) { return dialURL(ctx, g.Admin) })
		}
	}
	return all, nil
}

func dialURL(ctx context.Context, address string) (net.Conn, error) {
	u, err := url.Parse(address)
	if err != nil {
		return nil, err
	}
	return (&net.Dialer{}).DialContext(ctx, "tcp", u.Host)
}

func (p *processes) waitLeader(ctx context.Context) error {
	_, err := p.stack.Leader(ctx)
	return err
}

func (p *processes) killLeader(ctx context.Context) error {
	leader, err := p.stack.Leader(ctx)
	if err != nil {
		return err
	}
	return leader.Kill()
}

func (p *processes) killGateway(context.Context) error {
	g := p.stack.Gateways[0]
	return errors.Join(g.Envoy.Kill(), g.Router.Kill())
}

func (p *processes) logs(t *testing.T) { harness.ShowLogs(t, p.cluster.Dir()) }
