package journal

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
)

// Condition is what a journal looks like from outside, whole or not.
type Condition struct {
	// ID is that of its last batch that can be read, "" if none says one. It ends at
	// Position, in Term, as far as can be read. Slots is how many it has.
	ID             string
	Position, Term uint64
	Slots          int
	// Missing slots are not there. Damaged ones cannot be read, or do not belong where
	// they are. Extra ones are more than the journal has.
	Missing []int
	Damaged map[int]error
	// Err is why no leader can open it, nil if it is whole. It is ErrMissing if there is
	// no slot at all.
	Err error

	slots map[int]Slot // what is there, without their data
	ring  *ring
}

// Check reads a journal, whole or not. It changes nothing, and may be called while a
// leader writes.
func Check(ctx context.Context, store Store) (*Condition, error) {
	codec, err := newCodec()
	if err != nil {
		return nil, err
	}
	f := folder{codec: codec}
	if err := store.List(ctx, f.add); err != nil {
		return nil, err
	}
	c := &Condition{Slots: Slots, Damaged: map[int]error{}, slots: map[int]Slot{}, ring: newRing(Slots)}
	if len(f.slots) == 0 {
		for i := range c.Slots {
			c.Missing = append(c.Missing, i)
		}
		c.Err = fmt.Errorf("%w: there is no slot at all", ErrMissing)
		return c, nil
	}
	c.Slots, c.ring, c.ID = f.slots[0].Slots, f.ring, f.id
	for _, s := range f.slots {
		c.slots[s.Index] = s
		if err := f.broken[s.Index]; err != nil {
			c.Damaged[s.Index] = err
			continue
		}
		c.Position = max(c.Position, s.Position)
	}
	for i := range c.Slots {
		s, there := c.slots[i]
		want := last(c.Position, i, c.Slots)
		switch {
		case !there:
			c.Missing = append(c.Missing, i)
		case c.Damaged[i] == nil && s.Position != want:
			c.Damaged[i] = fmt.Errorf("%w: slot %d holds position %d, but the log ends at %d, so it should hold %d", ErrDamaged, i, s.Position, c.Position, want)
		}
	}
	for _, s := range c.inOrder() {
		if s.Term < c.Term {
			c.Damaged[s.Index] = fmt.Errorf("%w: position %d is of term %d, the one before of term %d", ErrDamaged, s.Position, s.Term, c.Term)
			continue
		}
		c.Term = s.Term
	}
	_, c.Err = f.whole()
	return c, nil
}

// inOrder lists the slots that are as they should be and were written, in the order of
// the log.
func (c *Condition) inOrder() []Slot {
	var order []Slot
	for _, s := range c.slots {
		if c.Damaged[s.Index] == nil && s.Position > 0 {
			order = append(order, s)
		}
	}
	slices.SortFunc(order, func(a, b Slot) int { return cmp.Compare(a.Position, b.Position) })
	return order
}

// Beginning is how a journal is begun anew.
type Beginning struct {
	Stamp
	Position uint64
	// Emptied are the slots that are made, or written, without any record: what was in
	// them is lost.
	Emptied []int

	first  Slot
	empty  []Slot
	create map[int]bool
}

// BeginOptions are how a journal is begun anew. All are required but Carry.
type BeginOptions struct {
	// MinTerm is the highest term that is known from elsewhere.
	MinTerm uint64
	// Records, made for this journal and term, are its first.
	Records func(Stamp) ([]Record, error)
	Nonce   func() string
}

// Plan says how a journal of this condition is begun anew: a batch is put at its end,
// under a new ID, and what is missing or damaged is filled with batches without records.
// What is left of the journal stays.
func (c *Condition) Plan(o BeginOptions) (*Beginning, error) {
	for i, err := range c.Damaged {
		if errors.Is(err, ErrFormat) {
			return nil, err
		}
		if i >= c.Slots {
			return nil, fmt.Errorf("%w; delete %s, which is not the journal's", err, nameOf(i))
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
		Index: at, Version: c.slots[at].Version, Slots: c.Slots, Format: format, Position: b.Position, Term: b.Term,
		Nonce: o.Nonce(), Records: len(records), Data: codec.encode(b.Journal, records),
	}
	for _, i := range c.Missing {
		b.create[i] = true
	}
	term := uint64(0)
	terms := map[uint64]uint64{} // of what is there
	for _, s := range c.inOrder() {
		terms[s.Position] = s.Term
	}
	wanted := map[int]uint64{}
	for i := range c.Slots {
		wanted[i] = last(c.Position, i, c.Slots)
	}
	// In the order of the log, so that each gets the term of the one before.
	indices := slices.SortedFunc(maps.Keys(wanted), func(x, y int) int { return cmp.Or(cmp.Compare(wanted[x], wanted[y]), cmp.Compare(x, y)) })
	for _, i := range indices {
		if known, ok := terms[wanted[i]]; ok && wanted[i] > 0 {
			term = known
		}
		if !b.create[i] && c.Damaged[i] == nil {
			continue
		}
		b.Emptied = append(b.Emptied, i)
		if i == at {
			continue
		}
		s := Slot{Index: i, Version: c.slots[i].Version, Slots: c.Slots, Format: format, Position: wanted[i]}
		if s.Position > 0 {
			s.Term, s.Nonce, s.Data = max(term, 1), o.Nonce(), codec.encode(b.Journal, nil)
		}
		b.empty = append(b.empty, s)
	}
	slices.Sort(b.Emptied)
	// Slot 0 last, as always: a leader takes slots without it for a journal that was not
	// begun, or has lost it.
	slices.SortFunc(b.empty, func(x, y Slot) int { return y.Index - x.Index })
	return b, nil
}

// Begin carries a plan out. Each write is conditional on what was read, so it fails if
// anything was written meanwhile; then it can be planned and begun again. No leader can
// open a journal of which slots are missing or damaged before this has succeeded.
func (b *Beginning) Begin(ctx context.Context, store Store) error {
	for _, s := range append([]Slot{b.first}, b.empty...) {
		var err error
		if b.create[s.Index] {
			_, err = store.Create(ctx, s)
		} else {
			_, err = store.Write(ctx, s)
		}
		if err != nil {
			return fmt.Errorf("the journal is not begun; try again: %w", err)
		}
	}
	return nil
}
