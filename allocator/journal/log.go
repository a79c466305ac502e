package journal

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"
)

const (
	// listTimeouts is how many times as long as another call a list may take until the
	// next slot: slots come in pages.
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

	sum [sha256.Size]byte // of Data, where that is not kept
}

// Store keeps slot objects. Every error but ErrMissing leaves open what has
// happened. Calls end with their context.
type Store interface {
	// List calls f with every slot, all of one moment, from the store and not from a
	// cache. It ends with an error of f.
	List(ctx context.Context, f func(Slot) error) error
	// Versions reads the versions of all slots, like List.
	Versions(ctx context.Context) (map[int]string, error)
	// Read reads one slot, from the store.
	Read(ctx context.Context, index int) (Slot, error)
	// Write replaces the slot s.Index if its version is still s.Version, and
	// returns its new version.
	Write(ctx context.Context, s Slot) (version string, err error)
	// Create makes a slot, and returns its version, or ErrExists.
	Create(ctx context.Context, s Slot) (version string, err error)
}

// Options configure Open. All are required unless they say otherwise.
type Options struct {
	Store Store
	// Valid reports whether the caller may still act as the leader: it is asked before
	// the log is taken over, and before and after a slot is repaired.
	Valid func() bool
	// Begin is asked before a journal is made where there is none. It returns an
	// error when what is there must have had one.
	Begin func(context.Context) error
	// Nonce makes something random, never the same twice.
	Nonce func() string
	// CallTimeout bounds one call to the Store, but for List, which may take ten
	// times as long until its next slot. A write that fails is given twice as long the
	// next time, up to eight times. Default 2 s.
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
	// stamp is what batches are written under, began the position of the term record.
	stamp Stamp
	began uint64
	// renewed is what batches are written under after Renew. It is the committer's, like
	// earlier.
	renewed Stamp
	// earlier are the slots that were found to hold what they had held before.
	earlier map[int]struct{}

	mu       sync.Mutex
	ring     *ring
	slots    []Slot // without their data
	position uint64 // of the last batch
	stats    Stats
}

