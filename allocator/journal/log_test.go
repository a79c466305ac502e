package journal

import (
	"context"
	"encoding/base64"
	"errors"
	"slices"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"google.golang.org/protobuf/proto"

	journalv1 "github.com/berth-sandbox/berth/api/journal/v1"
)

// whole is a log of four slots that ends at position 6, as a leader left it.
func whole(t *testing.T) []Slot {
	codec, err := newCodec()
	require.NoError(t, err)
	slots := make([]Slot, 4)
	for p := uint64(3); p <= 6; p++ {
		slots[p%4] = Slot{
			Index: int(p % 4), Version: "1", Slots: 4, Format: format, Position: p, Term: 1 + p/5, Nonce: "n",
			Data: codec.encode("id", []Record{record("k"+strconv.Itoa(int(p)), 1, p)}),
		}
	}
	return slots
}

func TestOpenRefusesADamagedLogWithTheReason(t *testing.T) {
	for _, c := range []struct {
		name    string
		change  func(s []Slot) []Slot
		is      error
		message string
	}{
		{"a slot is missing", func(s []Slot) []Slot { return append(s[:2], s[3]) }, ErrMissing, "slot 2 of 4"},
		{"the first is missing", func(s []Slot) []Slot { return s[1:] }, ErrMissing, "slot 0 of 4"},
		{"the last is missing", func(s []Slot) []Slot { return s[:3] }, ErrMissing, "slot 3 of 4"},
		{"there is one too many", func(s []Slot) []Slot { return append(s, Slot{Index: 4, Slots: 4, Format: 1}) }, ErrDamaged, "4"},
		{"another number of slots", func(s []Slot) []Slot { s[1].Slots = 8; return s }, ErrDamaged, "slot 1 says that there are 8 slots"},
		{"a later format", func(s []Slot) []Slot { s[1].Format = format + 1; return s }, ErrFormat, "slot 1 is of format 3"},
		{"a slot from an older backup", func(s []Slot) []Slot { s[1].Position = 1; return s }, ErrDamaged, "slot 1 holds position 1"},
		{"a slot that was emptied", func(s []Slot) []Slot { s[3].Position = 0; return s }, ErrDamaged, "slot 3 holds position 0"},
		{"a position of another slot", func(s []Slot) []Slot { s[1].Position = 6; return s }, ErrDamaged, "slot 1 holds position 6"},
		{"terms that go back", func(s []Slot) []Slot { s[2].Term = 1; s[1].Term = 2; return s }, ErrDamaged, "position 6"},
		{"data that is none", func(s []Slot) []Slot { s[0].Data = []byte("x"); return s }, ErrDamaged, "slot 0"},
		{"data that decompresses to something else", func(s []Slot) []Slot {
			codec, _ := newCodec()
			s[0].Data = codec.encoder.EncodeAll([]byte("not a batch"), nil)
			return s
		}, ErrDamaged, "slot 0"},
		{"data that decompresses to too much", func(s []Slot) []Slot {
			codec, _ := newCodec()
			s[0].Data = codec.encoder.EncodeAll(make([]byte, maxDecoded+1), nil)
			return s
		}, ErrDamaged, "slot 0"},
		{"a record without a key", func(s []Slot) []Slot {
			codec, _ := newCodec()
			s[0].Data = codec.encode("id", []Record{{Raw: record("", 1, 1).Raw}})
			return s
		}, ErrDamaged, "no key"},
	} {
		t.Run(c.name, func(t *testing.T) {
			codec, err := newCodec()
			require.NoError(t, err)
			_, err = folded(codec, c.change(whole(t)))
			require.ErrorIs(t, err, c.is)
			require.ErrorContains(t, err, c.message)
			require.True(t, final(err), "reading again does not help")
		})
	}
	codec, err := newCodec()
	require.NoError(t, err)
	c, err := folded(codec, whole(t))
	require.NoError(t, err)
	require.Equal(t, uint64(6), c.Position)
	require.Len(t, c.ring.newest, 4)
	require.Equal(t, "id", c.ID)
}

