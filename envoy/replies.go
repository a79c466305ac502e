package envoy

import (
	"strconv"

	accesslogv3 "github.com/envoyproxy/go-control-plane/envoy/config/accesslog/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	matcherv3 "github.com/envoyproxy/go-control-plane/envoy/type/matcher/v3"
	"google.golang.org/protobuf/types/known/structpb"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

// localReplies gives what Envoy answers by itself the shape of every answer
// that is Berth's. The first mapper that matches wins; there is no global
// format, because that would also rewrite the router's own answers.
func (b *builder) localReplies() *hcmv3.LocalReplyConfig {
	return &hcmv3.LocalReplyConfig{Mappers: []*hcmv3.ResponseMapper{
		// The router's own answers pass unchanged.
		{Filter: metadataPresent(MetadataReply)},
		// The pod refused the connection, reset it, or did not accept it in time.
		b.reply(flags("UF", "UC", "UR", "LR", "UPE"), 502, "sandbox_unreachable",
			"the sandbox did not accept or broke the connection; is the program in it listening on that port?", 0),
		// No host, no route, a circuit breaker.
		b.reply(flags("UH", "NR", "NC", "UO"), 503, "no_route", "there is no way to the sandbox at the moment; try again", 1),
		// ext_proc failed, did not answer in time (always 504), or the guard
		// refused what it let pass (403).
		b.reply(anyOf(status(accesslogv3.ComparisonFilter_EQ, statusRouterError), status(accesslogv3.ComparisonFilter_EQ, 504), status(accesslogv3.ComparisonFilter_EQ, 403)),
			503, "router_unavailable", "the router is not ready; try again", 1),
		// Whatever else Envoy says by itself: 400, 426, 431.
		{
			Filter: status(accesslogv3.ComparisonFilter_GE, 400),
			BodyFormatOverride: b.json(map[string]*structpb.Value{
				"code":    structpb.NewStringValue("%RESPONSE_CODE%"),
				"reason":  structpb.NewStringValue("bad_request"),
				"message": structpb.NewStringValue("%LOCAL_REPLY_BODY%"),
			}),
			HeadersToAdd: []*corev3.HeaderValueOption{header(ReasonHeader, "bad_request")},
		},
	}}
}

func (b *builder) reply(when *accesslogv3.AccessLogFilter, code uint32, reason, message string, retryAfter int) *hcmv3.ResponseMapper {
	m := &hcmv3.ResponseMapper{
		Filter:       when,
		StatusCode:   wrapperspb.UInt32(code),
		HeadersToAdd: []*corev3.HeaderValueOption{header(ReasonHeader, reason)},
		BodyFormatOverride: b.json(map[string]*structpb.Value{
			"code":    structpb.NewNumberValue(float64(code)),
			"reason":  structpb.NewStringValue(reason),
			"message": structpb.NewStringValue(message),
		}),
	}
	if retryAfter > 0 {
		m.HeadersToAdd = append(m.HeadersToAdd, header("retry-after", strconv.Itoa(retryAfter)))
	}
	return m
}

func (b *builder) json(fields map[string]*structpb.Value) *corev3.SubstitutionFormatString {
	fields["requestId"] = structpb.NewStringValue("%REQ(X-REQUEST-ID)%")
	return &corev3.SubstitutionFormatString{
		Format:      &corev3.SubstitutionFormatString_JsonFormat{JsonFormat: &structpb.Struct{Fields: fields}},
		ContentType: "application/json",
	}
}

func header(name, value string) *corev3.HeaderValueOption {
	return &corev3.HeaderValueOption{
		Header:       &corev3.HeaderValue{Key: name, Value: value},
		AppendAction: corev3.HeaderValueOption_OVERWRITE_IF_EXISTS_OR_ADD,
	}
}

func flags(f ...string) *accesslogv3.AccessLogFilter {
	return &accesslogv3.AccessLogFilter{FilterSpecifier: &accesslogv3.AccessLogFilter_ResponseFlagFilter{
		ResponseFlagFilter: &accesslogv3.ResponseFlagFilter{Flags: f},
	}}
}

func status(op accesslogv3.ComparisonFilter_Op, code uint32) *accesslogv3.AccessLogFilter {
	return &accesslogv3.AccessLogFilter{FilterSpecifier: &accesslogv3.AccessLogFilter_StatusCodeFilter{
		StatusCodeFilter: &accesslogv3.StatusCodeFilter{Comparison: comparison(op, code, "berth.status")},
	}}
}

func anyOf(filters ...*accesslogv3.AccessLogFilter) *accesslogv3.AccessLogFilter {
	return &accesslogv3.AccessLogFilter{FilterSpecifier: &accesslogv3.AccessLogFilter_OrFilter{
		OrFilter: &accesslogv3.OrFilter{Filters: filters},
	}}
}

func metadataPresent(key string) *accesslogv3.AccessLogFilter {
	return &accesslogv3.AccessLogFilter{FilterSpecifier: &accesslogv3.AccessLogFilter_MetadataFilter{
		MetadataFilter: &accesslogv3.MetadataFilter{
			Matcher: &matcherv3.MetadataMatcher{
				Filter: MetadataNamespace,
				Path:   []*matcherv3.MetadataMatcher_PathSegment{{Segment: &matcherv3.MetadataMatcher_PathSegment_Key{Key: key}}},
				Value:  &matcherv3.ValueMatcher{MatchPattern: &matcherv3.ValueMatcher_PresentMatch{PresentMatch: true}},
			},
			MatchIfKeyNotFound: wrapperspb.Bool(false),
		},
	}}
}

func atLeast(ms uint32) *accesslogv3.ComparisonFilter {
	return comparison(accesslogv3.ComparisonFilter_GE, ms, "berth.access_log_min_ms")
}

// comparison compares with a constant. Envoy wants a runtime key that could
// override it; there is no runtime layer that sets one.
func comparison(op accesslogv3.ComparisonFilter_Op, value uint32, key string) *accesslogv3.ComparisonFilter {
	return &accesslogv3.ComparisonFilter{Op: op, Value: &corev3.RuntimeUInt32{DefaultValue: value, RuntimeKey: key}}
}
