package controlclient

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	"google.golang.org/grpc"

	controlv1 "github.com/berth-sandbox/berth/api/control/v1"
	"github.com/berth-sandbox/berth/routecache"
)

// maxMissedPings is how many pings a stream may leave unanswered before it is dropped.
const maxMissedPings = 5

// goodbyeTimeout bounds how long the allocator may take to end the stream after a Goodbye,
// which it does after it has committed it to its journal.
const goodbyeTimeout = 3 * time.Second

// grpcStream is the router's end of the gRPC stream.
type grpcStream = grpc.BidiStreamingClient[controlv1.RouterMessage, controlv1.AllocatorMessage]

// stream is one control stream, from Join to its end. A reader, a writer and a few helpers
// work on it.
type stream struct {
	client *Client
	grpc   grpcStream
	cancel context.CancelCauseFunc // ends the stream
	// out is never closed. The writer stops with its context.
	out     chan *controlv1.RouterMessage
	helpers sync.WaitGroup

	mu              sync.Mutex
	applied         uint64          // sequence of the last message to acknowledge
	ackPending      chan struct{}   // capacity 1: applied has increased
	snapshotApplied chan struct{}   // capacity 1
	pings           map[uint64]ping // by nonce, without a pong
	nonce           uint64          // of the newest ping
	lastPong        time.Duration
	pongs           []pong   // the newest maxPongs
	reportedDead    []string // the dead routers that were reported last

	// left: Goodbye was sent, or none must be sent. Owned by the writer until writerDone is
	// closed.
	left       bool
	writerDone chan struct{}

	quiesces chan *controlv1.Quiesce // capacity 1: the newest one
	probes   atomic.Int64            // number running

	// Owned by the reader:
	snapshot    map[string]routecache.Route    // parts received so far
	rules       []*controlv1.Route             // the same, of an egress router
	keys        map[string][][sha256.Size]byte // the same
	credentials map[string]string              // the same
	joined      bool                           // a complete snapshot is in effect
	hasSecrets  bool                           // this leader's keys, or credentials, are in effect
	sequence    uint64                         // of the last message that had one
}

// ping is the sending of one ping.
type ping struct {
	sent time.Duration
	dead []string // the dead routers that were reported before it
}

// pong is the receipt of one pong.
type pong struct {
	nonce uint64
	at    time.Duration
}

// maxPongs bounds the pongs that are kept. A report names one from before its look, and a
// look takes 2 s at most.
const maxPongs = 16

// anyAddress makes gRPC start with a random address of a name. Otherwise every attempt would
// start with the same replica.
const anyAddress = `{"loadBalancingConfig":[{"pick_first":{"shuffleAddressList":true}}]}`

func newStream(c *Client) *stream {
	return &stream{
		client:          c,
		out:             make(chan *controlv1.RouterMessage, outQueueSize),
		ackPending:      make(chan struct{}, 1),
		snapshotApplied: make(chan struct{}, 1),
		writerDone:      make(chan struct{}),
		pings:           map[uint64]ping{},
		lastPong:        c.o.Now(),
		snapshot:        map[string]routecache.Route{},
		keys:            map[string][][sha256.Size]byte{},
		credentials:     map[string]string{},
		quiesces:        make(chan *controlv1.Quiesce, 1),
	}
}

// runStream runs one stream to its end. leader is the leader's address if the replica does
// not lead and knows it. connectTimeout bounds the time for the connection. After the end of
// ctx the stream sends Goodbye; the end of goodbyeCtx ends it at once.
func (c *Client) runStream(
	ctx, goodbyeCtx context.Context, address string, connectTimeout time.Duration,
) (leader string, err error) {
	dial := append([]grpc.DialOption{grpc.WithDefaultServiceConfig(anyAddress)}, c.o.Dial...)
	conn, err := grpc.NewClient(address, dial...)
	if err != nil {
		return "", fmt.Errorf("connect to the allocator: %w", err)
	}
	defer conn.Close()
	s := newStream(c)
	// The stream outlives ctx, for the Goodbye.
	streamCtx, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	defer s.helpers.Wait()
	defer cancel(nil)
	defer context.AfterFunc(goodbyeCtx, func() { cancel(errors.New("the time for a Goodbye is over")) })()
	// If this side ended the stream, its cause says more than gRPC's "canceled".
	failed := func(what string, err error) error {
		if cause := context.Cause(streamCtx); cause != nil {
			err = cause
		}
		return fmt.Errorf("%s: %w", what, err)
	}
	// Session waits for the connection.
	timer := time.AfterFunc(connectTimeout, func() {
		cancel(fmt.Errorf("%w within %v", errConnect, connectTimeout))
	})
	s.grpc, err = controlv1.NewControlClient(conn).Session(streamCtx)
	timer.Stop()
	if err != nil {
		return "", failed("open the control stream", err)
	}
	s.cancel = cancel
	s.helpers.Go(func() { cancel(s.watch(streamCtx)) })
	s.helpers.Go(func() { s.answerQuiesces(streamCtx) })
	s.helpers.Go(func() {
		defer close(s.writerDone)
		// After io.EOF the reader returns the status of the stream.
		if err := s.write(ctx, streamCtx); err != nil && !errors.Is(err, io.EOF) {
			cancel(err)
		}
	})
	defer c.setCurrent(nil)
	for {
		m, err := s.grpc.Recv()
		if errors.Is(err, io.EOF) {
			cancel(nil)
			if <-s.writerDone; s.left {
				return "", errLeft
			}
			return "", errors.New("the allocator ended the control stream")
		}
		if err != nil {
			return "", failed("control stream", err)
		}
		if to := m.GetNotLeader(); to != nil {
			if to.GetLeaderAddress() == "" {
				return "", fmt.Errorf("%w, and knows of no leader at the moment", errNotLeader)
			}
			return to.GetLeaderAddress(), nil
		}
		if err := s.apply(streamCtx, m); err != nil {
			return "", err
		}
	}
}

