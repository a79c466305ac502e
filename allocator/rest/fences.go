package rest

import (
	"context"
	"io"
	"net/http"
	"strings"
	"time"
	"unicode"

	"go.uber.org/zap"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/api/apierror"
)

// Bounds of what operators may ask for.
const (
	defaultLimit = 100
	maxLimit     = 1000
	maxReason    = 500 // bytes
)

// Fences is the answer of GET /v1/fences.
type Fences struct {
	// Fences are in the order in which they began.
	Fences []Fence `json:"fences"`
	// Truncated is how many more there are.
	Truncated int `json:"truncated"`
}

// Fence is a released sandbox whose pod may not be deleted, and whose address may not be
// used again, yet.
type Fence struct {
	SandboxID  string    `json:"sandboxID"`
	Pool       string    `json:"pool"`
	PodName    string    `json:"podName"`
	PodIP      string    `json:"podIP"`
	ReleasedAt time.Time `json:"releasedAt"`
	Reason     string    `json:"reason"`
	// Phase is PhaseSessions or PhaseWindow.
	Phase string `json:"phase"`
	// WaitsFor are routers, by ID; WaitsForOthers is how many more there are.
	WaitsFor       []Awaited `json:"waitsFor"`
	WaitsForOthers int       `json:"waitsForOthers"`
	// WindowEndsInSeconds is there in the last phase.
	WindowEndsInSeconds *float64 `json:"windowEndsInSeconds,omitempty"`
}

// The phases of a fence.
const (
	// PhaseSessions: routers may know the route still.
	PhaseSessions = "sessions"
	// PhaseWindow: what they have admitted may still connect.
	PhaseWindow = "window"
)

// Session is a router process that is there, or may be.
type Session struct {
	SessionID string `json:"sessionID"`
	// Address is where it joined from last, if that is known.
	Address   string `json:"address,omitempty"`
	Connected bool   `json:"connected"`
	// LastHeardSeconds is how long ago its last ping came; it is not there if this
	// leader has not heard it.
	LastHeardSeconds *float64 `json:"lastHeardSeconds,omitempty"`
	// ExpiresInSeconds is after how long it will have gone stale, and is waited for no
	// more, if it is not heard again.
	ExpiresInSeconds float64 `json:"expiresInSeconds"`
	// Sent and Acknowledged number the messages on its stream, if it is connected.
	Sent         uint64 `json:"sent,omitempty"`
	Acknowledged uint64 `json:"acknowledged,omitempty"`
}

// Awaited is a router that a fence waits for.
type Awaited struct {
	Session
	// Until is UntilAcknowledged or UntilExpired: what will most likely end the wait.
	Until string `json:"until"`
	// Needed is the message that it has not acknowledged, if it is connected.
	Needed uint64 `json:"needed,omitempty"`
}

// What ends the wait for a router. Its Goodbye and the proof of its death do, too.
const (
	UntilAcknowledged = "acknowledged"
	UntilExpired      = "expired"
)

// Sessions is the answer of GET /v1/sessions.
type Sessions struct {
	// Sessions are by ID.
	Sessions []ListedSession `json:"sessions"`
	// Truncated is how many more there are.
	Truncated int `json:"truncated"`
}

// ListedSession is a router, with how many fences wait for it.
type ListedSession struct {
	Session
	Fences int `json:"fences"`
}

// DeclaredDead is the answer of POST /v1/sessions/{id}/declare-dead.
type DeclaredDead struct {
	SessionID string `json:"sessionID"`
	// Fences is how many waited for it.
	Fences int `json:"fences"`
}

func showSession(s core.SessionStatus) Session {
	shown := Session{SessionID: s.ID, Address: s.From, Connected: s.Connected, ExpiresInSeconds: seconds(s.Expires), Sent: s.Sent, Acknowledged: s.Acked}
	if s.Heard {
		heard := seconds(s.Silence)
		shown.LastHeardSeconds = &heard
	}
	return shown
}

