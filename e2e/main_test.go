package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"maps"
	"net"
	"net/http"
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/berth-sandbox/berth/allocator/kube"
	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/devcluster/stack"
	"github.com/berth-sandbox/berth/e2e/harness"
)

// Set by TestMain, read-only after that.
var (
	// binDir holds the programs under test, for devclusters.
	binDir string
	// shared is the Berth on a real cluster, which all tests use; nil on devclusters.
	shared *release
)

func TestMain(m *testing.M) {
	flag.Parse()
	parallel := cap(guests)
	if where, err := provider(); err == nil && where == onDevcluster {
		parallel = 1000 // the slots bound how many run
	}
	if err := flag.Set("test.parallel", strconv.Itoa(parallel)); err != nil {
		panic(err) // the testing package has had this flag since Go 1.0
	}
	os.Exit(testMain(m))
}

func testMain(m *testing.M) (code int) {
	fail := func(err error) int {
		fmt.Fprintln(os.Stderr, "e2e:", err)
		return 1
	}
	where, err := provider()
	if err != nil {
		return fail(err)
	}
	switch {
	case testing.Short():
	case where == onDevcluster:
		dir, err := os.MkdirTemp("", "berth-e2e-")
		if err == nil {
			defer os.RemoveAll(dir)
			err = errors.Join(
				stack.Build(context.Background(), dir, harness.Race, "allocator", "extproc", "berth", "berth-dev"),
				stack.Build(context.Background(), dir, false, "demo-sandbox", "agent")) // there are many
		}
		if err != nil {
			return fail(fmt.Errorf("build the programs under test: %w", err))
		}
		binDir = dir
	default:
		// go test bounds the whole suite. remove is called after an error, too.
		r, remove, err := install(context.Background(), where)
		defer func() {
			if err := remove(); err != nil {
				code = fail(err)
			}
		}()
		if err != nil {
			return fail(err)
		}
		shared = r
	}
	if !testing.Short() {
		// The tests without these packages run all the same. The others say what is wrong.
		if err := installPackages(context.Background()); err != nil {
			fmt.Fprintln(os.Stderr, "e2e:", err)
		}
	}
	code = m.Run()
	if err := grounds.end(); err != nil {
		code = fail(err)
	}
	if shared != nil {
		if err := shared.closeConnections(); err != nil {
			return fail(err)
		}
	}
	if code == 0 {
		if err := goleak.Find(); err != nil {
			return fail(err)
		}
	}
	return code
}

// env is a Berth with a pool of the test's own.
type env struct {
	t       *testing.T
	site    site
	clients *kube.Clients
	pool    string

	// processes is the site, where Berth's programs are processes; else nil.
	*processes
}

// newPool returns a pool that has not been created.
func (e *env) newPool(name string, warm int32) *v1alpha1.SandboxPool {
	p := stack.DemoPool(e.site.namespace(), name, warm)
	if image := e.site.sandboxImage(); image != "" {
		p.Spec.Template.Spec.Containers[0].Image = image
	}
	return p
}

// createPool creates a pool, which ends with the test.
func (e *env) createPool(p *v1alpha1.SandboxPool) {
	e.t.Helper()
	require.NoError(e.t,
		e.clients.Berth.Post().Namespace(e.site.namespace()).Resource("sandboxpools").Body(p).Do(e.t.Context()).Error())
	e.t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := e.deletePool(ctx, p.Name); err != nil && !apierrors.IsNotFound(err) {
			e.t.Errorf("delete pool %s: %v", p.Name, err)
		}
	})
}

func (e *env) deletePool(ctx context.Context, name string) error {
	return e.clients.Berth.Delete().Namespace(e.site.namespace()).Resource("sandboxpools").Name(name).Do(ctx).Error()
}

func (e *env) readPool(name string) *v1alpha1.SandboxPool {
	e.t.Helper()
	var p v1alpha1.SandboxPool
	require.NoError(e.t,
		e.clients.Berth.Get().Namespace(e.site.namespace()).Resource("sandboxpools").Name(name).Do(e.t.Context()).Into(&p))
	return &p
}

// waitWarm waits until the pool has n warm pods.
func (e *env) waitWarm(n int32) {
	e.t.Helper()
	e.eventually(func() error {
		if s := e.readPool(e.pool).Status; s.Warm < n {
			return fmt.Errorf("%d of %d pods are warm: %+v", s.Warm, n, s)
		}
		return nil
	})
}

