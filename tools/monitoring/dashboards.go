package main

import (
	"github.com/grafana/grafana-foundation-sdk/go/cog"
	"github.com/grafana/grafana-foundation-sdk/go/common"
	"github.com/grafana/grafana-foundation-sdk/go/dashboard"
	"github.com/grafana/grafana-foundation-sdk/go/prometheus"
	"github.com/grafana/grafana-foundation-sdk/go/stat"
	"github.com/grafana/grafana-foundation-sdk/go/timeseries"
	"github.com/grafana/grafana-foundation-sdk/go/units"

	"github.com/berth-sandbox/berth/api/metric"
)

// board is a dashboard: rows of panels.
type board struct {
	uid, title string
	pools      bool // it has a variable for pools
	rows       []row
}

type row struct {
	title  string
	panels []panel
}

// panel shows queries. of is the metric whose meaning it explains.
type panel struct {
	title   string
	of      *metric.Row
	unit    string
	queries []query
	number  bool // shown as one number
	stacked bool
}

type query struct{ expr, legend string }

// window is that of rates in dashboards: Grafana fills it in.
const window = "$__rate_interval"

// here matches the installation that the dashboard shows, and ofPool also its pools.
var (
	here   = namespace + `=~"$namespace"`
	ofPool = metric.Pool + `=~"$pool"`
)

func (d board) build() (dashboard.Dashboard, error) {
	source := common.DataSourceRef{Type: cog.ToPtr("prometheus"), Uid: cog.ToPtr("$datasource")}
	choice := func(name, label, query string) *dashboard.QueryVariableBuilder {
		return dashboard.NewQueryVariableBuilder(name).Label(label).Datasource(source).Query(dashboard.StringOrMap{String: &query}).
			Refresh(dashboard.VariableRefreshOnTimeRangeChanged).Multi(true).IncludeAll(true).AllValue(".*").
			Current(dashboard.VariableOption{
				Text: dashboard.StringOrArrayOfString{String: cog.ToPtr("All")}, Value: dashboard.StringOrArrayOfString{String: cog.ToPtr("$__all")},
			})
	}
	b := dashboard.NewDashboardBuilder(d.title).Uid(d.uid).Tags([]string{"berth"}).Refresh("30s").Time("now-1h", "now").
		Tooltip(dashboard.DashboardCursorSyncCrosshair).Readonly().
		WithVariable(dashboard.NewDatasourceVariableBuilder("datasource").Label("Data source").Type("prometheus")).
		WithVariable(choice("namespace", "Installation", "label_values("+metric.Leading.Name+", "+namespace+")"))
	if d.pools {
		b = b.WithVariable(choice("pool", "Pool", "label_values("+series(metric.PoolPods.Name, here)+", "+metric.Pool+")"))
	}
	for _, r := range d.rows {
		b = b.WithRow(dashboard.NewRowBuilder(r.title))
		for _, p := range r.panels {
			b = b.WithPanel(p.builder(source))
		}
	}
	return b.Build()
}

const (
	width, numberWidth = 8, 4 // of 24
	height             = 7
	numberHeight       = 4
)

func (p panel) builder(source common.DataSourceRef) cog.Builder[dashboard.Panel] {
	description := p.of.Help + "\n\n" + p.of.Moves
	if p.number {
		b := stat.NewPanelBuilder().Title(p.title).Description(description).Datasource(source).Unit(p.unit).Span(numberWidth).Height(numberHeight)
		for i, q := range p.queries {
			b = b.WithTarget(q.target(i))
		}
		return b
	}
	b := timeseries.NewPanelBuilder().Title(p.title).Description(description).Datasource(source).Unit(p.unit).Span(width).Height(height).
		Min(0).LineWidth(1).FillOpacity(10).ShowPoints(common.VisibilityModeNever).
		Legend(common.NewVizLegendOptionsBuilder().ShowLegend(true).Placement(common.LegendPlacementBottom).DisplayMode(common.LegendDisplayModeList)).
		Tooltip(common.NewVizTooltipOptionsBuilder().Mode(common.TooltipDisplayModeMulti).Sort(common.SortOrderDescending))
	if p.stacked {
		b = b.Stacking(common.NewStackingConfigBuilder().Mode(common.StackingModeNormal))
	}
	for i, q := range p.queries {
		b = b.WithTarget(q.target(i))
	}
	return b
}

