package console

import (
	"context"
	"fmt"
	"html/template"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/console/chart"
)

// Bounds of the parts of the page of one sandbox.
const (
	logLines      = 100
	sandboxEvents = 20
	maxTimeout    = 31_536_000 // seconds, as the API has it
)

// moment is a step in the life of a sandbox. Kind is ok for what has happened, busy for what happens now, and "" for
// what is to come.
type moment struct {
	Kind, Text, Detail string
	At                 *time.Time
}

type sandboxData struct {
	Record   openapi.SandboxRecord
	State    badge
	Live     bool
	Access   string
	Activity *openapi.Activity
	DryRun   bool
	Timeline []moment
	Route    *openapi.RouteExplanation
	Events   []event
	Usage    *openapi.SandboxMetric
	Charts   []template.HTML // of its usage in the last hour; none without an agent
	Log      []openapi.SandboxLogEntry
	LastLog  []string // of an ended sandbox
	Pod      *openapi.PodDiagnostics
	Egress   *openapi.SandboxEgress // nil: it uses no egress gateway
	// The reasons why a part is missing.
	RouteProblem, EventsProblem, UsageProblem, LogProblem, PodProblem string
	// Acts: the person may end it, open it and move its end. Timeout is what was entered for that, and TimeoutError the
	// sentence for it.
	Acts                  bool
	Timeout, TimeoutError string
}

func sandboxPage(v *visit) (page, error) { return v.sandbox("", "") }

// sandbox shows one sandbox, with a form that was refused if there is one.
func (v *visit) sandbox(timeout, wrong string) (page, error) {
	id := v.PathValue("id")
	why, err := v.api.Why(v.ctx, id)
	if err != nil {
		return page{}, err
	}
	d := sandboxData{
		Record: why.Sandbox, State: stateOf[why.Sandbox.Phase], Live: isLive(why.Sandbox.Phase),
		Activity: why.Activity, DryRun: why.DryRun,
		Acts: v.may(openapi.Member), Timeout: timeout, TimeoutError: wrong,
	}
	ctx, cancel := panelOf(v.ctx)
	defer cancel()
	var all errgroup.Group
	part := func(problem *string, what string, f func() error) {
		all.Go(func() error {
			if err := f(); err != nil {
				*problem = sentence(what + ": " + reasonOf(err))
			}
			return nil
		})
	}
	part(&d.RouteProblem, "the route is not known now", func() (err error) {
		d.Route, err = v.api.Route(ctx, id)
		return err
	})
	all.Go(func() error { d.Events, d.EventsProblem = v.latest(id, sandboxEvents); return nil })
	part(&d.PodProblem, "the pod cannot be read now", func() error { return d.readPod(ctx, v, id) })
	if d.Live {
		part(new(string), "", func() error { return d.readAccess(ctx, v, id) })
		part(&d.UsageProblem, "no measurement", func() error { return d.readUsage(ctx, v, id) })
		part(&d.LogProblem, "the log cannot be read now", func() (err error) {
			d.Log, err = v.api.Logs(ctx, id, openapi.GetSandboxLogsV2Params{Limit: new(logLines)})
			return err
		})
	}
	_ = all.Wait() // each part has its own problem
	d.Timeline = d.timeline()
	p := page{name: "sandbox", Title: "Sandbox " + id, Section: "Sandboxes", Live: true, opens: true, Data: d}
	if wrong != "" {
		p.status = http.StatusUnprocessableEntity
	}
	return p, nil
}

func (d *sandboxData) readPod(ctx context.Context, v *visit, id string) error {
	found, err := v.api.Diagnostics(ctx, id)
	if err != nil {
		return err
	}
	d.Pod, d.LastLog, d.PodProblem, d.Egress = found.Pod, found.LogLines, found.PodProblem, found.Egress
	return nil
}

func (d *sandboxData) readAccess(ctx context.Context, v *visit, id string) error {
	s, err := v.api.Get(ctx, id)
	if err == nil {
		d.Access = string(s.Access)
	}
	return err
}

func (d *sandboxData) readUsage(ctx context.Context, v *visit, id string) error {
	all, err := v.api.Metrics(ctx, id)
	if err != nil || len(all) == 0 {
		return err
	}
	d.Usage = &all[len(all)-1]
	d.Charts, err = drawn(chart.OfUsage(all))
	return err
}

