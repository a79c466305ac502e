package chaos

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/berth-sandbox/berth/allocator/kube"
	"github.com/berth-sandbox/berth/allocator/rest"
	"github.com/berth-sandbox/berth/api/crd"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/devcluster"
	"github.com/berth-sandbox/berth/devcluster/kwok"
	"github.com/berth-sandbox/berth/devcluster/stack"
)

const (
	namespace = "default"
	poolName  = "chaos"
	// limit bounds one scenario. It is a guard and not what is tested.
	limit = 6 * time.Minute
	// lease gives a renewal of 2 s and retries of 0.3 s. quietLease is for tests in
	// which the leader is not to change, however slow the machine.
	lease, quietLease = 3 * time.Second, 15 * time.Second
	// maxStale is short, so that the pods of what was released under an earlier
	// leader go before the end of a test.
	maxStale = 2 * time.Second
)

// ground is a Berth with a pool, and the history of what is done to it.
type ground struct {
	*testing.T
	*history
	// ctx ends when the scenario has taken too long.
	ctx     context.Context
	cluster *devcluster.Cluster
	clients *kube.Clients
	berth   *stack.Stack
	http    *http.Client
	seed    uint64

	mu   sync.Mutex
	held map[*stack.Allocator]bool // not to be started again, for now
}

// options say what a test needs.
type options struct {
	replicas int
	lease    time.Duration // default lease
	proxied  *faults       // what the allocators reach the API server through, if set
}

// newGround starts everything.
func newGround(t *testing.T, o options) *ground {
	t.Helper()
	g := &ground{
		T: t, history: &history{}, seed: uint64(time.Now().UnixNano()), held: map[*stack.Allocator]bool{},
		// A connection for each call: none that a killed process has left is used.
		http: &http.Client{Transport: &http.Transport{DisableKeepAlives: true}},
	}
	t.Logf("seed %d", g.seed)
	g.cluster = devcluster.Start(t, devcluster.Options{CRDs: crd.All()})
	nodes, err := kwok.Start(t.Context(), g.cluster, kwok.Options{Nodes: kwok.Names("node", 4)})
	require.NoError(t, err)
	t.Cleanup(func() { g.stop(nodes.Close) })
	so := stack.Options{BinDir: binDir, Allocators: o.replicas, LeaseDuration: cmp.Or(o.lease, lease), MaxStale: maxStale}
	if o.proxied != nil {
		so.Kubeconfig = o.proxied.start(t, g.cluster)
	}
	g.berth, err = stack.Start(t.Context(), g.cluster, so)
	require.NoError(t, err)
	t.Cleanup(func() {
		g.stop(g.berth.Stop)
		g.checkRaces()
		if t.Failed() {
			g.evidence()
		}
	})
	g.clients, err = kube.NewClients(g.cluster.RestConfig(), 0, 0)
	require.NoError(t, err)
	var cancel context.CancelFunc
	g.ctx, cancel = context.WithTimeout(t.Context(), limit)
	t.Cleanup(cancel)
	g.keep()
	return g
}

func (g *ground) stop(f func(context.Context) error) {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	if err := f(ctx); err != nil {
		g.Errorf("stop: %v", err)
	}
}

// random returns numbers that are the same for the same seed.
func (g *ground) random(name string) *rand.Rand {
	sum := g.seed
	for _, b := range []byte(name) {
		sum = sum*31 + uint64(b)
	}
	return rand.New(rand.NewPCG(g.seed, sum))
}

// keep starts allocators again that have ended, until the test is over, as the
// kubelet would.
func (g *ground) keep() {
	ctx, stop := context.WithCancel(g.Context())
	var all sync.WaitGroup
	for _, a := range g.berth.Allocators {
		all.Go(func() {
			ticker := time.NewTicker(20 * time.Millisecond)
			defer ticker.Stop()
			for {
				select {
				case <-ctx.Done():
					return
				case <-ticker.C:
				}
				if a.Running() || g.isHeld(a) {
					continue
				}
				g.did(a.Name, "start")
				if err := a.Start(ctx); err != nil && ctx.Err() == nil {
					g.did(a.Name, fmt.Sprintf("did not start: %.300s", err))
				}
			}
		})
	}
	g.Cleanup(func() {
		stop()
		all.Wait()
	})
}

func (g *ground) hold(a *stack.Allocator, held bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.held[a] = held
}

func (g *ground) isHeld(a *stack.Allocator) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.held[a]
}

