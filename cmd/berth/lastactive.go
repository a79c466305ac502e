package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/berth-sandbox/berth/api/activity"
	"github.com/berth-sandbox/berth/api/openapi"
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
	if a.Next.Reason != openapi.Idle {
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
		return watch(ctx, o, c.formatFlags, c.watchFlags, activities(false), list)
	}
	items, err := list()
	if err != nil {
		return err
	}
	if len(items) == 0 && c.ID != "" {
		// Says whether the sandbox is unknown or has ended.
		if _, err := explain(ctx, t, c.ID); err != nil {
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
	var dryRun bool
	all, err := each(c.IDs, func(id string) (openapi.SandboxExplanation, error) {
		e, err := explain(ctx, t, id)
		dryRun = dryRun || e.DryRun
		return e, err
	})
	if len(all) == 0 {
		return err
	}
	rows := make([]openapi.Activity, len(all))
	for i, a := range all {
		rows[i] = *a.Activity
	}
	failed := show(o, c.formatFlags, activities(dryRun), rows, single(c.IDs, all))
	if err == nil {
		err = failed
	}
	return err
}

// explain asks why a live sandbox is alive. For another one it returns an error.
func explain(ctx context.Context, t *target, id string) (openapi.SandboxExplanation, error) {
	e, err := call(ctx, t, func(ctx context.Context) (*openapi.SandboxExplanation, error) { return t.api.Why(ctx, id) })
	if err != nil {
		return openapi.SandboxExplanation{}, err
	}
	if s := e.Sandbox; e.Activity == nil && s.ReleasedAt != nil {
		return *e, fmt.Errorf("sandbox %s was released at %s: %s", id, s.ReleasedAt.UTC().Format(time.RFC3339), s.Reason)
	} else if e.Activity == nil {
		return *e, fmt.Errorf("sandbox %s is being released", id)
	}
	return *e, nil
}
