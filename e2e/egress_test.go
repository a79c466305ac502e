package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/api/sandboxaccess"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/devcluster/stack"
	"github.com/berth-sandbox/berth/e2e/harness"
)

// caller asks the proxy of its environment from the address of its pod, as every program in a container does. "get"
// prints the status and the answer. "tunnel" makes the file of the fourth argument when the tunnel is open, and waits
// until it is closed.
const caller = `
import base64, os, socket, sys, urllib.parse
ip, what, target = sys.argv[1:4]
proxy = urllib.parse.urlsplit(os.environ["HTTP_PROXY"])
credential = base64.b64encode(f"{proxy.username}:{proxy.password}".encode()).decode()
if len(sys.argv) > 5:
    credential = sys.argv[5]
c = socket.create_connection((proxy.hostname, proxy.port), timeout=60, source_address=(ip, 0))
line = f"GET http://{target}/ HTTP/1.1" if what == "get" else f"CONNECT {target} HTTP/1.1"
head = f"{line}\r\nHost: {target}\r\nProxy-Authorization: Basic {credential}\r\n"
c.sendall((head + ("Connection: close\r\n" if what == "get" else "") + "\r\n").encode())
got = b""
while b"\r\n\r\n" not in got or what == "get":
    part = c.recv(65536)
    if not part:
        break
    got += part
print(got.decode())
if what == "tunnel" and b" 200 " in got[:15]:
    open(sys.argv[4], "w").close()
    c.settimeout(None)
    try:
        while c.recv(65536):
            pass
    except ConnectionResetError:
        pass
    print("closed")
`

var loopback = netip.AddrFrom4([4]byte{127, 0, 0, 1})

// egressEnv is a Berth with an egress gateway. Every name is that of one server on this machine.
type egressEnv struct {
	*env
	pool string
	port string // of the server
}

func startEgress(t *testing.T) *egressEnv {
	t.Helper()
	onThisMachine(t, "the names of its hosts are those of a name server of the test")
	server := httptest.NewServer(http.HandlerFunc(answerForHost))
	t.Cleanup(server.Close)
	at, err := url.Parse(server.URL)
	require.NoError(t, err)
	e := &egressEnv{port: at.Port()}
	e.env = startDamaging(t, owners, 0, stack.Options{Egress: &stack.Egress{
		RouterArgs: []string{"--outside-cidrs=127.0.0.1/32", "--name-server=" + harness.NameServer(t, loopback, nil)},
	}})
	e.pool = e.otherPool("egress", 2, func(s *v1alpha1.SandboxPoolSpec) {
		s.Agent = &v1alpha1.PoolAgent{Enabled: true, Port: sandboxaccess.AgentPort}
		s.Egress = &v1alpha1.PoolEgress{Mode: v1alpha1.EgressGateway, Ports: []int32{portOf(t, at)}}
	})
	return e
}

func answerForHost(w http.ResponseWriter, r *http.Request) {
	_, _ = fmt.Fprintf(w, "server for %s, %d credentials", r.Host, len(r.Header.Values("Proxy-Authorization")))
}

func portOf(t *testing.T, at *url.URL) int32 {
	t.Helper()
	addr, err := net.ResolveTCPAddr("tcp", at.Host)
	require.NoError(t, err)
	return int32(addr.Port)
}

// claimed is a sandbox with these rules, and the address of its pod.
func (e *egressEnv) claimed(network string) (openapi.Sandbox, string) {
	e.t.Helper()
	s, _ := e.claimOf(e.pool, `"network":`+network)
	return s, e.address(s)
}

func (e *egressEnv) address(s openapi.Sandbox) (ip string) {
	e.t.Helper()
	e.eventually(func() error {
		record, err := e.record(s.SandboxID)
		ip = record.Spec.PodIP
		return err
	})
	return ip
}

// call runs the caller in a sandbox and returns what it prints.
func (e *egressEnv) call(s openapi.Sandbox, args ...string) string {
	e.t.Helper()
	r := e.command(s, "", false, append([]string{"python3", "-c", caller}, args...)...)
	require.NoError(e.t, r.err)
	return r.out
}

func (e *egressEnv) allows(s openapi.Sandbox, ip, host string) {
	e.t.Helper()
	out := e.call(s, ip, "get", host+":"+e.port)
	require.Contains(e.t, out, "HTTP/1.1 200")
	require.Contains(e.t, out, "server for "+host+":"+e.port+", 0 credentials")
}

