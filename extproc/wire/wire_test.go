package wire

import (
	"bytes"
	"strings"
	"testing"
	"unicode/utf8"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extprocfilterv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/encoding"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"
)

var _ encoding.CodecV2 = Codec{}

// fromEnvoy is what Envoy sends about a request.
func fromEnvoy() *extprocv3.ProcessingRequest {
	headers := &corev3.HeaderMap{}
	for _, h := range [][2]string{
		{":authority", "8080-abcdefghijklmnopqrst.sandbox.example.com"}, {":path", "/x?y=\xff"}, {":method", "GET"},
		{"x-request-id", "2b0e2b5e-6a5d-4c8e-9a54-6a8b1d0f6f3e"}, {"accept", "*/*"}, {"accept", ""},
	} {
		headers.Headers = append(headers.Headers, &corev3.HeaderValue{Key: h[0], RawValue: []byte(h[1])})
	}
	return &extprocv3.ProcessingRequest{
		Request:         &extprocv3.ProcessingRequest_RequestHeaders{RequestHeaders: &extprocv3.HttpHeaders{Headers: headers, EndOfStream: true}},
		MetadataContext: &corev3.Metadata{},
		ProtocolConfig:  &extprocv3.ProtocolConfiguration{ResponseBodyMode: extprocfilterv3.ProcessingMode_STREAMED},
	}
}

func encode(tb testing.TB, m proto.Message) []byte {
	tb.Helper()
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
	require.NoError(tb, err)
	return b
}

// messages are requests of many shapes, by name.
func messages(tb testing.TB) map[string][]byte {
	usual := fromEnvoy()
	headers := func(all ...*corev3.HeaderValue) *extprocv3.ProcessingRequest {
		return &extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_RequestHeaders{
			RequestHeaders: &extprocv3.HttpHeaders{Headers: &corev3.HeaderMap{Headers: all}},
		}}
	}
	with := func(change func(m *extprocv3.ProcessingRequest)) []byte {
		m := fromEnvoy()
		change(m)
		return encode(tb, m)
	}
	text := func(b string) []byte { return []byte(b) }
	// header is a message with one header, whose HeaderValue is b.
	header := func(b string) []byte {
		for _, tag := range []byte{headerValue, headerMap, requestHeaders} {
			b = string([]byte{tag, byte(len(b))}) + b
		}
		return text(b)
	}
	attributes := map[string]*structpb.Struct{"a": {Fields: map[string]*structpb.Value{"b": structpb.NewBoolValue(true)}}}
	return map[string][]byte{
		"usual":            encode(tb, usual),
		"twice":            append(encode(tb, usual), encode(tb, usual)...),
		"cut":              encode(tb, usual)[:40],
		"empty":            {},
		"no headers":       encode(tb, headers()),
		"as text":          encode(tb, headers(&corev3.HeaderValue{Key: ":authority", Value: "a"})),
		"as both":          encode(tb, headers(&corev3.HeaderValue{Key: ":authority", Value: "a", RawValue: []byte("b")})),
		"beyond ASCII":     encode(tb, headers(&corev3.HeaderValue{Key: "kéy", Value: "välue"})),
		"response headers": encode(tb, &extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_ResponseHeaders{ResponseHeaders: &extprocv3.HttpHeaders{}}}),
		"body":             encode(tb, &extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_RequestBody{RequestBody: &extprocv3.HttpBody{Body: []byte("x")}}}),
		"attributes":       with(func(m *extprocv3.ProcessingRequest) { m.Attributes = attributes }),
		"metadata":         with(func(m *extprocv3.ProcessingRequest) { m.MetadataContext.FilterMetadata = attributes }),
		"observing":        with(func(m *extprocv3.ProcessingRequest) { m.ObservabilityMode = true }),
		"headers, then body": append(encode(tb, usual), encode(tb, &extprocv3.ProcessingRequest{
			Request: &extprocv3.ProcessingRequest_RequestBody{RequestBody: &extprocv3.HttpBody{}},
		})...),
		"raw, then text":       text("\x12\x0d\x0a\x0b\x0a\x09\x0a\x01k\x1a\x01r\x12\x01v"),
		"empty raw, then text": text("\x12\x0c\x0a\x0a\x0a\x08\x0a\x01k\x1a\x00\x12\x01v"),
		// Of a field that repeats the last one counts, and messages are merged.
		"key twice":                header("\x0a\x01k\x0a\x01l"),
		"text twice":               header("\x0a\x01k\x12\x01v\x12\x01w"),
		"raw twice":                header("\x0a\x01k\x1a\x01v\x1a\x01w"),
		"raw, then empty raw":      header("\x0a\x01k\x1a\x01v\x1a\x00"),
		"text, then empty text":    header("\x0a\x01k\x12\x01v\x12\x00"),
		"text, then empty raw":     header("\x0a\x01k\x12\x01v\x1a\x00"),
		"raw, text, and empty raw": header("\x0a\x01k\x1a\x01r\x12\x01v\x1a\x00"),
		"map twice":                text("\x12\x10\x0a\x06\x0a\x04\x0a\x02k1\x0a\x06\x0a\x04\x0a\x02k2"),
		"headers twice":            append(header("\x0a\x01k"), header("\x0a\x01l")...),
		"headers, then others":     append(header("\x0a\x01k"), "\x1a\x00"...), // response headers
		// Keys and texts are UTF-8, raw values are not.
		"invalid UTF-8 in a key":   header("\x0a\x01\xff"),
		"invalid UTF-8 in a text":  header("\x0a\x01k\x12\x01\xff"),
		"only a continuation byte": header("\x0a\x01k\x12\x01\x80"),
		"overlong UTF-8":           header("\x0a\x01k\x12\x02\xc0\xaf"),
		"half a surrogate":         header("\x0a\x01k\x12\x03\xed\xa0\x80"),
		"cut UTF-8":                header("\x0a\x02k\xc3\x12\x01v"),
		"invalid text under a raw": header("\x0a\x01k\x12\x01\xff\x1a\x01r"),
		"any bytes in a raw":       header("\x0a\x01k\x1a\x02\xff\x80"),
		"invalid metadata":         text("\x12\x00\x42\x01\xff"),
		"config with a long tag":   text("\x12\x00\x5a\x04\x80\x00\x08\x01"),
		"unknown field":            text("\x12\x00\xa0\x06\x01"),
		"long form of a tag":       text("\x92\x00\x00"),
		"long form of a length":    text("\x12\x80\x00"),
		"group":                    text("\x12\x00\x0b\x0c"),
		"field 0":                  text("\x12\x00\x00\x00"),
		"config of bytes":          text("\x12\x00\x5a\x02\x0a\x00"),
		"config with a bad tag":    text("\x12\x00\x5a\x02\x00\x01"),
		"config with a cut value":  text("\x12\x00\x5a\x02\x08\x80"),
		"overlong number":          text("\x12\x0d\x18\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"),
		"endless length":           text("\x12\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"),
	}
}