func folded(codec *codec, slots []Slot) (*Condition, error) {
	f := folder{codec: codec}
	for _, s := range slots {
		if err := f.add(s); err != nil {
			return nil, err
		}
	}
	c := f.condition()
	return c, c.Err
}

// memory is a Store in which nothing goes wrong.
type memory struct {
	slots  map[int]Slot
	writes int
	bytes  uint64
	most   int // bytes of the largest
}

func (m *memory) List(_ context.Context, f func(Slot) error) error {
	for _, s := range m.slots {
		if err := f(s); err != nil {
			return err
		}
	}
	return nil
}

func (m *memory) Versions(context.Context) (map[int]string, error) {
	versions := map[int]string{}
	for _, s := range m.slots {
		versions[s.Index] = s.Version
	}
	return versions, nil
}

func (m *memory) Read(_ context.Context, index int) (Slot, error) {
	s, ok := m.slots[index]
	if !ok {
		return Slot{}, ErrMissing
	}
	return s, nil
}

func (m *memory) Write(_ context.Context, s Slot) (string, error) {
	if old, ok := m.slots[s.Index]; !ok || old.Version != s.Version {
		return "", errors.New("conflict")
	}
	m.writes++
	m.bytes += uint64(len(s.Data))
	m.most = max(m.most, len(s.Data))
	s.Version = strconv.Itoa(m.writes)
	m.slots[s.Index] = s
	return s.Version, nil
}

func (m *memory) Create(_ context.Context, s Slot) (string, error) {
	if _, ok := m.slots[s.Index]; ok {
		return "", ErrExists
	}
	m.writes++
	s.Version = strconv.Itoa(m.writes)
	m.slots[s.Index] = s
	return s.Version, nil
}

func open(t *testing.T, m *memory) (*Log, []Record) {
	t.Helper()
	n := 0
	l, records, err := Open(t.Context(), Options{
		Store: m, Valid: func() bool { return true }, Begin: func(context.Context) error { return nil },
		Nonce: func() string { n++; return strconv.Itoa(n) }, Log: zap.NewNop(),
	})
	require.NoError(t, err)
	return l, records
}

func TestNewJournalCreatesSlotsThatStay(t *testing.T) {
	m := &memory{slots: map[int]Slot{}}
	l, records := open(t, m)
	require.Empty(t, records)
	require.Equal(t, uint64(1), l.Term())
	require.Len(t, m.slots, Slots)
	require.NoError(t, l.Commit(t.Context(), []Record{record("a", 1, 1), record("b", 1, 2), record("a", 1, 3)}))
	l, records = open(t, m)
	require.Equal(t, uint64(2), l.Term())
	require.Equal(t, []Record{record("b", 1, 2), record("a", 1, 3)}, records)
}

func TestNoJournalIsBegunWhereOneWasLost(t *testing.T) {
	refusal := errors.New("there are sandboxes")
	m := &memory{slots: map[int]Slot{}}
	_, _, err := Open(t.Context(), Options{
		Store: m, Valid: func() bool { return true }, Begin: func(context.Context) error { return Refuse(refusal) },
		Nonce: func() string { return "n" }, Log: zap.NewNop(),
	})
	require.ErrorIs(t, err, refusal)
	require.Empty(t, m.slots)
}

func TestLargeCommitIsSplitIntoBatches(t *testing.T) {
	m := &memory{slots: map[int]Slot{}}
	l, _ := open(t, m)
	var all []Record
	for i := range uint64(3000) {
		r := record("key"+strconv.Itoa(int(i)), 1, i+1)
		r.Raw = append(r.Raw, incompressible(i, 1000)...) // an unknown field would do the same
		all = append(all, r)
	}
	before, bytesBefore := m.writes, m.bytes
	require.NoError(t, l.Commit(t.Context(), all))
	require.Equal(t, m.bytes-bytesBefore, l.Stats().Bytes, "the bytes that are bounded are those that are written")
	require.Equal(t, 6, m.writes-before, "3 MB in batches of at most 512 KiB")
	require.LessOrEqual(t, m.most, maxBatch+maxBatch/16)
	require.Equal(t, 3000, l.Stats().Unsettled)
	// All of it rides along once around the ring, and is still there.
	for i := range uint64(Slots) {
		require.NoError(t, l.Commit(t.Context(), []Record{record("other", 1, 3001+i)}))
	}
	require.LessOrEqual(t, m.most, maxBatch+maxBatch/16)
	_, found := open(t, m)
	require.Len(t, found, 3001)
}

