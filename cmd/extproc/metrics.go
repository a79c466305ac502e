package main

import (
	"errors"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/berth-sandbox/berth/extproc/admission"
	"github.com/berth-sandbox/berth/routecache"
)

// newRegistry returns a registry with the metrics of the process.
func newRegistry() *prometheus.Registry {
	reg := prometheus.NewRegistry()
	reg.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return reg
}

func newLookHistogram() prometheus.Histogram {
	return prometheus.NewHistogram(prometheus.HistogramOpts{
		Name:    "berth_router_look_seconds",
		Help:    "How long it took to read what requests Envoy holds open. Failed looks are not counted.",
		Buckets: []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2},
	})
}

func registerSandboxMetrics(reg prometheus.Registerer, sandboxes *admission.Sandboxes) error {
	routes, uses := sandboxes.Routes(), sandboxes.Uses()
	var errs []error
	counter := func(name, help string, value func(routecache.Stats) uint64) {
		errs = append(errs, reg.Register(prometheus.NewCounterFunc(prometheus.CounterOpts{Name: name, Help: help},
			func() float64 { return float64(value(routes.Stats())) })))
	}
	gauge := func(name, help string, value func() float64) {
		errs = append(errs, reg.Register(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, value)))
	}
	counter("berth_routecache_hits_total", "Requests answered from the cache, with a route or a refusal.",
		func(s routecache.Stats) uint64 { return s.Hits })
	counter("berth_routecache_misses_total", "Requests that waited for the allocator.",
		func(s routecache.Stats) uint64 { return s.Misses })
	counter("berth_routecache_questions_total", "Resolve messages sent to the allocator, one for each sandbox ID that was not known.",
		func(s routecache.Stats) uint64 { return s.Questions })
	counter("berth_routecache_evictions_total", "Routes evicted because the cache was full.",
		func(s routecache.Stats) uint64 { return s.Evictions })
	gauge("berth_routecache_routes", "Routes held.", func() float64 { return float64(routes.Stats().Routes) })
	gauge("berth_routecache_quiesced", "Sandboxes whose requests are held while the allocator asks whether they are idle.",
		func() float64 { return float64(routes.Stats().Quiesced) })
	gauge("berth_routecache_fresh", "1 while routes may be served.", func() float64 {
		if routes.Fresh() {
			return 1
		}
		return 0
	})
	gauge("berth_lastactive_sandboxes", "Sandboxes whose last activity is remembered.",
		func() float64 { return float64(uses.Len()) })
	gauge("berth_router_look_error",
		"1 while the newest look at the requests that Envoy holds open has failed, so that no sandbox is released for "+
			"being idle. The page /admin/last-active of the router says why.",
		func() float64 {
			if uses.LookError() != "" {
				return 1
			}
			return 0
		})
	return errors.Join(errs...)
}
