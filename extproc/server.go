package extproc

import (
	"cmp"
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
	"github.com/berth-sandbox/berth/extproc/wire"
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
	Activity      Activity
	// Admissions counts every admitting answer until Envoy has read it.
	Admissions *Admissions
	// TeamKeys open sandboxes whose access is that of a team.
	TeamKeys *TeamKeys
	Metrics  prometheus.Registerer
	Log      *zap.Logger
}

// Server answers Envoy: ext_proc and grpc.health.v1 on one unix socket.
type Server struct {
	decider decider
	metrics *metrics
	// refusals is the rate-limited log of refused requests.
	refusals *zap.Logger
	grpc     *grpc.Server
	health   *health.Server
	held     atomic.Int64
	// connections is the number of open connections.
	connections atomic.Int64
	calls       sync.Pool // of *call
	// forced is set when this process ends streams whose answers Envoy may not have read.
	forced atomic.Bool
}

// maxSocketPath is what fits into a unix socket address (sockaddr_un).
const maxSocketPath = 107

// New checks the options and returns a Server that does not listen yet.
func New(o Options) (*Server, error) {
	err := options.Require(o, "Socket", "PodCIDRs", "Routes", "Activity", "Admissions", "TeamKeys", "Metrics", "Log")
	if hostsErr := o.Hosts.Check(); hostsErr != nil {
		err = errors.Join(err, fmt.Errorf("extproc.Options.Hosts: %w", hostsErr))
	}
	if err != nil {
		return nil, err
	}
	o.LookupTimeout = cmp.Or(o.LookupTimeout, 2*time.Second)
	s := &Server{
		decider: decider{o: o}, refusals: sampled(o.Log),
		// No keepalive pings. If the server closed the connection of an Envoy that was paused,
		// its streams would end as if Envoy had read the answers.
		grpc: grpc.NewServer(grpc.KeepaliveParams(keepalive.ServerParameters{Time: math.MaxInt64}),
			grpc.ForceServerCodecV2(wire.Codec{})),
		health: health.NewServer(),
		calls:  sync.Pool{New: func() any { return new(call) }},
	}
	s.decider.park = s.park
	s.decider.verdictWait = func(waited time.Duration) { s.metrics.quiesced.Observe(waited.Seconds()) }
	if s.metrics, err = newMetrics(o.Metrics, o.Admissions.Unread, s.held.Load); err != nil {
		return nil, fmt.Errorf("extproc: register metrics: %w", err)
	}
	s.Register(s.grpc)
	healthv1.RegisterHealthServer(s.grpc, s.health)
	return s, nil
}

// Listen binds the socket at a temporary path and renames it over Options.Socket, so that
// Envoy changes from a predecessor to this process without a gap. If ctx has ended it
// returns ctx's error and replaces nothing, because the path may belong to a successor.
func (s *Server) Listen(ctx context.Context) (net.Listener, error) {
	temporary := temporaryName(s.decider.o.Socket)
	if len(temporary) > maxSocketPath {
		return nil, fmt.Errorf(
			"router socket: the temporary path %q has %d bytes, at most %d are possible: choose a shorter path",
			temporary, len(temporary), maxSocketPath)
	}
	if err := os.Remove(temporary); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("router socket: %w", err)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: temporary, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("router socket: %w", err)
	}
	l.SetUnlinkOnClose(false)        // the path may belong to a successor by then
	if err = ctx.Err(); err == nil { // checked as late as possible
		err = os.Rename(temporary, s.decider.o.Socket)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("router socket: %w", err), l.Close(), os.Remove(temporary))
	}
	return l, nil
}

// temporaryName is the path at which this process binds its socket before the rename.
func temporaryName(socket string) string { return fmt.Sprintf("%s.%d", socket, os.Getpid()) }

// Serve answers on l until Stop, and then returns nil.
func (s *Server) Serve(l net.Listener) error {
	if err := s.grpc.Serve(counting{l, s}); !errors.Is(err, grpc.ErrServerStopped) { // Stop came before Serve
		return err
	}
	return nil
}

// counting counts the open connections of a listener.
type counting struct {
	net.Listener
	server *Server
}

func (l counting) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	l.server.connections.Add(1)
	return &counted{Conn: c, server: l.server}, nil
}

type counted struct {
	net.Conn
	server *Server
	once   sync.Once
}

func (c *counted) Close() error {
	c.once.Do(func() { c.server.connections.Add(-1) })
	return c.Conn.Close()
}

// Connections returns how many connections Envoy has to this server.
func (s *Server) Connections() int { return int(s.connections.Load()) }

// Stop ends the server. It asks Envoy to send new requests elsewhere and answers those in
// progress until ctx ends. It must be called once.
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