func (e *egressEnv) refuses(s openapi.Sandbox, ip, host string, more ...string) {
	e.t.Helper()
	for _, what := range []string{"get", "tunnel"} {
		out := e.call(s, append([]string{ip, what, host + ":" + e.port}, more...)...)
		require.Contains(e.t, out, "HTTP/1.1 403", host)
		require.NotContains(e.t, out, "server for")
	}
}

// mayReach has a sandbox reach these names only.
func (e *egressEnv) mayReach(s openapi.Sandbox, names ...string) (code int) {
	e.t.Helper()
	body, err := json.Marshal(map[string][]string{"allowOut": append([]string{}, names...), "denyOut": {"0.0.0.0/0"}})
	require.NoError(e.t, err)
	return e.api(http.MethodPut, "/sandboxes/"+s.SandboxID+"/network", string(body)).code
}

// Invariant: P35
func TestSandboxReachesWhatItsRulesAllow(t *testing.T) {
	e := startEgress(t)
	s, ip := e.claimed(`{"allowOut":["ok.example.com","*.wild.example.com"],"denyOut":["0.0.0.0/0"]}`)
	e.allows(s, ip, "ok.example.com")
	e.allows(s, ip, "a.b.wild.example.com")
	for _, host := range []string{
		"other.example.com", "wild.example.com", "127.0.0.1", "2130706433", "[::1]", "169.254.169.254",
	} {
		e.refuses(s, ip, host)
	}
	other, otherIP := e.claimed(`{}`)
	e.allows(other, otherIP, "other.example.com")
	e.refuses(s, otherIP, "ok.example.com")                 // from the address of another sandbox
	e.refuses(other, otherIP, "ok.example.com", "", "eDp5") // with no credential of its own
	require.Contains(t, e.bash(s, "", "echo $https_proxy").out, s.SandboxID)
	e.warmPodsReachNothing(s)

	require.Equal(t, http.StatusNoContent, e.mayReach(s, "other.example.com"))
	e.refuses(s, ip, "ok.example.com")
	e.allows(s, ip, "other.example.com")
	require.Equal(t, http.StatusBadRequest, e.mayReach(s, "no name"))
	e.allows(s, ip, "other.example.com")
	e.tokenIsInNoObject(s)
}

// Invariant: P39
func TestDiagnosticsShowWhatLeftASandbox(t *testing.T) {
	e := startEgress(t)
	s, ip := e.claimed(`{"allowOut":["ok.example.com"],"denyOut":["0.0.0.0/0"]}`)
	other, _ := e.claimed(`{}`)
	e.allows(s, ip, "ok.example.com")
	e.refuses(s, ip, "other.example.com")
	diagnosed := func(s openapi.Sandbox) openapi.SandboxEgress {
		a := e.api(http.MethodGet, "/v1/sandboxes/"+s.SandboxID+"/diagnostics", "")
		require.Equal(t, http.StatusOK, a.code, a.body)
		var d openapi.SandboxDiagnostics
		require.NoError(t, json.Unmarshal([]byte(a.body), &d))
		require.NotNil(t, d.Egress)
		return *d.Egress
	}
	var got openapi.SandboxEgress
	e.eventually(func() error {
		if got = diagnosed(s); got.SentBytes == 0 {
			return errors.New("no bytes yet")
		}
		return nil
	})
	require.Equal(t, []int64{1, 2, 0}, []int64{got.Admitted, got.Refused, got.Open})
	require.Less(t, got.SentBytes, int64(1000))
	require.NotZero(t, got.ReceivedBytes)
	require.Equal(t, []int{1, 0}, []int{got.Gateways, got.GatewaysSilent})
	require.Equal(t, &openapi.EgressRules{Allow: []string{"ok.example.com"}, Deny: []string{"0.0.0.0/0"}}, got.Claim)
	require.Equal(t, e.port, strings.Trim(fmt.Sprint(got.Ports), "[]"))
	require.Len(t, got.Destinations, 2)
	refused, reached := got.Destinations[0], got.Destinations[1]
	require.Equal(t, []any{"other.example.com", "egress_refused", int64(2)},
		[]any{refused.Host, refused.Reason, refused.Count})
	require.Equal(t, []any{"ok.example.com", "", int64(1)}, []any{reached.Host, reached.Reason, reached.Count})
	require.WithinDuration(t, time.Now(), reached.LastAt, 5*time.Minute)
	require.Zero(t, diagnosed(other).Admitted)

	require.NoError(t, e.stack.Egress.Router.Kill())
	e.eventually(func() error {
		if got = diagnosed(s); got.Gateways != got.GatewaysSilent {
			return errors.New("the gateway that was killed answers")
		}
		return nil
	})
	require.NoError(t, e.stack.Egress.Router.Start(t.Context()))
}

