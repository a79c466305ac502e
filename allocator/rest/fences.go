package rest

import (
	"net/http"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

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

func toSession(s core.SessionStatus) openapi.Session {
	shown := openapi.Session{
		SessionID: s.ID, Egress: s.Egress, Address: nonzero(s.From), Connected: s.Connected, ExpiresInSeconds: seconds(s.Expires),
		Sent: nonzero(int64(s.Sent)), Acknowledged: nonzero(int64(s.Acked)),
	}
	if s.Heard {
		heard := seconds(s.Silence)
		shown.LastHeardSeconds = &heard
	}
	return shown
}

func toAwaited(a core.Awaited) openapi.AwaitedSession {
	until := openapi.AwaitedSessionUntilExpired
	if a.Connected {
		until = openapi.AwaitedSessionUntilAcknowledged
	}
	s := toSession(a.SessionStatus)
	return openapi.AwaitedSession{
		SessionID: s.SessionID, Egress: s.Egress, Address: s.Address, Connected: s.Connected, LastHeardSeconds: s.LastHeardSeconds,
		ExpiresInSeconds: s.ExpiresInSeconds, Sent: s.Sent, Acknowledged: s.Acknowledged, Until: until, Needed: nonzero(int64(a.Needed)),
	}
}

func toListed(status core.SessionStatus) openapi.ListedSession {
	s := toSession(status)
	return openapi.ListedSession{
		SessionID: s.SessionID, Egress: s.Egress, Address: s.Address, Connected: s.Connected, LastHeardSeconds: s.LastHeardSeconds,
		ExpiresInSeconds: s.ExpiresInSeconds, Sent: s.Sent, Acknowledged: s.Acknowledged, Fences: status.Fences,
	}
}

func toFence(f core.FenceStatus) openapi.Fence {
	s := f.Sandbox
	shown := openapi.Fence{
		SandboxID: s.ID, Pool: s.Pool.Name, PodName: s.Pod.Name, PodIP: s.IP.String(), ReleasedAt: s.ReleasedAt, Reason: s.Reason,
		Phase: openapi.FencePhaseSessions, WaitsFor: []openapi.AwaitedSession{}, WaitsForOthers: f.Others,
	}
	for _, a := range f.Waiting {
		shown.WaitsFor = append(shown.WaitsFor, toAwaited(a))
	}
	if len(f.Waiting) == 0 {
		window := seconds(f.Window)
		shown.Phase, shown.ConnectWindowEndsInSeconds = openapi.FencePhaseConnectWindow, &window
	}
	return shown
}

func (a *api) fences(w *reply, r *http.Request) error {
	list, truncated, err := entries(w, r, defaultLimit, a.Allocator.Fences, toFence)
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, openapi.Fences{Fences: list, Truncated: truncated})
}

func (a *api) sessions(w *reply, r *http.Request) error {
	list, truncated, err := entries(w, r, defaultLimit, a.Allocator.Sessions, toListed)
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, openapi.Sessions{Sessions: list, Truncated: truncated})
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
		return writeJSON(w, http.StatusOK, openapi.DeadDeclared{SessionID: id, Fences: answer.Fences})
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
	if reason == "" || utf8.RuneCountInString(reason) > maxReason || strings.ContainsFunc(reason, unicode.IsControl) {
		return "", invalid("reason: required: 1 to %d characters without control characters that say how you know that the router has ended", maxReason)
	}
	return reason, nil
}
