package webhooks

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/google/uuid"

	"github.com/berth-sandbox/berth/allocator/eventlog"
	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/internal/version"
)

const (
	// window bounds the events of a webhook that are read and not delivered.
	window = 256
	// maxAttempts is how often an event is tried while others are delivered.
	maxAttempts = 8
	// firstPause and maxPause bound the back-off after a failed delivery.
	firstPause, maxPause = time.Second, 5 * time.Minute
	// maxBody bounds what is read of an answer, in bytes.
	maxBody = 4 << 10
	// keptDeliveries is how many attempts of a webhook are remembered.
	keptDeliveries = 100
	// logRetry is the pause while the log of events cannot be read.
	logRetry = time.Second
)

// GapType is the type of the event that says that events are lost.
const GapType = "berth.events.gap"

// payload is the body of a delivery, in E2B's form.
type payload struct {
	ID          string    `json:"id"`
	Version     string    `json:"version"`
	Type        string    `json:"type"`
	Timestamp   time.Time `json:"timestamp"`
	Category    string    `json:"event_category"`
	Label       string    `json:"event_label"`
	Data        any       `json:"event_data"`
	SandboxID   string    `json:"sandbox_id"`
	ExecutionID string    `json:"sandbox_execution_id"`
	TemplateID  string    `json:"sandbox_template_id"`
	BuildID     string    `json:"sandbox_build_id"`
	TeamID      string    `json:"sandbox_team_id"`
}

// entry is an event that is not delivered yet.
type entry struct {
	number  uint64
	payload payload
	lost    uint64 // of a gap
	busy    bool
	// attempts is how many have failed, failing since when, and retryAt when the next one is due.
	attempts         int
	failing, retryAt time.Time
}

// result is that of one attempt.
type result struct {
	e        *entry
	delivery openapi.WebhookDelivery
	err      error
}

// runner sends the events of one webhook. Only its goroutine uses it, but for attempt.
type runner struct {
	m          *Manager
	h          *hook
	id, url    string
	team       string
	secret     string
	filter     eventlog.Filter
	at         uint64 // position behind the last event that was read
	undone     []*entry
	busy       int
	failures   int       // in a row
	pausedTill time.Time // after a failure
	succeeded  time.Time
	results    chan result
}

// newRunner returns the runner of a webhook. The caller holds the Manager's mu.
func newRunner(m *Manager, h *hook, secret string) *runner {
	r := &runner{
		m: m, h: h, id: h.object.Name, url: h.object.Spec.URL, team: h.object.Spec.Team, secret: secret, at: h.through,
		filter: eventlog.Filter{Team: h.object.Spec.Team}, results: make(chan result, lanes),
	}
	for _, t := range h.object.Spec.Events {
		r.filter.Types = append(r.filter.Types, eventlog.Type(t))
	}
	return r
}

func (r *runner) run(ctx context.Context) {
	var attempts sync.WaitGroup
	defer attempts.Wait()
	for {
		changed, again := r.fill()
		now := time.Now()
		if next := r.begin(ctx, now, &attempts); !next.IsZero() && (again.IsZero() || next.Before(again)) {
			again = next
		}
		r.note()
		if again.IsZero() {
			again = now.Add(time.Hour)
		}
		timer := time.NewTimer(again.Sub(now))
		select {
		case <-ctx.Done():
		case <-changed:
		case <-timer.C:
		case done := <-r.results:
			r.finish(done, time.Now())
		}
		timer.Stop()
		if ctx.Err() != nil {
			return
		}
	}
}

// fill reads events until the window is full. changed is closed when there are more, again is when to read again.
func (r *runner) fill() (changed <-chan struct{}, again time.Time) {
	for len(r.undone) < window {
		b, err := r.m.o.Log.After(r.at, r.filter, window-len(r.undone))
		if err != nil {
			return nil, time.Now().Add(logRetry)
		}
		if b.Lost > 0 {
			r.gap(b)
		}
		for i := range b.Events {
			e := &b.Events[i]
			r.undone = append(r.undone, &entry{number: e.Number, payload: payload{
				ID: e.ID(), Version: eventlog.Version, Type: string(e.Type), Timestamp: e.Time(), Category: eventlog.Category, Label: e.Label(), Data: e.Data(),
				SandboxID: e.Sandbox, ExecutionID: e.Sandbox, TemplateID: e.Pool, BuildID: e.Build, TeamID: cmp.Or(e.Team, "default"),
			}})
		}
		if r.at = b.Next; b.Changed != nil {
			return b.Changed, time.Time{}
		}
	}
	return nil, time.Time{}
}

// gap adds the event that says that events are lost, or adds to one that waits.
func (r *runner) gap(b eventlog.Batch) {
	first, lost := b.First, b.Lost
	if n := len(r.undone); n > 0 && r.undone[n-1].lost > 0 && !r.undone[n-1].busy {
		lost += r.undone[n-1].lost
		r.undone = r.undone[:n-1]
	}
	r.undone = append(r.undone, &entry{number: max(1, first) - 1, lost: lost, payload: payload{
		ID: uuid.NewSHA1(uuid.NameSpaceOID, []byte(r.id+"/"+strconv.FormatUint(first, 10))).String(), Version: eventlog.Version,
		Type: GapType, Timestamp: time.Now().UTC(), Category: "berth", Label: "gap", Data: map[string]uint64{"lost": lost}, TeamID: cmp.Or(r.team, "default"),
	}})
	r.m.count(func(s *Stats) { s.Gaps++ })
}

