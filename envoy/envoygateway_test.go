package envoy_test

import (
	"bufio"
	"bytes"
	"context"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"text/template"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/devcluster"
	"github.com/berth-sandbox/berth/devcluster/proc"
	"github.com/berth-sandbox/berth/envoy"
)

var envoyGateway = flag.String("envoy.gateway", "", "the program envoy-gateway, see make envoy-gateway")

const (
	// A real Envoy Gateway runs an Envoy with the EnvoyPatchPolicy.
	inRealEnvoyGateway inEnvoy = "of a real Envoy Gateway"
	// A real Envoy Gateway runs an Envoy that forwards to Berth's.
	behindEnvoyGateway inEnvoy = "of Berth, behind a real Envoy Gateway"
)

// Not part of CI, because Envoy Gateway takes minutes to build.
func TestRequestsThroughEnvoyGateway(t *testing.T) {
	if *envoyGateway == "" {
		t.Skip("make envoy-gateway runs it, with the program")
	}
	for name, test := range map[string]func(*testing.T){
		"requests that try to reach another sandbox": TestRequestReachesOnlyThePodOfItsHost,
		"the same over HTTP/2":                       TestHTTP2RequestReachesOnlyThePodOfItsHost,
		"links":                                      TestLinkOpensASandboxInABrowser,
		"paths and clients":                          TestEachEnvoyTellsPathsAndClientsUnchanged,
		"WebSockets":                                 TestWebSocketsOverBothVersionsOfHTTP,
		"events":                                     TestEventsArriveOneByOne,
		"gRPC":                                       TestGRPCStreamsBothWaysWithTrailers,
		"large bodies":                               TestLargeBodiesPassWithFlatMemory,
		"resets":                                     TestRequestReadByASandboxIsNotRetried,
		"a policy":                                   TestPolicyOfAnotherGatewayLeavesTheGuard,
		"looks":                                      TestRouterSeesWhatOtherEnvoysHoldOpen,
		"idle sandboxes":                             TestOpenWebSocketAtAnyGatewayKeepsASandbox,
	} {
		t.Run(name, test)
	}
}

// gatewayConfig is the configuration of an Envoy Gateway without a cluster.
const gatewayConfig = `
apiVersion: gateway.envoyproxy.io/v1alpha1
kind: EnvoyGateway
gateway: {controllerName: gateway.envoyproxy.io/gatewayclass-controller}
logging: {level: {default: info}}
extensionApis: {enableBackend: true, enableEnvoyPatchPolicy: true}
provider:
  type: Custom
  custom:
    resource: {type: File, file: {paths: [<<.Dir>>/objects]}}
    infrastructure: {type: Host, host: {configHome: <<.Dir>>/config, dataHome: <<.Dir>>/data, stateHome: <<.Dir>>/state, runtimeDir: <<.Dir>>/run}}
`

// gatewayObjects are what docs/gateways.md says that Envoy Gateway must be told.
const gatewayObjects = `
apiVersion: gateway.networking.k8s.io/v1
kind: GatewayClass
metadata: {name: envoy-gateway}
spec:
  controllerName: gateway.envoyproxy.io/gatewayclass-controller
  parametersRef: {group: gateway.envoyproxy.io, kind: EnvoyProxy, name: proxy, namespace: default}
---
apiVersion: gateway.envoyproxy.io/v1alpha1
kind: EnvoyProxy
metadata: {name: proxy, namespace: default}
spec:
  provider: {type: Host, host: {envoyVersion: <<.Version>>}}
  bootstrap: {type: Merge, value: 'admin: {address: {socket_address: {address: 127.0.0.1, port_value: <<.Admin>>}}}'}
---
apiVersion: gateway.networking.k8s.io/v1
kind: Gateway
metadata: {name: public, namespace: default}
spec:
  gatewayClassName: envoy-gateway
  listeners: [{name: sandboxes, protocol: HTTP, port: <<.Port>>}, {name: plain, protocol: HTTP, port: <<.Plain>>}]
---
apiVersion: gateway.envoyproxy.io/v1alpha1
kind: Backend
metadata: {name: berth, namespace: default}
spec: {endpoints: [{ip: {address: 127.0.0.1, port: <<.Backend>>}}]}
---
apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata: {name: sandboxes, namespace: default}
spec:
  parentRefs: [{name: public}]
  rules:
  - timeouts: {request: 0s}
    backendRefs: [{group: gateway.envoyproxy.io, kind: Backend, name: berth}]
---
apiVersion: gateway.envoyproxy.io/v1alpha1
kind: ClientTrafficPolicy
metadata: {name: sandboxes, namespace: default}
spec:
  targetRefs: [{group: gateway.networking.k8s.io, kind: Gateway, name: public}]
  path: {disableMergeSlashes: true, escapedSlashesAction: KeepUnchanged}
  headers: {withUnderscoresAction: Allow}
  <<- if .Proxy>>
  proxyProtocol: {optional: false}
  <<- end>>
---
apiVersion: gateway.envoyproxy.io/v1alpha1
kind: BackendTrafficPolicy
metadata: {name: sandboxes, namespace: default}
spec:
  targetRefs: [{group: gateway.networking.k8s.io, kind: HTTPRoute, name: sandboxes}]
  useClientProtocol: true
  circuitBreaker: {maxConnections: 100000, maxPendingRequests: 100000, maxParallelRequests: 100000}
<<- if .Denies>>
---
apiVersion: gateway.envoyproxy.io/v1alpha1
kind: SecurityPolicy
metadata: {name: sandboxes, namespace: default}
spec:
  targetRefs: [{group: gateway.networking.k8s.io, kind: HTTPRoute, name: sandboxes}]
  authorization: {defaultAction: Allow, rules: []}
<<- end>>
`

