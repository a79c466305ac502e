package link

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"go.uber.org/zap"
	"google.golang.org/grpc"

	controlv1 "github.com/berth-sandbox/berth/api/control/v1"
	"github.com/berth-sandbox/berth/routecache"
)

// Pings a stream may leave unanswered before it is dropped.
const pingsMissed = 5

// goodbyeWait bounds how long the allocator may take to end the stream after a
// Goodbye.
const goodbyeWait = time.Second

type stream = grpc.BidiStreamingClient[controlv1.RouterMessage, controlv1.AllocatorMessage]

// session is one stream.
type session struct {
	link   *Link
	stream stream
	out    chan *controlv1.RouterMessage // closed by nobody; the writer stops with its context

	mu       sync.Mutex
	applied  uint64                   // sequence of the last message in effect
	acked    chan struct{}            // has room for one: applied has moved
	pings    map[uint64]time.Duration // nonce -> when it was sent
	nonce    uint64
	lastPong time.Duration

	snapshot map[string]routecache.Route // being received; nil once complete
	joined   bool
}

// session runs one stream to its end. A redirect is the leader's address, as
// told by a replica that does not lead.
func (l *Link) session(ctx context.Context, address string) (redirect string, err error) {
	conn, err := grpc.NewClient(address, l.o.Dial...)
	if err != nil {
		return "", fmt.Errorf("connect to the allocator: %w", err)
	}
	defer conn.Close()
	// The stream outlives ctx by the Goodbye.
	streamCtx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	st, err := controlv1.NewControlClient(conn).Session(streamCtx)
	if err != nil {
		return "", fmt.Errorf("open the control stream: %w", err)
	}
	s := &session{
		link: l, stream: st,
		out:      make(chan *controlv1.RouterMessage, outQueue),
		acked:    make(chan struct{}, 1),
		pings:    map[uint64]time.Duration{},
		lastPong: l.o.Now(),
		snapshot: map[string]routecache.Route{},
	}
	s.send(&controlv1.RouterMessage{Message: &controlv1.RouterMessage_Join{
		Join: &controlv1.Join{InstanceId: l.o.InstanceID, HighestTerm: l.Term()},
	}})
	var writer sync.WaitGroup
	writer.Go(func() {
		if err := s.write(ctx, streamCtx); err != nil {
			l.o.Log.Debug("control stream: write", zap.Error(err))
			cancel() // ends the reader too
		}
	})
	defer writer.Wait()
	defer cancel()
	defer l.setCurrent(nil)
	for {
		m, err := st.Recv()
		if errors.Is(err, io.EOF) {
			return "", errors.New("the allocator ended the control stream")
		}
		if err != nil {
			return "", fmt.Errorf("control stream: %w", err)
		}
		if to := m.GetNotLeader(); to != nil {
			if to.GetLeaderAddress() == "" {
				return "", errors.New("the allocator has no leader at the moment")
			}
			return to.GetLeaderAddress(), nil
		}
		if err := s.apply(m); err != nil {
			return "", err
		}
	}
}

// send queues a message and reports whether there was room.
func (s *session) send(m *controlv1.RouterMessage) bool {
	select {
	case s.out <- m:
		return true
	default:
		return false
	}
}

// write sends what is queued, acknowledgements and pings, until streamCtx ends.
// When ctx ends it says Goodbye.
func (s *session) write(ctx, streamCtx context.Context) error {
	ticker := time.NewTicker(s.link.o.PingEvery)
	defer ticker.Stop()
	goodbye := ctx.Done()
	var deadline <-chan time.Time
	for {
		var m *controlv1.RouterMessage
		select {
		case <-streamCtx.Done():
			return nil
		case <-deadline:
			return errors.New("the allocator did not end the stream after Goodbye")
		case <-goodbye:
			goodbye, deadline = nil, time.After(goodbyeWait)
			if err := s.stream.Send(&controlv1.RouterMessage{Message: &controlv1.RouterMessage_Goodbye{Goodbye: &controlv1.Goodbye{}}}); err != nil {
				return err
			}
			if err := s.stream.CloseSend(); err != nil {
				return err
			}
			continue
		case m = <-s.out:
		case <-s.acked:
			m = s.ack()
		case <-ticker.C:
			var err error
			if m, err = s.ping(); err != nil {
				return err
			}
		}
		if deadline != nil {
			continue // nothing may follow a Goodbye
		}
		if err := s.stream.Send(m); err != nil {
			return err
		}
		if m.GetJoin() != nil { // ask for freshness at once
			m, err := s.ping()
			if err == nil {
				err = s.stream.Send(m)
			}
			if err != nil {
				return err
			}
		}
	}
}

