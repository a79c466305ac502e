package bench

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/berth-sandbox/berth/allocator/kube"
	"github.com/berth-sandbox/berth/api/crd"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/devcluster"
	"github.com/berth-sandbox/berth/devcluster/kwok"
	"github.com/berth-sandbox/berth/devcluster/stack"
)

// ground is a control plane with KWOK nodes, one allocator and one gateway. What
// claims cost is compared with the floor: a conditional patch of a pod, straight
// to the same API server.
type ground struct {
	*testing.B
	cluster *devcluster.Cluster
	clients *kube.Clients
	nodes   *kwok.Nodes
	berth   *stack.Stack
	http    *http.Client
	api     string
	admin   string
}

// callers is how many connections the clients of the API have.
const callers = 1024

func newGround(b *testing.B) *ground {
	return newGroundOf(b, stack.Options{LeaseDuration: 15 * time.Second})
}

func newGroundOf(b *testing.B, o stack.Options) *ground {
	bin := b.TempDir()
	require.NoError(b, stack.Build(b.Context(), bin, false, "allocator", "extproc"))
	g := &ground{B: b, cluster: devcluster.Start(b, devcluster.Options{CRDs: crd.All()})}
	var err error
	g.nodes, err = kwok.Start(b.Context(), g.cluster, kwok.Options{Nodes: kwok.Names("node", 10)})
	require.NoError(b, err)
	b.Cleanup(func() { stop(b, g.nodes.Close) })
	o.BinDir = bin
	g.berth, err = stack.Start(b.Context(), g.cluster, o)
	require.NoError(b, err)
	b.Cleanup(func() { stop(b, g.berth.Stop) })
	g.clients, err = kube.NewClients(g.cluster.RestConfig(), 0, 0)
	require.NoError(b, err)
	transport := &http.Transport{MaxIdleConnsPerHost: callers, DisableCompression: true}
	b.Cleanup(transport.CloseIdleConnections)
	g.http = &http.Client{Transport: transport, Timeout: time.Minute}
	g.api, g.admin = g.berth.Allocators[0].API, g.berth.Allocators[0].Admin
	return g
}

func stop(b *testing.B, f func(context.Context) error) {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	require.NoError(b, f(ctx))
}

// pool makes a pool and waits until it is full. maxPods 0 is no bound; as many as
// warm pauses the refill.
func (g *ground) pool(name string, warm, maxPods int32) {
	pool := stack.DemoPool("default", name, warm)
	pool.Spec.Template.Spec.Containers[0].Env = nil
	if maxPods > 0 {
		pool.Spec.MaxPods = &maxPods
	}
	require.NoError(g, g.clients.Berth.Post().Namespace("default").Resource("sandboxpools").Body(pool).Do(g.Context()).Error())
	g.full(name, warm)
}

// full waits until the pool has its warm pods and nothing else, and nothing waits
// to be written.
func (g *ground) full(name string, warm int32) { g.settled(name, warm, 0) }

// settled waits until the pool has its warm pods, so many that are claimed and nothing
// else, and nothing waits to be written.
func (g *ground) settled(name string, warm, claimed int32) {
	require.Eventually(g, func() bool {
		var pool v1alpha1.SandboxPool
		if err := g.clients.Berth.Get().Namespace("default").Resource("sandboxpools").Name(name).Do(g.Context()).Into(&pool); err != nil {
			return false
		}
		return pool.Status.Warm == warm && pool.Status.Claimed == claimed && pool.Status.Pending+pool.Status.Releasing == 0 && g.idle()
	}, 10*time.Minute, 200*time.Millisecond)
}

// drop deletes a pool and waits until it is gone.
func (g *ground) drop(name string) {
	require.NoError(g, g.clients.Berth.Delete().Namespace("default").Resource("sandboxpools").Name(name).Do(g.Context()).Error())
	require.Eventually(g, func() bool {
		var pools v1alpha1.SandboxPoolList
		return g.clients.Berth.Get().Namespace("default").Resource("sandboxpools").Do(g.Context()).Into(&pools) == nil && len(pools.Items) == 0 && g.idle()
	}, 10*time.Minute, 200*time.Millisecond)
}