// realGateway starts Envoy Gateway, whose Envoy serves at the address that it returns, and forwards at g.plain. A backend
// of 0 is a server that no request may reach.
func (g *gateway) realGateway(c config, backend uint16) (addr string) {
	g.Helper()
	bin, err := devcluster.EnvoyBinary(g.Context(), nil)
	require.NoError(g, err)
	dir := filepath.Join(filepath.Dir(g.settings.AdminSocket), "eg")
	link := filepath.Join(dir, "data", "envoy-versions", envoy.Version, "bin")
	for _, sub := range []string{link, filepath.Join(dir, "objects")} {
		require.NoError(g, os.MkdirAll(sub, 0o700))
	}
	require.NoError(g, os.Symlink(bin, filepath.Join(link, "envoy")))
	port, plain := commonPort(g.T, "127.0.0.1"), commonPort(g.T, "127.0.0.1")
	addr, g.plain = fmt.Sprintf("127.0.0.1:%d", port), fmt.Sprintf("127.0.0.1:%d", plain)
	asked := []string{addr, g.plain}
	if backend == 0 {
		asked = asked[:1]
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(g, err)
		backend = netip.MustParseAddrPort(l.Addr().String()).Port()
		g.Cleanup(func() { l.Close() })
	}
	values := map[string]any{
		"Dir": dir, "Version": envoy.Version, "Port": port, "Plain": plain, "Backend": backend, "Proxy": c.attacked, "Denies": c.attacked,
		"Admin": commonPort(g.T, "127.0.0.1"),
	}
	var policy []byte
	if c.in == inRealEnvoyGateway {
		values["Admin"] = g.settings.Other.Admin.Port()
		policy, err = envoy.EnvoyPatchPolicy(g.settings, envoy.PatchTarget{Namespace: "default", Gateway: "public", Listener: "sandboxes"})
		require.NoError(g, err)
	}
	for name, text := range map[string]string{"config.yaml": gatewayConfig, "objects/all.yaml": gatewayObjects} {
		var out bytes.Buffer
		require.NoError(g, template.Must(template.New(name).Delims("<<", ">>").Parse(text)).Execute(&out, values))
		if text == gatewayObjects && policy != nil {
			out.Write(append([]byte("---\n"), policy...))
		}
		require.NoError(g, os.WriteFile(filepath.Join(dir, name), out.Bytes(), 0o600))
	}
	var log output
	g.Cleanup(func() {
		if g.Failed() {
			g.Logf("Envoy Gateway: %s", log.String())
		}
	})
	certs, err := exec.Command(*envoyGateway, "certgen", "--local", "--config-home", filepath.Join(dir, "config")).CombinedOutput()
	require.NoError(g, err, string(certs))
	supervisor, err := proc.New()
	require.NoError(g, err)
	g.Cleanup(func() { require.NoError(g, supervisor.Close()) })
	cmd := exec.Command(*envoyGateway, "server", "--config-path", filepath.Join(dir, "config.yaml"))
	cmd.Stdout, cmd.Stderr = &log, &log
	process, err := supervisor.Start(cmd)
	require.NoError(g, err)
	g.Cleanup(func() { // it ends its Envoy, which is in another group of processes
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		require.NoError(g, process.Stop(ctx, 30*time.Second))
	})
	require.Eventually(g, func() bool {
		select {
		case <-process.Done():
			g.Errorf("Envoy Gateway ended")
			return true
		default:
		}
		return !slices.ContainsFunc(asked, func(addr string) bool { return !berthAnswers(addr, c.attacked) })
	}, 2*time.Minute, 200*time.Millisecond)
	require.False(g, g.Failed())
	return addr
}

// berthAnswers asks for a host that is none.
func berthAnswers(addr string, proxy bool) bool {
	c, err := net.Dial("tcp", addr)
	if err != nil {
		return false
	}
	defer c.Close()
	request := "GET / HTTP/1.1\r\nHost: none.example\r\nConnection: close\r\n\r\n"
	if proxy {
		request = "PROXY TCP4 192.0.2.1 192.0.2.2 1024 80\r\n" + request
	}
	if _, err := io.WriteString(c, request); err != nil {
		return false
	}
	response, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		return false
	}
	defer response.Body.Close()
	return response.Header.Get(envoy.ReasonHeader) != ""
}