// begin starts the attempts that may start, and returns when the next one may, zero for after a result.
func (r *runner) begin(ctx context.Context, now time.Time, attempts *sync.WaitGroup) (next time.Time) {
	if r.pausedTill.After(now) {
		return r.pausedTill
	}
	most := lanes
	if r.failures > 0 {
		most = 1
	}
	var due []*entry
	blocked := map[string]bool{} // sandboxes with an earlier event
	for _, e := range r.undone {
		if blocked[e.payload.SandboxID] {
			continue
		}
		blocked[e.payload.SandboxID] = true
		switch {
		case e.busy:
		case e.retryAt.After(now):
			if next.IsZero() || e.retryAt.Before(next) {
				next = e.retryAt
			}
		default:
			due = append(due, e)
		}
	}
	if r.failures > 0 { // one that has failed less often says more about the target
		slices.SortStableFunc(due, func(a, b *entry) int { return cmp.Compare(a.attempts, b.attempts) })
	}
	for _, e := range due {
		if r.busy >= most {
			break
		}
		taken := r.busy > 0
		if taken {
			select {
			case r.m.shared <- struct{}{}:
			default:
				return next
			}
		}
		e.busy = true
		r.busy++
		attempts.Go(func() {
			done := r.attempt(ctx, e)
			if taken {
				<-r.m.shared
			}
			r.results <- done // has room for all
		})
	}
	return next
}

// attempt delivers an event once.
func (r *runner) attempt(ctx context.Context, e *entry) result {
	began := time.Now()
	id := uuid.NewString()
	code, err := r.send(ctx, id, &e.payload)
	d := openapi.WebhookDelivery{
		ID: id, WebhookID: r.id, EventID: e.payload.ID, EventType: e.payload.Type, SandboxID: e.payload.SandboxID, Timestamp: began.UTC(),
		Attempt: e.attempts + 1, Status: openapi.Success, DurationMs: int(time.Since(began).Milliseconds()),
	}
	if code != 0 {
		d.ResponseHTTPStatusCode = &code
	}
	if err != nil {
		text := err.Error()
		d.Status, d.ErrorMessage = openapi.Failed, &text
	}
	return result{e, d, err}
}

// send sends one request. code is 0 if there was no answer.
func (r *runner) send(ctx context.Context, id string, p *payload) (code int, err error) {
	if !r.m.o.Valid() {
		return 0, errNotValid
	}
	body, err := json.Marshal(p)
	if err != nil {
		return 0, fmt.Errorf("encode event: %w", err)
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, r.url, bytes.NewReader(body))
	if err != nil {
		return 0, err
	}
	for name, value := range map[string]string{
		"Content-Type": "application/json", "User-Agent": "Berth/" + version.Number,
		"e2b-webhook-id": r.id, "e2b-delivery-id": id, "e2b-signature-version": "v1", "e2b-signature": signature(r.secret, body),
	} {
		request.Header.Set(name, value)
	}
	if err := r.m.o.Guard.CheckURL(r.url); err != nil { // the flags may have changed since it was made
		return 0, fmt.Errorf("url: %w", err)
	}
	answer, err := r.m.client.Do(request)
	if err != nil {
		return 0, short(err)
	}
	defer answer.Body.Close()
	_, _ = io.Copy(io.Discard, io.LimitReader(answer.Body, maxBody)) // the status has come
	if answer.StatusCode/100 != 2 {
		return answer.StatusCode, fmt.Errorf("the answer is %d", answer.StatusCode)
	}
	return answer.StatusCode, nil
}

// short leaves out of an error what a team must not learn of the network: where a name leads that is not public, and
// who resolves names. It also leaves out the URL, and bounds the text.
func short(err error) error {
	var of *url.Error
	var name *net.DNSError
	switch {
	case errors.Is(err, ErrAddress):
		return ErrAddress
	case errors.As(err, &name):
		return errors.New("the name cannot be resolved")
	case errors.As(err, &of):
		err = of.Err
	}
	if text := err.Error(); len(text) > 512 {
		return errors.New(text[:512])
	}
	return err
}

// finish acts on the result of an attempt.
func (r *runner) finish(done result, now time.Time) {
	e := done.e
	e.busy = false
	r.busy--
	gone := done.err == nil
	if gone {
		r.failures, r.pausedTill, r.succeeded = 0, time.Time{}, now
	} else {
		if e.attempts == 0 {
			e.failing = now
		}
		e.attempts++
		r.failures++
		e.retryAt = now.Add(backOff(e.attempts))
		r.pausedTill = now.Add(backOff(r.failures))
		if gone = e.attempts >= maxAttempts && r.succeeded.After(e.failing); gone {
			done.delivery.Status = openapi.GivenUp
		}
	}
	if gone {
		r.undone = slices.DeleteFunc(r.undone, func(x *entry) bool { return x == e })
	}
	r.m.mu.Lock()
	defer r.m.mu.Unlock()
	switch done.delivery.Status {
	case openapi.Success:
		r.m.stats.Delivered++
	case openapi.GivenUp:
		r.m.stats.GivenUp++
		fallthrough
	case openapi.Failed:
		r.m.stats.Failed++
	}
	if len(r.h.deliveries) >= keptDeliveries {
		r.h.deliveries = slices.Delete(r.h.deliveries, 0, 1)
	}
	r.h.deliveries = append(r.h.deliveries, done.delivery)
}

// backOff is the pause after so many failures.
func backOff(failures int) time.Duration {
	return min(firstPause<<min(failures-1, 20), maxPause)
}

// note tells the position up to which nothing is left to deliver.
func (r *runner) note() {
	through := r.at
	for _, e := range r.undone { // a gap may have the number of an event before it
		through = min(through, max(1, e.number)-1)
	}
	r.m.mu.Lock()
	r.h.through = through
	r.m.mu.Unlock()
}

func (m *Manager) count(f func(*Stats)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	f(&m.stats)
}
