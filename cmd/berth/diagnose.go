package main

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/berth-sandbox/berth/api/openapi"
)

type diagnoseCommand struct {
	apiFlags
	Output string `short:"o" default:"text" enum:"text,json,yaml" help:"text, json or yaml."`
	ID     string `arg:"" name:"sandbox" complete:"sandbox" help:"ID of a sandbox."`
}

// diagnosis is all that the API knows about a sandbox. Diagnostics or Log is absent if its Problem says
// why.
type diagnosis struct {
	Explanation        *openapi.SandboxExplanation `json:"explanation"`
	Route              *openapi.RouteExplanation   `json:"route"`
	Diagnostics        *openapi.SandboxDiagnostics `json:"diagnostics,omitempty"`
	DiagnosticsProblem string                      `json:"diagnosticsProblem,omitempty"`
	Log                []openapi.SandboxLogEntry   `json:"log,omitempty"`
	LogProblem         string                      `json:"logProblem,omitempty"`
}

// diagnosedLines is how many lines of the log a diagnosis has.
const diagnosedLines = 10

// Run implements the command. What only the API server or the node knows may be missing: a person
// diagnoses while something is broken.
func (c *diagnoseCommand) Run(ctx context.Context, o *output) error {
	t, err := c.target()
	if err != nil {
		return err
	}
	var d diagnosis
	if d.Explanation, err = explain(ctx, t, c.ID); err != nil {
		return err
	}
	d.Route, err = call(ctx, t, func(ctx context.Context) (*openapi.RouteExplanation, error) { return t.api.Route(ctx, c.ID) })
	if err != nil {
		return err
	}
	d.Diagnostics, err = call(ctx, t, func(ctx context.Context) (*openapi.SandboxDiagnostics, error) {
		return t.api.Diagnostics(ctx, c.ID)
	})
	if err != nil {
		d.DiagnosticsProblem = err.Error()
	}
	if d.Explanation.Sandbox.ReleasedAt == nil {
		d.Log, err = call(ctx, t, func(ctx context.Context) ([]openapi.SandboxLogEntry, error) {
			return t.api.Logs(ctx, c.ID, openapi.GetSandboxLogsV2Params{Limit: new(diagnosedLines)})
		})
		if err != nil {
			d.LogProblem = err.Error()
		}
	}
	if c.Output != "text" {
		return encode(o.out, c.Output, d)
	}
	return d.print(o)
}

// report collects lines for people.
type report struct{ text strings.Builder }

// line adds a line. Control characters in it are escaped.
func (r *report) line(name, format string, args ...any) {
	if name != "" {
		name += ":"
	}
	fmt.Fprintf(&r.text, "%-16s%s\n", name, cleanLog(fmt.Sprintf(format, args...)))
}

func (d *diagnosis) print(o *output) error {
	s := &d.Explanation.Sandbox
	var r report
	r.line("Sandbox", "%s, pool %s, %s", s.SandboxID, s.Pool, s.Phase)
	r.record(s)
	if s.ReleasedAt != nil {
		r.end(s)
	} else if a := d.Explanation.Activity; a != nil {
		r.line("Last active", "%s ago, by %s, %d open", spanSeconds(a.AgeSeconds), lastText(a), a.Open)
		r.line("Next", "%s", next(*a, d.Explanation.DryRun))
	}
	r.route(d.Route, s.URL)
	switch {
	case s.PodName == "":
		r.line("Pod", "none")
	case d.Diagnostics == nil:
		r.line("Pod", "%s at %s; %s", s.PodName, s.PodIP, d.DiagnosticsProblem)
	case d.Diagnostics.Pod == nil:
		r.line("Pod", "%s at %s; %s", s.PodName, s.PodIP, d.Diagnostics.PodProblem)
		r.warnings(o, d.Diagnostics.Warnings, d.Diagnostics.WarningsProblem)
	default:
		r.pod(o, d.Diagnostics.Pod)
	}
	if d.Diagnostics != nil {
		r.egress(o, d.Diagnostics.Egress)
		for _, l := range d.Diagnostics.LogLines {
			r.line("Last log", "%s", l)
		}
	}
	if d.LogProblem != "" {
		r.line("Log", "%s", d.LogProblem)
	}
	for _, l := range d.Log {
		r.line("Log", "%s", l.Message)
	}
	_, err := fmt.Fprint(o.out, r.text.String())
	return err
}

