package journal

import (
	"fmt"

	"github.com/klauspost/compress/zstd"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	journalv1 "github.com/berth-sandbox/berth/api/journal/v1"
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
func (c *codec) encode(records []Record) []byte {
	size := 0
	for _, r := range records {
		size += len(r.Raw) + 8
	}
	// A journalv1.Batch, whose one field is repeated: no need to gather it first.
	raw := make([]byte, 0, size)
	for _, r := range records {
		raw = protowire.AppendTag(raw, 1, protowire.BytesType)
		raw = protowire.AppendBytes(raw, r.Raw)
	}
	return c.encoder.EncodeAll(raw, nil)
}

// decode reads the data of a slot.
func (c *codec) decode(data []byte) ([]Record, error) {
	if len(data) == 0 {
		return nil, nil
	}
	raw, err := c.decoder.DecodeAll(data, nil)
	if err != nil {
		return nil, fmt.Errorf("decompress: %w", err)
	}
	var batch journalv1.Batch
	if err := proto.Unmarshal(raw, &batch); err != nil {
		return nil, fmt.Errorf("decode batch: %w", err)
	}
	records := make([]Record, 0, len(batch.GetRecords()))
	for i, raw := range batch.GetRecords() {
		var r journalv1.Record
		if err := proto.Unmarshal(raw, &r); err != nil {
			return nil, fmt.Errorf("decode record %d: %w", i, err)
		}
		if r.GetKey() == "" {
			return nil, fmt.Errorf("decode record %d: it has no key", i)
		}
		records = append(records, Record{Key: r.GetKey(), Term: r.GetTerm(), Counter: r.GetCounter(), Raw: raw})
	}
	return records, nil
}
