package bench

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clientrest "k8s.io/client-go/rest"

	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/devcluster/hollow"
	"github.com/berth-sandbox/berth/devcluster/stack"
	"github.com/berth-sandbox/berth/e2e/harness"
	"github.com/berth-sandbox/berth/e2e/history"
)

// ground is a control plane with hollow nodes, one allocator and one gateway. What
// claims cost is compared with the floor: a conditional patch of a pod, straight
// to the same API server.
type ground struct {
	*testing.B
	berth *harness.Berth
	http  *http.Client // keeps its connections
	// api and admin are those of the first allocator.
	api, admin string
}

// callers is how many connections the clients of the API have.
const callers = 1024

func newGround(b *testing.B) *ground {
	return newGroundOf(b, stack.Options{LeaseDuration: 15 * time.Second})
}

func newGroundOf(b *testing.B, o stack.Options) *ground {
	return newGroundWith(b, o, hollow.Options{Nodes: 10})
}

func newGroundWith(b *testing.B, o stack.Options, nodes hollow.Options) *ground {
	o.BinDir = b.TempDir()
	require.NoError(b, stack.Build(b.Context(), o.BinDir, false, "allocator", "extproc"))
	run := harness.NewRun(b, history.Settings{}, "")
	berth := run.Start(harness.Options{Hollow: &nodes, Stack: o})
	transport := &http.Transport{MaxIdleConnsPerHost: callers, DisableCompression: true}
	b.Cleanup(transport.CloseIdleConnections)
	first := berth.Stack.Allocators[0]
	client := &http.Client{Transport: transport, Timeout: time.Minute}
	return &ground{B: b, berth: berth, http: client, api: first.API, admin: first.Admin}
}

// pool makes a pool and waits until it is full. maxPods 0 is no bound; as many as
// warm pauses the refill.
func (g *ground) pool(name string, warm, maxPods int32) {
	g.poolOf(name, warm, maxPods, v1alpha1.ReuseNever)
}

func (g *ground) poolOf(name string, warm, maxPods int32, reuse v1alpha1.Reuse) {
	g.berth.CreatePool(name, warm, func(p *v1alpha1.SandboxPool) {
		p.Spec.Reuse = reuse
		if maxPods > 0 {
			p.Spec.MaxPods = &maxPods
		}
	})
	g.full(name, warm)
}

// full waits until the pool has its warm pods and nothing else, and nothing waits
// to be written.
func (g *ground) full(name string, warm int32) { g.settled(name, warm, 0) }

// settled waits until the pool has its warm pods, so many that are claimed and nothing
// else, and nothing waits to be written.
func (g *ground) settled(name string, warm, claimed int32) {
	require.Eventually(g, func() bool {
		pool, err := g.berth.ReadPool(g.Context(), name)
		return err == nil && pool.Status.Warm == warm && pool.Status.Claimed == claimed &&
			pool.Status.Pending+pool.Status.Releasing == 0 && g.idle()
	}, 10*time.Minute, 200*time.Millisecond)
}

// pools is where pools are.
func (g *ground) pools(r *clientrest.Request) *clientrest.Request {
	return r.Namespace(harness.Namespace).Resource("sandboxpools")
}

// allPools lists the pools.
func (g *ground) allPools() (all v1alpha1.SandboxPoolList, err error) {
	return all, g.pools(g.berth.Clients.Berth.Get()).Do(g.Context()).Into(&all)
}

// drop deletes a pool and waits until there is none.
func (g *ground) drop(name string) {
	require.NoError(g, g.pools(g.berth.Clients.Berth.Delete()).Name(name).Do(g.Context()).Error())
	require.Eventually(g, func() bool {
		all, err := g.allPools()
		return err == nil && len(all.Items) == 0 && g.idle()
	}, 10*time.Minute, 200*time.Millisecond)
}

// idle reports whether nothing waits to be written.
func (g *ground) idle() bool { return g.metrics(g.admin+"/metrics").Unwritten() == 0 }

func (g *ground) metrics(url string) harness.Metrics {
	all, err := harness.ReadMetrics(g.Context(), http.DefaultClient, url)
	require.NoError(g, err)
	return all
}

// written is how many bytes were put into etcd so far, as it says.
func (g *ground) written() float64 {
	return g.metrics(g.berth.Cluster.EtcdMetrics())["etcd_debugging_mvcc_total_put_size_in_bytes"]
}