// idle reports whether nothing waits to be written.
func (g *ground) idle() bool {
	m := g.metrics(g.admin + "/metrics")
	return m["berth_allocator_projection_waiting"]+m["berth_allocator_labels_waiting"]+m["berth_allocator_writes_waiting"] == 0
}

// metrics reads the plain values of a page in Prometheus' text format, those with
// labels added up.
func (g *ground) metrics(url string) map[string]float64 {
	response, err := http.Get(url)
	require.NoError(g, err)
	defer response.Body.Close()
	all := map[string]float64{}
	lines := bufio.NewScanner(response.Body)
	for lines.Scan() {
		name, value, ok := strings.Cut(lines.Text(), " ")
		if !ok || strings.HasPrefix(name, "#") {
			continue
		}
		if i := strings.LastIndexByte(value, ' '); i >= 0 { // labels may have spaces in them
			value = value[i+1:]
		}
		name, _, _ = strings.Cut(name, "{")
		if v, err := strconv.ParseFloat(value, 64); err == nil {
			all[name] += v
		}
	}
	require.NoError(g, lines.Err())
	return all
}

// written is how many bytes were put into etcd so far, as it says.
func (g *ground) written() float64 {
	return g.metrics(g.cluster.EtcdMetrics())["etcd_debugging_mvcc_total_put_size_in_bytes"]
}

// rawPods makes pods that are nobody's.
func (g *ground) rawPods(prefix string, n int) []*corev1.Pod {
	pods := make([]*corev1.Pod, n)
	g.parallel(n, 16, func(i int) error {
		var err error
		pods[i], err = g.clients.Kubernetes.CoreV1().Pods("default").Create(g.Context(), &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{
				Name: fmt.Sprintf("%s-%d", prefix, i), Labels: map[string]string{"raw": prefix, "phase": "warm"},
				Annotations: map[string]string{"binding": ""},
			},
			Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "sandbox", Image: "none"}}},
		}, metav1.CreateOptions{})
		return err
	})
	require.Eventually(g, func() bool {
		list, err := g.clients.Kubernetes.CoreV1().Pods("default").List(g.Context(), metav1.ListOptions{LabelSelector: "raw=" + prefix})
		return err == nil && !slices.ContainsFunc(list.Items, func(p corev1.Pod) bool { return p.Status.Phase != corev1.PodRunning })
	}, 10*time.Minute, 200*time.Millisecond)
	return pods
}

// patch is the floor: one write per claim, on condition that the pod is that pod.
func (g *ground) patch(p *corev1.Pod, claim int) error {
	raw, err := json.Marshal([]map[string]any{
		{"op": "test", "path": "/metadata/uid", "value": p.UID},
		{"op": "replace", "path": "/metadata/labels/phase", "value": fmt.Sprintf("claimed-%d", claim)},
		{"op": "add", "path": "/metadata/annotations/binding", "value": fmt.Sprintf(`{"id":"abcdefghij%010d","claimedAt":"2030-01-01T00:00:00Z"}`, claim)},
	})
	if err != nil {
		return err
	}
	_, err = g.clients.Kubernetes.CoreV1().Pods("default").Patch(g.Context(), p.Name, types.JSONPatchType, raw, metav1.PatchOptions{})
	return err
}

