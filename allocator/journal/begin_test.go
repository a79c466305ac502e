package journal

import (
	"context"
	"errors"
	"maps"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"
)

// written is a journal to which some batches were written, each under a key of its own.
func written(t *testing.T, batches int) (*memory, *Log) {
	t.Helper()
	m := &memory{slots: map[int]Slot{}}
	l, _ := open(t, m)
	for i := range batches {
		require.NoError(t, l.Commit(t.Context(), []Record{record("k"+strconv.Itoa(i), 1, uint64(i+1))}))
	}
	return m, l
}

func begin(t *testing.T, m *memory, minTerm uint64) *Beginning {
	t.Helper()
	c, err := Check(t.Context(), m)
	require.NoError(t, err)
	nonce := 0
	b, err := c.Plan(BeginOptions{
		MinTerm: minTerm, Nonce: func() string { nonce++; return "begun" + strconv.Itoa(nonce) },
		Records: func(s Stamp) ([]Record, error) { return []Record{record("session/earlier", s.Term, 0)}, nil },
	})
	require.NoError(t, err)
	return b
}

func keys(records []Record) map[string]bool {
	all := map[string]bool{}
	for _, r := range records {
		all[r.Key] = true
	}
	return all
}

// Invariant: P12
func TestBegunAnewJournalKeepsItsReadableRecords(t *testing.T) {
	for _, c := range []struct {
		name    string
		batches int
		breaks  func(m *memory)
		emptied int
		lost    []string
	}{
		{"restored", 300, func(*memory) {}, 0, nil},
		{"one slot is gone", 300, func(m *memory) { delete(m.slots, 20) }, 1, []string{"k18", "k274"}},
		{"its end is gone", 300, func(m *memory) { delete(m.slots, 301%Slots) }, 1, []string{"k43", "k299"}},
		{"slot 0 is gone", 300, func(m *memory) { delete(m.slots, 0) }, 1, []string{"k254"}},
		{"a slot cannot be read", 300, func(m *memory) { s := m.slots[20]; s.Data = []byte("x"); m.slots[20] = s }, 1, []string{"k18", "k274"}},
		{"a slot of an older backup", 300, func(m *memory) { s := m.slots[20]; s.Position -= Slots; m.slots[20] = s }, 1, []string{"k18", "k274"}},
		{"hardly begun", 3, func(m *memory) { delete(m.slots, 200); delete(m.slots, 2) }, 2, []string{"k0"}},
		{"all are gone", 300, func(m *memory) { m.slots = map[int]Slot{} }, Slots, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			m, l := written(t, c.batches)
			_, before := open(t, &memory{slots: maps.Clone(m.slots)})
			c.breaks(m)
			b := begin(t, m, 40)
			require.Len(t, b.Emptied, c.emptied)
			require.Greater(t, b.Term, uint64(40))
			untouched := maps.Clone(m.slots)
			require.Equal(t, untouched, m.slots, "a plan changes nothing")
			require.NoError(t, b.Begin(t.Context(), m))

			next, after := open(t, m)
			require.Equal(t, "begun1", next.Stamp().Journal)
			require.Greater(t, next.Term(), b.Term)
			found := keys(after)
			require.True(t, found["session/earlier"])
			if c.emptied < Slots {
				lost := map[string]bool{}
				for _, key := range c.lost {
					lost[key] = true
				}
				for key := range keys(before) {
					require.Equal(t, !lost[key] || found[key], found[key], key)
					if !lost[key] {
						require.True(t, found[key], key)
					}
				}
			}
			if c.emptied == Slots { // nothing in the slots is of a later leader, and the journal is begun under the lease
				l.o.Valid = func() bool { return false }
			}
			require.ErrorIs(t, l.Commit(t.Context(), []Record{record("late", 1, 1000)}), ErrDeposed, "who led before commits nothing more")
		})
	}
}

func TestHalfBegunJournalCannotBeOpened(t *testing.T) {
	for _, writes := range []int{1, 2, 100, Slots - 1} {
		m := &memory{slots: map[int]Slot{}}
		b := begin(t, m, 7)
		stops := &stopping{memory: m, after: writes}
		require.ErrorIs(t, b.Begin(t.Context(), stops), errStopped)
		c, err := Check(t.Context(), m)
		require.NoError(t, err)
		require.Error(t, c.Err)
		require.True(t, ringExists(func() (all []Slot) {
			for _, s := range m.slots {
				all = append(all, s)
			}
			return all
		}()), "no leader may make the rest of it")

		again := begin(t, m, 7)
		require.NoError(t, again.Begin(t.Context(), m))
		_, records := open(t, m)
		require.True(t, keys(records)["session/earlier"])
	}
}

