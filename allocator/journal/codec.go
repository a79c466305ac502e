package journal

import (
	"errors"
	"fmt"

	"github.com/klauspost/compress/zstd"
	"google.golang.org/protobuf/encoding/protowire"
)

// format is the version that is written. See api/journal/v1/journal.proto for
// when it has to change.
const format = 1

// Bounds of one batch, in bytes before compression. Data that does not compress
// grows by a third as base64, and etcd takes requests of up to 1.5 MiB.
const (
	batchMost   = 512 << 10
	decodedMost = 4 << 20 // what a slot may claim to decompress to
)

// codec compresses batches. It may be used concurrently.
type codec struct {
	encoder *zstd.Encoder
	decoder *zstd.Decoder
}

func newCodec() (*codec, error) {
	// No goroutines of their own: batches are small and one at a time.
	encoder, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1))
	if err != nil {
		return nil, fmt.Errorf("journal: %w", err)
	}
	decoder, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(decodedMost))
	if err != nil {
		return nil, fmt.Errorf("journal: %w", err)
	}
	return &codec{encoder, decoder}, nil
}

// encode makes the data of a slot.
func (c *codec) encode(id string, records []Record) []byte {
	size := len(id) + 8
	for _, r := range records {
		size += len(r.Raw) + 8
	}
	// A journalv1.Batch, whose first field is repeated: no need to gather it first.
	raw := make([]byte, 0, size)
	for _, r := range records {
		raw = protowire.AppendTag(raw, batchRecords, protowire.BytesType)
		raw = protowire.AppendBytes(raw, r.Raw)
	}
	if id != "" {
		raw = protowire.AppendTag(raw, batchJournal, protowire.BytesType)
		raw = protowire.AppendString(raw, id)
	}
	return c.encoder.EncodeAll(raw, nil)
}

// The fields of journalv1.Batch, and those of journalv1.Record that are looked at.
const (
	batchRecords, batchJournal           = 1, 2
	recordKey, recordTerm, recordCounter = 1, 2, 3
)

// batch is the data of a slot.
type batch struct {
	id      string
	records []Record
}

// decode reads the data of a slot. The records point into a buffer: into room, which may
// be nil, if that is large enough. It returns the buffer.
//
// A journal may hold hundreds of thousands of records, so this makes nothing but keys:
// journalv1.Batch and journalv1.Record are read field by field.
func (c *codec) decode(data, room []byte) (b batch, buffer []byte, err error) {
	if len(data) == 0 {
		return b, room, nil
	}
	buffer, err = c.decoder.DecodeAll(data, room[:0])
	if err != nil {
		return b, room, fmt.Errorf("decompress: %w", err)
	}
	err = fields(buffer, func(number protowire.Number, value []byte, _ uint64) error {
		switch number {
		case batchRecords:
			r, err := toRecord(value)
			if err != nil {
				return fmt.Errorf("decode record %d: %w", len(b.records), err)
			}
			b.records = append(b.records, r)
		case batchJournal:
			b.id = string(value)
		}
		return nil
	})
	if err != nil {
		return b, buffer, fmt.Errorf("decode batch: %w", err)
	}
	return b, buffer, nil
}

func toRecord(raw []byte) (Record, error) {
	r := Record{Raw: raw}
	err := fields(raw, func(number protowire.Number, value []byte, n uint64) error {
		switch number {
		case recordKey:
			r.Key = string(value)
		case recordTerm:
			r.Term = n
		case recordCounter:
			r.Counter = n
		}
		return nil
	})
	if err == nil && r.Key == "" {
		err = errors.New("it has no key")
	}
	return r, err
}

// fields calls f with every field of a message: with its bytes, or its number if it is
// a varint.
func fields(raw []byte, f func(number protowire.Number, value []byte, n uint64) error) error {
	for len(raw) > 0 {
		number, kind, size := protowire.ConsumeTag(raw)
		if size < 0 {
			return protowire.ParseError(size)
		}
		raw = raw[size:]
		var value []byte
		var n uint64
		switch kind {
		case protowire.BytesType:
			value, size = protowire.ConsumeBytes(raw)
		case protowire.VarintType:
			n, size = protowire.ConsumeVarint(raw)
		default:
			size = protowire.ConsumeFieldValue(number, kind, raw)
		}
		if size < 0 {
			return protowire.ParseError(size)
		}
		raw = raw[size:]
		if err := f(number, value, n); err != nil {
			return err
		}
	}
	return nil
}
