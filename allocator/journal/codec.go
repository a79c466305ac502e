package journal

import (
	"errors"
	"fmt"

	"github.com/klauspost/compress/zstd"
	"google.golang.org/protobuf/encoding/protowire"
)

// format is the version of the batch format that this version writes. api/journal/v1/journal.proto
// says when it must change.
const format = 1

// Bounds of one batch in bytes, before compression. Incompressible data grows by a third as base64,
// and etcd accepts requests of up to 1.5 MiB.
const (
	maxBatch   = 512 << 10
	maxDecoded = 4 << 20 // bound of a slot's decompressed data
)

// codec encodes and decodes batches. It may be used concurrently.
type codec struct {
	encoder *zstd.Encoder
	decoder *zstd.Decoder
}

func newCodec() (*codec, error) {
	// No goroutines: batches are small and come one at a time.
	encoder, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1))
	if err != nil {
		return nil, fmt.Errorf("journal: %w", err)
	}
	decoder, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(maxDecoded))
	if err != nil {
		return nil, fmt.Errorf("journal: %w", err)
	}
	return &codec{encoder, decoder}, nil
}

// encode returns the data of a slot.
func (c *codec) encode(id string, records []Record) []byte {
	size := len(id) + 8
	for _, r := range records {
		size += len(r.Raw) + 8
	}
	// The encoding of a journalv1.Batch, written field by field to avoid a copy.
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

// Field numbers of journalv1.Batch and journalv1.Record.
const (
	batchRecords, batchJournal           = 1, 2
	recordKey, recordTerm, recordCounter = 1, 2, 3
)

// batch is the decoded data of a slot.
type batch struct {
	id      string
	records []Record
}

// decode reads the data of a slot. The records point into the returned buffer, which is room if
// room is large enough; room may be nil. A journal may hold hundreds of thousands of records, so
// decode reads journalv1.Batch and journalv1.Record field by field and allocates only the keys.
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
		err = errors.New("the record has no key")
	}
	return r, err
}

// fields calls f with each field of a message: with the bytes of a bytes field, or with the number
// of a varint field.
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
