package rest

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/api/activity"
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

// Bounds of the number of sandboxes in one answer.
const (
	defaultActivities = 1000
)

// Filter selects sandboxes: those that match all its non-empty fields.
type Filter struct {
	// ID is the sandbox's ID, Prefix the beginning of it.
	ID, Prefix string
	// Pool is the name of the sandbox's pool.
	Pool string
}

// Matches reports whether the filter selects s.
func (w Filter) Matches(s *core.Sandbox) bool {
	return (w.ID == "" || s.ID == w.ID) && strings.HasPrefix(s.ID, w.Prefix) && (w.Pool == "" || s.Pool.Name == w.Pool)
}

// LastActive is the answer of GET /v1/last-active.
type LastActive struct {
	// Now is the leader's wall clock.
	Now time.Time `json:"now"`
	// DryRun means that idle sandboxes are not released.
	DryRun bool `json:"dryRun"`
	// Sandboxes are the live sandboxes, oldest first.
	Sandboxes []Activity `json:"sandboxes"`
	// Truncated is the number of omitted sandboxes.
	Truncated int `json:"truncated"`
}

// Activity is the latest use of a sandbox, as reported by all routers together.
type Activity struct {
	SandboxID string `json:"sandboxID"`
	Pool      string `json:"pool"`
	// LastActive is the time of the latest known activity, AgeSeconds before Now.
	LastActive time.Time `json:"lastActive"`
	AgeSeconds float64   `json:"ageSeconds"`
	// Kind is the kind of that activity. Why says what is unknown if the kind is
	// Unknown, and otherwise why the first of Awaits blocks the release.
	Kind activity.Kind `json:"kind"`
	Why  string        `json:"why,omitempty"`
	// Router is the session that reported it, absent for none. Open is the number of open requests
	// in that report.
	Router string `json:"router,omitempty"`
	Open   int    `json:"open"`
	// IdleTimeout is in seconds, absent for none. Activity is Requests or Bytes: what counts as
	// activity, by the pool or the claim. MinBytesPerMinute is how many bytes must move over an
	// open connection to count.
	IdleTimeout       float64           `json:"idleTimeout,omitempty"`
	Activity          v1alpha1.Activity `json:"activity,omitempty"`
	MinBytesPerMinute uint64            `json:"minBytesPerMinute,omitempty"`
	// EndAt is the end that a call can move. LifetimeEnd is fixed.
	EndAt       *time.Time `json:"endAt,omitempty"`
	LifetimeEnd *time.Time `json:"lifetimeEnd,omitempty"`
	// Next is the next reason for a release without further use, absent for none.
	Next *Next `json:"next,omitempty"`
	// Asks are the sessions, at most 20, that must answer before the sandbox is released for being
	// idle.
	Asks []string `json:"asks"`
	// Awaits are the sessions that block such a release and cannot be asked now. Such a session is
	// not connected, has not reported yet, cannot tell what is open, did not answer, or has ended
	// and may have left connections open.
	Awaits []string `json:"awaits"`
}

// Next is when and why a sandbox is released.
type Next struct {
	// Reason is Idle, Timeout, MaxLifetime or StartupTimeout.
	Reason string    `json:"reason"`
	At     time.Time `json:"at"`
	// InSeconds is 0 when it is due.
	InSeconds float64 `json:"inSeconds"`
}

func toActivity(a core.ActivityStatus, now time.Time) Activity {
	s := a.Sandbox
	shown := Activity{
		SandboxID: s.ID, Pool: s.Pool.Name, LastActive: now.Add(-a.Age), AgeSeconds: seconds(a.Age),
		Kind: a.Kind, Why: a.Why, Router: a.Router, Open: a.Open, IdleTimeout: seconds(s.IdleTimeout),
		EndAt: optional(s.EndAt), LifetimeEnd: optional(s.LifetimeEnd), Asks: append([]string{}, a.Asks...), Awaits: append([]string{}, a.Awaits...),
	}
	if s.IdleTimeout > 0 {
		shown.Activity, shown.MinBytesPerMinute = v1alpha1.ActivityRequests, s.MinBytes
		if s.MinBytes > 0 {
			shown.Activity = v1alpha1.ActivityBytes
		}
	}
	if a.Next != "" {
		shown.Next = &Next{Reason: a.Next, At: now.Add(a.In), InSeconds: seconds(a.In)}
	}
	return shown
}

