package soak

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/time/rate"

	"github.com/berth-sandbox/berth/api/sandboxaccess"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/devcluster"
	"github.com/berth-sandbox/berth/devcluster/stack"
	"github.com/berth-sandbox/berth/e2e/harness"
	"github.com/berth-sandbox/berth/e2e/history"
	"github.com/berth-sandbox/berth/envoy"
	"github.com/berth-sandbox/berth/internal/wait"
)

const (
	poolName = "soak"
	replicas = 3 // of allocators and of gateways
	warm     = 6
	mostPods = 40
	// lease gives a renewal of 3.3 s and retries of 0.5 s, for a machine that is busy.
	lease = 5 * time.Second
	// maxStale is how long a router that is cut off goes on serving: long enough for an
	// address to be used again meanwhile, if nothing prevents that.
	maxStale = 4 * time.Second
	// limit bounds each wait when the soak is over.
	limit = 3 * time.Minute
)

// ground is a Berth with a pool, and the sandboxes that requests are sent to.
type ground struct {
	*harness.Berth
	records string // directory in which pods write down what reaches them

	mu    sync.Mutex
	known []sandbox       // sandboxes that requests are sent to
	named map[string]bool // IDs of all that were answered

	stopDirs string       // has a directory for each stopper
	stopped  atomic.Int64 // how often a sandbox was stopped and ran again
}

// newGround starts everything.
func newGround(t *testing.T) *ground {
	t.Helper()
	run := harness.NewRun(t, history.Settings{
		Suite: history.Soak, Seed: *seedFlag, MaxStale: maxStale, Window: envoy.ConnectWindow, StallBudget: envoy.StallBudget,
	}, *historyFlag)
	g := &ground{records: t.TempDir(), named: map[string]bool{}, stopDirs: t.TempDir()}
	g.Berth = run.Start(harness.Options{
		Cluster: devcluster.Options{Nodes: 1, NodePath: []string{binDir}},
		Stack: stack.Options{BinDir: binDir, Allocators: replicas, Gateways: replicas, LeaseDuration: lease,
			MaxStale: maxStale, AllocatorArgs: []string{"--snapshots=file://" + t.TempDir()}},
		Relays: true, KubeRelays: true, Connections: users,
	})
	g.CreatePool(poolName, warm, func(p *v1alpha1.SandboxPool) {
		p.Spec.Agent = &v1alpha1.PoolAgent{Enabled: true, Port: sandboxaccess.AgentPort}
		p.Spec.WakeOnTraffic = true
		p.Spec.MaxPods = new(int32)
		*p.Spec.MaxPods = mostPods
		g.record(p)
	})
	g.createStopPools()
	return g
}

// record has the pods of a pool write down what reaches them. A request that comes late may reach the next pod at the
// address, whatever pool that is of.
func (g *ground) record(p *v1alpha1.SandboxPool) {
	container := &p.Spec.Template.Spec.Containers[0]
	container.Args = append(container.Args, "--record="+g.records)
}

// mostDurations bounds how long faults are made when too little happens, in *durationFlag.
const mostDurations = 5

