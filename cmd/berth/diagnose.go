package main

import (
	"cmp"
	"context"
	"fmt"
	"strings"

	"github.com/berth-sandbox/berth/api/openapi"
)

type diagnoseCommand struct {
	apiFlags
	Output string `short:"o" default:"text" enum:"text,json,yaml" help:"text, json or yaml."`
	ID     string `arg:"" name:"sandbox" complete:"sandbox" help:"ID of a sandbox."`
}

// diagnosis is all that the API knows about a sandbox.
type diagnosis struct {
	Explanation *openapi.SandboxExplanation `json:"explanation"`
	Route       *openapi.RouteExplanation   `json:"route"`
}

// Run implements the command.
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
	if c.Output != "text" {
		return encode(o.out, c.Output, d)
	}
	return d.print(o)
}

// lastText is the latest activity and the router that has reported it.
func lastText(a *openapi.Activity) string {
	if router := deref(a.Router); router != "" {
		return a.Kind + " at " + router
	}
	return a.Kind
}

func (d *diagnosis) print(o *output) error {
	s, r := &d.Explanation.Sandbox, d.Route
	var text strings.Builder
	line := func(name, format string, args ...any) {
		fmt.Fprintf(&text, "%-15s%s\n", name+":", clean(fmt.Sprintf(format, args...)))
	}
	line("Sandbox", "%s, pool %s, %s", s.SandboxID, s.Pool, s.Phase)
	if s.ReleasedAt != nil {
		line("Released", "%s", strings.TrimPrefix(ended(s), "released at "))
	} else if a := d.Explanation.Activity; a != nil {
		line("Last active", "%s ago, by %s, %d open", spanSeconds(a.AgeSeconds), lastText(a), a.Open)
		line("Next", "%s", next(*a, d.Explanation.DryRun))
	}
	line("Pod", "%s at %s", r.PodName, r.PodIP)
	if r.PodNotReady != "" {
		line("Pod not ready", "%s", r.PodNotReady)
	}
	ports := "all"
	if len(r.Ports) > 0 {
		ports = strings.Trim(fmt.Sprint(r.Ports), "[]")
	}
	line("Ports", "%s; default %d", ports, r.DefaultPort)
	line("URL", "%s", s.URL)
	routable := "no"
	if r.Routable {
		routable = "yes"
	}
	line("Routable", "%s: %s", routable, r.Why)
	if f := r.Fence; f != nil {
		waits := make([]string, 0, len(f.WaitsFor))
		for _, a := range f.WaitsFor {
			waits = append(waits, a.SessionID+" ("+why(a)+")")
		}
		line("Fence", "%s; waits for %s", f.Phase, cmp.Or(strings.Join(waits, ", "), "no router"))
	}
	for _, router := range r.Routers {
		line("Router", "%s %s: %s", router.SessionID, router.Address, router.State)
	}
	if r.RoutersOthers > 0 {
		line("Router", "%d more", r.RoutersOthers)
	}
	_, err := fmt.Fprint(o.out, text.String())
	return err
}
