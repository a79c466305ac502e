package main

import (
	"fmt"
	"net/http"
)

// traced asks for the trace of each call, and keeps the ID of the last one.
type traced struct {
	next http.RoundTripper
	id   string
}

// RoundTrip implements http.RoundTripper.
func (t *traced) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.Header.Set("Berth-Trace", "1")
	answer, err := t.next.RoundTrip(r)
	if err == nil {
		t.id = answer.Header.Get("Berth-Trace-Id")
	}
	return answer, err
}

// tell says which trace the call has.
func (t *traced) tell(o *output) {
	text := "trace " + t.id
	if t.id == "" {
		text = "no trace: the allocators have no --traces-to, or more than 100 calls of this second asked for one"
	}
	fmt.Fprintln(o.err, text)
}
