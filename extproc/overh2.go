package extproc

import (
	"context"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/berth-sandbox/berth/extproc/h2"
	"github.com/berth-sandbox/berth/extproc/wire"
)

// overH2 serves by means of package h2.
func (s *Server) overH2() transport {
	return h2.NewServer(map[string]h2.Handler{
		extprocv3.ExternalProcessor_Process_FullMethodName: asker{s},
		healthv1.Health_Check_FullMethodName:               healthCheck{s.health},
		healthv1.Health_Watch_FullMethodName:               healthWatch{s.health},
	})
}

// asker answers ext_proc's messages.
type asker struct{ server *Server }

// Now admits a request whose route is known. Every other answer comes later, because it may wait, or
// writes to the log.
func (h asker) Now(message []byte, trace string) (h2.Reply, h2.Later) {
	c := h.server.newCall()
	c.traced(trace)
	if err := c.message.Read(message); err != nil {
		c.free()
		return h2.Reply{Status: codes.Internal, Text: "the message is no ProcessingRequest: " + err.Error()}, nil
	}
	if c.message.Other != "" {
		defer c.free()
		return h2.Reply{Status: codes.InvalidArgument, Text: c.wrongMessage()}, nil
	}
	if answer, ok := c.now(); ok {
		return h2.Reply{Message: answer, Open: c}, nil
	}
	c.keep() // here, so that no message waits for a goroutine
	return h2.Reply{}, func(ctx context.Context, send func([]byte) error) h2.Reply { return h.later(ctx, c, send) }
}

// later answers what Now did not.
func (h asker) later(ctx context.Context, c *call, send func([]byte) error) h2.Reply {
	answer, admitted, err := c.later(ctx, h.server.holderOf(func(a wire.Answer) error { return send(a) }))
	switch {
	case admitted:
		return h2.Reply{Message: answer, Open: c}
	case err != nil:
		c.free()
		return h2.Reply{Status: codes.Internal, Text: err.Error()}
	}
	c.free()
	return h2.Reply{Message: answer}
}

// healthCheck answers Check of grpc.health.v1.
type healthCheck struct{ server healthv1.HealthServer }

func (h healthCheck) Now(message []byte, _ string) (h2.Reply, h2.Later) {
	request, err := healthRequest(message)
	if err != nil {
		return failed(err), nil
	}
	return h2.Reply{}, func(ctx context.Context, _ func([]byte) error) h2.Reply {
		response, err := h.server.Check(ctx, request)
		if err != nil {
			return failed(err)
		}
		answer, err := proto.Marshal(response)
		if err != nil {
			return failed(err)
		}
		return h2.Reply{Message: answer}
	}
}

// healthWatch answers Watch of grpc.health.v1, until the client ends it.
type healthWatch struct{ server healthv1.HealthServer }

func (h healthWatch) Now(message []byte, _ string) (h2.Reply, h2.Later) {
	request, err := healthRequest(message)
	if err != nil {
		return failed(err), nil
	}
	return h2.Reply{}, func(ctx context.Context, send func([]byte) error) h2.Reply {
		return failed(h.server.Watch(request, &healthStream{ctx: ctx, send: send}))
	}
}

func healthRequest(message []byte) (*healthv1.HealthCheckRequest, error) {
	var request healthv1.HealthCheckRequest
	if err := proto.Unmarshal(message, &request); err != nil {
		return nil, status.Errorf(codes.Internal, "the message is no HealthCheckRequest: %v", err)
	}
	return &request, nil
}

func failed(err error) h2.Reply {
	return h2.Reply{Status: status.Code(err), Text: status.Convert(err).Message()}
}

// healthStream is where Watch sends its answers.
type healthStream struct {
	grpc.ServerStream // its other methods are not called
	ctx               context.Context
	send              func([]byte) error
}

func (s *healthStream) Context() context.Context { return s.ctx }

func (s *healthStream) Send(r *healthv1.HealthCheckResponse) error {
	b, err := proto.Marshal(r)
	if err != nil {
		return err
	}
	return s.send(b)
}
