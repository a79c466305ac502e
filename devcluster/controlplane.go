package devcluster

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/client-go/util/cert"
	"k8s.io/client-go/util/keyutil"

	"github.com/berth-sandbox/berth/devcluster/proc"
)

const (
	// apiServerGrace is the time from SIGTERM to SIGKILL. kube-apiserver does not end
	// without etcd, so it is stopped first.
	apiServerGrace = 15 * time.Second
	etcdGrace      = 5 * time.Second

	serviceCIDR = "10.96.0.0/16"
	serviceIP   = "10.96.0.1"
)

// controlPlane is one etcd and one kube-apiserver, without controllers and
// scheduler.
type controlPlane struct {
	sup                *proc.Supervisor
	dir                string
	etcdBin, apiBin    string
	etcdAddr, etcdPeer netip.AddrPort
	apiAddr            netip.AddrPort
	token              string
	ca                 []byte // PEM of the self-signed serving certificate
	check              *http.Client

	mu   sync.Mutex
	etcd *Component
	api  *Component // nil while killed
}

// prepare chooses addresses and writes keys, tokens and the kubeconfig.
func (c *controlPlane) prepare(b *block) error {
	var err error
	for _, a := range []struct {
		addr      *netip.AddrPort
		preferred uint16
	}{{&c.apiAddr, 6443}, {&c.etcdAddr, 2379}, {&c.etcdPeer, 2380}} {
		if *a.addr, err = b.freeAddr(a.preferred); err != nil {
			return err
		}
	}
	c.token = rand.Text()
	var key []byte
	c.ca, key, err = cert.GenerateSelfSignedCertKey(c.apiAddr.Addr().String(),
		[]net.IP{net.ParseIP(serviceIP)}, []string{"kubernetes.default.svc", "kubernetes.default", "kubernetes"})
	if err != nil {
		return fmt.Errorf("make a serving certificate: %w", err)
	}
	serviceAccountKey, err := keyutil.MakeEllipticPrivateKeyPEM()
	if err != nil {
		return fmt.Errorf("make a service account key: %w", err)
	}
	for name, content := range map[string][]byte{
		"apiserver.crt": c.ca,
		"apiserver.key": key,
		"sa.key":        serviceAccountKey,
		"tokens.csv":    []byte(c.token + `,admin,uid-admin,"system:masters"` + "\n"),
	} {
		if err := os.WriteFile(c.path(name), content, 0o600); err != nil {
			return err
		}
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(c.ca)
	// Without keep-alive each check makes a new connection, and no connection is left
	// to close.
	c.check = &http.Client{Transport: &http.Transport{
		TLSClientConfig:   &tls.Config{RootCAs: roots},
		DisableKeepAlives: true,
	}}
	return c.writeKubeconfig()
}

func (c *controlPlane) path(name string) string { return filepath.Join(c.dir, name) }
func (c *controlPlane) kubeconfig() string      { return c.path("kubeconfig") }

func (c *controlPlane) writeKubeconfig() error {
	const name = "berth"
	k := clientcmdapi.NewConfig()
	k.Clusters[name] = &clientcmdapi.Cluster{Server: "https://" + c.apiAddr.String(), CertificateAuthorityData: c.ca}
	k.AuthInfos[name] = &clientcmdapi.AuthInfo{Token: c.token}
	k.Contexts[name] = &clientcmdapi.Context{Cluster: name, AuthInfo: name, Namespace: "default"}
	k.CurrentContext = name
	if err := clientcmd.WriteToFile(*k, c.kubeconfig()); err != nil {
		return fmt.Errorf("write the kubeconfig: %w", err)
	}
	return nil
}

func (c *controlPlane) restConfig() *rest.Config {
	return &rest.Config{
		Host:            "https://" + c.apiAddr.String(),
		BearerToken:     c.token,
		TLSClientConfig: rest.TLSClientConfig{CAData: c.ca},
		QPS:             -1,
	}
}

// startEtcd starts etcd, on the same addresses and data every time, and waits
// until it is ready. It may not be called while etcd runs.
func (c *controlPlane) startEtcd(ctx context.Context) error {
	client, peer := "http://"+c.etcdAddr.String(), "http://"+c.etcdPeer.String()
	etcd, err := startComponent(c.sup, "etcd", c.path("etcd.log"), c.dir, exec.Command(c.etcdBin,
		"--name=d", "--data-dir="+c.path("etcd"),
		"--listen-client-urls="+client, "--advertise-client-urls="+client,
		"--listen-peer-urls="+peer, "--initial-advertise-peer-urls="+peer, "--initial-cluster=d="+peer,
		// The data need not survive a power failure.
		"--unsafe-no-fsync", "--log-level=warn"))
	if err != nil {
		return err
	}
	c.mu.Lock()
	c.etcd = etcd
	c.mu.Unlock()
	return etcd.AwaitReady(ctx, func(ctx context.Context) error { return c.get(ctx, client+"/health", "") })
}

// startAPIServer starts kube-apiserver, at the same address every time, and
// waits until it is ready. If it runs already, it only waits.
func (c *controlPlane) startAPIServer(ctx context.Context) error {
	api, err := c.ensureAPIServer()
	if err != nil {
		return err
	}
	return api.AwaitReady(ctx, func(ctx context.Context) error {
		return c.get(ctx, "https://"+c.apiAddr.String()+"/readyz", c.token)
	})
}

func (c *controlPlane) ensureAPIServer() (*Component, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.api != nil && c.api.State() == nil { // nil: it has not ended
		return c.api, nil
	}
	host, port := c.apiAddr.Addr().String(), c.apiAddr.Port()
	api, err := startComponent(c.sup, "kube-apiserver", c.path("kube-apiserver.log"), c.dir, exec.Command(c.apiBin,
		"--etcd-servers=http://"+c.etcdAddr.String(),
		"--bind-address="+host, "--advertise-address="+host, fmt.Sprintf("--secure-port=%d", port),
		// The endpoints of a Service may not have a loopback address.
		"--endpoint-reconciler-type=none",
		"--tls-cert-file="+c.path("apiserver.crt"), "--tls-private-key-file="+c.path("apiserver.key"),
		"--service-account-issuer=https://kubernetes.default.svc",
		"--service-account-key-file="+c.path("sa.key"), "--service-account-signing-key-file="+c.path("sa.key"),
		"--token-auth-file="+c.path("tokens.csv"), "--authorization-mode=RBAC",
		"--service-cluster-ip-range="+serviceCIDR, "--allow-privileged",
		// These plugins wait for objects that controllers make, or change pods and
		// nodes in ways that only controllers undo. There are no controllers here.
		"--disable-admission-plugins=ServiceAccount,DefaultTolerationSeconds,TaintNodesByCondition,Priority,"+
			"StorageObjectInUseProtection,DefaultStorageClass"))
	if err != nil {
		return nil, err
	}
	c.api = api
	return api, nil
}

func (c *controlPlane) get(ctx context.Context, url, token string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	resp, err := c.check.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, tailBytes))
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", resp.Status, tail(body))
	}
	return err
}

