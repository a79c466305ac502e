// Package controlserver is the allocator's side of the control stream: it turns what
// routers say into events for the core, and the core's effects into messages.
//
// Each stream has one bounded queue, in which everything for that router keeps
// the core's order. A router that does not keep up is cut off; it joins again
// and gets a snapshot. A replica that does not lead answers NotLeader.
package controlserver

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/api/activity"
	controlv1 "github.com/berth-sandbox/berth/api/control/v1"
	"github.com/berth-sandbox/berth/internal/bootclock"
)

const (
	// queueSize bounds the messages waiting for one router. A burst of a
	// thousand claims and as many releases fits several times over. A change of
	// the ports of a pool that has more sandboxes than this may cut off every
	// router at once. They join again within moments, know their sandboxes all the
	// while, and get the new ports with the snapshot.
	queueSize = 8 << 10
	// snapshotPart is how many routes go into one message: well below gRPC's
	// default limit of 4 MiB at about 80 bytes each, 280 with as many ports as a
	// pool can name.
	snapshotPart = 5_000
	// maxDead is how many routers one message may report as dead.
	maxDead = 1000
	// maxActivities is how many sandboxes one message may speak of.
	maxActivities = 5_000
	// joinWait is how long a new stream may take to say Join.
	joinWait = 5 * time.Second
)

// Leader is what a leading replica offers the server.
type Leader interface {
	Submit(core.Event)
	// Valid reports whether the lease is certainly still held.
	Valid() bool
	// Term is the leader's term.
	Term() uint64
	// Journal is the ID of its journal, Began the position at which its term began, and
	// Position how far the journal is now.
	Journal() string
	Began() uint64
	Position() uint64
	// Restored is told that routers have seen more of the journal than there is in it, or a
	// journal that was begun after it, up to this term: so it was restored from a backup.
	// The leader begins it anew, and ends.
	Restored(term uint64)
}

// Server serves the control protocol. All methods may be called concurrently.
type Server struct {
	controlv1.UnimplementedControlServer
	log *zap.Logger
	// maxStale is how long after its last ping a router is waited for.
	maxStale time.Duration
	// leaderAddress returns the control address of the replica that leads, "" if
	// none is known.
	leaderAddress func() string

	mu       sync.Mutex
	leader   Leader // nil: this replica does not lead
	streams  map[uint64]*stream
	lastID   uint64
	stopping chan struct{}
}

type stream struct {
	id    uint64
	queue chan []*controlv1.AllocatorMessage
	// cut is closed when the stream must end; err says why.
	cut  chan struct{}
	once sync.Once
	err  error
	// ponged is when it joined, or was given its last pong.
	ponged atomic.Int64 // bootclock
}

func (s *stream) end(err error) {
	s.once.Do(func() {
		s.err = err
		close(s.cut)
	})
}

// New returns a Server that does not lead. maxStale is for how long after its last
// answered ping a router may serve what it knows: one that would for longer is refused,
// because no fence would wait for it.
func New(maxStale time.Duration, leaderAddress func() string, log *zap.Logger) *Server {
	return &Server{
		log: log, maxStale: maxStale, leaderAddress: leaderAddress,
		streams: map[uint64]*stream{}, stopping: make(chan struct{}),
	}
}

// Lead makes this replica serve sessions. There is no way back: a replica that
// loses the lease ends its process.
func (s *Server) Lead(l Leader) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.leader = l
}

// errUnsure ends the stream of a leader whose lease may have run out.
var errUnsure = status.Error(codes.FailedPrecondition, "this replica cannot tell that it still leads")

// Stop ends all streams, also those that begin later. It must be called once.
func (s *Server) Stop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	close(s.stopping)
}

