package allocator

import (
	"context"
	"errors"
	"maps"
	"slices"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/guard"
	"github.com/berth-sandbox/berth/allocator/journal"
	"github.com/berth-sandbox/berth/api/apierror"
)

type metrics struct {
	claims        *prometheus.CounterVec
	claimed       prometheus.Histogram
	batches       *prometheus.CounterVec
	releases      *prometheus.CounterVec
	podFailures   *prometheus.CounterVec
	recycles      *prometheus.CounterVec
	repairs       prometheus.Counter
	declaredDead  prometheus.Counter
	wouldReap     prometheus.Counter
	commits       prometheus.Histogram
	heldBack      prometheus.Counter
	slotsRepaired prometheus.Counter
	rateLimited   prometheus.Counter
	journalWrong  prometheus.Gauge // 0 or 1
	acknowledged  prometheus.Histogram
	violatedTerms prometheus.Gauge
	withheld      *prometheus.GaugeVec
	pools         *poolClaims
}

func newMetrics(reg prometheus.Registerer, a *Allocator) (*metrics, error) {
	m := &metrics{
		claims: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "berth_allocator_claims_total", Help: "Claims answered, by outcome: claimed, canceled (by the caller), or the reason of the error (docs/reference/errors.md).",
		}, []string{"outcome"}),
		batches: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "berth_allocator_batch_claims_total", Help: "Batch claims (POST /v1/claims) answered, by outcome, like berth_allocator_claims_total.",
		}, []string{"outcome"}),
		releases: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "berth_allocator_releases_total", Help: "Sandboxes released, by reason.",
		}, []string{"reason"}),
		pools: newPoolClaims(),
	}
	m.podFailures = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "berth_allocator_pod_failures_total", Help: "Idle pods that ended, were deleted by others or did not become ready in time, by reason (the reasons of a pool's condition Degraded).",
	}, []string{"reason"})
	m.recycles = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "berth_allocator_recycles_total", Help: "Pods of released sandboxes in pools with reuse Recycle, by outcome: Recycled, or why they were deleted instead (docs/recycle.md).",
	}, []string{"outcome"})
	m.claimed = prometheus.NewHistogram(prometheus.HistogramOpts{
		Name: "berth_allocator_claim_seconds", Help: "Time from the call to the answer of successful claims, including the wait for a warm pod.",
		Buckets: []float64{.002, .005, .01, .02, .05, .1, .2, .5, 1, 2, 5, 10, 30, 60, 120, 300},
	})
	m.repairs = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "berth_allocator_repairs_total", Help: "Repaired inconsistencies: pods in a state that no record explains, and changes that no watch reported.",
	})
	m.declaredDead = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "berth_allocator_sessions_declared_dead_total", Help: "Routers that an operator declared dead, so that no fence waits for them.",
	})
	m.wouldReap = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "berth_allocator_would_reap_total", Help: "Times an idle sandbox would have been released without --reap-dry-run.",
	})
	m.commits = prometheus.NewHistogram(prometheus.HistogramOpts{
		Name: "berth_allocator_journal_commit_seconds", Help: "Duration of writes to the journal.",
		Buckets: []float64{.001, .002, .003, .005, .01, .02, .05, .1, .2, .5, 1, 2, 5},
	})
	m.heldBack = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "berth_allocator_journal_held_back_seconds_total", Help: "Time for which writes to the journal were held back by the bound on their bytes (--journal-bytes-per-second).",
	})
	m.acknowledged = prometheus.NewHistogram(prometheus.HistogramOpts{
		Name: "berth_allocator_release_acknowledged_seconds", Help: "Time from when the release of a sandbox was in the journal until every router that could know its route had acknowledged it, ended or expired. The pod is deleted the connect window (--connect-window) later. Releases without any router do not count.",
		Buckets: []float64{.001, .002, .003, .004, .005, .006, .008, .01, .015, .02, .03, .05, .1, .2, .5, 1, 2, 5, 15, 60, 300, 900, 1200},
	})
	m.slotsRepaired = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "berth_allocator_journal_slots_repaired_total", Help: "JournalSlot objects that another client deleted or wrote to, and that the leader restored.",
	})
	m.rateLimited = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "berth_allocator_calls_rate_limited_total", Help: "Calls of the HTTP API that this replica refused because of --key-calls-per-second. The log names the keys.",
	})
	m.journalWrong = prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "berth_allocator_journal_damaged", Help: "1 while JournalSlot objects are damaged and the leader cannot restore them: no other leader could open the journal.",
	})
	m.violatedTerms = prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "berth_allocator_violated_terms", Help: "Terms that ended because of a violated assertion in the 10 minutes before this leader's term. From 3 on this leader withholds what violates an assertion instead.",
	})
	m.withheld = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "berth_allocator_withheld", Help: "Pods, sandboxes and sessions for which this leader withholds something that would violate an assertion, by assertion (docs/operations.md).",
	}, []string{"assertion"})
	for _, a := range guard.Assertions {
		m.withheld.WithLabelValues(a)
	}
	return m, m.register(reg, a)
}