func (s *session) ack() *controlv1.RouterMessage {
	s.mu.Lock()
	defer s.mu.Unlock()
	return &controlv1.RouterMessage{Message: &controlv1.RouterMessage_Ack{Ack: &controlv1.Ack{Sequence: s.applied}}}
}

func (s *session) ping() (*controlv1.RouterMessage, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.link.o.Now()
	if now-s.lastPong > pingsMissed*s.link.o.PingEvery {
		return nil, errors.New("the allocator has stopped to answer pings")
	}
	s.nonce++
	s.pings[s.nonce] = now
	return &controlv1.RouterMessage{Message: &controlv1.RouterMessage_Ping{Ping: &controlv1.Ping{Nonce: s.nonce}}}, nil
}

// pong returns the send time of the ping that was answered.
func (s *session) pong(nonce uint64) (sent time.Duration, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if sent, ok = s.pings[nonce]; ok {
		s.lastPong = s.link.o.Now()
		for n := range s.pings {
			if n <= nonce {
				delete(s.pings, n)
			}
		}
	}
	return sent, ok
}

// apply puts one message into effect.
func (s *session) apply(m *controlv1.AllocatorMessage) error {
	l := s.link
	if !l.acceptTerm(m.GetTerm()) {
		return fmt.Errorf("control stream: a leader of term %d spoke, but term %d has begun", m.GetTerm(), l.Term())
	}
	if !s.joined && m.GetSnapshot() == nil {
		return fmt.Errorf("control stream: expected a snapshot first, got %T", m.GetMessage())
	}
	switch m := m.GetMessage().(type) {
	case *controlv1.AllocatorMessage_Snapshot:
		for _, r := range m.Snapshot.GetRoutes() {
			route, err := toRoute(r)
			if err != nil {
				return err
			}
			s.snapshot[r.GetSandboxId()] = route
		}
		if m.Snapshot.GetLast() {
			l.o.Cache.Replace(s.snapshot)
			l.o.Log.Info("joined", zap.Uint64("term", l.Term()), zap.Int("routes", len(s.snapshot)))
			s.snapshot, s.joined = map[string]routecache.Route{}, true
			l.setCurrent(s)
		}
	case *controlv1.AllocatorMessage_Route:
		route, err := toRoute(m.Route)
		if err != nil {
			return err
		}
		l.o.Cache.Put(m.Route.GetSandboxId(), route)
	case *controlv1.AllocatorMessage_Release:
		for _, id := range m.Release.GetSandboxIds() {
			l.o.Cache.Release(id)
			l.o.Forget(id)
		}
	case *controlv1.AllocatorMessage_Resolved:
		answer := routecache.Answer{Status: routecache.Unknown}
		switch a := m.Resolved.GetAnswer().(type) {
		case *controlv1.Resolved_Route:
			route, err := toRoute(a.Route)
			if err != nil {
				return err
			}
			answer = routecache.Answer{Status: routecache.Routable, Route: route}
		case *controlv1.Resolved_Gone:
			answer.Status = routecache.Gone
		case *controlv1.Resolved_Unknown:
		}
		l.o.Cache.Resolve(m.Resolved.GetSandboxId(), answer)
	case *controlv1.AllocatorMessage_Pong:
		if sent, ok := s.pong(m.Pong.GetNonce()); ok {
			l.o.Cache.SetFreshUntil(sent + l.o.MaxStale)
		}
	}
	if m.GetSequence() > 0 {
		s.mu.Lock()
		s.applied = m.GetSequence()
		s.mu.Unlock()
		select {
		case s.acked <- struct{}{}:
		default: // the writer has been told already and will read applied
		}
	}
	return nil
}
