package rest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/api/apierror"
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

// Takes reports whether ID and Prefix are as w says.
func (w Which) Takes(id string) bool {
	return (w.ID == "" || id == w.ID) && strings.HasPrefix(id, w.Prefix)
}

// LastActive is the answer of GET /v1/admin/last-active.
type LastActive struct {
	// Now is the leader's clock.
	Now time.Time `json:"now"`
	// DryRun: sandboxes that are idle are not released.
	DryRun bool `json:"dryRun"`
	// Sandboxes are the live ones, by ID.
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
	// Source is how it is known: one of the Source words.
	Source string `json:"source"`
	// Router is the session that has told, for SourceReport and SourceQuiesce.
	Router string `json:"router,omitempty"`
	// OpenStreams are those that this router said are open.
	OpenStreams int `json:"openStreams"`
	// IdleTimeout is in seconds, absent if there is none. OpenConnections is Active or
	// BytesOnly: what an open connection means for it.
	IdleTimeout     float64 `json:"idleTimeout,omitempty"`
	OpenConnections string  `json:"openConnections,omitempty"`
	// EndAt is the end that a call can move, LifetimeEnd the one that stands.
	EndAt       *time.Time `json:"endAt,omitempty"`
	LifetimeEnd *time.Time `json:"lifetimeEnd,omitempty"`
	// Next is what ends it if it is not used meanwhile, absent if nothing does.
	Next *Next `json:"next,omitempty"`
	// Awaits are routers, by session, without whose word it is not released for being
	// idle: they are not connected, or have not reported yet.
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

// How an activity is known.
const (
	SourceClaim   = "claim"   // it was claimed then, or began to run
	SourceRecord  = "record"  // an earlier leader has written it to the Sandbox object
	SourceCall    = "call"    // a keep-alive, or a timeout that was set
	SourceReport  = "report"  // a router has reported it
	SourceQuiesce = "quiesce" // a router has said so when it was asked whether the sandbox is idle
	SourceDoubt   = "doubt"   // a router ended, and nobody knows what was in use through it
)

func sourceOf(s core.ActivitySource) string {
	switch s {
	case core.Began:
		return SourceClaim
	case core.OnRecord:
		return SourceRecord
	case core.Called:
		return SourceCall
	case core.Reported:
		return SourceReport
	case core.Asked:
		return SourceQuiesce
	case core.Doubted:
		return SourceDoubt
	}
	return fmt.Sprint(int(s))
}

// What an open connection means.
const (
	openIsActive = "Active"
	bytesOnly    = "BytesOnly"
)

// endOf is when s ends at the latest, nil for never.
func endOf(s core.Sandbox) *time.Time {
	if !s.LifetimeEnd.IsZero() && (s.EndAt.IsZero() || s.LifetimeEnd.Before(s.EndAt)) {
		return &s.LifetimeEnd
	}
	return present(s.EndAt)
}

// present is nil for the zero time.
func present(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	return &t
}

func showActivity(a core.ActivityStatus, now time.Time) Activity {
	s := a.Sandbox
	shown := Activity{
		SandboxID: s.ID, Pool: s.Pool.Name, LastActive: now.Add(-a.Age), AgeSeconds: seconds(a.Age),
		Source: sourceOf(a.Source), Router: a.Router, OpenStreams: a.Open, IdleTimeout: seconds(s.IdleTimeout),
		EndAt: present(s.EndAt), LifetimeEnd: present(s.LifetimeEnd), Awaits: append([]string{}, a.Awaits...),
	}
	switch {
	case s.IdleTimeout == 0:
	case s.BytesOnly:
		shown.OpenConnections = bytesOnly
	default:
		shown.OpenConnections = openIsActive
	}
	if a.Next != "" {
		shown.Next = &Next{Reason: a.Next, At: now.Add(a.In), InSeconds: seconds(a.In)}
	}
	return shown
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
		fmt.Fprintf(w, "%s  %s  %s  %.3fs ago  %s  %d open  %s\n", s.SandboxID, s.Pool, s.LastActive.Format(time.RFC3339Nano), s.AgeSeconds, s.Known(), s.OpenStreams, s.Then(l.DryRun))
	}
	if l.Truncated > 0 {
		fmt.Fprintf(w, "%d more\n", l.Truncated)
	}
}

