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

	"github.com/stretchr/testify/require"
	"k8s.io/client-go/rest"

	"github.com/berth-sandbox/berth/api/crd"
	"github.com/berth-sandbox/berth/devcluster"
	"github.com/berth-sandbox/berth/devcluster/stack"
	"github.com/berth-sandbox/berth/e2e/harness"
	"github.com/berth-sandbox/berth/internal/controltls"
)

// processes is a site of Berth's programs as processes, on a devcluster.
type processes struct {
	cluster *devcluster.Cluster
	stack   *stack.Stack
}

// processesKey is the API key of all devclusters.
const processesKey = "e2b_0123456789abcdef"

// secure writes an API key and certificates to dir, and returns the flags with which
// allocators and routers use them.
func secure(dir string) (allocator, router []string, err error) {
	var errs []error
	write := func(name, file string, content []byte) {
		errs = append(errs, os.MkdirAll(filepath.Join(dir, name), 0o700),
			os.WriteFile(filepath.Join(dir, name, file), content, 0o600))
	}
	authority, err := controltls.NewAuthority(time.Now())
	if err != nil {
		return nil, nil, err
	}
	for _, role := range []string{controltls.AllocatorName, controltls.RouterName} {
		f, err := authority.Issue(role, time.Now())
		if err != nil {
			return nil, nil, err
		}
		write(role, controltls.CertFile, f.Cert)
		write(role, controltls.KeyFile, f.Key)
		write(role, controltls.CAFile, f.CA)
	}
	write("keys", "suite", []byte(processesKey))
	return []string{"--api-keys-dir=" + filepath.Join(dir, "keys"),
			"--control-tls-dir=" + filepath.Join(dir, controltls.AllocatorName)},
		[]string{"--control-tls-dir=" + filepath.Join(dir, controltls.RouterName)}, errors.Join(errs...)
}

// startProcesses starts a devcluster and Berth on it for a test.
func startProcesses(t *testing.T, o stack.Options) *processes {
	t.Helper()
	p := &processes{cluster: devcluster.Start(t, clusterOptions())}
	require.NoError(t, p.start(t.Context(), o))
	t.Cleanup(func() {
		if err := p.stop(); err != nil {
			t.Error(err)
		}
		if t.Failed() {
			p.logs(t)
		}
	})
	return p
}

func clusterOptions() devcluster.Options {
	return devcluster.Options{Nodes: 1, NodePath: []string{binDir}, CRDs: crd.All()}
}

// running is what startCommon has started. Set by that, read when no test runs any more.
var running *processes

// startCommon starts a devcluster and Berth on it that tests share.
func startCommon() (*processes, error) {
	o := clusterOptions()
	o.Progress = os.Stderr
	cluster, err := devcluster.Up(context.Background(), o)
	if err != nil {
		return nil, err
	}
	running = &processes{cluster: cluster}
	return running, running.start(context.Background(),
		stack.Options{Allocators: releaseReplicas, Gateways: releaseReplicas})
}

// endCommon ends what startCommon has started, if it has.
func endCommon() error {
	if running == nil {
		return nil
	}
	var err error
	if running.stack != nil {
		err = running.stop()
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	return errors.Join(err, running.cluster.Down(ctx))
}

// start starts Berth, secured as it must be outside loopback.
func (p *processes) start(ctx context.Context, o stack.Options) error {
	o.BinDir = binDir
	allocator, router, err := secure(filepath.Join(p.cluster.Dir(), "secure"))
	if err != nil {
		return err
	}
	o.AllocatorArgs, o.RouterArgs = append(allocator, o.AllocatorArgs...), append(router, o.RouterArgs...)
	p.stack, err = stack.Start(ctx, p.cluster, o)
	return err
}

// stop ends Berth. It fails if a program has reported a data race or has panicked.
func (p *processes) stop() error {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	var errs []error
	if err := p.stack.Stop(ctx); err != nil {
		errs = append(errs, fmt.Errorf("stop Berth: %w", err))
	}
	return errors.Join(append(errs, harness.CheckLogs(p.cluster.Dir()))...)
}

func (p *processes) restConfig() *rest.Config { return p.cluster.RestConfig() }
func (p *processes) namespace() string        { return "default" }
func (p *processes) domain() string           { return p.stack.Domain }
func (p *processes) sandboxImage() string     { return "" } // the process node runs the command
func (p *processes) key() string              { return processesKey }

// front goes to the first gateway that takes connections.
func (p *processes) front(ctx context.Context) (net.Conn, error) {
	var errs []error
	for _, g := range p.stack.Gateways {
		c, err := (&net.Dialer{}).DialContext(ctx, "tcp", g.Addr.String())
		if err == nil {
			return c, nil
		}
		errs = append(errs, err)
	}
	return nil, errors.Join(errs...)
}

// api goes to the last allocator that takes connections: with several, that is
// in most cases one that does not lead.
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
			all = append(all, func(ctx context.Context) (net.Conn, error) {
				return (&net.Dialer{}).DialContext(ctx, "tcp", g.Addr.String())
			})
		}
	}
	return all, nil
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
