package envoy

import (
	"strconv"

	accesslogv3 "github.com/envoyproxy/go-control-plane/envoy/config/accesslog/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	routev3 "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"
	celv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/access_loggers/filters/cel/v3"
	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	matcherv3 "github.com/envoyproxy/go-control-plane/envoy/type/matcher/v3"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/structpb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/berth-sandbox/berth/api/apierror"
)

// failure is a kind of answer that Envoy generates itself.
type failure struct {
	when    *accesslogv3.AccessLogFilter
	reason  apierror.Reason
	message string // a percent sign is allowed only in a command of Envoy
}

// failures lists the answers that Envoy generates itself. The first match counts.
func failures() []failure {
	equal := func(code uint32) *accesslogv3.AccessLogFilter { return status(accesslogv3.ComparisonFilter_EQ, code) }
	const why = ": %RESPONSE_CODE_DETAILS%"
	return []failure{
		// 507: the body is longer than the buffer for the second connection attempt.
		{
			anyOf(flags("UF"), equal(507)), apierror.SandboxUnreachable,
			"no program in the sandbox accepted the connection; does one listen on that port, on all addresses?",
		},
		{
			flags("UC", "UR", "LR", "UPE"), apierror.SandboxReset,
			"the sandbox closed the connection before it answered, or its answer is not HTTP or has too many headers",
		},
		{flags("UH", "NR", "NC", "UO"), apierror.NoRoute, "the sandbox cannot be reached at the moment; try again"},
		{
			anyOf(flags("OM"), details(`response.code_details == "overload"`)), apierror.Overloaded,
			"the gateway is overloaded; try again",
		},
		// ext_proc failed or did not answer in time, or the guard refused the request. 504 can
		// only come from ext_proc, because Envoy has no other time limit.
		{
			anyOf(equal(statusRouterError), equal(504), details(`response.code_details.startsWith("rbac_access_denied")`)),
			apierror.RouterUnavailable, "the router is not ready; try again",
		},
		{
			equal(403), apierror.Forbidden,
			"only plain HTTP and upgrades to WebSocket are served here, under the scheme of this listener",
		},
		{equal(408), apierror.RequestTimeout, "the request did not arrive in time"},
		{equal(426), apierror.HTTPVersion, "use HTTP/1.1 or HTTP/2"},
		{equal(431), apierror.HeadersTooLarge, "the headers of the request are too large or too many"},
		{equal(501), apierror.NotImplemented, "this transfer encoding is not supported"},
		{status(accesslogv3.ComparisonFilter_GE, 500), apierror.Internal, "the gateway failed" + why},
		{status(accesslogv3.ComparisonFilter_GE, 400), apierror.BadRequest, "this is not a valid HTTP request" + why},
	}
}

// localReplies gives Envoy's own answers the form of all answers of Berth, for each kind of
// client. The first matching mapper counts. A global format would also rewrite the router's
// own answers, so there is none.
func (b *builder) localReplies() *hcmv3.LocalReplyConfig {
	// The router's own answers pass unchanged. They never have a destination.
	fromRouter := allOf(metadataPresent(MetadataReply, true), metadataPresent(MetadataDst, false))
	mappers := []*hcmv3.ResponseMapper{{Filter: fromRouter}}
	for _, f := range failures() {
		mappers = append(mappers, f.mapper(request(isGRPC()), text("text/plain", f.message))) // becomes grpc-message
		if f.reason == apierror.SandboxUnreachable {
			mappers = append(mappers, f.mapper(request(headerPresent(headerE2BID, true)), f.json(apierror.E2BPortClosed)))
		}
		page := f.mapper(requestFromBrowser(), text("text/html; charset=utf-8", f.page()))
		page.HeadersToAdd = append(page.HeadersToAdd, header("content-security-policy", apierror.PageCSP))
		mappers = append(mappers, page, f.mapper(nil, f.json(f.message)))
	}
	return &hcmv3.LocalReplyConfig{Mappers: mappers}
}

// mapper answers the failure in one format, for the clients that who selects. nil selects
// all clients.
func (f failure) mapper(
	who *accesslogv3.AccessLogFilter, format *corev3.SubstitutionFormatString,
) *hcmv3.ResponseMapper {
	kind := apierror.KindOf(f.reason)
	m := &hcmv3.ResponseMapper{
		Filter:     f.when,
		StatusCode: wrapperspb.UInt32(uint32(kind.Code)),
		HeadersToAdd: []*corev3.HeaderValueOption{
			header(ReasonHeader, string(f.reason)), header("cache-control", "no-store"),
		},
		BodyFormatOverride: format,
	}
	if who != nil {
		m.Filter = allOf(f.when, who)
	}
	if kind.RetryAfter > 0 {
		m.HeadersToAdd = append(m.HeadersToAdd, header("retry-after", strconv.Itoa(kind.RetryAfter)))
	}
	return m
}