// rawPods makes pods of no pool.
func (g *ground) rawPods(prefix string, n int) []*corev1.Pod {
	pods := make([]*corev1.Pod, n)
	g.parallel(n, 16, func(i int) error {
		var err error
		pods[i], err = g.berth.Clients.Kubernetes.CoreV1().Pods(harness.Namespace).Create(g.Context(), &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{
				Name: fmt.Sprintf("%s-%d", prefix, i), Labels: map[string]string{"raw": prefix, "phase": "warm"},
				Annotations: map[string]string{"binding": ""},
			},
			Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "sandbox", Image: "none"}}},
		}, metav1.CreateOptions{})
		return err
	})
	require.Eventually(g, func() bool {
		list, err := g.berth.Clients.Kubernetes.CoreV1().Pods(harness.Namespace).List(g.Context(),
			metav1.ListOptions{LabelSelector: "raw=" + prefix})
		return err == nil &&
			!slices.ContainsFunc(list.Items, func(p corev1.Pod) bool { return p.Status.Phase != corev1.PodRunning })
	}, 10*time.Minute, 200*time.Millisecond)
	return pods
}

// patch is the floor: one write per claim, on condition that the pod is that pod.
func (g *ground) patch(p *corev1.Pod, claim int) error {
	raw, err := json.Marshal([]map[string]any{
		{"op": "test", "path": "/metadata/uid", "value": p.UID},
		{"op": "replace", "path": "/metadata/labels/phase", "value": fmt.Sprintf("claimed-%d", claim)},
		{"op": "add", "path": "/metadata/annotations/binding",
			"value": fmt.Sprintf(`{"id":"abcdefghij%010d","claimedAt":"2030-01-01T00:00:00Z"}`, claim)},
	})
	if err != nil {
		return err
	}
	_, err = g.berth.Clients.Kubernetes.CoreV1().Pods(harness.Namespace).Patch(g.Context(), p.Name, types.JSONPatchType,
		raw, metav1.PatchOptions{})
	return err
}

func (g *ground) claim(pool string) (id string, err error) { return g.claimWith(pool, "") }

// claimWith claims with further fields in the request.
func (g *ground) claimWith(pool, fields string) (id string, err error) {
	var s struct{ SandboxID string }
	code, body, err := g.call(http.MethodPost, "/sandboxes", `{"templateID":"`+pool+`","timeout":7200`+fields+`}`)
	if err != nil || code != http.StatusCreated {
		return "", fmt.Errorf("claim: %d %s %w", code, body, err)
	}
	return s.SandboxID, json.Unmarshal(body, &s)
}

func (g *ground) release(id string) error {
	code, body, err := g.call(http.MethodDelete, "/sandboxes/"+id, "")
	if err != nil || code != http.StatusNoContent {
		return fmt.Errorf("release: %d %s %w", code, body, err)
	}
	return nil
}

func (g *ground) call(method, path, body string) (int, []byte, error) {
	a, err := harness.Do(g.Context(), g.http, method, g.api+path, "", body)
	return a.Code, a.Body, err
}

// warmUp opens so many connections to the API.
func (g *ground) warmUp(n int) {
	g.parallel(n, n, func(int) error {
		_, _, err := g.call(http.MethodGet, "/sandboxes/none", "")
		time.Sleep(50 * time.Millisecond) // so that each needs a connection of its own
		return err
	})
}

// parallel calls f for 0 to n-1, so many at a time, and returns how long each took.
func (g *ground) parallel(n, atOnce int, f func(i int) error) []time.Duration {
	g.Helper()
	took := make([]time.Duration, n)
	var next atomic.Int64
	var all sync.WaitGroup
	begin := make(chan struct{})
	var failed atomic.Pointer[error]
	for range min(atOnce, n) {
		all.Go(func() {
			<-begin
			for {
				i := int(next.Add(1)) - 1
				if i >= n || failed.Load() != nil {
					return
				}
				began := time.Now()
				if err := f(i); err != nil {
					failed.Store(&err)
					return
				}
				took[i] = time.Since(began)
			}
		})
	}
	close(begin)
	all.Wait()
	if err := failed.Load(); err != nil {
		g.Fatal(*err)
	}
	return took
}

func quantile(took []time.Duration, q float64) time.Duration {
	sorted := slices.Clone(took)
	slices.Sort(sorted)
	return sorted[int(q*float64(len(sorted)-1))]
}

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

func median(all []float64) float64 {
	sorted := slices.Clone(all)
	slices.Sort(sorted)
	return sorted[len(sorted)/2]
}
