package allocator

import (
	"context"
	"errors"
	"maps"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/journal"
	"github.com/berth-sandbox/berth/api/apierror"
)

type metrics struct {
	claims       *prometheus.CounterVec
	claimed      prometheus.Histogram
	releases     *prometheus.CounterVec
	repairs      prometheus.Counter
	declaredDead prometheus.Counter
	wouldReap    prometheus.Counter
	commits      prometheus.Histogram
	heldBack     prometheus.Counter
	// slotsRepaired counts slots, journalWrong is 0 or 1.
	slotsRepaired prometheus.Counter
	journalWrong  prometheus.Gauge
	// acknowledged is made of core.Acknowledged.
	acknowledged prometheus.Histogram
}

func newMetrics(reg prometheus.Registerer, a *Allocator) (*metrics, error) {
	m := &metrics{
		claims: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "berth_allocator_claims_total", Help: "Claims answered, by outcome: claimed, canceled (the caller left), or the reason of the error (docs/errors.md).",
		}, []string{"outcome"}),
		releases: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "berth_allocator_releases_total", Help: "Sandboxes released, by reason.",
		}, []string{"reason"}),
	}
	m.claimed = prometheus.NewHistogram(prometheus.HistogramOpts{
		Name: "berth_allocator_claim_seconds", Help: "Time from the call to the answer of claims that were given a sandbox, the wait for a warm pod included.",
		Buckets: []float64{.002, .005, .01, .02, .05, .1, .2, .5, 1, 2, 5, 10, 30, 60, 120, 300},
	})
	m.repairs = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "berth_allocator_repairs_total", Help: "Things found that must not be: pods in a state that nothing on record explains, and changes that no watch has told of.",
	})
	m.declaredDead = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "berth_allocator_sessions_declared_dead_total", Help: "Routers that are waited for no more because an operator has declared them dead.",
	})
	m.wouldReap = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "berth_allocator_would_reap_total", Help: "Times a sandbox would have been released for being idle, were --reap-dry-run not set.",
	})
	m.commits = prometheus.NewHistogram(prometheus.HistogramOpts{
		Name: "berth_allocator_journal_commit_seconds", Help: "Time to write what waited to the journal.",
		Buckets: []float64{.001, .002, .003, .005, .01, .02, .05, .1, .2, .5, 1, 2, 5},
	})
	m.heldBack = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "berth_allocator_journal_held_back_seconds_total", Help: "Time for which writes to the journal were held back by the bound on their bytes (--journal-bytes-per-second).",
	})
	m.acknowledged = prometheus.NewHistogram(prometheus.HistogramOpts{
		Name: "berth_allocator_release_acknowledged_seconds", Help: "Time from when the release of a sandbox was in the journal until every router that could know its route had acknowledged it, or had ended or expired. The pod is deleted the window (--window) after that. Releases while there was no router are not in it.",
		Buckets: []float64{.001, .002, .003, .004, .005, .006, .008, .01, .015, .02, .03, .05, .1, .2, .5, 1, 2, 5, 15, 60, 300, 900, 1200},
	})
	m.slotsRepaired = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "berth_allocator_journal_slots_repaired_total", Help: "JournalSlot objects that were missing, or that something else than a leader had written to, and that the leader has put right.",
	})
	m.journalWrong = prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "berth_allocator_journal_damaged", Help: "1 while JournalSlot objects are not as the leader has written them, and it could not put them right: no other leader could open the journal.",
	})
	counter := func(name, help string, value func(journal.Stats) uint64) prometheus.Collector {
		return prometheus.NewCounterFunc(prometheus.CounterOpts{Name: name, Help: help}, func() float64 {
			t, err := a.leadingTerm()
			if err != nil {
				return 0
			}
			return float64(value(t.journal.log.Stats()))
		})
	}
	gauge := func(name, help string, value func(*term) float64) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, func() float64 {
			t, err := a.leadingTerm()
			if err != nil {
				return 0
			}
			return value(t)
		})
	}
	for _, c := range []prometheus.Collector{
		m.claims, m.claimed, m.releases, m.repairs, m.declaredDead, m.wouldReap, m.commits, m.acknowledged, m.heldBack, m.slotsRepaired, m.journalWrong,
		counter("berth_allocator_journal_batches_total", "Batches written to the journal.", func(s journal.Stats) uint64 { return s.Batches }),
		counter("berth_allocator_journal_records_total", "Records written to the journal, without those that rode along.", func(s journal.Stats) uint64 { return s.Records }),
		counter("berth_allocator_journal_carried_total", "Records that were written again because nothing else held them yet.", func(s journal.Stats) uint64 { return s.Carried }),
		counter("berth_allocator_journal_bytes_total", "Bytes of batches, compressed.", func(s journal.Stats) uint64 { return s.Bytes }),
		counter("berth_allocator_journal_unknown_total", "Writes whose outcome had to be read.", func(s journal.Stats) uint64 { return s.Unknown }),
		gauge("berth_allocator_journal_unsettled_bytes", "What has to ride along, because no Sandbox object shows it yet. New claims are refused above 32 MiB.", func(t *term) float64 { return float64(t.journal.log.Stats().UnsettledBytes) }),
		&census{a},
		gauge("berth_allocator_leading", "1 while this replica leads.", func(*term) float64 { return 1 }),
		gauge("berth_allocator_quarantine_seconds", "For how long no pod is handed out yet, because the journal was begun anew and routers of before may send requests to any address. 0: pods are handed out.", func(t *term) float64 { return t.quarantine().Seconds() }),
		gauge("berth_allocator_events_waiting", "Events waiting for the core.", func(t *term) float64 { return float64(len(t.loop.in)) }),
		gauge("berth_allocator_writes_waiting", "Pods and other objects waiting to be made or deleted, also those where that has failed and is tried again.", func(t *term) float64 { return float64(t.creates.waiting() + t.deletes.waiting() + t.other.waiting()) }),
		gauge("berth_allocator_labels_waiting", "Pods whose labels wait to be written.", func(t *term) float64 { return float64(t.labeler.Waiting()) }),
		gauge("berth_allocator_hooks_waiting", "postStart hooks waiting until their pool's earlier ones have answered.", func(t *term) float64 { return float64(t.hooks.waiting()) }),
		gauge("berth_allocator_projection_waiting", "Sandbox objects waiting to be written.", func(t *term) float64 { return float64(t.objects.Backlog().Objects) }),
		gauge("berth_allocator_projection_refused", "Sandbox objects that the API server does not take, a webhook or somebody's edit being the reason. Up to 100 do not count for the lag.", func(t *term) float64 { return float64(t.objects.Backlog().Refused) }),
		gauge("berth_allocator_projection_lag_seconds", "For how long the first of them has been waiting. New claims are refused above 30 s.", func(t *term) float64 { return t.objects.Backlog().Lag.Seconds() }),
	} {
		if err := reg.Register(c); err != nil {
			return nil, err
		}
	}
	return m, nil
}

