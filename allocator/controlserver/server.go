package controlserver

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/credentials"
	controlv1 "github.com/berth-sandbox/berth/api/control/v1"
	"github.com/berth-sandbox/berth/api/metric"
	"github.com/berth-sandbox/berth/api/sandboxaccess"
	"github.com/berth-sandbox/berth/internal/bootclock"
	"github.com/berth-sandbox/berth/internal/loglimit"
	"github.com/berth-sandbox/berth/internal/options"
)

const (
	// queueSize bounds the messages that wait for one router. A burst of a thousand claims and as
	// many releases fits several times over. A change of the ports of a pool with more sandboxes
	// than this may cut off every router at once. They rejoin within moments, keep their routes
	// meanwhile, and get the new ports with the snapshot.
	queueSize = 8 << 10
	// snapshotPart is the number of routes in one message, at about 80 bytes each, or 800 bytes with the most ports and
	// the longest host that a claim can name. With rules for egress a route may have up to 600 KB, so no route is added to
	// snapshotBytes or more. gRPC's default limit is 4 MiB.
	snapshotPart  = 2_000
	snapshotBytes = 1 << 20
	// keysPart is the number of API keys in one message: at most 110 bytes each.
	keysPart = 20_000
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

// Keys are the API keys. Its methods may be called concurrently.
type Keys interface {
	// ByTeam returns the SHA-256 of each valid key by team, nil before the keys have been read, and a
	// channel that is closed when that has changed.
	ByTeam() (map[string][][sha256.Size]byte, <-chan struct{})
}

// Credentials are the values of the headers of pools. *credentials.Values implements it.
type Credentials interface {
	// All returns the values by name, nil before they have been read, and a channel that is closed when that has changed.
	All() (map[string]string, <-chan struct{})
}

// Options configure a Server. All are required except AccessKey, Keys and Credentials.
type Options struct {
	// MaxStale is how long a fence waits for a router after its last ping, at least. For a router that
	// serves its routes for longer it waits for longer, which the log says.
	MaxStale time.Duration
	// LeaderAddress returns the control address of the leader, "" if unknown.
	LeaderAddress func() string
	// AccessKey makes the secrets of sandboxes that are not public. Without it routers refuse all
	// requests to them.
	AccessKey *sandboxaccess.Key
	// Keys open the sandboxes of their teams. Without them no key opens a sandbox.
	Keys Keys
	// Credentials are for the egress routers. Without them requests that need one are refused.
	Credentials Credentials
	// Metrics takes the metrics of streams. Optional.
	Metrics prometheus.Registerer
	Log     *zap.Logger
}

// Server serves the control protocol. All methods may be called concurrently.
type Server struct {
	controlv1.UnimplementedControlServer
	o       Options
	rare    *zap.Logger         // of each message it has one line a minute
	sealer  *credentials.Sealer // nil: there is no key
	metrics metrics

	mu      sync.Mutex
	leader  Leader // nil while this replica follows
	streams map[uint64]*stream
	lastID  uint64
	// questions are those about the use of egress gateways that wait for answers, by their numbers.
	questions    map[uint64]*question
	lastQuestion uint64
	stopping     chan struct{}
}

type stream struct {
	id    uint64
	queue chan []*controlv1.AllocatorMessage
	// egress: its router is an egress router.
	egress bool
	// hasSnapshot: its snapshot is in the queue, or was sent. The lock of the server guards it.
	hasSnapshot bool
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

// New returns a Server that follows.
func New(o Options) (*Server, error) {
	if err := options.Require(o, "MaxStale", "LeaderAddress", "Log"); err != nil {
		return nil, err
	}
	m, err := newMetrics(o.Metrics)
	if err != nil {
		return nil, fmt.Errorf("controlserver: register metrics: %w", err)
	}
	s := &Server{o: o, metrics: m, streams: map[uint64]*stream{}, questions: map[uint64]*question{}, stopping: make(chan struct{})}
	s.rare = loglimit.PerMessage(o.Log, 1, time.Minute)
	if o.AccessKey != nil {
		s.sealer = credentials.NewSealer(o.AccessKey)
	}
	return s, nil
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

// rpcStream is the leader's end of the gRPC stream.
type rpcStream = grpc.BidiStreamingServer[controlv1.RouterMessage, controlv1.AllocatorMessage]

// Session implements the control protocol.
func (s *Server) Session(rpc rpcStream) error {
	s.mu.Lock()
	leader := s.leader
	s.mu.Unlock()
	if leader == nil {
		return rpc.Send(&controlv1.AllocatorMessage{Message: &controlv1.AllocatorMessage_NotLeader{
			NotLeader: &controlv1.NotLeader{LeaderAddress: s.o.LeaderAddress()},
		}})
	}
	messages, failed := receive(rpc)
	var join *controlv1.Join
	select {
	case m := <-messages:
		s.metrics.count(metric.DirectionIn, m)
		join = m.GetJoin()
	case err := <-failed:
		return err
	case <-s.stopping:
		return errStopping
	case <-time.After(joinWait):
	}
	if join == nil {
		return status.Error(codes.InvalidArgument, "the first message must be Join")
	}
	if err := s.check(rpc.Context(), leader, join); err != nil {
		return err
	}

	egress := join.GetEgressMaxStaleNanos() != 0
	st := s.add(egress)
	defer s.remove(st)
	var hash core.Gateway // of an earlier version: zero
	copy(hash[:], join.GetGatewayHash())
	router, from, maxStale := join.GetRouterId(), addressOf(rpc.Context()), maxStaleOf(join)
	leader.Submit(core.SessionJoined{Session: router, Stream: st.id, From: from, MaxStale: maxStale, Gateway: hash, Egress: egress})
	defer leader.Submit(core.SessionLeft{Session: router, Stream: st.id})
	s.o.Log.Info("router joined", zap.String("router", router), zap.String("address", from), zap.Duration("maxStale", maxStale))
	if maxStale > s.o.MaxStale {
		s.o.Log.Warn("the router's --max-stale is longer than that of the allocators: if it vanishes, fences wait for it for as long as its own",
			zap.String("router", router), zap.Duration("maxStale", maxStale), zap.Duration("ofAllocators", s.o.MaxStale))
	}
	err := s.serve(rpc, leader, st, router, hash, messages, failed)
	s.metrics.ended.WithLabelValues(status.Code(err).String()).Inc()
	s.o.Log.Info("router left", zap.String("router", router), zap.Error(err))
	return err
}

// receive reads messages until the stream fails or Session has returned, which ends the stream's
// context. Recv has no deadline, so it runs in a goroutine.
func receive(rpc rpcStream) (<-chan *controlv1.RouterMessage, <-chan error) {
	messages, failed := make(chan *controlv1.RouterMessage), make(chan error, 1)
	go func() {
		for {
			m, err := rpc.Recv()
			if err != nil {
				failed <- err
				return
			}
			select {
			case messages <- m:
			case <-rpc.Context().Done():
				return
			}
		}
	}()
	return messages, failed
}

// serve runs a joined stream to its end. After a Goodbye it keeps the stream until the core closes
// it, because the Goodbye is durable, and then returns nil. The router takes that end as the
// acknowledgement. After any other end it looks for another leader, because a deposed leader loses
// what it has not committed.
func (s *Server) serve(
	rpc rpcStream, leader Leader, st *stream, router string, gateway core.Gateway, messages <-chan *controlv1.RouterMessage,
	failed <-chan error,
) error {
	// Sending may block on a slow router; the router's messages must not wait for that.
	sending := make(chan error, 1)
	go func() { sending <- s.send(rpc, leader, st) }()
	defer st.end(nil) // like Recv, a blocked Send ends after the return
	for {
		select {
		case m := <-messages:
			s.metrics.count(metric.DirectionIn, m)
			if err := s.submit(leader, st.id, router, gateway, m); err != nil {
				return err
			}
			if m.GetGoodbye() != nil {
				messages = nil
			}
		case err := <-failed:
			if !errors.Is(err, io.EOF) {
				return err
			}
			if messages != nil {
				return nil // the router has closed its side
			}
			failed = nil // the router has closed its side, and waits
		case <-rpc.Context().Done(): // it waits no longer
			return status.FromContextError(rpc.Context().Err()).Err()
		case err := <-sending:
			return err
		case <-st.cut:
			return st.err
		case <-s.stopping:
			return errStopping
		}
	}
}

// submit passes a message to the leader. An error ends the stream; nothing of the message has
// taken effect then.
func (s *Server) submit(leader Leader, stream uint64, router string, gateway core.Gateway, m *controlv1.RouterMessage) error {
	switch m := m.GetMessage().(type) {
	case *controlv1.RouterMessage_Join:
		return status.Error(codes.InvalidArgument, "a second Join on one stream")
	case *controlv1.RouterMessage_Ack:
		leader.Submit(core.SessionAck{Session: router, Stream: stream, Sequence: m.Ack.GetSequence()})
	case *controlv1.RouterMessage_Resolve:
		leader.Submit(core.Resolve{Session: router, Stream: stream, ID: m.Resolve.GetSandboxId(), Wake: m.Resolve.GetWake()})
	case *controlv1.RouterMessage_Ping:
		leader.Submit(core.SessionPing{Session: router, Stream: stream, Nonce: m.Ping.GetNonce()})
	case *controlv1.RouterMessage_Goodbye:
		if !leader.Valid() {
			return errUnsure
		}
		leader.Submit(core.SessionGoodbye{Session: router, Stream: stream, Looked: m.Goodbye.GetLooked(), Gateway: gateway, Egress: s.isEgress(stream)})
	case *controlv1.RouterMessage_Report:
		r, err := report(stream, m.Report)
		if err != nil {
			return err
		}
		leader.Submit(r)
	case *controlv1.RouterMessage_Quiesced:
		q, err := quiesced(stream, m.Quiesced)
		if err != nil {
			return err
		}
		leader.Submit(q)
	case *controlv1.RouterMessage_Probed:
		leader.Submit(core.Probed{Stream: stream, Number: m.Probed.GetNumber(), ID: m.Probed.GetSandboxId(), Busy: m.Probed.GetBusy()})
	case *controlv1.RouterMessage_EgressUsage:
		return s.answered(stream, m.EgressUsage)
	case *controlv1.RouterMessage_Dead:
		if err := checkDead(m.Dead, router); err != nil {
			return err
		}
		var shown core.Gateway
		if secret := m.Dead.GetGatewaySecret(); len(secret) > 0 {
			shown = sha256.Sum256(secret)
		}
		for _, id := range m.Dead.GetRouterIds() {
			s.o.Log.Info("router reported dead", zap.String("router", id), zap.String("by", router))
			leader.Submit(core.SessionDead{Session: id, By: router, Gateway: shown})
		}
	}
	return nil
}

// send sends the stream's queue to the router, and the API keys, or to an egress router the credentials, after the snapshot
// and whenever they change. They have no place in the queue, so a slow router gets only the newest.
func (s *Server) send(rpc rpcStream, leader Leader, st *stream) error {
	secrets := s.keys
	if st.egress {
		secrets = s.credentials
	}
	var changed <-chan struct{} // nil until the snapshot was sent
	for {
		var messages []*controlv1.AllocatorMessage
		select {
		case <-st.cut:
			return st.err
		case <-changed:
			messages, changed = secrets(leader.Term())
		case messages = <-st.queue:
			if messages[len(messages)-1].GetSnapshot() != nil {
				var all []*controlv1.AllocatorMessage
				all, changed = secrets(leader.Term())
				messages = append(messages, all...)
			}
		}
		for _, m := range messages {
			// Checked at the last moment. A pong of a deposed leader would let a router serve
			// outdated routes, its snapshot would move the router to an earlier journal, and its answer to
			// a question would deny a sandbox of the next leader.
			if (m.GetPong() != nil || m.GetSnapshot() != nil || m.GetResolved() != nil) && !leader.Valid() {
				return errUnsure
			}
			m.Journal, m.Position = leader.Journal(), leader.Position()
			s.metrics.count(metric.DirectionOut, m)
			if err := rpc.Send(m); err != nil {
				return err
			}
			if m.GetPong() != nil {
				st.ponged.Store(int64(bootclock.Now()))
			}
		}
	}
}

func (s *Server) add(egress bool) *stream {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lastID++
	st := &stream{id: s.lastID, egress: egress, queue: make(chan []*controlv1.AllocatorMessage, queueSize), cut: make(chan struct{})}
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

// isEgress reports whether a stream is that of an egress router.
func (s *Server) isEgress(id uint64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	st := s.streams[id]
	return st != nil && st.egress
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
		if messages[0].GetSnapshot() != nil {
			s.mu.Lock()
			st.hasSnapshot = true
			s.mu.Unlock()
		}
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
