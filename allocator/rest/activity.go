package rest

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/api/activity"
	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/internal/printable"
)

// Bounds of the number of sandboxes in one answer.
const (
	defaultActivities = 1000
)

// Filter selects sandboxes: those that match all its non-empty fields.
type Filter struct {
	// ID is the sandbox's ID, Prefix the beginning of it.
	ID, Prefix string
	// IDs are those of the sandboxes, in no order. Empty: all.
	IDs []string
	// Pool is the name of the sandbox's pool.
	Pool string
}

// Matches reports whether the filter selects s.
func (w Filter) Matches(s *core.Sandbox) bool {
	return (w.ID == "" || s.ID == w.ID) && (len(w.IDs) == 0 || slices.Contains(w.IDs, s.ID)) && strings.HasPrefix(s.ID, w.Prefix) && (w.Pool == "" || s.Pool.Name == w.Pool)
}

func toActivity(a core.ActivityStatus, now time.Time) openapi.Activity {
	s := a.Sandbox
	shown := openapi.Activity{
		SandboxID: s.ID, Pool: s.Pool.Name, LastActive: now.Add(-a.Age), AgeSeconds: seconds(a.Age),
		Kind: string(a.Kind), Why: nonzero(a.Why), Router: nonzero(a.Router), Open: a.Open, IdleTimeout: seconds(s.IdleTimeout),
		EndAt: optional(s.EndAt), LifetimeEnd: optional(s.LifetimeEnd), Asks: append([]string{}, a.Asks...), Awaits: append([]string{}, a.Awaits...),
	}
	if s.IdleTimeout > 0 {
		mode := openapi.Requests
		if s.MinBytes > 0 {
			mode = openapi.Bytes
		}
		shown.Activity, shown.MinBytesPerMinute = &mode, nonzero(int64(s.MinBytes))
	}
	if a.Next != "" {
		shown.Next = &openapi.NextRelease{Reason: openapi.NextReleaseReason(a.Next), At: now.Add(a.In), InSeconds: seconds(a.In)}
	}
	return shown
}

func (a *api) lastActive(w *reply, r *http.Request) error {
	query := r.URL.Query()
	for _, name := range []string{"id", "ids", "prefix", "pool", "format"} {
		if values := query[name]; len(values) > 1 || len(values) == 1 && values[0] == "" {
			return invalid("%s: must be given once and not be empty, or be left out", name)
		}
	}
	format := query.Get("format")
	if format != "" && format != "json" && format != "text" {
		return invalid("format: %q: must be json or text", format)
	}
	filter := Filter{ID: query.Get("id"), Prefix: query.Get("prefix"), Pool: query.Get("pool")}
	if ids := query.Get("ids"); ids != "" {
		filter.IDs = strings.Split(ids, ",")
	}
	all := openapi.LastActive{Now: time.Now().UTC(), DryRun: a.ReapDryRun}
	var err error
	all.Sandboxes, all.Truncated, err = entries(w, r, defaultActivities,
		func(ctx context.Context, limit int) ([]core.ActivityStatus, int, error) {
			return a.Allocator.Activities(ctx, filter, limit)
		}, func(s core.ActivityStatus) openapi.Activity { return toActivity(s, all.Now) })
	if err != nil {
		return err
	}
	if format == "text" {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		writeActivities(printable.Writer(w), all)
		return nil
	}
	return writeJSON(w, http.StatusOK, all)
}

// writeActivities writes one line for each sandbox. It ignores errors: the client may have gone.
func writeActivities(w io.Writer, l openapi.LastActive) {
	if l.DryRun {
		fmt.Fprintln(w, "dry run: nothing is released for being idle")
	}
	for _, s := range l.Sandboxes {
		fmt.Fprintf(w, "%s  %s  %s  %.0fs ago  %s  %d open  %s\n",
			s.SandboxID, s.Pool, s.LastActive.Format(time.RFC3339), s.AgeSeconds, lastText(s), s.Open, nextText(s, l.DryRun))
	}
	if l.Truncated > 0 {
		fmt.Fprintf(w, "%d more\n", l.Truncated)
	}
}

// lastText describes the latest activity.
func lastText(a openapi.Activity) string {
	text := a.Kind
	if a.Router != nil {
		text += " at " + *a.Router
	}
	if a.Why != nil && a.Kind == string(activity.Unknown) {
		text += " (" + *a.Why + ")"
	}
	return text
}

// nextText describes what happens next.
func nextText(a openapi.Activity, dryRun bool) string {
	if a.Next == nil {
		return "stays"
	}
	in := time.Duration(a.Next.InSeconds * float64(time.Second)).Round(time.Second)
	text := fmt.Sprintf("%s in %v", a.Next.Reason, in)
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
		if a.Why != nil && a.Kind != string(activity.Unknown) {
			text += " (" + *a.Why + ")"
		}
	}
	return text
}
