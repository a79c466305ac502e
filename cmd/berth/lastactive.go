package main

import (
	"context"
	"fmt"
	"net/url"

	"github.com/berth-sandbox/berth/allocator/rest"
)

type lastActiveCommand struct {
	apiFlags
	ID     string `name:"id" help:"Only the sandbox of this ID."`
	Prefix string `help:"Only sandboxes whose ID begins so."`
	Pool   string `help:"Only sandboxes of this pool."`
	Output string `short:"o" default:"table" enum:"table,json" help:"table or json."`
	Limit  int    `default:"1000" placeholder:"ROWS" help:"How many to list, 1 to 10000."`
}

// Run implements the command.
func (c *lastActiveCommand) Run(ctx context.Context, o *output) error {
	query := url.Values{"limit": {fmt.Sprint(c.Limit)}}
	for name, value := range map[string]string{"id": c.ID, "prefix": c.Prefix, "pool": c.Pool} {
		if value != "" {
			query.Set(name, value)
		}
	}
	var all rest.LastActive
	if printed, err := c.fetch(ctx, o, "/v1/last-active", query, c.Output, &all); printed || err != nil {
		return err
	}
	if all.DryRun {
		if _, err := fmt.Fprintln(o.out, "dry run: nothing is released for being idle"); err != nil {
			return err
		}
	}
	t := newTable(o.out, "SANDBOX", "POOL", "IDLE FOR", "TIMEOUT", "OPEN", "LAST ACTIVITY", "NEXT")
	for _, s := range all.Sandboxes {
		timeout := "-"
		if s.IdleTimeout > 0 {
			timeout = span(s.IdleTimeout)
			if s.MinBytesPerMinute > 0 {
				timeout += fmt.Sprintf(" at %d B/min", s.MinBytesPerMinute)
			}
		}
		t.row(s.SandboxID, s.Pool, span(s.AgeSeconds), timeout, fmt.Sprint(s.Open), s.LastText(), s.NextText(all.DryRun))
	}
	return t.end(all.Truncated)
}
