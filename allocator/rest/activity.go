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

// Bounds of what one call lists of the activity of sandboxes.
const (
	defaultActivities = 1000
	maxActivities     = 10_000
)

// Which says which sandboxes are meant: those of which all that is set is true.
type Which struct {
	// ID and Prefix are the sandbox's ID, and how it begins.
	ID, Prefix string
	// Pool is the name of its pool.
	Pool string
}

// Takes reports whether s is meant.
func (w Which) Takes(s *core.Sandbox) bool {
	return (w.ID == "" || s.ID == w.ID) && strings.HasPrefix(s.ID, w.Prefix) && (w.Pool == "" || s.Pool.Name == w.Pool)
}

// LastActive is the answer of GET /v1/admin/last-active.
type LastActive struct {
	// Now is the leader's clock.
	Now time.Time `json:"now"`
	// DryRun: sandboxes that are idle are not released.
	DryRun bool `json:"dryRun"`
	// Sandboxes are the live ones, the oldest first.
	Sandboxes []Activity `json:"sandboxes"`
	// Truncated is how many more there are.
	Truncated int `json:"truncated"`
}

// Activity is what is known of the use of a sandbox, by all routers together.
type Activity struct {
	SandboxID string `json:"sandboxID"`
	Pool      string `json:"pool"`
	// LastActive is AgeSeconds ago: the latest activity that is known of.
	LastActive time.Time `json:"lastActive"`
	AgeSeconds float64   `json:"ageSeconds"`
	// Kind is what it was. Why says, for Unknown, what is not known.
	Kind activity.Kind `json:"kind"`
	Why  string        `json:"why,omitempty"`
	// Router is the session that has reported it, absent if none has, and Open how many
	// requests it said are open.
	Router string `json:"router,omitempty"`
	Open   int    `json:"open"`
	// IdleTimeout is in seconds, absent if there is none. Activity is Requests or Bytes:
	// what keeps it, as the pool or the claim said, and MinBytesPerMinute how many bytes
	// must move over an open connection.
	IdleTimeout       float64           `json:"idleTimeout,omitempty"`
	Activity          v1alpha1.Activity `json:"activity,omitempty"`
	MinBytesPerMinute uint64            `json:"minBytesPerMinute,omitempty"`
	// EndAt is the end that a call can move, LifetimeEnd the one that stands.
	EndAt       *time.Time `json:"endAt,omitempty"`
	LifetimeEnd *time.Time `json:"lifetimeEnd,omitempty"`
	// Next is what ends it if it is not used meanwhile, absent if nothing does.
	Next *Next `json:"next,omitempty"`
	// Asks are the routers, by session, at most 20, that have to answer before it is
	// released for being idle.
	Asks []string `json:"asks"`
	// Awaits are routers, by session, without whose word it is not released for being
	// idle, and that cannot be asked now: they are not connected, have not reported yet,
	// cannot tell what is open, did not answer, or have ended and may have left something open.
	Awaits []string `json:"awaits"`
}

// Next is when a sandbox is released, and why.
type Next struct {
	// Reason is Idle, Timeout, MaxLifetime or StartupTimeout.
	Reason string    `json:"reason"`
	At     time.Time `json:"at"`
	// InSeconds is 0 when it is due.
	InSeconds float64 `json:"inSeconds"`
}

func showActivity(a core.ActivityStatus, now time.Time) Activity {
	s := a.Sandbox
	shown := Activity{
		SandboxID: s.ID, Pool: s.Pool.Name, LastActive: now.Add(-a.Age), AgeSeconds: seconds(a.Age),
		Kind: a.Kind, Why: a.Why, Router: a.Router, Open: a.Open, IdleTimeout: seconds(s.IdleTimeout),
		EndAt: present(s.EndAt), LifetimeEnd: present(s.LifetimeEnd), Asks: append([]string{}, a.Asks...), Awaits: append([]string{}, a.Awaits...),
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

// why answers why a live sandbox is alive.
func (a *api) why(w *reply, r *http.Request) error {
	ctx, cancel := context.WithTimeout(r.Context(), answerWait)
	defer cancel()
	id := r.PathValue("id")
	list, _, err := a.Allocator.Activities(ctx, Which{ID: id}, 1)
	if err != nil {
		return err
	}
	if len(list) == 0 {
		s, known, err := a.Allocator.Sandbox(ctx, id)
		if err != nil {
			return err
		}
		return notThere(id, s, known)
	}
	now := time.Now().UTC()
	return writeJSON(w, http.StatusOK, SandboxActivity{Now: now, DryRun: a.ReapDryRun, Activity: showActivity(list[0], now)})
}

func (a *api) lastActive(w *reply, r *http.Request) error {
	limit, err := limitOf(r, defaultActivities, maxActivities)
	if err != nil {
		return err
	}
	if err := w.rows(limit); err != nil {
		return err
	}
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
	ctx, cancel := context.WithTimeout(r.Context(), answerWait)
	defer cancel()
	list, truncated, err := a.Allocator.Activities(ctx, Which{ID: query.Get("id"), Prefix: query.Get("prefix"), Pool: query.Get("pool")}, limit)
	if err != nil {
		return err
	}
	all := LastActive{Now: time.Now().UTC(), DryRun: a.ReapDryRun, Sandboxes: make([]Activity, 0, len(list)), Truncated: truncated}
	for _, s := range list {
		all.Sandboxes = append(all.Sandboxes, showActivity(s, all.Now))
	}
	if format == "text" {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		all.write(w)
		return nil
	}
	return writeJSON(w, http.StatusOK, all)
}

// write writes one line for each sandbox. That the client has gone is no error.
func (l LastActive) write(w io.Writer) {
	if l.DryRun {
		fmt.Fprintln(w, "dry run: nothing is released for being idle")
	}
	for _, s := range l.Sandboxes {
		fmt.Fprintf(w, "%s  %s  %s  %.3fs ago  %s  %d open  %s\n", s.SandboxID, s.Pool, s.LastActive.Format(time.RFC3339Nano), s.AgeSeconds, s.Last(), s.Open, s.Then(l.DryRun))
	}
	if l.Truncated > 0 {
		fmt.Fprintf(w, "%d more\n", l.Truncated)
	}
}

// Last says for people what the last activity was.
func (a Activity) Last() string {
	text := string(a.Kind)
	if a.Router != "" {
		text += " at " + a.Router
	}
	if a.Why != "" {
		text += " (" + a.Why + ")"
	}
	return text
}

// Then says for people what happens next.
func (a Activity) Then(dryRun bool) string {
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
	}
	return text
}