// compare fails unless a Request has what the generated types read.
func compare(t *testing.T, message []byte) {
	t.Helper()
	var quick, generated Request
	err := Codec{}.Unmarshal(mem.BufferSlice{mem.SliceBuffer(message)}, &quick)
	want := generated.generated(message)
	if (err == nil) != (want == nil) {
		t.Fatalf("%q: the error is %v, that of the generated types is %v", message, err, want)
	}
	if err != nil {
		return
	}
	if quick.Other != generated.Other || len(quick.Headers) != len(generated.Headers) {
		t.Fatalf("%q is read as %q with %d headers, by the generated types as %q with %d",
			message, quick.Other, len(quick.Headers), generated.Other, len(generated.Headers))
	}
	for i, h := range quick.Headers {
		if g := generated.Headers[i]; !bytes.Equal(h.Key, g.Key) || !bytes.Equal(h.Value, g.Value) {
			t.Fatalf("%q: header %d is %q, by the generated types %q", message, i, h, g)
		}
	}
}

// Invariant: P5
func TestRequestsAreReadLikeGeneratedTypes(t *testing.T) {
	for name, message := range messages(t) {
		t.Run(name, func(t *testing.T) { compare(t, message) })
	}
}

func FuzzRequest(f *testing.F) {
	for _, message := range messages(f) {
		f.Add(message)
	}
	f.Fuzz(compare)
}

// Otherwise nothing but a benchmark would show that all messages are left to the generated types.
func TestUsualMessagesAreReadWithoutAllocation(t *testing.T) {
	data := mem.BufferSlice{mem.SliceBuffer(encode(t, fromEnvoy()))}
	var r Request
	allocations := testing.AllocsPerRun(100, func() {
		if err := (Codec{}).Unmarshal(data, &r); err != nil || len(r.Headers) != 6 {
			t.Error(err, len(r.Headers))
		}
		r.Reset()
	})
	require.Zero(t, allocations)
}

func TestRequestKeepsNoUnusuallyLargeMessage(t *testing.T) {
	var r Request
	m := fromEnvoy()
	m.GetRequestHeaders().Headers.Headers[0].RawValue = bytes.Repeat([]byte("x"), maxKeptBuffer)
	require.NoError(t, Codec{}.Unmarshal(mem.BufferSlice{mem.SliceBuffer(encode(t, m))}, &r))
	r.Reset()
	require.Zero(t, cap(r.buffer))
	var many []*corev3.HeaderValue
	for range maxKeptHeaders + 1 {
		many = append(many, &corev3.HeaderValue{Key: "a"})
	}
	m.GetRequestHeaders().Headers.Headers = many
	require.NoError(t, Codec{}.Unmarshal(mem.BufferSlice{mem.SliceBuffer(encode(t, m))}, &r))
	r.Reset()
	require.Zero(t, cap(r.Headers))
}

