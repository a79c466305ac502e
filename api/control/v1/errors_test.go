package controlv1_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/protoadapt"

	controlv1 "github.com/berth-sandbox/berth/api/control/v1"
)

func TestOnlyTheReasonOfTheAllocatorDeclaresDead(t *testing.T) {
	with := func(code codes.Code, details ...protoadapt.MessageV1) error {
		s, err := status.New(code, "no").WithDetails(details...)
		require.NoError(t, err)
		return s.Err()
	}
	dead := &errdetails.ErrorInfo{Domain: controlv1.ErrorDomain, Reason: controlv1.ReasonDeclaredDead}
	for name, c := range map[string]struct {
		err  error
		want bool
	}{
		"declared dead":      {controlv1.DeclaredDead(), true},
		"wrapped":            {fmt.Errorf("control stream: %w", controlv1.DeclaredDead()), true},
		"among other things": {with(codes.Aborted, &errdetails.RetryInfo{}, dead), true},

		"none":              {nil, false},
		"no status":         {errors.New("declared dead"), false},
		"the code alone":    {status.Error(codes.NotFound, "declared dead"), false},
		"another detail":    {with(codes.NotFound, &errdetails.DebugInfo{Detail: controlv1.ReasonDeclaredDead}), false},
		"another domain":    {with(codes.NotFound, &errdetails.ErrorInfo{Domain: "example.com", Reason: controlv1.ReasonDeclaredDead}), false},
		"no domain":         {with(codes.NotFound, &errdetails.ErrorInfo{Reason: controlv1.ReasonDeclaredDead}), false},
		"another reason":    {with(codes.NotFound, &errdetails.ErrorInfo{Domain: controlv1.ErrorDomain, Reason: "ROUTER_UNKNOWN"}), false},
		"not our procedure": {status.Error(codes.Unimplemented, "unknown service"), false},
	} {
		require.Equal(t, c.want, controlv1.IsDeclaredDead(c.err), name)
	}
	// The code must not change, because routers of other versions may compare it.
	require.Equal(t, codes.NotFound, status.Code(controlv1.DeclaredDead()))
}
