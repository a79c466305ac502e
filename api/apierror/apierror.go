// Package apierror is every error that Berth answers, from Envoy, from the router
// and from the HTTP API alike: which there are (Kinds), and their shape for
// programs (JSON) and for people in front of a browser (Page).
package apierror

import (
	"bytes"
	"encoding/json"
	"net/http"
	"strconv"

	"github.com/berth-sandbox/berth/internal/printable"
)

// Error is an answer that says what went wrong and what to do. New makes one.
type Error struct {
	// Code is the HTTP status.
	Code      int    `json:"code"`
	Reason    Reason `json:"reason"`
	Message   string `json:"message"`
	SandboxID string `json:"sandboxID,omitempty"`
	RequestID string `json:"requestID,omitempty"`
	// RetryAfter, in seconds, goes into the header of that name if it is not 0.
	RetryAfter int `json:"-"`
	// Links are URLs that Page shows as what to open instead. They contain nothing of a client but
	// what was checked.
	Links []string `json:"-"`
	// Home is a domain of sandboxes. If it is set, Page is the page of that domain for people.
	Home string `json:"-"`
	// AnyOrigin: pages of every origin may read the answer (CORS). The router sets it for the port of agents.
	AnyOrigin bool `json:"-"`
	// OutcomeUnknown: the call may have taken effect. The header Should-Retry: false stops E2B's
	// SDKs from repeating it.
	OutcomeUnknown bool `json:"-"`
}

// Error implements error.
func (e *Error) Error() string { return string(e.Reason) + ": " + e.Message }

// JSON returns the body.
func (e *Error) JSON() []byte {
	var body bytes.Buffer
	encoder := json.NewEncoder(&body)
	encoder.SetEscapeHTML(false)              // messages contain <port>-<id> and are not HTML
	if err := encoder.Encode(e); err != nil { // strings and integers always encode
		return []byte(`{"code":500,"reason":"internal","message":"the error could not be encoded"}`)
	}
	return printable.JSON(bytes.TrimSuffix(body.Bytes(), []byte("\n")))
}

// E2B returns the body that E2B's own proxy answers in place of a sandbox.
func (e *Error) E2B() []byte {
	body, err := json.Marshal(struct {
		SandboxID string `json:"sandboxId"`
		Message   string `json:"message"`
		Code      int    `json:"code"`
	}{e.SandboxID, e.Message, e.Code})
	if err != nil { // strings and integers always encode
		return e.JSON()
	}
	return printable.JSON(body)
}

// Write answers an HTTP request with the error.
func (e *Error) Write(w http.ResponseWriter) {
	w.Header().Set("Content-Type", "application/json")
	if e.RetryAfter > 0 {
		w.Header().Set("Retry-After", strconv.Itoa(e.RetryAfter))
	}
	if e.OutcomeUnknown {
		w.Header().Set("Should-Retry", "false")
	}
	w.WriteHeader(e.Code)
	_, _ = w.Write(e.JSON()) // the client may have gone
}