func showFence(f core.FenceStatus) Fence {
	s := f.Sandbox
	shown := Fence{
		SandboxID: s.ID, Pool: s.Pool.Name, PodName: s.Pod.Name, PodIP: s.IP.String(), ReleasedAt: s.EndedAt, Reason: s.Reason,
		Phase: PhaseSessions, WaitsFor: []Awaited{}, WaitsForOthers: f.Others,
	}
	for _, a := range f.Waiting {
		until := UntilExpired
		if a.Connected {
			until = UntilAcknowledged
		}
		shown.WaitsFor = append(shown.WaitsFor, Awaited{Session: showSession(a.SessionStatus), Until: until, Needed: a.Needed})
	}
	if len(f.Waiting) == 0 {
		window := seconds(f.Window)
		shown.Phase, shown.WindowEndsInSeconds = PhaseWindow, &window
	}
	return shown
}

func (a *api) fences(w *reply, r *http.Request) error {
	limit, err := limitOf(r, defaultLimit, maxLimit)
	if err != nil {
		return err
	}
	if err := w.rows(limit); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(r.Context(), answerWait)
	defer cancel()
	list, truncated, err := a.Allocator.Fences(ctx, limit)
	if err != nil {
		return err
	}
	all := Fences{Fences: make([]Fence, 0, len(list)), Truncated: truncated}
	for _, f := range list {
		all.Fences = append(all.Fences, showFence(f))
	}
	return writeJSON(w, http.StatusOK, all)
}

func (a *api) sessions(w *reply, r *http.Request) error {
	limit, err := limitOf(r, defaultLimit, maxLimit)
	if err != nil {
		return err
	}
	if err := w.rows(limit); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(r.Context(), answerWait)
	defer cancel()
	list, truncated, err := a.Allocator.Sessions(ctx, limit)
	if err != nil {
		return err
	}
	all := Sessions{Sessions: make([]ListedSession, 0, len(list)), Truncated: truncated}
	for _, s := range list {
		all.Sessions = append(all.Sessions, ListedSession{showSession(s), s.Fences})
	}
	return writeJSON(w, http.StatusOK, all)
}

// declareDead takes an operator's word that a router has ended.
func (a *api) declareDead(w *reply, r *http.Request) error {
	reason, err := decodeReason(r.Body)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(r.Context(), answerWait)
	defer cancel()
	id, by := r.PathValue("id"), teamOf(ctx)
	answer, err := a.Allocator.DeclareDead(ctx, id, by, reason)
	if err != nil {
		return err
	}
	var refusal *apierror.Error
	switch answer.Status {
	case core.DeclareOK:
		return writeJSON(w, http.StatusOK, DeclaredDead{SessionID: id, Fences: answer.Fences})
	case core.DeclareConnected:
		refusal = apierror.New(apierror.SessionAlive, "session %s is connected, so its router lives: stop that router, and its fences go on; if its machine has gone, the connection is found broken within 15 s: try again then", id)
	case core.DeclareHeard:
		refusal = apierror.New(apierror.SessionAlive, "session %s may only have lost its connection, and routers come back within seconds: if it has not in %v, try again", id, answer.Wait.Round(time.Millisecond))
	case core.DeclareUnknown:
		refusal = apierror.New(apierror.SessionNotFound, "there is no session %s: it has ended, and nothing waits for it, or there was none", id)
	}
	a.Log.Warn("refused to declare a router dead", zap.String("session", id), zap.String("by", by), zap.String("reason", reason), zap.Error(refusal))
	return refusal
}

// decodeReason reads the body of a declare-dead.
func decodeReason(body io.Reader) (string, error) {
	var request struct {
		Reason string `json:"reason"`
	}
	if err := decodeStrictly(body, &request); err != nil {
		return "", err
	}
	reason := strings.TrimSpace(request.Reason)
	if reason == "" || len(reason) > maxReason || strings.ContainsFunc(reason, unicode.IsControl) {
		return "", invalid("reason: required: 1 to %d bytes that say how it is known that the router has ended, without control characters", maxReason)
	}
	return reason, nil
}
