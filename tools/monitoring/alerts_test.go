package main

import (
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"sigs.k8s.io/yaml"

	"github.com/berth-sandbox/berth/api/metric"
)

// example is a case of an alert: what Prometheus has scraped from the installation "a", once a minute, and which alerts
// fire then.
type example struct {
	name   string
	series []string // "name{labels}: values", in promtool's notation
	at     string
	alert  string
	fires  []firing // none: the alert stays quiet
}

type firing struct {
	nth    int // of the rules with the name of the alert
	value  string
	labels map[string]string // beside those of the rule, and namespace
}

// causeExamples are of the alerts about causes.
var causeExamples = []example{
	{"one replica leads", []string{"berth_allocator_leading{pod='x'}: 0+0x10", "berth_allocator_leading{pod='y'}: 1x10", "berth_routecache_fresh{pod='r'}: 1x10"}, "5m", "BerthHasNoLeader", nil},
	{"no replica leads", []string{"berth_allocator_leading{pod='x'}: 0+0x10", "berth_allocator_leading{pod='y'}: 0+0x10", "berth_routecache_fresh{pod='r'}: 1x10"}, "5m", "BerthHasNoLeader", []firing{{}}},
	{"all allocators have gone", []string{"berth_allocator_leading{namespace='b'}: 1x10", "berth_routecache_fresh{pod='r'}: 1x10"}, "5m", "BerthHasNoLeader", []firing{{}}},
	{"nothing is scraped", nil, "5m", "BerthHasNoLeader", []firing{{labels: map[string]string{namespace: ""}}}},
	{"a change of leaders", []string{"berth_allocator_leading{pod='x'}: 1 1 0+0x10", "berth_allocator_leading{pod='y'}: 0 0 0 1x10", "berth_routecache_fresh{pod='r'}: 1x10"}, "5m", "BerthHasNoLeader", nil},

	{"both have a session", []string{"berth_allocator_leading: 1x10", "berth_router_connected{pod='r'}: 1x10", "berth_router_connected{pod='q'}: 1x10", "berth_routecache_fresh{pod='r'}: 1x10"}, "5m", "BerthRouterHasNoSession", nil},
	{"one has none", []string{"berth_allocator_leading: 1x10", "berth_router_connected{pod='r'}: 0+0x10", "berth_router_connected{pod='q'}: 1x10"}, "5m", "BerthRouterHasNoSession", []firing{{labels: map[string]string{pod: "r"}}}},
	{"one is stale", []string{"berth_allocator_leading: 1x10", "berth_router_connected{pod='r'}: 1x10", "berth_routecache_fresh{pod='r'}: 0+0x10"}, "5m", "BerthRouterHasNoSession", []firing{{labels: map[string]string{pod: "r"}}}},
	{"there is no leader", []string{"berth_allocator_leading: 0+0x10", "berth_router_connected{pod='r'}: 0+0x10"}, "5m", "BerthRouterHasNoSession", nil},

	{"both egress gateways have a session", []string{"berth_allocator_leading: 1x10", "berth_egress_connected{pod='r'}: 1x10", "berth_egress_fresh{pod='r'}: 1x10"}, "5m", "BerthEgressHasNoSession", nil},
	{"one egress gateway has none", []string{"berth_allocator_leading: 1x10", "berth_egress_connected{pod='r'}: 0+0x10", "berth_egress_connected{pod='q'}: 1x10"}, "5m", "BerthEgressHasNoSession", []firing{{labels: map[string]string{pod: "r"}}}},
	{"one egress gateway is stale", []string{"berth_allocator_leading: 1x10", "berth_egress_connected{pod='r'}: 1x10", "berth_egress_fresh{pod='r'}: 0+0x10"}, "5m", "BerthEgressHasNoSession", []firing{{labels: map[string]string{pod: "r"}}}},
	{"there is no leader for egress", []string{"berth_allocator_leading: 0+0x10", "berth_egress_connected{pod='r'}: 0+0x10"}, "5m", "BerthEgressHasNoSession", nil},

	{"the journal is whole", []string{"berth_allocator_journal_damaged: 0+0x10"}, "5m", "BerthJournalIsDamaged", nil},
	{"the journal is damaged", []string{"berth_allocator_journal_damaged: 1x10"}, "5m", "BerthJournalIsDamaged", []firing{{}}},
	{"no quarantine", []string{"berth_allocator_quarantine_seconds: 0+0x10"}, "5m", "BerthIsInQuarantine", nil},
	{"a quarantine", []string{"berth_allocator_quarantine_seconds: 900-60x10"}, "5m", "BerthIsInQuarantine", []firing{{value: "10m 0s"}}},
	{"no violation", []string{"berth_allocator_violated_terms: 0+0x10", "berth_allocator_withheld{assertion='pod_fenced'}: 0+0x10"}, "5m", "BerthAssertionIsViolated", nil},
	{"a term ended", []string{"berth_allocator_violated_terms: 1x10", "berth_allocator_withheld{assertion='pod_fenced'}: 0+0x10"}, "5m", "BerthAssertionIsViolated", []firing{{}}},
	{"something is withheld", []string{"berth_allocator_violated_terms: 0+0x10", "berth_allocator_withheld{assertion='pod_fenced'}: 2x10"}, "5m", "BerthAssertionIsViolated", []firing{{}}},

	{"one call in a hundred fails", []string{"berth_allocator_api_calls_total{code='2xx',operation='x'}: 0+99x30", "berth_allocator_api_calls_total{code='5xx',operation='x'}: 0+1x30"}, "30m", "BerthAPIFails", nil},
	{"one call in ten fails", []string{"berth_allocator_api_calls_total{code='2xx',operation='x'}: 0+90x30", "berth_allocator_api_calls_total{code='5xx',operation='x'}: 0+10x30"}, "30m", "BerthAPIFails", []firing{{value: "10%"}}},
	{"objects are written", []string{"berth_allocator_projection_lag_seconds: 0+0x10", "berth_allocator_projection_refused: 0+0x10"}, "8m", "BerthProjectionIsBehind", nil},
	{"objects wait", []string{"berth_allocator_projection_lag_seconds: 0+5x10", "berth_allocator_projection_refused: 0+0x10"}, "9m", "BerthProjectionIsBehind", []firing{{}}},
	{"objects are rejected", []string{"berth_allocator_projection_lag_seconds: 0+0x10", "berth_allocator_projection_refused: 3x10"}, "8m", "BerthProjectionIsBehind", []firing{{}}},
	{"the pool is full enough", []string{"berth_allocator_pool_pods{pool='p',state='warm'}: 5x30", "berth_allocator_pool_pods{pool='p',state='pending'}: 5x30", "berth_allocator_pool_target_pods{pool='p',part='warm'}: 10x30"}, "25m", "BerthPoolLacksPods", nil},
	{"the pool wants none", []string{"berth_allocator_pool_pods{pool='p',state='warm'}: 0+0x30", "berth_allocator_pool_target_pods{pool='p',part='warm'}: 0+0x30"}, "25m", "BerthPoolLacksPods", nil},
	{"the pool lacks pods", []string{"berth_allocator_pool_pods{pool='p',state='warm'}: 4x30", "berth_allocator_pool_pods{pool='p',state='pending'}: 6x30", "berth_allocator_pool_target_pods{pool='p',part='warm'}: 10x30"}, "25m", "BerthPoolLacksPods", []firing{{value: "4", labels: map[string]string{metric.Pool: "p"}}}},
	{"fences end", []string{"berth_allocator_fence_oldest_seconds: 6x10"}, "5m", "BerthFenceWaits", nil},
	{"a fence waits", []string{"berth_allocator_fence_oldest_seconds: 60+60x10"}, "5m", "BerthFenceWaits", []firing{{value: "6m 0s"}}},
	{"looks succeed", []string{"berth_router_look_error{pod='r'}: 0+0x30"}, "25m", "BerthCannotTellWhatIsOpen", nil},
	{"looks fail for a moment", []string{"berth_router_look_error{pod='r'}: 1 1 1 0+0x30"}, "25m", "BerthCannotTellWhatIsOpen", nil},
	{"looks fail", []string{"berth_router_look_error{pod='r'}: 1x30", "berth_router_look_error{pod='q'}: 0+0x30"}, "25m", "BerthCannotTellWhatIsOpen", []firing{{labels: map[string]string{pod: "r"}}}},
	{"no event is lost", []string{"berth_allocator_event_log_dropped_total: 7x30"}, "25m", "BerthLosesEvents", nil},
	{"events are lost", []string{"berth_allocator_event_log_dropped_total: 7x20 8x10"}, "25m", "BerthLosesEvents", []firing{{}}},
	{"webhooks are served", []string{"berth_allocator_webhook_lag_events: 100x30", "berth_allocator_webhooks_locked: 0+0x30"}, "25m", "BerthWebhookIsBehind", nil},
	{"a webhook is behind", []string{"berth_allocator_webhook_lag_events: 50001x30", "berth_allocator_webhooks_locked: 0+0x30"}, "25m", "BerthWebhookIsBehind", []firing{{}}},
	{"a webhook is locked", []string{"berth_allocator_webhook_lag_events: 0+0x30", "berth_allocator_webhooks_locked: 1x30"}, "25m", "BerthWebhookIsBehind", []firing{{}}},
}

