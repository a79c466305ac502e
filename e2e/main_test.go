package e2e

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/berth-sandbox/berth/allocator/kube"
	"github.com/berth-sandbox/berth/allocator/rest"
	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/crd"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/devcluster"
	"github.com/berth-sandbox/berth/devcluster/stack"
)

const namespace = "default"

// binDir holds the programs under test. Set by TestMain, read-only after that.
var binDir string

// clusters is how many tests run at one time: most of their time is waiting,
// but each has an API server and an Envoy.
const clusters = 4

func TestMain(m *testing.M) {
	flag.Parse()
	if err := flag.Set("test.parallel", strconv.Itoa(clusters)); err != nil {
		panic(err) // the testing package has had this flag since Go 1.0
	}
	os.Exit(testMain(m))
}

func testMain(m *testing.M) int {
	if !testing.Short() {
		dir, err := os.MkdirTemp("", "berth-e2e-")
		if err == nil {
			defer os.RemoveAll(dir)
			err = build(dir)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, "e2e: build the programs under test:", err)
			return 1
		}
		binDir = dir
	}
	code := m.Run()
	if code == 0 {
		if err := goleak.Find(); err != nil {
			fmt.Fprintln(os.Stderr, "e2e:", err)
			return 1
		}
	}
	return code
}

// build builds the programs under test, with the race detector when the tests
// have it.
func build(dir string) error {
	args := []string{"build", "-o", dir + "/"}
	if raceEnabled {
		args = append(args, "-race")
	}
	for _, program := range []string{"allocator", "extproc", "demo-sandbox", "berth"} {
		args = append(args, "github.com/berth-sandbox/berth/cmd/"+program)
	}
	out, err := exec.Command("go", args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("go %s: %w\n%s", strings.Join(args, " "), err, out)
	}
	return nil
}

// env is a cluster with Berth.
type env struct {
	t       *testing.T
	cluster *devcluster.Cluster
	stack   *stack.Stack
	clients *kube.Clients
}

// start starts a cluster with Berth and a pool named "pool".
func start(t *testing.T, warm int32, o stack.Options) *env {
	t.Helper()
	t.Parallel()
	cluster := devcluster.Start(t, devcluster.Options{Nodes: 1, NodePath: []string{binDir}, CRDs: crd.All()})
	o.BinDir = binDir
	s, err := stack.Start(t.Context(), cluster, o)
	require.NoError(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		if err := s.Stop(ctx); err != nil {
			t.Errorf("stop Berth: %v", err)
		}
		if t.Failed() {
			logs(t, cluster.Dir())
		}
		checkRaces(t, cluster.Dir())
	})
	clients, err := kube.NewClients(cluster.RestConfig(), 0, 0)
	require.NoError(t, err)
	e := &env{t: t, cluster: cluster, stack: s, clients: clients}
	e.createPool(stack.DemoPool(namespace, "pool", warm))
	e.waitWarm("pool", warm)
	return e
}

// logs shows the end of Berth's logs.
func logs(t *testing.T, dir string) {
	files, _ := filepath.Glob(filepath.Join(dir, "*.log"))
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

func (e *env) createPool(p *v1alpha1.SandboxPool) {
	e.t.Helper()
	require.NoError(e.t, e.clients.Berth.Post().Namespace(namespace).Resource("sandboxpools").Body(p).Do(e.t.Context()).Error())
}

func (e *env) pool(name string) *v1alpha1.SandboxPool {
	e.t.Helper()
	var p v1alpha1.SandboxPool
	require.NoError(e.t, e.clients.Berth.Get().Namespace(namespace).Resource("sandboxpools").Name(name).Do(e.t.Context()).Into(&p))
	return &p
}

func (e *env) waitWarm(pool string, n int32) {
	e.t.Helper()
	e.eventually(func() error {
		if s := e.pool(pool).Status; s.Warm < n {
			return fmt.Errorf("%d of %d pods are warm: %+v", s.Warm, n, s)
		}
		return nil
	})
}

func (e *env) pods(selector string) []corev1.Pod {
	e.t.Helper()
	list, err := e.clients.Kubernetes.CoreV1().Pods(namespace).List(e.t.Context(), metav1.ListOptions{LabelSelector: selector})
	require.NoError(e.t, err)
	return list.Items
}

// eventually waits until check returns nil. The limit is a guard and not what
// is tested.
func (e *env) eventually(check func() error) {
	e.t.Helper()
	deadline := time.Now().Add(60 * time.Second)
	ticker := time.NewTicker(25 * time.Millisecond)
	defer ticker.Stop()
	for {
		err := check()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			e.t.Fatalf("still not after a minute: %v", err)
		}
		<-ticker.C
	}
}