const (
	// censusWait bounds the time for which a scrape waits for the core.
	censusWait = time.Second
	// censusPools bounds the pools that have series of their own, by name. The pods of the
	// others are added up under a name that no pool can have.
	censusPools = 100
	otherPools  = "_other"
)

// census counts what a leader has. There are no values while this replica does not lead, or
// the core does not answer in time: what is not known is not zero.
type census struct{ a *Allocator }

var (
	routersConnected = prometheus.NewDesc("berth_allocator_routers_connected", "Routers whose control stream is open.", nil, nil)
	pongAge          = prometheus.NewDesc("berth_allocator_pong_age_seconds", "Time since the last pong, or the join, of the connected router that has waited longest. Routers that get none serve what they know until --max-stale.", nil, nil)
	sandboxesLive    = prometheus.NewDesc("berth_allocator_sandboxes_live", "Sandboxes that are starting or running.", nil, nil)
	poolPods         = prometheus.NewDesc("berth_allocator_pool_pods", "Pods by pool and state: warm, pending, claimed or releasing. The first 100 pools by name; those of the others are added up as _other.", []string{"pool", "state"}, nil)
	poolWaiting      = prometheus.NewDesc("berth_allocator_pool_claims_waiting", "Claims that wait for a pod, by pool, bounded likewise.", []string{"pool"}, nil)
)

// Describe implements prometheus.Collector.
func (*census) Describe(all chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{routersConnected, pongAge, sandboxesLive, poolPods, poolWaiting} {
		all <- d
	}
}

// Collect implements prometheus.Collector.
func (c *census) Collect(all chan<- prometheus.Metric) {
	t, err := c.a.leadingTerm()
	if err != nil {
		return
	}
	value := func(d *prometheus.Desc, v float64, labels ...string) {
		all <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	connected, age := c.a.control.Routers()
	value(routersConnected, float64(connected))
	value(pongAge, age.Seconds())

	ctx, cancel := context.WithTimeout(context.Background(), censusWait)
	defer cancel()
	type counted struct {
		live  int
		pools map[string]core.Counts
	}
	found := make(chan counted, 1)
	if t.loop.look(ctx, func(k *core.Core) {
		n := counted{k.CountLive(), map[string]core.Counts{}}
		for key := range t.loop.pools {
			if counts, ok := k.Counts(key); ok {
				n.pools[key.Name] = counts
			}
		}
		found <- n
	}) != nil {
		return
	}
	n := <-found
	value(sandboxesLive, float64(n.live))
	for name, counts := range bounded(n.pools) {
		value(poolPods, float64(counts.Warm), name, "warm")
		value(poolPods, float64(counts.Pending), name, "pending")
		value(poolPods, float64(counts.Claimed), name, "claimed")
		value(poolPods, float64(counts.Releasing), name, "releasing")
		value(poolWaiting, float64(counts.Waiting), name)
	}
}

// bounded adds up the pools beyond censusPools.
func bounded(pools map[string]core.Counts) map[string]core.Counts {
	if len(pools) <= censusPools {
		return pools
	}
	most := map[string]core.Counts{}
	var rest core.Counts
	for i, name := range slices.Sorted(maps.Keys(pools)) {
		counts := pools[name]
		if i < censusPools {
			most[name] = counts
			continue
		}
		rest.Warm += counts.Warm
		rest.Pending += counts.Pending
		rest.Claimed += counts.Claimed
		rest.Releasing += counts.Releasing
		rest.Waiting += counts.Waiting
	}
	most[otherPools] = rest
	return most
}

// outcome is the label of a claim that was answered so.
func outcome(err error) string {
	var e *apierror.Error
	switch {
	case err == nil:
		return "claimed"
	case errors.As(err, &e):
		return string(e.Reason)
	case errors.Is(err, context.Canceled):
		return "canceled"
	case errors.Is(err, context.DeadlineExceeded):
		return string(apierror.Timeout)
	}
	return string(apierror.Internal)
}
