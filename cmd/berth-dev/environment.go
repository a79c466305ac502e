package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/berth-sandbox/berth/allocator/kube"
	"github.com/berth-sandbox/berth/api/crd"
	"github.com/berth-sandbox/berth/api/sandboxaccess"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/devcluster"
	"github.com/berth-sandbox/berth/devcluster/stack"
)

const (
	namespace = "default"
	demoPool  = "demo"
	demoWarm  = 3
)

// environment is a cluster with Berth and a pool of demo sandboxes.
type environment struct {
	cluster *devcluster.Cluster
	stack   *stack.Stack
	// gatewayHost is a host at which headers name the sandbox.
	gatewayHost string
}

// binDir is the directory of this program and of Berth's other programs.
func binDir() (string, error) {
	self, err := os.Executable()
	if err != nil {
		return "", err
	}
	dir := filepath.Dir(self)
	for _, name := range []string{"allocator", "extproc", "demo-sandbox", "agent"} {
		if _, err := os.Stat(filepath.Join(dir, name)); err != nil {
			return "", fmt.Errorf("%s: not found beside %s; build all programs with \"make build\"", name, self)
		}
	}
	return dir, nil
}

// shape says what a cluster looks like from outside.
type shape struct {
	Domain      string   `help:"Domain of the sandboxes. Default: localhost, with --tls sandbox.localhost. Browsers and curl resolve names below localhost to this machine."`
	TLS         bool     `name:"tls" help:"The gateways serve HTTPS, with a certificate of an authority of this cluster's own."`
	GatewayHost []string `default:"127.0.0.1" help:"Hosts beside the domain at which headers name the sandbox, as E2B's SDKs do with E2B_SANDBOX_URL."`
	E2BStatuses bool     `name:"e2b-statuses" help:"Answer every client as E2B does for sandboxes that are unknown or have ended, and for closed ports: 502."`
	Replicas    int      `default:"1" help:"How many allocators and gateways to run."`

	CodeInterpreter bool `help:"Make the pool code-interpreter-v1 too, for runCode of E2B's SDKs. It needs Python packages, which the first start installs: minutes."`
}

// check returns the options of the stack.
func (s *shape) check() (stack.Options, error) {
	o := stack.Options{Domain: s.Domain, TLS: s.TLS, GatewayHosts: s.GatewayHost, E2BStatuses: s.E2BStatuses, Allocators: s.Replicas, Gateways: s.Replicas}
	switch {
	case s.Domain == "" && s.TLS:
		o.Domain = "sandbox.localhost"
	case s.TLS && !strings.Contains(s.Domain, "."):
		return o, fmt.Errorf("--domain %s: with --tls it needs two labels, because TLS clients accept no certificate for *.%s: "+
			"use sandbox.%s", s.Domain, s.Domain, s.Domain)
	}
	if s.Replicas < 1 || s.Replicas > 10 {
		return o, fmt.Errorf("--replicas %d: must be 1 to 10", s.Replicas)
	}
	return o, nil
}

// args are the flags that have this shape.
func (s *shape) args() []string {
	return []string{"--domain=" + s.Domain, fmt.Sprintf("--tls=%t", s.TLS), fmt.Sprintf("--e2b-statuses=%t", s.E2BStatuses),
		"--gateway-host=" + strings.Join(s.GatewayHost, ","), fmt.Sprintf("--replicas=%d", s.Replicas),
		fmt.Sprintf("--code-interpreter=%t", s.CodeInterpreter)}
}

// startEnvironment starts a cluster with Berth and the demo pool. It calls step at
// the begin of each step.
func startEnvironment(
	ctx context.Context, dir string, o stack.Options, progress io.Writer, step func(string),
) (_ *environment, err error) {
	e := &environment{gatewayHost: append(o.GatewayHosts, o.Domain)[0]}
	defer func() {
		if err != nil {
			err = errors.Join(err, e.stop())
		}
	}()
	bin, err := binDir()
	if err != nil {
		return nil, err
	}
	step("programs: etcd, kube-apiserver, Envoy")
	if _, _, err := devcluster.ControlPlaneBinaries(ctx, progress); err != nil {
		return nil, err
	}
	if _, err := devcluster.EnvoyBinary(ctx, progress); err != nil {
		return nil, err
	}
	step("cluster: etcd, kube-apiserver, one process node")
	if e.cluster, err = devcluster.Up(ctx, devcluster.Options{
		Dir: dir, Progress: progress, Nodes: 1, NodePath: []string{bin}, CRDs: crd.All(),
	}); err != nil {
		return nil, err
	}
	step("Berth: Envoy, allocator, router")
	o.BinDir = bin
	if e.stack, err = stack.Start(ctx, e.cluster, o); err != nil {
		return nil, err
	}
	step(fmt.Sprintf("pool %q with %d warm pods", demoPool, demoWarm))
	pool := stack.DemoPool(namespace, demoPool, demoWarm)
	pool.Spec.Agent = &v1alpha1.PoolAgent{Enabled: true, Port: sandboxaccess.AgentPort}
	return e, e.createPool(ctx, pool)
}

