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

	"github.com/berth-sandbox/berth/internal/options"
	"github.com/berth-sandbox/berth/internal/wait"
)

const (
	// listTimeoutFactor times the call timeout bounds the wait for the next slot of a list, because
	// slots come in pages.
	listTimeoutFactor = 10
	// maxTimeoutDoublings is how often the timeout of a retried call doubles.
	maxTimeoutDoublings = 3
)

// Slots is the number of slots of a new journal. An existing journal keeps its number.
const Slots = 256

// Slot is the content of a slot object.
type Slot struct {
	Index int
	// Version is the resource version of the object that was read or written.
	Version string
	// Slots is the number of slots in the ring. Format is the format of Data.
	Slots, Format int
	// Position is the position of the batch, 0 for a slot without one.
	Position, Term uint64
	Nonce          string
	Records        int
	Data           []byte

	sum [sha256.Size]byte // of Data, which is not kept in memory
}

// Store keeps slot objects. After any error but ErrMissing and ErrExists the outcome of a call is
// unknown. Calls end with their context.
type Store interface {
	// List calls f with every slot of one snapshot, read from the store and not from a cache. It
	// stops at an error of f and returns that.
	List(ctx context.Context, f func(Slot) error) error
	// Versions returns the resource versions of all slots by index, read like List.
	Versions(ctx context.Context) (map[int]string, error)
	// Read reads one slot from the store.
	Read(ctx context.Context, index int) (Slot, error)
	// Write replaces the slot s.Index on condition that its version is still s.Version, and returns
	// its new version.
	Write(ctx context.Context, s Slot) (version string, err error)
	// Create creates a slot and returns its version, or ErrExists.
	Create(ctx context.Context, s Slot) (version string, err error)
}

// Options configure Open. All are required unless they say otherwise.
type Options struct {
	Store Store
	// Valid reports whether the caller certainly leads. It is called before the log is taken over,
	// and before and after a slot is repaired.
	Valid func() bool
	// Begin is called before a journal is created. It returns an error when traces show that a
	// journal must have existed.
	Begin func(context.Context) error
	// Nonce returns a random string, never the same twice.
	Nonce func() string
	// CallTimeout bounds one call to the Store. A retried write gets twice as long each time, up to
	// eight times. A list may take ten times as long until its next slot. Default 2 s.
	CallTimeout time.Duration
	// Pause waits between attempts. It returns early when ctx ends. The default waits 10 ms after
	// the first attempt, twice as long after each further one, and at most 1 s.
	Pause func(ctx context.Context, attempt int)
	Log   *zap.Logger
}

// Log is the journal as its one leader writes it. Commit, Repair and Renew must be called by one
// goroutine at a time; the other methods may be called concurrently.
type Log struct {
	o     Options
	codec *codec
	// stamp marks the batches of this leader. began is the position of its term record.
	stamp Stamp
	began uint64
	// renewed marks the batches after Renew. Like earlier it belongs to the committing goroutine.
	renewed Stamp
	// earlier are the slots that were found to hold an earlier content.
	earlier map[int]struct{}

	mu       sync.Mutex
	ring     *ring
	slots    []Slot // without their data
	position uint64 // of the last batch
	stats    Stats
}

// Stamp says to which journal and term a batch belongs.
type Stamp struct {
	// Journal is the random ID that the journal got when it was begun.
	Journal string
	Term    uint64
}

// Stats are counters since Open. Unsettled and UnsettledBytes are not counters: they describe the
// records that would have to be carried now.
type Stats struct {
	Batches, Records, Carried, Bytes uint64
	// Unknown counts writes whose outcome had to be read.
	Unknown                   uint64
	Unsettled, UnsettledBytes int
}

// Open takes the log over under a new term, higher than any term in it. It returns the log and the
// latest record of every key, in the order of their revisions. It retries until ctx ends. It gives
// up on ErrMissing, ErrDamaged, ErrFormat, an error marked by Refuse, and ErrDeposed when
// Options.Valid has become false.
func Open(ctx context.Context, o Options) (*Log, []Record, error) {
	if err := options.Require(o, "Store", "Valid", "Begin", "Nonce", "Log"); err != nil {
		return nil, nil, err
	}
	o.CallTimeout = cmp.Or(o.CallTimeout, 2*time.Second)
	if o.Pause == nil {
		o.Pause = func(ctx context.Context, attempt int) { wait.Sleep(ctx, pauseAfter(attempt)) }
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
		o.Log.Warn("journal not opened, retrying", zap.Error(err))
		o.Pause(ctx, attempt)
	}
}

