// Command stock is the reference of the benchmark: an ext_proc server that does nothing. It is grpc-go with the
// generated types and the defaults of Go. It names a destination in dynamic metadata and does nothing else: no
// routes that change, no access rules, no account of the use.
package main

import (
	"flag"
	"log"
	"net"
	"net/http"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/berth-sandbox/berth/bench/hop/table"
)

func main() {
	socket := flag.String("socket", "", "unix socket for Envoy")
	admin := flag.String("admin", "", "address of /metrics")
	file := flag.String("table", "", "file with a host and a destination in each line")
	one := flag.Bool("one", false, "answer the destination of the first line to every request")
	namespace := flag.String("namespace", "stock", "namespace of the metadata")
	flag.Parse()
	log.Fatal(run(*socket, *admin, *file, *namespace, *one))
}

func run(socket, admin, file, namespace string, one bool) error {
	all, first, err := table.Read(file)
	if err != nil {
		return err
	}
	s := &server{namespace: namespace, first: first}
	if !one {
		s.all = all
	}
	pages, err := net.Listen("tcp", admin)
	if err != nil {
		return err
	}
	go func() { log.Fatal(http.Serve(pages, promhttp.Handler())) }()
	l, err := net.Listen("unix", socket)
	if err != nil {
		return err
	}
	g := grpc.NewServer()
	extprocv3.RegisterExternalProcessorServer(g, s)
	return g.Serve(l)
}

type server struct {
	extprocv3.UnimplementedExternalProcessorServer
	all       map[string]string // nil: every request gets first
	first     string
	namespace string
}

func (s *server) Process(stream extprocv3.ExternalProcessor_ProcessServer) error {
	for {
		m, err := stream.Recv()
		if err != nil {
			return nil // Envoy resets the stream when it has read the answer
		}
		dst := s.first
		if s.all != nil {
			dst = s.all[authority(m)]
		}
		err = stream.Send(&extprocv3.ProcessingResponse{
			Response: &extprocv3.ProcessingResponse_RequestHeaders{RequestHeaders: &extprocv3.HeadersResponse{}},
			DynamicMetadata: &structpb.Struct{Fields: map[string]*structpb.Value{
				s.namespace: structpb.NewStructValue(&structpb.Struct{Fields: map[string]*structpb.Value{
					"dst": structpb.NewStringValue(dst), "id": structpb.NewStringValue("one"),
				}}),
			}},
		})
		if err != nil {
			return err
		}
	}
}

func authority(m *extprocv3.ProcessingRequest) string {
	for _, h := range m.GetRequestHeaders().GetHeaders().GetHeaders() {
		if h.GetKey() == ":authority" {
			return string(h.GetRawValue())
		}
	}
	return ""
}
