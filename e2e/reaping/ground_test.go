package reaping

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/allocator/kube"
	"github.com/berth-sandbox/berth/api/crd"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/devcluster"
	"github.com/berth-sandbox/berth/devcluster/kwok"
	"github.com/berth-sandbox/berth/devcluster/stack"
	"github.com/berth-sandbox/berth/e2e/internal/chance"
	"github.com/berth-sandbox/berth/e2e/internal/network"
	"github.com/berth-sandbox/berth/e2e/reaping/history"
	"github.com/berth-sandbox/berth/internal/bootclock"
)

const (
	namespace = "default"
	poolName  = "reaping"
	warm      = 60
	// lease gives a renewal of 3.3 s and retries of 0.5 s, for a machine that is busy.
	lease = 5 * time.Second
	// maxStale is longer than faults keep a router and the leader apart, several at a time:
	// what is open at a router's Envoy counts as in use no longer than that.
	maxStale = 20 * time.Second
	// offset is by how much the allocators' wall clocks are off, ahead or behind.
	offset = 10 * time.Minute
	// settle is for how long something may be wrong after a fault: a lease until there is
	// another leader, the expiry of what it does not hear of, a look at what is open.
	settle = 15 * time.Second
	// guard is in which time a silent sandbox is released when nothing is wrong any more.
	guard = time.Minute
)

// ground is a Berth with a pool, and the history of what is done to it.
type ground struct {
	*testing.T
	log      *log
	run      history.Run
	network  *network.Network
	cluster  *devcluster.Cluster
	clients  *kube.Clients
	berth    *stack.Stack
	gateways []*gateway
	recorder *recorder
	http     *http.Client

	allocators sync.Mutex // held by a fault of one

	mu       sync.Mutex // gateways is filled under it, and does not change after that
	launches [2]int     // of allocators
}

// gateway is one Envoy with the router that serves it.
type gateway struct {
	*stack.Gateway
	name string
	// client is for requests, streams for WebSockets, which get a connection each.
	client, streams *http.Client
	network         *network.Network
	busy            sync.Mutex // held by a fault of the router or its connections

	// router serves, another may come next. Both change under busy.
	router, another *stack.Process
}

// newGround starts everything.
func newGround(t *testing.T) *ground {
	t.Helper()
	g := &ground{
		T: t, log: &log{},
		// A connection for each call: none that a killed process has left is used.
		http: &http.Client{Transport: &http.Transport{DisableKeepAlives: true}},
	}
	g.run = history.Run{
		Seed: *seedFlag, Boot: bootclock.Now(), Wall: time.Now().Round(0), Offsets: []time.Duration{offset, -offset}, Settle: settle, Guard: guard,
	}
	if g.run.Seed == 0 {
		g.run.Seed = uint64(time.Now().UnixNano())
	}
	t.Logf("seed %d", g.run.Seed)
	g.cluster = devcluster.Start(t, devcluster.Options{CRDs: crd.All()})
	g.recorder = newRecorder(t, g.log)
	t.Cleanup(g.recorder.close)
	nodes, err := kwok.Start(t.Context(), g.cluster, kwok.Options{Nodes: kwok.Names("node", 4), Handler: g.recorder})
	require.NoError(t, err)
	t.Cleanup(func() { g.stop(nodes.Close) })
	g.network = network.New(t)
	g.berth, err = stack.Start(t.Context(), g.cluster, stack.Options{
		BinDir: binDir, Allocators: len(g.launches), Gateways: 3, LeaseDuration: lease, MaxStale: maxStale,
		AllocatorLaunchArgs: g.wallClock,
		ControlOf: func(_ int, listens netip.AddrPort) (netip.AddrPort, error) {
			return g.network.Relay(listens.String(), func(client, listener netip.AddrPort) string { return network.Owner(client, listener, g.routers) })
		},
	})
	require.NoError(t, err)
	t.Cleanup(func() {
		g.stop(g.berth.Stop)
		g.checkLogs()
		if t.Failed() {
			g.evidence()
		}
	})
	for i, w := range g.berth.Gateways {
		transport := &http.Transport{MaxIdleConnsPerHost: *usersFlag}
		t.Cleanup(transport.CloseIdleConnections)
		g.mu.Lock()
		g.gateways = append(g.gateways, &gateway{
			Gateway: w, name: fmt.Sprintf("gateway-%d", i), network: g.network, router: w.Router, another: w.Successor,
			client: &http.Client{Transport: transport}, streams: &http.Client{Transport: &http.Transport{DisableKeepAlives: true}},
		})
		g.mu.Unlock()
	}
	g.network.Reset("") // of routers: so far nobody knew whose connections they were
	g.clients, err = kube.NewClients(g.cluster.RestConfig(), 0, 0)
	require.NoError(t, err)
	pool := stack.DemoPool(namespace, poolName, warm)
	pool.Spec.DefaultPort = int32(nodes.Port())
	pool.Spec.Template.Spec.Containers[0].Env = nil
	require.NoError(t, g.clients.Berth.Post().Namespace(namespace).Resource("sandboxpools").Body(pool).Do(t.Context()).Error())
	return g
}