// target is the i-th query of its panel.
func (q query) target(i int) *prometheus.DataqueryBuilder {
	return prometheus.NewDataqueryBuilder().Expr(q.expr).LegendFormat(q.legend).RefId(string(rune('A' + i)))
}

// number shows the sum of a gauge.
func number(title string, g metric.Gauge, matchers ...string) panel {
	return panel{title: title, of: g.Row, unit: units.Short, number: true, queries: []query{{"sum(" + series(g.Name, join(matchers, []string{here})...) + ")", ""}}}
}

// rates shows the rate of a counter by a label, "" for the sum.
func rates(title string, c metric.Counter, by string, matchers ...string) panel {
	p := panel{title: title, of: c.Row, unit: units.CountsPerSecond, stacked: by != ""}
	legend := c.Unit
	if by != "" {
		legend = "{{" + by + "}}"
	}
	p.queries = []query{{sum(by, rate(series(c.Name, join(matchers, []string{here})...), window)), legend}}
	return p
}

// times shows the median and the 99th percentile of a histogram, by a label if by is not "".
func times(title string, h metric.Histogram, by string, matchers ...string) panel {
	p := panel{title: title, of: h.Row, unit: units.Seconds}
	legend := ""
	if by != "" {
		legend = " {{" + by + "}}"
	}
	matchers = join(matchers, []string{here})
	p.queries = []query{
		{quantile(0.5, h, by, window, matchers...), "p50" + legend},
		{quantile(0.99, h, by, window, matchers...), "p99" + legend},
	}
	return p
}

// gauges shows the largest value of each gauge, under its unit or a name of its own.
func gauges(title, unit string, all ...metric.Gauge) panel {
	p := panel{title: title, of: all[0].Row, unit: unit}
	for _, g := range all {
		p.queries = append(p.queries, query{most(namespace, series(g.Name, here)), g.Name})
	}
	return p
}

// by shows the sum of a gauge by a label.
func by(title string, g metric.Gauge, label string, matchers ...string) panel {
	return panel{title: title, of: g.Row, unit: units.Short, queries: []query{{sum(label, series(g.Name, join(matchers, []string{here})...)), "{{" + label + "}}"}}}
}

func (s slo) panel(of *metric.Row) panel {
	return panel{title: "Bad: " + s.what, of: of, unit: units.PercentUnit, queries: []query{{s.ratio("", window, here), "bad"}}}
}

