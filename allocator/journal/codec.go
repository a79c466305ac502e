package journal

import (
	"errors"
	"fmt"

	"github.com/klauspost/compress/zstd"
	"google.golang.org/protobuf/proto"

	journalv1 "github.com/berth-sandbox/berth/api/journal/v1"
)

// format is the latest version of the batch format that this version reads. api/journal/v1/journal.proto
// says when it must change. A batch is written in the lowest format that its records allow.
const format = 2

// formatOf returns the format of a batch of records.
func formatOf(records []Record) int {
	lowest := 1
	for _, r := range records {
		lowest = max(lowest, r.Format)
	}
	return lowest
}

// Bounds of one batch in bytes, before compression. Incompressible data grows by a third as base64,
// and etcd accepts requests of up to 1.5 MiB.
const (
	maxBatch = 512 << 10
	// MaxJoined bounds the records that are joined. They may exceed maxBatch together with the records
	// to carry, because they must not wait until the slot has few of those.
	MaxJoined  = maxBatch
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
	b := journalv1.Batch{Journal: id, Records: make([][]byte, len(records))}
	for i, r := range records {
		b.Records[i] = r.Raw
	}
	raw, err := proto.Marshal(&b)
	if err != nil {
		panic(fmt.Sprintf("encode batch: %v", err)) // id is UTF-8, and nothing else can fail
	}
	return c.encoder.EncodeAll(raw, nil)
}

// batch is the decoded data of a slot.
type batch struct {
	id      string
	records []Record
}

// decode reads the data of a slot. A journal may hold hundreds of thousands of records, so decode
// reads only their heads.
func (c *codec) decode(data []byte) (b batch, err error) {
	raw, err := c.decoder.DecodeAll(data, nil)
	if err != nil {
		return b, fmt.Errorf("decompress: %w", err)
	}
	var whole journalv1.Batch
	if err := proto.Unmarshal(raw, &whole); err != nil {
		return b, fmt.Errorf("decode batch: %w", err)
	}
	b.id = whole.Journal
	for i, raw := range whole.Records {
		var head journalv1.RecordHead
		err := proto.UnmarshalOptions{DiscardUnknown: true}.Unmarshal(raw, &head)
		if err == nil && head.Key == "" {
			err = errors.New("the record has no key")
		}
		if err != nil {
			return b, fmt.Errorf("decode record %d: %w", i, err)
		}
		b.records = append(b.records, Record{Key: head.Key, Term: head.Term, Counter: head.Counter, Format: int(head.Format), Raw: raw})
	}
	return b, nil
}