// Stamp is what every batch says of where it belongs.
type Stamp struct {
	// Journal is the ID of the journal: random, made when it was begun.
	Journal string
	Term    uint64
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
	l := &Log{o: o, codec: codec, earlier: map[int]struct{}{}}
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

// errOverwritten: a slot was written to, and not under a later term. Of candidates that
// take the log over, one may have written under the same term.
var errOverwritten = errors.New("journal: a slot was written to by something else than the next leader")

// errOvertaken: somebody else wrote while the log was being taken over.
var errOvertaken = errors.New("another candidate or leader has written meanwhile")

// takeOver reads the log, puts a term record at its end and reads it again.
func (l *Log) takeOver(ctx context.Context) ([]Record, error) {
	before, err := l.read(ctx)
	if err != nil {
		return nil, err
	}
	l.stamp = Stamp{Journal: before.id, Term: before.term + 1}
	if l.stamp.Journal == "" { // it is new, or of a version that gave it none
		l.stamp.Journal = l.o.Nonce()
	}
	l.renewed = l.stamp
	position := before.position + 1
	index := before.ring.slot(position)
	// What the slot still holds is not known to be safe elsewhere.
	carried := before.ring.carried(position)
	own := l.batch(before.slots[index], position, len(before.slots), carried)
	if _, err := l.replace(ctx, own, before.slots[index], l.o.Valid); errors.Is(err, errOverwritten) || errors.Is(err, ErrDeposed) && l.o.Valid() {
		return nil, errOvertaken
	} else if err != nil {
		return nil, err
	}
	// From here on nobody else commits. What they committed before is read again:
	// the first list may be older than their last write.
	before.ring = nil // it need not be in memory twice
	after, err := l.read(ctx)
	if err != nil {
		return nil, err
	}
	if after.position != position {
		return nil, errOvertaken
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ring, l.slots, l.position, l.began = after.ring, after.slots, position, position
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
	id       string
}

// read lists the slots, making them if there are none, and checks them.
func (l *Log) read(ctx context.Context) (*contents, error) {
	for {
		f := folder{codec: l.codec}
		if err := l.list(ctx, f.add); err != nil {
			return nil, err
		}
		if begun(f.slots) {
			return f.whole()
		}
		if err := l.begin(ctx, f.slots); err != nil {
			return nil, err
		}
	}
}

// list reads all slots. A full journal may take long on a slow machine, and each attempt
// would: so the time is bounded from one slot to the next, and not for all.
func (l *Log) list(ctx context.Context, f func(Slot) error) error {
	call, cancel := context.WithCancel(ctx)
	defer cancel()
	stalled := time.AfterFunc(listTimeouts*l.o.CallTimeout, cancel)
	defer stalled.Stop()
	if err := l.o.Store.List(call, func(s Slot) error {
		stalled.Reset(listTimeouts * l.o.CallTimeout)
		return f(s)
	}); err != nil {
		return fmt.Errorf("list slots: %w", err)
	}
	return nil
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
		_, err := l.o.Store.Create(call, Slot{Index: index, Slots: n, Format: format})
		cancel()
		if err != nil && !errors.Is(err, ErrExists) {
			return fmt.Errorf("create slot %d: %w", index, err)
		}
	}
	return nil
}

// folder puts the log together, slot by slot: their data is too much to be kept.
type folder struct {
	codec  *codec
	slots  []Slot // without their data
	ring   *ring
	id     string
	idAt   uint64 // the position that has said so
	buffer []byte
	// broken are slots that do not belong where they are, or cannot be decoded.
	broken map[int]error
}

// add takes the next slot. It returns no error: what is wrong is found out at the end.
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

// whole checks that the slots are one log, and returns it.
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

// last is the last position that belongs to a slot, of a log that ends at a position; 0
// if nothing was written there yet.
func last(end uint64, index, slots int) uint64 {
	back := (end + uint64(slots) - uint64(index)) % uint64(slots) // how far behind the end
	if end <= back {
		return 0
	}
	return end - back
}

// batch makes the next content of a slot.
func (l *Log) batch(slot Slot, position uint64, slots int, records []Record) Slot {
	data := l.codec.encode(l.renewed.Journal, records)
	return Slot{
		Index: slot.Index, Version: slot.Version, Slots: slots, Format: format,
		Position: position, Term: l.renewed.Term, Nonce: l.o.Nonce(), Records: len(records), Data: data, sum: sha256.Sum256(data),
	}
}

// replace writes a slot, which was as before says, and returns its new version. It returns
// ErrDeposed when a leader of a later term has written to the slot, and errOverwritten when
// something else has. valid, if not nil, is asked before every attempt.
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
		case found.Version != s.Version && found.Term <= l.stamp.Term:
			// The next leader has a higher term, so this was written by something else.
			return "", fmt.Errorf("%w: slot %d holds position %d of term %d", errOverwritten, s.Index, found.Position, found.Term)
		case found.Version != s.Version:
			return "", fmt.Errorf("%w: slot %d holds position %d of term %d, and not position %d of term %d", ErrDeposed, s.Index, found.Position, found.Term, s.Position, s.Term)
		default:
			l.o.Log.Warn("journal: not written, will try again", zap.Uint64("position", s.Position), zap.Error(err))
		}
		l.o.Pause(ctx, attempt)
	}
}

// Term is the term under which this Log writes, 1 or more.
func (l *Log) Term() uint64 { return l.stamp.Term }

// Stamp is what this Log writes under, before Renew.
func (l *Log) Stamp() Stamp { return l.stamp }

// Began is the position of this leader's term record: everything before it is of
// earlier leaders, everything after it of this one, in this journal.
func (l *Log) Began() uint64 { return l.began }

// Position is that of the last batch that is known to be committed.
func (l *Log) Position() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.position
}

// Renew begins the journal anew, under a new ID, by committing records. It is called
// where Commit could be, when the log was restored from a backup and no longer holds all
// that routers have seen of it. term is the highest term that was seen; later leaders get
// higher ones. This Log must not be used afterwards: the next Open takes the new journal
// over. Like Commit, Renew fails when this leader is deposed.
func (l *Log) Renew(ctx context.Context, term uint64, records []Record) (id string, err error) {
	l.renewed = Stamp{Journal: l.o.Nonce(), Term: max(l.stamp.Term, term)}
	return l.renewed.Journal, l.Commit(ctx, records)
}

// Commit makes the records durable, in their order, in one batch or as many as
// they need. A slot that is gone, or was written to by something else than a leader, is
// repaired. An error is ErrDeposed or that of ctx; the
// caller must not commit again after it.
func (l *Log) Commit(ctx context.Context, records []Record) error {
	for len(records) > 0 {
		slot, position, carried, fresh := l.next(records)
		// Not under the lock, which Settle's callers wait for.
		s := l.batch(slot, position, slot.Slots, slices.Concat(carried, fresh))
		version, err := l.replace(ctx, s, slot, nil)
		if errors.Is(err, ErrMissing) || errors.Is(err, errOverwritten) {
			// If the write took place before that, it does so again.
			if err = l.restore(ctx, slot.Index); err == nil {
				continue
			}
		}
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
