package extproc

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"time"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/sandboxid"
	"github.com/berth-sandbox/berth/envoy"
)

// Options configure a Server. All are required unless they say otherwise.
type Options struct {
	// Socket is the path of the unix socket Envoy connects to.
	Socket string
	// Hosts says which host names mean what.
	Hosts Hosts
	// PodCIDRs are the ranges a destination may lie in.
	PodCIDRs []netip.Prefix
	// LookupTimeout bounds how long a request waits for the allocator's answer.
	// AnswerMost at most. Default 2 s.
	LookupTimeout time.Duration
	Routes        Routes
	Activity      Activity
	// Answers learns of every answer that admits a request, and when Envoy has read
	// it.
	Answers *Answers
	Metrics prometheus.Registerer
	Log     *zap.Logger
}

// Server answers Envoy: ext_proc and grpc.health.v1 on one unix socket.
type Server struct {
	extprocv3.UnimplementedExternalProcessorServer

	decider decider
	metrics *metrics
	log     *zap.Logger
	// refusals is log for refused requests, which clients can make as many as they like.
	refusals *zap.Logger
	grpc     *grpc.Server
	health   *health.Server
	socket   string
	held     atomic.Int64
	// connected is how many connections there are.
	connected atomic.Int64
	// forced: streams are ended from this side, whether Envoy has read or not.
	forced atomic.Bool
}

// socketPathMax is what fits into a unix socket's address (sockaddr_un).
const socketPathMax = 107

// New checks the options and returns a Server that does not listen yet.
func New(o Options) (*Server, error) {
	var errs []error
	if o.Socket == "" {
		errs = append(errs, errors.New("extproc: Options.Socket is required"))
	}
	if err := o.Hosts.Check(); err != nil {
		errs = append(errs, fmt.Errorf("extproc: Options.Hosts: %w", err))
	}
	if len(o.PodCIDRs) == 0 {
		errs = append(errs, errors.New("extproc: Options.PodCIDRs is required: the address ranges pods get their addresses from"))
	}
	if o.Routes == nil || o.Activity == nil || o.Answers == nil || o.Metrics == nil || o.Log == nil {
		errs = append(errs, errors.New("extproc: Options.Routes, Activity, Answers, Metrics and Log are required"))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	if o.LookupTimeout == 0 {
		o.LookupTimeout = 2 * time.Second
	}
	m, err := newMetrics(o.Metrics, o.Answers)
	if err != nil {
		return nil, fmt.Errorf("extproc: register metrics: %w", err)
	}
	s := &Server{
		decider: decider{hosts: o.Hosts, podCIDRs: o.PodCIDRs, wait: o.LookupTimeout, routes: o.Routes, activity: o.Activity, answers: o.Answers},
		metrics: m, log: o.Log, refusals: sampled(o.Log), socket: o.Socket,
		// No pings: a connection that we end because Envoy is silent, having been stopped
		// for hours, would look as if Envoy had ended its streams.
		grpc:   grpc.NewServer(grpc.KeepaliveParams(keepalive.ServerParameters{Time: math.MaxInt64})),
		health: health.NewServer(),
	}
	s.decider.park = s.park
	s.decider.verdict = func(waited time.Duration) { m.quiesced.Observe(waited.Seconds()) }
	extprocv3.RegisterExternalProcessorServer(s.grpc, s)
	healthv1.RegisterHealthServer(s.grpc, s.health)
	return s, nil
}

// Listen binds the socket. It puts it in place by renaming it over the path, so
// that Envoy goes over from a predecessor to this process without a gap. Once ctx has
// ended it returns ctx's error and replaces nothing: the socket may be a successor's.
func (s *Server) Listen(ctx context.Context) (net.Listener, error) {
	temporary := temporaryName(s.socket)
	if len(temporary) > socketPathMax {
		return nil, fmt.Errorf("router socket: %q is bound first and may have %d bytes, not %d: choose a shorter path", temporary, socketPathMax, len(temporary))
	}
	if err := os.Remove(temporary); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("router socket: %w", err)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: temporary, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("router socket: %w", err)
	}
	l.SetUnlinkOnClose(false)        // it may be a successor's by then
	if err = ctx.Err(); err == nil { // as late as can be
		err = os.Rename(temporary, s.socket)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("router socket: %w", err), l.Close(), os.Remove(temporary))
	}
	return l, nil
}

// temporaryName is where a process binds its socket before it renames it.
func temporaryName(socket string) string { return fmt.Sprintf("%s.%d", socket, os.Getpid()) }

// Serve answers on l until Stop. It returns nil after a Stop.
func (s *Server) Serve(l net.Listener) error {
	if err := s.grpc.Serve(counting{l, s}); !errors.Is(err, grpc.ErrServerStopped) { // stopped before it began
		return err
	}
	return nil
}

