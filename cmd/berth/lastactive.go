package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/berth-sandbox/berth/api/activity"
	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/cmd/internal/cli"
)

// activities is the view of the activity of sandboxes.
func activities(dryRun bool) view[openapi.Activity] {
	return view[openapi.Activity]{
		name: func(a openapi.Activity) string { return a.SandboxID },
		columns: []column[openapi.Activity]{
			{name: "SANDBOX", text: func(a openapi.Activity) string { return a.SandboxID }},
			{name: "POOL", text: func(a openapi.Activity) string { return a.Pool }},
			{name: "LAST ACTIVE", ticks: true, text: func(a openapi.Activity) string { return spanSeconds(a.AgeSeconds) + " ago" }},
			{name: "BY", text: func(a openapi.Activity) string { return a.Kind }},
			{name: "OPEN", text: func(a openapi.Activity) string { return fmt.Sprint(a.Open) }},
			{name: "IDLE TIMEOUT", text: idleTimeout},
			{name: "NEXT", ticks: true, text: func(a openapi.Activity) string { return next(a, dryRun) }},
			{name: "ROUTER", wide: true, text: func(a openapi.Activity) string { return deref(a.Router) }},
			{name: "WHY", wide: true, text: func(a openapi.Activity) string { return deref(a.Why) }},
		},
	}
}

func idleTimeout(a openapi.Activity) string {
	if a.IdleTimeout == 0 {
		return ""
	}
	text := spanSeconds(a.IdleTimeout)
	if n := deref(a.MinBytesPerMinute); n > 0 {
		text += fmt.Sprintf(" at %d B/min", n)
	}
	return text
}

// next says what ends a sandbox without further use.
func next(a openapi.Activity, dryRun bool) string {
	if a.Next == nil {
		return "stays"
	}
	text := fmt.Sprintf("%s in %s", a.Next.Reason, spanSeconds(a.Next.InSeconds))
	if a.Next.InSeconds == 0 {
		text = string(a.Next.Reason) + " is due"
	}
	if a.Next.Reason != openapi.IdleTimeout {
		return text
	}
	if dryRun {
		text += " (dry run)"
	}
	if len(a.Awaits) > 0 {
		text += ", waits for " + strings.Join(a.Awaits, ", ")
	}
	if why := deref(a.Why); why != "" && (len(a.Awaits) > 0 || a.Kind == string(activity.Unknown)) {
		text += " (" + why + ")"
	}
	return text
}

func deref[T any](p *T) (v T) {
	if p != nil {
		v = *p
	}
	return v
}

type lastActiveCommand struct {
	apiFlags
	formatFlags
	watchFlags
	ID     string `name:"id" complete:"sandbox" help:"Only the sandbox of this ID."`
	Prefix string `help:"Only sandboxes whose ID begins so."`
	Pool   string `complete:"pool" help:"Only sandboxes of this pool."`
	Limit  int    `default:"1000" placeholder:"ROWS" help:"How many to list, 1 to 10000."`
}

// Run implements the command.
func (c *lastActiveCommand) Run(ctx context.Context, o *output) error {
	t, err := c.target()
	if err != nil {
		return err
	}
	filter := openapi.LastActiveParams{Limit: &c.Limit, ID: nonEmpty(c.ID), Prefix: nonEmpty(c.Prefix), Pool: nonEmpty(c.Pool)}
	all := new(openapi.LastActive)
	list := func() ([]openapi.Activity, error) {
		all, err = call(ctx, t, func(ctx context.Context) (*openapi.LastActive, error) {
			return t.api.LastActive(ctx, filter)
		})
		if err != nil {
			return nil, err
		}
		return all.Sandboxes, nil
	}
	if c.Watch {
		return watch(ctx, o, c.formatFlags, c.watchFlags, activities(false), list, nil)
	}
	items, err := list()
	if err != nil {
		return err
	}
	if len(items) == 0 && c.ID != "" {
		// Says whether the sandbox is unknown or has ended.
		known, err := explain(ctx, t, c.ID)
		if err == nil && known.Activity == nil {
			err = cli.WithExitCode(exitNotFound, fmt.Errorf("%s", ended(&known.Sandbox)))
		}
		if err != nil {
			return err
		}
	}
	if all.DryRun {
		fmt.Fprintln(o.err, "dry run: nothing is released for being idle")
	}
	if err := show(o, c.formatFlags, activities(all.DryRun), items, all); err != nil {
		return err
	}
	return truncated(o, c.formatFlags, all.Truncated)
}

func nonEmpty(text string) *string {
	if text == "" {
		return nil
	}
	return &text
}

// explain returns what is known of a sandbox.
func explain(ctx context.Context, t *target, id string) (*openapi.SandboxExplanation, error) {
	return call(ctx, t, func(ctx context.Context) (*openapi.SandboxExplanation, error) { return t.api.Why(ctx, id) })
}

// ended says when and why a sandbox was released.
func ended(s *openapi.SandboxRecord) string {
	if s.ReleasedAt == nil {
		return "it has been released"
	}
	return fmt.Sprintf("released at %s: %s", s.ReleasedAt.UTC().Format(time.RFC3339), s.Reason)
}

var explanations = view[openapi.SandboxExplanation]{
	name: func(e openapi.SandboxExplanation) string { return e.Sandbox.SandboxID },
	columns: []column[openapi.SandboxExplanation]{
		{name: "SANDBOX", text: func(e openapi.SandboxExplanation) string { return e.Sandbox.SandboxID }},
		{name: "POOL", text: func(e openapi.SandboxExplanation) string { return e.Sandbox.Pool }},
		{name: "PHASE", colour: true, text: func(e openapi.SandboxExplanation) string { return string(e.Sandbox.Phase) }},
		{name: "LAST ACTIVE", text: func(e openapi.SandboxExplanation) string {
			if e.Activity == nil {
				return ""
			}
			return spanSeconds(e.Activity.AgeSeconds) + " ago"
		}},
		{name: "BY", text: func(e openapi.SandboxExplanation) string {
			if e.Activity == nil {
				return ""
			}
			return e.Activity.Kind
		}},
		{name: "OPEN", text: func(e openapi.SandboxExplanation) string {
			if e.Activity == nil {
				return ""
			}
			return fmt.Sprint(e.Activity.Open)
		}},
		{name: "NEXT", text: func(e openapi.SandboxExplanation) string {
			if e.Activity == nil {
				return ended(&e.Sandbox)
			}
			return next(*e.Activity, e.DryRun)
		}},
	},
}

type whyCommand struct {
	apiFlags
	formatFlags
	idsArg
}

// Run implements the command.
func (c *whyCommand) Run(ctx context.Context, o *output) error {
	t, err := c.target()
	if err != nil {
		return err
	}
	all, err := each(c.IDs, func(id string) (openapi.SandboxExplanation, error) {
		e, err := explain(ctx, t, id)
		if err != nil {
			return openapi.SandboxExplanation{}, err
		}
		return *e, nil
	})
	return shown(err, len(all), func() error { return show(o, c.formatFlags, explanations, all, single(c.IDs, all)) })
}
