package allocator

import (
	"context"
	"errors"
	"maps"
	"slices"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/eventlog"
	"github.com/berth-sandbox/berth/allocator/guard"
	"github.com/berth-sandbox/berth/allocator/journal"
	"github.com/berth-sandbox/berth/allocator/sandboxobjects"
	"github.com/berth-sandbox/berth/allocator/webhooks"
	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/metric"
)

type metrics struct {
	claims        *prometheus.CounterVec
	claimed       prometheus.Histogram
	batches       *prometheus.CounterVec
	releases      *prometheus.CounterVec
	reapLate      *prometheus.HistogramVec
	podFailures   *prometheus.CounterVec
	recycles      *prometheus.CounterVec
	repairs       prometheus.Counter
	declaredDead  prometheus.Counter
	wouldReap     prometheus.Counter
	sleeps        prometheus.Counter
	snapshots     *prometheus.CounterVec
	restores      *prometheus.CounterVec
	stopArchives  *prometheus.CounterVec
	wakes         prometheus.Histogram
	commits       prometheus.Histogram
	heldBack      prometheus.Counter
	slotsRepaired prometheus.Counter
	journalWrong  prometheus.Gauge // 0 or 1
	acknowledged  prometheus.Histogram
	violatedTerms prometheus.Gauge
	withheld      *prometheus.GaugeVec
	pools         *poolClaims
}

func newMetrics(reg prometheus.Registerer, a *Allocator) (*metrics, error) {
	m := &metrics{
		claims: metric.Claims.Vec(), claimed: metric.ClaimSeconds.New(), batches: metric.BatchClaims.Vec(),
		releases: metric.Releases.Vec(), reapLate: metric.ReapLateSeconds.Vec(), podFailures: metric.PodFailures.Vec(), recycles: metric.Recycles.Vec(),
		repairs: metric.Repairs.New(), declaredDead: metric.DeclaredDead.New(), wouldReap: metric.WouldReap.New(),
		snapshots: metric.Snapshots.Vec(), restores: metric.Restores.Vec(), stopArchives: metric.StopArchives.Vec(),
		sleeps: metric.Sleeps.New(), wakes: metric.WakeSeconds.New(),
		commits: metric.CommitSeconds.New(), heldBack: metric.HeldBackSeconds.New(), acknowledged: metric.ReleaseAcknowledgedSeconds.New(),
		slotsRepaired: metric.SlotsRepaired.New(), journalWrong: metric.JournalDamaged.New(),
		violatedTerms: metric.ViolatedTerms.New(), withheld: metric.Withheld.Vec(), pools: newPoolClaims(),
	}
	for _, a := range guard.Assertions {
		m.withheld.WithLabelValues(a)
	}
	return m, m.register(reg, a)
}

// register registers the metrics, and those that are read from the term when they are asked for.
func (m *metrics) register(reg prometheus.Registerer, a *Allocator) error {
	read := func(value func(*term) float64) func() float64 {
		return func() float64 {
			t, err := a.leadingTerm()
			if err != nil {
				return 0
			}
			return value(t)
		}
	}
	written := func(c metric.Counter, value func(journal.Stats) uint64) prometheus.Collector {
		return c.Func(read(func(t *term) float64 { return float64(value(t.journal.log.Stats())) }))
	}
	logged := func(value func(eventlog.Stats) float64) func() float64 {
		return read(func(t *term) float64 { return value(t.eventLog.Stats()) })
	}
	sent := func(value func(webhooks.Stats) float64) func() float64 {
		return read(func(t *term) float64 { return value(t.webhooks.Stats()) })
	}
	projected := func(value func(sandboxobjects.Backlog) float64) func() float64 {
		return read(func(t *term) float64 { return value(t.objects.Backlog()) })
	}
	for _, c := range []prometheus.Collector{
		m.claims, m.claimed, m.batches, m.pools.total, m.pools.wait, m.releases, m.reapLate, m.podFailures, m.recycles, m.repairs, m.declaredDead, m.wouldReap, m.snapshots, m.restores, m.stopArchives, m.sleeps, m.wakes, m.commits, m.acknowledged, m.heldBack, m.slotsRepaired, m.journalWrong, m.violatedTerms, m.withheld,
		written(metric.JournalBatches, func(s journal.Stats) uint64 { return s.Batches }),
		written(metric.JournalRecords, func(s journal.Stats) uint64 { return s.Records }),
		written(metric.JournalCarried, func(s journal.Stats) uint64 { return s.Carried }),
		written(metric.JournalBytes, func(s journal.Stats) uint64 { return s.Bytes }),
		written(metric.JournalUnknown, func(s journal.Stats) uint64 { return s.Unknown }),
		metric.JournalUnsettled.Func(read(func(t *term) float64 { return float64(t.journal.log.Stats().UnsettledBytes) })),
		metric.EventLogEvents.Func(logged(func(s eventlog.Stats) float64 { return float64(s.Events) })),
		metric.EventLogBytes.Func(logged(func(s eventlog.Stats) float64 { return float64(s.Bytes) })),
		metric.EventLogWaiting.Func(logged(func(s eventlog.Stats) float64 { return float64(s.Waiting) })),
		metric.EventLogWritten.Func(logged(func(s eventlog.Stats) float64 { return float64(s.Written) })),
		metric.EventLogFailures.Func(logged(func(s eventlog.Stats) float64 { return float64(s.Failed) })),
		metric.EventLogDropped.Func(logged(func(s eventlog.Stats) float64 { return float64(s.Missed) })),
		metric.Webhooks.Func(sent(func(s webhooks.Stats) float64 { return float64(s.Webhooks) })),
		metric.WebhooksLocked.Func(sent(func(s webhooks.Stats) float64 { return float64(s.Locked) })),
		metric.WebhookLag.Func(sent(func(s webhooks.Stats) float64 { return float64(s.Lag) })),
		metric.WebhookDeliveries.Func(sent(func(s webhooks.Stats) float64 { return float64(s.Delivered) })),
		metric.WebhookFailures.Func(sent(func(s webhooks.Stats) float64 { return float64(s.Failed) })),
		metric.WebhookGivenUp.Func(sent(func(s webhooks.Stats) float64 { return float64(s.GivenUp) })),
		metric.WebhookGaps.Func(sent(func(s webhooks.Stats) float64 { return float64(s.Gaps) })),
		&census{a},
		metric.Leading.Func(read(func(*term) float64 { return 1 })),
		metric.Quarantine.Func(read(func(t *term) float64 { return t.quarantine().Seconds() })),
		metric.EventsWaiting.Func(read(func(t *term) float64 { return float64(len(t.loop.in)) })),
		metric.WritesWaiting.Func(read(func(t *term) float64 { return float64(t.creates.waiting() + t.deletes.waiting() + t.other.waiting()) })),
		metric.LabelsWaiting.Func(read(func(t *term) float64 { return float64(t.labeler.Waiting()) })),
		metric.HooksWaiting.Func(read(func(t *term) float64 { return float64(t.hooks.waiting()) })),
		metric.ProjectionWaiting.Func(projected(func(b sandboxobjects.Backlog) float64 { return float64(b.Objects) })),
		metric.ProjectionRefused.Func(projected(func(b sandboxobjects.Backlog) float64 { return float64(b.Refused) })),
		metric.ProjectionLagSeconds.Func(projected(func(b sandboxobjects.Backlog) float64 { return b.Lag.Seconds() })),
	} {
		if err := reg.Register(c); err != nil {
			return err
		}
	}
	return nil
}