// timeline is the life of the sandbox from the claim to its end, with the steps of the fence.
func (d *sandboxData) timeline() []moment {
	r := &d.Record
	claimed := "of pool " + r.Pool
	if r.PodName != "" {
		claimed = "pod " + r.PodName + " " + claimed
	}
	all := []moment{{"ok", "Claimed", claimed, &r.ClaimedAt}}
	switch {
	case r.StartedAt != nil:
		all = append(all, moment{"ok", "Running", "", r.StartedAt})
	case r.Phase == openapi.RecordPhaseStarting:
		all = append(all, moment{"busy", "Starting", "its PostStart hook has not succeeded yet; requests wait for it", nil})
	}
	if r.Phase == openapi.RecordPhaseStopped {
		all = append(all, moment{"ok", "Stopped", "it has its files, and no pod", nil})
	}
	if d.Live {
		if d.Activity != nil && d.Activity.Next != nil {
			n := d.Activity.Next
			return append(all, moment{"", "Ends without further use", words(string(n.Reason)), &n.At})
		}
		return append(all, moment{"", "Stays until it is ended", "it has no end and no idle timeout that counts now", nil})
	}
	detail := words(r.Reason)
	if r.ExitCode != nil {
		detail += fmt.Sprintf(", exit code %d", *r.ExitCode)
	}
	if r.Message != "" {
		detail += ": " + r.Message
	}
	all = append(all, moment{"ok", "Released", detail, r.ReleasedAt})
	if r.Phase == openapi.RecordPhaseEnded {
		return append(all,
			moment{"ok", "Fence complete", "no router can send a request to where it was", nil},
			moment{"ok", "Ended", "its pod is gone", nil})
	}
	acknowledged := moment{"busy", "Routers acknowledge the release", "", nil}
	window := moment{"", "Connect window", "requests that were admitted before may still connect", nil}
	if d.Route != nil && d.Route.Fence != nil {
		f := d.Route.Fence
		if n := len(f.WaitsFor) + f.WaitsForOthers; n > 0 {
			acknowledged.Detail = "waits for " + plural(n, "router")
		}
		if f.Phase == openapi.FencePhaseConnectWindow {
			acknowledged.Kind, window.Kind = "ok", "busy"
			if f.ConnectWindowEndsInSeconds != nil {
				window.Detail += fmt.Sprintf(", for %.0f s", *f.ConnectWindowEndsInSeconds)
			}
		}
	} else if d.Route != nil {
		acknowledged.Kind, window.Kind = "ok", "ok"
	}
	return append(all, acknowledged, window,
		moment{"", "Ended", "its pod is deleted, and its address may be used again", nil})
}

// words is a reason of the API in words: "IdleTimeout" is "idle timeout".
func words(reason string) string {
	var out strings.Builder
	for i, r := range reason {
		if i > 0 && r >= 'A' && r <= 'Z' && reason[i-1] >= 'a' && reason[i-1] <= 'z' {
			out.WriteByte(' ')
		}
		out.WriteRune(r)
	}
	return strings.ToLower(out.String())
}

func (v *visit) ofSandbox(rest string) string {
	return base + "/sandboxes/" + url.PathEscape(v.PathValue("id")) + rest
}

// confirmEnd asks whether a sandbox shall end.
func confirmEnd(v *visit) (page, error) {
	if err := v.needs(openapi.Member); err != nil {
		return page{}, err
	}
	why, err := v.api.Why(v.ctx, v.PathValue("id"))
	if err != nil {
		return page{}, err
	}
	if !isLive(why.Sandbox.Phase) {
		return v.redirect(v.ofSandbox(""))
	}
	return page{name: "end", Title: "End sandbox", Section: "Sandboxes", Data: why}, nil
}

// endSandbox ends a sandbox.
func endSandbox(v *visit) (page, error) {
	if err := v.api.Kill(v.ctx, v.PathValue("id")); err != nil {
		return page{}, err
	}
	return v.redirect(v.ofSandbox("?done=ended"))
}

// moveEnd moves the end of a sandbox.
func moveEnd(v *visit) (page, error) {
	entered := strings.TrimSpace(v.PostForm.Get("timeout"))
	n, err := strconv.Atoi(entered)
	if err != nil || n < 1 || n > maxTimeout {
		return v.sandbox(entered, "Enter the seconds from now until the end: a whole number from 1 to 31536000.")
	}
	if err := v.api.SetTimeout(v.ctx, v.PathValue("id"), time.Duration(n)*time.Second); err != nil {
		return page{}, err
	}
	return v.redirect(v.ofSandbox("?done=moved"))
}

// openSandbox leads to a port of a sandbox, by a link if it is not public.
func openSandbox(v *visit) (page, error) {
	request := openapi.NewLink{}
	if text := strings.TrimSpace(v.PostForm.Get("port")); text != "" {
		n, err := strconv.Atoi(text)
		if err != nil || n < 1 || n > 65535 {
			return page{}, &failure{status: http.StatusUnprocessableEntity, text: "The port must be a number from 1 to 65535."}
		}
		request.Port = new(int64(n))
	}
	link, err := v.api.Link(v.ctx, v.PathValue("id"), request)
	if err != nil {
		return page{}, err
	}
	if u, err := url.Parse(link.URL); err != nil || u.Scheme != "http" && u.Scheme != "https" {
		return page{}, &failure{http.StatusBadGateway, "The API has answered with an address that is not one of a web page."}
	}
	return v.redirect(link.URL)
}