// leader waits for an allocator that leads.
func (g *ground) leader() *stack.Allocator {
	g.Helper()
	a, err := g.berth.Leader(g.ctx)
	require.NoError(g, err)
	return a
}

// newPool makes a pool and waits until it has its pods.
func (g *ground) newPool(warm int32, change func(*v1alpha1.SandboxPool)) {
	g.Helper()
	pool := stack.DemoPool(namespace, poolName, warm)
	pool.Spec.Template.Spec.Containers[0].Env = nil
	if change != nil {
		change(pool)
	}
	require.NoError(g, g.clients.Berth.Post().Namespace(namespace).Resource("sandboxpools").Body(pool).Do(g.ctx).Error())
	if change == nil {
		g.eventually(func() error {
			if s := g.readPool().Status; s.Warm < warm {
				return fmt.Errorf("%d of %d pods are warm", s.Warm, warm)
			}
			return nil
		})
	}
}

func (g *ground) readPool() v1alpha1.SandboxPool {
	g.Helper()
	var p v1alpha1.SandboxPool
	require.NoError(g, g.clients.Berth.Get().Namespace(namespace).Resource("sandboxpools").Name(poolName).Do(g.ctx).Into(&p))
	return p
}

// pods lists the pods of the pool.
func (g *ground) pods() ([]corev1.Pod, error) {
	list, err := g.clients.Kubernetes.CoreV1().Pods(namespace).List(g.ctx, metav1.ListOptions{LabelSelector: v1alpha1.LabelPool + "=" + poolName})
	if err != nil {
		return nil, fmt.Errorf("list pods: %w", err)
	}
	return list.Items, nil
}

// deletePod deletes a pod by hand, at once, and writes it down before.
func (g *ground) deletePod(p corev1.Pod) {
	e := event{Op: opDeletePod, Pod: p.Name, PodUID: string(p.UID), Began: g.tick()}
	err := g.clients.Kubernetes.CoreV1().Pods(namespace).Delete(g.ctx, p.Name, metav1.DeleteOptions{
		GracePeriodSeconds: new(int64), Preconditions: &metav1.Preconditions{UID: &p.UID},
	})
	switch {
	case apierrors.IsNotFound(err), apierrors.IsConflict(err): // it has gone by itself
		return
	case err != nil:
		e.Error = err.Error()
	}
	g.add(e)
}

// eventually waits until check returns nil.
func (g *ground) eventually(check func() error) {
	g.Helper()
	if err := g.wait(check); err != nil {
		g.Fatal(err)
	}
}

func (g *ground) wait(check func() error) error {
	ticker := time.NewTicker(25 * time.Millisecond)
	defer ticker.Stop()
	for {
		err := check()
		if err == nil {
			return nil
		}
		select {
		case <-g.ctx.Done():
			return fmt.Errorf("the scenario has taken too long: %w", err)
		case <-ticker.C:
		}
	}
}

// judge waits until nothing moves any more, and judges.
func (g *ground) judge() {
	g.Helper()
	var w world
	err := g.wait(func() (err error) {
		w, err = g.look()
		return err
	})
	if err != nil {
		g.Errorf("things do not come to rest: %v", err)
	}
	events, arrivals := g.history.read()
	for _, wrong := range check(events, arrivals, w) {
		g.Error(wrong)
	}
	calls, answered := map[op]int{}, map[string]bool{}
	for _, e := range events {
		calls[e.Op]++
		if e.Op == opClaim && e.Code == http.StatusCreated {
			answered[e.ID] = true
		}
	}
	g.Logf("history: %v; %d sandboxes answered, %d on record, %d live, %d pods", calls, len(answered), len(w.Records), len(w.Listed), len(w.Pods))
}

// soon is when a sandbox ends that is not given time to see the end of a test.
const soon = time.Minute

// listed reads all pages of the list.
func (g *ground) listed() (all []rest.Sandbox, err error) {
	for token, more := "", true; more; more = token != "" {
		r, err := http.NewRequestWithContext(g.ctx, http.MethodGet, g.leader().API+"/sandboxes?nextToken="+token, http.NoBody)
		if err != nil {
			return nil, err
		}
		response, err := g.http.Do(r)
		if err != nil {
			return nil, err
		}
		raw, err := io.ReadAll(response.Body)
		_ = response.Body.Close()
		if err != nil || response.StatusCode != http.StatusOK {
			return nil, fmt.Errorf("list: %d %s: %w", response.StatusCode, raw, err)
		}
		var page []rest.Sandbox
		if err := json.Unmarshal(raw, &page); err != nil {
			return nil, err
		}
		all, token = append(all, page...), response.Header.Get(rest.NextTokenHeader)
	}
	return all, nil
}

