package e2e

import (
	"context"
	"fmt"
	"net"
	"os"
	"slices"
	"testing"

	"k8s.io/client-go/rest"
)

// The providers: where the suite finds a cluster.
const (
	// onDevcluster starts Berth's programs as processes of this machine, on one
	// devcluster for most tests, and on others for tests that they would notice.
	onDevcluster = "devcluster"
	// onKubeconfig installs the chart on the cluster of a kubeconfig.
	onKubeconfig = "kubeconfig"
	// onKind creates a kind cluster, loads the images and installs the chart.
	onKind = "kind"
)

// Environment variables of the suite. All but the first two are for a real cluster.
const (
	// envOutage is how long the control plane is away in the test of that, with
	// onDevcluster; 15 s if it is not set.
	envOutage = "BERTH_E2E_OUTAGE"
	// envProvider is one of the providers; devcluster if it is not set.
	envProvider = "BERTH_E2E_PROVIDER"
	// envKubeconfig is the kubeconfig file, for onKubeconfig. There is no default, so that
	// a run without it does not use the cluster that kubectl points at.
	envKubeconfig = "BERTH_E2E_KUBECONFIG"
	// envGateway and envAPI are host:port at which the Services of the gateway
	// and of the API can be reached, for onKubeconfig. Without them connections
	// are forwarded to pods through the API server, past the Services.
	envGateway = "BERTH_E2E_GATEWAY"
	envAPI     = "BERTH_E2E_API"
	// envPodCIDRs are the ranges of pod addresses, with commas, for onKubeconfig.
	envPodCIDRs = "BERTH_E2E_POD_CIDRS"
	// envHelmArgs are further arguments of helm install, for onKubeconfig: where
	// the images are, for example.
	envHelmArgs = "BERTH_E2E_HELM_ARGS"
	// envSandboxImage is the image with the program demo-sandbox.
	envSandboxImage = "BERTH_E2E_SANDBOX_IMAGE"
	// envNodeImage is the image of the kind node; kind's own if it is not set.
	envNodeImage = "KIND_NODE_IMAGE"
	// envArchives is the directory of the image archives, for onKind.
	envArchives = "BERTH_E2E_ARCHIVES"
)

// provider returns the provider that was asked for.
func provider() (string, error) {
	p := os.Getenv(envProvider)
	if p == "" {
		return onDevcluster, nil
	}
	if all := []string{onDevcluster, onKubeconfig, onKind}; !slices.Contains(all, p) {
		return "", fmt.Errorf("%s=%q: must be one of %v", envProvider, p, all)
	}
	return p, nil
}

// dialer makes a connection.
type dialer func(ctx context.Context) (net.Conn, error)

// site is a Berth under test, with one or more allocators and gateways.
type site interface {
	restConfig() *rest.Config
	// namespace is that of the pools.
	namespace() string
	// domain is that of the sandboxes.
	domain() string
	// sandboxImage is what sandboxes run; "" if nothing reads it.
	sandboxImage() string
	// key is an API key.
	key() string
	// front connects a client to the gateways and api to the HTTP API, to any replica.
	front(ctx context.Context) (net.Conn, error)
	api(ctx context.Context) (net.Conn, error)
	// fronts connect to the gateways that run, one each.
	fronts(ctx context.Context) ([]dialer, error)
	// admins connect to the admin listeners of the routers that run, one each.
	admins(ctx context.Context) ([]dialer, error)
	// waitLeader waits until an allocator leads.
	waitLeader(ctx context.Context) error
	// killLeader ends the allocator that leads, without a warning. killGateway
	// ends one gateway that way.
	killLeader(ctx context.Context) error
	killGateway(ctx context.Context) error
	// logs writes the end of Berth's logs to the test's log.
	logs(t *testing.T)
}
