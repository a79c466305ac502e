package devcluster

import (
	"context"
	"crypto/rand"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"k8s.io/client-go/kubernetes"
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

// prepare chooses addresses, writes keys, tokens and the kubeconfig, and sets etcd,
// apiServer and what reaches them. Both keep their addresses and data when they are
// started again.
func (c *Cluster) prepare(etcdBin, apiServerBin string) error {
	var addrs [3]netip.AddrPort
	for i, preferred := range []uint16{6443, 2379, 2380} {
		var err error
		if addrs[i], err = c.block.freeAddr(preferred); err != nil {
			return err
		}
	}
	host, token := addrs[0].Addr().String(), rand.Text()
	ca, key, err := cert.GenerateSelfSignedCertKey(host,
		[]net.IP{net.ParseIP(serviceIP)}, []string{"kubernetes.default.svc", "kubernetes.default", "kubernetes"})
	if err != nil {
		return fmt.Errorf("make a serving certificate: %w", err)
	}
	serviceAccountKey, err := keyutil.MakeEllipticPrivateKeyPEM()
	if err != nil {
		return fmt.Errorf("make a service account key: %w", err)
	}
	path := func(name string) string { return filepath.Join(c.dir, name) }
	for name, content := range map[string][]byte{
		"apiserver.crt": ca,
		"apiserver.key": key,
		"sa.key":        serviceAccountKey,
		"tokens.csv":    []byte(token + `,admin,uid-admin,"system:masters"` + "\n"),
	} {
		if err := os.WriteFile(path(name), content, 0o600); err != nil {
			return err
		}
	}
	c.config = &rest.Config{Host: "https://" + addrs[0].String(), BearerToken: token,
		TLSClientConfig: rest.TLSClientConfig{CAData: ca}, QPS: -1}
	if c.client, err = kubernetes.NewForConfig(c.config); err != nil {
		return fmt.Errorf("client: %w", err)
	}
	if err := writeKubeconfig(path("kubeconfig"), c.config); err != nil {
		return err
	}
	client, peer := "http://"+addrs[1].String(), "http://"+addrs[2].String()
	c.etcdURL = client
	c.etcd = &proc.Server{
		Name: "etcd", Supervisor: c.sup, Log: path("etcd.log"),
		Argv: []string{etcdBin,
			"--name=d", "--data-dir=" + path("etcd"),
			"--listen-client-urls=" + client, "--advertise-client-urls=" + client,
			"--listen-peer-urls=" + peer, "--initial-advertise-peer-urls=" + peer, "--initial-cluster=d=" + peer,
			// The data need not survive a power failure.
			"--unsafe-no-fsync", "--log-level=warn"},
		Check: func(ctx context.Context) error {
			// A connection that stays open would outlive the check.
			once := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
			return proc.GetOK(ctx, once, client+"/health")
		},
	}
	c.apiServer = &proc.Server{
		Name: "kube-apiserver", Supervisor: c.sup, Log: path("kube-apiserver.log"),
		Argv: []string{apiServerBin,
			"--etcd-servers=" + client,
			"--bind-address=" + host, "--advertise-address=" + host, fmt.Sprintf("--secure-port=%d", addrs[0].Port()),
			// The endpoints of a Service may not have a loopback address.
			"--endpoint-reconciler-type=none",
			"--tls-cert-file=" + path("apiserver.crt"), "--tls-private-key-file=" + path("apiserver.key"),
			"--service-account-issuer=https://kubernetes.default.svc",
			"--service-account-key-file=" + path("sa.key"), "--service-account-signing-key-file=" + path("sa.key"),
			"--token-auth-file=" + path("tokens.csv"), "--authorization-mode=RBAC",
			"--service-cluster-ip-range=" + serviceCIDR, "--allow-privileged",
			// These plugins wait for objects that controllers make, or change pods and
			// nodes in ways that only controllers undo. There are no controllers here.
			"--disable-admission-plugins=ServiceAccount,DefaultTolerationSeconds,TaintNodesByCondition,Priority," +
				"StorageObjectInUseProtection,DefaultStorageClass"},
		Check: func(ctx context.Context) error {
			return c.client.Discovery().RESTClient().Get().AbsPath("/readyz").Do(ctx).Error()
		},
	}
	return nil
}

func writeKubeconfig(file string, config *rest.Config) error {
	const name = "berth"
	k := clientcmdapi.NewConfig()
	k.Clusters[name] = &clientcmdapi.Cluster{Server: config.Host, CertificateAuthorityData: config.CAData}
	k.AuthInfos[name] = &clientcmdapi.AuthInfo{Token: config.BearerToken}
	k.Contexts[name] = &clientcmdapi.Context{Cluster: name, AuthInfo: name, Namespace: "default"}
	k.CurrentContext = name
	if err := clientcmd.WriteToFile(*k, file); err != nil {
		return fmt.Errorf("write the kubeconfig: %w", err)
	}
	return nil
}