// events are series of a service level in which so many of 10,000 events a minute are bad.
func (s slo) events(bad int, values func(perMinute int) string) []string {
	const all = 10_000
	of := func(h metric.Histogram, bound, labels string) []string {
		return []string{
			h.CountName() + "{" + labels + "}: " + values(all),
			h.BucketName() + "{" + labels + ",le='" + bound + "'}: " + values(all-bad),
		}
	}
	switch s.name {
	case "claims_slow":
		// Those that have waited do not count.
		return append(of(metric.PoolClaimWaitSeconds, "0.05", "pool='p',result='warm'"), of(metric.PoolClaimWaitSeconds, "0.05", "pool='q',result='waited'")[0])
	case "claims_lack_pods":
		return []string{metric.PoolClaims.Name + "{pool='p',result='warm'}: " + values(all-bad), metric.PoolClaims.Name + "{pool='q',result='refused'}: " + values(bad)}
	case "admissions_slow":
		return of(metric.AdmissionSeconds, "0.002", "pod='r'")
	case "releases_slow":
		return of(metric.ReleaseAcknowledgedSeconds, "1.0", "pod='a'") // as Prometheus 3 writes it
	case "reaps_late":
		return of(metric.ReapLateSeconds, "5", "reason='EndTime'")
	}
	panic("no series of " + s.name)
}

