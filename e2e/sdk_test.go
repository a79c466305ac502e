package e2e

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/allocator/access"
	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/devcluster"
	"github.com/berth-sandbox/berth/devcluster/stack"
)

// agentPort is the port on which E2B's SDKs expect their agent.
const agentPort = 49983

// The variables name the API and the gateway, and headers name the sandbox.
func TestStockSDKsWorkOverPlainHTTP(t *testing.T) {
	onThisMachine(t, "does not depend on the cluster")
	e := start(t, 0)
	environment := e.runSDKs(e.overHTTP())
	limited, _ := e.storeKey(access.Caller{Key: e.pool + "-limited", Team: limitedTeam, Role: access.Member})
	e.as(limited, http.MethodGet, "/sandboxes", "") // it is known
	e.eachSDK(newSDKs, "limited", append(environment, "E2B_API_KEY="+limited))
	plain := e.otherPool("plain", 1, func(*v1alpha1.SandboxPoolSpec) {})
	e.eachSDK(newSDKs, "differences", append(environment, "POOL="+plain))
}

// The domain is all that the SDKs know: host names lead to the API and to sandboxes. The API of each replica
// speaks TLS too. Without an allocator the gateway answers.
func TestStockSDKsOverTLSNeedOnlyTheDomain(t *testing.T) {
	all := overTLS
	all.APITLS, all.Allocators, all.E2BStatuses = true, 2, true
	e := startAlone(t, 0, all)
	environment := e.runSDKs(append(e.domainOnly(), "E2B_STATUSES=yes"))
	e.useTools("", environment)
	e.callsOverTLS()
	for _, a := range e.stack.Allocators {
		require.NoError(t, a.Kill())
	}
	e.eachSDK(newSDKs, "busy", environment)
}

// overHTTP returns the environment of a program that knows the URLs of the API and of the gateway.
func (e *env) overHTTP() []string {
	_, gatewayPort, err := net.SplitHostPort(e.address(e.site.front))
	require.NoError(e.t, err)
	return append(os.Environ(), "E2B_API_KEY="+e.site.key(), "E2B_API_URL=http://"+e.address(e.site.api),
		"E2B_SANDBOX_URL=http://"+e.site.domain()+":"+gatewayPort, "PYTHONDONTWRITEBYTECODE=1")
}

// callsOverTLS makes calls to each replica, one of which forwards them, and through the gateway.
func (e *env) callsOverTLS() {
	t := e.t
	t.Helper()
	authority, err := os.ReadFile(e.stack.CAFile)
	require.NoError(t, err)
	roots := x509.NewCertPool()
	require.True(t, roots.AppendCertsFromPEM(authority))
	name := fmt.Sprintf("api.%s:%d", e.stack.Domain, e.gatewayPort())
	dialers := []dialer{e.site.front}
	for _, a := range e.stack.Allocators {
		dialers = append(dialers, func(ctx context.Context) (net.Conn, error) { return dialURL(ctx, a.API) })
	}
	for i, dial := range dialers {
		client := e.clientOf(dial, 0)
		client.Transport.(*http.Transport).TLSClientConfig = &tls.Config{RootCAs: roots, ServerName: "api." + e.stack.Domain}
		call := func(method, path, body string, headers ...string) answer {
			headers = append(headers, "X-API-Key", e.site.key(), "X-Forwarded-Host", "evil.example", "X-Forwarded-Proto", "http")
			a, err := do(t.Context(), client, method, "https://"+name+path, "", body, headers...)
			require.NoError(t, err)
			return a
		}
		var pool openapi.Pool
		size := i + 1
		scaled := call(http.MethodPost, "/v1/pools/"+e.pool+"/scale", fmt.Sprintf(`{"warm":%d}`, size))
		require.Equal(t, http.StatusOK, scaled.code, scaled.body)
		require.NoError(t, json.Unmarshal([]byte(scaled.body), &pool))
		require.Equal(t, size, pool.Spec.Warm)
		e.waitWarm(int32(size))
		s := sandboxOf(t, call(http.MethodPost, "/v2/sandboxes", `{"templateID":"`+e.pool+`"}`, "Origin", "https://"+name))
		host := fmt.Sprintf("%d-%s.%s:%d", stack.DemoPorts()[0], s.SandboxID, e.stack.Domain, e.gatewayPort())
		require.Equal(t, "https://"+host+"/", s.URL)
		preflight := call(http.MethodOptions, "/sandboxes/"+s.SandboxID, "",
			"Origin", "https://page.example", "Access-Control-Request-Method", "DELETE")
		require.Equal(t, http.StatusNoContent, preflight.code, preflight.body)
		require.Equal(t, []string{"*"}, preflight.header["Access-Control-Allow-Origin"])
		require.Equal(t, http.StatusNoContent, call(http.MethodDelete, "/sandboxes/"+s.SandboxID, "").code)
	}
	plain, err := e.callAPI(http.MethodGet, "/sandboxes", "", e.site.key())
	require.NoError(t, err)
	require.Equal(t, http.StatusBadRequest, plain.code, "the API answers plain HTTP")
}