// register registers the metrics, and those that are read from the term when they are asked for.
func (m *metrics) register(reg prometheus.Registerer, a *Allocator) error {
	counter := func(name, help string, value func(*term) uint64) prometheus.Collector {
		return prometheus.NewCounterFunc(prometheus.CounterOpts{Name: name, Help: help}, func() float64 {
			t, err := a.leadingTerm()
			if err != nil {
				return 0
			}
			return float64(value(t))
		})
	}
	journaled := func(name, help string, value func(journal.Stats) uint64) prometheus.Collector {
		return counter(name, help, func(t *term) uint64 { return value(t.journal.log.Stats()) })
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
		m.claims, m.claimed, m.batches, m.pools.total, m.pools.wait, m.releases, m.podFailures, m.recycles, m.repairs, m.declaredDead, m.wouldReap, m.commits, m.acknowledged, m.heldBack, m.slotsRepaired, m.rateLimited, m.journalWrong, m.violatedTerms, m.withheld,
		journaled("berth_allocator_journal_batches_total", "Batches written to the journal.", func(s journal.Stats) uint64 { return s.Batches }),
		journaled("berth_allocator_journal_records_total", "New records written to the journal.", func(s journal.Stats) uint64 { return s.Records }),
		journaled("berth_allocator_journal_carried_total", "Records carried into another batch because no Sandbox object showed them yet.", func(s journal.Stats) uint64 { return s.Carried }),
		journaled("berth_allocator_journal_bytes_total", "Compressed bytes of batches.", func(s journal.Stats) uint64 { return s.Bytes }),
		journaled("berth_allocator_journal_unknown_total", "Writes whose outcome had to be read.", func(s journal.Stats) uint64 { return s.Unknown }),
		gauge("berth_allocator_journal_unsettled_bytes", "Bytes of records that no Sandbox object shows yet and that the journal must carry. New claims are refused above 32 MiB.", func(t *term) float64 { return float64(t.journal.log.Stats().UnsettledBytes) }),
		gauge("berth_allocator_event_log_events", "Events in the log of events.", func(t *term) float64 { return float64(t.eventLog.Stats().Events) }),
		gauge("berth_allocator_event_log_bytes", "Compressed bytes of the log of events, 16 MiB at most.", func(t *term) float64 { return float64(t.eventLog.Stats().Bytes) }),
		gauge("berth_allocator_event_log_waiting", "States of sandboxes that wait for the log of events. From 20,000 on the oldest are dropped.", func(t *term) float64 { return float64(t.eventLog.Stats().Waiting) }),
		counter("berth_allocator_event_log_written_bytes_total", "Compressed bytes that were written to the log of events. A segment is written again as it fills.", func(t *term) uint64 { return t.eventLog.Stats().Written }),
		counter("berth_allocator_event_log_failures_total", "Writes and deletions of the log of events that failed and are tried again.", func(t *term) uint64 { return t.eventLog.Stats().Failed }),
		counter("berth_allocator_event_log_dropped_total", "States of sandboxes whose events were dropped, because the log of events could not be written for too long.", func(t *term) uint64 { return t.eventLog.Stats().Missed }),
		gauge("berth_allocator_webhooks", "Webhooks of all teams.", func(t *term) float64 { return float64(t.webhooks.Stats().Webhooks) }),
		gauge("berth_allocator_webhooks_locked", "Webhooks whose secret was sealed with another key of the cluster. They send nothing.", func(t *term) float64 { return float64(t.webhooks.Stats().Locked) }),
		gauge("berth_allocator_webhook_lag_events", "Events that the webhook that is furthest behind has not got, of all types and teams.", func(t *term) float64 { return float64(t.webhooks.Stats().Lag) }),
		counter("berth_allocator_webhook_deliveries_total", "Events delivered to webhooks.", func(t *term) uint64 { return t.webhooks.Stats().Delivered }),
		counter("berth_allocator_webhook_failures_total", "Attempts to deliver an event to a webhook that failed.", func(t *term) uint64 { return t.webhooks.Stats().Failed }),
		counter("berth_allocator_webhook_given_up_total", "Events that a webhook has not got, because it failed for them and not for others.", func(t *term) uint64 { return t.webhooks.Stats().GivenUp }),
		counter("berth_allocator_webhook_gaps_total", "Times a webhook fell behind the log of events.", func(t *term) uint64 { return t.webhooks.Stats().Gaps }),
		&census{a},
		gauge("berth_allocator_leading", "1 while this replica leads.", func(*term) float64 { return 1 }),
		gauge("berth_allocator_quarantine_seconds", "Time until pods are handed out, because the journal was begun anew and routers of the earlier journal may send requests to any address. 0: pods are handed out.", func(t *term) float64 { return t.quarantine().Seconds() }),
		gauge("berth_allocator_events_waiting", "Events waiting for the core.", func(t *term) float64 { return float64(len(t.loop.in)) }),
		gauge("berth_allocator_writes_waiting", "Writes that wait, or are retried, of pods and other objects.", func(t *term) float64 { return float64(t.creates.waiting() + t.deletes.waiting() + t.other.waiting()) }),
		gauge("berth_allocator_labels_waiting", "Pods with unwritten labels.", func(t *term) float64 { return float64(t.labeler.Waiting()) }),
		gauge("berth_allocator_hooks_waiting", "postStart hooks waiting for earlier hooks of their pool.", func(t *term) float64 { return float64(t.hooks.waiting()) }),
		gauge("berth_allocator_projection_waiting", "Sandbox objects waiting to be written.", func(t *term) float64 { return float64(t.objects.Backlog().Objects) }),
		gauge("berth_allocator_projection_refused", "Sandbox objects whose write the API server rejects, for example because of a webhook. Up to 100 do not count for the lag.", func(t *term) float64 { return float64(t.objects.Backlog().Refused) }),
		gauge("berth_allocator_projection_lag_seconds", "Age of the oldest waiting Sandbox object. New claims are refused above 30 s.", func(t *term) float64 { return t.objects.Backlog().Lag.Seconds() }),
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

var (
	routersConnected = prometheus.NewDesc("berth_allocator_routers_connected", "Routers whose control stream is open.", nil, nil)
	pongAge          = prometheus.NewDesc("berth_allocator_pong_age_seconds", "Longest time since the last pong, or the join, of a connected router. Routers without pongs serve cached routes until --max-stale.", nil, nil)
	sandboxesLive    = prometheus.NewDesc("berth_allocator_sandboxes_live", "Sandboxes that are starting or running.", nil, nil)
	teamSandboxes    = prometheus.NewDesc("berth_allocator_team_sandboxes", "Sandboxes that are live or being claimed, by team, for teams with limits of their own in --team-limits: the first 100 by name.", []string{"team"}, nil)
	teamWaiting      = prometheus.NewDesc("berth_allocator_team_claims_waiting", "Claims that wait for a pod, by team, for the same teams.", []string{"team"}, nil)
)

// Describe implements prometheus.Collector.
func (*census) Describe(all chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{routersConnected, pongAge, sandboxesLive, poolPods, poolWaiting, poolTarget, poolStart, teamSandboxes, teamWaiting} {
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

	if named, _, err := ask(context.Background(), t, func(k core.View) (map[string]core.TeamUse, bool) { return k.NamedTeams(), true }); err == nil {
		for i, team := range slices.Sorted(maps.Keys(named)) {
			if i < censusTeams {
				value(teamSandboxes, float64(named[team].Sandboxes), team)
				value(teamWaiting, float64(named[team].Waiting), team)
			}
		}
	}
	live, pools, err := ask(context.Background(), t, func(k core.View) (int, map[string]core.Counts) {
		pools := map[string]core.Counts{}
		for key := range t.loop.pools {
			if counts, ok := k.Counts(key); ok {
				pools[key.Name] = counts
			}
		}
		c.a.metrics.pools.keep(pools)
		return k.CountLive(), pools
	})
	if err != nil {
		return
	}
	value(sandboxesLive, float64(live))
	collectPools(pools, value)
}

// outcome returns the label of an answered claim.
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
