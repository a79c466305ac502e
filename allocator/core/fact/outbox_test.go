package fact_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/berth-sandbox/berth/allocator/core/fact"
)

const linger = 25 * time.Millisecond

type entry struct {
	pending           *fact.Pending
	session           string
	joined, withdrawn bool
	handed, durable   bool
	urgent            bool
	at                time.Duration
}

// model has the facts in the order of their commits, and the writer.
type model struct {
	*rapid.T
	outbox  *fact.Outbox
	now     time.Duration
	entries []*entry
	durable int  // functions that were called
	writing bool // a Write is under way
	paused  bool // the writer is not ready yet
}

func (m *model) commit() {
	first, n, urgent := m.outbox.Len(), rapid.IntRange(1, 3).Draw(m.T, "facts"), rapid.Bool().Draw(m.T, "urgent")
	for i := range n {
		e := &entry{session: fmt.Sprint(len(m.entries)), joined: n > 1 && i > 0, urgent: urgent, at: m.now}
		e.pending = m.outbox.Commit(m.now, &fact.SessionFact{ID: e.session}, urgent, func(r fact.Revision, at time.Duration) {
			require.True(m, e.handed && !e.durable, "%s is durable", e.session)
			require.Equal(m, e.pending.Revision(), r)
			require.Equal(m, m.now, at)
			for _, earlier := range m.entries {
				if earlier == e {
					break
				}
				require.True(m, earlier.durable || earlier.withdrawn, "%s comes before %s", e.session, earlier.session)
			}
			e.durable = true
			m.durable++
		})
		if len(m.entries) > 0 {
			require.True(m, m.entries[len(m.entries)-1].pending.Revision().Less(e.pending.Revision()))
		}
		m.entries = append(m.entries, e)
	}
	if n > 1 {
		m.outbox.Join(first)
	}
}

// withdraw calls off a fact and those that are joined to it.
func (m *model) withdraw() {
	if len(m.entries) == 0 {
		m.Skip()
	}
	i := rapid.IntRange(0, len(m.entries)-1).Draw(m.T, "fact")
	for m.entries[i].joined {
		i--
	}
	for j := i; j < len(m.entries) && (j == i || m.entries[j].joined); j++ {
		e := m.entries[j]
		require.Equal(m, !e.handed, e.pending.Withdraw())
		e.withdrawn = e.withdrawn || !e.handed
	}
}

// flush compares the next Write with what must be in it.
func (m *model) flush() {
	var want []*entry
	due := false
	oldest := time.Duration(-1)
	for _, e := range m.entries {
		if !e.handed && !e.withdrawn {
			want = append(want, e)
		}
		if !e.handed {
			due = due || e.urgent && !e.withdrawn
			if !e.withdrawn && oldest < 0 {
				oldest = e.at
			}
		}
	}
	facts := m.outbox.Flush(m.now)
	if m.paused {
		require.Empty(m, facts)
		return
	}
	if len(facts) == 0 {
		require.False(m, due, "a caller waits")
		require.False(m, len(want) > 0 && m.now-oldest >= linger, "%s waits for too long", fmt.Sprint(want))
		return
	}
	require.Len(m, facts, len(want))
	for i, f := range facts {
		require.Equal(m, fact.SessionID(want[i].session), f.Thing())
		require.Equal(m, want[i].joined, f.Joined)
		require.True(m, want[i].pending.Handed())
		want[i].handed = true
	}
	m.writing, m.paused = true, true
}

func TestFactsBecomeDurableInTheirOrder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := &model{T: t, outbox: fact.NewOutbox(3, linger)}
		with := func(do func()) func(*rapid.T) { return func(t *rapid.T) { m.T = t; do() } }
		t.Repeat(map[string]func(*rapid.T){
			"commit":   with(m.commit),
			"withdraw": with(m.withdraw),
			"flush":    with(m.flush),
			"time":     with(func() { m.now += time.Duration(rapid.IntRange(1, 2000).Draw(m.T, "ms")) * time.Millisecond }),
			"written": with(func() {
				if !m.writing {
					m.Skip()
				}
				m.writing = false
				m.outbox.Written(m.now)
			}),
			"ready": with(func() {
				if m.writing || !m.paused {
					m.Skip()
				}
				m.paused = false
				m.outbox.Ready()
				m.flush()
			}),
			"": with(func() {
				durable := 0
				for _, e := range m.entries {
					if e.durable {
						durable++
					}
					require.False(m, e.handed && e.withdrawn)
				}
				require.Equal(m, m.durable, durable)
				require.False(m, m.outbox.Stalled(m.now) && !m.writing)
			}),
		})
	})
}
