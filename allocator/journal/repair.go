package journal

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"

	"go.uber.org/zap"
)

// Only the leader may write the slots, and it knows what it has written or read there.
// So it can tell that one was deleted, or written to, by something else, and put it right
// again, as long as it holds the lease: then no other leader has taken the log over, or
// can before it has read what was put right.
//
// A single slot that holds what it had held before may be a mistake: one object was put
// back. Two such slots show that the journal was restored from a backup, and with it
// everything else in the API server: Sandbox objects that were written since may be gone,
// and what they showed is not in the journal any more. So the slots are put right, because
// no leader can open the journal before that, and then it must be begun anew ([Log.Renew]).
//
// What is put back is what is still needed of a slot (see ring.needed), as the same
// batch: with its position, term and nonce.

// Suspects lists the slots that are not there, or not as this leader has left them, in
// order. One that is being written may be among them. It may be called at any time.
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
	for i := range versions { // there are more than there should be
		suspects = append(suspects, i)
	}
	slices.Sort(suspects)
	return suspects, nil
}

// Repair looks at slots, and puts those right that are missing or were written to by
// something else than a leader. It is called where Commit could be. It returns how many
// it has put right, and what is wrong with others; ErrDeposed if another leader has
// written, or if this one may not be the leader any more; ErrRestored if the journal was
// restored from a backup, once nothing else is wrong.
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
	if len(errs) == 0 && len(l.earlier) >= restoredLeast {
		return repaired, ErrRestored
	}
	return repaired, errors.Join(errs...)
}

// restoredLeast is how many slots show, by what they hold, that the journal was restored.
const restoredLeast = 2

// holdsEarlier reports whether a slot holds what a leader of this journal has written there
// before, or what it was made with.
func (l *Log) holdsEarlier(found, ours Slot) bool {
	if found.Position >= ours.Position || found.Position != last(found.Position, found.Index, len(l.slots)) {
		return false
	}
	b, _, err := l.codec.decode(found.Data, nil)
	return err == nil && (b.id == l.stamp.Journal || found.Position == 0)
}

// restore repairs a slot, for as long as that may succeed.
func (l *Log) restore(ctx context.Context, index int) error {
	for attempt := 0; ; attempt++ {
		_, err := l.repair(ctx, index)
		if err == nil || errors.Is(err, ErrDeposed) || ctx.Err() != nil {
			return err
		}
		l.o.Log.Error("journal: slot not repaired, will try again", zap.Int("slot", index), zap.Error(err))
		l.o.Pause(ctx, attempt)
	}
}

func (l *Log) repair(ctx context.Context, index int) (bool, error) {
	if index >= len(l.slots) {
		return false, fmt.Errorf("%w: JournalSlot %s is there, and the journal has %d slots only; delete it", ErrDamaged, nameOf(index), len(l.slots))
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
	case err != nil: // it is not what a slot can be; found says no version
		return false, err
	case found.Version == ours.Version:
		return false, nil
	case found.Term > l.stamp.Term:
		return false, fmt.Errorf("%w: slot %d holds position %d of term %d", ErrDeposed, index, found.Position, found.Term)
	case found.Position == ours.Position && found.Term == ours.Term && found.Nonce == ours.Nonce && sha256.Sum256(found.Data) == ours.sum:
		// Only touched: something was noted on the object, or it was stored anew.
		ours.Version = found.Version
		l.keep(ours)
		return false, nil
	}
	if !gone && l.holdsEarlier(found, ours) {
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
	// Only now is it certain that no other leader has read the log without this slot.
	if !l.o.Valid() {
		return false, fmt.Errorf("%w: the lease is not held any more", ErrDeposed)
	}
	l.keep(ours)
	l.o.Log.Error("journal: a slot was missing, or written to by something else than a leader; it was repaired. Nothing may write to JournalSlot objects",
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
