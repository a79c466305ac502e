package egress

import (
	"net/netip"
	"strconv"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/egress/policy"
	"github.com/berth-sandbox/berth/envoy"
	"github.com/berth-sandbox/berth/extproc/wire"
)

// answer tells Envoy where the request goes. It changes nothing in it, unless the request gets headers.
func (d *decision) answer() (wire.Answer, error) {
	r := d.admitted
	destination := envoy.AppendDestination(nil, netip.AddrPortFrom(r.addr, r.dest.Port))
	incarnation := strconv.AppendUint(nil, r.incarnation, 10)
	if len(r.headers) == 0 {
		fields := [3]wire.Field{
			{Name: envoy.MetadataDst, Value: destination},
			{Name: envoy.MetadataID, Value: []byte(r.id)},
			{Name: envoy.MetadataIncarnation, Value: incarnation},
		}
		admission := wire.Admission{Namespace: envoy.MetadataNamespace, Fields: fields[:]}
		return admission.AppendTo(nil), nil
	}
	// The certificate is verified for the authority. A client may have written it otherwise.
	authority := r.dest.Host
	if r.dest.Port != policy.CredentialPort {
		authority = r.dest.String()
	}
	mutation := &extprocv3.HeaderMutation{SetHeaders: []*corev3.HeaderValueOption{header(":authority", authority)}}
	for _, h := range r.headers { // Envoy removes them first
		mutation.RemoveHeaders = append(mutation.RemoveHeaders, h.Name)
		mutation.SetHeaders = append(mutation.SetHeaders, header(h.Name, h.Value))
	}
	return wire.Encode(&extprocv3.ProcessingResponse{
		Response: &extprocv3.ProcessingResponse_RequestHeaders{RequestHeaders: &extprocv3.HeadersResponse{
			// Envoy chooses the cluster again, by the metadata.
			Response: &extprocv3.CommonResponse{HeaderMutation: mutation, ClearRouteCache: true},
		}},
		DynamicMetadata: &structpb.Struct{Fields: map[string]*structpb.Value{
			envoy.MetadataNamespace: structpb.NewStructValue(&structpb.Struct{Fields: map[string]*structpb.Value{
				envoy.MetadataDst:         structpb.NewStringValue(string(destination)),
				envoy.MetadataID:          structpb.NewStringValue(r.id),
				envoy.MetadataIncarnation: structpb.NewStringValue(string(incarnation)),
				envoy.MetadataTLS:         structpb.NewStringValue("yes"),
			}}),
		}},
	})
}

// refused is the answer to the client in place of the origin. Its mark lets it pass Envoy's local replies unchanged.
func refused(e *apierror.Error) (wire.Answer, error) {
	headers := []*corev3.HeaderValueOption{
		header(envoy.ReasonHeader, string(e.Reason)),
		header("content-type", "application/json"),
		header("cache-control", "no-store"),
	}
	if e.Reason == apierror.EgressCredential {
		headers = append(headers, header("proxy-authenticate", `Basic realm="berth"`))
	}
	if e.RetryAfter > 0 {
		headers = append(headers, header("retry-after", strconv.Itoa(e.RetryAfter)))
	}
	return wire.Encode(&extprocv3.ProcessingResponse{
		Response: &extprocv3.ProcessingResponse_ImmediateResponse{ImmediateResponse: &extprocv3.ImmediateResponse{
			Status:  &typev3.HttpStatus{Code: typev3.StatusCode(e.Code)},
			Headers: &extprocv3.HeaderMutation{SetHeaders: headers},
			Body:    e.JSON(),
			Details: "berth_" + string(e.Reason),
		}},
		DynamicMetadata: &structpb.Struct{Fields: map[string]*structpb.Value{
			envoy.MetadataNamespace: structpb.NewStructValue(&structpb.Struct{Fields: map[string]*structpb.Value{
				envoy.MetadataReply: structpb.NewStringValue(string(e.Reason)),
			}}),
		}},
	})
}

func header(name, value string) *corev3.HeaderValueOption {
	return &corev3.HeaderValueOption{
		Header:       &corev3.HeaderValue{Key: name, RawValue: []byte(value)},
		AppendAction: corev3.HeaderValueOption_OVERWRITE_IF_EXISTS_OR_ADD,
	}
}
