package wire

import (
	"fmt"
	"slices"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

// Request is one ProcessingRequest, as far as a decision needs it. The zero value is ready. It may read
// one message after the other.
type Request struct {
	// Headers are those of a request-headers message, in the order of the message.
	Headers []Header
	// Other is empty for a request-headers message, and otherwise names the kind of the message.
	Other string

	buffer []byte
}

// Header is one header of a request. Key and Value are valid until the Request reads the next message.
type Header struct{ Key, Value []byte }

const (
	// maxKeptBuffer and maxKeptHeaders bound what a Request keeps for its next message. Envoy sends less
	// than 64 KB of headers.
	maxKeptBuffer  = 64 << 10
	maxKeptHeaders = 128
)

// Reset forgets the message, and frees what an unusually large one has taken.
func (r *Request) Reset() {
	clear(r.Headers)
	r.Headers, r.Other = r.Headers[:0], ""
	if cap(r.buffer) > maxKeptBuffer || cap(r.Headers) > maxKeptHeaders {
		*r = Request{}
	}
}

// Read reads a message, which may change then.
func (r *Request) Read(message []byte) error {
	r.buffer = append(r.buffer[:0], message...)
	return r.parse()
}

// read reads a message. data may be freed then.
func (r *Request) read(data mem.BufferSlice) error {
	r.buffer = slices.Grow(r.buffer[:0], data.Len())[:data.Len()]
	data.CopyTo(r.buffer)
	return r.parse()
}

// parse reads the message in r.buffer.
func (r *Request) parse() error {
	r.Headers, r.Other = r.Headers[:0], ""
	if r.quick(r.buffer) {
		return nil
	}
	return r.generated(r.buffer)
}

// generated reads a message by means of the generated types.
func (r *Request) generated(message []byte) error {
	r.Headers = r.Headers[:0]
	var m extprocv3.ProcessingRequest
	if err := proto.Unmarshal(message, &m); err != nil {
		return err
	}
	headers, ok := m.GetRequest().(*extprocv3.ProcessingRequest_RequestHeaders)
	if !ok {
		r.Other = fmt.Sprintf("%T", m.GetRequest())
		return nil
	}
	for _, h := range headers.RequestHeaders.GetHeaders().GetHeaders() {
		value := h.GetRawValue() // Envoy sets one of the two, depending on its version and settings
		if len(value) == 0 {
			value = []byte(h.GetValue())
		}
		r.Headers = append(r.Headers, Header{[]byte(h.GetKey()), value})
	}
	return nil
}

// The tags of the fields that the quick reader knows: field number and wire type in one byte.
const (
	bytesTag  = byte(protowire.BytesType)
	varintTag = byte(protowire.VarintType)

	requestHeaders  = 2<<3 | bytesTag  // in ProcessingRequest
	metadataContext = 8<<3 | bytesTag  // in ProcessingRequest
	protocolConfig  = 11<<3 | bytesTag // in ProcessingRequest

	headerMap   = 1<<3 | bytesTag  // in HttpHeaders
	endOfStream = 3<<3 | varintTag // in HttpHeaders

	headerValue = 1<<3 | bytesTag // in HeaderMap

	key      = 1<<3 | bytesTag // in HeaderValue
	value    = 2<<3 | bytesTag // in HeaderValue
	rawValue = 3<<3 | bytesTag // in HeaderValue
)

// quick reads a ProcessingRequest. It returns false for every message that has anything else than what
// Envoy usually sends, in particular a field that it does not know, or one that must not repeat twice:
// the generated types merge such fields. Headers may be incomplete then.
func (r *Request) quick(message []byte) bool {
	found := false
	for len(message) > 0 {
		field, rest, ok := bytesField(message[1:])
		if !ok {
			return false
		}
		switch message[0] {
		case requestHeaders:
			if found || !r.quickHeaders(field) {
				return false
			}
			found = true
		case metadataContext:
			if len(field) > 0 {
				return false
			}
		case protocolConfig:
			if !varintsOnly(field) {
				return false
			}
		default:
			return false
		}
		message = rest
	}
	return found
}

// quickHeaders reads an HttpHeaders.
func (r *Request) quickHeaders(message []byte) bool {
	found := false
	for len(message) > 0 {
		switch message[0] {
		case headerMap:
			field, rest, ok := bytesField(message[1:])
			if !ok || found || !r.quickMap(field) {
				return false
			}
			found, message = true, rest
		case endOfStream:
			_, n := protowire.ConsumeVarint(message[1:])
			if n < 0 {
				return false
			}
			message = message[1+n:]
		default:
			return false
		}
	}
	return true
}

// quickMap reads a HeaderMap.
func (r *Request) quickMap(message []byte) bool {
	for len(message) > 0 {
		if message[0] != headerValue {
			return false
		}
		field, rest, ok := bytesField(message[1:])
		if !ok {
			return false
		}
		h, ok := quickValue(field)
		if !ok {
			return false
		}
		r.Headers = append(r.Headers, h)
		message = rest
	}
	return true
}

// quickValue reads a HeaderValue. Text beyond ASCII is left to the generated types, which check UTF-8.
func quickValue(message []byte) (h Header, ok bool) {
	seen := byte(0)
	for len(message) > 0 {
		tag := message[0]
		if tag != key && tag != value && tag != rawValue || seen&(1<<(tag>>3)) != 0 {
			return h, false
		}
		seen |= 1 << (tag >> 3)
		field, rest, ok := bytesField(message[1:])
		if !ok || tag != rawValue && !ascii(field) {
			return h, false
		}
		switch {
		case tag == key:
			h.Key = field
		case tag == rawValue && len(field) > 0, len(h.Value) == 0:
			h.Value = field
		}
		message = rest
	}
	return h, true
}

// varintsOnly reports whether a message of which nothing is needed has only valid fields of numbers.
func varintsOnly(message []byte) bool {
	for len(message) > 0 {
		if message[0]&7 != varintTag || message[0] >= 0x80 || message[0]>>3 == 0 {
			return false
		}
		_, n := protowire.ConsumeVarint(message[1:])
		if n < 0 {
			return false
		}
		message = message[1+n:]
	}
	return true
}

// bytesField splits b, which begins with the length of a field.
func bytesField(b []byte) (field, rest []byte, ok bool) {
	field, n := protowire.ConsumeBytes(b)
	if n < 0 {
		return nil, nil, false
	}
	return field, b[n:], true
}

func ascii(b []byte) bool {
	for _, c := range b {
		if c >= 0x80 {
			return false
		}
	}
	return true
}