// service is ext_proc's service, with messages of package wire in place of the generated types.
var service = grpc.ServiceDesc{
	ServiceName: extprocv3.ExternalProcessor_ServiceDesc.ServiceName,
	HandlerType: (*any)(nil),
	Streams: []grpc.StreamDesc{{
		StreamName:    "Process",
		Handler:       func(server any, stream grpc.ServerStream) error { return server.(*Server).process(stream) },
		ServerStreams: true, ClientStreams: true,
	}},
	Metadata: extprocv3.ExternalProcessor_ServiceDesc.Metadata,
}

// Register makes s answer ext_proc on a gRPC server whose codec is wire.Codec. New does it for its own.
func (s *Server) Register(with grpc.ServiceRegistrar) { with.RegisterService(&service, s) }

// call is the memory of one call of process. It is used again for another one.
type call struct {
	message wire.Request
	request request // views into message
}

func (s *Server) endCall(c *call) {
	c.message.Reset()
	c.request = request{}
	s.calls.Put(c)
}

// process implements ext_proc: one request-headers message, one answer. The stream of an
// admitted request stays open until Envoy ends it, which Envoy does when it has read the
// answer.
func (s *Server) process(stream grpc.ServerStream) error {
	c := s.calls.Get().(*call)
	defer s.endCall(c) // nothing that outlives this call is a view into the message
	if err := stream.RecvMsg(&c.message); err != nil {
		return nil // Envoy ended the stream before it asked
	}
	if c.message.Other != "" {
		return status.Errorf(codes.InvalidArgument,
			"expected request headers, got %s: check the processing mode in Envoy's configuration", c.message.Other)
	}
	c.request = readHeaders(c.message.Headers)
	r := &c.request
	hold := func(d time.Duration) (func(), bool) { return s.hold(stream, d) }
	admission, refusal := s.decider.decide(stream.Context(), r, hold)
	if refusal != nil {
		refusal.RequestID = string(r.requestID)
		s.metrics.requests.WithLabelValues(string(refusal.Reason)).Inc()
		s.logRefusal(refusal)
		return stream.SendMsg(refused(refusal, r.client(), s.decider.o.E2BStatuses))
	}
	if admission.redirect != nil {
		s.metrics.requests.WithLabelValues(linkReason).Inc()
		return stream.SendMsg(redirected(admission.redirect))
	}
	s.metrics.admitted.Inc()
	answer, err := admission.answer()
	if err == nil {
		err = stream.SendMsg(answer)
	}
	for err == nil {
		err = stream.RecvMsg(&c.message) // until Envoy resets the stream
	}
	if !s.forced.Load() {
		admission.use.Read()
		s.decider.o.Admissions.Done(admission.epoch)
	}
	return nil
}

const (
	// maxHeld bounds the requests that wait for sandboxes that are starting or quiesced. Each
	// holds a stream here, and memory in Envoy.
	maxHeld = 2000
	// maxHold bounds how long one request is held.
	maxHold = envoy.MaxHold
)

// hold asks Envoy to wait for d longer, and reports whether the request may be held.
func (s *Server) hold(stream grpc.ServerStream, d time.Duration) (release func(), ok bool) {
	if d <= 0 || d > maxHold {
		return nil, false
	}
	if release, ok = s.park(); !ok {
		return nil, false
	}
	// A message that sets only the timeout is no answer. Envoy accepts one per request.
	more := &extprocv3.ProcessingResponse{OverrideMessageTimeout: durationpb.New(d + envoy.MessageTimeout)}
	if err := stream.SendMsg(more); err != nil {
		release()
		return nil, false
	}
	return release, true
}

// park reports whether one more request may wait, and counts it until release is called. Envoy
// need not be asked for more time if MaxWait bounds the wait.
func (s *Server) park() (release func(), ok bool) {
	release = func() { s.held.Add(-1) }
	if s.held.Add(1) > maxHeld {
		release()
		return nil, false
	}
	return release, true
}

// maxRefusalsLogged is how many refusals per second are logged for each reason. The metric
// berth_router_requests_total counts all of them.
const maxRefusalsLogged = 10

// sampled returns log with at most maxRefusalsLogged lines per second and message.
func sampled(log *zap.Logger) *zap.Logger {
	return log.WithOptions(zap.WrapCore(func(core zapcore.Core) zapcore.Core {
		return zapcore.NewSamplerWithOptions(core, time.Second, maxRefusalsLogged, 0)
	}))
}

func (s *Server) logRefusal(e *apierror.Error) {
	s.refusals.Info("refused: "+string(e.Reason),
		zap.String("reason", string(e.Reason)), zap.Int("code", e.Code),
		zap.String("requestID", e.RequestID), zap.String("sandboxID", sandboxid.Short(e.SandboxID)))
}