func (f failure) json(message string) *corev3.SubstitutionFormatString {
	return &corev3.SubstitutionFormatString{
		Format: &corev3.SubstitutionFormatString_JsonFormat{JsonFormat: &structpb.Struct{Fields: map[string]*structpb.Value{
			"code":      structpb.NewNumberValue(float64(apierror.KindOf(f.reason).Code)),
			"reason":    structpb.NewStringValue(string(f.reason)),
			"message":   structpb.NewStringValue(message),
			"sandboxID": structpb.NewStringValue("%DYNAMIC_METADATA(" + MetadataNamespace + ":" + MetadataID + ")%"),
			"requestID": structpb.NewStringValue("%REQ(X-REQUEST-ID)%"),
		}}},
		OmitEmptyValues: true,
		ContentType:     "application/json",
	}
}

// page returns the HTML page. It has no request ID: a request that was refused early may carry
// one from the client, and Envoy's formats cannot escape HTML.
func (f failure) page() string { return string(apierror.New(f.reason, "%s", f.message).Page()) }

func text(contentType, format string) *corev3.SubstitutionFormatString {
	return &corev3.SubstitutionFormatString{
		Format: &corev3.SubstitutionFormatString_TextFormatSource{TextFormatSource: &corev3.DataSource{
			Specifier: &corev3.DataSource_InlineString{InlineString: format},
		}},
		ContentType: contentType,
	}
}

// headerE2BID is in every request of an E2B SDK.
const headerE2BID = "e2b-sandbox-id"

// requestFromBrowser selects browsers by the rule of request.client in package extproc, which
// applies to the router's own answers.
func requestFromBrowser() *accesslogv3.AccessLogFilter {
	page := &matcherv3.StringMatcher{MatchPattern: &matcherv3.StringMatcher_Contains{Contains: "text/html"}}
	const mode = "sec-fetch-mode"
	return allOf(
		request(headerPresent(headerE2BID, false)),
		request(headerMatches("accept", page)),
		anyOf(request(headerPresent(mode, false)), request(headerMatches(mode, exact("navigate")))),
	)
}

func request(m *routev3.HeaderMatcher) *accesslogv3.AccessLogFilter {
	return &accesslogv3.AccessLogFilter{FilterSpecifier: &accesslogv3.AccessLogFilter_HeaderFilter{
		HeaderFilter: &accesslogv3.HeaderFilter{Header: m},
	}}
}

// details distinguishes failures that share their response flag and status with others, for
// example the guard's 403 from other 403s of Envoy. The expression is in the Common Expression
// Language.
func details(expression string) *accesslogv3.AccessLogFilter {
	filter, err := anypb.New(&celv3.ExpressionFilter{Expression: expression})
	if err != nil {
		panic(err) // packing a message with one string cannot fail
	}
	return &accesslogv3.AccessLogFilter{FilterSpecifier: &accesslogv3.AccessLogFilter_ExtensionFilter{
		ExtensionFilter: &accesslogv3.ExtensionFilter{
			Name:       "envoy.access_loggers.extension_filters.cel",
			ConfigType: &accesslogv3.ExtensionFilter_TypedConfig{TypedConfig: filter},
		},
	}}
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

// status compares the status with a constant. Envoy requires a runtime key that could
// override the constant. No runtime layer sets it.
func status(op accesslogv3.ComparisonFilter_Op, code uint32) *accesslogv3.AccessLogFilter {
	return &accesslogv3.AccessLogFilter{FilterSpecifier: &accesslogv3.AccessLogFilter_StatusCodeFilter{
		StatusCodeFilter: &accesslogv3.StatusCodeFilter{Comparison: &accesslogv3.ComparisonFilter{
			Op: op, Value: &corev3.RuntimeUInt32{DefaultValue: code, RuntimeKey: "berth.status"},
		}},
	}}
}

func anyOf(filters ...*accesslogv3.AccessLogFilter) *accesslogv3.AccessLogFilter {
	return &accesslogv3.AccessLogFilter{FilterSpecifier: &accesslogv3.AccessLogFilter_OrFilter{
		OrFilter: &accesslogv3.OrFilter{Filters: filters},
	}}
}

func allOf(filters ...*accesslogv3.AccessLogFilter) *accesslogv3.AccessLogFilter {
	return &accesslogv3.AccessLogFilter{FilterSpecifier: &accesslogv3.AccessLogFilter_AndFilter{
		AndFilter: &accesslogv3.AndFilter{Filters: filters},
	}}
}

func metadataPresent(key string, present bool) *accesslogv3.AccessLogFilter {
	return &accesslogv3.AccessLogFilter{FilterSpecifier: &accesslogv3.AccessLogFilter_MetadataFilter{
		MetadataFilter: &accesslogv3.MetadataFilter{
			Matcher: &matcherv3.MetadataMatcher{
				Filter: MetadataNamespace,
				Path:   []*matcherv3.MetadataMatcher_PathSegment{{Segment: &matcherv3.MetadataMatcher_PathSegment_Key{Key: key}}},
				Value:  &matcherv3.ValueMatcher{MatchPattern: &matcherv3.ValueMatcher_PresentMatch{PresentMatch: true}},
				Invert: !present,
			},
			MatchIfKeyNotFound: wrapperspb.Bool(!present),
		},
	}}
}
