package journal

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"
)

const (
	// listTimeouts is how many times as long as another call a list may take: it
	// reads the whole journal.
	listTimeouts = 10
	// timeoutDoubled is how many times the time for a call is doubled that has failed
	// before.
	timeoutDoubled = 3
)

// Slots is how many slots a new journal has. One that exists keeps its own.
const Slots = 256

// Slot is the content of a slot object.
type Slot struct {
	Index int
	// Version is the resource version it was read at, or written as.
	Version string
	// Slots is the number of slots in the ring, Format that of Data.
	Slots, Format int
	// Position is that of the batch, 0 when there is none yet.
	Position, Term uint64
	Nonce          string
	Records        int
	Data           []byte
}

// Store keeps slot objects. Every error but ErrMissing leaves open what has
// happened. Calls end with their context.
type Store interface {
	// List reads all slots at one moment, from the store and not from a cache.
	List(ctx context.Context) ([]Slot, error)
	// Read reads one slot, from the store.
	Read(ctx context.Context, index int) (Slot, error)
	// Write replaces the slot s.Index if its version is still s.Version, and
	// returns its new version.
	Write(ctx context.Context, s Slot) (version string, err error)
	// Create makes a slot that is not there.
	Create(ctx context.Context, s Slot) error
}

// Options configure Open. All are required unless they say otherwise.
type Options struct {
	Store Store
	// Valid reports whether the caller may still act as the leader: it is asked
	// before the log is taken over.
	Valid func() bool
	// Begin is asked before a journal is made where there is none. It returns an
	// error when what is there must have had one.
	Begin func(context.Context) error
	// Nonce makes something random, never the same twice.
	Nonce func() string
	// CallTimeout bounds one call to the Store, but for List, which may take ten
	// times as long. A write that fails is given twice as long the next time, up to
	// eight times. Default 2 s.
	CallTimeout time.Duration
	// Pause waits between attempts; it returns early when ctx ends. The default
	// waits 10 ms after the first attempt and up to 1 s later on.
	Pause func(ctx context.Context, attempt int)
	Log   *zap.Logger
}

// Log is the journal as one leader writes it. Commit is called by one goroutine
// at a time; the other methods may be called at any time.
type Log struct {
	o     Options
	codec *codec
	term  uint64

	mu       sync.Mutex
	ring     *ring
	slots    []Slot // without their data
	position uint64 // of the last batch
	stats    Stats
}

// Stats count what a Log has done since Open, but for Unsettled and
// UnsettledBytes, which are what would have to ride along now.
type Stats struct {
	Batches, Records, Carried, Bytes uint64
	// Unknown are the writes whose outcome had to be read.
	Unknown                   uint64
	Unsettled, UnsettledBytes int
}

// Open takes the log over under a new term, higher than any in it, and returns
// it with the latest record of every key that it holds, in the order of their
// revisions. It repeats what fails
// until ctx ends, except for ErrMissing, ErrDamaged, ErrFormat, an error of
// Options.Begin, and ErrDeposed when Options.Valid has become false.
func Open(ctx context.Context, o Options) (*Log, []Record, error) {
	if o.Store == nil || o.Valid == nil || o.Begin == nil || o.Nonce == nil || o.Log == nil {
		return nil, nil, errors.New("journal: all options but CallTimeout and Pause are required")
	}
	if o.CallTimeout == 0 {
		o.CallTimeout = 2 * time.Second
	}
	if o.Pause == nil {
		o.Pause = pause
	}
	codec, err := newCodec()
	if err != nil {
		return nil, nil, err
	}
	l := &Log{o: o, codec: codec}
	for attempt := 0; ; attempt++ {
		records, err := l.takeOver(ctx)
		switch {
		case err == nil:
			return l, records, nil
		case ctx.Err() != nil:
			return nil, nil, ctx.Err()
		case final(err):
			return nil, nil, err
		}
		o.Log.Warn("journal: will read again", zap.Error(err))
		o.Pause(ctx, attempt)
	}
}

