package client

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/internal/printable"
)

// ErrConfig is in the error of New for options that cannot be used.
var ErrConfig = errors.New("options of the client")

// Error is an answer of the API other than success.
type Error struct {
	// Status is the HTTP status.
	Status int
	// Reason is a stable word (docs/reference/errors.md), "" if the answer did not come from
	// Berth.
	Reason string
	// Message says what went wrong and what to do.
	Message   string
	SandboxID string
	RequestID string
	// RetryAfter is how long the API asks to wait, 0 if it does not.
	RetryAfter time.Duration
	// OutcomeUnknown means that the call may have taken effect.
	OutcomeUnknown bool
}

// Error implements error. The text is one line, without characters that a terminal obeys.
func (e *Error) Error() string {
	text := e.Message
	if e.Reason != "" {
		text = e.Reason + ": " + text
	}
	if e.RequestID != "" {
		text += " (request " + e.RequestID + ")"
	}
	return printable.Line(text)
}

// IsNotFound reports whether the API says that an object is unknown or has ended.
func IsNotFound(err error) bool {
	return status(err) == http.StatusNotFound || status(err) == http.StatusGone
}

// IsLimit reports whether a limit is reached: no warm pod, a quota or a rate.
func IsLimit(err error) bool { return status(err) == http.StatusTooManyRequests }

// IsRefused reports whether the API refuses the caller: the key is missing or unknown, or its role
// may not make the call.
func IsRefused(err error) bool {
	return status(err) == http.StatusUnauthorized || status(err) == http.StatusForbidden
}

func status(err error) int {
	var e *Error
	if errors.As(err, &e) {
		return e.Status
	}
	return 0
}

// maxMessage bounds what is shown of an answer that is not in Berth's shape.
const maxMessage = 200

func newError(response *http.Response, body []byte) *Error {
	e := &Error{Status: response.StatusCode, OutcomeUnknown: response.Header.Get("Should-Retry") == "false"}
	if seconds, err := strconv.Atoi(response.Header.Get("Retry-After")); err == nil && seconds > 0 {
		e.RetryAfter = time.Duration(seconds) * time.Second
	}
	var shape openapi.Error
	if json.Unmarshal(body, &shape) == nil && shape.Reason != "" {
		e.Reason, e.Message = shape.Reason, shape.Message
		e.SandboxID, e.RequestID = value(shape.SandboxID), value(shape.RequestID)
		return e
	}
	e.Message = fmt.Sprintf("the server answers %s", response.Status)
	if len(body) > 0 {
		e.Message += fmt.Sprintf(": %q", body[:min(len(body), maxMessage)])
	}
	return e
}

func value[T any](p *T) (v T) {
	if p != nil {
		v = *p
	}
	return v
}