// examples are all cases. Each error budget is spent 20, 10 and 3 times as fast as it may be.
func examples() []example {
	all := causeExamples
	for _, s := range slos() {
		steady := func(perMinute int) string { return fmt.Sprintf("0+%dx120", perMinute) }
		budget := (1 - s.objective) * 10_000
		percent := func(times float64) string { return fmt.Sprintf("%.4g%%", times*(1-s.objective)*100) }
		all = append(all,
			example{s.name + ": all is good", s.events(0, steady), "40m", s.alert, nil},
			example{s.name + ": fast", s.events(int(20*budget), steady), "10m", s.alert, []firing{{0, percent(20), nil}}},
			example{s.name + ": slower", s.events(int(10*budget), steady), "40m", s.alert, []firing{{1, percent(10), nil}}},
			example{s.name + ": slow", s.events(int(3*budget), steady), "2h", s.alert, []firing{{2, percent(3), nil}}},
			// A tenth of a minute's events, which are all bad: too few to wake anybody.
			example{s.name + ": few events", s.events(10_000, func(perMinute int) string { return fmt.Sprintf("0 %d+0x120", perMinute/2_000) }), "10m", s.alert, nil},
		)
	}
	return all
}

// unitTest is a case as promtool reads it.
type unitTest struct {
	Name     string         `json:"name"`
	Interval string         `json:"interval"`
	Input    []inputSeries  `json:"input_series"`
	Alerts   []alertingTest `json:"alert_rule_test"`
}

type inputSeries struct {
	Series string `json:"series"`
	Values string `json:"values"`
}

type alertingTest struct {
	At     string          `json:"eval_time"`
	Alert  string          `json:"alertname"`
	Expect []expectedAlert `json:"exp_alerts"`
}

