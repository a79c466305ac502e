package main

import (
	"fmt"
	"time"

	"github.com/berth-sandbox/berth/api/metric"
)

// slo is a service level objective.
type slo struct {
	// name is part of the names of recording rules.
	name  string
	alert string
	// objective is the part of the events that is good.
	objective float64
	// bad and total are the rates of events in a window. matchers are added to those of the series.
	bad, total func(by, window string, matchers ...string) string
	// what is good, and what the error budget is spent on.
	what, summary, description string
}

// within returns the rates of a histogram whose good events are not above a bound.
func within(h metric.Histogram, bound float64, own ...string) (bad, total func(by, window string, matchers ...string) string) {
	total = func(by, window string, matchers ...string) string {
		return sum(by, rate(series(h.CountName(), join(own, matchers)...), window))
	}
	bad = func(by, window string, matchers ...string) string {
		good := sum(by, rate(series(h.BucketName(), join(own, matchers, []string{upTo(bound)})...), window))
		return total(by, window, matchers...) + " - " + good
	}
	return bad, total
}

func join(lists ...[]string) (all []string) {
	for _, l := range lists {
		all = append(all, l...)
	}
	return all
}

func slos() []slo {
	timed := func(s slo, h metric.Histogram, bound float64, own ...string) slo {
		s.bad, s.total = within(h, bound, own...)
		return s
	}
	claims := func(by, window string, results, matchers []string) string {
		return sum(by, rate(series(metric.PoolClaims.Name, join([]string{isOne(metric.Result, results...)}, matchers)...), window))
	}
	judged := []string{metric.ResultWarm, metric.ResultWaited, metric.ResultRefused}
	return []slo{
		timed(slo{
			name: "claims_slow", alert: "BerthClaimsAreSlow", objective: 0.999, what: "claims that find a warm pod are granted within 50 ms",
			summary:     "Claims are slow although pods are warm",
			description: "{{ $value | humanizePercentage }} of the claims that found a warm pod took more than 50 ms. 0.1 % may.",
		}, metric.PoolClaimWaitSeconds, metric.ClaimBound, is(metric.Result, metric.ResultWarm)),
		{
			name: "claims_lack_pods", alert: "BerthClaimsLackPods", objective: 0.99, what: "claims are not refused for lack of pods",
			bad: func(by, window string, matchers ...string) string { // 0 if none was ever refused
				return claims(by, window, []string{metric.ResultRefused}, matchers) + " or 0 * " + claims(by, window, judged, matchers)
			},
			total:       func(by, window string, matchers ...string) string { return claims(by, window, judged, matchers) },
			summary:     "Claims are refused because pools have no pods",
			description: "{{ $value | humanizePercentage }} of the claims got no pod in time. 1 % may.",
		},
		timed(slo{
			name: "admissions_slow", alert: "BerthAdmissionsAreSlow", objective: 0.999, what: "requests are admitted within 2 ms",
			summary:     "Routers admit requests slowly",
			description: "{{ $value | humanizePercentage }} of the requests waited for more than 2 ms in the router. 0.1 % may.",
		}, metric.AdmissionSeconds, metric.AdmissionBound),
		timed(slo{
			name: "releases_slow", alert: "BerthReleasesAreSlow", objective: 0.999, what: "routers acknowledge releases within 1 s",
			summary:     "Routers acknowledge releases slowly",
			description: "For {{ $value | humanizePercentage }} of the releases a router took more than 1 s to forget the route. 0.1 % may.",
		}, metric.ReleaseAcknowledgedSeconds, metric.ReleaseBound),
		timed(slo{
			name: "reaps_late", alert: "BerthSandboxesEndLate", objective: 0.99, what: "sandboxes end at most 5 s late",
			summary:     "Sandboxes end late",
			description: "{{ $value | humanizePercentage }} of the sandboxes that were due ended more than 5 s late. 1 % may.",
		}, metric.ReapLateSeconds, metric.ReapBound),
	}
}

// burn is how fast an error budget of 30 days may be spent: an alert fires while both windows exceed it.
type burn struct {
	long, short string
	length      time.Duration // of long
	times       float64
	severity    string
	hold        string
}

// burns are those of the Site Reliability Workbook, chapter 5: 2 % of the budget in an hour, 5 % in six hours, 10 % in
// three days.
var burns = []burn{
	{"1h", "5m", time.Hour, 14.4, page, "2m"},
	{"6h", "30m", 6 * time.Hour, 6, page, "15m"},
	{"3d", "6h", 72 * time.Hour, 1, ticket, "1h"},
}

// leastBad is how many bad events the long window must have: one slow claim in a quiet night demands no action.
const leastBad = 10

func (s slo) recorded(window string) string {
	return "namespace:berth_" + s.name + ":ratio_rate" + window
}

// rules returns the ratios of bad events in each window, and the alerts.
func (s slo) rules() (recorded, alerts []rule) {
	for _, window := range []string{"5m", "30m", "1h", "6h", "3d"} {
		recorded = append(recorded, rule{Record: s.recorded(window), Expr: s.ratio(namespace, window)})
	}
	for _, b := range burns {
		limit := fmt.Sprintf("%.5g", b.times*(1-s.objective))
		expr := fmt.Sprintf("%s > %s and %s > %s and (%s) * %v > %d", s.recorded(b.long), limit, s.recorded(b.short), limit,
			s.bad(namespace, b.long), b.length.Seconds(), leastBad)
		r := alert(s.alert, b.severity, b.hold, expr, s.summary,
			s.description+fmt.Sprintf(" The error budget of 30 days is spent %v times as fast as it may be, over %s and %s.", b.times, b.long, b.short))
		r.Labels["long"], r.Labels["short"] = b.long, b.short // two alerts must not be the same
		alerts = append(alerts, r)
	}
	return recorded, alerts
}

// ratio returns the part of the events of a window that is bad.
func (s slo) ratio(by, window string, matchers ...string) string {
	return fmt.Sprintf("(%s) / %s", s.bad(by, window, matchers...), s.total(by, window, matchers...))
}
