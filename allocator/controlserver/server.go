package controlserver

import (
	"context"
	"errors"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/berth-sandbox/berth/allocator/core"
	controlv1 "github.com/berth-sandbox/berth/api/control/v1"
	"github.com/berth-sandbox/berth/internal/bootclock"
)

const (
	// queueSize bounds the messages that wait for one router. A burst of a thousand claims and as
	// many releases fits several times over. A change of the ports of a pool with more sandboxes
	// than this may cut off every router at once. They rejoin within moments, keep their routes
	// meanwhile, and get the new ports with the snapshot.
	queueSize = 8 << 10
	// snapshotPart is the number of routes in one message: well below gRPC's default limit of 4 MiB
	// at about 80 bytes each, or 280 bytes with the most ports that a pool can name.
	snapshotPart = 5_000
	// maxDead bounds the routers that one message may report as dead.
	maxDead = 1000
	// maxActivities bounds the sandboxes in one message.
	maxActivities = 5_000
	// joinWait bounds the wait for the Join of a new stream.
	joinWait = 5 * time.Second
)

// Leader is the leading allocator behind the server. Its methods may be called concurrently.
type Leader interface {
	Submit(core.Event)
	// Valid reports whether the lease is certainly held.
	Valid() bool
	// Term returns the leader's term.
	Term() uint64
	// Journal returns the ID of the journal, Began the position at which the term began, and
	// Position the current end of the journal.
	Journal() string
	Began() uint64
	Position() uint64
	// Restored reports that the journal was restored from a backup: a router has seen more of it,
	// or a journal that was begun after it, up to this term. The leader begins the journal anew and
	// ends.
	Restored(term uint64)
}

// Server serves the control protocol. All methods may be called concurrently.
type Server struct {
	controlv1.UnimplementedControlServer
	log *zap.Logger
	// maxStale is how long a fence waits for a router after its last ping.
	maxStale time.Duration
	// leaderAddress returns the control address of the leader, "" if unknown.
	leaderAddress func() string

	mu       sync.Mutex
	leader   Leader // nil while this replica follows
	streams  map[uint64]*stream
	lastID   uint64
	stopping chan struct{}
}

type stream struct {
	id    uint64
	queue chan []*controlv1.AllocatorMessage
	// cut is closed when the stream must end. err is the reason.
	cut  chan struct{}
	once sync.Once
	err  error
	// ponged is the time of the last pong, or of the join.
	ponged atomic.Int64 // bootclock
}

func (s *stream) end(err error) {
	s.once.Do(func() {
		s.err = err
		close(s.cut)
	})
}

// New returns a Server that follows. maxStale bounds how long a router may serve routes after its
// last answered ping: a router with a longer time is refused, because no fence would wait for it.
func New(maxStale time.Duration, leaderAddress func() string, log *zap.Logger) *Server {
	return &Server{
		log: log, maxStale: maxStale, leaderAddress: leaderAddress,
		streams: map[uint64]*stream{}, stopping: make(chan struct{}),
	}
}

// Lead makes this replica serve sessions. It is final: a replica that loses the lease ends its
// process.
func (s *Server) Lead(l Leader) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.leader = l
}

// Stop ends all streams, including those that begin later. It must be called once.
func (s *Server) Stop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	close(s.stopping)
}

