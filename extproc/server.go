package extproc

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/metric"
	"github.com/berth-sandbox/berth/api/sandboxid"
	"github.com/berth-sandbox/berth/envoy"
	"github.com/berth-sandbox/berth/extproc/socket"
	"github.com/berth-sandbox/berth/extproc/wire"
	"github.com/berth-sandbox/berth/internal/loglimit"
	"github.com/berth-sandbox/berth/internal/options"
)

// Options configure a Server. All are required unless they say otherwise.
type Options struct {
	// Socket is the path of the unix socket that Envoy connects to.
	Socket string
	// Hosts are the host names that are served.
	Hosts Hosts
	// E2BStatuses answers every client, not only E2B's SDKs, as E2B does for sandboxes that are
	// unknown or have ended, and for closed ports. Optional.
	E2BStatuses bool
	// PodCIDRs are the address ranges of destinations.
	PodCIDRs []netip.Prefix
	// LookupTimeout bounds how long a request waits for the allocator's answer. At most
	// MaxWait. Default 2 s.
	LookupTimeout time.Duration
	Routes        Routes
	Sandboxes     Sandboxes
	// TeamKeys open sandboxes whose access is that of a team.
	TeamKeys *TeamKeys
	// Trace gets each decision about a request that Envoy traces. It must not block. Optional.
	Trace func(Traced)
	// GRPCGo has grpc-go serve the socket, instead of package h2. Both answer the same. Optional.
	GRPCGo  bool
	Metrics prometheus.Registerer
	Log     *zap.Logger
}

// Server answers Envoy: ext_proc and grpc.health.v1 on one unix socket.
type Server struct {
	decider decider
	metrics *metrics
	started time.Time
	// refusals is the rate-limited log of refused requests.
	refusals    *zap.Logger
	transport   transport
	health      *health.Server
	held        places
	waiting     atomic.Int64 // bytes, see maxWaiting
	connections *socket.Connections
	calls       sync.Pool // of *call
	// forced is set when this process ends streams whose answers Envoy may not have read.
	forced atomic.Bool
}

// transport is a gRPC server.
type transport interface {
	// Serve serves l until GracefulStop or Stop.
	Serve(l net.Listener) error
	// GracefulStop takes no new calls and waits until the present ones have ended.
	GracefulStop()
	// Stop closes all connections.
	Stop()
}

// New checks the options and returns a Server that does not listen yet.
func New(o Options) (*Server, error) {
	err := options.Require(o, "Socket", "PodCIDRs", "Routes", "Sandboxes", "TeamKeys", "Metrics", "Log")
	if hostsErr := o.Hosts.Check(); hostsErr != nil {
		err = errors.Join(err, fmt.Errorf("extproc.Options.Hosts: %w", hostsErr))
	}
	if err != nil {
		return nil, err
	}
	o.LookupTimeout = cmp.Or(o.LookupTimeout, 2*time.Second)
	s := &Server{
		decider: decider{o: o}, started: time.Now(), refusals: loglimit.PerMessage(o.Log, maxRefusalsLogged, time.Second), health: health.NewServer(),
	}
	s.connections = socket.NewConnections(s.refusals)
	s.calls.New = func() any { return &call{server: s} }
	s.decider.park = s.park
	s.decider.full = func() bool { return s.waiting.Load() > maxWaiting }
	s.decider.limited = func(pool string, reason apierror.Reason) { s.metrics.countLimited(pool, reason) }
	s.decider.verdictWait = func(waited time.Duration) { s.metrics.quiesced.Observe(waited.Seconds()) }
	s.decider.wakeWait = func(waited time.Duration) { s.metrics.wakes.Observe(waited.Seconds()) }
	if s.metrics, err = newMetrics(o.Metrics, o.Sandboxes.Unread, s.held.len); err != nil {
		return nil, fmt.Errorf("extproc: register metrics: %w", err)
	}
	if o.GRPCGo {
		s.transport = s.overGRPCGo()
	} else {
		s.transport = s.overH2()
	}
	return s, nil
}

// Listen binds the socket at a temporary path and renames it over Options.Socket, so that
// Envoy changes from a predecessor to this process without a gap. If ctx has ended it
// returns ctx's error and replaces nothing, because the path may belong to a successor.
func (s *Server) Listen(ctx context.Context) (net.Listener, error) {
	return socket.Listen(ctx, s.decider.o.Socket)
}

// Serve answers on l until Stop, and then returns nil.
func (s *Server) Serve(l net.Listener) error {
	if err := s.transport.Serve(s.connections.Limit(l)); !errors.Is(err, grpc.ErrServerStopped) { // Stop came before Serve
		return err
	}
	return nil
}

// Connections returns how many connections Envoy has to this server.
func (s *Server) Connections() int { return s.connections.Open() }

// Stop ends the server. It asks Envoy to send new requests elsewhere and answers those in
// progress until ctx ends. It must be called once.
func (s *Server) Stop(ctx context.Context) {
	s.health.Shutdown()
	done := make(chan struct{})
	go func() {
		defer close(done)
		s.transport.GracefulStop()
	}()
	select {
	case <-done:
	case <-ctx.Done():
		s.forced.Store(true)
		s.transport.Stop()
		<-done
	}
}

// maxKeptAnswer bounds the buffer that a call keeps for the next one. An answer with a path may have 64 KB.
const maxKeptAnswer = 1 << 10