func final(err error) bool {
	var refused *beginError
	return errors.Is(err, ErrMissing) || errors.Is(err, ErrDamaged) || errors.Is(err, ErrFormat) || errors.Is(err, ErrDeposed) || errors.As(err, &refused)
}

// beginError is a refusal of Options.Begin that asking again does not change.
type beginError struct{ error }

func (e *beginError) Unwrap() error { return e.error }

// Refuse marks an error of Options.Begin as final. Others are asked again.
func Refuse(err error) error { return &beginError{err} }

// errOvertaken: somebody else wrote while the log was being taken over.
var errOvertaken = errors.New("another candidate or leader has written meanwhile")

// takeOver reads the log, puts a term record at its end and reads it again.
func (l *Log) takeOver(ctx context.Context) ([]Record, error) {
	before, err := l.read(ctx)
	if err != nil {
		return nil, err
	}
	l.term = before.term + 1
	position := before.position + 1
	index := before.ring.slot(position)
	// What the slot still holds is not known to be safe elsewhere.
	carried := before.ring.carried(position)
	own := l.batch(before.slots[index], position, len(before.slots), carried)
	if _, err := l.replace(ctx, own, before.slots[index], l.o.Valid); errors.Is(err, ErrDeposed) && l.o.Valid() {
		return nil, errOvertaken
	} else if err != nil {
		return nil, err
	}
	// From here on nobody else commits. What they committed before is read again:
	// the first list may be older than their last write.
	after, err := l.read(ctx)
	if err != nil {
		return nil, err
	}
	if after.position != position {
		return nil, errOvertaken
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ring, l.slots, l.position = after.ring, after.slots, position
	records := make([]Record, 0, len(after.ring.newest))
	for _, n := range after.ring.newest {
		records = append(records, n.Record)
	}
	slices.SortFunc(records, func(a, b Record) int {
		return cmp.Or(cmp.Compare(a.Term, b.Term), cmp.Compare(a.Counter, b.Counter), cmp.Compare(a.Key, b.Key))
	})
	return records, nil
}

// contents is what the slots hold together.
type contents struct {
	slots    []Slot // by index, without their data
	ring     *ring
	position uint64
	term     uint64
}

// read lists the slots, making them if there are none, and checks them.
func (l *Log) read(ctx context.Context) (*contents, error) {
	for {
		slots, err := l.list(ctx)
		if err != nil {
			return nil, err
		}
		if begun(slots) {
			return fold(l.codec, slots)
		}
		if err := l.begin(ctx, slots); err != nil {
			return nil, err
		}
	}
}

func (l *Log) list(ctx context.Context) ([]Slot, error) {
	call, cancel := context.WithTimeout(ctx, listTimeouts*l.o.CallTimeout)
	defer cancel()
	slots, err := l.o.Store.List(call)
	if err != nil {
		return nil, fmt.Errorf("list slots: %w", err)
	}
	return slots, nil
}

// begun reports whether the ring was made completely: slot 0 is made last. A
// ring without a slot 0 that holds something has lost it.
func begun(slots []Slot) bool {
	return slices.ContainsFunc(slots, func(s Slot) bool { return s.Index == 0 || s.Position > 0 })
}

// begin makes the slots that are not there.
func (l *Log) begin(ctx context.Context, have []Slot) error {
	call, cancel := context.WithTimeout(ctx, l.o.CallTimeout)
	err := l.o.Begin(call)
	cancel()
	if err != nil {
		return err
	}
	n := Slots
	if len(have) > 0 {
		n = have[0].Slots // of a beginning that was not finished, perhaps by another version
	}
	for index := n - 1; index >= 0; index-- {
		if slices.ContainsFunc(have, func(s Slot) bool { return s.Index == index }) {
			continue
		}
		if !l.o.Valid() {
			return ErrDeposed
		}
		call, cancel := context.WithTimeout(ctx, l.o.CallTimeout)
		err := l.o.Store.Create(call, Slot{Index: index, Slots: n, Format: format})
		cancel()
		if err != nil {
			return fmt.Errorf("create slot %d: %w", index, err)
		}
	}
	return nil
}

// fold checks that the slots are one log and puts it together.
func fold(codec *codec, slots []Slot) (*contents, error) {
	slots = slices.Clone(slots)
	slices.SortFunc(slots, func(a, b Slot) int { return a.Index - b.Index })
	n := slots[0].Slots
	c := &contents{}
	for i, s := range slots {
		switch {
		case s.Format > format:
			return nil, fmt.Errorf("%w: slot %d is of format %d, this version reads formats up to %d; run the version that wrote it, or a later one", ErrFormat, s.Index, s.Format, format)
		case s.Slots != n || s.Index >= n:
			return nil, fmt.Errorf("%w: slot %d says that there are %d slots, slot %d says %d", ErrDamaged, s.Index, s.Slots, slots[0].Index, n)
		case s.Index != i:
			return nil, fmt.Errorf("%w: slot %d of %d; restore the slots from a backup of etcd", ErrMissing, i, n)
		case s.Position > 0 && s.Position%uint64(n) != uint64(i):
			return nil, fmt.Errorf("%w: slot %d holds position %d, which belongs to slot %d", ErrDamaged, i, s.Position, s.Position%uint64(n))
		}
		c.position, c.term = max(c.position, s.Position), max(c.term, s.Term)
	}
	if len(slots) < n {
		return nil, fmt.Errorf("%w: slot %d of %d; restore the slots from a backup of etcd", ErrMissing, len(slots), n)
	}
	// Every slot holds the last position that belongs to it.
	for i, s := range slots {
		back := (c.position + uint64(n) - uint64(i)) % uint64(n) // how far behind the end slot i is
		want := uint64(0)
		if c.position > back {
			want = c.position - back
		}
		if s.Position != want {
			return nil, fmt.Errorf("%w: slot %d holds position %d, but the log ends at %d, so it should hold %d; restore all slots from one backup of etcd", ErrDamaged, i, s.Position, c.position, want)
		}
	}
	c.ring = newRing(n)
	order := slices.Clone(slots)
	slices.SortFunc(order, func(a, b Slot) int { return cmp.Compare(a.Position, b.Position) })
	term := uint64(0)
	for _, s := range order {
		if s.Position == 0 {
			continue
		}
		if s.Term < term {
			return nil, fmt.Errorf("%w: position %d is of term %d, the one before of term %d", ErrDamaged, s.Position, s.Term, term)
		}
		term = s.Term
		records, err := codec.decode(s.Data)
		if err != nil {
			return nil, fmt.Errorf("%w: slot %d: %w", ErrDamaged, s.Index, err)
		}
		c.ring.put(s.Position, nil, records)
	}
	for i := range slots {
		slots[i].Data = nil
	}
	c.slots = slots
	return c, nil
}

// batch makes the next content of a slot.
func (l *Log) batch(slot Slot, position uint64, slots int, records []Record) Slot {
	return Slot{
		Index: slot.Index, Version: slot.Version, Slots: slots, Format: format,
		Position: position, Term: l.term, Nonce: l.o.Nonce(), Records: len(records), Data: l.codec.encode(records),
	}
}

// replace writes a slot, which was as before says, and returns its new version, or
// ErrDeposed when somebody else has written to it. valid, if not nil, is asked
// before every attempt.
func (l *Log) replace(ctx context.Context, s, before Slot, valid func() bool) (version string, err error) {
	for attempt := 0; ; attempt++ {
		if valid != nil && !valid() {
			return "", fmt.Errorf("%w: the lease is not held any more", ErrDeposed)
		}
		// An API server that is always slow is waited for longer and longer.
		timeout := l.o.CallTimeout << min(attempt, timeoutDoubled)
		call, cancel := context.WithTimeout(ctx, timeout)
		version, err := l.o.Store.Write(call, s)
		cancel()
		if err == nil {
			return version, nil
		}
		if ctx.Err() != nil {
			return "", ctx.Err()
		}
		l.count(func(st *Stats) { st.Unknown++ })
		call, cancel = context.WithTimeout(ctx, timeout)
		found, readErr := l.o.Store.Read(call, s.Index)
		cancel()
		switch {
		case ctx.Err() != nil:
			return "", ctx.Err()
		case errors.Is(readErr, ErrMissing):
			return "", fmt.Errorf("slot %d: %w", s.Index, readErr)
		case readErr != nil:
			l.o.Log.Warn("journal: outcome of a write not known, will ask again", zap.Uint64("position", s.Position), zap.NamedError("write", err), zap.Error(readErr))
		case found.Position == s.Position && found.Term == s.Term && found.Nonce == s.Nonce:
			return found.Version, nil
		case found.Version != s.Version && found.Position == before.Position && found.Term == before.Term && found.Nonce == before.Nonce:
			// The same batch in another version of the object: something was noted on
			// it, or it was stored anew. No leader has written.
			s.Version = found.Version
		case found.Version != s.Version:
			return "", fmt.Errorf("%w: slot %d holds position %d of term %d, and not position %d of term %d", ErrDeposed, s.Index, found.Position, found.Term, s.Position, s.Term)
		default:
			l.o.Log.Warn("journal: not written, will try again", zap.Uint64("position", s.Position), zap.Error(err))
		}
		l.o.Pause(ctx, attempt)
	}
}

// Term is the term under which this Log writes, 1 or more.
func (l *Log) Term() uint64 { return l.term }

// Commit makes the records durable, in their order, in one batch or as many as
// they need. An error is ErrDeposed, ErrMissing or that of ctx; the caller must
// not commit again after it.
func (l *Log) Commit(ctx context.Context, records []Record) error {
	for len(records) > 0 {
		slot, position, carried, fresh := l.next(records)
		// Not under the lock, which Settle's callers wait for.
		s := l.batch(slot, position, slot.Slots, slices.Concat(carried, fresh))
		version, err := l.replace(ctx, s, slot, nil)
		if err != nil {
			return err
		}
		l.committed(s, version, carried, fresh)
		records = records[len(fresh):]
	}
	return nil
}

// next says what goes into the next batch, and in which slot: what has to ride
// along, then of the records as many as fit beside it.
func (l *Log) next(records []Record) (slot Slot, position uint64, carried, fresh []Record) {
	l.mu.Lock()
	defer l.mu.Unlock()
	position = l.position + 1
	carried = l.ring.carried(position)
	size, n := 0, 0
	for _, r := range carried {
		size += len(r.Raw)
	}
	for n < len(records) && (size == 0 || size+len(records[n].Raw) <= batchMost) {
		size += len(records[n].Raw)
		n++
	}
	return l.slots[l.ring.slot(position)], position, carried, records[:n]
}

func (l *Log) committed(s Slot, version string, carried, fresh []Record) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ring.put(s.Position, carried, fresh)
	l.position = s.Position
	l.stats.Batches++
	l.stats.Records += uint64(len(fresh))
	l.stats.Carried += uint64(len(carried))
	l.stats.Bytes += uint64(len(s.Data))
	s.Version, s.Data = version, nil
	l.slots[s.Index] = s
}

// Settle says that the key's state of this revision, and every earlier one, is
// safe elsewhere, or needed no more.
func (l *Log) Settle(key string, term, counter uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ring.settle(key, term, counter)
}

// Stats returns what was done so far.
func (l *Log) Stats() Stats {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := l.stats
	if l.ring != nil {
		s.Unsettled, s.UnsettledBytes = len(l.ring.newest), l.ring.bytes
	}
	return s
}

func (l *Log) count(f func(*Stats)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	f(&l.stats)
}

func pause(ctx context.Context, attempt int) {
	t := time.NewTimer(min(10*time.Millisecond<<min(attempt, 10), time.Second))
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
}
