package journal

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"google.golang.org/protobuf/proto"

	journalv1 "github.com/berth-sandbox/berth/api/journal/v1"
)

// Batch is the decoded content of a slot.
type Batch struct {
	Slot
	Journal string // the ID
	Records []*journalv1.Record
	// Err is why the data could not be decoded in full.
	Err error
}

// Dump reads all slots and decodes them as far as possible, in the order of the log. It changes
// nothing and may be called while a leader writes. An error beside a result describes what is wrong
// with the slots as a whole.
func Dump(ctx context.Context, store Store) ([]Batch, error) {
	codec, err := newCodec()
	if err != nil {
		return nil, err
	}
	var batches []Batch
	f := folder{codec: codec}
	err = store.List(ctx, func(s Slot) error {
		b := Batch{Slot: s}
		decoded, err := codec.decode(s.Data)
		if b.Err = err; s.Format > format {
			b.Err = fmt.Errorf("%w: format %d", ErrFormat, s.Format)
		}
		b.Journal = decoded.id
		for _, r := range decoded.records {
			var m journalv1.Record
			b.Err = errors.Join(b.Err, proto.Unmarshal(r.Raw, &m))
			b.Records = append(b.Records, &m)
		}
		batches = append(batches, b)
		return f.add(s)
	})
	if err != nil {
		return nil, err
	}
	slices.SortFunc(batches, func(a, b Batch) int {
		return cmp.Or(cmp.Compare(a.Position, b.Position), cmp.Compare(a.Index, b.Index))
	})
	if len(batches) == 0 {
		return nil, nil
	}
	return batches, f.condition().Err
}
