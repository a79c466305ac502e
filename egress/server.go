package egress

import (
	"cmp"
	"context"
	"fmt"
	"hash/maphash"
	"net"
	"net/netip"
	"sync"
	"time"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	ratelimitv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"
	"google.golang.org/grpc/codes"

	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/extproc/h2"
	"github.com/berth-sandbox/berth/extproc/socket"
	"github.com/berth-sandbox/berth/extproc/wire"
	"github.com/berth-sandbox/berth/internal/loglimit"
	"github.com/berth-sandbox/berth/internal/options"
	"github.com/berth-sandbox/berth/internal/rate"
	"github.com/berth-sandbox/berth/internal/wait"
)

// Options configure a Server. All are required unless they say otherwise.
type Options struct {
	// Socket is the path of the unix socket that Envoy connects to.
	Socket   string
	Resolver Resolver
	// ClusterDomain is where the cluster has its names, beside cluster.local: they are not looked up. Optional.
	ClusterDomain string
	// Fresh reports whether what Set, Forget and Replace have said still holds. It must not block. When it is false,
	// all requests are refused, and within a second those in progress are cut.
	Fresh func() bool
	// MaxConnections bounds the connections of sandboxes to Envoy, and is that of its configuration: at least
	// MinConnections. 0: DefaultConnections.
	MaxConnections int
	// MaxOpen bounds the requests of one sandbox in progress. Default: a 50th of MaxConnections.
	MaxOpen int
	// MaxRate bounds the requests of one sandbox per second, those that are refused too: see rate.PerSecond. 0: no limit.
	MaxRate float64
	// Ask has the allocator asked about a sandbox that is not known. It reports false if it cannot be asked. Answered
	// must follow. Optional. It must not block.
	Ask func(id string) bool
	// Metrics takes the metrics of this package. Optional.
	Metrics prometheus.Registerer
	Log     *zap.Logger
}

const (
	// DefaultConnections is the default of Options.MaxConnections.
	DefaultConnections = 5000
	// MinConnections leaves a sandbox ten open requests.
	MinConnections = 10 * openShare
	// openShare: a sandbox may have 1/openShare of the connections as open requests. That is less than share, so that the
	// answer says why as a rule.
	openShare = 50
)

// Server is the router of an egress gateway. All methods may be called concurrently.
type Server struct {
	o           Options
	maxOpen     int
	rate        rate.Limit
	began       time.Time // of the clock of all limits
	seed        maphash.Seed
	log         *zap.Logger // with a bound on lines
	names       *names
	asks        asks
	peers       *peers
	metrics     metrics
	connections *socket.Connections
	transport   *h2.Server
	messages    sync.Pool // of *wire.Request
	table       table
	credentials map[string]string // nil: they are not known. The lock of the table guards them.
	turn        uint              // of the choice of addresses. The lock of the table guards it.
	// lines are the buckets of the lines of all sandboxes, by kind. The lock of the table guards them.
	lines [2]time.Duration
}

// New checks the options and returns a Server that does not listen yet, and knows no sandbox.
func New(o Options) (*Server, error) {
	if err := options.Require(o, "Socket", "Resolver", "Fresh", "Log"); err != nil {
		return nil, err
	}
	if o.MaxOpen < 0 {
		return nil, fmt.Errorf("egress: Options.MaxOpen %d: must be 1 or more, or 0 for the default", o.MaxOpen)
	}
	o.MaxConnections = cmp.Or(o.MaxConnections, DefaultConnections)
	if o.MaxConnections < MinConnections {
		return nil, fmt.Errorf("egress: Options.MaxConnections %d: must be at least %d", o.MaxConnections, MinConnections)
	}
	if err := rate.Check(o.MaxRate); err != nil {
		return nil, fmt.Errorf("egress: Options.MaxRate %v: %w", o.MaxRate, err)
	}
	s := &Server{
		o: o, maxOpen: cmp.Or(o.MaxOpen, o.MaxConnections/openShare), rate: rate.PerSecond(o.MaxRate),
		began: time.Now(), seed: maphash.MakeSeed(), log: loglimit.PerMessage(o.Log, maxLogged, time.Second),
		asks:  asks{ask: o.Ask, began: time.Now(), seed: maphash.MakeSeed(), pending: map[string]chan struct{}{}},
		peers: newPeers(o.MaxConnections, sockets),
	}
	s.table = table{all: map[string]*entry{}, at: map[netip.Addr][]*entry{}, epochs: []*epoch{{}}}
	if err := s.metrics.register(o.Metrics, &s.table); err != nil {
		return nil, fmt.Errorf("egress: register metrics: %w", err)
	}
	s.names = newNames(o.Resolver, s.metrics.lookups)
	s.connections = socket.NewConnections(s.log)
	s.messages.New = func() any { return new(wire.Request) }
	s.transport = h2.NewServer(map[string]h2.Handler{
		extprocv3.ExternalProcessor_Process_FullMethodName: s,
		logMethod: traffic{s},
		ratelimitv3.RateLimitService_ShouldRateLimit_FullMethodName: connections{s},
	})
	return s, nil
}

