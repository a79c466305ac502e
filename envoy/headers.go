package envoy

import (
	"slices"

	mutationv3 "github.com/envoyproxy/go-control-plane/envoy/config/common/mutation_rules/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	routev3 "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"
	headersv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/header_mutation/v3"
	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	earlyv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/http/early_header_mutation/header_mutation/v3"
	matcherv3 "github.com/envoyproxy/go-control-plane/envoy/type/matcher/v3"
	"google.golang.org/protobuf/types/known/anypb"
)

// Headers and trailers by which only Berth's own parts and proxies may speak, as
// regular expressions. Between the words stands anything but a letter or digit:
// programs that turn names into variables (CGI, WSGI) write "_" for all of that.
const (
	berthNames = `x[^a-z0-9]berth([^a-z0-9].*)?`
	envoyNames = `x[^a-z0-9]envoy([^a-z0-9].*)?`
	// requestIDName: Envoy makes a new one in any case, but not before it refuses
	// what it cannot read.
	requestIDName = `x[^a-z0-9]request[^a-z0-9]id`
	proxyNames    = `x[^a-z0-9]forwarded([^a-z0-9].*)?|forwarded|x[^a-z0-9]real[^a-z0-9]ip`
	// Framing, routing and who asks must not come as trailers (RFC 9110, section
	// 6.5.1): a server that adds trailers to the headers would believe them.
	framingNames = `host|content-.*|transfer-encoding|te|trailer|connection|upgrade|expect`
	callerNames  = `authorization|cookie|set-cookie|proxy-.*|sec-.*`
)

// mutateEarly removes what a client has made up, before anything reads it.
func (b *builder) mutateEarly() *corev3.TypedExtensionConfig {
	names := []string{berthNames, envoyNames, requestIDName}
	if b.TrustedHops == 0 {
		names = append(names, proxyNames)
	}
	return &corev3.TypedExtensionConfig{
		Name:        "envoy.http.early_header_mutation.header_mutation",
		TypedConfig: b.any(&earlyv3.HeaderMutation{Mutations: remove(names...)}),
	}
}

const mutationFilter = "envoy.filters.http.header_mutation"

// mutateTrailers does for trailers what mutateEarly and the routes do for
// headers. No proxy speaks in trailers, however many are trusted.
func (b *builder) mutateTrailers() *hcmv3.HttpFilter {
	return b.httpFilter(mutationFilter, &headersv3.HeaderMutation{Mutations: &headersv3.Mutations{
		RequestTrailersMutations:  remove(berthNames, envoyNames, requestIDName, proxyNames, framingNames, callerNames),
		ResponseTrailersMutations: remove(berthNames),
	}})
}

// webSocketKey stands for the key that a WebSocket over HTTP/2 does not have.
const webSocketKey = "YmVydGgtb3Zlci1odHRwMg==" // 16 bytes (RFC 6455, section 4.1)

// webSockets are the routes of upgrades, those without a key and the others.
//
// Without a key are WebSockets over HTTP/2, in which key and accept are not used
// (RFC 8441, section 5): Envoy makes an HTTP/1.1 upgrade of it and forgets them,
// and servers then refuse (https://github.com/envoyproxy/envoy/issues/8547).
func (b *builder) webSockets(action *routev3.Route_Route) []*routev3.Route {
	websocket := &matcherv3.StringMatcher{MatchPattern: &matcherv3.StringMatcher_Exact{Exact: "websocket"}, IgnoreCase: true}
	add := func(name, value string) *corev3.HeaderValueOption {
		return &corev3.HeaderValueOption{Header: &corev3.HeaderValue{Key: name, Value: value}, AppendAction: corev3.HeaderValueOption_ADD_IF_ABSENT}
	}
	route := func(headers ...*routev3.HeaderMatcher) *routev3.Route {
		return &routev3.Route{
			Match: &routev3.RouteMatch{
				PathSpecifier: &routev3.RouteMatch_Prefix{Prefix: "/"},
				Headers:       append([]*routev3.HeaderMatcher{headerMatches("upgrade", websocket)}, headers...),
			},
			Action:               action,
			TypedPerFilterConfig: map[string]*anypb.Any{mutationFilter: b.any(ownReasonOnly())},
		}
	}
	without := route(headerPresent("sec-websocket-key", false))
	without.RequestHeadersToAdd = []*corev3.HeaderValueOption{add("sec-websocket-key", webSocketKey), add("sec-websocket-version", "13")}
	without.ResponseHeadersToRemove = []string{"sec-websocket-accept"}
	return []*routev3.Route{without, route()}
}

// ownReasonOnly removes ReasonHeader from what a sandbox answers to an upgrade, and
// leaves it in what is Berth's own answer. For other requests the routes remove
// it; when a sandbox answers an upgrade with 2xx or 3xx, Envoy forgets them.
func ownReasonOnly() *headersv3.HeaderMutationPerRoute {
	const kept = "x-berth-kept"
	set := func(name, value string) []*mutationv3.HeaderMutation { // an empty value adds nothing
		return []*mutationv3.HeaderMutation{{Action: &mutationv3.HeaderMutation_Append{Append: &corev3.HeaderValueOption{
			Header: &corev3.HeaderValue{Key: name, Value: value}, AppendAction: corev3.HeaderValueOption_OVERWRITE_IF_EXISTS_OR_ADD,
		}}}}
	}
	return &headersv3.HeaderMutationPerRoute{Mutations: &headersv3.Mutations{ResponseMutations: slices.Concat(
		remove(kept),
		set(kept, `%CEL(response.code_details in ["via_upstream", "websocket_handshake_unsuccessful"] ? "" : response.headers["`+ReasonHeader+`"])%`),
		remove(ReasonHeader),
		set(ReasonHeader, "%RESP("+kept+")%"),
		remove(kept),
	)}}
}

// remove drops every header whose whole name matches one of the expressions,
// which are separate because Envoy bounds the size of each.
func remove(regexes ...string) []*mutationv3.HeaderMutation {
	var all []*mutationv3.HeaderMutation
	for _, regex := range regexes {
		all = append(all, &mutationv3.HeaderMutation{Action: &mutationv3.HeaderMutation_RemoveOnMatch_{
			RemoveOnMatch: &mutationv3.HeaderMutation_RemoveOnMatch{KeyMatcher: &matcherv3.StringMatcher{
				MatchPattern: &matcherv3.StringMatcher_SafeRegex{SafeRegex: &matcherv3.RegexMatcher{Regex: regex}},
			}},
		}})
	}
	return all
}

func headerMatches(name string, value *matcherv3.StringMatcher) *routev3.HeaderMatcher {
	return &routev3.HeaderMatcher{Name: name, HeaderMatchSpecifier: &routev3.HeaderMatcher_StringMatch{StringMatch: value}}
}

func headerPresent(name string, present bool) *routev3.HeaderMatcher {
	return &routev3.HeaderMatcher{Name: name, HeaderMatchSpecifier: &routev3.HeaderMatcher_PresentMatch{PresentMatch: present}}
}

// isGRPC is what Envoy itself takes for gRPC. gRPC-Web is not: it goes over
// HTTP/1.1.
func isGRPC() *routev3.HeaderMatcher {
	return headerMatches("content-type", &matcherv3.StringMatcher{
		MatchPattern: &matcherv3.StringMatcher_SafeRegex{SafeRegex: &matcherv3.RegexMatcher{Regex: `application/grpc(\+.*)?`}},
	})
}
