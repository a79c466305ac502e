package controlserver

import (
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// errUnsure ends a stream while the leader is not certain to hold the lease.
var errUnsure = status.Error(codes.FailedPrecondition, "this replica is not certain to hold the lease")
