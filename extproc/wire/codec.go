package wire

import (
	"bytes"

	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
)

// Codec reads Requests and writes Answers. It leaves messages of generated types, such as those of the
// health service, to gRPC's own codec. The zero value is ready.
type Codec struct{}

// Name is that of gRPC's own codec, because the bytes are the same.
func (Codec) Name() string { return proto.Name }

// Marshal implements encoding.CodecV2.
func (Codec) Marshal(v any) (mem.BufferSlice, error) {
	if a, ok := v.(Answer); ok {
		return mem.BufferSlice{mem.SliceBuffer(bytes.Clone(a))}, nil // gRPC may write it later
	}
	return encoding.GetCodecV2(proto.Name).Marshal(v)
}

// Unmarshal implements encoding.CodecV2.
func (Codec) Unmarshal(data mem.BufferSlice, v any) error {
	if r, ok := v.(*Request); ok {
		return r.read(data)
	}
	return encoding.GetCodecV2(proto.Name).Unmarshal(data, v)
}