// SandboxActivity is the answer of GET /v1/sandboxes/{id}.
type SandboxActivity struct {
	// Now and DryRun are as in LastActive.
	Now    time.Time `json:"now"`
	DryRun bool      `json:"dryRun"`
	Activity
}

// explain answers why a sandbox is alive.
func (a *api) explain(w *reply, r *http.Request) error {
	id := r.PathValue("sandboxID")
	list, _, err := a.Allocator.Activities(r.Context(), Filter{ID: id}, 1)
	if err != nil {
		return err
	}
	if len(list) == 0 {
		s, known, err := a.Allocator.Sandbox(r.Context(), id)
		if err != nil {
			return err
		}
		return notFound(id, s, known)
	}
	now := time.Now().UTC()
	return writeJSON(w, http.StatusOK, SandboxActivity{Now: now, DryRun: a.ReapDryRun, Activity: toActivity(list[0], now)})
}

func (a *api) lastActive(w *reply, r *http.Request) error {
	query := r.URL.Query()
	for _, name := range []string{"id", "prefix", "pool", "format"} {
		if values := query[name]; len(values) > 1 || len(values) == 1 && values[0] == "" {
			return invalid("%s: must be given once and not be empty, or be left out", name)
		}
	}
	format := query.Get("format")
	if format != "" && format != "json" && format != "text" {
		return invalid("format: %q: must be json or text", format)
	}
	filter := Filter{ID: query.Get("id"), Prefix: query.Get("prefix"), Pool: query.Get("pool")}
	all := LastActive{Now: time.Now().UTC(), DryRun: a.ReapDryRun}
	var err error
	all.Sandboxes, all.Truncated, err = entries(w, r, defaultActivities,
		func(ctx context.Context, limit int) ([]core.ActivityStatus, int, error) {
			return a.Allocator.Activities(ctx, filter, limit)
		}, func(s core.ActivityStatus) Activity { return toActivity(s, all.Now) })
	if err != nil {
		return err
	}
	if format == "text" {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		all.write(w)
		return nil
	}
	return writeJSON(w, http.StatusOK, all)
}

// write writes one line for each sandbox. It ignores errors: the client may have gone.
func (l LastActive) write(w io.Writer) {
	if l.DryRun {
		fmt.Fprintln(w, "dry run: nothing is released for being idle")
	}
	for _, s := range l.Sandboxes {
		fmt.Fprintf(w, "%s  %s  %s  %.3fs ago  %s  %d open  %s\n", s.SandboxID, s.Pool, s.LastActive.Format(time.RFC3339Nano), s.AgeSeconds, s.LastText(), s.Open, s.NextText(l.DryRun))
	}
	if l.Truncated > 0 {
		fmt.Fprintf(w, "%d more\n", l.Truncated)
	}
}

// LastText describes the latest activity.
func (a Activity) LastText() string {
	text := string(a.Kind)
	if a.Router != "" {
		text += " at " + a.Router
	}
	if a.Why != "" && a.Kind == activity.Unknown {
		text += " (" + a.Why + ")"
	}
	return text
}

// NextText describes what happens next.
func (a Activity) NextText(dryRun bool) string {
	if a.Next == nil {
		return "stays"
	}
	in := time.Duration(a.Next.InSeconds * float64(time.Second)).Round(time.Second)
	text := fmt.Sprintf("%s in %v", a.Next.Reason, in)
	if a.Next.InSeconds == 0 {
		text = a.Next.Reason + " is due"
	}
	if a.Next.Reason != core.ReasonIdle {
		return text
	}
	if dryRun {
		text += " (dry run)"
	}
	if len(a.Awaits) > 0 {
		text += ", waits for " + strings.Join(a.Awaits, ", ")
		if a.Why != "" && a.Kind != activity.Unknown {
			text += " (" + a.Why + ")"
		}
	}
	return text
}
