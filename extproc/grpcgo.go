package extproc

import (
	"math"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	grpcmetadata "google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/berth-sandbox/berth/extproc/wire"
)

// overGRPCGo serves by means of grpc-go. It is the reference for package h2: the tests run with both.
func (s *Server) overGRPCGo() transport {
	// No keepalive pings. If the server closed the connection of an Envoy that was paused, its streams
	// would end as if Envoy had read the answers.
	g := grpc.NewServer(grpc.KeepaliveParams(keepalive.ServerParameters{Time: math.MaxInt64}),
		grpc.ForceServerCodecV2(wire.Codec{}))
	s.Register(g)
	healthv1.RegisterHealthServer(g, s.health)
	return g
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

// Register makes s answer ext_proc on a gRPC server whose codec is wire.Codec.
func (s *Server) Register(with grpc.ServiceRegistrar) { with.RegisterService(&service, s) }

// process implements ext_proc: one request-headers message, one answer. The stream of an
// admitted request stays open until Envoy ends it, which Envoy does when it has read the
// answer.
func (s *Server) process(stream grpc.ServerStream) error {
	c := s.newCall()
	if err := stream.RecvMsg(&c.message); err != nil {
		c.free()
		return nil // Envoy ended the stream before it asked
	}
	if c.message.Other != "" {
		defer c.free()
		return status.Error(codes.InvalidArgument, c.wrongMessage())
	}
	if values := grpcmetadata.ValueFromIncomingContext(stream.Context(), "traceparent"); len(values) == 1 {
		c.traced(values[0])
	}
	answer, admitted := c.now()
	var err error
	if !admitted {
		c.keep()
		answer, admitted, err = c.later(stream.Context(), s.holderOf(func(a wire.Answer) error { return stream.SendMsg(a) }))
	}
	if err == nil {
		err = stream.SendMsg(answer)
	}
	if !admitted {
		c.free()
		return err
	}
	// Until Envoy resets the stream. A half-close may have crossed the answer, and proves nothing.
	<-stream.Context().Done()
	c.Ended(!s.forced.Load())
	return nil
}
