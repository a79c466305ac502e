package main

import (
	"cmp"
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/cmd/internal/cli"
	"github.com/berth-sandbox/berth/cmd/internal/support"
	"github.com/berth-sandbox/berth/internal/printable"
)

// Bounds of berth logs. maxLogLines is the API's.
const (
	maxLogLines  = 1000
	logsInterval = time.Second
)

type logsCommand struct {
	apiFlags
	ID         string        `arg:"" optional:"" name:"sandbox" complete:"sandbox" help:"ID of a sandbox."`
	Follow     bool          `short:"f" help:"Go on with new lines, until interrupted or until the sandbox ends."`
	Tail       int           `default:"1000" placeholder:"LINES" help:"Begin with so many of the latest lines, at most 1000."`
	Since      time.Duration `help:"Begin with the lines of this time instead, such as 10m."`
	Timestamps bool          `help:"Print the time of each line."`

	Of               string `placeholder:"ID" help:"Print the lines of allocators, routers and Envoys that have this ID of a sandbox or of a request, of the last hour or --since, instead."`
	Kubeconfig       string `help:"With --of: kubeconfig file. Left out: KUBECONFIG, the current context's, kubectl's own, or a development cluster's."`
	ReleaseNamespace string `help:"With --of: namespace of Berth's pods. Left out: all namespaces are searched."`
}

// Help implements kong.HelpProvider.
func (*logsCommand) Help() string {
	return "Prints the log of the first container of a live sandbox. With --of it needs no key but a kubeconfig, and prints what Berth's " +
		"own pods have logged about a sandbox, also of one that has ended, or about a request (X-Request-Id)."
}

// Run implements the command.
func (c *logsCommand) Run(ctx context.Context, o *output) error {
	switch {
	case c.Tail < 1 || c.Tail > maxLogLines:
		return usage("--tail %d: must be 1 to %d; --since reads more", c.Tail, maxLogLines)
	case c.Since < 0:
		return usage("--since %v: must not be negative", c.Since)
	case (c.ID == "") == (c.Of == ""):
		return usage("name a sandbox or give --of, and not both")
	case c.Of != "":
		return c.ofBerth(ctx, o)
	}
	t, err := c.target()
	if err != nil {
		return err
	}
	r := logReader{target: t, id: c.ID, filter: openapi.GetSandboxLogsV2Params{Limit: &c.Tail}}
	if c.Since > 0 {
		r.filter = openapi.GetSandboxLogsV2Params{Limit: new(maxLogLines), Cursor: new(o.now().Add(-c.Since).UnixMilli())}
	}
	for first := true; ; first = false {
		lines, err := r.read(ctx, o)
		switch {
		case err != nil && !first && cli.ExitCode(err) == exitNotFound:
			_, err = fmt.Fprintf(o.err, "%s has ended\n", c.ID)
			return err
		case err != nil && ctx.Err() != nil:
			return nil
		case err != nil:
			return err
		}
		for _, l := range lines {
			text, out := l.Message, o.raw.out
			if terminal(out) {
				text = cleanLog(text)
			}
			if c.Timestamps {
				text = l.Timestamp.Format(time.RFC3339Nano) + " " + text
			}
			if _, err := fmt.Fprintln(out, text); err != nil {
				return err
			}
		}
		switch {
		case len(lines) > 0 && (c.Follow || c.Since > 0):
			continue // there may be more by now
		case !c.Follow:
			return nil
		}
		timer := time.NewTimer(logsInterval)
		select {
		case <-ctx.Done():
			timer.Stop()
			return nil
		case <-timer.C:
		}
	}
}

// ofBerth prints what Berth's pods have logged about an ID.
func (c *logsCommand) ofBerth(ctx context.Context, o *output) error {
	if len(c.Of) < shortestID {
		return usage("--of %q: an ID has %d characters or more", c.Of, shortestID)
	}
	config, err := (&journalFlags{Kubeconfig: c.Kubeconfig}).config()
	if err != nil {
		return err
	}
	lines, failed, err := support.Lines(ctx, support.Logs{
		Config: config, Release: c.ReleaseNamespace, Since: cmp.Or(c.Since, time.Hour), Of: c.Of})
	if err != nil {
		return err
	}
	for _, l := range lines {
		if _, err := fmt.Fprintln(o.raw.out, l.Time.Format(time.RFC3339Nano), l.Pod, l.Container, cleanLog(l.Text)); err != nil {
			return err
		}
	}
	for _, f := range failed {
		if _, err := fmt.Fprintf(o.err, "missing: %s: %s\n", f.Name, f.Error); err != nil {
			return err
		}
	}
	return nil
}

// shortestID is the least length of an ID that is searched for.
const shortestID = 8

// cleanLog escapes a line that may have tabs.
func cleanLog(text string) string {
	parts := strings.Split(text, "\t")
	for i := range parts {
		parts[i] = printable.Line(parts[i])
	}
	return strings.Join(parts, "\t")
}

// logReader reads a log in pieces.
type logReader struct {
	*target
	id     string
	filter openapi.GetSandboxLogsV2Params
	// last is the time of the latest line that was read, and count how many lines of that time were read.
	last  time.Time
	count int
}

// read returns the lines behind those that were read. The API takes milliseconds, so lines of the last
// millisecond come again, and are left out.
func (r *logReader) read(ctx context.Context, o *output) ([]openapi.SandboxLogEntry, error) {
	all, err := call(ctx, r.target, func(ctx context.Context) ([]openapi.SandboxLogEntry, error) {
		return r.api.Logs(ctx, r.id, r.filter)
	})
	if err != nil {
		return nil, err
	}
	known, fresh := r.count, []openapi.SandboxLogEntry{}
	for _, l := range all {
		switch {
		case l.Timestamp.Before(r.last):
			continue
		case l.Timestamp.Equal(r.last) && known > 0:
			known--
			continue
		case l.Timestamp.After(r.last):
			r.last, r.count = l.Timestamp, 0
		}
		r.count++
		fresh = append(fresh, l)
	}
	switch {
	case len(fresh) > 0:
		r.filter = openapi.GetSandboxLogsV2Params{Limit: new(maxLogLines), Cursor: new(r.last.UnixMilli())}
	case len(all) == maxLogLines:
		*r.filter.Cursor++
		if _, err := fmt.Fprintf(o.err, "lines of %s may be missing: there are more than %d in a millisecond\n",
			r.last.Format(time.RFC3339Nano), maxLogLines); err != nil {
			return nil, err
		}
		return r.read(ctx, o)
	}
	return fresh, nil
}