// pods lists the pods of the pool that have these labels as well.
func (e *env) pods(also map[string]string) []corev1.Pod {
	e.t.Helper()
	selector := labels.Set{v1alpha1.LabelPool: e.pool}
	maps.Copy(selector, also)
	list, err := e.clients.Kubernetes.CoreV1().Pods(e.site.namespace()).List(e.t.Context(),
		metav1.ListOptions{LabelSelector: selector.String()})
	require.NoError(e.t, err)
	return list.Items
}

// eventually waits until check returns nil. The limit ends a test in which nothing happens.
// Berth does not promise it.
func (e *env) eventually(check func() error) {
	e.t.Helper()
	harness.Eventually(e.t, 2*time.Minute, func(context.Context) error { return check() })
}

// client returns an HTTP client that connects to the gateways for every host.
func (e *env) client() *http.Client { return e.clientOf(e.site.front, 8) }

// clientOf returns an HTTP client with that many idle connections at most, 0 for
// a new connection for each request.
func (e *env) clientOf(dial dialer, idle int) *http.Client {
	transport := &http.Transport{
		MaxIdleConnsPerHost: idle, DisableKeepAlives: idle == 0,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) { return dial(ctx) },
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

func do(ctx context.Context, client *http.Client, method, url, host, body string, headers ...string) (answer, error) {
	a, err := harness.Do(ctx, client, method, url, host, body, headers...)
	return answer{a.Code, a.Header, string(a.Body)}, err
}

// get sends a request to a host through the gateways.
func (e *env) get(client *http.Client, host, path string) answer {
	e.t.Helper()
	a, err := do(e.t.Context(), client, http.MethodGet, "http://gateway"+path, host, "")
	require.NoError(e.t, err)
	return a
}

// reachable waits until the network of a real cluster leads to a sandbox. A bridge may send
// packets for a reused address to its previous pod for some seconds. A devcluster has no bridge.
func (e *env) reachable(client *http.Client, s openapi.Sandbox) {
	e.t.Helper()
	if e.processes != nil {
		return
	}
	e.eventually(func() error {
		if a := e.get(client, e.host(int(stack.DemoPorts()[0]), s.SandboxID), "/healthz"); a.code != http.StatusOK {
			return fmt.Errorf("%s got %d %.200s", s.SandboxID, a.code, a.body)
		}
		return nil
	})
}

func (e *env) host(port int, id string) string {
	return fmt.Sprintf("%d-%s.%s", port, id, e.site.domain())
}

// api calls the HTTP API of any replica, as soon as there is a leader. It repeats a call without
// an answer, which a leader leaves when it ends.
func (e *env) api(method, path, body string) answer {
	e.t.Helper()
	var a answer
	again := false
	e.eventually(func() (err error) {
		a, err = e.callAPI(method, path, body, e.site.key())
		if err == nil && a.code == http.StatusServiceUnavailable && a.refusal(e.t).Reason == apierror.NotLeader {
			err = fmt.Errorf("%d %s", a.code, a.body)
		}
		again = again || err != nil
		return err
	})
	if again && method == http.MethodDelete && a.code == http.StatusNotFound &&
		a.refusal(e.t).Reason == apierror.SandboxGone {
		a.code = http.StatusNoContent
	}
	return a
}

func (e *env) callAPI(method, path, body, key string, headers ...string) (answer, error) {
	client := e.clientOf(e.site.api, 0)
	return do(e.t.Context(), client, method, "http://api"+path, "", body,
		append([]string{"X-API-Key", key}, headers...)...)
}

// claim takes a sandbox from the pool, once it has a warm pod and the replica that is asked is ready.
func (e *env) claim() openapi.Sandbox {
	e.t.Helper()
	var a answer
	e.eventually(func() error {
		a = e.api(http.MethodPost, "/sandboxes", fmt.Sprintf(`{"templateID":%q,"timeout":3600}`, e.pool))
		starting := a.code == http.StatusServiceUnavailable && a.refusal(e.t).Reason == apierror.APINotReady
		if starting || a.code == http.StatusTooManyRequests {
			return fmt.Errorf("%d %s", a.code, a.body)
		}
		return nil
	})
	require.Equal(e.t, http.StatusCreated, a.code, a.body)
	var s openapi.Sandbox
	require.NoError(e.t, json.Unmarshal([]byte(a.body), &s))
	return s
}

// release ends a sandbox.
func (e *env) release(id string) {
	e.t.Helper()
	a := e.api(http.MethodDelete, "/sandboxes/"+id, "")
	require.Equal(e.t, http.StatusNoContent, a.code, a.body)
}