var errStopped = errors.New("stopped")

// stopping takes so many slots and no more.
type stopping struct {
	*memory
	after int
}

func (s *stopping) Create(ctx context.Context, slot Slot) (string, error) {
	if s.after--; s.after < 0 {
		return "", errStopped
	}
	return s.memory.Create(ctx, slot)
}

// Invariant: P12
func TestForeignWritesToSlotsAreRepaired(t *testing.T) {
	m, l := written(t, 300)
	suspects, err := l.Suspects(t.Context())
	require.NoError(t, err)
	require.Empty(t, suspects)
	l.Settle("k100", 1, 101)

	delete(m.slots, 20)
	delete(m.slots, 102) // whose record is settled
	touched := m.slots[30]
	touched.Version = "touched"
	m.slots[30] = touched
	for _, i := range []int{40, 41, 42} {
		s := m.slots[i]
		s.Version = "foreign"
		switch i {
		case 40: // put back from a backup
			s.Position, s.Term, s.Nonce = s.Position-Slots, 1, "old"
		case 41:
			s.Data = []byte("x")
		case 42:
			s.Data = l.codec.encode("id", nil)
		}
		m.slots[i] = s
	}
	suspects, err = l.Suspects(t.Context())
	require.NoError(t, err)
	require.Equal(t, []int{20, 30, 40, 41, 42, 102}, suspects)
	repaired, err := l.Repair(t.Context(), suspects)
	require.NoError(t, err)
	require.Equal(t, 5, repaired, "the one that was only touched needs none")
	suspects, err = l.Suspects(t.Context())
	require.NoError(t, err)
	require.Empty(t, suspects)

	_, records := open(t, &memory{slots: maps.Clone(m.slots), writes: m.writes})
	found := keys(records)
	require.Len(t, found, 299)
	require.False(t, found["k100"])
	for range Slots {
		require.NoError(t, l.Commit(t.Context(), []Record{record("more", 1, 1000+l.Position())}))
	}
}

func TestCommitRestoresADeletedSlot(t *testing.T) {
	m, l := written(t, 300)
	delete(m.slots, l.ring.slot(l.position+1))
	require.NoError(t, l.Commit(t.Context(), []Record{record("more", 1, 1000)}))
	_, records := open(t, m)
	require.Len(t, records, 301)
}

// earlier puts back what a slot held once around the ring before.
func (m *memory) earlier(l *Log, index int) {
	s := m.slots[index]
	s.Position, s.Term, s.Nonce, s.Version = s.Position-Slots, 1, "earlier", "foreign"
	s.Data = l.codec.encode(l.stamp.Journal, []Record{record("old"+strconv.Itoa(index), 1, 1)})
	m.slots[index] = s
}

func TestCommitRestoresARevertedSlot(t *testing.T) {
	m, l := written(t, 600)
	m.earlier(l, l.ring.slot(l.position+1))
	require.NoError(t, l.Commit(t.Context(), []Record{record("more", 1, 1000)}))
	_, records := open(t, m)
	require.Len(t, records, 601)
	require.False(t, keys(records)["old"+strconv.Itoa(l.ring.slot(l.position))])
}

