package journal

import (
	"crypto/sha256"
	"fmt"
	"maps"
	"slices"
)

// folder assembles the log slot by slot, because the data of all slots is too large to keep.
type folder struct {
	codec *codec
	slots []Slot // without their data
	ring  *ring
	id    string
	idAt  uint64 // the position of id
	// broken are the errors of slots that do not belong where they are, or cannot be decoded.
	broken map[int]error
}

// add adds a slot. It returns no error; condition reports the broken slots.
func (f *folder) add(s Slot) error {
	if f.ring == nil {
		f.ring, f.broken = newRing(s.Slots), map[int]error{}
	}
	data := s.Data
	s.Data, s.sum = nil, sha256.Sum256(data)
	f.slots = append(f.slots, s)
	n := len(f.ring.held)
	switch {
	case s.Format > format:
		f.broken[s.Index] = fmt.Errorf("%w: slot %d is of format %d, this version reads formats up to %d; run the version that wrote it, or a later one", ErrFormat, s.Index, s.Format, format)
	case s.Slots != n || s.Index >= n:
		f.broken[s.Index] = fmt.Errorf("%w: slot %d says that there are %d slots, slot %d says %d", ErrDamaged, s.Index, s.Slots, f.slots[0].Index, n)
	case s.Position > 0 && s.Position%uint64(n) != uint64(s.Index):
		f.broken[s.Index] = fmt.Errorf("%w: slot %d holds position %d, which belongs to slot %d", ErrDamaged, s.Index, s.Position, s.Position%uint64(n))
	case s.Position > 0:
		b, err := f.codec.decode(data)
		if err != nil {
			f.broken[s.Index] = fmt.Errorf("%w: slot %d: %w", ErrDamaged, s.Index, err)
			return nil
		}
		f.ring.merge(s.Position, b.records)
		if b.id != "" && s.Position > f.idAt {
			f.id, f.idAt = b.id, s.Position
		}
	}
	return nil
}

// condition describes the log that the slots form.
func (f *folder) condition() *Condition {
	c := &Condition{Slots: Slots, Damaged: map[int]error{}, slots: map[int]Slot{}, ring: newRing(Slots)}
	if len(f.slots) > 0 {
		c.Slots, c.ring, c.ID, c.Damaged = f.slots[0].Slots, f.ring, f.id, f.broken
	}
	for _, s := range f.slots {
		c.slots[s.Index] = s
		if c.Damaged[s.Index] == nil {
			c.Position = max(c.Position, s.Position)
		}
	}
	for i := range c.Slots {
		s, there := c.slots[i]
		want := last(c.Position, i, c.Slots)
		switch {
		case !there:
			c.Missing = append(c.Missing, i)
		case c.Damaged[i] == nil && s.Position != want:
			c.Damaged[i] = fmt.Errorf("%w: slot %d holds position %d, but the log ends at %d, so it should hold %d",
				ErrDamaged, i, s.Position, c.Position, want)
		}
	}
	for _, s := range c.validInOrder() {
		if s.Term < c.Term {
			c.Damaged[s.Index] = fmt.Errorf("%w: position %d is of term %d, the one before of term %d",
				ErrDamaged, s.Position, s.Term, c.Term)
			continue
		}
		c.Term = s.Term
	}
	if len(f.slots) == 0 {
		c.Err = fmt.Errorf("%w: no slot exists", ErrMissing)
		return c
	}
	// The error of the first slot that has one.
	wrong := maps.Clone(c.Damaged)
	for _, i := range c.Missing {
		wrong[i] = fmt.Errorf("%w: slot %d of %d", ErrMissing, i, c.Slots)
	}
	if len(wrong) > 0 {
		c.Err = wrong[slices.Min(slices.Collect(maps.Keys(wrong)))]
	}
	return c
}

// last returns the last position of a slot in a log that ends at position end, or 0 if the slot
// holds no batch yet.
func last(end uint64, index, slots int) uint64 {
	back := (end + uint64(slots) - uint64(index)) % uint64(slots) // how far behind the end
	if end <= back {
		return 0
	}
	return end - back
}