// censusTeams bounds the teams that have series.
const censusTeams = 100

// census collects the counts of a leader. It returns no values while this replica does not lead or
// the core does not answer in time: an unknown count must not show as 0.
type census struct{ a *Allocator }

// Describe implements prometheus.Collector.
func (*census) Describe(all chan<- *prometheus.Desc) {
	for _, g := range []metric.Gauge{
		metric.RoutersConnected, metric.PongAgeSeconds, metric.SandboxesLive, metric.SandboxesAsleep, metric.ResizesDeferred, metric.Fences, metric.FenceOldestSeconds, metric.JournalWaiting, metric.PoolPods, metric.PoolClaimsWaiting, metric.PoolTargetPods,
		metric.PoolStartSeconds, metric.TeamSandboxes, metric.TeamClaimsWaiting,
	} {
		all <- g.Desc
	}
}

// Collect implements prometheus.Collector.
func (c *census) Collect(all chan<- prometheus.Metric) {
	t, err := c.a.leadingTerm()
	if err != nil {
		return
	}
	connected, age := c.a.control.Routers()
	all <- metric.RoutersConnected.Is(float64(connected))
	all <- metric.PongAgeSeconds.Is(age.Seconds())

	if named, _, err := ask(context.Background(), t, func(k core.View) (map[string]core.TeamUse, bool) { return k.NamedTeams(), true }); err == nil {
		for i, team := range slices.Sorted(maps.Keys(named)) {
			if i < censusTeams {
				all <- metric.TeamSandboxes.Is(float64(named[team].Sandboxes), team)
				all <- metric.TeamClaimsWaiting.Is(float64(named[team].Waiting), team)
			}
		}
	}
	load, pools, err := ask(context.Background(), t, func(k core.View) (core.Load, map[string]core.Counts) {
		pools := map[string]core.Counts{}
		for key := range t.loop.pools {
			if counts, ok := k.Counts(key); ok {
				pools[key.Name] = counts
			}
		}
		c.a.metrics.pools.keep(pools)
		return k.Load(), pools
	})
	if err != nil {
		return
	}
	all <- metric.SandboxesLive.Is(float64(load.Live))
	all <- metric.SandboxesAsleep.Is(float64(load.Asleep))
	all <- metric.ResizesDeferred.Is(float64(load.Deferred))
	all <- metric.Fences.Is(float64(load.Fences))
	all <- metric.FenceOldestSeconds.Is(load.OldestFence.Seconds())
	all <- metric.JournalWaiting.Is(float64(load.Facts))
	collectPools(pools, all)
}

// outcomeCanceled is the outcome of a claim that its caller has given up.
const outcomeCanceled = "canceled"

// outcome returns the label of an answered claim.
func outcome(err error) string {
	var e *apierror.Error
	switch {
	case err == nil:
		return metric.OutcomeClaimed
	case errors.As(err, &e):
		return string(e.Reason)
	case errors.Is(err, context.Canceled):
		return outcomeCanceled
	case errors.Is(err, context.DeadlineExceeded):
		return string(apierror.Timeout)
	}
	return string(apierror.Internal)
}
