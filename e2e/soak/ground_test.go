package soak

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/berth-sandbox/berth/allocator/kube"
	"github.com/berth-sandbox/berth/api/crd"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/devcluster"
	"github.com/berth-sandbox/berth/devcluster/stack"
	"github.com/berth-sandbox/berth/e2e/internal/chance"
	"github.com/berth-sandbox/berth/e2e/internal/network"
	"github.com/berth-sandbox/berth/e2e/soak/history"
	"github.com/berth-sandbox/berth/envoy"
	"github.com/berth-sandbox/berth/internal/bootclock"
)

const (
	namespace = "default"
	poolName  = "soak"
	replicas  = 3 // of allocators and of gateways
	warm      = 6
	mostPods  = 40
	// lease gives a renewal of 3.3 s and retries of 0.5 s, for a machine that is busy.
	lease = 5 * time.Second
	// maxStale is for how long a router that is cut off goes on serving: long enough for
	// an address to be used again meanwhile, if nothing prevents that.
	maxStale = 4 * time.Second
	// limit bounds what is waited for when the soak is over.
	limit = 3 * time.Minute
)

// ground is a Berth with a pool, and the history of what is done to it.
type ground struct {
	*testing.T
	*history.Writer
	file     string // of the history
	seed     uint64
	network  *network.Network
	cluster  *devcluster.Cluster
	clients  *kube.Clients
	berth    *stack.Stack
	gateways []*gateway
	records  string // directory in which pods write down what reaches them
	http     *http.Client

	allocators sync.Mutex // held by a fault of one

	mu    sync.Mutex      // gateways is filled under it, and does not change after that
	known []sandbox       // sandboxes that requests are sent to
	named map[string]bool // IDs of all that were answered
}

// gateway is one Envoy with the router that serves it.
type gateway struct {
	*stack.Gateway
	name string
	// client is for requests, streams for WebSockets, which get a connection each: net/http
	// sends a request without a body again by itself if an idle connection was closed.
	client, streams *http.Client
	// parts is held by a fault of its processes, link by one of the router's connections.
	parts, link sync.Mutex

	// router serves, another may come next. Both change under parts.
	router, another *stack.Process
}

// newGround starts everything.
func newGround(t *testing.T) *ground {
	t.Helper()
	g := &ground{
		T: t, seed: *seedFlag, records: t.TempDir(), named: map[string]bool{},
		// A connection for each call: none that a killed process has left is used.
		http: &http.Client{Transport: &http.Transport{DisableKeepAlives: true}},
	}
	if g.seed == 0 {
		g.seed = uint64(time.Now().UnixNano())
	}
	g.cluster = devcluster.Start(t, devcluster.Options{Nodes: 1, NodePath: []string{binDir}, CRDs: crd.All()})
	t.Logf("seed %d", g.seed)
	g.openHistory()
	g.network = network.New(t)
	var err error
	g.berth, err = stack.Start(t.Context(), g.cluster, stack.Options{
		BinDir: binDir, Allocators: replicas, Gateways: replicas, LeaseDuration: lease, MaxStale: maxStale,
		KubeconfigOf: g.kubeconfig,
		ControlOf: func(_ int, listens netip.AddrPort) (netip.AddrPort, error) {
			return g.network.Relay(listens.String(), func(client, listener netip.AddrPort) string { return network.Owner(client, listener, g.routers) })
		},
	})
	require.NoError(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		defer cancel()
		if err := g.berth.Stop(ctx); err != nil {
			t.Errorf("stop Berth: %v", err)
		}
		g.checkLogs()
		if t.Failed() {
			g.evidence()
		}
	})
	for i, w := range g.berth.Gateways {
		transport := &http.Transport{MaxIdleConnsPerHost: users}
		t.Cleanup(transport.CloseIdleConnections)
		g.mu.Lock()
		g.gateways = append(g.gateways, &gateway{
			Gateway: w, name: fmt.Sprintf("gateway-%d", i), router: w.Router, another: w.Successor,
			client: &http.Client{Transport: transport}, streams: &http.Client{Transport: &http.Transport{DisableKeepAlives: true}},
		})
		g.mu.Unlock()
	}
	g.network.Reset("") // of routers: so far nobody knew whose connections they were
	g.clients, err = kube.NewClients(g.cluster.RestConfig(), 0, 0)
	require.NoError(t, err)
	pool := stack.DemoPool(namespace, poolName, warm)
	pool.Spec.MaxPods = new(int32)
	*pool.Spec.MaxPods = mostPods
	container := &pool.Spec.Template.Spec.Containers[0]
	container.Args = append(container.Args, "--record="+g.records)
	require.NoError(t, g.clients.Berth.Post().Namespace(namespace).Resource("sandboxpools").Body(pool).Do(t.Context()).Error())
	return g
}

// openHistory begins the file.
func (g *ground) openHistory() {
	g.file = *historyFlag
	if g.file == "" {
		g.file = filepath.Join(g.TempDir(), "history.jsonl")
	}
	file, err := os.Create(g.file)
	require.NoError(g, err)
	g.Cleanup(func() { _ = file.Close() })
	g.Writer = history.NewWriter(file)
	g.Add(history.Event{Kind: history.Run, Began: bootclock.Now(), Seed: g.seed, MaxStale: maxStale, Window: envoy.Window, StallBudget: envoy.StallBudget})
}

func allocatorName(i int) string { return fmt.Sprintf("allocator-%d", i) }

