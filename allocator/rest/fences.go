package rest

import (
	"net/http"
	"strings"
	"time"
	"unicode"

	"go.uber.org/zap"

	"github.com/berth-sandbox/berth/allocator/access"
	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/openapi"
)

// Bounds of operators' requests.
const (
	defaultLimit = 100
	maxReason    = 500 // bytes
)

// Fences is the answer of GET /v1/fences.
type Fences struct {
	// Fences are in the order in which they began.
	Fences []Fence `json:"fences"`
	// Truncated is how many more there are.
	Truncated int `json:"truncated"`
}

// Fence is a released sandbox whose pod may not be deleted yet and whose address may not be reused
// yet.
type Fence struct {
	SandboxID  string    `json:"sandboxID"`
	Pool       string    `json:"pool"`
	PodName    string    `json:"podName"`
	PodIP      string    `json:"podIP"`
	ReleasedAt time.Time `json:"releasedAt"`
	Reason     string    `json:"reason"`
	// Phase is PhaseSessions or PhaseConnectWindow.
	Phase string `json:"phase"`
	// WaitsFor are the awaited routers by session ID, WaitsForOthers the number of omitted ones.
	WaitsFor       []Awaited `json:"waitsFor"`
	WaitsForOthers int       `json:"waitsForOthers"`
	// ConnectWindowEndsInSeconds is present in the phase PhaseConnectWindow.
	ConnectWindowEndsInSeconds *float64 `json:"connectWindowEndsInSeconds,omitempty"`
}

// The phases of a fence.
const (
	// PhaseSessions means that routers may still know the route.
	PhaseSessions = "sessions"
	// PhaseConnectWindow means that admitted requests may still connect.
	PhaseConnectWindow = "connectWindow"
)

// Session is the membership of a router process that runs, or may still run.
type Session struct {
	SessionID string `json:"sessionID"`
	// Address is the IP address of its latest join, if known.
	Address   string `json:"address,omitempty"`
	Connected bool   `json:"connected"`
	// LastHeardSeconds is the age of its latest ping, absent if this leader received none.
	LastHeardSeconds *float64 `json:"lastHeardSeconds,omitempty"`
	// ExpiresInSeconds is the time until it expires without a further ping.
	ExpiresInSeconds float64 `json:"expiresInSeconds"`
	// Sent and Acknowledged are the sequence numbers of its stream, if it is connected.
	Sent         uint64 `json:"sent,omitempty"`
	Acknowledged uint64 `json:"acknowledged,omitempty"`
}

// Awaited is a router that a fence waits for.
type Awaited struct {
	Session
	// Until is UntilAcknowledged or UntilExpired: what most likely ends the wait.
	Until string `json:"until"`
	// Needed is the sequence number that it has not acknowledged, if it is connected.
	Needed uint64 `json:"needed,omitempty"`
}

// What ends the wait for a router, besides its Goodbye and the proof of its death.
const (
	UntilAcknowledged = "acknowledged"
	UntilExpired      = "expired"
)

// Sessions is the answer of GET /v1/sessions.
type Sessions struct {
	// Sessions are sorted by ID.
	Sessions []ListedSession `json:"sessions"`
	// Truncated is how many more there are.
	Truncated int `json:"truncated"`
}

// ListedSession is a session and the number of fences that wait for it.
type ListedSession struct {
	Session
	Fences int `json:"fences"`
}

// DeclaredDead is the answer of POST /v1/sessions/{id}/declare-dead.
type DeclaredDead struct {
	SessionID string `json:"sessionID"`
	// Fences is the number of fences that waited for it.
	Fences int `json:"fences"`
}

func toSession(s core.SessionStatus) Session {
	shown := Session{SessionID: s.ID, Address: s.From, Connected: s.Connected, ExpiresInSeconds: seconds(s.Expires), Sent: s.Sent, Acknowledged: s.Acked}
	if s.Heard {
		heard := seconds(s.Silence)
		shown.LastHeardSeconds = &heard
	}
	return shown
}

func toFence(f core.FenceStatus) Fence {
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
		shown.WaitsFor = append(shown.WaitsFor, Awaited{Session: toSession(a.SessionStatus), Until: until, Needed: a.Needed})
	}
	if len(f.Waiting) == 0 {
		window := seconds(f.Window)
		shown.Phase, shown.ConnectWindowEndsInSeconds = PhaseConnectWindow, &window
	}
	return shown
}

func (a *api) fences(w *reply, r *http.Request) error {
	list, truncated, err := entries(w, r, defaultLimit, a.Allocator.Fences, toFence)
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, Fences{list, truncated})
}

func (a *api) sessions(w *reply, r *http.Request) error {
	list, truncated, err := entries(w, r, defaultLimit, a.Allocator.Sessions, func(s core.SessionStatus) ListedSession {
		return ListedSession{toSession(s), s.Fences}
	})
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, Sessions{list, truncated})
}

// declareDead records an operator's statement that a router has ended.
func (a *api) declareDead(w *reply, r *http.Request) error {
	reason, err := decodeReason(r)
	if err != nil {
		return err
	}
	id, by := r.PathValue("sessionID"), access.From(r.Context()).Key
	answer, err := a.Allocator.DeclareDead(r.Context(), id, by, reason)
	if err != nil {
		return err
	}
	var refusal *apierror.Error
	switch answer.Status {
	case core.DeclareOK:
		return writeJSON(w, http.StatusOK, DeclaredDead{SessionID: id, Fences: answer.Fences})
	case core.DeclareConnected:
		refusal = apierror.New(apierror.SessionAlive, "session %s is connected, so its router runs: stop that router, and its fences advance; if its machine is gone, the broken connection is detected within 15 s: try again then", id)
	case core.DeclareHeard:
		refusal = apierror.New(apierror.SessionAlive, "session %s may only have lost its connection, and routers reconnect within seconds: if it has not in %v, try again", id, answer.Wait.Round(time.Millisecond))
	case core.DeclareUnknown:
		refusal = apierror.New(apierror.SessionNotFound, "there is no session %s: it has ended and no fence waits for it, or it never existed", id)
	}
	a.Log.Warn("refused to declare a router dead", zap.String("router", id), zap.String("by", by), zap.String("reason", reason), zap.Error(refusal))
	return refusal
}

// decodeReason reads the body of a declare-dead.
func decodeReason(r *http.Request) (string, error) {
	var request openapi.DeclareDeadJSONBody
	if err := decodeBody(r, &request); err != nil {
		return "", err
	}
	reason := strings.TrimSpace(request.Reason)
	if reason == "" || len(reason) > maxReason || strings.ContainsFunc(reason, unicode.IsControl) {
		return "", invalid("reason: required: 1 to %d bytes without control characters that say how you know that the router has ended", maxReason)
	}
	return reason, nil
}