// Session implements the control protocol.
func (s *Server) Session(rpc grpc.BidiStreamingServer[controlv1.RouterMessage, controlv1.AllocatorMessage]) error {
	s.mu.Lock()
	leader := s.leader
	s.mu.Unlock()
	if leader == nil {
		return rpc.Send(&controlv1.AllocatorMessage{Message: &controlv1.AllocatorMessage_NotLeader{
			NotLeader: &controlv1.NotLeader{LeaderAddress: s.leaderAddress()},
		}})
	}
	// Recv has no deadline, so it runs in a goroutine beside this function, which ends the stream
	// by returning.
	incoming := make(chan *controlv1.RouterMessage)
	failed := make(chan error, 1)
	readCtx, stopReading := context.WithCancel(rpc.Context())
	go func() {
		for {
			m, err := rpc.Recv()
			if err != nil {
				failed <- err
				return
			}
			select {
			case incoming <- m:
			case <-readCtx.Done():
				return
			}
		}
	}()
	// The reader is not waited for: grpc cancels the stream, and with it Recv, when this function
	// has returned.
	defer stopReading()

	var join *controlv1.Join
	select {
	case m := <-incoming:
		join = m.GetJoin()
	case err := <-failed:
		return err
	case <-s.stopping:
		return status.Error(codes.FailedPrecondition, "this replica is stopping")
	case <-time.After(joinWait):
	}
	switch {
	case join == nil:
		return status.Error(codes.InvalidArgument, "the first message must be Join")
	case !instanceID.MatchString(join.GetInstanceId()):
		return status.Errorf(codes.InvalidArgument, "join.instance_id %q: must be 16 to 64 characters of a-z, 0-9 and -", join.GetInstanceId())
	case !leader.Valid():
		// Its first pong would end the stream again: joins and leaves would follow each other, in
		// the log and in the core, while the lease is in doubt.
		return errUnsure
	}
	earlier, err := s.checkSeen(leader, join)
	if err != nil {
		return err
	}
	if earlier != "" {
		// Also for a router that is refused below: other routers of that journal may serve too.
		leader.Submit(core.EarlierSeen{Journal: earlier})
	}
	if err := s.checkMaxStale(join); err != nil {
		return err
	}
	if !join.GetLooks() {
		s.log.Warn("a router of an earlier version cannot report idleness; while it is connected no sandbox that it can route to is released for being idle",
			zap.String("session", join.GetInstanceId()))
	}

	st := s.add()
	defer s.remove(st)
	session := join.GetInstanceId()
	from := addressOf(rpc.Context())
	leader.Submit(core.SessionJoined{Session: session, Stream: st.id, From: from})
	defer leader.Submit(core.SessionLeft{Session: session, Stream: st.id})
	s.log.Info("router joined", zap.String("session", session), zap.String("address", from))
	err = s.serve(rpc, leader, st, session, incoming, failed)
	s.log.Info("router left", zap.String("session", session), zap.Error(err))
	return err
}

func (s *Server) serve(rpc grpc.BidiStreamingServer[controlv1.RouterMessage, controlv1.AllocatorMessage], leader Leader, st *stream, session string, incoming <-chan *controlv1.RouterMessage, failed <-chan error) error {
	// Sending may block on a slow router; the router's messages must not wait for that.
	sending := make(chan error, 1)
	go func() { sending <- s.send(rpc, leader, st) }()
	defer st.end(nil) // like Recv, a blocked Send ends after the return
	for {
		select {
		case m := <-incoming:
			switch m := m.GetMessage().(type) {
			case *controlv1.RouterMessage_Ack:
				leader.Submit(core.SessionAck{Session: session, Stream: st.id, Sequence: m.Ack.GetSequence()})
			case *controlv1.RouterMessage_Resolve:
				leader.Submit(core.Resolve{Session: session, Stream: st.id, ID: m.Resolve.GetSandboxId()})
			case *controlv1.RouterMessage_Ping:
				leader.Submit(core.SessionPing{Session: session, Stream: st.id, Nonce: m.Ping.GetNonce()})
			case *controlv1.RouterMessage_Goodbye:
				if !leader.Valid() {
					return errUnsure
				}
				leader.Submit(core.SessionGoodbye{Session: session, Stream: st.id, Looked: m.Goodbye.GetLooked()})
				return s.leave(st, failed, sending)
			case *controlv1.RouterMessage_Report:
				r, err := report(st.id, m.Report)
				if err != nil {
					return err
				}
				leader.Submit(r)
			case *controlv1.RouterMessage_Quiesced:
				q, err := quiesced(st.id, m.Quiesced)
				if err != nil {
					return err
				}
				leader.Submit(q)
			case *controlv1.RouterMessage_Probed:
				leader.Submit(core.Probed{Stream: st.id, ID: m.Probed.GetSandboxId(), Busy: m.Probed.GetBusy()})
			case *controlv1.RouterMessage_Dead:
				if err := checkDead(m.Dead, session); err != nil {
					return err // before any of it takes effect
				}
				for _, id := range m.Dead.GetInstanceIds() {
					s.log.Info("router reported dead", zap.String("session", id), zap.String("by", session))
					leader.Submit(core.SessionDead{Session: id, By: session})
				}
			case *controlv1.RouterMessage_Join:
				return status.Error(codes.InvalidArgument, "a second Join on one stream")
			}
		case err := <-failed:
			if errors.Is(err, io.EOF) {
				return nil // the router has closed its side
			}
			return err
		case err := <-sending:
			return err
		case <-st.cut:
			return st.err
		case <-s.stopping:
			return status.Error(codes.FailedPrecondition, "this replica is stopping")
		}
	}
}

