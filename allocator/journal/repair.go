package journal

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"

	"go.uber.org/zap"
)

// Only the leader may write the slots, and it knows their content. It therefore detects
// when another client deletes a slot or writes to one, and repairs the slot. It may do so
// while it holds the lease: no other leader can then take the log over without reading
// the repaired slot.
//
// A single slot with an earlier content may be a mistake: a client restored one object.
// Two such slots show that the whole API server was restored from a backup. Sandbox
// objects written since then may be lost, and their states are no longer in the journal.
// The slots are repaired first, because no leader can open a damaged journal. Then the
// journal must be begun anew ([Log.Renew]).
//
// A repair writes the records that are still needed (see ring.needed) as the same batch,
// with its position, term and nonce.

// Suspects lists, in order, the slots that are missing or not as this leader left them. A slot that
// is being written may be among them. It may be called at any time.
func (l *Log) Suspects(ctx context.Context) ([]int, error) {
	call, cancel := context.WithTimeout(ctx, l.o.CallTimeout)
	defer cancel()
	versions, err := l.o.Store.Versions(call)
	if err != nil {
		return nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	var suspects []int
	for i, s := range l.slots {
		if versions[i] != s.Version {
			suspects = append(suspects, i)
		}
		delete(versions, i)
	}
	for i := range versions { // slots beyond the ring
		suspects = append(suspects, i)
	}
	slices.Sort(suspects)
	return suspects, nil
}

// Repair reads slots and restores those that are missing or that another client wrote to. It must
// not run concurrently with Commit. It returns the number of restored slots and the errors of the
// others. It returns ErrDeposed if another leader wrote or this one may no longer lead, and
// ErrRestored if the journal was restored from a backup and nothing else is wrong.
func (l *Log) Repair(ctx context.Context, slots []int) (repaired int, err error) {
	var errs []error
	for _, index := range slots {
		done, err := l.repair(ctx, index)
		switch {
		case errors.Is(err, ErrDeposed):
			return repaired, err
		case err != nil:
			errs = append(errs, err)
		case done:
			repaired++
		}
	}
	if len(errs) == 0 && len(l.earlier) >= minRestored {
		return repaired, ErrRestored
	}
	return repaired, errors.Join(errs...)
}

// minRestored is the number of slots with an earlier content that reveal a restored journal.
const minRestored = 2

// holdsEarlierBatch reports whether a slot holds an earlier batch of this journal, or the content
// it was created with.
func (l *Log) holdsEarlierBatch(found, ours Slot) bool {
	if found.Position >= ours.Position || found.Position != last(found.Position, found.Index, len(l.slots)) {
		return false
	}
	b, err := l.codec.decode(found.Data)
	return err == nil && (b.id == l.stamp.Journal || found.Position == 0)
}

// restore repairs a slot, and retries while that can succeed.
func (l *Log) restore(ctx context.Context, index int) error {
	for attempt := 0; ; attempt++ {
		_, err := l.repair(ctx, index)
		if err == nil || errors.Is(err, ErrDeposed) || ctx.Err() != nil {
			return err
		}
		l.o.Log.Error("journal: slot not repaired, retrying", zap.Int("slot", index), zap.Error(err))
		l.o.Pause(ctx, attempt)
	}
}

func (l *Log) repair(ctx context.Context, index int) (bool, error) {
	if index >= len(l.slots) {
		return false, fmt.Errorf("%w: JournalSlot %s exists, but the journal has only %d slots; delete it", ErrDamaged, nameOf(index), len(l.slots))
	}
	call, cancel := context.WithTimeout(ctx, l.o.CallTimeout)
	defer cancel()
	found, err := l.o.Store.Read(call, index)
	gone := errors.Is(err, ErrMissing)
	if err != nil && !gone && !errors.Is(err, ErrDamaged) {
		return false, err
	}
	ours := l.known(index)
	switch {
	case gone:
	case err != nil: // the object cannot be decoded, so its version is unknown
		return false, err
	case found.Version == ours.Version:
		return false, nil
	case found.Term > l.stamp.Term:
		return false, fmt.Errorf("%w: slot %d holds position %d of term %d", ErrDeposed, index, found.Position, found.Term)
	case found.Position == ours.Position && found.Term == ours.Term && found.Nonce == ours.Nonce && sha256.Sum256(found.Data) == ours.sum:
		// Only the object's metadata changed, or the object was stored again.
		ours.Version = found.Version
		l.keep(ours)
		return false, nil
	}
	if !gone && l.holdsEarlierBatch(found, ours) {
		l.earlier[index] = struct{}{}
	}
	l.mu.Lock()
	needed := l.ring.needed(index)
	l.mu.Unlock()
	ours.Records, ours.Data = len(needed), l.codec.encode(l.stamp.Journal, needed)
	ours.sum = sha256.Sum256(ours.Data)
	ours.Version = found.Version
	if !l.o.Valid() {
		return false, fmt.Errorf("%w: the lease is not held any more", ErrDeposed)
	}
	if gone {
		ours.Version, err = l.o.Store.Create(call, ours)
	} else {
		ours.Version, err = l.o.Store.Write(call, ours)
	}
	if err != nil {
		return false, fmt.Errorf("repair slot %d: %w", index, err)
	}
	// Only a lease that is still valid proves that no other leader read the log without this slot.
	if !l.o.Valid() {
		return false, fmt.Errorf("%w: the lease is not held any more", ErrDeposed)
	}
	l.keep(ours)
	l.o.Log.Error("journal: repaired a slot that another client deleted or wrote to; only the allocator may write JournalSlot objects",
		zap.String("slot", nameOf(index)), zap.Bool("missing", gone), zap.Uint64("position", ours.Position), zap.Int("records", ours.Records))
	return true, nil
}

func (l *Log) known(index int) Slot {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.slots[index]
}

func (l *Log) keep(s Slot) {
	l.mu.Lock()
	defer l.mu.Unlock()
	s.Data = nil
	l.slots[s.Index] = s
}
