package egress

import (
	"net/netip"
	"strconv"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/envoy"
	"github.com/berth-sandbox/berth/extproc/wire"
)

// answer tells Envoy where the request goes. It changes nothing in it.
func (d *decision) answer() wire.Answer {
	r := d.admitted
	fields := [4]wire.Field{
		{Name: envoy.MetadataDst, Value: envoy.AppendDestination(nil, netip.AddrPortFrom(r.addr, r.dest.Port))},
		{Name: envoy.MetadataID, Value: []byte(r.id)},
		{Name: envoy.MetadataIncarnation, Value: strconv.AppendUint(nil, r.incarnation, 10)},
		{Name: envoy.MetadataTLS, Value: []byte("yes")},
	}
	n := 3
	if d.tls { // Envoy chooses the cluster again, by the metadata
		n = 4
	}
	admission := wire.Admission{ClearRoute: d.tls, Namespace: envoy.MetadataNamespace, Fields: fields[:n]}
	return admission.AppendTo(nil)
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