// counting counts the connections of a listener.
type counting struct {
	net.Listener
	server *Server
}

func (l counting) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	l.server.connected.Add(1)
	return &counted{Conn: c, server: l.server}, nil
}

type counted struct {
	net.Conn
	server *Server
	once   sync.Once
}

func (c *counted) Close() error {
	c.once.Do(func() { c.server.connected.Add(-1) })
	return c.Conn.Close()
}

// Connections is how many connections Envoy has to this server.
func (s *Server) Connections() int { return int(s.connected.Load()) }

// Stop ends the server: Envoy is told to take new requests elsewhere, those in
// progress are answered, until ctx ends. It must be called once.
func (s *Server) Stop(ctx context.Context) {
	s.health.Shutdown()
	done := make(chan struct{})
	go func() {
		defer close(done)
		s.grpc.GracefulStop()
	}()
	select {
	case <-done:
	case <-ctx.Done():
		s.forced.Store(true)
		s.grpc.Stop()
		<-done
	}
}

// Process implements ext_proc: one request-headers message, one answer. One that
// admits a request is open until Envoy has ended the stream, which it does when it
// has read the answer.
func (s *Server) Process(stream extprocv3.ExternalProcessor_ProcessServer) error {
	message, err := stream.Recv()
	if err != nil {
		return nil // Envoy went away before it asked
	}
	headers, ok := message.Request.(*extprocv3.ProcessingRequest_RequestHeaders)
	if !ok {
		return status.Errorf(codes.InvalidArgument, "expected request headers, got %T: check the processing mode in Envoy's configuration", message.Request)
	}
	r := readHeaders(headers.RequestHeaders)
	admission, refusal := s.decider.decide(stream.Context(), &r, func(d time.Duration) (func(), bool) { return s.hold(stream, d) })
	if refusal != nil {
		refusal.RequestID = r.requestID
		s.metrics.requests.WithLabelValues(string(refusal.Reason)).Inc()
		s.logRefusal(refusal)
		return stream.Send(refused(refusal, r.client()))
	}
	s.metrics.requests.WithLabelValues("admitted").Inc()
	err = stream.Send(admitted(admission))
	for err == nil {
		_, err = stream.Recv() // Envoy has nothing more to say
	}
	if !s.forced.Load() {
		admission.use.Read()
		s.decider.answers.End(admission.epoch)
	}
	return nil
}

const (
	// heldMost bounds the requests that wait for sandboxes that are starting or
	// quiesced: each holds a stream here, and memory in Envoy.
	heldMost = 2000
	// holdMost is how long one may wait.
	holdMost = envoy.MaxHold
)

// hold asks Envoy to wait for so long, and reports whether the request may be held.
func (s *Server) hold(stream extprocv3.ExternalProcessor_ProcessServer, d time.Duration) (release func(), ok bool) {
	if d <= 0 || d > holdMost {
		return nil, false
	}
	if s.held.Add(1) > heldMost {
		s.held.Add(-1)
		return nil, false
	}
	// With nothing else set this is no answer yet. It counts once.
	if err := stream.Send(&extprocv3.ProcessingResponse{OverrideMessageTimeout: durationpb.New(d + envoy.MessageTimeout)}); err != nil {
		s.held.Add(-1)
		return nil, false
	}
	s.metrics.held.Inc()
	return func() {
		s.held.Add(-1)
		s.metrics.held.Dec()
	}, true
}

// park reports whether a request may wait for the verdict on its sandbox, or for a port.
// Envoy is not asked for more time: AnswerMost bounds that wait too.
func (s *Server) park() (release func(), ok bool) {
	if s.held.Add(1) > heldMost {
		s.held.Add(-1)
		return nil, false
	}
	s.metrics.held.Inc()
	return func() {
		s.held.Add(-1)
		s.metrics.held.Dec()
	}, true
}

// refusalsMost is how many refusals a second are logged of each reason. All are counted
// in berth_router_requests_total.
const refusalsMost = 10

// sampled is a log that drops what is above refusalsMost of each message.
func sampled(log *zap.Logger) *zap.Logger {
	return log.WithOptions(zap.WrapCore(func(core zapcore.Core) zapcore.Core {
		return zapcore.NewSamplerWithOptions(core, time.Second, refusalsMost, 0)
	}))
}

func (s *Server) logRefusal(e *apierror.Error) {
	s.refusals.Info("refused: "+string(e.Reason),
		zap.String("reason", string(e.Reason)), zap.Int("code", e.Code),
		zap.String("requestId", e.RequestID), zap.String("sandbox", sandboxid.Short(e.SandboxID)))
}