// record adds what was fixed by the claim.
func (r *report) record(s *openapi.SandboxRecord) {
	owner := ""
	if s.Team != "" || s.User != "" {
		owner = "; team " + cmp.Or(s.Team, "-") + ", user " + cmp.Or(s.User, "-")
	}
	r.line("Claimed", "%s%s", s.ClaimedAt.UTC().Format(time.RFC3339), owner)
	if s.StartedAt != nil {
		r.line("Started", "%s, after %s", s.StartedAt.UTC().Format(time.RFC3339), span(s.StartedAt.Sub(s.ClaimedAt)))
	}
	if w := s.Workload; w != nil {
		r.line("Images", "%s", strings.Join(w.Images, " "))
		r.line("CPU", "%s requested, %s at most", cmp.Or(w.Requests.CPU, "none"), cmp.Or(w.Limits.CPU, "no limit"))
		r.line("Memory", "%s requested, %s at most", cmp.Or(w.Requests.Memory, "none"), cmp.Or(w.Limits.Memory, "no limit"))
	}
}

// end adds why a sandbox ended.
func (r *report) end(s *openapi.SandboxRecord) {
	text := strings.TrimPrefix(ended(s), "released at ") + ", after " + span(s.ReleasedAt.Sub(s.ClaimedAt))
	if s.ExitCode != nil {
		text += fmt.Sprintf("; exit code %d", *s.ExitCode)
	}
	r.line("Released", "%s", text)
	if s.Message != "" {
		r.line("", "%s", s.Message)
	}
}

// lastText is the latest activity and the router that has reported it.
func lastText(a *openapi.Activity) string {
	if router := deref(a.Router); router != "" {
		return a.Kind + " at " + router
	}
	return a.Kind
}

func (r *report) route(route *openapi.RouteExplanation, url string) {
	ports := "all"
	if len(route.Ports) > 0 {
		ports = strings.Trim(fmt.Sprint(route.Ports), "[]")
	}
	r.line("Ports", "%s; default %d", ports, route.DefaultPort)
	r.line("URL", "%s", url)
	routable := "no"
	if route.Routable {
		routable = "yes"
	}
	r.line("Routable", "%s: %s", routable, route.Why)
	if f := route.Fence; f != nil {
		waits := make([]string, 0, len(f.WaitsFor))
		for _, a := range f.WaitsFor {
			waits = append(waits, a.SessionID+" ("+why(a)+")")
		}
		r.line("Fence", "%s; waits for %s", f.Phase, cmp.Or(strings.Join(waits, ", "), "no router"))
	}
	for _, router := range route.Routers {
		r.line("Router", "%s %s: %s", router.SessionID, router.Address, router.State)
	}
	if route.RoutersOthers > 0 {
		r.line("Router", "%d more", route.RoutersOthers)
	}
	if route.PodNotReady != "" {
		r.line("Pod not ready", "%s", route.PodNotReady)
	}
}

// pod adds what the API server has of a pod.
func (r *report) pod(o *output, p *openapi.PodDiagnostics) {
	state := p.Phase
	if p.Deleting {
		state += ", is being deleted"
	}
	r.line("Pod", "%s at %s, %s, %s old", p.Name, cmp.Or(p.PodIP, "no address"), state, span(o.now().Sub(p.CreatedAt)))
	if problem := problemText(p.Reason, p.Message); problem != "" {
		r.line("", "%s", problem)
	}
	said := ""
	for _, c := range p.Conditions {
		text := cmp.Or(problemText(c.Reason, c.Message), c.Status)
		if c.Status != "True" && text != said { // ContainersReady repeats Ready
			r.line(c.Type, "%s", text)
			said = text
		}
	}
	for _, c := range p.Containers {
		ready := "ready"
		if !c.Ready {
			ready = "not ready"
		}
		text := fmt.Sprintf("%s (%s): %s, %s, %d restarts", c.Name, c.Image, c.State, ready, c.Restarts)
		if c.ExitCode != nil {
			text += fmt.Sprintf(", exit code %d", *c.ExitCode)
		}
		if problem := problemText(c.Reason, c.Message); problem != "" {
			text += "; " + problem
		}
		if c.LastEnd != "" {
			text += "; before that: " + c.LastEnd
		}
		r.line("Container", "%s", text)
	}
	if p.Node != "" {
		r.line("Node", "%s%s", p.Node, prefixed("; ", p.NodeProblem))
	}
	r.warnings(o, p.Warnings, p.WarningsProblem)
}

