package wire

import (
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

// Answer is one ProcessingResponse, encoded.
type Answer []byte

// Encode encodes a ProcessingResponse. Text that is no UTF-8 is an error.
func Encode(m *extprocv3.ProcessingResponse) (Answer, error) { return proto.Marshal(m) }

// Admission is the ProcessingResponse that lets a request through.
type Admission struct {
	// Set are headers that the request gets.
	Set []SetHeader
	// ClearRoute has Envoy choose the route again. Envoy does so only where the message has a HeaderMutation,
	// so that is there even without a header to set.
	ClearRoute bool
	// Namespace is that of the dynamic metadata Fields, a text each. All names must be UTF-8.
	Namespace string
	Fields    []Field
}

// SetHeader sets a header. One that the request has is replaced, or with IfAbsent stays.
type SetHeader struct {
	Name, Value string
	IfAbsent    bool
}

// Field is a text of metadata, which must be UTF-8.
type Field struct {
	Name  string
	Value []byte
}

// The numbers of the fields that an Admission encodes.
const (
	responseHeaders, responseMetadata = 1, 8 // of ProcessingResponse
	headersCommon                     = 1    // of HeadersResponse
	commonMutation, commonClearRoute  = 2, 5 // of CommonResponse
	mutationSet                       = 1    // of HeaderMutation
	optionHeader, optionAction        = 1, 3 // of HeaderValueOption
	headerKey, headerRaw              = 1, 3 // of HeaderValue
	structFields                      = 1    // of Struct
	entryKey, entryValue              = 1, 2 // of an entry of a map
	valueText, valueStruct            = 3, 5 // of Value
	oneByte                           = 2    // size of a field with a number that takes one byte
)

// AppendTo appends the encoded message. It does not allocate if b has room.
func (a *Admission) AppendTo(b Answer) Answer {
	set, common := 0, 0
	for i := range a.Set {
		set += size(a.Set[i].size())
	}
	mutation := set > 0 || a.ClearRoute
	if mutation {
		common += size(set)
	}
	if a.ClearRoute {
		common += oneByte
	}
	if common == 0 {
		b = begin(b, responseHeaders, 0)
	} else {
		b = begin(b, responseHeaders, size(common))
		b = begin(b, headersCommon, common)
	}
	if mutation {
		b = begin(b, commonMutation, set)
		for i := range a.Set {
			b = a.Set[i].appendTo(b)
		}
	}
	if a.ClearRoute {
		b = number(b, commonClearRoute, 1)
	}

	fields := 0
	for i := range a.Fields {
		fields += size(a.Fields[i].size())
	}
	entry := size(len(a.Namespace)) + size(size(fields))
	b = begin(b, responseMetadata, size(entry))
	b = begin(b, structFields, entry)
	b = text(b, entryKey, a.Namespace)
	b = begin(b, entryValue, size(fields))
	b = begin(b, valueStruct, fields)
	for i := range a.Fields {
		f := &a.Fields[i]
		b = begin(b, structFields, f.size())
		b = text(b, entryKey, f.Name)
		b = begin(b, entryValue, size(len(f.Value)))
		b = text(b, valueText, f.Value)
	}
	return b
}

// size of the entry of a map.
func (f *Field) size() int { return size(len(f.Name)) + size(size(len(f.Value))) }

// header is the size of the HeaderValue.
func (h *SetHeader) header() int { return size(len(h.Name)) + size(len(h.Value)) }

// size of the HeaderValueOption.
func (h *SetHeader) size() int { return size(h.header()) + oneByte }

func (h *SetHeader) appendTo(b []byte) []byte {
	action := corev3.HeaderValueOption_OVERWRITE_IF_EXISTS_OR_ADD
	if h.IfAbsent {
		action = corev3.HeaderValueOption_ADD_IF_ABSENT
	}
	b = begin(b, mutationSet, h.size())
	b = begin(b, optionHeader, h.header())
	b = text(b, headerKey, h.Name)
	b = text(b, headerRaw, h.Value)
	return number(b, optionAction, uint64(action))
}

// size is that of a field whose content has n bytes.
func size(n int) int { return 1 + protowire.SizeBytes(n) }

// begin appends what stands before the n bytes of a field.
func begin(b []byte, field protowire.Number, n int) []byte {
	return protowire.AppendVarint(protowire.AppendTag(b, field, protowire.BytesType), uint64(n))
}

func text[T string | []byte](b []byte, field protowire.Number, value T) []byte {
	return append(begin(b, field, len(value)), value...)
}

func number(b []byte, field protowire.Number, value uint64) []byte {
	return protowire.AppendVarint(protowire.AppendTag(b, field, protowire.VarintType), value)
}