// overTLS is a Berth whose gateway serves sandboxes and the API over TLS.
var overTLS = stack.Options{TLS: true, Domain: "sandbox.localhost"}

// gatewayPort is the port of the gateway of a Berth with these options.
func (e *env) gatewayPort() uint16 { return e.stack.Gateways[0].Addr.Port() }

// domainOnly returns the environment of a program that knows the domain and the authority of such a
// Berth, with these folders of Python packages. What is in sdk/resolve makes names below localhost
// resolvable in Node and Python.
func (e *env) domainOnly(packages ...string) []string {
	resolve, err := filepath.Abs(filepath.Join("sdk", "resolve"))
	require.NoError(e.t, err)
	path := strings.Join(append(packages, resolve), ":")
	return append(os.Environ(),
		fmt.Sprintf("E2B_DOMAIN=%s:%d", e.stack.Domain, e.gatewayPort()), "E2B_API_KEY="+e.site.key(),
		"NODE_EXTRA_CA_CERTS="+e.stack.CAFile, "SSL_CERT_FILE="+e.stack.CAFile,
		"NODE_OPTIONS=--require="+filepath.Join(resolve, "resolve.cjs"), "PYTHONPATH="+path, "PYTHONDONTWRITEBYTECODE=1")
}

// stockSDK is a release of E2B's SDK as its registry has it, and a program in sdk that uses it. What follows
// the names is the program's second argument.
type stockSDK struct {
	version  string
	packages func(name, version string) devcluster.Packages
	program  []string
}

// newSDKs are the newest releases, and oldSDKs two that call the first generation of the API.
var (
	newSDKs = []stockSDK{
		{"2.51.0", devcluster.NPM, []string{"node", "agent.cjs"}},
		{"2.63.0", devcluster.PyPI, []string{"python3", "agent.py"}},
	}
	oldSDKs = []stockSDK{
		{"2.20.1", devcluster.NPM, []string{"node", "agent.cjs"}},
		{"2.40.0", devcluster.PyPI, []string{"python3", "agent.py"}},
	}
)

// runSDKs uses a Berth through E2B's SDKs. It returns the environment of the programs.
func (e *env) runSDKs(environment []string) []string {
	e.t.Helper()
	pool := e.newPool(e.pool+"-sdk", 6)
	pool.Spec.Template.Spec.Containers[0].Args = []string{fmt.Sprintf("--ports=%d,%d", stack.DemoPorts()[0], agentPort)}
	e.createPool(pool)
	environment = append(environment, "POOL="+pool.Name)
	e.eachSDK(slices.Concat(newSDKs, oldSDKs), "", environment)
	return environment
}

// eachSDK runs a part of the programs in sdk; "" is the whole life of sandboxes.
func (e *env) eachSDK(all []stockSDK, part string, environment []string) {
	e.t.Helper()
	for _, c := range all {
		e.t.Run(strings.TrimSpace(c.program[0]+" "+c.version+" "+part), func(t *testing.T) {
			c.run(t, c.installed(t), part, environment)
		})
	}
}

// installed returns the directory with the SDK.
func (c stockSDK) installed(t *testing.T) string { return installed(t, c.packages("e2b", c.version)) }

// run runs a part of the program with the SDK in a directory. The program writes its release and how many steps it
// has made, for the log.
func (c stockSDK) run(t *testing.T, dir, part string, environment []string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	args := append([]string{filepath.Join("sdk", c.program[1]), dir}, c.program[2:]...)
	command := exec.CommandContext(ctx, c.program[0], append(args, part)...)
	command.Env = environment
	out, err := command.CombinedOutput()
	require.NoError(t, err, "%s", out)
	t.Logf("%s", out)
}
