package main

import (
	"context"
	"fmt"
	"time"

	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/client"
)

var events = view[client.Event]{
	name: func(e client.Event) string { return e.Sandbox.SandboxID },
	columns: []column[client.Event]{
		{name: "TIME", text: func(e client.Event) string { return e.Sandbox.At.UTC().Format(time.RFC3339) }},
		{name: "EVENT", text: func(e client.Event) string { return fmt.Sprintf("%-8s", e.Sandbox.Type) }},
		{name: "SANDBOX", text: func(e client.Event) string { return e.Sandbox.SandboxID }},
		{name: "POOL", text: func(e client.Event) string { return e.Sandbox.Pool }},
		{name: "REASON", text: func(e client.Event) string { return e.Sandbox.Reason }},
		{name: "ID", wide: true, text: func(e client.Event) string { return e.ID }},
		{name: "TEAM", wide: true, text: func(e client.Event) string { return e.Sandbox.Team }},
		{name: "USER", wide: true, text: func(e client.Event) string { return e.Sandbox.User }},
	},
}

type eventsCommand struct {
	apiFlags
	formatFlags
	Pool  string `complete:"pool" help:"Only events of this pool."`
	Team  string `help:"Only events of this team."`
	Since string `help:"Begin after the event of this ID, as -o wide shows it, if the API still has it. 0.0: with all that the API has."`
}

// Help implements kong.HelpProvider.
func (*eventsCommand) Help() string {
	return "Prints events as they happen, until interrupted: created, ready, asleep, awake and released. It goes on after a change of the " +
		"leader, and says where events may be lost."
}

// Run implements the command.
func (c *eventsCommand) Run(ctx context.Context, o *output) error {
	t, err := c.target()
	if err != nil {
		return err
	}
	headers, width := !c.NoHeaders, make([]int, len(events.columns))
	filter := openapi.StreamEventsParams{Pool: nonEmpty(c.Pool), Team: nonEmpty(c.Team), LastEventID: nonEmpty(c.Since)}
	for e, err := range t.api.Events(ctx, filter) {
		switch {
		case err != nil:
			return t.explain(ctx, err)
		case e.Gap != nil:
			_, err = fmt.Fprintf(o.err, "%s (%s)\n", e.Gap.Message, e.Gap.Reason)
		default:
			err = showChanged(o, c.formatFlags, events, []client.Event{e}, headers, width)
			headers = false
		}
		if err != nil {
			return err
		}
	}
	return nil
}