type expectedAlert struct {
	Labels      map[string]string `json:"exp_labels"`
	Annotations map[string]string `json:"exp_annotations"`
}

func (e example) unitTest(t *testing.T) unitTest {
	t.Helper()
	u := unitTest{Name: e.alert + ": " + e.name, Interval: "1m", Input: []inputSeries{}}
	for _, s := range e.series {
		name, values, ok := strings.Cut(s, ": ")
		require.True(t, ok, s)
		if !strings.Contains(name, namespace+"=") {
			name = strings.TrimSuffix(name, "}")
			if strings.Contains(name, "{") {
				name += ","
			} else {
				name += "{"
			}
			name += namespace + "='a'}"
		}
		u.Input = append(u.Input, inputSeries{name, values})
	}
	var named []rule
	for _, g := range rules().Groups {
		for _, r := range g.Rules {
			if r.Alert == e.alert {
				named = append(named, r)
			}
		}
	}
	a := alertingTest{At: e.at, Alert: e.alert, Expect: []expectedAlert{}}
	for _, f := range e.fires {
		r := named[f.nth]
		x := expectedAlert{maps.Clone(r.Labels), map[string]string{}}
		x.Labels[namespace] = "a"
		for name, value := range f.labels {
			if x.Labels[name] = value; value == "" {
				delete(x.Labels, name)
			}
		}
		filled := strings.NewReplacer(
			"{{ $value | humanizePercentage }}", f.value, "{{ $value | humanizeDuration }}", f.value, "{{ $value }}", f.value,
			"{{ $labels.pod }}", f.labels[pod], "{{ $labels.pool }}", f.labels[metric.Pool],
		)
		for name, text := range r.Annotations {
			x.Annotations[name] = filled.Replace(text)
		}
		a.Expect = append(a.Expect, x)
	}
	u.Alerts = []alertingTest{a}
	return u
}

func TestEveryAlertHasACaseInWhichItFiresAndOneInWhichNot(t *testing.T) {
	fires, quiet := map[string]int{}, map[string]int{}
	for _, e := range examples() {
		if len(e.fires) == 0 {
			quiet[e.alert]++
		}
		for _, f := range e.fires {
			fires[fmt.Sprint(e.alert, f.nth)]++
		}
	}
	nth := map[string]int{}
	for _, g := range rules().Groups {
		for _, r := range g.Rules {
			if r.Alert != "" {
				require.NotZero(t, quiet[r.Alert], r.Alert)
				require.NotZero(t, fires[fmt.Sprint(r.Alert, nth[r.Alert])], "%s, rule %d", r.Alert, nth[r.Alert])
				nth[r.Alert]++
			}
		}
	}
}

// promtool runs promtool.
func promtool(t *testing.T, args ...string) string {
	t.Helper()
	path, err := exec.Command("../prometheus", "promtool").Output()
	require.NoError(t, err, "promtool: the script tools/prometheus says why")
	out, err := exec.Command(strings.TrimSpace(string(path)), args...).CombinedOutput()
	require.NoError(t, err, "promtool %s: %s", strings.Join(args, " "), out)
	return string(out)
}

func TestPromtoolAcceptsTheRules(t *testing.T) {
	n := 0
	for _, g := range rules().Groups {
		n += len(g.Rules)
	}
	require.Contains(t, promtool(t, "check", "rules", filepath.Join(chartFiles, rulesFile)), fmt.Sprintf("SUCCESS: %d rules found", n))
}

func TestAlertsFireAndStayQuietAsTheirCasesSay(t *testing.T) {
	file, err := filepath.Abs(filepath.Join(chartFiles, rulesFile))
	require.NoError(t, err)
	all := struct {
		RuleFiles []string   `json:"rule_files"`
		Interval  string     `json:"evaluation_interval"`
		Tests     []unitTest `json:"tests"`
	}{RuleFiles: []string{file}, Interval: "1m"}
	for _, e := range examples() {
		all.Tests = append(all.Tests, e.unitTest(t))
	}
	raw, err := yaml.Marshal(all)
	require.NoError(t, err)
	cases := filepath.Join(t.TempDir(), "alerts.yaml")
	require.NoError(t, os.WriteFile(cases, raw, 0o600))
	promtool(t, "test", "rules", cases)
}
