package main

import (
	"errors"
	"io"
	"net/http"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

// echoService is the gRPC service berth.demo.Echo. Its one method, Echo, streams
// both ways: each google.protobuf.StringValue is sent back as it came, until the
// caller has sent all.
var echoService = grpc.ServiceDesc{
	ServiceName: "berth.demo.Echo", HandlerType: (*any)(nil),
	Streams: []grpc.StreamDesc{{StreamName: "Echo", ServerStreams: true, ClientStreams: true, Handler: func(_ any, stream grpc.ServerStream) error {
		for {
			var m wrapperspb.StringValue
			switch err := stream.RecvMsg(&m); {
			case errors.Is(err, io.EOF):
				return nil
			case err != nil:
				return err
			}
			if err := stream.SendMsg(&m); err != nil {
				return err
			}
		}
	}}},
}

// remote answers gRPC calls, and leaves everything else to next.
func remote(next http.HandlerFunc) http.HandlerFunc {
	server := grpc.NewServer()
	server.RegisterService(&echoService, nil)
	return func(w http.ResponseWriter, r *http.Request) {
		if r.ProtoMajor == 2 && strings.HasPrefix(r.Header.Get("Content-Type"), "application/grpc") {
			server.ServeHTTP(w, r)
			return
		}
		next(w, r)
	}
}
