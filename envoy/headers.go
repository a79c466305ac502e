package envoy

import (
	xdscorev3 "github.com/cncf/xds/go/xds/core/v3"
	xdsmatcherv3 "github.com/cncf/xds/go/xds/type/matcher/v3"
	mutationv3 "github.com/envoyproxy/go-control-plane/envoy/config/common/mutation_rules/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	routev3 "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"
	matchingv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/common/matching/v3"
	actionv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/common/matcher/action/v3"
	headersv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/header_mutation/v3"
	luav3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/lua/v3"
	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	earlyv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/http/early_header_mutation/header_mutation/v3"
	matcherv3 "github.com/envoyproxy/go-control-plane/envoy/type/matcher/v3"
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
	// proxySpellings are those of proxyNames that no proxy sends or removes: with
	// another sign than "-" somewhere.
	proxySpellings = `x[^a-z0-9-]forwarded([^a-z0-9].*)?|x-forwarded[^a-z0-9-].*|x-forwarded-.*[^a-z0-9-].*|x[^a-z0-9-]real[^a-z0-9]ip|x-real[^a-z0-9-]ip`
	// Framing, routing and who asks must not come as trailers (RFC 9110, section
	// 6.5.1): a server that adds trailers to the headers would believe them.
	framingNames = `host|content-.*|transfer-encoding|te|trailer|connection|upgrade|expect`
	callerNames  = `authorization|cookie|set-cookie|proxy-.*|sec-.*`
	// sandboxTrailers are sandboxMayNotSay, and cookies, which are set in headers.
	sandboxTrailers = `set-cookie2?|proxy-.*|x-accel-redirect|x-sendfile`
)

// mutateEarly removes what a client has made up, before anything reads it.
func (b *builder) mutateEarly() *corev3.TypedExtensionConfig {
	names := []string{berthNames, envoyNames, requestIDName}
	if b.TrustedHops == 0 {
		names = append(names, proxyNames)
	} else {
		names = append(names, proxySpellings)
	}
	return &corev3.TypedExtensionConfig{
		Name:        "envoy.http.early_header_mutation.header_mutation",
		TypedConfig: b.any(&earlyv3.HeaderMutation{Mutations: remove(names...)}),
	}
}

// mutate removes what mutateEarly cannot: what a client says in trailers, where no
// proxy speaks, however many are trusted, and what a sandbox says to proxies.
func (b *builder) mutate() *hcmv3.HttpFilter {
	return b.httpFilter("envoy.filters.http.header_mutation", &headersv3.HeaderMutation{Mutations: &headersv3.Mutations{
		RequestTrailersMutations: remove(berthNames, envoyNames, requestIDName, proxyNames, framingNames, callerNames),
		// Each name is one more expression for each header of every answer: what has only
		// one spelling stands in sandboxMayNotSay.
		ResponseMutations:         remove(envoyNames),
		ResponseTrailersMutations: remove(berthNames, envoyNames, sandboxTrailers),
	}})
}

// sandboxMayNotSay are headers of answers that a proxy in front would take for Berth's
// word, or obey: nginx and Apache serve their own files for two of them.
func sandboxMayNotSay() []string {
	return []string{
		ReasonHeader,
		"x-accel-redirect", "x-sendfile",
		"proxy-authenticate", "proxy-authentication-info", "proxy-status",
		"set-cookie2", // RFC 2965; ownCookies reads Set-Cookie only
	}
}

