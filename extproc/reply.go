package extproc

import (
	"strconv"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/envoy"
)

// admitted tells Envoy where the request goes. Nothing else of it is changed.
func admitted(a *admission) *extprocv3.ProcessingResponse {
	return &extprocv3.ProcessingResponse{
		Response: &extprocv3.ProcessingResponse_RequestHeaders{RequestHeaders: &extprocv3.HeadersResponse{}},
		DynamicMetadata: metadata(map[string]*structpb.Value{
			envoy.MetadataDst: structpb.NewStringValue(a.dst.String()),
			envoy.MetadataID:  structpb.NewStringValue(a.id),
		}),
	}
}

// refused answers the client in the sandbox's place.
func refused(e *apierror.Error) *extprocv3.ProcessingResponse {
	headers := []*corev3.HeaderValueOption{
		setHeader("content-type", "application/json"),
		setHeader(envoy.ReasonHeader, string(e.Reason)),
	}
	if e.RetryAfter > 0 {
		headers = append(headers, setHeader("retry-after", strconv.Itoa(e.RetryAfter)))
	}
	return &extprocv3.ProcessingResponse{
		Response: &extprocv3.ProcessingResponse_ImmediateResponse{ImmediateResponse: &extprocv3.ImmediateResponse{
			Status:     &typev3.HttpStatus{Code: typev3.StatusCode(e.Code)},
			Headers:    &extprocv3.HeaderMutation{SetHeaders: headers},
			Body:       e.JSON(),
			GrpcStatus: &extprocv3.GrpcStatus{Status: uint32(grpcStatus(e.Code))},
			Details:    "berth_" + string(e.Reason),
		}},
		DynamicMetadata: metadata(map[string]*structpb.Value{
			envoy.MetadataReply: structpb.NewStringValue(string(e.Reason)),
		}),
	}
}

// grpcStatus is what a gRPC client is told: Envoy's own table would make
// "unimplemented" of a 404.
func grpcStatus(code int) codes.Code {
	switch code {
	case 400, 405:
		return codes.InvalidArgument
	case 404, 410:
		return codes.NotFound
	case 503:
		return codes.Unavailable
	}
	return codes.Internal
}

func metadata(fields map[string]*structpb.Value) *structpb.Struct {
	return &structpb.Struct{Fields: map[string]*structpb.Value{
		envoy.MetadataNamespace: structpb.NewStructValue(&structpb.Struct{Fields: fields}),
	}}
}

func setHeader(name, value string) *corev3.HeaderValueOption {
	return &corev3.HeaderValueOption{
		Header:       &corev3.HeaderValue{Key: name, RawValue: []byte(value)},
		AppendAction: corev3.HeaderValueOption_OVERWRITE_IF_EXISTS_OR_ADD,
	}
}
