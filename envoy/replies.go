package envoy

import (
	"fmt"
	"strings"

	"github.com/berth-sandbox/berth/api/apierror"
)

// failure is a kind of answer that Envoy generates itself.
type failure struct {
	when    string          // a filter
	reason  apierror.Reason // "": the answer passes unchanged
	message string          // a percent sign is allowed only in a command of Envoy
}

// apiFailures lists the answers that Envoy generates in place of the API.
func apiFailures() []failure {
	api := details(fmt.Sprintf("xds.route_name == %q", apiRoute))
	return []failure{
		{
			allOf(api, anyOf(flags("UC", "UR", "LR", "UPE"), status("EQ", 504))), apierror.APIReset,
			"the API broke the connection before it answered, or did not answer; the outcome of the call is unknown",
		},
		{
			allOf(api, status("GE", 500)), apierror.APIUnreachable,
			"no replica of the API accepted the call, and nothing was done; try again",
		},
	}
}

// failures lists the answers that Envoy generates in place of a sandbox. The first match counts.
func failures() []failure {
	equal := func(code int) string { return status("EQ", code) }
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
			anyOf(equal(statusRouterError), equal(504), details(fmt.Sprintf("response.code_details == %q", "rbac_access_denied_matched_policy["+guard+"]"))),
			apierror.RouterUnavailable, "the router is not ready; try again",
		},
	}
}

// unaccepted lists the answers to requests that Envoy does not accept, behind failures.
func unaccepted() []failure {
	equal := func(code int) string { return status("EQ", code) }
	const why = ": %RESPONSE_CODE_DETAILS%"
	return []failure{
		{
			equal(403), apierror.Forbidden,
			"only plain HTTP and upgrades to WebSocket are served here, under the scheme of this listener",
		},
		{equal(408), apierror.RequestTimeout, "the request did not arrive in time"},
		{equal(426), apierror.HTTPVersion, "use HTTP/1.1 or HTTP/2"},
		{equal(431), apierror.HeadersTooLarge, "the headers of the request are too large or too many"},
		{equal(501), apierror.NotImplemented, "this transfer encoding is not supported"},
		{status("GE", 500), apierror.Internal, "the gateway failed" + why},
		{status("GE", 400), apierror.BadRequest, "this is not a valid HTTP request" + why},
	}
}

// page returns the HTML page. It has no request ID: a request that was refused early may carry
// one from the client, and Envoy's formats cannot escape HTML.
func (f failure) page() string { return string(apierror.New(f.reason, "%s", f.message).Page()) }

// localReply is how Envoy answers one failure to one kind of client.
type localReply struct {
	Filter      string
	Kind        apierror.Kind // none: the answer passes unchanged
	ContentType string
	Text        string // the body; "": JSON with Message
	Message     string
	CSP         string // the Content-Security-Policy of a page
	// E2B: the JSON has the fields of E2B's own answers.
	E2B bool
	// OutcomeUnknown: the request may have taken effect.
	OutcomeUnknown bool
}

// headerE2BID is in every request of an E2B SDK.
const headerE2BID = "e2b-sandbox-id"

// isGRPC matches requests that Envoy treats as gRPC. gRPC-Web does not match and uses HTTP/1.1.
const isGRPC = `{name: content-type, string_match: {safe_regex: {regex: 'application/grpc(\+.*)?'}}}`

// replies lists the answers to all failures, for each kind of client. The first match counts.
func replies(s Settings) []localReply {
	const fetchMode = "sec-fetch-mode"
	// The rule of request.client in package extproc, which applies to the router's own answers.
	browser := allOf(
		header(headerE2BID, "present_match: false"),
		header("accept", "string_match: {contains: text/html}"),
		anyOf(header(fetchMode, "present_match: false"), header(fetchMode, "string_match: {exact: navigate}")),
	)
	var all []localReply
	kinds := failures()
	if s.Other != nil {
		// Filters of the other gateway refuse requests as well, and their answers pass unchanged. Envoy knows the route
		// before the first filter runs. What it refuses itself then is an upgrade, or a body that is not valid.
		kinds = append(kinds, failure{when: details(fmt.Sprintf(`xds.route_name == %q && !(response.code_details == "upgrade_failed" || `+
			`response.code_details.startsWith("codec_error") || response.code_details.startsWith("http1."))`, sandboxRoute))})
	}
	kinds = append(kinds, unaccepted()...)
	if s.API != nil {
		kinds = append(apiFailures(), kinds...)
	}
	for _, f := range kinds {
		if f.reason == "" {
			all = append(all, localReply{Filter: f.when})
			continue
		}
		kind := apierror.KindOf(f.reason)
		add := func(who, contentType, text, message, csp string) {
			filter := f.when
			if who != "" {
				filter = allOf(f.when, who)
			}
			all = append(all, localReply{
				Filter: filter, Kind: kind, ContentType: contentType, Text: text, Message: message, CSP: csp,
				E2B: message == apierror.E2BPortClosed, OutcomeUnknown: f.reason == apierror.APIReset,
			})
		}
		add("{header_filter: {header: "+isGRPC+"}}", "text/plain", f.message, "", "") // becomes grpc-message
		if f.reason == apierror.SandboxUnreachable {
			add(header(headerE2BID, "present_match: true"), "application/json", "", apierror.E2BPortClosed, "")
		}
		add(browser, "text/html; charset=utf-8", f.page(), "", apierror.PageCSP)
		message := f.message
		if f.reason == apierror.SandboxUnreachable && s.E2BStatuses {
			message = apierror.E2BPortClosed
		}
		add("", "application/json", "", message, "")
	}
	return all
}

// The filters of access logs and local replies, in YAML.

func flags(f ...string) string {
	return "{response_flag_filter: {flags: [" + strings.Join(f, ", ") + "]}}"
}

// status compares the status with a constant. Envoy requires a runtime key that could
// override the constant. No runtime layer sets it.
func status(op string, code int) string {
	return fmt.Sprintf("{status_code_filter: {comparison: {op: %s, value: {default_value: %d, runtime_key: berth.status}}}}", op, code)
}

// details distinguishes failures that share their response flag and status with others, for
// example the guard's 403 from other 403s of Envoy. The expression is in the Common Expression
// Language.
func details(expression string) string {
	return fmt.Sprintf("{extension_filter: {name: envoy.access_loggers.extension_filters.cel, typed_config: {"+
		`"@type": type.googleapis.com/envoy.extensions.access_loggers.filters.cel.v3.ExpressionFilter, expression: %q}}}`, expression)
}

func header(name, match string) string {
	return fmt.Sprintf("{header_filter: {header: {name: %s, %s}}}", name, match)
}

func anyOf(filters ...string) string {
	return "{or_filter: {filters: [" + strings.Join(filters, ", ") + "]}}"
}

func allOf(filters ...string) string {
	return "{and_filter: {filters: [" + strings.Join(filters, ", ") + "]}}"
}
