package link

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"
	"google.golang.org/grpc"

	controlv1 "github.com/berth-sandbox/berth/api/control/v1"
	"github.com/berth-sandbox/berth/lastactive"
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
	applied  uint64                   // sequence of the last message to acknowledge
	acked    chan struct{}            // has room for one: applied has moved
	snapped  chan struct{}            // has room for one: a snapshot has taken effect
	pings    map[uint64]time.Duration // nonce -> when it was sent
	nonce    uint64
	lastPong time.Duration

	// dead are the neighbours that were said to be dead before the ping of this nonce.
	dead      []string
	deadNonce uint64

	// left: Goodbye was said, or must not be. The writer's own until wrote is closed.
	left  bool
	wrote chan struct{}

	// The reader's own:
	snapshot map[string]routecache.Route // parts received so far
	joined   bool                        // a snapshot was complete and is in effect
	sequence uint64                      // of the last message that had one
}

// anyAddress has gRPC begin with a random one of the addresses that a name resolves
// to. Otherwise each attempt would begin with the same replica.
const anyAddress = `{"loadBalancingConfig":[{"pick_first":{"shuffleAddressList":true}}]}`

// session runs one stream to its end. leader is the leader's address, as told
// by a replica that does not lead. patience bounds the time for the connection. When
// ctx ends Goodbye is said, and when last ends everything is given up.
func (l *Link) session(ctx, last context.Context, address string, patience time.Duration) (leader string, err error) {
	conn, err := grpc.NewClient(address, append([]grpc.DialOption{grpc.WithDefaultServiceConfig(anyAddress)}, l.o.Dial...)...)
	if err != nil {
		return "", fmt.Errorf("connect to the allocator: %w", err)
	}
	defer conn.Close()
	s := &session{
		link:     l,
		out:      make(chan *controlv1.RouterMessage, outQueue),
		acked:    make(chan struct{}, 1),
		snapped:  make(chan struct{}, 1),
		wrote:    make(chan struct{}),
		pings:    map[uint64]time.Duration{},
		lastPong: l.o.Now(),
		snapshot: map[string]routecache.Route{},
	}
	// The stream outlives ctx by the Goodbye.
	streamCtx, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	var helpers sync.WaitGroup
	defer helpers.Wait()
	defer cancel(nil)
	defer context.AfterFunc(last, func() { cancel(errors.New("the time for a Goodbye is over")) })()
	// What ended the stream from this side says more than "canceled".
	failed := func(what string, err error) error {
		if cause := context.Cause(streamCtx); cause != nil {
			err = cause
		}
		return fmt.Errorf("%s: %w", what, err)
	}
	// This waits for the connection.
	impatient := time.AfterFunc(patience, func() { cancel(fmt.Errorf("%w within %v", errConnect, patience)) })
	s.stream, err = controlv1.NewControlClient(conn).Session(streamCtx)
	impatient.Stop()
	if err != nil {
		return "", failed("open the control stream", err)
	}
	helpers.Go(func() { cancel(s.watch(ctx, streamCtx)) })
	helpers.Go(func() {
		defer close(s.wrote)
		// io.EOF: the stream has ended, and the reader is about to learn why.
		if err := s.write(ctx, streamCtx); err != nil && !errors.Is(err, io.EOF) {
			cancel(err)
		}
	})
	defer l.setCurrent(nil)
	for {
		m, err := s.stream.Recv()
		if errors.Is(err, io.EOF) {
			cancel(nil)
			if <-s.wrote; s.left {
				return "", errLeft
			}
			return "", errors.New("the allocator ended the control stream")
		}
		if err != nil {
			return "", failed("control stream", err)
		}
		if to := m.GetNotLeader(); to != nil {
			if to.GetLeaderAddress() == "" {
				return "", fmt.Errorf("%w, and knows of no leader at the moment", errNoLeader)
			}
			return to.GetLeaderAddress(), nil
		}
		if err := s.apply(m); err != nil {
			return "", err
		}
	}
}

