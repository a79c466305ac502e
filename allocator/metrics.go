package allocator

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/berth-sandbox/berth/allocator/journal"
)

type metrics struct {
	claims       *prometheus.CounterVec
	releases     *prometheus.CounterVec
	repairs      prometheus.Counter
	declaredDead prometheus.Counter
	wouldReap    prometheus.Counter
	mute         prometheus.Counter
	commits      prometheus.Histogram
	heldBack     prometheus.Counter
	// acknowledged is made of core.Acknowledged.
	acknowledged prometheus.Histogram
}

func newMetrics(reg prometheus.Registerer, a *Allocator) (*metrics, error) {
	m := &metrics{
		claims: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "berth_allocator_claims_total", Help: "Claims answered, by outcome: claimed or refused.",
		}, []string{"outcome"}),
		releases: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "berth_allocator_releases_total", Help: "Sandboxes released, by reason.",
		}, []string{"reason"}),
	}
	m.repairs = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "berth_allocator_repairs_total", Help: "Pods found in a state that nothing on record explains.",
	})
	m.declaredDead = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "berth_allocator_sessions_declared_dead_total", Help: "Routers that are waited for no more because an operator has declared them dead.",
	})
	m.wouldReap = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "berth_allocator_would_reap_total", Help: "Times a sandbox would have been released for being idle, were --reap-dry-run not set.",
	})
	m.mute = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "berth_allocator_routers_mute_total", Help: "Streams of routers closed because they did not say whether sandboxes are idle.",
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
		m.claims, m.releases, m.repairs, m.declaredDead, m.wouldReap, m.mute, m.commits, m.acknowledged, m.heldBack,
		counter("berth_allocator_journal_batches_total", "Batches written to the journal.", func(s journal.Stats) uint64 { return s.Batches }),
		counter("berth_allocator_journal_records_total", "Records written to the journal, without those that rode along.", func(s journal.Stats) uint64 { return s.Records }),
		counter("berth_allocator_journal_carried_total", "Records that were written again because nothing else held them yet.", func(s journal.Stats) uint64 { return s.Carried }),
		counter("berth_allocator_journal_bytes_total", "Bytes of batches, compressed.", func(s journal.Stats) uint64 { return s.Bytes }),
		counter("berth_allocator_journal_unknown_total", "Writes whose outcome had to be read.", func(s journal.Stats) uint64 { return s.Unknown }),
		gauge("berth_allocator_journal_unsettled_bytes", "What has to ride along, because no Sandbox object shows it yet. New claims are refused above 32 MiB.", func(t *term) float64 { return float64(t.journal.log.Stats().UnsettledBytes) }),
		gauge("berth_allocator_leading", "1 while this replica leads.", func(*term) float64 { return 1 }),
		gauge("berth_allocator_events_waiting", "Events waiting for the core.", func(t *term) float64 { return float64(len(t.loop.in)) }),
		gauge("berth_allocator_writes_waiting", "Pods and other objects waiting to be made or deleted, also those where that has failed and is tried again.", func(t *term) float64 { return float64(t.creates.waiting() + t.deletes.waiting() + t.other.waiting()) }),
		gauge("berth_allocator_labels_waiting", "Pods whose labels wait to be written.", func(t *term) float64 { return float64(t.labeler.Waiting()) }),
		gauge("berth_allocator_hooks_waiting", "postStart hooks waiting until their pool's earlier ones have answered.", func(t *term) float64 { return float64(t.hooks.waiting()) }),
		gauge("berth_allocator_projection_waiting", "Sandbox objects waiting to be written.", func(t *term) float64 { return float64(t.projector.Backlog().Objects) }),
		gauge("berth_allocator_projection_refused", "Sandbox objects that the API server does not take, a webhook or somebody's edit being the reason. Up to 100 do not count for the lag.", func(t *term) float64 { return float64(t.projector.Backlog().Refused) }),
		gauge("berth_allocator_projection_lag_seconds", "For how long the first of them has been waiting. New claims are refused above 30 s.", func(t *term) float64 { return t.projector.Backlog().Lag.Seconds() }),
	} {
		if err := reg.Register(c); err != nil {
			return nil, err
		}
	}
	return m, nil
}