// Listen binds the socket in place of a predecessor's. See socket.Listen.
func (s *Server) Listen(ctx context.Context) (net.Listener, error) {
	return socket.Listen(ctx, s.o.Socket)
}

const (
	// staleEvery is how often the server looks whether it is fresh.
	staleEvery = 250 * time.Millisecond
	// endedEvery is how often a server that stops looks whether all requests have ended.
	endedEvery = 5 * time.Millisecond
)

// Serve answers on l until Stop, and then returns nil. It is called once.
func (s *Server) Serve(l net.Listener) error {
	ctx, cancel := context.WithCancel(context.Background())
	var watching sync.WaitGroup
	defer s.names.lookups.Wait()
	defer watching.Wait()
	defer cancel()
	watching.Go(func() { s.watch(ctx) })
	watching.Go(func() {
		s.peers.watch(ctx, func(err error) {
			s.log.Error("egress: connections cannot be counted, so addresses get no more than they had", zap.Error(err))
		})
	})
	return s.transport.Serve(s.connections.Limit(l))
}

// watch cuts all requests when what the server knows has become stale.
func (s *Server) watch(ctx context.Context) {
	for wait.Sleep(ctx, staleEvery) {
		if !s.o.Fresh() {
			// A request is admitted under the lock, by the same question: none is admitted after this.
			s.table.change(s.table.everything)
		}
	}
}

// Connections returns how many connections Envoy has to this server.
func (s *Server) Connections() int { return s.connections.Open() }

// Stop refuses all requests, cuts those in progress, and ends the server when they have ended, or when ctx ends. It
// must be called once.
func (s *Server) Stop(ctx context.Context) {
	s.table.change(func() []*request {
		s.table.shut = true
		return s.table.everything()
	})
	for s.Unended() > 0 {
		if !wait.Sleep(ctx, endedEvery) {
			s.log.Warn("egress: the router ends before its requests; Envoy cuts them with the connection",
				zap.Int("open", s.Unended()))
			break
		}
	}
	s.transport.Stop()
}

// Now implements h2.Handler. It answers every request whose name need not be looked up, and that leaves no line in the
// log.
func (s *Server) Now(message []byte, _ string) (h2.Reply, h2.Later) {
	m := s.messages.Get().(*wire.Request)
	defer func() { m.Reset(); s.messages.Put(m) }()
	if err := m.Read(message); err != nil {
		return h2.Reply{Status: codes.Internal, Text: "the message is no ProcessingRequest: " + err.Error()}, nil
	}
	if m.Other != "" {
		return h2.Reply{
			Status: codes.InvalidArgument,
			Text:   "expected request headers, got " + m.Other + ": check the processing mode in Envoy's configuration",
		}, nil
	}
	q := read(m.Headers)
	d, decided := s.decide(context.Background(), &q, false)
	pause := s.pauseOf(&d, q.peer)
	if decided && d.log == nil && pause == 0 {
		return s.reply(&d), nil
	}
	return h2.Reply{}, func(ctx context.Context, _ func([]byte) error) h2.Reply {
		if !decided {
			d, _ = s.decide(ctx, &q, true)
			pause = s.pauseOf(&d, q.peer)
		}
		if d.log != nil {
			d.log()
		}
		if pause > 0 {
			wait.Sleep(ctx, pause) // if ctx has ended, none reads the answer
		}
		return s.reply(&d)
	}
}

// notReadyPause bounds what is asked of a router that refuses everything.
const notReadyPause = 250 * time.Millisecond

// pauseOf returns how long the answer to a peer waits, if it is a refusal. One of a router that is not ready takes no
// token, because the peer is not to blame.
func (s *Server) pauseOf(d *decision, peer netip.Addr) time.Duration {
	switch {
	case d.refusal == nil:
		return 0
	case d.refusal.Reason == apierror.RouterNotReady:
		return notReadyPause
	}
	return s.peers.refused(peer)
}

// reply counts a decision and returns its reply.
func (s *Server) reply(d *decision) h2.Reply {
	if r := d.admitted; r != nil {
		s.metrics.admitted.Inc()
		answer, err := d.answer()
		if err != nil {
			r.Ended(true)
			return h2.Reply{Status: codes.Internal, Text: err.Error()}
		}
		return h2.Reply{Message: answer, Open: r, Ending: &r.ending}
	}
	s.metrics.requests.WithLabelValues(string(d.refusal.Reason)).Inc()
	answer, err := refused(d.refusal)
	if err != nil {
		return h2.Reply{Status: codes.Internal, Text: err.Error()}
	}
	return h2.Reply{Message: answer}
}