// process returns the process of c.etcd or c.api, nil if there is none.
func (c *controlPlane) process(of **Component) *proc.Process {
	c.mu.Lock()
	defer c.mu.Unlock()
	if *of == nil {
		return nil
	}
	return (*of).Process
}

// signalAPIServer is for SIGSTOP and SIGCONT.
func (c *controlPlane) signalAPIServer(sig syscall.Signal) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.api == nil {
		return errNoAPIServer
	}
	return c.api.Signal(sig)
}

func (c *controlPlane) killAPIServer(ctx context.Context) error {
	c.mu.Lock()
	api := c.api
	c.mu.Unlock()
	if api == nil {
		return errNoAPIServer
	}
	if err := api.Signal(syscall.SIGKILL); err != nil {
		return err
	}
	select {
	case <-api.Done():
	case <-ctx.Done():
		return fmt.Errorf("kill kube-apiserver: %w", context.Cause(ctx))
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.api == api {
		c.api = nil
	}
	return nil
}

func (c *controlPlane) stop(ctx context.Context) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	var errs []error
	if c.api != nil {
		_ = c.api.Signal(syscall.SIGCONT) // a paused process does not act on SIGTERM
		errs = append(errs, c.api.Stop(ctx, apiServerGrace))
	}
	if c.etcd != nil {
		errs = append(errs, c.etcd.Stop(ctx, etcdGrace))
	}
	return errors.Join(errs...)
}