// watch returns why the stream must end, or nil once streamCtx has ended. It
// stands beside the reader and the writer because either of them may be stuck in
// a stream that does not move.
func (s *session) watch(ctx, streamCtx context.Context) error {
	ticker := time.NewTicker(s.link.o.PingEvery)
	defer ticker.Stop()
	stopping := ctx.Done()
	var deadline <-chan time.Time
	for {
		select {
		case <-streamCtx.Done():
			return nil
		case <-stopping:
			stopping, deadline = nil, time.After(goodbyeWait)
		case <-deadline:
			return errors.New("the allocator did not end the stream after Goodbye")
		case <-ticker.C:
			s.mu.Lock()
			silent := s.link.o.Now() - s.lastPong
			s.mu.Unlock()
			if silent > pingsMissed*s.link.o.PingEvery {
				return fmt.Errorf("the allocator has answered no ping for %v", silent)
			}
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

// write says Join and asks for freshness, and then sends what is queued,
// acknowledgements, reports and pings, until streamCtx ends. When ctx ends it says
// Goodbye, which nothing may follow.
func (s *session) write(ctx, streamCtx context.Context) error {
	err := s.stream.Send(&controlv1.RouterMessage{Message: &controlv1.RouterMessage_Join{
		Join: s.link.join(),
	}})
	if err != nil {
		return err
	}
	if err := s.tick(); err != nil {
		return err
	}
	ticker := time.NewTicker(s.link.o.PingEvery)
	defer ticker.Stop()
	reported := false // all that there is
	for {
		var m *controlv1.RouterMessage
		select {
		case <-streamCtx.Done():
			return nil
		case <-ctx.Done():
			if unread := s.link.o.Answers.Unread(); unread > 0 {
				s.link.o.Log.Warn("ends without a Goodbye: Envoy may not have read all answers, so the allocator must wait for what this router may have admitted", zap.Int("unread", unread))
			} else if err := s.goodbye(reported); err != nil {
				return err
			}
			s.left = true
			return s.stream.CloseSend()
		case m = <-s.out:
		case <-s.acked:
			m = s.ack()
		case <-s.snapped:
			if err := s.report(s.link.o.Activity.Report(true), whole{complete: true}); err != nil {
				return err
			}
			reported = true
			continue
		case <-ticker.C:
			if reported {
				if err := s.report(s.link.o.Activity.Report(false), whole{}); err != nil {
					return err
				}
			}
			if err := s.tick(); err != nil {
				return err
			}
			continue
		}
		if err := s.stream.Send(m); err != nil {
			return err
		}
	}
}

// goodbye reports what was in use, and says that this router admits nothing any more.
// reported: this session has been told everything once.
func (s *session) goodbye(reported bool) error {
	activities, doubt, handover := s.link.o.Activity.Final()
	if !reported {
		activities = s.link.o.Activity.Report(true)
	}
	if err := s.report(activities, whole{handover: handover}); err != nil {
		return err
	}
	return s.stream.Send(&controlv1.RouterMessage{Message: &controlv1.RouterMessage_Goodbye{Goodbye: &controlv1.Goodbye{Doubt: doubt, EnvoyEnded: !handover}}})
}

// reportMost is how many activities one report has: the protocol's bound.
const reportMost = 5000

// whole says of a report: complete, that it is all that there is, which is said with its
// last part, also if there is nothing; handover, that what is in use may go on without
// this router.
type whole struct{ complete, handover bool }

// report sends activities, in parts.
func (s *session) report(activities []lastactive.Activity, of whole) error {
	for len(activities) > 0 || of.complete {
		part := activities[:min(len(activities), reportMost)]
		activities = activities[len(part):]
		last := of.complete && len(activities) == 0
		if err := s.stream.Send(&controlv1.RouterMessage{Message: &controlv1.RouterMessage_Report{
			Report: &controlv1.Report{Activities: fromActivities(part), Complete: last, Handover: of.handover},
		}}); err != nil {
			return err
		}
		if last {
			return nil
		}
	}
	return nil
}

func fromActivities(activities []lastactive.Activity) []*controlv1.Activity {
	all := make([]*controlv1.Activity, 0, len(activities))
	for _, a := range activities {
		all = append(all, &controlv1.Activity{
			SandboxId: a.ID, AgeMillis: uint64(a.Age / time.Millisecond), QuietMillis: uint64(a.Quiet / time.Millisecond),
			Open: uint32(min(a.Open, math.MaxInt32)), SettlesMillis: roundedUp(a.Settles),
		})
	}
	return all
}

// roundedUp is a duration in milliseconds, 0 only if it is 0.
func roundedUp(d time.Duration) uint64 { return uint64((d + time.Millisecond - 1) / time.Millisecond) }

// quiesce stops admissions and says how the sandboxes were used until then.
func (s *session) quiesce(q *controlv1.Quiesce) {
	ids, room := q.GetSandboxIds(), true
	for _, id := range ids {
		room = s.link.o.Cache.Quiesce(id) && room
	}
	if !room {
		s.link.o.Log.Warn("too many sandboxes are quiesced; the question is not answered", zap.Uint64("number", q.GetNumber()))
		return
	}
	activities, doubt := s.link.o.Activity.Ask(ids)
	if !s.send(&controlv1.RouterMessage{Message: &controlv1.RouterMessage_Quiesced{Quiesced: &controlv1.Quiesced{
		Number: q.GetNumber(), Activities: fromActivities(activities),
		DoubtMillis: roundedUp(doubt), // 0 is no doubt
	}}}) {
		s.link.o.Log.Warn("the queue to the allocator is full; the question whether sandboxes are idle is not answered", zap.Uint64("number", q.GetNumber()))
	}
}

// tick says which neighbours are dead, if that was not said on this stream, and
// sends a ping.
func (s *session) tick() error {
	dead := s.link.o.Neighbours.Dead()
	dead = dead[:min(len(dead), deadMost)] // the others follow when these are forgotten
	ping := s.ping()
	s.mu.Lock()
	news := len(dead) > 0 && !slices.Equal(dead, s.dead)
	if news {
		s.dead, s.deadNonce = dead, ping.GetPing().GetNonce()
	}
	s.mu.Unlock()
	if news {
		if err := s.stream.Send(&controlv1.RouterMessage{Message: &controlv1.RouterMessage_Dead{Dead: &controlv1.Dead{InstanceIds: dead}}}); err != nil {
			return err
		}
	}
	return s.stream.Send(ping)
}

// buried forgets the dead neighbours that were named before a ping that was answered.
func (s *session) buried(nonce uint64) {
	s.mu.Lock()
	var ids []string
	if len(s.dead) > 0 && nonce >= s.deadNonce {
		ids, s.dead = s.dead, nil
	}
	s.mu.Unlock()
	if err := s.link.o.Neighbours.Forget(ids); err != nil {
		s.link.o.Log.Warn("the lock file of a router that has ended stays, and it is reported again", zap.Error(err))
	}
}

func (s *session) ack() *controlv1.RouterMessage {
	s.mu.Lock()
	defer s.mu.Unlock()
	return &controlv1.RouterMessage{Message: &controlv1.RouterMessage_Ack{Ack: &controlv1.Ack{Sequence: s.applied}}}
}

// ping makes the next ping. What is noted is a moment before it is sent, because
// freshness is counted from there.
func (s *session) ping() *controlv1.RouterMessage {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.nonce++
	s.pings[s.nonce] = s.link.o.Now()
	return &controlv1.RouterMessage{Message: &controlv1.RouterMessage_Ping{Ping: &controlv1.Ping{Nonce: s.nonce}}}
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
	if err := l.accept(m, !s.joined); err != nil {
		return err
	}
	if !s.joined && m.GetSnapshot() == nil {
		return fmt.Errorf("control stream: expected a snapshot first, got %T", m.GetMessage())
	}
	// An acknowledgement counts for everything before it, so nothing may be missing.
	sequence := m.GetSequence()
	if sequence != 0 && sequence != s.sequence+1 {
		return fmt.Errorf("control stream: message %d follows message %d", sequence, s.sequence)
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
			routes := s.snapshot
			l.o.Cache.Replace(routes)
			l.o.Activity.Retain(func(id string) bool { _, ok := routes[id]; return ok })
			l.o.Log.Info("joined", zap.Uint64("term", l.Term()), zap.Int("routes", len(routes)))
			s.snapshot, s.joined = map[string]routecache.Route{}, true
			l.setCurrent(s)
			select {
			case s.snapped <- struct{}{}:
			default: // the writer has been told already
			}
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
			l.o.Activity.Forget(id)
		}
	case *controlv1.AllocatorMessage_Quiesce:
		s.quiesce(m.Quiesce)
	case *controlv1.AllocatorMessage_Resume:
		for _, id := range m.Resume.GetSandboxIds() {
			l.o.Cache.Resume(id)
		}
	case *controlv1.AllocatorMessage_Resolved:
		// Also what an answer of a kind not known here comes down to: no route.
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
		case *controlv1.Resolved_Starting:
			answer.Status = routecache.Starting
			answer.Hold = time.Duration(a.Starting.GetHoldMillis()) * time.Millisecond
		case *controlv1.Resolved_Unknown:
		}
		l.o.Cache.Resolve(m.Resolved.GetSandboxId(), answer)
	case *controlv1.AllocatorMessage_Pong:
		if sent, ok := s.pong(m.Pong.GetNonce()); ok {
			l.fresh(sent + l.o.MaxStale)
			l.closeServe()
			s.buried(m.Pong.GetNonce())
		}
	}
	if sequence != 0 {
		s.sequence = sequence
		l.o.Answers.Barrier(func() { s.acknowledge(sequence) })
	}
	return nil
}

// acknowledge has it said that everything up to a message is in effect for good.
func (s *session) acknowledge(sequence uint64) {
	s.mu.Lock()
	s.applied = sequence
	s.mu.Unlock()
	select {
	case s.acked <- struct{}{}:
	default: // the writer has been told already and will read applied
	}
}
