package controlclient

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
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
// Goodbye: it does so when that is in its journal.
const goodbyeWait = 3 * time.Second

// lastLookWait bounds the look before a Goodbye, which a shutdown leaves 2 s for in all.
const lastLookWait = time.Second

// askWait bounds the looks before a Quiesced: requests are held meanwhile.
const askWait = 1200 * time.Millisecond

// probesMost bounds the sandboxes that are probed at one time.
const probesMost = 64

type stream = grpc.BidiStreamingClient[controlv1.RouterMessage, controlv1.AllocatorMessage]

// session is one stream.
type session struct {
	link    *Client
	stream  stream
	out     chan *controlv1.RouterMessage // closed by nobody; the writer stops with its context
	helpers sync.WaitGroup

	mu       sync.Mutex
	applied  uint64                   // sequence of the last message to acknowledge
	acked    chan struct{}            // has room for one: applied has moved
	snapped  chan struct{}            // has room for one: a snapshot has taken effect
	pings    map[uint64]time.Duration // nonce -> when it was sent
	nonce    uint64
	lastPong time.Duration
	pongs    []pong // the last ones

	// dead are the neighbours that were said to be dead before the ping of this nonce.
	dead      []string
	deadNonce uint64

	// left: Goodbye was said, or must not be. The writer's own until wrote is closed.
	left  bool
	said  chan struct{} // closed when that is so
	wrote chan struct{}

	questions chan *controlv1.Quiesce // has room for one, which is the newest
	probes    atomic.Int64            // that run

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
func (l *Client) session(ctx, last context.Context, address string, patience time.Duration) (leader string, err error) {
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
		said:     make(chan struct{}),
		wrote:    make(chan struct{}),
		pings:    map[uint64]time.Duration{},
		lastPong: l.o.Now(),
		snapshot: map[string]routecache.Route{},

		questions: make(chan *controlv1.Quiesce, 1),
	}
	// The stream outlives ctx by the Goodbye.
	streamCtx, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	defer s.helpers.Wait()
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
	s.helpers.Go(func() { cancel(s.watch(streamCtx)) })
	s.helpers.Go(func() { s.answerQuestions(streamCtx) })
	s.helpers.Go(func() {
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
		if err := s.apply(streamCtx, m); err != nil {
			return "", err
		}
	}
}

// watch returns why the stream must end, or nil once streamCtx has ended. It
// stands beside the reader and the writer because either of them may be stuck in
// a stream that does not move.
func (s *session) watch(streamCtx context.Context) error {
	ticker := time.NewTicker(s.link.o.PingEvery)
	defer ticker.Stop()
	said := s.said
	var deadline <-chan time.Time
	for {
		select {
		case <-streamCtx.Done():
			return nil
		case <-said:
			said, deadline = nil, time.After(goodbyeWait)
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
		Join: s.link.join(ctx),
	}})
	if err != nil {
		return err
	}
	if err := s.tick(); err != nil {
		return err
	}
	ticker := time.NewTicker(s.link.o.PingEvery)
	defer ticker.Stop()
	var looked <-chan struct{} // nil until all that there is was reported
	for {
		var m *controlv1.RouterMessage
		select {
		case <-streamCtx.Done():
			return nil
		case <-ctx.Done():
			if unread := s.link.o.Answers.Unread(); unread > 0 {
				s.link.o.Log.Warn("ends without a Goodbye: Envoy may not have read all answers, so the allocator must wait for what this router may have admitted", zap.Int("unread", unread))
			} else if err := s.goodbye(streamCtx); err != nil {
				return err
			}
			s.left = true
			close(s.said)
			return s.stream.CloseSend()
		case m = <-s.out:
		case <-s.acked:
			m = s.ack()
		case <-s.snapped:
			if err := s.report(s.link.o.Activity.Report(true)); err != nil {
				return err
			}
			looked = s.link.o.Activity.Looked()
			continue
		case <-looked:
			if err := s.report(s.link.o.Activity.Report(false)); err != nil {
				return err
			}
			continue
		case <-ticker.C:
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

// goodbye looks for what is in use once more, reports it, and says that this router admits
// nothing any more.
func (s *session) goodbye(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, lastLookWait)
	defer cancel()
	last := s.link.o.Activity.Last(ctx)
	if last.Blind != "" {
		s.link.o.Log.Warn("ends without a last look: the allocator takes every sandbox for used until now", zap.String("reason", last.Blind))
	}
	if err := s.report(last); err != nil {
		return err
	}
	return s.stream.Send(&controlv1.RouterMessage{Message: &controlv1.RouterMessage_Goodbye{Goodbye: &controlv1.Goodbye{Looked: last.Blind == ""}}})
}

// reportMost is how many activities one report has: the protocol's bound.
const reportMost = 5000

// report sends what a look has shown, in parts, also if that is nothing.
func (s *session) report(r lastactive.Report) error {
	for last := false; !last; {
		part := r.Activities[:min(len(r.Activities), reportMost)]
		r.Activities = r.Activities[len(part):]
		last = len(r.Activities) == 0
		m := &controlv1.Report{Activities: fromActivities(part)}
		switch {
		case !last:
		case r.Blind != "":
			m.Blind = reason(r.Blind)
		default:
			m.Gateway, m.Nonce = r.Gateway, s.heard(r.Began)
			m.TookMillis = uint64((r.Took + time.Millisecond - 1) / time.Millisecond)
		}
		if err := s.stream.Send(&controlv1.RouterMessage{Message: &controlv1.RouterMessage_Report{Report: m}}); err != nil {
			return err
		}
	}
	return nil
}

// reasonMost is how long a reason may be: the protocol's bound.
const reasonMost = 256

// reason is s in the form that the protocol wants.
func reason(s string) string { return strings.ToValidUTF8(s[:min(len(s), reasonMost)], "") }

func fromActivities(activities []lastactive.Activity) []*controlv1.Activity {
	all := make([]*controlv1.Activity, 0, len(activities))
	for _, a := range activities {
		m := &controlv1.Activity{SandboxId: a.ID, AgeMillis: ageMillis(a.Age), Open: uint32(min(a.Open, math.MaxInt32)), Kind: string(a.Kind)}
		if a.Addr.IsValid() {
			m.PodIp = a.Addr.String()
		}
		all = append(all, m)
	}
	return all
}

// ageMillis is an age, rounded down. What is not in use stays that, however short ago it
// was: 0 means that it may go on without this router.
func ageMillis(age time.Duration) uint64 {
	if age <= 0 {
		return 0
	}
	return uint64(max(age, time.Millisecond) / time.Millisecond)
}

// quiesce stops admissions, and has it asked how the sandboxes were used until then. It
// does not wait for that: what comes on the stream next must not wait for Envoy.
func (s *session) quiesce(q *controlv1.Quiesce) {
	room := true
	for _, question := range q.GetQuestions() {
		room = s.link.o.Cache.Quiesce(question.GetSandboxId()) && room
	}
	if !room {
		s.link.o.Log.Warn("too many sandboxes are quiesced; the question is not answered", zap.Uint64("number", q.GetNumber()))
		return
	}
	select {
	case earlier := <-s.questions:
		s.link.o.Log.Warn("a newer question whether sandboxes are idle has come; this one is not answered", zap.Uint64("number", earlier.GetNumber()))
	default:
	}
	s.questions <- q // only the reader puts something there
}

// answerQuestions says how sandboxes were used, one question at a time, until ctx ends.
func (s *session) answerQuestions(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case q := <-s.questions:
			s.answer(&controlv1.RouterMessage{Message: &controlv1.RouterMessage_Quiesced{Quiesced: s.ask(ctx, q)}})
		}
	}
}

