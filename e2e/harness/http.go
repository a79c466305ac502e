package harness

import (
	"context"
	"encoding/json"
	"io"
	"math/rand/v2"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/berth-sandbox/berth/allocator/rest"
	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/e2e/history"
	"github.com/berth-sandbox/berth/envoy"
	"github.com/berth-sandbox/berth/internal/bootclock"
)

// ClaimField is the metadata field in which a claim can carry its name. It is the Owner of
// the sandbox in the history.
const ClaimField = "claim"

// keyHeader makes a claim safe to repeat.
const keyHeader = "Idempotency-Key"

// Answer is an HTTP answer with its whole body.
type Answer struct {
	Code   int
	Header http.Header
	Body   []byte
}

// Do sends a request and reads the whole answer. host, if set, replaces that of the URL in
// the request; headers are names and values in turn. Half an answer is an error.
func Do(ctx context.Context, client *http.Client, method, url, host, body string, headers ...string) (Answer, error) {
	r, err := http.NewRequestWithContext(ctx, method, url, strings.NewReader(body))
	if err != nil {
		return Answer{}, err
	}
	if host != "" {
		r.Host = host
	}
	for i := 0; i+1 < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	response, err := client.Do(r)
	if err != nil {
		return Answer{}, err
	}
	defer response.Body.Close()
	raw, err := io.ReadAll(response.Body)
	if err != nil {
		return Answer{}, err
	}
	return Answer{response.StatusCode, response.Header, raw}, nil
}

// AnyAPI is the API of any allocator.
func (b *Berth) AnyAPI(random *rand.Rand) string {
	return b.Stack.Allocators[random.IntN(len(b.Stack.Allocators))].API
}

// Call calls an allocator's API under e.Key, records the call with its answer, and returns
// that. e says what the call is. An answer that cannot be read is none: its Code is 0.
func (b *Berth) Call(ctx context.Context, api string, e history.Event, method, path, body string) history.Event {
	var headers []string
	if e.Key != "" {
		headers = []string{keyHeader, e.Key}
	}
	e.Process, e.Began = api, bootclock.Now()
	a, err := Do(ctx, b.HTTP, method, api+path, "", body, headers...)
	if err == nil {
		err = read(&e, a)
	}
	if err != nil {
		e.Code, e.Error = 0, err.Error()
	}
	e.Ended, e.Wall = bootclock.Now(), time.Now().Round(0)
	return b.History.Add(e)
}

// read sets what the answer of the API says.
func read(e *history.Event, a Answer) (err error) {
	e.Code = a.Code
	switch {
	case a.Code == http.StatusOK || a.Code == http.StatusCreated:
		var s openapi.Sandbox
		if err := json.Unmarshal(a.Body, &s); err != nil {
			return err
		}
		e.Sandbox, e.Pod, e.Owner, e.EndAt = s.SandboxID, s.PodName, s.Metadata[ClaimField], s.EndAt
	case e.Kind == history.Release && a.Code == http.StatusNoContent && a.Header.Get(rest.OutstandingHeader) != "":
		e.Outstanding, err = strconv.Atoi(a.Header.Get(rest.OutstandingHeader))
		return err
	case a.Code >= http.StatusBadRequest:
		var refusal apierror.Error
		if err := json.Unmarshal(a.Body, &refusal); err != nil {
			e.Error = string(a.Body)
			return nil
		}
		e.Reason, e.Error = string(refusal.Reason), refusal.Message
		if refusal.SandboxID != "" {
			e.Sandbox = refusal.SandboxID
		}
	}
	return nil
}

// mostAnswer bounds how much is read of a sandbox's answer, in bytes.
const mostAnswer = 64 << 10

// Send sends a request to a sandbox and sets in e when it began and ended and what the
// client saw. It returns the body. If Berth answered, e.Reason is set; if the answer was cut
// short, e.Error.
func Send(e *history.Event, client *http.Client, r *http.Request) []byte {
	e.Began = bootclock.Now()
	defer func() { e.Ended = bootclock.Now() }()
	response, err := client.Do(r)
	if err != nil {
		e.Error = err.Error()
		return nil
	}
	defer response.Body.Close()
	Answered(e, response)
	raw, err := io.ReadAll(io.LimitReader(response.Body, mostAnswer))
	if err != nil {
		e.Error = err.Error()
	}
	return raw
}

// Answered sets in e what the head of an answer says. response may be nil.
func Answered(e *history.Event, response *http.Response) {
	if response == nil {
		return
	}
	e.Code, e.Reason = response.StatusCode, response.Header.Get(envoy.ReasonHeader)
	if status := response.Header.Get("Grpc-Status"); status != "" && e.Reason == "" {
		e.Reason = "grpc-status " + status
	}
}

// SandboxOf is the sandbox that a host names, with or without a port.
func SandboxOf(host string) string {
	label, _, _ := strings.Cut(host, ".")
	if _, id, found := strings.Cut(label, "-"); found {
		return id
	}
	return label
}