// A version that does not know a format stops at any slot of it. So only what it must not overlook keeps
// it from leading.
func TestBatchHasTheLowestFormatOfItsRecords(t *testing.T) {
	m := &memory{slots: map[int]Slot{}}
	l, _ := open(t, m)
	formats := func() (all []int) {
		for i := range Slots {
			if m.slots[i].Format > 1 {
				all = append(all, i)
			}
		}
		return all
	}
	require.Empty(t, formats())
	raw, err := proto.Marshal(&journalv1.Record{Key: "new", Term: 1, Counter: 1, Format: 2})
	require.NoError(t, err)
	require.NoError(t, l.Commit(t.Context(), []Record{{Key: "new", Term: 1, Counter: 1, Format: 2, Raw: raw}}))
	at := l.ring.slot(l.Position())
	require.Equal(t, []int{at}, formats())
	around := func() {
		l, _ = open(t, m) // the next leader has only what is in the slots
		for i := range uint64(Slots) {
			require.NoError(t, l.Commit(t.Context(), []Record{record("other", 1, 2+i)}))
		}
	}
	around()
	require.Len(t, formats(), 1, "the record was carried")
	l, _ = open(t, m)
	l.Settle("new", 1, 1)
	for i := range uint64(Slots) {
		require.NoError(t, l.Commit(t.Context(), []Record{record("other", 1, 2+i)}))
	}
	require.Empty(t, formats(), "it was settled")
}

func TestJoinedRecordsAreInOneBatch(t *testing.T) {
	m := &memory{slots: map[int]Slot{}}
	l, _ := open(t, m)
	counter := uint64(0)
	records := func(n int, joined bool) (all []Record) {
		for i := range n {
			counter++
			r := record("key"+strconv.Itoa(int(counter)), 1, counter)
			r.Raw, r.Joined = append(r.Raw, incompressible(counter, 1000)...), joined && i > 0
			all = append(all, r)
		}
		return all
	}
	for name, c := range map[string]struct{ before, joined, next, writes int }{
		"first of all":            {0, 400, 0, 1},
		"behind others":           {300, 400, 325, 3}, // 1,025 KB, two batches if they were divided
		"as many as may":          {0, MaxJoined / 1100, 0, 1},
		"what fits in one batch":  {50, 400, 0, 1},
		"two that fit in a batch": {0, 200, 200, 1},
	} {
		writes := m.writes
		all := slices.Concat(records(c.before, false), records(c.joined, true), records(c.next, true))
		require.NoError(t, l.Commit(t.Context(), all), name)
		require.Equal(t, c.writes, m.writes-writes, name)
	}
	// Every slot has records to carry when its turn comes again. Joined records need no empty slot.
	for range Slots {
		require.NoError(t, l.Commit(t.Context(), records(1, false)))
	}
	writes := m.writes
	require.NoError(t, l.Commit(t.Context(), records(MaxJoined/1100, true)))
	require.Equal(t, 1, m.writes-writes)
}

// incompressible is the same for the same seed.
func incompressible(seed uint64, n int) []byte {
	b := []byte{0xfa, 0x01, byte(n - 4), byte((n - 4) >> 7)} // field 31, length-delimited
	b[2] |= 0x80
	x := seed*2862933555777941757 + 3037000493
	for len(b) < n {
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
		b = append(b, byte(x))
	}
	return b
}

