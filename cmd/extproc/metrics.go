package main

import (
	"errors"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/berth-sandbox/berth/api/metric"
	"github.com/berth-sandbox/berth/routecache"
)

// register registers the metrics of routes and uses, and whether the router has a session.
func (r *router) register(reg prometheus.Registerer) error {
	routes, uses := r.sandboxes.Routes(), r.sandboxes.Uses()
	counted := func(c metric.Counter, value func(routecache.Stats) uint64) prometheus.Collector {
		return c.Func(func() float64 { return float64(value(routes.Stats())) })
	}
	present := func(g metric.Gauge, value func(routecache.Stats) int) prometheus.Collector {
		return g.Func(func() float64 { return float64(value(routes.Stats())) })
	}
	for _, c := range []prometheus.Collector{
		counted(metric.CacheHits, func(s routecache.Stats) uint64 { return s.Hits }),
		counted(metric.CacheMisses, func(s routecache.Stats) uint64 { return s.Misses }),
		counted(metric.CacheQuestions, func(s routecache.Stats) uint64 { return s.Questions }),
		counted(metric.CacheEvictions, func(s routecache.Stats) uint64 { return s.Evictions }),
		present(metric.CacheRoutes, func(s routecache.Stats) int { return s.Routes }),
		metric.CacheCapacity.Func(func() float64 { return float64(r.flags.CacheSize) }),
		present(metric.CacheQuiesced, func(s routecache.Stats) int { return s.Quiesced }),
		state(metric.CacheFresh, routes.Fresh),
		metric.TrackedSandboxes.Func(func() float64 { return float64(uses.Len()) }),
		state(metric.LookError, func() bool { return uses.LookError() != "" }),
		state(metric.Connected, r.client.Connected),
	} {
		if err := reg.Register(c); err != nil {
			return err
		}
	}
	return nil
}

// registerEgress registers whether an egress router has a session. Package egress has the other metrics.
func (r *router) registerEgress(reg prometheus.Registerer) error {
	return errors.Join(
		reg.Register(state(metric.EgressFresh, r.egress.Fresh)), reg.Register(state(metric.EgressConnected, r.client.Connected)),
	)
}

// state is 1 while something is the case.
func state(g metric.Gauge, is func() bool) prometheus.Collector {
	return g.Func(func() float64 {
		if is() {
			return 1
		}
		return 0
	})
}