// egress adds what a sandbox may reach through egress gateways, and what it has reached. nil: it uses none.
func (r *report) egress(o *output, e *openapi.SandboxEgress) {
	if e == nil {
		return
	}
	r.line("Egress", "%d let through, %d refused, %d open; at least %s sent, %s received", e.Admitted, e.Refused, e.Open,
		size(e.SentBytes), size(e.ReceivedBytes))
	if e.GatewaysSilent > 0 || e.Gateways == 0 {
		r.line("", "%d of %d connected gateways did not answer", e.GatewaysSilent, e.Gateways)
	}
	r.line("May reach", "by its pool %s; by its claim %s; ports %s", rulesText(e.Pool), rulesText(e.Claim), portsText(e.Ports))
	for _, d := range e.Destinations {
		name, refusal := "Reached", ""
		if d.Reason != "" {
			name, refusal = "Refused", ": "+d.Reason
		}
		r.line(name, "%s%s (%d times, last %s ago)", net.JoinHostPort(d.Host, strconv.Itoa(d.Port)), refusal, d.Count,
			span(o.now().Sub(d.LastAt)))
	}
}

// rulesText is what rules say in one line.
func rulesText(r *openapi.EgressRules) string {
	switch {
	case r == nil:
		return "unknown"
	case len(r.Deny) == 0:
		return "everything"
	case len(r.Allow) == 0:
		return "all but " + strings.Join(r.Deny, " ")
	}
	return strings.Join(r.Allow, " ") + ", and all but " + strings.Join(r.Deny, " ")
}

func portsText(ports []int) string {
	if len(ports) == 0 {
		return "80 443"
	}
	return strings.Trim(fmt.Sprint(ports), "[]")
}

func (r *report) warnings(o *output, all []openapi.PodWarning, problem string) {
	for _, w := range all {
		r.line("Warning", "%s: %s (%d times, last %s ago)", w.Reason, w.Message, w.Count, span(o.now().Sub(w.LastSeen)))
	}
	if problem != "" {
		r.line("Warning", "events: %s", problem)
	}
}

// problemText joins a reason and a message of Kubernetes, of which each may be missing.
func problemText(reason, message string) string {
	if reason == "" || message == "" {
		return reason + message
	}
	return reason + ": " + message
}

// prefixed puts a prefix before a text that is not empty.
func prefixed(prefix, text string) string {
	if text == "" {
		return ""
	}
	return prefix + text
}

type poolsDiagnoseCommand struct {
	apiFlags
	Output string `short:"o" default:"text" enum:"text,json,yaml" help:"text, json or yaml."`
	Name   string `arg:"" name:"pool" complete:"pool" help:"Name of a pool."`
}

// Run implements the command.
func (c *poolsDiagnoseCommand) Run(ctx context.Context, o *output) error {
	t, err := c.target()
	if err != nil {
		return err
	}
	d, err := call(ctx, t, func(ctx context.Context) (*openapi.PoolDiagnostics, error) {
		return t.api.PoolDiagnostics(ctx, c.Name)
	})
	if err != nil {
		return err
	}
	if c.Output != "text" {
		return encode(o.out, c.Output, d)
	}
	var r report
	p := &d.Pool
	r.line("Pool", "%s: %d of %d warm, %d pending, %d claimed, %d releasing, %d claims wait", p.Name, p.Counts.Warm, p.Spec.Warm,
		p.Counts.Pending, p.Counts.Claimed, p.Counts.Releasing, p.Counts.WaitingClaims)
	if p.Deleting {
		r.line("Deleting", "its sandboxes are being released")
	}
	for _, condition := range p.Conditions {
		r.line(condition.Type, "%s%s", condition.Status, prefixed("; ", problemText(condition.Reason, condition.Message)))
	}
	for i := range d.Pods {
		r.text.WriteString("\n")
		r.pod(o, &d.Pods[i])
	}
	if d.PodsOthers > 0 {
		r.text.WriteString("\n")
		r.line("Pods", "%d more are not ready", d.PodsOthers)
	}
	if len(d.Failures) > 0 {
		r.text.WriteString("\n")
	}
	for _, f := range d.Failures {
		r.line("Failed", "%s, %s ago: %s", f.PodName, span(o.now().Sub(f.At)), problemText(f.Reason, f.Message))
	}
	_, err = fmt.Fprint(o.out, r.text.String())
	return err
}