// client returns an HTTP client that connects to a gateway, whatever the host.
func (e *env) client(gateway int) *http.Client {
	addr := e.stack.Gateways[gateway].Addr.String()
	transport := &http.Transport{
		MaxIdleConnsPerHost: 8,
		DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, network, addr)
		},
	}
	e.t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport, Timeout: 30 * time.Second}
}

// answer is what came back.
type answer struct {
	code   int
	header http.Header
	body   string
}

// identity is what a demo sandbox says about itself.
type identity struct {
	Pod    string `json:"pod"`
	PodUID string `json:"podUID"`
	Port   int    `json:"port"`
}

func (a answer) identity(t *testing.T) identity {
	t.Helper()
	var i identity
	require.NoError(t, json.Unmarshal([]byte(a.body), &i), "%d %s", a.code, a.body)
	return i
}

// refusal checks the shape that all errors of Berth have and returns it.
func (a answer) refusal(t *testing.T) apierror.Error {
	t.Helper()
	require.Equal(t, "application/json", a.header.Get("Content-Type"), "%d %s", a.code, a.body)
	var e apierror.Error
	require.NoError(t, json.Unmarshal([]byte(a.body), &e), a.body)
	require.Equal(t, a.code, e.Code, "the body's code is the status")
	require.NotEmpty(t, e.Reason)
	require.NotEmpty(t, e.Message)
	return e
}

func do(ctx context.Context, client *http.Client, method, url, host, body string) (answer, error) {
	r, err := http.NewRequestWithContext(ctx, method, url, strings.NewReader(body))
	if err != nil {
		return answer{}, err
	}
	if host != "" {
		r.Host = host
	}
	response, err := client.Do(r)
	if err != nil {
		return answer{}, err
	}
	defer response.Body.Close()
	raw, err := io.ReadAll(response.Body)
	return answer{response.StatusCode, response.Header, string(raw)}, err
}

// get sends a request to a host through a gateway.
func (e *env) get(client *http.Client, host, path string) answer {
	e.t.Helper()
	a, err := do(e.t.Context(), client, http.MethodGet, "http://gateway"+path, host, "")
	require.NoError(e.t, err)
	return a
}

func (e *env) host(port int, id string) string {
	return fmt.Sprintf("%d-%s.%s", port, id, e.stack.Domain)
}

// api calls the leader's HTTP API.
func (e *env) api(method, path, body string) answer {
	e.t.Helper()
	leader, err := e.stack.Leader(e.t.Context())
	require.NoError(e.t, err)
	a, err := do(e.t.Context(), apiClient(e.t), method, leader.API+path, "", body)
	require.NoError(e.t, err)
	return a
}

func apiClient(t *testing.T) *http.Client {
	transport := &http.Transport{DisableKeepAlives: true}
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport, Timeout: 30 * time.Second}
}

// claim takes a sandbox from a pool, once it has a warm pod.
func (e *env) claim(pool string) rest.Sandbox {
	e.t.Helper()
	var a answer
	e.eventually(func() error {
		if a = e.api(http.MethodPost, "/sandboxes", fmt.Sprintf(`{"templateID":%q,"timeout":3600}`, pool)); a.code == http.StatusTooManyRequests {
			return fmt.Errorf("%d %s", a.code, a.body)
		}
		return nil
	})
	require.Equal(e.t, http.StatusCreated, a.code, a.body)
	var s rest.Sandbox
	require.NoError(e.t, json.Unmarshal([]byte(a.body), &s))
	return s
}

// release ends a sandbox and requires that all routers acknowledged it.
func (e *env) release(id string) {
	e.t.Helper()
	a := e.api(http.MethodDelete, "/sandboxes/"+id, "")
	require.Equal(e.t, http.StatusNoContent, a.code, a.body)
}
