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

// Regular expressions of headers and trailers that only Berth's own parts and proxies may send.
// Any character but a letter or digit counts as the separator between words, because programs
// that turn names into variables (CGI, WSGI) map all of them to "_".
const (
	berthNames = `x[^a-z0-9]berth([^a-z0-9].*)?`
	envoyNames = `x[^a-z0-9]envoy([^a-z0-9].*)?`
	// requestIDName is removed although Envoy always sets a new one: it does not do so before
	// it refuses an invalid request.
	requestIDName = `x[^a-z0-9]request[^a-z0-9]id`
	proxyNames    = `x[^a-z0-9]forwarded([^a-z0-9].*)?|forwarded|x[^a-z0-9]real[^a-z0-9]ip`
	// proxySpellings are the variants of proxyNames that proxies neither send nor remove: those
	// with another separator than "-".
	proxySpellings = `x[^a-z0-9-]forwarded([^a-z0-9].*)?|x-forwarded[^a-z0-9-].*|x-forwarded-.*[^a-z0-9-].*|` +
		`x[^a-z0-9-]real[^a-z0-9]ip|x-real[^a-z0-9-]ip`
	// Headers about framing, routing and the caller must not be sent as trailers (RFC 9110,
	// section 6.5.1), because a server that merges trailers into headers would use them.
	framingNames = `host|content-.*|transfer-encoding|te|trailer|connection|upgrade|expect`
	callerNames  = `authorization|cookie|set-cookie|proxy-.*|sec-.*`
	// sandboxTrailers are the headers of sandboxMayNotSend, and cookies, which belong in headers.
	sandboxTrailers = `set-cookie2?|proxy-.*|x-accel-redirect|x-sendfile`
)

// mutateEarly removes headers that a client must not send, before any filter reads them.
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

// mutate removes what mutateEarly cannot: trailers of a client, which no trusted proxy uses,
// and headers of a sandbox that are meant for proxies.
func (b *builder) mutate() *hcmv3.HttpFilter {
	return b.httpFilter("envoy.filters.http.header_mutation", &headersv3.HeaderMutation{Mutations: &headersv3.Mutations{
		RequestTrailersMutations: remove(berthNames, envoyNames, requestIDName, proxyNames, framingNames, callerNames),
		// Every expression costs a match for each header of every answer, so names with only one
		// spelling are in sandboxMayNotSend instead.
		ResponseMutations:         remove(envoyNames),
		ResponseTrailersMutations: remove(berthNames, envoyNames, sandboxTrailers),
	}})
}

// sandboxMayNotSend are headers of answers that a proxy in front would attribute to Berth or
// obey. For two of them nginx and Apache serve their own files.
func sandboxMayNotSend() []string {
	return []string{
		ReasonHeader,
		"x-accel-redirect", "x-sendfile",
		"proxy-authenticate", "proxy-authentication-info", "proxy-status",
		"set-cookie2", // RFC 2965; ownCookies reads Set-Cookie only
	}
}

// ownCookies removes the Domain attribute of every cookie that a sandbox sets, because with it
// a browser sends the cookie to other sandboxes too. Without it the cookie is valid on the
// sandbox's own host only. The script compares the letters of the name only, which matches more
// than browsers accept as the attribute (RFC 6265, section 5.2).
//
// The script runs only for answers with a cookie.
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
	source := &corev3.DataSource{Specifier: &corev3.DataSource_InlineString{InlineString: script}}
	lua := &luav3.Lua{DefaultSourceCode: source}
	return b.httpFilter("envoy.filters.http.lua", &matchingv3.ExtensionWithMatcher{
		ExtensionConfig: &corev3.TypedExtensionConfig{Name: "envoy.filters.http.lua", TypedConfig: b.any(lua)},
		XdsMatcher:      b.skipWithout("set-cookie"),
	})
}