// Known says for people how the activity is known.
func (a Activity) Known() string {
	if a.Router == "" {
		return a.Source
	}
	return a.Source + " of " + a.Router
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

// idleTimeoutOf checks the idle timeout of a claim, in seconds.
func (a *api) idleTimeoutOf(s int64) (time.Duration, error) {
	least := int64((a.ActivityWindow + time.Second - 1) / time.Second)
	if s != 0 && (s < least || s > int64(maxTimeout/time.Second)) {
		return 0, invalid("idleTimeout: %d: must be 0, for none, or %d to %d seconds: whether a request is still open is known only after %v, which is Envoy's access-log flush and 2s; have Envoy flush more often for less",
			s, least, int64(maxTimeout/time.Second), a.ActivityWindow)
	}
	return time.Duration(s) * time.Second, nil
}

// timeoutOf checks a timeout, in seconds.
func timeoutOf(s int64) (time.Duration, error) {
	if s < 1 || s > int64(maxTimeout/time.Second) {
		return 0, invalid("timeout: %d: must be 1 to %d seconds", s, int64(maxTimeout/time.Second))
	}
	return time.Duration(s) * time.Second, nil
}

// setTimeout moves the end of a sandbox.
func (a *api) setTimeout(w *reply, r *http.Request) error {
	var request struct {
		Timeout *int64 `json:"timeout"`
	}
	if err := decodeStrictly(r.Body, &request); err != nil {
		return err
	}
	if request.Timeout == nil {
		return invalid("timeout: required: seconds from now after which the sandbox is released")
	}
	timeout, err := timeoutOf(*request.Timeout)
	if err != nil {
		if *request.Timeout == 0 {
			return invalid("timeout: 0: must be at least 1 second; DELETE releases a sandbox at once")
		}
		return err
	}
	ctx, cancel := context.WithTimeout(r.Context(), answerWait)
	defer cancel()
	id := r.PathValue("id")
	status, err := a.Allocator.SetTimeout(ctx, id, timeout)
	return kept(w, id, status, err)
}

// keepAlive counts as activity.
func (a *api) keepAlive(w *reply, r *http.Request) error {
	var nothing struct{}
	if err := decodeStrictly(r.Body, &nothing); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(r.Context(), answerWait)
	defer cancel()
	id := r.PathValue("id")
	status, err := a.Allocator.KeepAlive(ctx, id)
	return kept(w, id, status, err)
}

// kept answers a call that is about a live sandbox.
func kept(w *reply, id string, status core.ReleaseStatus, err error) error {
	if err != nil {
		return err
	}
	if err := notLive(id, status); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// notLive is the error for a sandbox that is unknown or gone, nil for one that is live.
func notLive(id string, status core.ReleaseStatus) error {
	switch status {
	case core.ReleaseUnknown:
		return missing(id, apierror.SandboxNotFound, "there is no such sandbox")
	case core.ReleaseGone:
		return missing(id, apierror.SandboxGone, "this sandbox has been released before")
	case core.ReleaseOK:
	}
	return nil
}

// decodeStrictly reads a JSON object that has no other fields than into. An empty body
// is an empty object.
func decodeStrictly(body io.Reader, into any) error {
	raw, err := read(body)
	if err != nil {
		return err
	}
	text := strings.TrimSpace(string(raw))
	if text == "" {
		return nil
	}
	if text[0] != '{' { // null, too
		return invalid("body: must be a JSON object")
	}
	decoder := json.NewDecoder(strings.NewReader(text))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(into); err != nil {
		return invalid("body: %v", err)
	}
	if _, err := decoder.Token(); !errors.Is(err, io.EOF) {
		return invalid("body: must be one JSON object")
	}
	return nil
}