// takeOver reads the log, writes a term record to its end and reads the log again.
func (l *Log) takeOver(ctx context.Context) ([]Record, error) {
	before, err := l.read(ctx)
	if err != nil {
		return nil, err
	}
	l.stamp = Stamp{Journal: before.ID, Term: before.Term + 1}
	if l.stamp.Journal == "" { // a new journal, or one of a version without IDs
		l.stamp.Journal = l.o.Nonce()
	}
	l.renewed = l.stamp
	position := before.Position + 1
	index := before.ring.slot(position)
	// The records of the slot may not be stored elsewhere.
	carried := before.ring.carried(position)
	own := l.batch(before.slots[index], position, before.Slots, carried)
	if _, err := l.replace(ctx, own, before.slots[index], l.o.Valid); errors.Is(err, errForeignWrite) || errors.Is(err, ErrDeposed) && l.o.Valid() {
		return nil, errOvertaken
	} else if err != nil {
		return nil, err
	}
	// From here on no other leader can commit. The log is read again because the first list may be
	// older than the last commit of an earlier leader.
	before.ring = nil // frees memory: the ring is read again
	after, err := l.read(ctx)
	if err != nil {
		return nil, err
	}
	if after.Position != position {
		return nil, errOvertaken
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ring, l.position, l.began = after.ring, position, position
	l.slots = make([]Slot, after.Slots)
	for i := range l.slots {
		l.slots[i] = after.slots[i]
	}
	records := make([]Record, 0, len(after.ring.newest))
	for _, n := range after.ring.newest {
		records = append(records, n.Record)
	}
	slices.SortFunc(records, func(a, b Record) int {
		return cmp.Or(cmp.Compare(a.Term, b.Term), cmp.Compare(a.Counter, b.Counter), cmp.Compare(a.Key, b.Key))
	})
	return records, nil
}

// read lists and checks the slots. It creates them if there are none.
func (l *Log) read(ctx context.Context) (*Condition, error) {
	for {
		f := folder{codec: l.codec}
		if err := l.list(ctx, f.add); err != nil {
			return nil, err
		}
		if ringExists(f.slots) {
			c := f.condition()
			return c, c.Err
		}
		if err := l.begin(ctx, f.slots); err != nil {
			return nil, err
		}
	}
}

// list reads all slots. A full journal may take long on a slow machine, in every attempt. The
// timeout therefore applies from one slot to the next and not to the whole list.
func (l *Log) list(ctx context.Context, f func(Slot) error) error {
	call, cancel := context.WithCancel(ctx)
	defer cancel()
	stalled := time.AfterFunc(listTimeoutFactor*l.o.CallTimeout, cancel)
	defer stalled.Stop()
	if err := l.o.Store.List(call, func(s Slot) error {
		stalled.Reset(listTimeoutFactor * l.o.CallTimeout)
		return f(s)
	}); err != nil {
		return fmt.Errorf("list slots: %w", err)
	}
	return nil
}

// ringExists reports whether the ring was created completely. Slot 0 is created last, so its
// presence shows that. A ring without slot 0 that holds a batch has lost slot 0; Condition.Err then
// reports that.
func ringExists(slots []Slot) bool {
	return slices.ContainsFunc(slots, func(s Slot) bool { return s.Index == 0 || s.Position > 0 })
}

// begin creates the slots that do not exist.
func (l *Log) begin(ctx context.Context, have []Slot) error {
	call, cancel := context.WithTimeout(ctx, l.o.CallTimeout)
	err := l.o.Begin(call)
	cancel()
	if err != nil {
		return err
	}
	n := Slots
	if len(have) > 0 {
		n = have[0].Slots // an unfinished creation, perhaps by another version
	}
	for index := n - 1; index >= 0; index-- {
		if slices.ContainsFunc(have, func(s Slot) bool { return s.Index == index }) {
			continue
		}
		if !l.o.Valid() {
			return ErrDeposed
		}
		call, cancel := context.WithTimeout(ctx, l.o.CallTimeout)
		_, err := l.o.Store.Create(call, Slot{Index: index, Slots: n, Format: formatOf(nil)})
		cancel()
		if err != nil && !errors.Is(err, ErrExists) {
			return fmt.Errorf("create slot %d: %w", index, err)
		}
	}
	return nil
}

// batch returns the next content of a slot.
func (l *Log) batch(slot Slot, position uint64, slots int, records []Record) Slot {
	data := l.codec.encode(l.renewed.Journal, records)
	return Slot{
		Index: slot.Index, Version: slot.Version, Slots: slots, Format: formatOf(records),
		Position: position, Term: l.renewed.Term, Nonce: l.o.Nonce(), Records: len(records), Data: data, sum: sha256.Sum256(data),
	}
}

// replace writes a slot whose former content is before, and returns its new version. It returns
// ErrDeposed when a leader of a later term has written to the slot, and errForeignWrite when
// another client has. valid, if not nil, is called before every attempt.
func (l *Log) replace(ctx context.Context, s, before Slot, valid func() bool) (version string, err error) {
	for attempt := 0; ; attempt++ {
		if valid != nil && !valid() {
			return "", fmt.Errorf("%w: the lease is no longer held", ErrDeposed)
		}
		// The timeout grows, so that an API server that is always slow does not block the leader.
		timeout := l.o.CallTimeout << min(attempt, maxTimeoutDoublings)
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
			l.o.Log.Warn("journal: unknown outcome of a write, retrying", zap.Uint64("position", s.Position), zap.NamedError("write", err), zap.Error(readErr))
		case found.Position == s.Position && found.Term == s.Term && found.Nonce == s.Nonce:
			return found.Version, nil
		case found.Version != s.Version && found.Position == before.Position && found.Term == before.Term && found.Nonce == before.Nonce:
			// The same batch in another version of the object: a client changed its metadata, or it
			// was stored again. No leader has written.
			s.Version = found.Version
		case found.Version != s.Version && found.Term <= l.stamp.Term:
			// The next leader has a higher term, so another client wrote this.
			return "", fmt.Errorf("%w: slot %d holds position %d of term %d", errForeignWrite, s.Index, found.Position, found.Term)
		case found.Version != s.Version:
			return "", fmt.Errorf("%w: slot %d holds position %d of term %d, and not position %d of term %d", ErrDeposed, s.Index, found.Position, found.Term, s.Position, s.Term)
		default:
			l.o.Log.Warn("journal: batch not written, retrying", zap.Uint64("position", s.Position), zap.Error(err))
		}
		l.o.Pause(ctx, attempt)
	}
}