var instanceID = regexp.MustCompile(`^[a-z0-9-]{16,64}$`)

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
	// Recv cannot be given a deadline of its own, so all of it runs beside this
	// function, which ends the stream by returning.
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
	// The reader is not waited for: grpc cancels the stream, and with it Recv,
	// when this function has returned.
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
		// It would be sent away by its first pong: joins and leaves would follow each other,
		// in the log and in the core, for as long as the lease is in doubt.
		return errUnsure
	}
	earlier, err := s.checkSeen(leader, join)
	if err != nil {
		return err
	}
	if earlier != "" {
		// Also if this router is refused: others of that journal may serve, too.
		leader.Submit(core.EarlierSeen{Journal: earlier})
	}
	if err := s.checkMaxStale(join); err != nil {
		return err
	}
	if !join.GetLooks() {
		s.log.Warn("a router of an earlier version cannot say what is idle; while it is there no sandbox that it can route to is released for being idle",
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

// checkSeen compares what a router has seen of the journal with what there is. It returns
// the ID of another journal that the router may still serve from, or an error if the
// journal was restored from a backup: then it is begun anew.
func (s *Server) checkSeen(leader Leader, join *controlv1.Join) (earlier string, err error) {
	journal, term, position := join.GetJournal(), join.GetHighestTerm(), join.GetPosition()
	if term > core.TermMost {
		return "", status.Errorf(codes.InvalidArgument, "join.highest_term %d: must be %d at most", term, uint64(core.TermMost))
	}
	left := slices.Contains(join.GetLeft(), leader.Journal())
	if !left && journal != "" && journal != leader.Journal() {
		if join.GetServing() {
			return journal, nil
		}
		return "", nil
	}
	var ahead bool
	switch {
	case left: // a later journal was begun, and the router would follow no leader of this one
		ahead = true
	case term > leader.Term():
		ahead = true
	case term == leader.Term(): // of another leader, whose writes are not in the journal any more
		ahead = position > leader.Position()
	default:
		ahead = position >= leader.Began()
	}
	if !ahead {
		return "", nil
	}
	// This leader holds the lease. Should it be deposed all the same, then it cannot write
	// to the journal, and only ends.
	s.log.Error("a router has seen more of the journal than there is in it: it was restored from a backup, and is begun anew, see docs/backup.md",
		zap.String("session", join.GetInstanceId()), zap.String("seenJournal", journal), zap.Uint64("seenTerm", term), zap.Uint64("seenPosition", position),
		zap.String("journal", leader.Journal()), zap.Uint64("term", leader.Term()), zap.Uint64("position", leader.Position()))
	leader.Restored(term)
	return "", status.Errorf(codes.FailedPrecondition, "the journal is begun anew: the router has seen journal %q up to term %d, position %d, and journal %q ends at term %d, position %d",
		journal, term, position, leader.Journal(), leader.Term(), leader.Position())
}

// addressOf is the address of a router, without its port.
func addressOf(ctx context.Context) string {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return ""
	}
	at, err := netip.ParseAddrPort(p.Addr.String())
	if err != nil {
		return ""
	}
	return at.Addr().Unmap().String()
}

// checkMaxStale refuses a router that serves what it knows for longer than a fence
// waits for it.
func (s *Server) checkMaxStale(join *controlv1.Join) error {
	theirs, ours := join.GetMaxStaleNanos(), uint64(s.maxStale)
	switch {
	case theirs == 0:
		s.log.Warn("a router of an earlier version does not say what its --max-stale is; it must not be more than the allocators'",
			zap.String("session", join.GetInstanceId()), zap.Duration("maxStale", s.maxStale))
	case theirs > ours:
		says := duration(theirs)
		err := status.Errorf(codes.FailedPrecondition, "the router's --max-stale, %s, is larger than the allocators' --max-stale, %v: addresses would be used again while it may still send requests there; give the allocators the same or more, or the router no more than they have",
			says, s.maxStale)
		s.log.Warn("router refused", zap.String("session", join.GetInstanceId()), zap.Error(err))
		return err
	}
	return nil
}

// duration writes what a router says, which may be anything.
func duration(nanos uint64) string {
	if nanos > math.MaxInt64 {
		return fmt.Sprintf("%d ns", nanos)
	}
	return time.Duration(nanos).String()
}

// activities turns what a router says of activity into the core's form.
func activities(field string, all []*controlv1.Activity) ([]core.Activity, error) {
	if len(all) > maxActivities {
		return nil, status.Errorf(codes.InvalidArgument, "%s.activities: %d are more than %d", field, len(all), maxActivities)
	}
	list := make([]core.Activity, 0, len(all))
	for _, a := range all {
		addr, err := netip.ParseAddr(a.GetPodIp())
		if err != nil && a.GetSandboxId() == "" {
			return nil, status.Errorf(codes.InvalidArgument, "%s.activities: neither sandbox_id nor an address in pod_ip: %.100q", field, a.GetPodIp())
		}
		kind := activity.Kind(a.GetKind())
		if !kindWord.MatchString(a.GetKind()) {
			kind = activity.Unknown
		}
		list = append(list, core.Activity{ID: a.GetSandboxId(), Addr: addr.Unmap(), Age: ago(a.GetAgeMillis()), Open: int(a.GetOpen()), Kind: kind})
	}
	return list, nil
}

// kindWord is what a kind of use looks like. A later version may have more of them.
var kindWord = regexp.MustCompile(`^[a-z]{1,32}$`)

// Bounds of what a router may say for people.
const (
	maxGateway = 128
	maxBlind   = 256
)

// report takes a Report, and quiesced a Quiesced.
func report(stream uint64, r *controlv1.Report) (core.Report, error) {
	all, err := activities("report", r.GetActivities())
	if err == nil && len(r.GetGateway()) > maxGateway {
		err = status.Errorf(codes.InvalidArgument, "report.envoy: %d bytes are more than %d", len(r.GetGateway()), maxGateway)
	}
	return core.Report{
		Stream: stream, Activities: all, Gateway: r.GetGateway(), Nonce: r.GetNonce(), Took: ago(r.GetTookMillis()), Blind: first(r.GetBlind(), maxBlind),
	}, err
}

func quiesced(stream uint64, q *controlv1.Quiesced) (core.Quiesced, error) {
	all, err := activities("quiesced", q.GetActivities())
	return core.Quiesced{Stream: stream, Number: q.GetNumber(), Activities: all, Blind: first(q.GetBlind(), maxBlind)}, err
}

// first is the beginning of a text, at most so many bytes.
func first(text string, most int) string { return strings.ToValidUTF8(text[:min(len(text), most)], "") }

// ago is a number of milliseconds, a hundred years at most.
func ago(millis uint64) time.Duration {
	const most = 100 * 365 * 24 * time.Hour
	return time.Duration(min(millis, uint64(most/time.Millisecond))) * time.Millisecond
}

// checkDead refuses a report of deaths that makes no sense.
func checkDead(dead *controlv1.Dead, by string) error {
	ids := dead.GetInstanceIds()
	if len(ids) > maxDead {
		return status.Errorf(codes.InvalidArgument, "dead.instance_ids: %d are more than %d", len(ids), maxDead)
	}
	for _, id := range ids {
		switch {
		case !instanceID.MatchString(id):
			return status.Errorf(codes.InvalidArgument, "dead.instance_ids: %.100q: must be 16 to 64 characters of a-z, 0-9 and -", id)
		case id == by:
			return status.Errorf(codes.InvalidArgument, "dead.instance_ids: %s says that itself is dead", by)
		}
	}
	return nil
}

func (s *Server) serve(rpc grpc.BidiStreamingServer[controlv1.RouterMessage, controlv1.AllocatorMessage], leader Leader, st *stream, session string, incoming <-chan *controlv1.RouterMessage, failed <-chan error) error {
	// Sending may block on a slow router; a message from it must not wait for that.
	sending := make(chan error, 1)
	go func() { sending <- s.send(rpc, leader, st) }()
	defer st.end(nil) // a Send that blocks ends, like Recv, after the return
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
					return err // before any of it is believed
				}
				for _, id := range m.Dead.GetInstanceIds() {
					s.log.Info("router found dead", zap.String("session", id), zap.String("by", session))
					leader.Submit(core.SessionDead{Session: id, By: session})
				}
			case *controlv1.RouterMessage_Join:
				return status.Error(codes.InvalidArgument, "a second Join on one stream")
			}
		case err := <-failed:
			if errors.Is(err, io.EOF) {
				return nil // the router has nothing more to say
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

// leave keeps the stream of a router that has said Goodbye until that is durable, and
// returns nil then. The router takes the end of its stream for the acknowledgement. After
// any other end it looks for another leader: this one may have been deposed, and what it
// has not committed is lost.
func (s *Server) leave(st *stream, failed, sending <-chan error) error {
	for {
		select {
		case err := <-failed:
			if !errors.Is(err, io.EOF) {
				return err
			}
			failed = nil // the router has nothing more to say, and waits
		case err := <-sending:
			return err
		case <-st.cut:
			return st.err
		case <-s.stopping:
			return status.Error(codes.FailedPrecondition, "this replica is stopping")
		}
	}
}

// send writes the stream's queue to the router.
func (s *Server) send(rpc grpc.BidiStreamingServer[controlv1.RouterMessage, controlv1.AllocatorMessage], leader Leader, st *stream) error {
	for {
		select {
		case <-st.cut:
			return st.err
		case messages := <-st.queue:
			for _, m := range messages {
				// The last moment: a pong from a leader that is not one any more
				// would let a router serve what has changed since, and its snapshot
				// would have a router leave the present journal for an earlier one.
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

// Routers returns how many routers are connected, and the time since the last pong, or
// since the join, of the one that has waited longest.
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

// Deliver sends the core's effects that are meant for routers and reports
// whether e is one. It never blocks, and is called from one goroutine.
func (s *Server) Deliver(term uint64, e core.Effect) bool {
	switch e := e.(type) {
	case core.SendSnapshot:
		s.push(e.Stream, snapshot(term, e)...)
	case core.SendRoute:
		s.push(e.Stream, &controlv1.AllocatorMessage{Term: term, Sequence: e.Sequence, Message: &controlv1.AllocatorMessage_Route{Route: route(&e.Sandbox)}})
	case core.SendRelease:
		s.push(e.Stream, &controlv1.AllocatorMessage{Term: term, Sequence: e.Sequence, Message: &controlv1.AllocatorMessage_Release{
			Release: &controlv1.Release{SandboxIds: e.IDs},
		}})
	case core.SendResolved:
		r := &controlv1.Resolved{SandboxId: e.ID}
		switch {
		case e.Sandbox != nil:
			r.Answer = &controlv1.Resolved_Route{Route: route(e.Sandbox)}
		case e.Starting:
			r.Answer = &controlv1.Resolved_Starting{Starting: &controlv1.Starting{HoldMillis: uint32(e.Hold.Milliseconds())}}
		case e.Gone:
			r.Answer = &controlv1.Resolved_Gone{Gone: &controlv1.Gone{}}
		default:
			r.Answer = &controlv1.Resolved_Unknown{Unknown: &controlv1.Unknown{}}
		}
		s.push(e.Stream, &controlv1.AllocatorMessage{Term: term, Message: &controlv1.AllocatorMessage_Resolved{Resolved: r}})
	case core.SendQuiesce:
		q := &controlv1.Quiesce{Number: e.Number}
		for _, question := range e.Questions {
			q.Questions = append(q.Questions, &controlv1.Question{SandboxId: question.ID, PodIp: question.IP.String(), MinBytesPerMinute: question.MinBytes})
		}
		s.push(e.Stream, &controlv1.AllocatorMessage{Term: term, Message: &controlv1.AllocatorMessage_Quiesce{Quiesce: q}})
	case core.SendProbe:
		s.push(e.Stream, &controlv1.AllocatorMessage{Term: term, Message: &controlv1.AllocatorMessage_Probe{Probe: &controlv1.Probe{
			SandboxId: e.ID, PodIp: e.To.Addr().String(), Port: uint32(e.To.Port()), Path: e.Path,
		}}})
	case core.SendResume:
		s.push(e.Stream, &controlv1.AllocatorMessage{Term: term, Message: &controlv1.AllocatorMessage_Resume{Resume: &controlv1.Resume{SandboxIds: e.IDs}}})
	case core.SendPong:
		s.push(e.Stream, &controlv1.AllocatorMessage{Term: term, Message: &controlv1.AllocatorMessage_Pong{Pong: &controlv1.Pong{Nonce: e.Nonce}}})
	case core.CloseStream:
		switch {
		case e.Left:
			s.cut(e.Stream, nil)
		case e.Banned:
			s.cut(e.Stream, controlv1.DeclaredDead())
		default:
			s.cut(e.Stream, status.Error(codes.Aborted, "another stream joined under the same instance ID, or the session expired"))
		}
	default:
		return false
	}
	return true
}

func (s *Server) push(id uint64, messages ...*controlv1.AllocatorMessage) {
	s.mu.Lock()
	st := s.streams[id]
	s.mu.Unlock()
	if st == nil {
		return // it has ended; the core will hear of it
	}
	select {
	case st.queue <- messages:
	default:
		s.cut(id, status.Error(codes.ResourceExhausted, "more messages wait for this router than its queue holds; join again"))
	}
}

// cut ends a stream. Nothing is queued for it any more: what came after a gap
// would be acknowledged as if there were none.
func (s *Server) cut(id uint64, err error) {
	s.mu.Lock()
	st := s.streams[id]
	delete(s.streams, id)
	s.mu.Unlock()
	if st != nil {
		st.end(err)
	}
}

func snapshot(term uint64, e core.SendSnapshot) []*controlv1.AllocatorMessage {
	var parts []*controlv1.AllocatorMessage
	rest := e.Routes
	for {
		n := min(len(rest), snapshotPart)
		part := &controlv1.Snapshot{Routes: make([]*controlv1.Route, 0, n), Last: n == len(rest)}
		for i := range rest[:n] {
			part.Routes = append(part.Routes, route(&rest[i]))
		}
		m := &controlv1.AllocatorMessage{Term: term, Message: &controlv1.AllocatorMessage_Snapshot{Snapshot: part}}
		parts = append(parts, m)
		if rest = rest[n:]; len(rest) == 0 {
			m.Sequence = e.Sequence // what is acknowledged is the whole
			return parts
		}
	}
}

func route(s *core.Sandbox) *controlv1.Route {
	r := &controlv1.Route{SandboxId: s.ID, PodIp: s.IP.String(), DefaultPort: uint32(s.DefaultPort), MinBytesPerMinute: s.MinBytes}
	for _, port := range s.Ports {
		r.Ports = append(r.Ports, uint32(port))
	}
	return r
}