// look reads the world. The error says that it still moves.
func (g *ground) look() (world, error) {
	w := world{At: time.Now(), Read: map[string]int{}}
	var err error
	if w.Listed, err = g.listed(); err != nil {
		return w, err
	}
	var records v1alpha1.SandboxList
	if err := g.clients.Berth.Get().Namespace(namespace).Resource("sandboxes").Do(g.ctx).Into(&records); err != nil {
		return w, err
	}
	if w.Pods, err = g.pods(); err != nil {
		return w, err
	}
	w.Records, w.Pool = records.Items, g.readPool()
	events, _ := g.history.read()
	for _, e := range events {
		if _, read := w.Read[e.ID]; e.Op != opClaim || e.Code != http.StatusCreated || read {
			continue
		}
		var raw []byte
		if w.Read[e.ID], raw, err = g.ask(g.leader().API, http.MethodGet, "/sandboxes/"+e.ID, "", ""); err != nil {
			return w, err
		}
		if w.Read[e.ID] == http.StatusServiceUnavailable {
			return w, fmt.Errorf("read: %s", raw)
		}
	}
	return w, w.moves(g.metrics())
}

// moves says what is still under way.
func (w world) moves(metrics map[string]float64) error {
	for _, s := range w.Listed {
		if s.EndAt.Before(w.At.Add(soon)) {
			return fmt.Errorf("sandbox %s ends at %v", s.SandboxID, s.EndAt)
		}
	}
	status := w.Pool.Status
	waiting := metrics["berth_allocator_projection_waiting"] + metrics["berth_allocator_labels_waiting"] + metrics["berth_allocator_writes_waiting"]
	switch {
	case waiting > 0:
		return fmt.Errorf("%v writes wait", waiting)
	case status.Pending+status.Releasing > 0 || status.Warm != w.Pool.Spec.Warm || int(status.Claimed) != len(w.Listed):
		return fmt.Errorf("the pool asks for %d, has %+v, and %d sandboxes are listed", w.Pool.Spec.Warm, status, len(w.Listed))
	case len(w.Pods) != int(status.Warm+status.Claimed):
		return fmt.Errorf("%d pods are there: %+v", len(w.Pods), status)
	}
	return nil
}

// metrics reads the plain values of the leader's metrics.
func (g *ground) metrics() map[string]float64 {
	all := map[string]float64{}
	_, raw, err := g.ask(g.leader().Admin, http.MethodGet, "/metrics", "", "")
	if err != nil {
		return map[string]float64{"berth_allocator_writes_waiting": 1} // it has just gone
	}
	lines := bufio.NewScanner(strings.NewReader(string(raw)))
	for lines.Scan() {
		name, value, _ := strings.Cut(lines.Text(), " ")
		if v, err := strconv.ParseFloat(value, 64); err == nil {
			all[name] = v
		}
	}
	return all
}

// checkRaces fails the test when one of the programs reported a data race.
func (g *ground) checkRaces() {
	for _, f := range g.logs() {
		if raw, err := os.ReadFile(f); err == nil && strings.Contains(string(raw), "WARNING: DATA RACE") {
			g.Errorf("%s reports a data race", filepath.Base(f))
		}
	}
}

// logs are the log files of Berth's programs.
func (g *ground) logs() []string {
	files, _ := filepath.Glob(filepath.Join(g.cluster.Dir(), "*.log"))
	return slices.DeleteFunc(files, func(f string) bool {
		name := filepath.Base(f)
		return !strings.HasPrefix(name, "allocator") && !strings.HasPrefix(name, "router")
	})
}

// evidence keeps what a failed test leaves: the history and the whole logs in a
// directory of their own, the ends of the logs in the test's output.
func (g *ground) evidence() {
	dir, err := os.MkdirTemp("", "berth-chaos-"+g.Name()+"-")
	if err != nil {
		g.Logf("no evidence is kept: %v", err)
		return
	}
	err = os.WriteFile(filepath.Join(dir, "history.jsonl"), g.lines(), 0o600)
	for _, f := range g.logs() {
		raw, readErr := os.ReadFile(f)
		err = errors.Join(err, readErr, os.WriteFile(filepath.Join(dir, filepath.Base(f)), raw, 0o600))
		g.Logf("%s:\n%s", filepath.Base(f), raw[max(0, len(raw)-3000):])
	}
	g.Logf("seed %d; the history and the logs are kept in %s (%v)", g.seed, dir, err)
}