// Invariant: P36
func TestTunnelsEndWithTheirPermission(t *testing.T) {
	e := startEgress(t)
	s, ip := e.claimed(`{"allowOut":["ok.example.com"],"denyOut":["0.0.0.0/0"]}`)
	for name, end := range map[string]func(){
		"narrowed": func() {
			require.Equal(t, http.StatusNoContent, e.mayReach(s))
		},
		"router killed": func() {
			require.NoError(t, e.stack.Egress.Router.Kill())
			require.NoError(t, e.stack.Egress.Router.Start(t.Context()))
		},
	} {
		require.Equal(t, http.StatusNoContent, e.mayReach(s, "ok.example.com"))
		open, out := filepath.Join(t.TempDir(), "open"), make(chan string, 1)
		go func() {
			out <- e.command(s, "", false, "python3", "-c", caller, ip, "tunnel", "ok.example.com:"+e.port, open).out
		}()
		e.eventually(func() error { _, err := os.Stat(open); return err })
		end()
		require.Contains(t, <-out, "closed", name)
	}
}

// A released sandbox leaves nothing for the next one at its address, neither rules nor a credential.
//
// Invariant: P35
func TestAddressCarriesNoRulesToTheNextSandbox(t *testing.T) {
	e := startEgress(t)
	seen := map[string]string{} // the credential that a sandbox had at an address
	for range 12 {
		s, ip := e.claimed(`{"allowOut":["ok.example.com"],"denyOut":["0.0.0.0/0"]}`)
		e.allows(s, ip, "ok.example.com")
		if before, again := seen[ip]; again {
			e.refuses(s, ip, "ok.example.com", "", before)
			return
		}
		seen[ip] = strings.TrimSpace(e.bash(s, "", `python3 -c 'import base64, os, urllib.parse
p = urllib.parse.urlsplit(os.environ["HTTP_PROXY"])
print(base64.b64encode(f"{p.username}:{p.password}".encode()).decode())'`).out)
		e.release(s.SandboxID)
	}
	t.Fatalf("no address came back: %d", len(seen))
}

// warmPodsReachNothing sends requests from the addresses of pods without a sandbox, with the credential of one and with
// none.
func (e *egressEnv) warmPodsReachNothing(s openapi.Sandbox) {
	e.t.Helper()
	e.waitFull(e.pool, 1)
	pods, err := e.clients.Kubernetes.CoreV1().Pods(e.site.namespace()).List(e.t.Context(), metav1.ListOptions{
		LabelSelector: v1alpha1.LabelPool + "=" + e.pool + "," + v1alpha1.LabelPhase + "=" + v1alpha1.PhaseWarm})
	require.NoError(e.t, err)
	require.NotEmpty(e.t, pods.Items)
	for _, pod := range pods.Items {
		e.refuses(s, pod.Status.PodIP, "ok.example.com")
		e.refuses(s, pod.Status.PodIP, "ok.example.com", "", "none")
	}
}

// tokenIsInNoObject looks for the egress token of a sandbox in what the cluster and the logs hold.
func (e *egressEnv) tokenIsInNoObject(s openapi.Sandbox) {
	t := e.t
	t.Helper()
	proxy, err := url.Parse(strings.TrimSpace(e.bash(s, "", "echo $HTTP_PROXY").out))
	require.NoError(t, err)
	token, _ := proxy.User.Password()
	require.NotEmpty(t, token)
	pods, err := e.clients.Kubernetes.CoreV1().Pods(e.site.namespace()).List(t.Context(), metav1.ListOptions{})
	require.NoError(t, err)
	record, err := e.record(s.SandboxID)
	require.NoError(t, err)
	for _, object := range []any{pods, record} {
		raw, err := json.Marshal(object)
		require.NoError(t, err)
		require.NotContains(t, string(raw), token)
	}
	logs, err := filepath.Glob(filepath.Join(e.cluster.Dir(), "*.log"))
	require.NoError(t, err)
	require.NotEmpty(t, logs)
	for _, log := range logs {
		raw, err := os.ReadFile(log)
		require.NoError(t, err)
		require.NotContains(t, string(raw), token, log)
	}
}

func TestClaimWithRulesNeedsAGatewayPool(t *testing.T) {
	e := start(t, 1)
	a := e.api(http.MethodPost, "/sandboxes", fmt.Sprintf(`{"templateID":%q,"network":{"denyOut":["0.0.0.0/0"]}}`, e.pool))
	require.NotEqual(t, http.StatusCreated, a.code)
	require.Contains(t, a.body, "egress.mode")
	require.NotEqual(t, apierror.Reason(""), a.refusal(t).Reason)
}