func (g *ground) claim(pool string) (id string, err error) {
	var s struct{ SandboxID string }
	code, body, err := g.call(http.MethodPost, "/sandboxes", `{"templateID":"`+pool+`","timeout":7200}`)
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
	r, err := http.NewRequestWithContext(g.Context(), method, g.api+path, strings.NewReader(body))
	if err != nil {
		return 0, nil, err
	}
	response, err := g.http.Do(r)
	if err != nil {
		return 0, nil, err
	}
	defer response.Body.Close()
	raw, err := io.ReadAll(response.Body)
	return response.StatusCode, raw, err
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

// BenchmarkClaimAlone: one caller, one claim after the other, in turn with the
// floor.
func BenchmarkClaimAlone(b *testing.B) {
	const n = 400
	g := newGround(b)
	g.pool("alone", n, n)
	raw := g.rawPods("raw", n)
	for range 5 {
		require.NoError(b, g.patch(raw[0], -1))
	}
	g.warmUp(1)
	b.ResetTimer()
	for range b.N {
		var claims, patches []time.Duration
		for i := range n {
			// Whichever is first finds the other's work done.
			one := func() {
				claims = append(claims, g.parallel(1, 1, func(int) error { _, err := g.claim("alone"); return err })...)
			}
			other := func() { patches = append(patches, g.parallel(1, 1, func(int) error { return g.patch(raw[i], i) })...) }
			if i%2 == 0 {
				one, other = other, one
			}
			one()
			time.Sleep(15 * time.Millisecond) // alone: what is written in the background is done
			other()
			time.Sleep(15 * time.Millisecond)
		}
		b.ReportMetric(ms(quantile(claims, 0.5)), "claim_p50_ms")
		b.ReportMetric(ms(quantile(claims, 0.99)), "claim_p99_ms")
		b.ReportMetric(ms(quantile(patches, 0.5)), "patch_p50_ms")
		b.ReportMetric(ms(quantile(patches, 0.99)), "patch_p99_ms")
		b.ReportMetric(float64(quantile(claims, 0.5))/float64(quantile(patches, 0.5)), "ratio_p50")
	}
}

// BenchmarkClaimsAtOnce: a burst through the HTTP API, in turn with as many raw
// patches at once.
func BenchmarkClaimsAtOnce(b *testing.B) {
	g := newGround(b)
	for _, c := range []struct{ burst, warm int }{{300, 600}, {1000, 1500}} {
		b.Run(fmt.Sprintf("burst=%d/warm=%d", c.burst, c.warm), func(b *testing.B) {
			g := &ground{B: b, cluster: g.cluster, clients: g.clients, berth: g.berth, http: g.http, api: g.api, admin: g.admin}
			pool := fmt.Sprintf("burst%d", c.burst)
			g.pool(pool, int32(c.warm), 0)
			raw := g.rawPods(pool+"-raw", c.burst)
			const rounds = 6
			b.ResetTimer()
			for range b.N {
				var p50, p99, claim50, claim99, patch50, patch99, batches, lag []float64
				for round := range rounds {
					var claims, patches []time.Duration
					ids := make([]string, c.burst)
					burst := func() {
						g.warmUp(c.burst)
						before := g.metrics(g.admin + "/metrics")["berth_allocator_journal_batches_total"]
						claims = g.parallel(c.burst, c.burst, func(i int) (err error) { ids[i], err = g.claim(pool); return err })
						batches = append(batches, g.metrics(g.admin + "/metrics")["berth_allocator_journal_batches_total"]-before)
						lag = append(lag, g.projectionLag())
						g.parallel(c.burst, 64, func(i int) error { return g.release(ids[i]) })
						g.full(pool, int32(c.warm))
					}
					floor := func() {
						patches = g.parallel(c.burst, c.burst, func(i int) error { return g.patch(raw[i], round*10_000+i) })
						time.Sleep(time.Second)
					}
					if round%2 == 0 {
						burst()
						floor()
					} else {
						floor()
						burst()
					}
					b.Logf("round %d: claims p50 %.1f p99 %.1f ms, patches p50 %.1f p99 %.1f ms, %v batches, projection lag up to %.1f s", round,
						ms(quantile(claims, 0.5)), ms(quantile(claims, 0.99)), ms(quantile(patches, 0.5)), ms(quantile(patches, 0.99)), batches[len(batches)-1], lag[len(lag)-1])
					claim50, claim99 = append(claim50, ms(quantile(claims, 0.5))), append(claim99, ms(quantile(claims, 0.99)))
					patch50, patch99 = append(patch50, ms(quantile(patches, 0.5))), append(patch99, ms(quantile(patches, 0.99)))
					p50 = append(p50, claim50[round]/patch50[round])
					p99 = append(p99, claim99[round]/patch99[round])
				}
				b.ReportMetric(median(claim50), "claim_p50_ms")
				b.ReportMetric(median(claim99), "claim_p99_ms")
				b.ReportMetric(median(patch50), "patch_p50_ms")
				b.ReportMetric(median(patch99), "patch_p99_ms")
				b.ReportMetric(median(p50), "ratio_p50")
				b.ReportMetric(median(p99), "ratio_p99")
				b.ReportMetric(median(batches), "batches")
				b.ReportMetric(slices.Max(lag), "projection_lag_max_s")
			}
			b.StopTimer()
			g.drop(pool)
		})
	}
}

// projectionLag waits until all Sandbox objects are written and returns how long
// one had to wait at the most.
func (g *ground) projectionLag() float64 {
	most := 0.0
	for {
		m := g.metrics(g.admin + "/metrics")
		most = max(most, m["berth_allocator_projection_lag_seconds"])
		if m["berth_allocator_projection_waiting"] == 0 {
			return most
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// BenchmarkDrain: so many callers take all warm pods of a pool that is not
// refilled, as fast as they can, against as many patches.
func BenchmarkDrain(b *testing.B) {
	const n, atOnce = 5000, 64
	g := newGround(b)
	raw := g.rawPods("raw", n)
	for range b.N {
		g.pool("drain", n, n)
		g.warmUp(atOnce)
		before := g.written()
		began := time.Now()
		took := g.parallel(n, atOnce, func(int) error { _, err := g.claim("drain"); return err })
		claims := float64(n) / time.Since(began).Seconds()
		lag := g.projectionLag()
		bytes := g.written() - before
		began = time.Now()
		patches := g.parallel(n, atOnce, func(i int) error { return g.patch(raw[i], i) })
		floor := float64(n) / time.Since(began).Seconds()
		b.ReportMetric(claims, "claims/s")
		b.ReportMetric(floor, "patches/s")
		b.ReportMetric(claims/floor, "ratio")
		b.ReportMetric(ms(quantile(took, 0.5)), "claim_p50_ms")
		b.ReportMetric(ms(quantile(took, 0.99)), "claim_p99_ms")
		b.ReportMetric(ms(quantile(patches, 0.5)), "patch_p50_ms")
		b.ReportMetric(lag, "projection_lag_max_s")
		b.ReportMetric(bytes/n, "etcd_bytes/claim")
		g.drop("drain")
	}
}

// BenchmarkLives: whole lives, claimed and released, for a minute at 50 a second
// and for a minute as fast as it goes. What the API server is asked to write for
// them, by all who write, is compared with how fast it takes raw patches.
func BenchmarkLives(b *testing.B) {
	const warm, minute = 400, time.Minute
	g := newGround(b)
	raw := g.rawPods("raw", 1000)
	g.pool("lives", warm, 0)
	g.warmUp(256)
	for range b.N {
		floor := g.rawRate(raw)
		paced := g.live("lives", 50, minute)
		g.full("lives", warm)
		full := g.live("lives", 0, minute)
		g.full("lives", warm)
		floor = (floor + g.rawRate(raw)) / 2

		for name, l := range map[string]lives{"paced": paced, "full": full} {
			b.ReportMetric(float64(l.n)/minute.Seconds(), name+"_lives/s")
			b.ReportMetric(ms(quantile(l.claims, 0.5)), name+"_claim_p50_ms")
			b.ReportMetric(ms(quantile(l.claims, 0.99)), name+"_claim_p99_ms")
			b.ReportMetric(l.lag, name+"_projection_lag_max_s")
			b.ReportMetric(l.bytes/float64(l.n), name+"_etcd_bytes/life")
			b.ReportMetric(l.bytes/minute.Minutes()*5/(1<<20), name+"_etcd_MiB/5min")
			b.ReportMetric(l.journal/float64(l.n), name+"_journal_bytes/life")
			b.ReportMetric(l.journalLast/l.journalFirst, name+"_journal_growth")
			b.ReportMetric(float64(l.last)/float64(l.first), name+"_latency_growth")
			b.ReportMetric(l.heapLast/l.heapFirst, name+"_heap_growth")
			b.ReportMetric(l.writes/float64(l.n), name+"_writes/life")
		}
		b.ReportMetric(floor, "raw_patches/s")
		b.ReportMetric(full.writes/minute.Seconds()/floor, "full_writes_ratio")
	}
}

// rawRate is how many patches a second the API server takes from 64 callers.
func (g *ground) rawRate(raw []*corev1.Pod) float64 {
	const n = 5000
	began := time.Now()
	g.parallel(n, 64, func(i int) error { return g.patch(raw[i%len(raw)], int(began.Unix())+i) })
	return n / time.Since(began).Seconds()
}

// lives are what a minute of them has shown: growth is of the last third over the
// second.
type lives struct {
	n                         int
	claims                    []time.Duration
	first, last               time.Duration // median claim
	lag, bytes, writes        float64
	journal                   float64
	journalFirst, journalLast float64 // bytes per life
	heapFirst, heapLast       float64 // bytes after a collection, the least seen
}

// live claims and releases for so long: perSecond lives, or as many as 64 callers
// manage when that is 0.
func (g *ground) live(pool string, perSecond int, d time.Duration) lives {
	ctx, cancel := context.WithTimeout(g.Context(), d)
	defer cancel()
	type life struct {
		at, took time.Duration
	}
	var mu sync.Mutex
	var all []life
	began := time.Now()
	one := func(hold time.Duration) error {
		at := time.Now()
		id, err := g.claim(pool)
		if err != nil {
			return err
		}
		took := time.Since(at)
		mu.Lock()
		all = append(all, life{at.Sub(began), took})
		mu.Unlock()
		time.Sleep(hold)
		return g.release(id)
	}
	bytes, writes := g.written(), g.writes()
	journal := g.metrics(g.admin + "/metrics")["berth_allocator_journal_bytes_total"]
	var working sync.WaitGroup
	errs := make(chan error, 1)
	fail := func(err error) {
		select {
		case errs <- err:
		default:
		}
	}
	if perSecond == 0 {
		for range 64 {
			working.Go(func() {
				for ctx.Err() == nil {
					if err := one(0); err != nil {
						fail(err)
						return
					}
				}
			})
		}
	} else {
		working.Go(func() {
			tick := time.NewTicker(time.Second / time.Duration(perSecond))
			defer tick.Stop()
			for {
				select {
				case <-ctx.Done():
					return
				case <-tick.C:
					working.Go(func() {
						if err := one(time.Second); err != nil {
							fail(err)
						}
					})
				}
			}
		})
	}
	var l lives
	third := func() (n int, journal float64) { // until the next third is over
		least := 0.0
		for until := time.Now().Add(d / 3); time.Now().Before(until); time.Sleep(200 * time.Millisecond) {
			m := g.metrics(g.admin + "/metrics")
			l.lag = max(l.lag, m["berth_allocator_projection_lag_seconds"])
			if heap := m["go_memstats_heap_alloc_bytes"]; least == 0 || heap < least {
				least = heap
			}
		}
		l.heapFirst, l.heapLast = l.heapLast, least
		mu.Lock()
		defer mu.Unlock()
		return len(all), g.metrics(g.admin + "/metrics")["berth_allocator_journal_bytes_total"]
	}
	n1, journal1 := third()
	n2, journal2 := third()
	n3, journal3 := third()
	l.journalFirst, l.journalLast = (journal2-journal1)/float64(n2-n1), (journal3-journal2)/float64(n3-n2)
	working.Wait()
	select {
	case err := <-errs:
		g.Fatal(err)
	default:
	}
	l.lag = max(l.lag, g.projectionLag())
	l.n, l.bytes, l.writes = len(all), g.written()-bytes, g.writes()-writes
	l.journal = g.metrics(g.admin + "/metrics")["berth_allocator_journal_bytes_total"] - journal
	var second, last []time.Duration
	for _, x := range all {
		l.claims = append(l.claims, x.took)
		switch int(3 * x.at / d) {
		case 1:
			second = append(second, x.took)
		case 2:
			last = append(last, x.took)
		}
	}
	l.first, l.last = quantile(second, 0.5), quantile(last, 0.5)
	return l
}

// writes is how many writes the API server has served.
func (g *ground) writes() float64 {
	raw, err := g.clients.Kubernetes.Discovery().RESTClient().Get().AbsPath("/metrics").DoRaw(g.Context())
	require.NoError(g, err)
	total := 0.0
	for line := range strings.Lines(string(raw)) {
		if !strings.HasPrefix(line, "apiserver_request_total{") || !strings.Contains(line, `code="20`) {
			continue
		}
		for _, verb := range []string{"POST", "PUT", "PATCH", "DELETE"} {
			if strings.Contains(line, `verb="`+verb+`"`) {
				v, err := strconv.ParseFloat(strings.TrimSpace(line[strings.LastIndexByte(line, ' ')+1:]), 64)
				require.NoError(g, err)
				total += v
			}
		}
	}
	return total
}