func (s *session) ask(ctx context.Context, q *controlv1.Quiesce) *controlv1.Quiesced {
	questions := make([]lastactive.Question, 0, len(q.GetQuestions()))
	for _, question := range q.GetQuestions() {
		addr, _ := netip.ParseAddr(question.GetPodIp()) // if there is none, it is asked by the ID alone
		questions = append(questions, lastactive.Question{ID: question.GetSandboxId(), Addr: addr.Unmap(), MinBytes: question.GetMinBytesPerMinute()})
	}
	ctx, cancel := context.WithTimeout(ctx, askWait)
	defer cancel()
	activities, err := s.link.o.Activity.Ask(ctx, questions)
	if err != nil {
		return &controlv1.Quiesced{Number: q.GetNumber(), Blind: reason(err.Error())}
	}
	return &controlv1.Quiesced{Number: q.GetNumber(), Activities: fromActivities(activities)}
}

// answer queues the answer to a question.
func (s *session) answer(m *controlv1.RouterMessage) {
	if !s.send(m) {
		s.link.o.Log.Warn("the queue to the allocator is full; a question is not answered", zap.String("answer", fmt.Sprintf("%T", m.GetMessage())))
	}
}

// probe has a sandbox asked whether it works. Beyond probesMost at a time it is not: the
// leader asks again.
func (s *session) probe(ctx context.Context, p *controlv1.Probe) {
	addr, err := netip.ParseAddr(p.GetPodIp())
	if err != nil || p.GetPort() == 0 || p.GetPort() > math.MaxUint16 || s.probes.Load() >= probesMost {
		return
	}
	s.probes.Add(1)
	s.helpers.Go(func() {
		defer s.probes.Add(-1)
		busy := s.link.o.Probe(ctx, netip.AddrPortFrom(addr.Unmap(), uint16(p.GetPort())), p.GetPath())
		s.answer(&controlv1.RouterMessage{Message: &controlv1.RouterMessage_Probed{Probed: &controlv1.Probed{SandboxId: p.GetSandboxId(), Busy: busy}}})
	})
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

// pong is one that was received.
type pong struct {
	nonce uint64
	at    time.Duration
}

// pongsMost is how many are kept. A report names one that came before a look, which takes
// 2 s at most.
const pongsMost = 16

// heard is the nonce of the newest pong that had been received when a look began; 0: none.
func (s *session) heard(began time.Duration) uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range slices.Backward(s.pongs) {
		if p.at < began {
			return p.nonce
		}
	}
	return 0
}

// pong returns the send time of the ping that was answered.
func (s *session) pong(nonce uint64) (sent time.Duration, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if sent, ok = s.pings[nonce]; ok {
		s.lastPong = s.link.o.Now()
		s.pongs = append(s.pongs[max(0, len(s.pongs)+1-pongsMost):], pong{nonce, s.lastPong})
		for n := range s.pings {
			if n <= nonce {
				delete(s.pings, n)
			}
		}
	}
	return sent, ok
}

// apply puts one message into effect.
func (s *session) apply(ctx context.Context, m *controlv1.AllocatorMessage) error {
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
			for id, r := range routes {
				l.o.Activity.Expect(id, r.Addr, r.MinBytes)
			}
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
		l.o.Activity.Expect(m.Route.GetSandboxId(), route.Addr, route.MinBytes)
	case *controlv1.AllocatorMessage_Release:
		for _, id := range m.Release.GetSandboxIds() {
			l.o.Cache.Release(id)
			l.o.Activity.Forget(id)
		}
	case *controlv1.AllocatorMessage_Quiesce:
		s.quiesce(m.Quiesce)
	case *controlv1.AllocatorMessage_Probe:
		s.probe(ctx, m.Probe)
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
