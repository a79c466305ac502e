package extproc

import (
	"net/http"
	"strconv"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/sandboxid"
	"github.com/berth-sandbox/berth/envoy"
	"github.com/berth-sandbox/berth/extproc/wire"
)

// appendAnswer appends the answer that tells Envoy where the request goes. It changes nothing in the
// request but the path, where that named the sandbox, and the host, where the claim masks it.
func (a *decision) appendAnswer(b wire.Answer) wire.Answer {
	var dst [maxDestination]byte
	var id [sandboxid.MaxKeyLen]byte
	fields := [3]wire.Field{
		{Name: envoy.MetadataDst, Value: envoy.AppendDestination(dst[:0], a.dst)},
		{Name: envoy.MetadataID, Value: a.id.AppendTo(id[:0])},
	}
	var set [3]wire.SetHeader
	n, headers := 2, 0
	if a.path != "" {
		set[0], headers = wire.SetHeader{Name: ":path", Value: a.path}, 1
	}
	if a.host != "" {
		set[headers] = wire.SetHeader{Name: ":authority", Value: a.host}
		// A trusted proxy knows better.
		set[headers+1] = wire.SetHeader{Name: "x-forwarded-host", Value: a.asked, IfAbsent: true}
		headers += 2
	}
	if a.tls { // Envoy chooses the cluster again, by the metadata
		fields[n], n = wire.Field{Name: envoy.MetadataTLS, Value: []byte("yes")}, n+1
	}
	answer := wire.Admission{
		Set: set[:headers], ClearRoute: a.tls, Namespace: envoy.MetadataNamespace, Fields: fields[:n],
	}
	return answer.AppendTo(b)
}

// maxDestination is the length of the longest address and port: IPv6 without abbreviation.
const maxDestination = len("[ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff]:65535")

// linkReason marks the answer to a link.
const linkReason = "link"

// redirected is the answer to a valid link.
func redirected(r *redirect) *extprocv3.ProcessingResponse {
	return immediate(linkReason, http.StatusSeeOther, codes.OK, nil,
		setHeader("location", r.to), setHeader("set-cookie", r.cookie), setHeader("cache-control", "no-store"),
		setHeader("x-content-type-options", "nosniff"))
}

// immediate is an answer in place of the sandbox. Its mark lets it pass the local reply mapping unchanged.
func immediate(mark string, code int, grpc codes.Code, body []byte, headers ...*corev3.HeaderValueOption) *extprocv3.ProcessingResponse {
	return &extprocv3.ProcessingResponse{
		Response: &extprocv3.ProcessingResponse_ImmediateResponse{ImmediateResponse: &extprocv3.ImmediateResponse{
			Status:     &typev3.HttpStatus{Code: typev3.StatusCode(code)},
			Headers:    &extprocv3.HeaderMutation{SetHeaders: headers},
			Body:       body,
			GrpcStatus: &extprocv3.GrpcStatus{Status: uint32(grpc)},
			Details:    "berth_" + mark,
		}},
		DynamicMetadata: metadata(map[string]*structpb.Value{envoy.MetadataReply: structpb.NewStringValue(mark)}),
	}
}

// refused is the answer to the client in place of the sandbox, in the form that this kind of
// client reads. With e2bStatuses every client gets the statuses of E2B.
func refused(e *apierror.Error, to client, e2bStatuses bool) *extprocv3.ProcessingResponse {
	answer, contentType := *e, "application/json"
	var body []byte
	likeE2B := (e2bStatuses || to == e2bSDK) && forE2B(&answer)
	switch {
	case to == grpcClient: // becomes grpc-message; Envoy sets the content type
		contentType, body = "", []byte(e.Message)
	case to == browser:
		page := *e
		page.Code = answer.Code
		contentType, body = "text/html; charset=utf-8", page.Page()
		if answer.Home != "" {
			answer.Code = http.StatusOK
		}
	case likeE2B:
		body = answer.E2B()
	default:
		body = answer.JSON()
	}
	headers := []*corev3.HeaderValueOption{
		setHeader(envoy.ReasonHeader, string(answer.Reason)),
		setHeader("cache-control", "no-store"), // 404, 405 and 410 are cacheable by default (RFC 9110, section 15.1)
		setHeader("x-content-type-options", "nosniff"),
	}
	if contentType != "" {
		headers = append(headers, setHeader("content-type", contentType))
	}
	if to == browser {
		headers = append(headers, setHeader("content-security-policy", apierror.PageCSP))
	}
	if answer.RetryAfter > 0 {
		headers = append(headers, setHeader("retry-after", strconv.Itoa(answer.RetryAfter)))
	}
	if answer.AnyOrigin {
		headers = append(headers, anyOrigin, exposed)
	}
	return immediate(string(answer.Reason), answer.Code, apierror.KindOf(answer.Reason).GRPC, body, headers...)
}

// forE2B changes an answer to the status and text that the E2B SDKs look for: 502 with "was
// not found" for a sandbox that is missing or stays asleep, and with "port is not open" for a closed port. It returns
// false if E2B has no such answer.
func forE2B(e *apierror.Error) bool {
	switch e.Reason {
	case apierror.SandboxNotFound, apierror.SandboxGone:
		e.Code, e.Message = http.StatusBadGateway, apierror.E2BNotFound
	case apierror.SandboxAsleep:
		if e.RetryAfter > 0 {
			return false // it wakes
		}
		e.Code, e.Message = http.StatusBadGateway, apierror.E2BNotFound
	case apierror.PortPrivate:
		e.Code, e.Message = http.StatusBadGateway, apierror.E2BPortClosed
	default:
		return false
	}
	return true
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