// ownCookies takes the Domain attribute off every cookie that a sandbox sets: with it
// a browser sends the cookie to other sandboxes too. Without it the cookie belongs to
// the sandbox's own host. Names are compared by their letters, which is more than
// browsers take for the attribute (RFC 6265, section 5.2).
//
// Only answers with a cookie run the script.
func (b *builder) ownCookies() *hcmv3.HttpFilter {
	const script = `function envoy_on_response(handle)
  local headers, own, changed = handle:headers(), {}, false
  for i = 0, headers:getNumValues("set-cookie") - 1 do
    own[i + 1] = string.gsub(headers:getAtIndex("set-cookie", i), ";([^;]*)", function(attribute)
      local name = string.gsub(string.match(attribute, "^[^=]*"), "%A", "")
      if string.lower(name) == "domain" then
        changed = true
        return ""
      end
    end)
  end
  if changed then
    headers:remove("set-cookie")
    for _, cookie in ipairs(own) do
      headers:add("set-cookie", cookie)
    end
  end
end
`
	lua := &luav3.Lua{DefaultSourceCode: &corev3.DataSource{Specifier: &corev3.DataSource_InlineString{InlineString: script}}}
	setCookie := &xdsmatcherv3.Matcher_MatcherList_Predicate_SinglePredicate{
		Input:   &xdscorev3.TypedExtensionConfig{Name: "set-cookie", TypedConfig: b.any(&matcherv3.HttpResponseHeaderMatchInput{HeaderName: "set-cookie"})},
		Matcher: &xdsmatcherv3.Matcher_MatcherList_Predicate_SinglePredicate_ValueMatch{ValueMatch: &xdsmatcherv3.StringMatcher{MatchPattern: &xdsmatcherv3.StringMatcher_SafeRegex{SafeRegex: &xdsmatcherv3.RegexMatcher{Regex: ".*", EngineType: &xdsmatcherv3.RegexMatcher_GoogleRe2{GoogleRe2: &xdsmatcherv3.RegexMatcher_GoogleRE2{}}}}}},
	}
	return b.httpFilter("envoy.filters.http.lua", &matchingv3.ExtensionWithMatcher{
		ExtensionConfig: &corev3.TypedExtensionConfig{Name: "envoy.filters.http.lua", TypedConfig: b.any(lua)},
		XdsMatcher: &xdsmatcherv3.Matcher{MatcherType: &xdsmatcherv3.Matcher_MatcherList_{MatcherList: &xdsmatcherv3.Matcher_MatcherList{Matchers: []*xdsmatcherv3.Matcher_MatcherList_FieldMatcher{{
			Predicate: &xdsmatcherv3.Matcher_MatcherList_Predicate{MatchType: &xdsmatcherv3.Matcher_MatcherList_Predicate_NotMatcher{NotMatcher: &xdsmatcherv3.Matcher_MatcherList_Predicate{
				MatchType: &xdsmatcherv3.Matcher_MatcherList_Predicate_SinglePredicate_{SinglePredicate: setCookie},
			}}},
			OnMatch: &xdsmatcherv3.Matcher_OnMatch{OnMatch: &xdsmatcherv3.Matcher_OnMatch_Action{Action: &xdscorev3.TypedExtensionConfig{
				Name: "skip", TypedConfig: b.any(&actionv3.SkipFilter{}),
			}}},
		}}}}},
	})
}

// webSocketKey stands for the key that a WebSocket over HTTP/2 does not have.
const webSocketKey = "YmVydGgtb3Zlci1odHRwMg==" // 16 bytes (RFC 6455, section 4.1)

// webSockets are the routes of upgrades, those without a key and the others.
//
// Without a key are WebSockets over HTTP/2, in which key and accept are not used
// (RFC 8441, section 5): Envoy makes an HTTP/1.1 upgrade of it and forgets them,
// and servers then refuse (https://github.com/envoyproxy/envoy/issues/8547).
func webSockets(action *routev3.Route_Route) []*routev3.Route {
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
			Action: action,
			// Envoy gives up an answer of 2xx or 3xx to what it takes for the handshake of a
			// WebSocket: it arrives without its body. So it must not take it for one. The
			// space is none to those who read the request (RFC 9112, section 5.1).
			RequestHeadersToAdd: []*corev3.HeaderValueOption{{
				Header: &corev3.HeaderValue{Key: "upgrade", Value: " websocket"}, AppendAction: corev3.HeaderValueOption_OVERWRITE_IF_EXISTS_OR_ADD,
			}},
		}
	}
	without := route(headerPresent("sec-websocket-key", false))
	without.RequestHeadersToAdd = append(without.RequestHeadersToAdd, add("sec-websocket-key", webSocketKey), add("sec-websocket-version", "13"))
	without.ResponseHeadersToRemove = []string{"sec-websocket-accept"}
	return []*routev3.Route{without, route()}
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