// kubeconfig leads an allocator to the API server through a relay of its own. TLS goes
// through it as it is.
func (g *ground) kubeconfig(i int) (string, error) {
	config, err := clientcmd.LoadFromFile(g.cluster.Kubeconfig())
	if err != nil {
		return "", err
	}
	for _, c := range config.Clusters {
		server, err := url.Parse(c.Server)
		if err != nil {
			return "", err
		}
		at, err := g.network.Relay(server.Host, func(_, _ netip.AddrPort) string { return allocatorName(i) })
		if err != nil {
			return "", err
		}
		c.TLSServerName = server.Hostname()
		server.Host = at.String()
		c.Server = server.String()
	}
	file := filepath.Join(g.TempDir(), "kubeconfig")
	return file, clientcmd.WriteToFile(*config, file)
}

// routers are the processes of the routers there are, by gateway.
func (g *ground) routers() map[string][]int {
	g.mu.Lock()
	defer g.mu.Unlock()
	all := map[string][]int{}
	for _, w := range g.gateways {
		for _, p := range []*stack.Process{w.Router, w.Successor} {
			if pid := p.Pid(); pid != 0 {
				all[w.name] = append(all[w.name], pid)
			}
		}
	}
	return all
}

// random returns numbers that are the same for the same seed and name.
func (g *ground) random(name string) *rand.Rand { return chance.Random(g.seed, name) }

// keep starts allocators again that have ended, as the kubelet would, until ctx ends.
func (g *ground) keep(ctx context.Context, all *sync.WaitGroup) {
	for i, a := range g.berth.Allocators {
		all.Go(func() {
			for ctx.Err() == nil {
				if !a.Running() {
					e := history.Event{Kind: history.Fault, What: "allocator-started-again", Process: allocatorName(i), Began: bootclock.Now()}
					if err := a.Launch(); err != nil {
						e.Error = err.Error()
					}
					e.Ended = bootclock.Now()
					g.Add(e)
				}
				chance.Pause(ctx, 50*time.Millisecond)
			}
		})
	}
}

// claimed lists the pods that hold sandboxes.
func (g *ground) claimed(ctx context.Context) []corev1.Pod {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	list, err := g.clients.Kubernetes.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{
		LabelSelector: v1alpha1.LabelPool + "=" + poolName + "," + v1alpha1.LabelPhase + "=" + v1alpha1.PhaseClaimed,
	})
	if err != nil {
		if ctx.Err() == nil {
			g.Errorf("list pods: %v", err)
		}
		return nil
	}
	return slices.DeleteFunc(list.Items, func(p corev1.Pod) bool { return p.DeletionTimestamp != nil })
}

// deletePods deletes up to n pods that hold sandboxes.
func (g *ground) deletePods(ctx context.Context, random *rand.Rand, n int, force bool) {
	all := g.claimed(ctx)
	random.Shuffle(len(all), func(i, k int) { all[i], all[k] = all[k], all[i] })
	for _, p := range all[:min(n, len(all))] {
		o := metav1.DeleteOptions{Preconditions: metav1.NewUIDPreconditions(string(p.UID))}
		e := history.Event{Kind: history.Delete, What: "plainly", Pod: p.Name, PodUID: string(p.UID), Began: bootclock.Now()}
		if force {
			e.What, o.GracePeriodSeconds = "by force", new(int64)
		}
		call, cancel := context.WithTimeout(ctx, 5*time.Second)
		err := g.clients.Kubernetes.CoreV1().Pods(namespace).Delete(call, p.Name, o)
		cancel()
		e.Ended = bootclock.Now()
		if err != nil {
			e.Error = err.Error()
		}
		g.Add(e)
		switch {
		case err == nil:
			g.Add(history.Event{Kind: history.Fault, What: "pod-deleted " + e.What, Process: p.Name, Began: e.Began, Ended: e.Ended})
		case apierrors.IsNotFound(err), apierrors.IsConflict(err), ctx.Err() != nil: // it has gone by itself
		default:
			g.Errorf("delete pod: %v", err)
		}
	}
}

// eventually waits until check returns nil.
func (g *ground) eventually(check func(context.Context) error) {
	g.Helper()
	ctx, cancel := context.WithTimeout(g.Context(), limit)
	defer cancel()
	ticker := time.NewTicker(50 * time.Millisecond)
	defer ticker.Stop()
	for {
		err := check(ctx)
		if err == nil {
			return
		}
		select {
		case <-ctx.Done():
			g.Fatalf("after %v: %v", limit, err)
		case <-ticker.C:
		}
	}
}

// logs are the log files of Berth's programs.
func (g *ground) logs() []string {
	files, _ := filepath.Glob(filepath.Join(g.cluster.Dir(), "*.log"))
	return slices.DeleteFunc(files, func(f string) bool {
		name := filepath.Base(f)
		return !strings.HasPrefix(name, "allocator") && !strings.HasPrefix(name, "router") && !strings.HasPrefix(name, "envoy")
	})
}

// checkLogs fails the test when one of the programs has a data race or has panicked.
func (g *ground) checkLogs() {
	for _, f := range g.logs() {
		raw, err := os.ReadFile(f)
		require.NoError(g, err)
		for _, bad := range []string{"WARNING: DATA RACE", "\npanic: ", "\nfatal error: "} {
			if strings.Contains(string(raw), bad) {
				g.Errorf("%s: %s", filepath.Base(f), strings.TrimSpace(bad))
			}
		}
	}
}

// evidence keeps what a failed test leaves: the history and the logs.
func (g *ground) evidence() {
	dir, err := os.MkdirTemp("", "berth-soak-")
	if err != nil {
		g.Logf("no evidence is kept: %v", err)
		return
	}
	err = g.Flush()
	for _, f := range append(g.logs(), g.file) {
		raw, readErr := os.ReadFile(f)
		err = errors.Join(err, readErr, os.WriteFile(filepath.Join(dir, filepath.Base(f)), raw, 0o600))
	}
	g.Logf("seed %d; the history and the logs are kept in %s (%v)", g.seed, dir, err)
}
