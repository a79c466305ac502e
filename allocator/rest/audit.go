package rest

import (
	"cmp"
	"net/http"
	"strings"
	"time"

	"go.uber.org/zap"

	"github.com/berth-sandbox/berth/allocator/access"
	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/api/sandboxid"
	"github.com/berth-sandbox/berth/internal/loglimit"
)

// audit writes one line for each call that may have changed something, on the replica that carried
// it out, and for refused calls.
type audit struct {
	log *zap.Logger
	// refused drops lines beyond a rate, because a client without a key can send any number of calls.
	refused *zap.Logger
}

// refusedPerSecond bounds the lines about refused calls for each status.
const refusedPerSecond = 20

func newAudit(log *zap.Logger) audit {
	return audit{log: log, refused: loglimit.PerMessage(log, refusedPerSecond, time.Second)}
}

// maxAudited bounds a text of a client in a line, in bytes.
const maxAudited = 64

// call writes the line of a call whose answer is ready.
func (a audit) call(o *openapi.Operation, r *http.Request, p *reply, began time.Time) {
	a.log.Info("call", append(common(r, o.ID, p.code), zap.String("object", cmp.Or(p.object, objectOf(o, r))),
		zap.String("outcome", outcomeOf(p)), zap.Duration("duration", time.Since(began)))...)
}

// refusal writes the line of a call that was not carried out because of its caller.
func (a audit) refusal(r *http.Request, operation, object string, e *apierror.Error) {
	message := "call refused"
	if e.Code == http.StatusUnauthorized {
		message = "call without a valid key" // lines are counted by their message
	}
	a.refused.Warn(message, append(common(r, operation, e.Code), zap.String("object", object), zap.String("outcome", "refused"),
		zap.String("client", r.RemoteAddr))...)
}

// common returns the fields that all lines have, and room for others.
func common(r *http.Request, operation string, status int) []zap.Field {
	c := access.From(r.Context())
	const all = 9
	return append(make([]zap.Field, 0, all),
		zap.String("key", c.Key), zap.String("team", c.Team), zap.String("role", string(c.Role)), zap.String("operation", operation),
		zap.Int("status", status), zap.String("requestID", audited(r.Header.Get("X-Request-Id"))),
	)
}

// objectOf returns what the path of a call names, "" for nothing. A sandbox ID opens its sandbox, so
// a line has only the beginning of it.
func objectOf(o *openapi.Operation, r *http.Request) string {
	_, rest, _ := strings.Cut(o.Paths[0], "{")
	name, _, _ := strings.Cut(rest, "}")
	if name == "sandboxID" {
		return sandboxid.Short(r.PathValue(name))
	}
	return audited(r.PathValue(name))
}

// audited bounds a text of a client.
func audited(text string) string {
	if len(text) > maxAudited {
		text = text[:maxAudited]
	}
	return strings.ToValidUTF8(text, "")
}

// outcomeOf returns what became of a call with this answer: done, refused, failed or unknown.
func outcomeOf(p *reply) string {
	switch {
	case p.code == 0 || p.header.Get("Should-Retry") == "false":
		return "unknown" // the client has gone, or the answer says so
	case p.code < http.StatusBadRequest:
		return "done"
	case p.code < http.StatusInternalServerError || p.code == http.StatusNotImplemented:
		return "refused"
	}
	return "failed"
}