func TestSeveralRevertedSlotsRevealARestoredJournal(t *testing.T) {
	repair := func(t *testing.T, l *Log) error {
		t.Helper()
		suspects, err := l.Suspects(t.Context())
		require.NoError(t, err)
		_, err = l.Repair(t.Context(), suspects)
		return err
	}
	renewed := func(t *testing.T, m *memory, l *Log, records int) {
		t.Helper()
		id, err := l.Renew(t.Context(), l.Term(), []Record{record("session/earlier", 1, 0)})
		require.NoError(t, err)
		next, found := open(t, m)
		require.Equal(t, id, next.Stamp().Journal)
		require.Len(t, found, records+1)
	}
	t.Run("one is a mistake", func(t *testing.T) {
		m, l := written(t, 600)
		for range 2 { // twice the same
			m.earlier(l, 20)
			require.NoError(t, repair(t, l))
		}
	})
	t.Run("two", func(t *testing.T) {
		m, l := written(t, 600)
		m.earlier(l, 20)
		m.earlier(l, 30)
		require.ErrorIs(t, repair(t, l), ErrRestored)
		renewed(t, m, l, 600)
	})
	t.Run("one that a commit has found, and another one", func(t *testing.T) {
		m, l := written(t, 600)
		m.earlier(l, l.ring.slot(l.position+1))
		require.NoError(t, l.Commit(t.Context(), []Record{record("more", 1, 1000)}))
		m.earlier(l, l.ring.slot(l.position+9))
		require.ErrorIs(t, repair(t, l), ErrRestored)
		renewed(t, m, l, 601)
	})
	t.Run("slots that were not written yet", func(t *testing.T) {
		m := &memory{slots: map[int]Slot{}}
		l, _ := open(t, m)
		backup := maps.Clone(m.slots)
		for i := range uint64(9) {
			require.NoError(t, l.Commit(t.Context(), []Record{record("k"+strconv.Itoa(int(i)), 1, i+1)}))
		}
		m.slots = backup
		require.ErrorIs(t, repair(t, l), ErrRestored)
		renewed(t, m, l, 9)
	})
	t.Run("of another journal", func(t *testing.T) {
		m, l := written(t, 600)
		for _, index := range []int{20, 30} {
			m.earlier(l, index)
			s := m.slots[index]
			s.Data = l.codec.encode("another", nil)
			m.slots[index] = s
		}
		require.NoError(t, repair(t, l))
	})
	t.Run("not before all slots are right", func(t *testing.T) {
		m, l := written(t, 600)
		m.earlier(l, 20)
		m.earlier(l, 30)
		m.slots[Slots] = Slot{Index: Slots, Slots: Slots, Version: "foreign"}
		err := repair(t, l)
		require.ErrorIs(t, err, ErrDamaged)
		require.NotErrorIs(t, err, ErrRestored)
		delete(m.slots, Slots)
		require.ErrorIs(t, repair(t, l), ErrRestored)
		renewed(t, m, l, 600)
	})
}

// Invariant: I9
func TestDeposedLeaderRepairsNoSlots(t *testing.T) {
	for _, c := range []struct {
		name  string
		valid func(asked int) bool
		made  bool
	}{
		{"before the repair", func(int) bool { return false }, false},
		{"after it", func(asked int) bool { return asked == 1 }, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			m, l := written(t, 300)
			asked := 0
			l.o.Valid = func() bool { asked++; return c.valid(asked) }
			next := l.ring.slot(l.position + 1)
			delete(m.slots, next)
			require.ErrorIs(t, l.Commit(t.Context(), []Record{record("late", 1, 1000)}), ErrDeposed)
			_, there := m.slots[next]
			require.Equal(t, c.made, there)
			require.False(t, keys(func() []Record { b, _ := l.codec.decode(m.slots[next].Data); return b.records }())["late"])
		})
	}
	m, l := written(t, 300)
	open(t, m) // another one leads
	suspects, err := l.Suspects(t.Context())
	require.NoError(t, err)
	require.Len(t, suspects, 1)
	_, err = l.Repair(t.Context(), suspects)
	require.ErrorIs(t, err, ErrDeposed)
}

func TestRenewedJournalHasANewIDAndTerm(t *testing.T) {
	m, l := written(t, 10)
	id, err := l.Renew(t.Context(), 9, []Record{record("session/earlier", 1, 0)})
	require.NoError(t, err)
	require.NotEqual(t, l.Stamp().Journal, id)
	next, records := open(t, m)
	require.Equal(t, Stamp{Journal: id, Term: 10}, next.Stamp())
	require.Len(t, records, 11)
	_, err = l.Renew(t.Context(), 20, []Record{record("session/earlier", 1, 0)})
	require.ErrorIs(t, err, ErrDeposed, "who is deposed begins nothing")
}

func TestJournalIDOutlivesItsLeaders(t *testing.T) {
	m, l := written(t, 3)
	require.NotEmpty(t, l.Stamp().Journal)
	next, _ := open(t, m)
	require.Equal(t, l.Stamp().Journal, next.Stamp().Journal)
	require.Equal(t, l.Position()+1, next.Began())
	// A version that knows of no ID has led meanwhile.
	old := m.slots[next.ring.slot(next.position)]
	old.Data = l.codec.encode("", nil)
	m.slots[old.Index] = old
	last, _ := open(t, m)
	require.Equal(t, l.Stamp().Journal, last.Stamp().Journal)
}
