package demand_test

import (
	"container/heap"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/demand"
)

const (
	traceEnd   = time.Hour
	startTime  = 4 * time.Second // median; the start times are log-normal
	startSigma = 0.4
	meanLife   = 5 * time.Minute // of sandboxes; exponential
)

// shape is a kind of claims. Bursts of burst claims come at random intervals, every on average and half of that at
// least. least and most bound the hits and the pod-seconds: see TestReplayOfAnHourHitsWarmPods. Misses of the first burst
// do not count, as far as it is unforeseen.
type shape struct {
	rate        func(at time.Duration) float64 // claims a second
	burst       int
	every       time.Duration
	min         int // Limits.Min
	unforeseen  int
	least, most float64
}

func constant(rate float64) func(time.Duration) float64 {
	return func(time.Duration) float64 { return rate }
}

var shapes = map[string]shape{
	"steady": {rate: constant(2), min: 2, least: 0.99, most: 1.1},
	// About 120 claims, so that one that waits is more than 0.8 % of them.
	"sparse":  {rate: constant(1. / 30), min: 2, least: 0.98, most: 1.5},
	"busy":    {rate: constant(10), min: 2, least: 0.99, most: 1.1},
	"diurnal": {rate: func(at time.Duration) float64 { return 2.1 - 1.9*math.Cos(2*math.Pi*at.Hours()) }, min: 2, least: 0.99, most: 1.1},
	"bursts":  {rate: constant(2), burst: 50, every: 4 * time.Minute, min: 2, least: 0.99, most: 1.2},
	// Nothing but bursts: the first of 13 or more finds Min pods. The others find theirs, which have stood idle for
	// minutes, because an interval is random.
	"bursts alone": {rate: constant(0), burst: 50, every: 4 * time.Minute, min: 2, unforeseen: 48, least: 1, most: 2},
	// With the first burst foreseen by Min, all find theirs.
	"expected bursts": {rate: constant(0), burst: 50, every: 4 * time.Minute, min: 50, least: 1, most: 2},
}

// trace returns when claims come, in ascending order.
func (s shape) trace(r *rand.Rand) (claims []time.Duration) {
	for at := time.Duration(0); at < traceEnd; at += time.Second {
		for u := r.ExpFloat64(); u < s.rate(at); u += r.ExpFloat64() {
			claims = append(claims, at+time.Duration(u/s.rate(at)*float64(time.Second)))
		}
	}
	for at := time.Duration(0); s.burst > 0; {
		at += s.every/2 + time.Duration(r.ExpFloat64()*float64(s.every)/2)
		if at >= traceEnd {
			break
		}
		for range s.burst {
			claims = append(claims, at+time.Duration(r.Float64()*float64(time.Second)))
		}
	}
	slices.Sort(claims)
	return claims
}

// event is what happens in a replay: a claim, a pod that took so long to become warm, or else a tick.
type event struct {
	at    time.Duration
	claim bool
	took  time.Duration
}

type events []event

func (q events) Len() int           { return len(q) }
func (q events) Less(i, j int) bool { return q[i].at < q[j].at }
func (q events) Swap(i, j int)      { q[i], q[j] = q[j], q[i] }
func (q *events) Push(x any)        { *q = append(*q, x.(event)) }
func (q *events) Pop() any {
	last := (*q)[len(*q)-1]
	*q = (*q)[:len(*q)-1]
	return last
}

// result counts, in pod-seconds, what pods were there before their claims (idle), what an oracle would have had (oracle),
// and the lives of the sandboxes, which are the same for both.
type result struct {
	claims, hits, deleted int
	idle, oracle, life    float64
}

// replay runs a pool without a bound on its pods.
func replay(r *rand.Rand, claims []time.Duration, limits demand.Limits) (res result) {
	var tracker demand.Tracker
	var q events
	for _, at := range claims {
		q = append(q, event{at: at, claim: true})
	}
	for at := time.Duration(0); at < traceEnd; at += time.Second {
		q = append(q, event{at: at})
	}
	heap.Init(&q)
	start := func() time.Duration {
		return time.Duration(float64(startTime) * math.Exp(startSigma*r.NormFloat64()))
	}
	var warm, coming, waiting int
	for last := time.Duration(0); q.Len() > 0; {
		e := heap.Pop(&q).(event)
		res.idle += (e.at - last).Seconds() * float64(warm+coming)
		last = e.at
		switch {
		case e.claim:
			tracker.Claimed(e.at, 1)
			res.claims++
			res.oracle += start().Seconds()
			res.life += r.ExpFloat64() * meanLife.Seconds()
			if warm > 0 {
				res.hits++
			}
			waiting++
		case e.took > 0:
			tracker.Started(e.took)
			coming, warm = coming-1, warm+1
		}
		taken := min(warm, waiting)
		warm, waiting = warm-taken, waiting-taken
		target := tracker.Target(e.at, limits, waiting)
		for ; e.at < traceEnd && coming+warm < target.Warm+waiting; coming++ {
			took := start()
			heap.Push(&q, event{at: e.at + took, took: took})
		}
		surplus := max(0, min(warm, coming+warm-target.Warm-target.Spare-waiting))
		warm, res.deleted = warm-surplus, res.deleted+surplus
	}
	return res
}

// A hit is a claim that finds a warm pod. The oracle knows the trace: it creates a pod for each claim exactly one start
// time before the claim. Pods count from their creation to the end of their sandboxes.
func TestReplayOfAnHourHitsWarmPods(t *testing.T) {
	for name, s := range shapes {
		t.Run(name, func(t *testing.T) {
			for seed := range uint64(5) {
				r := rand.New(rand.NewPCG(seed, 1))
				res := replay(r, s.trace(r), demand.Limits{Min: s.min, Max: 500})
				hits, total := float64(res.hits+s.unforeseen)/float64(res.claims), (res.idle+res.life)/(res.oracle+res.life)
				t.Logf("seed %d: %d claims, %.2f %% warm or unforeseen, %.3f of the oracle's pod-seconds (before the claims alone %.1f), %d surplus pods deleted",
					seed, res.claims, 100*hits, total, res.idle/res.oracle, res.deleted)
				if hits < s.least || total > s.most {
					t.Errorf("seed %d: expected %.2f at least, and %.2f at most", seed, s.least, s.most)
				}
				if res.deleted > res.claims/20+s.min {
					t.Errorf("seed %d: pods are created and deleted again", seed)
				}
			}
		})
	}
}