// gRPC reads a message of several frames in several buffers, and frees them.
func TestRequestIsACopyOfItsBuffers(t *testing.T) {
	message := encode(t, fromEnvoy())
	first, second := bytes.Clone(message[:100]), bytes.Clone(message[100:])
	var r Request
	require.NoError(t, Codec{}.Unmarshal(mem.BufferSlice{mem.SliceBuffer(first), mem.SliceBuffer(second)}, &r))
	clear(first)
	clear(second)
	require.Equal(t, ":authority", string(r.Headers[0].Key))
	require.True(t, strings.HasPrefix(string(r.Headers[0].Value), "8080-abc"))
}

func TestOtherMessagesAreLeftToGRPC(t *testing.T) {
	want := &healthv1.HealthCheckRequest{Service: "s"}
	data, err := Codec{}.Marshal(want)
	require.NoError(t, err)
	got := &healthv1.HealthCheckRequest{}
	require.NoError(t, Codec{}.Unmarshal(data, got))
	require.True(t, proto.Equal(want, got))
}

func TestAnswerIsTheMessageItWasMadeOf(t *testing.T) {
	immediate := func(details string) *extprocv3.ProcessingResponse {
		return &extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_ImmediateResponse{
			ImmediateResponse: &extprocv3.ImmediateResponse{Details: details},
		}}
	}
	answer, err := Encode(immediate("x"))
	require.NoError(t, err)
	data, err := Codec{}.Marshal(answer)
	require.NoError(t, err)
	clear(answer) // gRPC may write the message after its call has ended
	var m extprocv3.ProcessingResponse
	require.NoError(t, proto.Unmarshal(data.Materialize(), &m))
	require.Equal(t, "x", m.GetImmediateResponse().GetDetails())
	_, err = Encode(immediate("\xff"))
	require.Error(t, err)
}

// generated is an Admission as the generated types have it.
func generated(a *Admission) *extprocv3.ProcessingResponse {
	common := &extprocv3.CommonResponse{ClearRouteCache: a.ClearRoute}
	if a.ClearRoute {
		common.HeaderMutation = &extprocv3.HeaderMutation{}
	}
	for _, h := range a.Set {
		action := corev3.HeaderValueOption_OVERWRITE_IF_EXISTS_OR_ADD
		if h.IfAbsent {
			action = corev3.HeaderValueOption_ADD_IF_ABSENT
		}
		if common.HeaderMutation == nil {
			common.HeaderMutation = &extprocv3.HeaderMutation{}
		}
		common.HeaderMutation.SetHeaders = append(common.HeaderMutation.SetHeaders, &corev3.HeaderValueOption{
			Header: &corev3.HeaderValue{Key: h.Name, RawValue: []byte(h.Value)}, AppendAction: action,
		})
	}
	headers := &extprocv3.HeadersResponse{Response: common}
	if !a.ClearRoute && a.Set == nil {
		headers.Response = nil
	}
	fields := map[string]*structpb.Value{}
	for _, f := range a.Fields {
		fields[f.Name] = structpb.NewStringValue(string(f.Value))
	}
	return &extprocv3.ProcessingResponse{
		Response: &extprocv3.ProcessingResponse_RequestHeaders{RequestHeaders: headers},
		DynamicMetadata: &structpb.Struct{Fields: map[string]*structpb.Value{
			a.Namespace: structpb.NewStructValue(&structpb.Struct{Fields: fields}),
		}},
	}
}

// FuzzAdmission compares an encoded Admission with the generated types.
func FuzzAdmission(f *testing.F) {
	f.Add("/x?y", "localhost:8080", "10.1.2.3:8080", "abcdefghijklmnopqrst", true, true)
	f.Add("", "", "", "", false, false)
	f.Add("", "", "10.1.2.3:8080", "a", false, true)
	f.Add("/"+strings.Repeat("x", 1<<16), "\xff", strings.Repeat("d", 127), strings.Repeat("i", 128), false, false)
	f.Fuzz(func(t *testing.T, path, host, dst, id string, clearRoute, two bool) {
		if !utf8.ValidString(dst) || !utf8.ValidString(id) {
			t.Skip("text of metadata is UTF-8")
		}
		a := Admission{Namespace: "berth", ClearRoute: clearRoute, Fields: []Field{{"dst", []byte(dst)}}}
		if two {
			a.Fields = append(a.Fields, Field{"id", []byte(id)})
		}
		if path != "" {
			a.Set = append(a.Set, SetHeader{Name: ":path", Value: path})
		}
		if host != "" {
			a.Set = append(a.Set, SetHeader{Name: ":authority", Value: host}, SetHeader{"x-forwarded-host", host, true})
		}
		b := a.AppendTo(Answer("before"))
		require.Equal(t, "before", string(b[:6]))
		var m extprocv3.ProcessingResponse
		require.NoError(t, proto.Unmarshal(b[6:], &m))
		require.True(t, proto.Equal(generated(&a), &m), "%v", &m)
	})
}
