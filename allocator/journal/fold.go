package journal

import (
	"cmp"
	"crypto/sha256"
	"fmt"
	"slices"
)

// folder assembles the log slot by slot, because the data of all slots is too large to keep.
type folder struct {
	codec  *codec
	slots  []Slot // without their data
	ring   *ring
	id     string
	idAt   uint64 // the position of id
	buffer []byte
	// broken are the errors of slots that do not belong where they are, or cannot be decoded.
	broken map[int]error
}

// add adds a slot. It returns no error; whole and Check report the broken slots.
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
		var b batch
		var err error
		if b, f.buffer, err = f.codec.decode(data, f.buffer); err != nil {
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

// whole checks that the slots form one log, and returns that log.
func (f *folder) whole() (*contents, error) {
	slots := f.slots
	slices.SortFunc(slots, func(a, b Slot) int { return a.Index - b.Index })
	n := slots[0].Slots
	c := &contents{slots: slots, ring: f.ring, id: f.id}
	for i, s := range slots {
		if err := f.broken[s.Index]; err != nil {
			return nil, err
		}
		if s.Index != i {
			return nil, missing(i, n)
		}
		c.position, c.term = max(c.position, s.Position), max(c.term, s.Term)
	}
	if len(slots) < n {
		return nil, missing(len(slots), n)
	}
	for i, s := range slots {
		if want := last(c.position, i, n); s.Position != want {
			return nil, fmt.Errorf("%w: slot %d holds position %d, but the log ends at %d, so it should hold %d", ErrDamaged, i, s.Position, c.position, want)
		}
	}
	order := slices.Clone(slots)
	slices.SortFunc(order, func(a, b Slot) int { return cmp.Compare(a.Position, b.Position) })
	term := uint64(0)
	for _, s := range order {
		if s.Position > 0 && s.Term < term {
			return nil, fmt.Errorf("%w: position %d is of term %d, the one before of term %d", ErrDamaged, s.Position, s.Term, term)
		}
		term = s.Term
	}
	return c, nil
}

func missing(index, slots int) error {
	return fmt.Errorf("%w: slot %d of %d", ErrMissing, index, slots)
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
