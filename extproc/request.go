package extproc

import (
	"strings"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"

	"github.com/berth-sandbox/berth/api/sandboxaccess"
	"github.com/berth-sandbox/berth/envoy"
)

// request is the part of a request that the router reads. Package envoy configures Envoy to
// send nothing else.
type request struct {
	authority, method, path, requestID string
	// Headers that may name a sandbox, with one element for each time they were sent.
	e2bID, e2bPort, id, port []string
	// Credentials, with one element for each time they were sent.
	token, agentToken, cookie, key []string
	// link is the path with query of a request for a link.
	link string
	// Headers that select the form of a refusal.
	accept, fetchMode, contentType string
}

func readHeaders(h *extprocv3.HttpHeaders) request {
	var r request
	for _, header := range h.GetHeaders().GetHeaders() {
		// Envoy sets one of the two, depending on its version and settings.
		value := string(header.GetRawValue())
		if value == "" {
			value = header.GetValue()
		}
		switch header.GetKey() {
		case ":authority":
			r.authority = value
		case ":method":
			r.method = value
		case ":path":
			r.path = value
		case "x-request-id":
			r.requestID = value
		case headerE2BID:
			r.e2bID = append(r.e2bID, value)
		case headerE2BPort:
			r.e2bPort = append(r.e2bPort, value)
		case headerID:
			r.id = append(r.id, value)
		case headerPort:
			r.port = append(r.port, value)
		case sandboxaccess.TokenHeader:
			r.token = append(r.token, value)
		case sandboxaccess.AgentHeader:
			r.agentToken = append(r.agentToken, value)
		case envoy.CookieHeader:
			r.cookie = append(r.cookie, value)
		case envoy.KeyHeader:
			r.key = append(r.key, value)
		case envoy.LinkHeader:
			r.link = value
		case "accept":
			r.accept += value + ","
		case "sec-fetch-mode":
			r.fetchMode = value
		case "content-type":
			r.contentType = value
		}
	}
	return r
}

// namesTarget reports whether a header names a sandbox or its port.
func (r *request) namesTarget() bool {
	return len(r.e2bID)+len(r.e2bPort)+len(r.id)+len(r.port) > 0
}

// client is the kind of client that reads a refusal.
type client int

const (
	program client = iota
	// grpcClient reads grpc-status and grpc-message.
	grpcClient
	// e2bSDK looks for certain words in the message of a 502.
	e2bSDK
	// browser shows a page to a person.
	browser
)

// client returns the kind of client. Package envoy applies the same rule to Envoy's own
// answers.
func (r *request) client() client {
	switch {
	case isGRPC(r.contentType):
		return grpcClient
	case len(r.e2bID) > 0:
		return e2bSDK
	case r.fetchMode != "" && r.fetchMode != "navigate": // a script, an image or a WebSocket
		return program
	case strings.Contains(r.accept, "text/html"):
		return browser
	}
	return program
}

// isGRPC reports whether Envoy treats the request as gRPC. It does not for gRPC-Web.
func isGRPC(contentType string) bool {
	rest, ok := strings.CutPrefix(contentType, "application/grpc")
	return ok && (rest == "" || rest[0] == '+')
}