// skipWithout is a matcher that skips its filter for answers without this header.
func (b *builder) skipWithout(header string) *xdsmatcherv3.Matcher {
	type (
		list      = xdsmatcherv3.Matcher_MatcherList
		predicate = xdsmatcherv3.Matcher_MatcherList_Predicate
	)
	anyText := &xdsmatcherv3.StringMatcher{MatchPattern: &xdsmatcherv3.StringMatcher_SafeRegex{
		SafeRegex: &xdsmatcherv3.RegexMatcher{
			Regex:      ".*",
			EngineType: &xdsmatcherv3.RegexMatcher_GoogleRe2{GoogleRe2: &xdsmatcherv3.RegexMatcher_GoogleRE2{}},
		},
	}}
	present := &predicate{MatchType: &xdsmatcherv3.Matcher_MatcherList_Predicate_SinglePredicate_{
		SinglePredicate: &xdsmatcherv3.Matcher_MatcherList_Predicate_SinglePredicate{
			Input: &xdscorev3.TypedExtensionConfig{
				Name: header, TypedConfig: b.any(&matcherv3.HttpResponseHeaderMatchInput{HeaderName: header}),
			},
			Matcher: &xdsmatcherv3.Matcher_MatcherList_Predicate_SinglePredicate_ValueMatch{ValueMatch: anyText},
		},
	}}
	skip := &xdscorev3.TypedExtensionConfig{Name: "skip", TypedConfig: b.any(&actionv3.SkipFilter{})}
	return &xdsmatcherv3.Matcher{MatcherType: &xdsmatcherv3.Matcher_MatcherList_{MatcherList: &list{
		Matchers: []*xdsmatcherv3.Matcher_MatcherList_FieldMatcher{{
			Predicate: &predicate{
				MatchType: &xdsmatcherv3.Matcher_MatcherList_Predicate_NotMatcher{NotMatcher: present},
			},
			OnMatch: &xdsmatcherv3.Matcher_OnMatch{OnMatch: &xdsmatcherv3.Matcher_OnMatch_Action{Action: skip}},
		}},
	}}}
}

// webSocketKey is the key for a WebSocket over HTTP/2, which has none.
const webSocketKey = "YmVydGgtb3Zlci1odHRwMg==" // 16 bytes (RFC 6455, section 4.1)

// webSockets are the routes for upgrades without a key and with one.
//
// A WebSocket over HTTP/2 has no key, because RFC 8441, section 5, does not use key and accept.
// Envoy turns it into an HTTP/1.1 upgrade without a key, which servers refuse
// (https://github.com/envoyproxy/envoy/issues/8547).
func webSockets(action *routev3.Route_Route) []*routev3.Route {
	websocket := exact("websocket")
	websocket.IgnoreCase = true
	add := func(name, value string) *corev3.HeaderValueOption {
		return &corev3.HeaderValueOption{
			Header:       &corev3.HeaderValue{Key: name, Value: value},
			AppendAction: corev3.HeaderValueOption_ADD_IF_ABSENT,
		}
	}
	route := func(headers ...*routev3.HeaderMatcher) *routev3.Route {
		return &routev3.Route{
			Match: &routev3.RouteMatch{
				PathSpecifier: &routev3.RouteMatch_Prefix{Prefix: "/"},
				Headers:       append([]*routev3.HeaderMatcher{headerMatches("upgrade", websocket)}, headers...),
			},
			Action: action,
			// Envoy drops the body of a 2xx or 3xx answer to a request that it recognises as a
			// WebSocket handshake. The leading space prevents that. Readers of the request ignore
			// the space (RFC 9112, section 5.1).
			RequestHeadersToAdd: []*corev3.HeaderValueOption{{
				Header:       &corev3.HeaderValue{Key: "upgrade", Value: " websocket"},
				AppendAction: corev3.HeaderValueOption_OVERWRITE_IF_EXISTS_OR_ADD,
			}},
		}
	}
	without := route(headerPresent("sec-websocket-key", false))
	without.RequestHeadersToAdd = append(without.RequestHeadersToAdd,
		add("sec-websocket-key", webSocketKey), add("sec-websocket-version", "13"))
	without.ResponseHeadersToRemove = []string{"sec-websocket-accept"}
	return []*routev3.Route{without, route()}
}

// remove removes every header whose whole name matches one of the expressions. They are
// separate because Envoy limits the size of each.
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

// isGRPC matches requests that Envoy treats as gRPC. gRPC-Web does not match and uses
// HTTP/1.1.
func isGRPC() *routev3.HeaderMatcher {
	return headerMatches("content-type", &matcherv3.StringMatcher{
		MatchPattern: &matcherv3.StringMatcher_SafeRegex{SafeRegex: &matcherv3.RegexMatcher{Regex: `application/grpc(\+.*)?`}},
	})
}