func (g *ground) stop(f func(context.Context) error) {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	if err := f(ctx); err != nil {
		g.Errorf("stop: %v", err)
	}
}

// wallClock has one allocator ahead and the other behind, and each on the other side the
// next time it is started.
func (g *ground) wallClock(i int) []string {
	g.mu.Lock()
	defer g.mu.Unlock()
	by := offset
	if (g.launches[i]+i)%2 == 1 {
		by = -by
	}
	g.launches[i]++
	return []string{"--wall-clock-offset=" + by.String()}
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
func (g *ground) random(name string) *rand.Rand { return chance.Random(g.run.Seed, name) }

// keep starts allocators again that have ended, as the kubelet would, until ctx ends.
func (g *ground) keep(ctx context.Context, all *sync.WaitGroup) {
	for _, a := range g.berth.Allocators {
		all.Go(func() {
			for ctx.Err() == nil {
				if !a.Running() {
					e := history.Event{Kind: history.Fault, What: startedAgain, Process: a.Name, Began: bootclock.Now()}
					if err := a.Launch(); err != nil {
						e.Error = err.Error()
					}
					e.Ended = bootclock.Now()
					g.log.add(e)
				}
				chance.Pause(ctx, 50*time.Millisecond)
			}
		})
	}
}

// records is the history so far, with what is on record now. live is how many sandboxes
// have not been released.
func (g *ground) records(ctx context.Context) (events []history.Event, live int, err error) {
	var list v1alpha1.SandboxList
	if err := g.clients.Berth.Get().Namespace(namespace).Resource("sandboxes").Do(ctx).Into(&list); err != nil {
		return nil, 0, err
	}
	events = append(g.log.all(), history.Event{Kind: history.Clock, Began: bootclock.Now(), Wall: time.Now().Round(0)})
	for _, s := range list.Items {
		e := history.Event{
			Kind: history.Record, Sandbox: s.Name, Address: s.Spec.PodIP, IdleTimeout: time.Duration(s.Spec.IdleTimeoutSeconds) * time.Second, Reason: s.Status.Reason,
		}
		if s.Status.EndedAt != nil {
			e.Released = s.Status.EndedAt.Time
		} else {
			live++
		}
		events = append(events, e)
	}
	return events, live, nil
}

// allReleased waits until every sandbox that was answered is on record and all that are on
// record were released, and returns the history.
func (g *ground) allReleased() (events []history.Event) {
	g.Helper()
	ctx, cancel := context.WithTimeout(g.Context(), guard)
	defer cancel()
	for {
		all, live, err := g.records(ctx)
		if err == nil {
			events = all
			there := map[string]bool{}
			for _, e := range events {
				there[e.Sandbox] = there[e.Sandbox] || e.Kind == history.Record
			}
			for _, e := range events {
				if e.Kind == history.Claim && !there[e.Sandbox] {
					live++
				}
			}
			if live == 0 {
				return events
			}
		}
		chance.Pause(ctx, 500*time.Millisecond)
		if ctx.Err() != nil {
			g.Errorf("after %v of silence %d sandboxes have not been released (%v)\n%s", guard, live, err, g.lastActive())
			return events
		}
	}
}

// lastActive is what the allocators say of the sandboxes that live.
func (g *ground) lastActive() string {
	ctx, cancel := context.WithTimeout(g.Context(), 10*time.Second)
	defer cancel()
	a, err := g.berth.Leader(ctx)
	if err != nil {
		return err.Error()
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, a.API+"/v1/admin/last-active?format=text&limit=20", http.NoBody)
	if err != nil {
		return err.Error()
	}
	response, err := g.http.Do(r)
	if err != nil {
		return err.Error()
	}
	defer response.Body.Close()
	raw := make([]byte, 8<<10)
	n, _ := response.Body.Read(raw)
	return string(raw[:n])
}

// logs are the log files of Berth's programs.
func (g *ground) logs() []string {
	var all []string
	for _, name := range []string{"allocator", "router", "envoy"} {
		files, _ := filepath.Glob(filepath.Join(g.cluster.Dir(), name+"*.log"))
		all = append(all, files...)
	}
	return all
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

// write writes the history to a file, a line of JSON for the run and for each event.
func (g *ground) write(name string, events []history.Event) error {
	file, err := os.Create(name)
	if err != nil {
		return err
	}
	out := json.NewEncoder(file)
	err = out.Encode(g.run)
	for _, e := range events {
		err = errors.Join(err, out.Encode(e))
	}
	return errors.Join(err, file.Close())
}

// evidence keeps what a failed test leaves: the history and the logs.
func (g *ground) evidence() {
	dir, err := os.MkdirTemp("", "berth-reaping-")
	if err != nil {
		g.Logf("no evidence is kept: %v", err)
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	events, _, err := g.records(ctx)
	if err != nil {
		events = g.log.all()
	}
	err = errors.Join(err, g.write(filepath.Join(dir, "history.jsonl"), events))
	for _, f := range g.logs() {
		raw, readErr := os.ReadFile(f)
		err = errors.Join(err, readErr, os.WriteFile(filepath.Join(dir, filepath.Base(f)), raw, 0o600))
	}
	g.Logf("seed %d; the history and the logs are kept in %s (%v)", g.run.Seed, dir, err)
}