// call is the memory of one call of ext_proc. It is used again for another one.
type call struct {
	server   *Server
	message  wire.Request
	began    time.Duration // when the message was there, since server.started
	request  request       // views into message, until keep
	kept     int           // bytes of waiting that are this call's
	decision decision
	answer   wire.Answer // that admits the request
	trace    string      // of a request that Envoy traces, else ""
}

func (s *Server) newCall() *call { return s.calls.Get().(*call) }

// free ends the call. Nothing that outlives it is a view into its message.
func (c *call) free() {
	c.message.Reset()
	c.server.waiting.Add(-int64(c.kept))
	c.request, c.decision, c.kept, c.trace = request{}, decision{}, 0, ""
	if cap(c.answer) > maxKeptAnswer {
		c.answer = nil
	}
	c.server.calls.Put(c)
}

// Ended ends the call of an admitted request. Only an end by Envoy shows that it has read the answer.
func (c *call) Ended(byEnvoy bool) {
	if byEnvoy {
		c.decision.admission.Read()
	}
	c.free()
}

// wrongMessage is why a message gets no answer.
func (c *call) wrongMessage() string {
	return fmt.Sprintf("expected request headers, got %s: check the processing mode in Envoy's configuration", c.message.Other)
}

const (
	// waitCost is what a request costs that waits, beside what it keeps: two goroutines' stacks and a stream.
	waitCost = 16 << 10
	// maxWaiting bounds the bytes of all requests that wait. The chart gives the router 256 MiB.
	maxWaiting = 64 << 20
)

// keep has the call keep what a decision reads of its message, and nothing else. A request that waits keeps it.
func (c *call) keep() {
	c.kept = waitCost + c.request.keep(&c.server.decider.o.Hosts)
	c.server.waiting.Add(int64(c.kept))
	c.message = wire.Request{}
}

// now returns the answer that admits the request, if that needs no wait. See admitted.
func (c *call) now() (answer wire.Answer, ok bool) {
	if c.message.Other != "" {
		return nil, false
	}
	c.began = time.Since(c.server.started)
	c.request = readHeaders(c.message.Headers)
	if c.decision, ok = c.server.decider.hit(&c.request); !ok {
		return nil, false
	}
	return c.admitted(), true
}

// later answers the request that keep has kept, which may wait until ctx ends. It also returns whether the request is
// admitted. See admitted.
func (c *call) later(ctx context.Context, hold holder) (answer wire.Answer, admitted bool, err error) {
	s, r := c.server, &c.request
	to, refusal := s.decider.decide(ctx, r, hold)
	c.decision = to
	if refusal != nil {
		refusal.RequestID = string(r.requestID)
		c.tellTrace(string(refusal.Reason), refusal.SandboxID)
		s.metrics.requests.WithLabelValues(string(refusal.Reason)).Inc()
		s.logRefusal(refusal)
		answer, err = wire.Encode(refused(refusal, r.client(), s.decider.o.E2BStatuses))
		return answer, false, err
	}
	if to.preflight {
		c.tellTrace(preflightReason, "")
		s.metrics.requests.WithLabelValues(preflightReason).Inc()
		answer, err = wire.Encode(preflighted())
		return answer, false, err
	}
	if to.redirect != nil {
		c.tellTrace(linkReason, to.id.String())
		s.metrics.requests.WithLabelValues(linkReason).Inc()
		answer, err = wire.Encode(redirected(to.redirect))
		return answer, false, err
	}
	return c.admitted(), true, nil
}

// admitted counts the admitted request and returns its answer, which is valid until the call ends. Envoy may read it
// until the stream ends, and Ended must be called then.
func (c *call) admitted() wire.Answer {
	m := c.server.metrics
	m.admitted.Inc()
	c.answer = c.decision.appendAnswer(c.answer[:0])
	if c.trace != "" {
		c.tellTrace(metric.OutcomeAdmitted, c.decision.id.String())
	}
	if !c.decision.held {
		metric.Observe(m.admission, (time.Since(c.server.started) - c.began).Seconds(), c.traceID())
	}
	return c.answer
}

// maxHold bounds how long one request is held.
const maxHold = envoy.MaxHold

// holderOf returns how a request is held whose messages to Envoy go through send.
func (s *Server) holderOf(send func(wire.Answer) error) holder {
	return func(id sandboxid.Key, d time.Duration) (release func(), ok bool) {
		if d <= 0 || d > maxHold {
			return nil, false
		}
		if release, ok = s.park(id); !ok {
			return nil, false
		}
		// A message that sets only the timeout is no answer. Envoy accepts one per request.
		more, err := wire.Encode(&extprocv3.ProcessingResponse{OverrideMessageTimeout: durationpb.New(d + envoy.MessageTimeout)})
		if err == nil {
			err = send(more)
		}
		if err != nil {
			release()
			return nil, false
		}
		return release, true
	}
}

// park reports whether one more request for a sandbox may wait, and counts it until release is called. Envoy
// need not be asked for more time if MaxWait bounds the wait.
func (s *Server) park(id sandboxid.Key) (release func(), ok bool) {
	if !s.held.take(id) {
		return nil, false
	}
	return func() { s.held.giveBack(id) }, true
}

// maxRefusalsLogged is how many refusals per second are logged for each reason. The metric
// berth_router_requests_total counts all of them.
const maxRefusalsLogged = 10

func (s *Server) logRefusal(e *apierror.Error) {
	s.refusals.Info("refused: "+string(e.Reason),
		zap.String("reason", string(e.Reason)), zap.Int("code", e.Code),
		zap.String("requestID", e.RequestID), zap.String("sandboxID", sandboxid.Short(e.SandboxID)))
}