func dashboards() []board {
	all := slos()
	levels := row{title: "Service levels: the part of the events that is bad"}
	for i, of := range []*metric.Row{metric.PoolClaimWaitSeconds.Row, metric.PoolClaims.Row, metric.AdmissionSeconds.Row, metric.ReleaseAcknowledgedSeconds.Row, metric.ReapLateSeconds.Row} {
		levels.panels = append(levels.panels, all[i].panel(of))
	}
	hits := panel{title: "Warm hit rate", of: metric.PoolClaims.Row, unit: units.PercentUnit, queries: []query{{
		sum(metric.Pool, rate(series(metric.PoolClaims.Name, is(metric.Result, metric.ResultWarm), ofPool, here), window)) + " / " +
			sum(metric.Pool, rate(series(metric.PoolClaims.Name, ofPool, here), window)), "{{" + metric.Pool + "}}",
	}}}
	used := panel{title: "Time in which the journal writes", of: metric.CommitSeconds.Row, unit: units.PercentUnit, queries: []query{
		{"sum(" + rate(series(metric.CommitSeconds.SumName(), here), window) + ")", "writes"},
		{"sum(" + rate(series(metric.HeldBackSeconds.Name, here), window) + ")", "held back"},
	}}
	return []board{
		{uid: "berth-overview", title: "Berth / Overview", rows: []row{
			{"Now", []panel{
				number("Leaders", metric.Leading), number("Routers connected", metric.RoutersConnected), number("Live sandboxes", metric.SandboxesLive),
				number("Warm pods", metric.PoolPods, is(metric.State, metric.StateWarm)), number("Claims that wait", metric.PoolClaimsWaiting), number("Fences", metric.Fences),
			}},
			levels,
			{"Claims and releases", []panel{
				rates("Claims", metric.Claims, metric.Outcome), times("Time of claims", metric.ClaimSeconds, ""), times("Wait until a claim is granted", metric.PoolClaimWaitSeconds, metric.Result),
				rates("Releases", metric.Releases, metric.Reason), times("Lateness of ends", metric.ReapLateSeconds, metric.Reason), rates("Batch claims", metric.BatchClaims, metric.Outcome),
			}},
			{"Sleep", []panel{
				gauges("Sandboxes that are asleep, or fall asleep or wake", units.Short, metric.SandboxesAsleep),
				gauges("Sandboxes whose node has no room for their wake", units.Short, metric.ResizesDeferred),
				rates("Sandboxes that fell asleep", metric.Sleeps, ""), times("Time of wakes", metric.WakeSeconds, ""),
				rates("Snapshots", metric.Snapshots, metric.Outcome), rates("Pods into which files were restored", metric.Restores, metric.Outcome),
				rates("Archives of sandboxes that are to be stopped", metric.StopArchives, metric.Outcome),
				rates("Archives of sandboxes that are to be stopped, by cause", metric.StopArchives, metric.Cause),
			}},
			{"HTTP API", []panel{
				rates("Calls", metric.APICalls, metric.Operation), rates("Calls by class of code", metric.APICalls, metric.Code), times("Time of calls", metric.APICallSeconds, metric.Operation),
				by("Slots in use", metric.APISlotsUsed, metric.Class), rates("Calls beyond the rate of a key", metric.RateLimited, ""),
				by("Sandboxes of teams with limits", metric.TeamSandboxes, metric.Team), by("Waiting claims of teams with limits", metric.TeamClaimsWaiting, metric.Team),
			}},
		}},
		{uid: "berth-pools", title: "Berth / Pools", pools: true, rows: []row{
			{"Pods", []panel{
				stackedBy(by("Pods by state", metric.PoolPods, metric.State, ofPool)), by("Warm pods", metric.PoolPods, metric.Pool, is(metric.State, metric.StateWarm), ofPool),
				by("Warm pods asked for", metric.PoolTargetPods, metric.Pool, is(metric.Part, metric.PartWarm), ofPool), by("Pods asked for, by part", metric.PoolTargetPods, metric.Part, ofPool),
				seconds(by("Start of a pod", metric.PoolStartSeconds, metric.Pool, ofPool)), rates("Failed idle pods", metric.PodFailures, metric.Reason), rates("Recycled pods", metric.Recycles, metric.Outcome),
			}},
			{"Claims", []panel{
				rates("Claims by result", metric.PoolClaims, metric.Result, ofPool), hits, by("Claims that wait", metric.PoolClaimsWaiting, metric.Pool, ofPool),
				times("Wait until a claim is granted", metric.PoolClaimWaitSeconds, metric.Pool, ofPool),
			}},
		}},
		{uid: "berth-edge", title: "Berth / Edge", rows: []row{
			{"Requests", []panel{
				rates("Requests", metric.Requests, metric.Outcome), rates("Refused requests", metric.Requests, metric.Outcome, metric.Outcome+`!="`+metric.OutcomeAdmitted+`"`),
				times("Time until a request is admitted", metric.AdmissionSeconds, ""), by("Held requests", metric.RequestsHeld, pod), by("Answers that Envoy has not read", metric.AnswersUnread, pod),
				rates("Requests beyond the limits of a sandbox", metric.RequestsLimited, metric.Reason), times("Hold while the leader asks whether a sandbox is idle", metric.QuiesceHoldSeconds, ""),
				times("Wait for sandboxes that were asleep", metric.WakeWaitSeconds, ""),
			}},
			{"Routes", []panel{
				rates("Hits", metric.CacheHits, pod), rates("Misses", metric.CacheMisses, pod), rates("Questions to the leader", metric.CacheQuestions, pod),
				{title: "Part of the cache in use", of: metric.CacheRoutes.Row, unit: units.PercentUnit, queries: []query{{
					sum(pod, series(metric.CacheRoutes.Name, here)) + " / " + sum(pod, series(metric.CacheCapacity.Name, here)), "{{" + pod + "}}",
				}}},
				rates("Evictions", metric.CacheEvictions, pod), by("Quiesced sandboxes", metric.CacheQuiesced, pod),
			}},
			{"Sessions with the leader", []panel{
				by("Connected", metric.Connected, pod), by("Fresh", metric.CacheFresh, pod), times("Time of pings", metric.PingSeconds, pod),
				seconds(gauges("Longest time since a pong", units.Seconds, metric.PongAgeSeconds)), rates("Messages of control streams", metric.ControlMessages, metric.Direction+", "+metric.Kind),
				rates("Ends of control streams", metric.ControlStreamsEnded, metric.Code),
			}},
			{"Activity", []panel{
				by("Sandboxes whose activity is remembered", metric.TrackedSandboxes, pod), times("Time of looks at Envoy", metric.LookSeconds, pod), by("Looks that fail", metric.LookError, pod),
				rates("Releases that a dry run left out", metric.WouldReap, ""),
			}},
			{"Egress gateways", []panel{
				rates("Requests of sandboxes", metric.EgressRequests, metric.Outcome), rates("Refused requests of sandboxes", metric.EgressRequests, metric.Outcome, metric.Outcome+`!="`+metric.OutcomeAdmitted+`"`),
				bytesPerSecond(rates("Bytes from sandboxes (out) and to them (in)", metric.EgressBytes, metric.Direction)),
				by("Open requests and tunnels", metric.EgressOpen, pod), rates("Requests and tunnels that were cut", metric.EgressCut, pod), rates("Names looked up", metric.EgressLookups, pod),
				by("Sandboxes", metric.EgressSandboxes, pod), by("Connected", metric.EgressConnected, pod), by("Fresh", metric.EgressFresh, pod), rates("New connections", metric.EgressConnections, metric.Outcome), rates("Destinations that the log does not have", metric.EgressUnlogged, pod), times("Time of pings", metric.EgressPingSeconds, pod),
			}},
		}},
		{uid: "berth-journal", title: "Berth / Journal and fences", rows: []row{
			{"Journal", []panel{
				times("Time of writes", metric.CommitSeconds, ""), used, gauges("Facts that wait", units.Short, metric.JournalWaiting),
				rates("Batches", metric.JournalBatches, ""), rates("Records", metric.JournalRecords, ""), rates("Records carried on", metric.JournalCarried, ""),
				rates("Bytes", metric.JournalBytes, ""), gauges("Bytes that no object shows", units.BytesIEC, metric.JournalUnsettled), rates("Writes with an unknown outcome", metric.JournalUnknown, ""),
				rates("Slots that were repaired", metric.SlotsRepaired, ""), gauges("Journal is damaged", units.Short, metric.JournalDamaged), seconds(gauges("Quarantine", units.Seconds, metric.Quarantine)),
			}},
			{"Fences", []panel{
				gauges("Fences", units.Short, metric.Fences), gauges("Oldest fence", units.Seconds, metric.FenceOldestSeconds), times("Time until all routers have acknowledged", metric.ReleaseAcknowledgedSeconds, ""),
				rates("Routers declared dead", metric.DeclaredDead, ""), gauges("Violated terms", units.Short, metric.ViolatedTerms), by("Withheld", metric.Withheld, metric.Assertion),
				rates("Repairs", metric.Repairs, ""),
			}},
			{"Queues", []panel{
				gauges("Events that wait for the core", units.Short, metric.EventsWaiting), gauges("Writes that wait", units.Short, metric.WritesWaiting, metric.LabelsWaiting, metric.HooksWaiting, metric.ProjectionWaiting),
				gauges("Age of the oldest waiting object", units.Seconds, metric.ProjectionLagSeconds), gauges("Objects that the API server rejects", units.Short, metric.ProjectionRefused),
			}},
			{"Events and webhooks", []panel{
				gauges("Events in the log", units.Short, metric.EventLogEvents), gauges("Bytes of the log", units.BytesIEC, metric.EventLogBytes), gauges("States that wait for the log", units.Short, metric.EventLogWaiting),
				rates("Bytes written to the log", metric.EventLogWritten, ""), rates("Failed writes of the log", metric.EventLogFailures, ""), rates("Lost events", metric.EventLogDropped, ""),
				gauges("Webhooks", units.Short, metric.Webhooks, metric.WebhooksLocked), gauges("Events that the slowest webhook lacks", units.Short, metric.WebhookLag), rates("Deliveries", metric.WebhookDeliveries, ""),
				rates("Failed attempts", metric.WebhookFailures, ""), rates("Events given up", metric.WebhookGivenUp, ""), rates("Gaps", metric.WebhookGaps, ""),
			}},
		}},
	}
}

func seconds(p panel) panel { p.unit = units.Seconds; return p }

func bytesPerSecond(p panel) panel { p.unit = units.BytesPerSecondIEC; return p }

func stackedBy(p panel) panel { p.stacked = true; return p }
