package journal

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
)

// Condition describes a journal as read from outside, damaged or not.
type Condition struct {
	// ID is the ID in the last readable batch, "" if no batch has one. Position and Term are those
	// of the end of the readable log. Slots is the number of slots.
	ID             string
	Position, Term uint64
	Slots          int
	// Missing are the slots without an object. Damaged are slots that cannot be read or do not
	// belong where they are, including slots beyond Slots, each with its error.
	Missing []int
	Damaged map[int]error
	// Err is the reason why no leader can open the journal, nil for an intact journal. It is
	// ErrMissing if no slot exists.
	Err error

	slots map[int]Slot // the existing slots, without their data
	ring  *ring
}

// Check reads a journal, damaged or not. It changes nothing and may be called while a leader
// writes.
func Check(ctx context.Context, store Store) (*Condition, error) {
	codec, err := newCodec()
	if err != nil {
		return nil, err
	}
	f := folder{codec: codec}
	if err := store.List(ctx, f.add); err != nil {
		return nil, err
	}
	return f.condition(), nil
}

// Records returns the latest readable record of each key, in no order.
func (c *Condition) Records() []Record {
	var all []Record
	for _, n := range c.ring.newest {
		all = append(all, n.Record)
	}
	return all
}

// validInOrder returns the undamaged slots that hold a batch, in the order of the log.
func (c *Condition) validInOrder() []Slot {
	var order []Slot
	for _, s := range c.slots {
		if c.Damaged[s.Index] == nil && s.Position > 0 {
			order = append(order, s)
		}
	}
	slices.SortFunc(order, func(a, b Slot) int { return cmp.Compare(a.Position, b.Position) })
	return order
}

// Beginning is a plan for beginning a journal anew.
type Beginning struct {
	Stamp
	Position uint64
	// Emptied are the slots that are created or overwritten without records. Their former content
	// is lost.
	Emptied []int

	first  Slot
	empty  []Slot
	create map[int]bool
}

// BeginOptions configure Plan. All but MinTerm are required.
type BeginOptions struct {
	// MinTerm is the highest term known from outside the journal.
	MinTerm uint64
	// Records returns the first records of the new journal.
	Records func(Stamp) ([]Record, error)
	// Nonce returns a random string, never the same twice.
	Nonce func() string
}

// Plan returns how to begin this journal anew. A batch under a new ID goes to the end of the log,
// and batches without records replace missing and damaged slots. The readable rest of the journal
// stays.
func (c *Condition) Plan(o BeginOptions) (*Beginning, error) {
	for i, err := range c.Damaged {
		if errors.Is(err, ErrFormat) {
			return nil, err
		}
		if i >= c.Slots {
			return nil, fmt.Errorf("%w; delete %s, which does not belong to the journal", err, nameOf(i))
		}
	}
	codec, err := newCodec()
	if err != nil {
		return nil, err
	}
	b := &Beginning{Stamp: Stamp{Journal: o.Nonce(), Term: max(c.Term, o.MinTerm) + 1}, Position: c.Position + 1, create: map[int]bool{}}
	records, err := o.Records(b.Stamp)
	if err != nil {
		return nil, err
	}
	at := c.ring.slot(b.Position)
	records = slices.Concat(c.ring.needed(at), records)
	b.first = Slot{
		Index: at, Version: c.slots[at].Version, Slots: c.Slots, Format: formatOf(records), Position: b.Position, Term: b.Term,
		Nonce: o.Nonce(), Records: len(records), Data: codec.encode(b.Journal, records),
	}
	for _, i := range c.Missing {
		b.create[i] = true
	}
	empty := func(s Slot) {
		b.Emptied = append(b.Emptied, s.Index)
		if s.Index != at {
			b.empty = append(b.empty, s)
		}
	}
	broken := func(i int) bool { return b.create[i] || c.Damaged[i] != nil }
	slot := func(i int) Slot {
		return Slot{Index: i, Version: c.slots[i].Version, Slots: c.Slots, Format: formatOf(nil)}
	}
	for i := range c.Slots {
		if broken(i) && last(c.Position, i, c.Slots) == 0 { // it holds no batch yet
			empty(slot(i))
		}
	}
	// In the order of the log, so that each slot gets the term of its predecessor.
	term := uint64(1)
	for p := c.Position - min(c.Position, uint64(c.Slots)) + 1; p <= c.Position; p++ {
		i := c.ring.slot(p)
		if !broken(i) {
			term = c.slots[i].Term
			continue
		}
		s := slot(i)
		s.Position, s.Term, s.Nonce, s.Data = p, term, o.Nonce(), codec.encode(b.Journal, nil)
		empty(s)
	}
	slices.Sort(b.Emptied)
	// Slot 0 is written last, as always. A leader takes slots without slot 0 for a journal whose
	// creation was not finished, or for one that lost it.
	slices.SortFunc(b.empty, func(x, y Slot) int { return y.Index - x.Index })
	return b, nil
}

// Begin carries the plan out. Each write is conditional on the version that was read, so Begin
// fails if another client wrote meanwhile; the caller then plans and begins again. No leader can
// open a journal with missing or damaged slots before Begin succeeded.
func (b *Beginning) Begin(ctx context.Context, store Store) error {
	for _, s := range append([]Slot{b.first}, b.empty...) {
		var err error
		if b.create[s.Index] {
			_, err = store.Create(ctx, s)
		} else {
			_, err = store.Write(ctx, s)
		}
		if err != nil {
			return fmt.Errorf("journal: not begun anew; try again: %w", err)
		}
	}
	return nil
}
