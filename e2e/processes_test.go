package e2e

import (
	"context"
	"errors"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"k8s.io/client-go/rest"

	"github.com/berth-sandbox/berth/api/crd"
	"github.com/berth-sandbox/berth/devcluster"
	"github.com/berth-sandbox/berth/devcluster/stack"
	"github.com/berth-sandbox/berth/internal/controltls"
)

// processes is a site of Berth's programs as processes, on a devcluster of its
// own.
type processes struct {
	cluster *devcluster.Cluster
	stack   *stack.Stack
}

// processesKey is the API key of all devclusters.
const processesKey = "e2b_0123456789abcdef"

// secure writes an API key and certificates, and returns the flags with which
// allocators and routers use them.
func secure(t *testing.T) (allocator, router []string) {
	t.Helper()
	dir := t.TempDir()
	write := func(name, file string, content []byte) {
		require.NoError(t, os.MkdirAll(filepath.Join(dir, name), 0o700))
		require.NoError(t, os.WriteFile(filepath.Join(dir, name, file), content, 0o600))
	}
	authority, err := controltls.NewAuthority(time.Now())
	require.NoError(t, err)
	for _, role := range []string{controltls.AllocatorName, controltls.RouterName} {
		f, err := authority.Issue(role, time.Now())
		require.NoError(t, err)
		write(role, controltls.CertFile, f.Cert)
		write(role, controltls.KeyFile, f.Key)
		write(role, controltls.CAFile, f.CA)
	}
	write("keys", "suite", []byte(processesKey))
	return []string{"--api-keys-dir=" + filepath.Join(dir, "keys"), "--control-tls-dir=" + filepath.Join(dir, controltls.AllocatorName)},
		[]string{"--control-tls-dir=" + filepath.Join(dir, controltls.RouterName)}
}

// startProcesses starts a devcluster and Berth on it, secured as it must be
// outside loopback.
func startProcesses(t *testing.T, o stack.Options) *processes {
	t.Helper()
	t.Parallel()
	cluster := devcluster.Start(t, devcluster.Options{Nodes: 1, NodePath: []string{binDir}, CRDs: crd.All()})
	o.BinDir = binDir
	allocator, router := secure(t)
	o.AllocatorArgs, o.RouterArgs = append(allocator, o.AllocatorArgs...), append(router, o.RouterArgs...)
	s, err := stack.Start(t.Context(), cluster, o)
	require.NoError(t, err)
	p := &processes{cluster, s}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		if err := s.Stop(ctx); err != nil {
			t.Errorf("stop Berth: %v", err)
		}
		if t.Failed() {
			p.logs(t)
		}
		checkRaces(t, cluster.Dir())
	})
	return p
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

func (p *processes) logs(t *testing.T) {
	files, _ := filepath.Glob(filepath.Join(p.cluster.Dir(), "*.log"))
	for _, f := range files {
		raw, err := os.ReadFile(f)
		if err == nil && !strings.Contains(f, "apiserver") && !strings.Contains(f, "etcd") {
			t.Logf("%s:\n%s", filepath.Base(f), raw[max(0, len(raw)-3000):])
		}
	}
}

// checkRaces fails the test when one of the programs reported a data race.
func checkRaces(t *testing.T, dir string) {
	files, _ := filepath.Glob(filepath.Join(dir, "*.log"))
	for _, f := range files {
		if raw, err := os.ReadFile(f); err == nil && strings.Contains(string(raw), "WARNING: DATA RACE") {
			t.Errorf("%s reports a data race:\n%s", filepath.Base(f), raw)
		}
	}
}