// createPool makes a pool and waits until it is full.
func (e *environment) createPool(ctx context.Context, pool *v1alpha1.SandboxPool) error {
	clients, err := kube.NewClients(e.cluster.RestConfig(), 0, 0)
	if err != nil {
		return err
	}
	if err := clients.Berth.Post().Namespace(namespace).Resource("sandboxpools").Body(pool).Do(ctx).Error(); err != nil {
		return fmt.Errorf("create pool: %w", err)
	}
	ctx, cancel := context.WithTimeoutCause(ctx, 3*time.Minute, errors.New("the pool was not filled within 3 minutes"))
	defer cancel()
	var p v1alpha1.SandboxPool
	if err := wait.PollUntilContextCancel(ctx, 50*time.Millisecond, true, func(ctx context.Context) (bool, error) {
		err := clients.Berth.Get().Namespace(namespace).Resource("sandboxpools").Name(pool.Name).Do(ctx).Into(&p)
		return err == nil && p.Status.Warm >= pool.Spec.Warm, nil
	}); err != nil {
		return fmt.Errorf("%w; its status: %+v", context.Cause(ctx), p.Status)
	}
	return nil
}

// createInterpreterPool makes the pool of examples/code-interpreter.
func (e *environment) createInterpreterPool(ctx context.Context, progress io.Writer) error {
	pool, err := stack.InterpreterPool(ctx, namespace, filepath.Join(e.cluster.Dir(), "code-interpreter"), progress)
	if err != nil {
		return err
	}
	pool.Spec.Warm = 2
	return e.createPool(ctx, pool)
}

// stop ends Berth and then the cluster. It may be called on a half-started
// environment.
func (e *environment) stop() error {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	var errs []error
	if e.stack != nil {
		errs = append(errs, e.stack.Stop(ctx))
	}
	if e.cluster != nil {
		errs = append(errs, e.cluster.Down(ctx))
	}
	return errors.Join(errs...)
}

// urls are the endpoints that a person may want to try.
func (e *environment) urls() map[string]string {
	return map[string]string{
		"api":               e.stack.Allocators[0].API,
		"gateway":           e.gatewayURL(),
		"allocator metrics": e.stack.Allocators[0].Admin + "/metrics",
		"router admin":      e.stack.Gateways[0].Admin + "/admin/last-active",
	}
}

// gatewayURL is where headers name the sandbox.
func (e *environment) gatewayURL() string {
	return fmt.Sprintf("%s://%s:%d", e.stack.Scheme(), e.gatewayHost, e.stack.Gateways[0].Addr.Port())
}

// variables are those with which programs find the cluster. E2B's SDKs want a key of this form. The
// cluster's API needs none.
func (e *environment) variables() map[string]string {
	all := map[string]string{
		"KUBECONFIG":      e.cluster.Kubeconfig(),
		"BERTH_API_URL":   e.stack.Allocators[0].API,
		"E2B_API_URL":     e.stack.Allocators[0].API,
		"BERTH_GATEWAY":   e.stack.Gateways[0].Addr.String(),
		"E2B_SANDBOX_URL": e.gatewayURL(),
		"E2B_API_KEY":     "e2b_0123456789abcdef",
	}
	if e.stack.CAFile != "" { // of Node, of Python and of curl
		all["E2B_DOMAIN"] = fmt.Sprintf("%s:%d", e.stack.Domain, e.stack.Gateways[0].Addr.Port())
		all["NODE_EXTRA_CA_CERTS"], all["SSL_CERT_FILE"], all["CURL_CA_BUNDLE"] = e.stack.CAFile, e.stack.CAFile, e.stack.CAFile
	}
	return all
}