// It takes more than 20 s because a round of faults does. On a busy machine faults take longer and
// fewer requests are sent: the faults go on until enough has happened for the verdict to mean anything.
// Invariant: I1, I2, I3
func TestNoRequestReachesTheWrongSandboxUnderFaults(t *testing.T) {
	require.GreaterOrEqual(t, *durationFlag, 20*time.Second)
	g := newGround(t)
	perSecond := *rateFlag
	if perSecond == 0 {
		perSecond = 500
		if harness.Race {
			perSecond = 150
		}
	}
	// Allocators are kept running to the end of the test. Faults stop first, then the load.
	g.KeepAllocators()
	working, stopWorking := context.WithCancel(t.Context())
	disturbing, stopDisturbing := context.WithTimeout(t.Context(), mostDurations**durationFlag)
	var disturbed, worked sync.WaitGroup
	t.Cleanup(func() {
		stopDisturbing()
		disturbed.Wait()
		stopWorking()
		worked.Wait()
	})
	l := &load{ground: g, limiter: rate.NewLimiter(rate.Limit(perSecond), 10)}
	l.start(working, &worked)
	disturbed.Go(func() {
		random := g.Random("faults")
		g.Disturb(working, &disturbed, random, faults(), faultEvery) // one whole round at least
		for disturbing.Err() == nil {
			g.Disturb(disturbing, &disturbed, random, faults(), faultEvery)
		}
	})
	disturbed.Go(func() { g.churn(disturbing) })
	disturbed.Go(func() {
		wait.Sleep(disturbing, *durationFlag)
		for g.lacks(disturbing) && wait.Sleep(disturbing, lackEvery) {
		}
		stopDisturbing()
	})
	disturbed.Wait()
	g.recovers(l)
	stopWorking()
	worked.Wait()
	g.writeRecords()
	received, err := g.received()
	require.NoError(t, err)
	for _, r := range received {
		g.History.Add(r)
	}
	h := g.Judge()
	for _, lack := range tooFew(history.Count(h), *durationFlag) {
		g.Error(lack)
	}
	if n := g.stopped.Load(); n == 0 {
		g.Error("nothing is proven: no sandbox was stopped and ran again")
	} else {
		g.Logf("%d times a sandbox was stopped and ran again", n)
	}
}

// lackEvery is the pause between two counts of what has happened.
const lackEvery = 5 * time.Second

// lacks reports whether too little has happened so far.
func (g *ground) lacks(ctx context.Context) bool {
	records, err := g.Records(ctx)
	if err != nil {
		return true
	}
	received, err := g.received()
	if err != nil {
		return true
	}
	h := history.New(slices.Concat(g.History.All(), records, received))
	return g.stopped.Load() == 0 || len(tooFew(history.Count(h), *durationFlag)) > 0
}

// recovers waits until every gateway serves a sandbox again that it could not have
// known before.
func (g *ground) recovers(l *load) {
	g.Helper()
	random := g.Random("recovery")
	var s history.Event
	harness.Eventually(g, limit, func(ctx context.Context) error {
		s = g.call(ctx, random, claimOf("recovery", time.Minute), http.MethodPost, "/sandboxes", claimBody(time.Minute))
		if s.Code != http.StatusCreated {
			return fmt.Errorf("claim: %d %s %s", s.Code, s.Reason, s.Error)
		}
		return nil
	})
	g.knows(s.Sandbox)
	for _, w := range g.Gateways {
		require.True(g, w.Serving().Running(), "%s has no router", w.Name)
		harness.Eventually(g, limit, func(ctx context.Context) error {
			e, _, host := l.begin(random, s.Sandbox, "get")
			e.Gateway = w.Name
			r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+w.Addr.String()+"/", io.NopCloser(http.NoBody))
			if err != nil {
				return err
			}
			if e = l.send(e, w, r, host); e.PodUID == "" {
				return fmt.Errorf("%s answers %d %s %s", w.Name, e.Code, e.Reason, e.Error)
			}
			return nil
		})
	}
}

// writeRecords records which pod each sandbox is, when all that were answered are on record.
func (g *ground) writeRecords() {
	g.Helper()
	var records []history.Event
	harness.Eventually(g, limit, func(ctx context.Context) (err error) {
		if records, err = g.Records(ctx); err != nil {
			return err
		}
		there := map[string]bool{}
		for _, r := range records {
			there[r.Sandbox] = true
		}
		g.mu.Lock()
		defer g.mu.Unlock()
		for id := range g.named {
			if !there[id] {
				return fmt.Errorf("sandbox %s was answered, and has no Sandbox object", id)
			}
		}
		return nil
	})
	for _, r := range records {
		g.History.Add(r)
	}
}

