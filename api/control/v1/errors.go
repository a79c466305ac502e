// Package controlv1 is the control protocol between routers and the allocator: what is
// generated from control.proto, and the errors that both ends have to know.
package controlv1

import (
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// ErrorDomain is the domain of the google.rpc.ErrorInfo that the allocator puts into
// the status of a stream if a router has to tell it from all others. No proxy, and no
// server of another kind, makes one.
const ErrorDomain = "control.berth.sh"

// ReasonDeclaredDead is the reason in the ErrorInfo of a stream that ends because an
// operator has declared its router dead.
const ReasonDeclaredDead = "ROUTER_DECLARED_DEAD"

// DeclaredDead is the end of the stream of a router that an operator has declared dead.
func DeclaredDead() error {
	s := status.New(codes.NotFound, "an operator has declared this router dead, so no release waits for it: it must end, and its successor joins under another router ID")
	if detailed, err := s.WithDetails(&errdetails.ErrorInfo{Domain: ErrorDomain, Reason: ReasonDeclaredDead}); err == nil {
		s = detailed
	}
	return s.Err()
}

// IsDeclaredDead reports whether err is, or wraps, what DeclaredDead made, here or at the
// other end of a stream. The code alone says nothing.
func IsDeclaredDead(err error) bool {
	s, _ := status.FromError(err)
	for _, d := range s.Details() {
		if info, ok := d.(*errdetails.ErrorInfo); ok && info.GetDomain() == ErrorDomain && info.GetReason() == ReasonDeclaredDead {
			return true
		}
	}
	return false
}
