package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync/atomic"

	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	"google.golang.org/grpc"

	controlv1 "github.com/berth-sandbox/berth/api/control/v1"
	"github.com/berth-sandbox/berth/bench/hop/table"
)

// leader is an allocator's leader for routers: it gives each of them the same routes over the real protocol, and
// answers pings. Its sandboxes have no idle timeout, so it asks no questions.
type leader struct {
	controlv1.UnimplementedControlServer
	addr   string
	server *grpc.Server

	routes []*controlv1.Route
	// spans are how many a collector of traces has received.
	spans atomic.Int64
}

func startLeader(sandboxes int) (*leader, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	s := &leader{addr: l.Addr().String(), server: grpc.NewServer()}
	for i := range sandboxes {
		route := &controlv1.Route{SandboxId: table.ID(i), PodIp: table.Addr(i).String(), DefaultPort: 8080}
		s.routes = append(s.routes, route)
	}
	controlv1.RegisterControlServer(s.server, s)
	collector.RegisterTraceServiceServer(s.server, traces{leader: s})
	go func() { _ = s.server.Serve(l) }() // ends with Stop
	return s, nil
}

// traces is a collector that counts.
type traces struct {
	collector.UnimplementedTraceServiceServer
	leader *leader
}

// Export implements OTLP.
func (t traces) Export(
	_ context.Context, request *collector.ExportTraceServiceRequest,
) (*collector.ExportTraceServiceResponse, error) {
	for _, r := range request.GetResourceSpans() {
		for _, scope := range r.GetScopeSpans() {
			t.leader.spans.Add(int64(len(scope.GetSpans())))
		}
	}
	return &collector.ExportTraceServiceResponse{}, nil
}

// Session implements the control protocol.
func (l *leader) Session(stream controlv1.Control_SessionServer) error {
	m, err := stream.Recv()
	if err != nil {
		return err
	}
	if m.GetJoin() == nil {
		return fmt.Errorf("the first message is %T", m.GetMessage())
	}
	if err := l.join(stream); err != nil {
		return err
	}
	for {
		m, err := stream.Recv()
		switch {
		case errors.Is(err, io.EOF), errors.Is(err, context.Canceled), m.GetGoodbye() != nil:
			return nil
		case err != nil:
			return err
		}
		answer := &controlv1.AllocatorMessage{}
		switch {
		case m.GetPing() != nil:
			answer.Message = &controlv1.AllocatorMessage_Pong{Pong: &controlv1.Pong{Nonce: m.GetPing().GetNonce()}}
		case m.GetResolve() != nil:
			answer.Message = &controlv1.AllocatorMessage_Resolved{Resolved: &controlv1.Resolved{
				SandboxId: m.GetResolve().GetSandboxId(), Answer: &controlv1.Resolved_Unknown{Unknown: &controlv1.Unknown{}},
			}}
		default:
			continue // reports and acknowledgements need no answer
		}
		if err := send(stream, answer, 0); err != nil {
			return err
		}
	}
}

// join sends all routes.
func (l *leader) join(stream controlv1.Control_SessionServer) error {
	sequence := uint64(0)
	for part := range slices.Chunk(l.routes, 1000) {
		sequence++
		m := &controlv1.AllocatorMessage_Snapshot{Snapshot: &controlv1.Snapshot{
			Routes: part, Last: int(sequence)*1000 >= len(l.routes),
		}}
		if err := send(stream, &controlv1.AllocatorMessage{Message: m}, sequence); err != nil {
			return err
		}
	}
	return nil
}

func send(stream controlv1.Control_SessionServer, m *controlv1.AllocatorMessage, sequence uint64) error {
	m.Term, m.Journal, m.Position, m.Sequence = 1, "bench", 1, sequence
	return stream.Send(m)
}
