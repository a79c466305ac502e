package main

import (
	"fmt"
	"strings"

	"github.com/berth-sandbox/berth/api/metric"
)

// Severities. A page must be acted on at once, a ticket within days.
const (
	page   = "page"
	ticket = "ticket"
)

// runbook has a section for each alert, under its name.
const runbook = "https://github.com/berth-sandbox/berth/blob/main/docs/runbook.md"

// file is a file of rules, as Prometheus reads it.
type file struct {
	Groups []group `json:"groups"`
}

type group struct {
	Name  string `json:"name"`
	Rules []rule `json:"rules"`
}

type rule struct {
	Record      string            `json:"record,omitempty"`
	Alert       string            `json:"alert,omitempty"`
	Expr        string            `json:"expr"`
	For         string            `json:"for,omitempty"`
	Labels      map[string]string `json:"labels,omitempty"`
	Annotations map[string]string `json:"annotations,omitempty"`
}

func alert(name, severity, hold, expr, summary, description string) rule {
	return rule{Alert: name, Expr: expr, For: hold, Labels: map[string]string{"severity": severity}, Annotations: map[string]string{
		"summary": summary, "description": description, "runbook_url": runbook + "#" + strings.ToLower(name),
	}}
}

// rules returns all rules. Each alert demands an action, and its section of the runbook says which.
func rules() file {
	recording, burning := group{Name: "berth-service-levels"}, group{Name: "berth-error-budgets"}
	for _, s := range slos() {
		recorded, alerts := s.rules()
		recording.Rules, burning.Rules = append(recording.Rules, recorded...), append(burning.Rules, alerts...)
	}
	return file{[]group{recording, burning, {"berth-causes", causes()}}}
}

// leads is true where a replica leads.
func leads() string { return most(namespace, metric.Leading.Name) + " == 1" }

func causes() []rule {
	of := func(r *metric.Row, condition string) string { return most(namespace, r.Name) + " " + condition }
	grew := func(c metric.Counter, window string) string {
		return sum(namespace, fmt.Sprintf("increase(%s[%s])", c.Name, window)) + " > 0"
	}
	warm := sum(namespace+", "+metric.Pool, series(metric.PoolPods.Name, is(metric.State, metric.StateWarm)))
	wanted := sum(namespace+", "+metric.Pool, series(metric.PoolTargetPods.Name, is(metric.Part, metric.PartWarm)))
	calls := sum(namespace, rate(metric.APICalls.Name, "10m"))
	failed := sum(namespace, rate(series(metric.APICalls.Name, is(metric.Code, metric.CodeFailed)), "10m"))
	noSession := most(namespace+", "+pod, metric.Connected.Name) + " == 0 or " + most(namespace+", "+pod, metric.CacheFresh.Name) + " == 0"
	noEgress := most(namespace+", "+pod, metric.EgressConnected.Name) + " == 0 or " + most(namespace+", "+pod, metric.EgressFresh.Name) + " == 0"
	return []rule{
		alert("BerthHasNoLeader", page, "1m",
			fmt.Sprintf("count by (%s) (%s) unless on (%s) %s or absent(%s)", namespace, metric.CacheFresh.Name, namespace, leads(), metric.Leading.Name),
			"No allocator leads", "Nothing can be claimed, and no sandbox ends. Routers serve what they know for --max-stale."),
		alert("BerthRouterHasNoSession", page, "2m",
			fmt.Sprintf("(%s) and on (%s) %s", noSession, namespace, leads()),
			"A router has no session although an allocator leads",
			"The router in {{ $labels.pod }} learns of no claim and of no release. It serves what it knows for --max-stale, and releases wait for it."),
		alert("BerthEgressHasNoSession", page, "2m",
			fmt.Sprintf("(%s) and on (%s) %s", noEgress, namespace, leads()),
			"An egress gateway has no session although an allocator leads",
			"The gateway in {{ $labels.pod }} refuses what sandboxes send through it. Changes of rules and releases of such sandboxes wait for it."),
		alert("BerthJournalIsDamaged", page, "", of(metric.JournalDamaged.Row, "== 1"),
			"The journal is damaged", "Another client has changed JournalSlot objects, and the leader cannot restore them. No other replica could lead."),
		alert("BerthIsInQuarantine", page, "1m", of(metric.Quarantine.Row, "> 0"),
			"No pod is handed out", "The journal was begun anew. Claims are refused for {{ $value | humanizeDuration }}."),
		alert("BerthAssertionIsViolated", page, "",
			fmt.Sprintf("%s or %s > 0", of(metric.ViolatedTerms.Row, "> 0"), sum(namespace, metric.Withheld.Name)),
			"An assertion was violated", "A defect of Berth. The log of the leader has a line with a dump."),
		alert("BerthAPIFails", page, "10m", fmt.Sprintf("%s / %s > 0.05", failed, calls),
			"The API answers calls with 5xx", "{{ $value | humanizePercentage }} of the calls of the last 10 minutes."),
		alert("BerthProjectionIsBehind", ticket, "5m", of(metric.ProjectionLagSeconds.Row, "> 10")+" or "+of(metric.ProjectionRefused.Row, "> 0"),
			"Sandbox objects are not written", "Objects wait for more than 10 s, or the API server rejects them. Claims are refused above 30 s."),
		alert("BerthPoolLacksPods", ticket, "15m", fmt.Sprintf("%s < 0.5 * %s", warm, wanted),
			"A pool has less than half of its warm pods", "{{ $value }} pods of the pool {{ $labels.pool }} are warm, less than half of what it asks for."),
		alert("BerthFenceWaits", ticket, "1m", of(metric.FenceOldestSeconds.Row, "> 120"),
			"A router has not acknowledged a release", "Pods of released sandboxes are kept for {{ $value | humanizeDuration }}, because a router may send requests to them."),
		alert("BerthCannotTellWhatIsOpen", ticket, "10m", most(namespace+", "+pod, metric.LookError.Name)+" == 1",
			"No idle sandbox is released", "The router in {{ $labels.pod }} cannot tell what its Envoy holds open."),
		alert("BerthLosesEvents", ticket, "", grew(metric.EventLogDropped, "1h"),
			"The log of events has lost events", "It could not be written for too long. Webhooks and GET /events/sandboxes lack these events."),
		alert("BerthWebhookIsBehind", ticket, "10m", of(metric.WebhookLag.Row, "> 50000")+" or "+of(metric.WebhooksLocked.Row, "> 0"),
			"A webhook is about to lose events, or is locked", "The receiver fails or is slow: at 100,000 events it loses some. A locked webhook sends nothing."),
	}
}