func TestSettledRecordsAreNotCarried(t *testing.T) {
	m := &memory{slots: map[int]Slot{}}
	l, _ := open(t, m)
	require.NoError(t, l.Commit(t.Context(), []Record{record("a", 1, 1), record("b", 1, 2)}))
	l.Settle("a", 1, 1)
	l.Settle("b", 1, 1) // an earlier state of it
	for i := range uint64(2 * Slots) {
		require.NoError(t, l.Commit(t.Context(), []Record{record("other", 1, 3+i)}))
	}
	require.Equal(t, uint64(2), l.Stats().Carried, "b, twice around")
	_, found := open(t, m)
	require.Equal(t, []Record{record("b", 1, 2), record("other", 1, 2+2*Slots)}, found)
}

// A batch that an earlier version has written: it is never changed.
func TestBatchOfAnEarlierVersionIsReadable(t *testing.T) {
	data, err := base64.StdEncoding.DecodeString("KLUv/QQAeQEACg8KCXNhbmRib3gvYRABGAIKCwoFcG9kL2IQAxgECg8KCXNhbmRib3gvYRADGAX6Av+v")
	require.NoError(t, err)
	codec, err := newCodec()
	require.NoError(t, err)
	b, err := codec.decode(data)
	require.NoError(t, err)
	require.Equal(t, batch{records: []Record{record("sandbox/a", 1, 2), record("pod/b", 3, 4), record("sandbox/a", 3, 5)}}, b)
}

// An annotation, or a store that is written anew, changes an object's version and
// not what leaders have written.
func TestTouchedSlotDoesNotDeposeTheLeader(t *testing.T) {
	m := &memory{slots: map[int]Slot{}}
	l, _ := open(t, m)
	for range 2 * Slots {
		next := m.slots[l.ring.slot(l.position+1)]
		next.Version = "touched"
		m.slots[next.Index] = next
		require.NoError(t, l.Commit(t.Context(), []Record{record("k", l.Term(), l.position)}))
	}
}

// slow answers only after a while, like an API server that has too much to do; what
// it is asked takes place in the moment of the answer.
type slow struct {
	*memory
	after time.Duration
}

func (s *slow) wait(ctx context.Context) error {
	select {
	case <-time.After(s.after):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (s *slow) List(ctx context.Context, f func(Slot) error) error {
	return s.memory.List(ctx, func(slot Slot) error {
		if err := s.wait(ctx); err != nil {
			return err
		}
		return f(slot)
	})
}

func (s *slow) Read(ctx context.Context, index int) (Slot, error) {
	if err := s.wait(ctx); err != nil {
		return Slot{}, err
	}
	return s.memory.Read(ctx, index)
}

func (s *slow) Write(ctx context.Context, slot Slot) (string, error) {
	if err := s.wait(ctx); err != nil {
		return "", err
	}
	return s.memory.Write(ctx, slot)
}

func TestSlowStoreGetsLongerTimeouts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &memory{slots: map[int]Slot{}}
		l, _ := open(t, m)
		l.o.Store = &slow{m, 5 * l.o.CallTimeout}
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
		defer cancel()
		require.NoError(t, l.Commit(ctx, []Record{record("k", l.Term(), 1)}))
	})
}

func TestSlowListOfAFullJournalSucceeds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &memory{slots: map[int]Slot{}}
		l, _ := open(t, m)
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Hour)
		defer cancel()
		o := l.o
		o.Store = &slow{m, 5 * o.CallTimeout}
		next, _, err := Open(ctx, o)
		require.NoError(t, err)
		require.Greater(t, next.Term(), l.Term())
	})
}

func TestStalledListIsRetried(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &memory{slots: map[int]Slot{}}
		l, _ := open(t, m)
		o := l.o
		o.Store = &slow{m, (listTimeoutFactor + 1) * o.CallTimeout}
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		_, _, err := Open(ctx, o)
		require.ErrorIs(t, err, context.DeadlineExceeded)
	})
}