// received returns what the pods have received. A pod that is killed while it writes may leave the
// last line of its file unfinished.
func (g *ground) received() (all []history.Event, err error) {
	files, err := filepath.Glob(filepath.Join(g.records, "*.jsonl"))
	if err != nil {
		return nil, err
	}
	for _, name := range files {
		raw, err := os.ReadFile(name)
		if err != nil {
			return nil, err
		}
		for line := range bytes.Lines(raw) {
			if !bytes.HasSuffix(line, []byte("\n")) {
				break
			}
			var r struct {
				At                                       int64
				Pod, PodUID, Host, Method, Path, Request string
			}
			if err := json.Unmarshal(line, &r); err != nil {
				return nil, fmt.Errorf("%s: %w", name, err)
			}
			all = append(all, history.Event{
				Kind: history.Received, Began: time.Duration(r.At), Sandbox: harness.SandboxOf(r.Host), Request: r.Request,
				Pod: r.Pod, PodUID: r.PodUID, What: r.Method + " " + r.Path,
			})
		}
	}
	return all, nil
}

// tooFew says what has not happened often enough for the verdict to mean anything.
func tooFew(v history.Tally, lasted time.Duration) []string {
	var all []string
	least := func(what string, count int, perMinute float64) {
		if want := int(math.Round(perMinute * lasted.Minutes())); count < want {
			all = append(all, fmt.Sprintf("nothing is proven: %s: %d, expected %d at least", what, count, want))
		}
	}
	least("requests", v.Total(history.Requests), 2000)
	least("requests received by pods", v.Total(history.Receipts), 500)
	least("claims answered", v.Total(history.Claims), 15)
	least("releases acknowledged by all routers", v[history.Releases][history.Acknowledged], 3)
	least("addresses used again", v.Total(history.Reuses), 10)
	least("requests for a sandbox that was gone", v.Total(history.After), 100)
	least("requests for a sandbox that was gone, with another one at its address", v.Total(history.Tempted), 30)
	least("sandboxes that fell asleep", v.Total(history.Sleeps), 4)
	for _, f := range allFaults() {
		least("faults "+f, v[history.Faults][f], 0.7)
	}
	for _, what := range kinds() {
		least("requests "+what, v[history.Sent][what], 5)
	}
	return all
}

// allFaults are the names of all faults.
func allFaults() (all []string) {
	for _, f := range faults() {
		all = append(all, f.Name)
	}
	return append(all, podDeleted+harness.ByForce, podDeleted+harness.Plainly)
}

// kinds are the kinds of requests.
func kinds() []string { return []string{"get", "post", "http2", "slow", "websocket"} }

func TestRunInWhichTooLittleHappensFails(t *testing.T) {
	full := history.Tally{
		history.Requests: {history.Answered: 4000}, history.Receipts: {"": 1000}, history.Claims: {"": 30},
		history.Releases: {history.Acknowledged: 6}, history.Reuses: {"": 20}, history.After: {"": 200},
		history.Sleeps:  {"": 8},
		history.Tempted: {"": 60}, history.Sent: {}, history.Faults: {},
	}
	for _, f := range allFaults() {
		full[history.Faults][f] = 1
	}
	for _, what := range kinds() {
		full[history.Sent][what] = 10
	}
	everything := 8 + len(allFaults()) + len(kinds())
	require.Empty(t, tooFew(full, 2*time.Minute))
	require.Len(t, tooFew(full, 4*time.Minute), everything)
	require.Len(t, tooFew(history.Tally{}, 45*time.Second), everything, "each fault happens in make test")
	full[history.Tempted][""]--
	require.Len(t, tooFew(full, 2*time.Minute), 1)
	require.NotEmpty(t, tooFew(history.Tally{}, 20*time.Second))
}

func TestRoundHasEveryFaultAndFollowsItsSeed(t *testing.T) {
	names := func(seed uint64) (all []string) {
		for _, f := range harness.Round(harness.Random(seed, "faults"), faults()) {
			all = append(all, f.Name)
		}
		return all
	}
	require.Equal(t, names(1), names(1))
	require.NotEqual(t, names(1), names(2))
	require.ElementsMatch(t, names(1), names(2))
	for _, f := range faults() {
		require.Contains(t, names(1), f.Name)
	}
}