// leave keeps the stream of a router that said Goodbye until the core closes it, because the
// Goodbye is durable, and then returns nil. The router takes that end of the stream as the
// acknowledgement. After any other end it looks for another leader, because a deposed leader loses
// what it has not committed.
func (s *Server) leave(st *stream, failed, sending <-chan error) error {
	for {
		select {
		case err := <-failed:
			if !errors.Is(err, io.EOF) {
				return err
			}
			failed = nil // the router has closed its side, and waits
		case err := <-sending:
			return err
		case <-st.cut:
			return st.err
		case <-s.stopping:
			return status.Error(codes.FailedPrecondition, "this replica is stopping")
		}
	}
}

// send sends the stream's queue to the router.
func (s *Server) send(rpc grpc.BidiStreamingServer[controlv1.RouterMessage, controlv1.AllocatorMessage], leader Leader, st *stream) error {
	for {
		select {
		case <-st.cut:
			return st.err
		case messages := <-st.queue:
			for _, m := range messages {
				// Checked at the last moment. A pong of a deposed leader would let a router serve
				// outdated routes, and its snapshot would move the router to an earlier journal.
				if (m.GetPong() != nil || m.GetSnapshot() != nil) && !leader.Valid() {
					return errUnsure
				}
				m.Journal, m.Position = leader.Journal(), leader.Position()
				if err := rpc.Send(m); err != nil {
					return err
				}
				if m.GetPong() != nil {
					st.ponged.Store(int64(bootclock.Now()))
				}
			}
		}
	}
}

func (s *Server) add() *stream {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lastID++
	st := &stream{id: s.lastID, queue: make(chan []*controlv1.AllocatorMessage, queueSize), cut: make(chan struct{})}
	st.ponged.Store(int64(bootclock.Now()))
	s.streams[st.id] = st
	return st
}

// Routers returns the number of connected routers, and the longest time since the last pong, or the
// join, of one of them.
func (s *Server) Routers() (connected int, pongAge time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := bootclock.Now()
	for _, st := range s.streams {
		pongAge = max(pongAge, now-time.Duration(st.ponged.Load()))
	}
	return len(s.streams), pongAge
}

func (s *Server) remove(st *stream) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.streams, st.id)
}

func (s *Server) push(id uint64, messages ...*controlv1.AllocatorMessage) {
	s.mu.Lock()
	st := s.streams[id]
	s.mu.Unlock()
	if st == nil {
		return // it has ended, and the core gets its SessionLeft
	}
	select {
	case st.queue <- messages:
	default:
		s.cut(id, status.Error(codes.ResourceExhausted, "more messages wait for this router than its queue holds; join again"))
	}
}

// cut ends a stream and drops later messages. A message after a gap would be acknowledged as if
// nothing were missing.
func (s *Server) cut(id uint64, err error) {
	s.mu.Lock()
	st := s.streams[id]
	delete(s.streams, id)
	s.mu.Unlock()
	if st != nil {
		st.end(err)
	}
}