// Term returns the term under which this Log writes, 1 or more.
func (l *Log) Term() uint64 { return l.stamp.Term }

// Stamp returns the mark of this Log's batches before Renew.
func (l *Log) Stamp() Stamp { return l.stamp }

// Began returns the position of this leader's term record: earlier positions belong to earlier
// leaders, later ones to this leader.
func (l *Log) Began() uint64 { return l.began }

// Position returns the position of the last committed batch.
func (l *Log) Position() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.position
}

// Renew begins the journal anew, under a new ID, by committing records. It is for a journal that
// was restored from a backup and lacks positions that routers have seen. term is the highest term
// that was seen; later leaders get higher terms. The Log must not be used afterwards: the next Open
// takes the new journal over. Renew fails like Commit when this leader is deposed.
func (l *Log) Renew(ctx context.Context, term uint64, records []Record) (id string, err error) {
	l.renewed = Stamp{Journal: l.o.Nonce(), Term: max(l.stamp.Term, term)}
	return l.renewed.Journal, l.Commit(ctx, records)
}

// Commit makes the records durable, in their order, in as many batches as they need. It repairs a
// slot that is missing or that another client wrote to. It returns ErrDeposed or the error of ctx;
// the caller must not commit again after an error.
func (l *Log) Commit(ctx context.Context, records []Record) error {
	for len(records) > 0 {
		slot, position, carried, fresh := l.next(records)
		// Outside the lock, because Settle would wait for the compression.
		s := l.batch(slot, position, slot.Slots, slices.Concat(carried, fresh))
		version, err := l.replace(ctx, s, slot, nil)
		if errors.Is(err, ErrMissing) || errors.Is(err, errForeignWrite) {
			// If the write took place before the foreign write, it takes place again.
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

// next returns the next batch and its slot: the records to carry, then as many of records as fit. It does not
// divide records that are joined.
func (l *Log) next(records []Record) (slot Slot, position uint64, carried, fresh []Record) {
	l.mu.Lock()
	defer l.mu.Unlock()
	position = l.position + 1
	carried = l.ring.carried(position)
	size, n := 0, 0
	for _, r := range carried {
		size += len(r.Raw)
	}
	for n < len(records) {
		more, bytes := n+1, len(records[n].Raw)
		for ; more < len(records) && records[more].Joined; more++ {
			bytes += len(records[more].Raw)
		}
		fits := size == 0 || size+bytes <= maxBatch || n == 0 && more > 1
		if !fits {
			break
		}
		size, n = size+bytes, more
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

// Settle marks the key's state of this revision, and all earlier ones, as stored elsewhere or no
// longer needed.
func (l *Log) Settle(key string, term, counter uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ring.settle(key, term, counter)
}

// Stats returns the current counters.
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

// pauseAfter returns the default pause after an attempt; the first is number 0.
func pauseAfter(attempt int) time.Duration {
	return min(10*time.Millisecond<<min(attempt, 10), time.Second)
}
