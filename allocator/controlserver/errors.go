package controlserver

import (
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

var (
	// errUnsure ends a stream while the leader is not certain to hold the lease.
	errUnsure = status.Error(codes.FailedPrecondition, "this replica is not certain to hold the lease")
	// errStopping ends all streams at Stop.
	errStopping = status.Error(codes.FailedPrecondition, "this replica is stopping")
)
