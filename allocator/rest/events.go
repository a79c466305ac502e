package rest

import (
	"context"
	"fmt"
	"net/http"
	"time"

	"github.com/berth-sandbox/berth/allocator/access"
	"github.com/berth-sandbox/berth/allocator/events"
	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/openapi"
)

// Bounds of streams of events.
const (
	// maxStreams is how many streams a replica serves or forwards.
	maxStreams = 200
	// teamStreams is how many of them one team can have. Streams last, unlike calls, so the share of a
	// budget would leave little to a third team.
	teamStreams = maxStreams / 4
	// streamLife bounds a stream, so that a key that was revoked does not read on for ever.
	streamLife = 15 * time.Minute
	// heartbeat is how often a stream without events sends its position.
	heartbeat = 15 * time.Second
	// batch is how many events a stream takes from the ring at a time.
	batch = 256
	// lastEventID is the header with which a client continues (HTML standard, server-sent events).
	lastEventID = "Last-Event-ID"
)

// streaming is a writer of an answer without an end. A client must read each part within sendWait.
type streaming struct {
	http.ResponseWriter
	connection *http.ResponseController
}

func (s streaming) Write(b []byte) (int, error) {
	_ = s.connection.SetWriteDeadline(time.Now().Add(sendWait)) // fails only without a connection, in tests
	return s.ResponseWriter.Write(b)
}

// Unwrap is for http.ResponseController.
func (s streaming) Unwrap() http.ResponseWriter { return s.ResponseWriter }

// stream returns the handler of an operation whose answer is a stream. A stream has a slot of a class
// of its own for all its life. It holds no other memory: it reads from the ring of events.
func (a *api) stream(o *openapi.Operation, f func(http.ResponseWriter, *http.Request) error) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodHead {
			// The answer has no body, so a proxy reuses the connection as soon as it has the header.
			// A handler that went on would block the next call on it.
			streamHeader(w.Header())
			return
		}
		team := access.From(r.Context()).Team
		if !a.streams.slots.take(team, 1) {
			err := apierror.New(apierror.Overloaded, "too many streams of events are open; end one, or try again")
			if a.streams.slots.atMost(team) {
				err = apierror.New(apierror.QuotaExceeded, "team %q: %d streams of events are open, the most that one team can have; end one", team, teamStreams)
			}
			refuse(w, r, err)
			return
		}
		defer a.streams.slots.giveBack(team, 1)
		s := streaming{w, http.NewResponseController(w)}
		_ = s.connection.SetReadDeadline(time.Time{})
		_ = s.connection.SetWriteDeadline(time.Time{})
		// Between two heartbeats the deadline of the last write has passed, and the end must be sent.
		defer func() { _ = s.connection.SetWriteDeadline(time.Now().Add(sendWait)) }()
		ctx, cancel := context.WithTimeout(r.Context(), a.streams.wait)
		defer cancel()
		stop := context.AfterFunc(a.Allocator.Serving(), cancel)
		defer stop()
		r = r.WithContext(ctx)
		h := a.newHold(r, false)
		for {
			err := h.next()
			if err == nil && !h.leader.Here {
				if e := h.forward(s, r, a.streams.wait+leaderSlack); e == nil {
					return
				} else if h.hasFailed(e, true) {
					continue
				}
			}
			if err == nil {
				err = o.CheckQuery(r.URL.Query())
			}
			if err == nil {
				err = f(s, r)
			}
			if e := a.toError(o, r, err); e != nil {
				refuse(s, r, e)
			}
			return
		}
	}
}

func streamHeader(h http.Header) {
	h.Set("Content-Type", "text/event-stream")
	h.Set("Cache-Control", "no-store")
	h.Set("X-Accel-Buffering", "no") // for proxies that would collect the answer
}

// sendEvents streams events as server-sent events. An error comes before the first byte.
func (a *api) sendEvents(w http.ResponseWriter, r *http.Request) error {
	ring, err := a.Allocator.Events()
	if err != nil {
		return err
	}
	at, ok, err := ring.Continue(r.Header.Get(lastEventID))
	if err != nil {
		return invalid("%s: %v", lastEventID, err)
	}
	query := r.URL.Query()
	s := &eventStream{w: w, ring: ring, caller: access.From(r.Context()), team: query.Get("team"), pool: query.Get("pool")}
	streamHeader(w.Header())
	if !ok {
		s.gap(at, openapi.LeaderChanged)
	}
	s.position(at)
	tick := time.NewTicker(heartbeat)
	defer tick.Stop()
	for s.err == nil {
		next, lost, changed := ring.After(at, batch)
		if !a.still(r) {
			return nil // the client is refused when it connects again
		}
		if lost > 0 {
			s.gap(next[0].Number-1, openapi.Overwritten)
		}
		for i := range next {
			s.send(&next[i])
			at = next[i].Number
		}
		s.flush()
		if len(next) > 0 {
			continue
		}
		select {
		case <-changed:
		case <-tick.C:
			s.position(at)
		case <-ring.Over():
			return nil
		case <-r.Context().Done():
			return nil
		}
	}
	return nil
}

// eventStream writes one stream. err is the first error of the connection.
type eventStream struct {
	w      http.ResponseWriter
	ring   *events.Ring
	caller access.Caller
	// team and pool select events, "" for all.
	team, pool string
	unsent     bool
	err        error
}

// send writes an event that the stream selects and its caller may see.
func (s *eventStream) send(e *events.Event) {
	if !s.caller.Sees(e.Team) || s.team != "" && s.team != e.Team || s.pool != "" && s.pool != e.Pool {
		return
	}
	s.write(string(e.Type), e.Number, openapi.SandboxEvent{
		Type: openapi.SandboxEventType(e.Type), At: e.At, SandboxID: e.SandboxID, Pool: e.Pool, Team: e.Team, User: e.User, Reason: e.Reason,
	})
}

// gap says that events before a position may be lost.
func (s *eventStream) gap(at uint64, why openapi.EventGapReason) {
	s.write("gap", at, openapi.EventGap{Reason: why, Message: "events may be lost; read GET /v1/sandboxes to see what is now"})
}

func (s *eventStream) write(name string, number uint64, data any) {
	raw, err := encode(data)
	if s.err == nil {
		s.err = err
	}
	s.print("id: %s\nevent: %s\ndata: %s\n\n", s.ring.ID(number), name, raw)
}

// position sends a comment that keeps the connection open, and the position without an event. A
// client that reconnects continues there, although its filter may have selected nothing.
func (s *eventStream) position(at uint64) { s.print(": heartbeat\nid: %s\n\n", s.ring.ID(at)) }

func (s *eventStream) print(format string, args ...any) {
	if s.err == nil {
		_, s.err = fmt.Fprintf(s.w, format, args...)
		s.unsent = true
	}
}

// flush sends what was written.
func (s *eventStream) flush() {
	if s.err == nil && s.unsent {
		s.err = http.NewResponseController(s.w).Flush()
		s.unsent = false
	}
}
