package main

import (
	"context"
	"fmt"
	"time"

	"github.com/berth-sandbox/berth/api/openapi"
)

type fenceCommand struct {
	Ls          fenceLsCommand          `cmd:"" help:"List released sandboxes whose pods are kept, and which routers they wait for."`
	Sessions    fenceSessionsCommand    `cmd:"" help:"List routers, and how many released sandboxes wait for each."`
	DeclareDead fenceDeclareDeadCommand `cmd:"" help:"Stop waiting for a router that is gone for good together with its Envoy."`
}

// limitFlags are those of lists of fences and routers.
type limitFlags struct {
	Limit int `default:"100" placeholder:"ROWS" help:"How many to list, 1 to 1000."`
}

// wait is a row of the list of fences: one router that a fence waits for.
type wait struct {
	fence    openapi.Fence
	who, why string
}

var waits = view[wait]{
	name: func(w wait) string { return w.fence.SandboxID },
	columns: []column[wait]{
		{name: "SANDBOX", text: func(w wait) string { return w.fence.SandboxID }},
		{name: "POOL", text: func(w wait) string { return w.fence.Pool }},
		{name: "POD", text: func(w wait) string { return w.fence.PodName }},
		{name: "ADDRESS", text: func(w wait) string { return w.fence.PodIP }},
		{name: "RELEASED", text: func(w wait) string { return w.fence.ReleasedAt.UTC().Format(time.RFC3339) }},
		{name: "REASON", text: func(w wait) string { return w.fence.Reason }},
		{name: "WAITS FOR", text: func(w wait) string { return w.who }},
		{name: "WHY", text: func(w wait) string { return w.why }},
	},
}

type fenceLsCommand struct {
	apiFlags
	formatFlags
	limitFlags
}

// Run implements the command.
func (c *fenceLsCommand) Run(ctx context.Context, o *output) error {
	t, err := c.target()
	if err != nil {
		return err
	}
	all, err := call(ctx, t, func(ctx context.Context) (*openapi.Fences, error) { return t.api.Fences(ctx, c.Limit) })
	if err != nil {
		return err
	}
	var rows []wait
	for _, f := range all.Fences {
		switch {
		case c.Output == "name":
			rows = append(rows, wait{fence: f})
			continue
		case f.ConnectWindowEndsInSeconds != nil:
			rows = append(rows, wait{f, "connect window", fmt.Sprintf(
				"no router can admit a request any more; those admitted may connect for %s",
				spanSeconds(*f.ConnectWindowEndsInSeconds))})
		case len(f.WaitsFor) == 0:
			rows = append(rows, wait{f, "?", string(f.Phase)})
		}
		for _, a := range f.WaitsFor {
			rows = append(rows, wait{f, a.SessionID, why(a)})
		}
		if f.WaitsForOthers > 0 {
			rows = append(rows, wait{f, fmt.Sprintf("%d more", f.WaitsForOthers), ""})
		}
	}
	if err := show(o, c.formatFlags, waits, rows, all); err != nil {
		return err
	}
	return truncated(o, c.formatFlags, all.Truncated)
}

// why says what a router is waited for to do.
func why(a openapi.AwaitedSession) string {
	if a.Until == openapi.AwaitedSessionUntilAcknowledged {
		return fmt.Sprintf("connected, %s; has acknowledged message %d, not yet %d",
			heard(a.LastHeardSeconds), deref(a.Acknowledged), deref(a.Needed))
	}
	return fmt.Sprintf("not connected, %s; may know the route for %s", heard(a.LastHeardSeconds), spanSeconds(a.ExpiresInSeconds))
}

// heard says when a router was heard last.
func heard(seconds *float64) string {
	if seconds == nil {
		return "not heard by this leader"
	}
	return "heard " + spanSeconds(*seconds) + " ago"
}

var sessions = view[openapi.ListedSession]{
	name: func(s openapi.ListedSession) string { return s.SessionID },
	columns: []column[openapi.ListedSession]{
		{name: "SESSION", text: func(s openapi.ListedSession) string { return s.SessionID }},
		{name: "ADDRESS", text: func(s openapi.ListedSession) string { return deref(s.Address) }},
		{name: "KIND", text: func(s openapi.ListedSession) string {
			if s.Egress {
				return "egress"
			}
			return "ingress"
		}},
		{name: "CONNECTED", colour: true, text: func(s openapi.ListedSession) string {
			if s.Connected {
				return "yes"
			}
			return "no"
		}},
		{name: "LAST HEARD", ticks: true, text: func(s openapi.ListedSession) string {
			if s.LastHeardSeconds == nil {
				return "not by this leader"
			}
			return spanSeconds(*s.LastHeardSeconds) + " ago"
		}},
		{name: "ACKNOWLEDGED", ticks: true, text: func(s openapi.ListedSession) string {
			if !s.Connected {
				return ""
			}
			return fmt.Sprintf("%d of %d", deref(s.Acknowledged), deref(s.Sent))
		}},
		{name: "EXPIRES IN", ticks: true, text: func(s openapi.ListedSession) string { return spanSeconds(s.ExpiresInSeconds) }},
		{name: "FENCES", text: func(s openapi.ListedSession) string { return fmt.Sprint(s.Fences) }},
	},
}

type fenceSessionsCommand struct {
	apiFlags
	formatFlags
	watchFlags
	limitFlags
}

// Run implements the command.
func (c *fenceSessionsCommand) Run(ctx context.Context, o *output) error {
	t, err := c.target()
	if err != nil {
		return err
	}
	all := new(openapi.Sessions)
	list := func() ([]openapi.ListedSession, error) {
		all, err = call(ctx, t, func(ctx context.Context) (*openapi.Sessions, error) { return t.api.Sessions(ctx, c.Limit) })
		if err != nil {
			return nil, err
		}
		return all.Sessions, nil
	}
	if c.Watch {
		return watch(ctx, o, c.formatFlags, c.watchFlags, sessions, list, nil)
	}
	items, err := list()
	if err != nil {
		return err
	}
	if err := show(o, c.formatFlags, sessions, items, all); err != nil {
		return err
	}
	return truncated(o, c.formatFlags, all.Truncated)
}

type fenceDeclareDeadCommand struct {
	apiFlags
	Session string `arg:"" complete:"session" help:"The router's session, as \"berth fence ls\" shows it."`
	Reason  string `required:"" help:"How you know that it has ended. It is logged and journaled with the name of the key."`
	Gone    bool   `required:"" help:"Says that you know that router and Envoy have ended and cannot go on, as when their machine is gone."`
}

// Help implements kong.HelpProvider.
func (*fenceDeclareDeadCommand) Help() string {
	return "DANGER: if the router or its Envoy still runs, requests may reach pods of other sandboxes."
}

// Run implements the command.
func (c *fenceDeclareDeadCommand) Run(ctx context.Context, o *output) error {
	if !c.Gone {
		return usage("--gone: router and Envoy must have ended; if they can be reached, stop them, and no fence waits for them")
	}
	t, err := c.target()
	if err != nil {
		return err
	}
	done, err := call(ctx, t, func(ctx context.Context) (*openapi.DeadDeclared, error) {
		return t.api.DeclareDead(ctx, c.Session, c.Reason)
	})
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(o.out, "%s is waited for no more; %d released sandboxes waited for it.\n"+
		"WARNING: if this router or its Envoy goes on after all, requests may reach pods of other sandboxes. "+
		"Make sure that its machine does not come back with it.\n", done.SessionID, done.Fences)
	return err
}
