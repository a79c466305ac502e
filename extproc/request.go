package extproc

import (
	"bytes"

	"github.com/berth-sandbox/berth/api/sandboxaccess"
	"github.com/berth-sandbox/berth/envoy"
	"github.com/berth-sandbox/berth/extproc/wire"
)

// request is the part of a request that the router reads. Package envoy configures Envoy to
// send nothing else.
//
// All its values are views into the buffer of the message, or of what keep has copied, and end with the call of
// Process. What outlives the call, or is used while other requests run, must be a copy: a key, a number or a string.
type request struct {
	authority, method, path, requestID []byte
	// Headers that may name a sandbox.
	e2bID, e2bPort, id, port values
	// Credentials.
	token, agentToken, cookie, key values
	// link is the path with query of a request for a link.
	link []byte
	// Headers that say which page of a browser a request comes from, and for what. No script can set them.
	fetchSite, fetchMode, fetchDest, origin []byte
	// preflight is the method that a CORS preflight asks for.
	preflight []byte
	// Headers that select the form of a refusal, with fetchMode. html: the client accepts pages.
	html        bool
	contentType []byte
}

// values are the values of a header that may be sent several times. No decision rests on any value but
// the only one.
type values struct {
	first []byte
	n     int
}

func (v *values) add(value []byte) {
	if v.n == 0 {
		v.first = value
	}
	v.n++
}

func readHeaders(headers []wire.Header) request {
	var r request
	for _, header := range headers {
		value := header.Value
		switch string(header.Key) {
		case ":authority":
			r.authority = value
		case ":method":
			r.method = value
		case ":path":
			r.path = value
		case "x-request-id":
			r.requestID = value
		case headerE2BID:
			r.e2bID.add(value)
		case headerE2BPort:
			r.e2bPort.add(value)
		case headerID:
			r.id.add(value)
		case headerPort:
			r.port.add(value)
		case sandboxaccess.TokenHeader:
			r.token.add(value)
		case sandboxaccess.AgentHeader:
			r.agentToken.add(value)
		case envoy.CookieHeader:
			r.cookie.add(value)
		case envoy.KeyHeader:
			r.key.add(value)
		case envoy.LinkHeader:
			r.link = value
		case "accept":
			r.html = r.html || bytes.Contains(value, []byte("text/html"))
		case "sec-fetch-site":
			r.fetchSite = value
		case "sec-fetch-mode":
			r.fetchMode = value
		case "sec-fetch-dest":
			r.fetchDest = value
		case "origin":
			r.origin = value
		case "access-control-request-method":
			r.preflight = value
		case "content-type":
			r.contentType = value
		}
	}
	return r
}

// keep copies what a decision still reads into memory of its own, and forgets the rest. It returns the number of
// bytes.
func (r *request) keep(hosts *Hosts) int {
	if !hosts.readsPath(r) {
		r.path = nil
	}
	r.contentType = r.contentType[:min(len(r.contentType), len(grpcType)+1)]
	all := [...]*[]byte{
		&r.authority, &r.method, &r.path, &r.requestID, &r.e2bID.first, &r.e2bPort.first, &r.id.first, &r.port.first,
		&r.token.first, &r.agentToken.first, &r.cookie.first, &r.key.first, &r.link,
		&r.fetchSite, &r.fetchMode, &r.fetchDest, &r.origin, &r.preflight, &r.contentType,
	}
	size := 0
	for _, value := range all {
		size += len(*value)
	}
	own := make([]byte, 0, size)
	for _, value := range all {
		begin := len(own)
		own = append(own, *value...)
		*value = own[begin:len(own):len(own)]
	}
	return size
}

// namesTarget reports whether a header names a sandbox or its port.
func (r *request) namesTarget() bool {
	return r.e2bID.n+r.e2bPort.n+r.id.n+r.port.n > 0
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
	case r.e2bID.n > 0:
		return e2bSDK
	case len(r.fetchMode) > 0 && string(r.fetchMode) != "navigate": // a script, an image or a WebSocket
		return program
	case r.html:
		return browser
	}
	return program
}

// grpcType is the media type of gRPC, without what may follow it.
const grpcType = "application/grpc"

// isGRPC reports whether Envoy treats the request as gRPC. It does not for gRPC-Web.
func isGRPC(contentType []byte) bool {
	rest, ok := bytes.CutPrefix(contentType, []byte(grpcType))
	return ok && (len(rest) == 0 || rest[0] == '+')
}
