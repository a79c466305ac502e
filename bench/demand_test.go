package bench

import (
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/devcluster/hollow"
	"github.com/berth-sandbox/berth/devcluster/stack"
	"github.com/berth-sandbox/berth/e2e/harness"
)

// The trace of BenchmarkDemand: a quiet time, and a busy one with bursts. The first burst comes at demandBurst0, the
// others at random intervals.
const (
	demandQuiet  = 80 * time.Second
	demandTrace  = 4 * time.Minute
	demandSlow   = 0.5 // claims a second, quiet
	demandFast   = 3.  // claims a second, busy
	demandBurst  = 40  // claims within a second
	demandBurst0 = demandQuiet + 20*time.Second
	demandEvery  = 40 * time.Second
	demandLife   = 20 * time.Second // of sandboxes; exponential, at most three times that
	demandStart  = 4 * time.Second  // of pods, median
	demandSigma  = 0.4              // of the logarithm
	// demandLearned is when the claims of the first burst are over.
	demandLearned = demandBurst0 + 15*time.Second
)

// demandClaim is a claim of the trace.
type demandClaim struct{ at, life time.Duration }

// BenchmarkDemand replays a trace with bursts, on pods that take some seconds to start: with a pool that follows
// the demand, and then with a fixed pool that has the mean number of idle pods of the first one. "warm" are the
// claims that were served from a warm pod at once, "later" those of them after the first burst. "pods" are the pods
// that were idle or claimed, times seconds, against those of an oracle that knows the trace: it creates a pod one mean
// start time before each claim.
func BenchmarkDemand(b *testing.B) {
	for range b.N {
		r := rand.New(rand.NewPCG(1, 1)) //nolint:gosec // the same trace in each run
		trace := demandClaims(r)
		starts := func() time.Duration {
			return time.Duration(float64(demandStart) * math.Exp(demandSigma*rand.NormFloat64()))
		}
		g := newGroundWith(b, stack.Options{LeaseDuration: 15 * time.Second}, hollow.Options{Nodes: 10, StartTime: starts})
		g.warmUp(demandBurst)
		following := g.replayed("demand", 2, 200, trace)
		fixed := g.replayed("fixed", int32(math.Round(following.idle)), 0, trace)
		for name, run := range map[string]demandRun{"demand": following, "fixed": fixed} {
			b.Logf("%s: %+v", name, run)
			b.ReportMetric(run.warm, name+"_warm_%")
			b.ReportMetric(run.later, name+"_later_%")
			b.ReportMetric(run.idle, name+"_idle_pods")
			b.ReportMetric(run.pods, name+"_pods/oracle")
			b.ReportMetric(run.p99, name+"_p99_ms")
		}
	}
}

func demandClaims(r *rand.Rand) (trace []demandClaim) {
	add := func(at time.Duration) {
		trace = append(trace, demandClaim{at, time.Duration(min(3, r.ExpFloat64()) * float64(demandLife))})
	}
	for at := time.Duration(0); at < demandTrace; {
		rate := demandFast
		if at < demandQuiet {
			rate = demandSlow
		}
		at += time.Duration(r.ExpFloat64() / rate * float64(time.Second))
		add(at)
	}
	for at := demandBurst0; at < demandTrace; at += demandEvery/2 + time.Duration(r.ExpFloat64()*float64(demandEvery)/2) {
		for range demandBurst {
			add(at + time.Duration(r.Float64()*float64(time.Second)))
		}
	}
	slices.SortFunc(trace, func(x, y demandClaim) int { return int(x.at - y.at) })
	return trace
}

// demandRun is what a replay has measured: percentages of all claims, idle pods on average, pod-seconds against the
// oracle's, and the time of claims in milliseconds.
type demandRun struct {
	claims, waited, refused      float64
	warm, later, idle, pods, p99 float64
}

// replayed replays a trace with a pool of its own.
func (g *ground) replayed(name string, warm, maxWarm int32, trace []demandClaim) (run demandRun) {
	g.berth.CreatePool(name, warm, func(p *v1alpha1.SandboxPool) {
		if maxWarm > 0 {
			p.Spec.MaxWarm = &maxWarm
		}
	})
	g.full(name, warm)
	began := time.Now()
	idle, claimed := 0., 0. // pod-seconds
	var learned, last map[string]float64
	took := make([]time.Duration, len(trace))
	var all sync.WaitGroup
	for i, c := range trace {
		all.Go(func() {
			time.Sleep(time.Until(began.Add(c.at)))
			asked := time.Now()
			id, err := g.claimWith(name, `,"waitTimeout":60`)
			if took[i] = time.Since(asked); err != nil {
				g.Error(err)
				return
			}
			time.Sleep(c.life)
			if err := g.release(id); err != nil {
				g.Error(err)
			}
		})
	}
	done := make(chan struct{})
	go func() { all.Wait(); close(done) }()
	for at, ended := time.Now(), false; !ended; {
		select {
		case <-done:
			ended = true
		case <-time.After(100 * time.Millisecond):
		}
		code, body, err := g.call(http.MethodGet, "/v1/pools/"+name, "")
		require.NoError(g, err)
		require.Equal(g, http.StatusOK, code, string(body))
		var pool openapi.Pool
		require.NoError(g, json.Unmarshal(body, &pool))
		now := time.Now()
		if now.Sub(began) < demandTrace {
			idle += now.Sub(at).Seconds() * float64(pool.Counts.Warm+pool.Counts.Pending)
		}
		claimed += now.Sub(at).Seconds() * float64(pool.Counts.Claimed)
		at = now
		if learned == nil && now.Sub(began) > demandLearned {
			learned = g.results(name)
		}
	}
	last = g.results(name)
	n := float64(len(trace))
	require.InDelta(g, n, last["warm"]+last["waited"]+last["refused"]+last["canceled"], 0)
	before := learned["warm"] + learned["waited"] + learned["refused"] + learned["canceled"]
	start := demandStart.Seconds() * math.Exp(demandSigma*demandSigma/2)
	run = demandRun{
		claims: n, waited: last["waited"], refused: last["refused"], warm: 100 * last["warm"] / n,
		later: 100 * (last["warm"] - learned["warm"]) / (n - before), idle: idle / demandTrace.Seconds(),
		pods: (idle + claimed) / (n*start + claimed), p99: ms(quantile(took, 0.99)),
	}
	g.drop(name)
	return run
}

var claimResult = regexp.MustCompile(`(?m)^berth_allocator_pool_claims_total\{pool="([^"]+)",result="([^"]+)"\} (\S+)$`)

// results are the claims of a pool by result.
func (g *ground) results(pool string) map[string]float64 {
	a, err := harness.Do(g.Context(), g.http, http.MethodGet, g.admin+"/metrics", "", "")
	require.NoError(g, err)
	all := map[string]float64{}
	for _, m := range claimResult.FindAllStringSubmatch(string(a.Body), -1) {
		if m[1] == pool {
			all[m[2]], err = strconv.ParseFloat(m[3], 64)
			require.NoError(g, err, fmt.Sprint(m))
		}
	}
	return all
}