// watch returns why the stream must end, or nil after streamCtx has ended. It runs beside the
// reader and the writer because either may block on a stream that makes no progress.
func (s *stream) watch(streamCtx context.Context) error {
	ticker := time.NewTicker(s.client.o.PingInterval)
	defer ticker.Stop()
	for {
		select {
		case <-streamCtx.Done():
			return nil
		case <-ticker.C:
			s.mu.Lock()
			silent := s.client.o.Now() - s.lastPong
			s.mu.Unlock()
			if silent > maxMissedPings*s.client.o.PingInterval {
				return fmt.Errorf("the allocator has answered no ping for %v", silent)
			}
		}
	}
}

// enqueue queues a message and reports whether there was room.
func (s *stream) enqueue(m *controlv1.RouterMessage) bool {
	select {
	case s.out <- m:
		return true
	default:
		return false
	}
}

// write sends Join and a ping, and then queued messages, acknowledgements, reports and pings,
// until streamCtx ends. When ctx ends it sends Goodbye as the last message.
func (s *stream) write(ctx, streamCtx context.Context) error {
	o := s.client.o
	err := s.grpc.Send(&controlv1.RouterMessage{Message: &controlv1.RouterMessage_Join{Join: s.client.join(ctx)}})
	if err != nil {
		return err
	}
	if err := s.tick(); err != nil {
		return err
	}
	ticker := time.NewTicker(o.PingInterval)
	defer ticker.Stop()
	var lookDone <-chan struct{} // nil until the full report was sent
	for {
		select {
		case <-streamCtx.Done():
			return nil
		case <-ctx.Done():
			return s.leave(streamCtx)
		case m := <-s.out:
			err = s.grpc.Send(m)
		case <-s.ackPending:
			err = s.grpc.Send(s.ack())
		case <-s.snapshotApplied:
			err = s.report(o.Uses.Report(true))
			lookDone = o.Uses.LookDone()
		case <-lookDone:
			err = s.report(o.Uses.Report(false))
		case <-ticker.C:
			err = s.tick()
		}
		if err != nil {
			return err
		}
	}
}

// leave sends Goodbye, unless Envoy may not have read all answers, and closes the sending
// direction.
func (s *stream) leave(streamCtx context.Context) error {
	if unread := s.client.gate.Unread(); unread > 0 {
		s.client.o.Log.Warn("ends without a Goodbye: Envoy may not have read all answers, "+
			"so the allocator must wait for what this router may have admitted", zap.Int("unread", unread))
	} else if err := s.goodbye(streamCtx); err != nil {
		return err
	}
	s.left = true
	time.AfterFunc(goodbyeTimeout, func() { s.cancel(errors.New("the allocator did not end the stream after Goodbye")) })
	return s.grpc.CloseSend()
}

// tick reports dead routers that were not reported on this stream, and sends a ping. The
// recorded send time of the ping is before the send, because freshness counts from there.
func (s *stream) tick() error {
	dead := s.client.o.DeadRouters.Dead()
	dead = dead[:min(len(dead), maxDeadReported)] // the others follow after Forget
	s.mu.Lock()
	unreported := len(dead) > 0 && !slices.Equal(dead, s.reportedDead)
	s.reportedDead = dead
	s.nonce++
	nonce := s.nonce
	s.pings[nonce] = ping{s.client.o.Now(), dead}
	s.mu.Unlock()
	if unreported {
		m := &controlv1.RouterMessage_Dead{Dead: &controlv1.Dead{RouterIds: dead, GatewaySecret: s.client.o.GatewaySecret}}
		if err := s.grpc.Send(&controlv1.RouterMessage{Message: m}); err != nil {
			return err
		}
	}
	return s.grpc.Send(&controlv1.RouterMessage{Message: &controlv1.RouterMessage_Ping{Ping: &controlv1.Ping{Nonce: nonce}}})
}

func (s *stream) ack() *controlv1.RouterMessage {
	s.mu.Lock()
	defer s.mu.Unlock()
	return &controlv1.RouterMessage{Message: &controlv1.RouterMessage_Ack{Ack: &controlv1.Ack{Sequence: s.applied}}}
}

// newestPongBefore returns the nonce of the newest pong received before at, or 0.
func (s *stream) newestPongBefore(at time.Duration) uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range slices.Backward(s.pongs) {
		if p.at < at {
			return p.nonce
		}
	}
	return 0
}

// answeredPing records a pong and returns its ping, if this stream has sent it.
func (s *stream) answeredPing(nonce uint64) (p ping, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if p, ok = s.pings[nonce]; ok {
		s.lastPong = s.client.o.Now()
		s.pongs = append(s.pongs[max(0, len(s.pongs)+1-maxPongs):], pong{nonce, s.lastPong})
		maps.DeleteFunc(s.pings, func(n uint64, _ ping) bool { return n <= nonce })
	}
	return p, ok
}
