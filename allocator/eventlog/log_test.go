package eventlog

import (
	"context"
	"fmt"
	"maps"
	mathrand "math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"go.uber.org/zap"

	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/api/sandboxid"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// world is what a journal and Sandbox objects keep: the latest state of each sandbox on record.
type world struct {
	term, counter uint64
	states        map[string]*fact.Sandbox
	ids           int
}

func newWorld() *world { return &world{states: map[string]*fact.Sandbox{}} }

// commit makes a state durable.
func (w *world) commit(s fact.Sandbox) *fact.Sandbox {
	w.counter++
	s.Revision = fact.Revision{Term: w.term, Counter: w.counter}
	w.states[s.ID] = &s
	return &s
}

func (w *world) claim() *fact.Sandbox {
	w.ids++
	now := time.Now()
	if w.ids%3 == 0 {
		time.Sleep(1234567 * time.Nanosecond)
	}
	return w.commit(fact.Sandbox{
		Binding: fact.Binding{ID: sandboxid.New(), Team: fmt.Sprint("team-", w.ids%2), ClaimedAt: now, EndAt: now.Add(time.Hour)},
		Pool:    fact.PoolKey{Namespace: "default", Name: "python"}, Phase: fact.Running, StartedAt: now,
	})
}

func (w *world) move(s fact.Sandbox, end time.Duration) *fact.Sandbox {
	s.EndAt = time.Now().Add(end)
	return w.commit(s)
}

func (w *world) sleep(s fact.Sandbox) *fact.Sandbox {
	s.Phase, s.AsleepAt, s.EndAt = fact.Asleep, time.Now(), time.Time{}
	return w.commit(s)
}

// wake returns the states of a wake.
func (w *world) wake(s fact.Sandbox) (waking, running *fact.Sandbox) {
	s.Phase, s.EndAt = fact.Waking, time.Now().Add(time.Hour)
	waking = w.commit(s)
	s.Phase, s.AsleepAt = fact.Running, time.Time{}
	return waking, w.commit(s)
}

func (w *world) release(s fact.Sandbox) *fact.Sandbox {
	s.Phase, s.ReleasedAt, s.Cause = fact.Released, time.Now(), fact.Because(fact.ReasonKilled)
	return w.commit(s)
}

// keptInTests stands for KeepEvents.
const keptInTests = 5000

// leader is a log that runs.
type leader struct {
	*Log
	stop func()
}

// lead begins a term. Its log gets the states of the world.
func (w *world) lead(t testing.TB, store Store) *leader {
	w.term, w.counter = w.term+1, 0
	l, err := New(Options{
		Store: store, Term: w.term, Valid: func() bool { return true }, Yield: func(context.Context) {},
		Build: func(string) string { return "0b7f5f3c-5a1e-4a52-8d68-7a0f3c1f2f10" }, Wall: time.Now, Log: zap.NewNop(), keep: keptInTests,
	})
	require.NoError(t, err)
	l.Recover(slices.Collect(maps.Values(w.states)))
	ctx, cancel := context.WithCancel(t.Context())
	var all sync.WaitGroup
	all.Go(func() { l.Run(ctx) })
	return &leader{l, func() { cancel(); all.Wait() }}
}

func (l *leader) everything(t testing.TB) []Event {
	t.Helper()
	events, err := l.Read(Filter{All: true}, Page{Most: 1 << 30, Ascending: true})
	require.NoError(t, err)
	return events
}

// judge requires what the log promises of every sandbox that was ever claimed.
func judge(t testing.TB, events []Event, all map[string]*fact.Sandbox) {
	t.Helper()
	of := map[string][]Event{}
	for i, e := range events {
		if i > 0 {
			require.Equal(t, events[i-1].Number+1, e.Number)
		}
		of[e.Sandbox] = append(of[e.Sandbox], e)
	}
	for id, s := range all {
		told := of[id]
		require.NotEmpty(t, told, id)
		require.Equal(t, Created, told[0].Type, id)
		end, asleep := int64(0), int64(0)
		for i, e := range told {
			switch e.Type {
			case Paused:
				require.Zero(t, asleep, "it is paused twice")
				asleep = e.At
				continue
			case Resumed:
				require.Equal(t, asleep, e.Paused, "a resume follows its pause")
				require.NotZero(t, asleep)
				asleep = 0
			}
			if e.Type == Killed {
				require.True(t, s.Phase >= fact.Released, "it was not released")
				require.Equal(t, i, slices.IndexFunc(told, func(x Event) bool { return x.Type == Killed }), "it is killed twice in one log")
				require.Equal(t, len(told)-1, i, "nothing follows the kill")
				break
			}
			end = e.End
		}
		if s.Phase >= fact.Released {
			require.Equal(t, Killed, told[len(told)-1].Type, id)
			continue
		}
		require.Equal(t, micros(s.AsleepAt), asleep, "it is told whether it sleeps, and since when")
		if asleep == 0 {
			require.Equal(t, micros(s.EndAt), end, "the newest end is told")
		}
	}
}

// Leaders end at any moment, writes fail and take place all the same, and an earlier leader goes on to write for a while.
//
// Invariant: P20
func TestNoEventIsLostOverChangesOfLeaders(t *testing.T) {
	for seed := range uint64(60) {
		synctest.Test(t, func(t *testing.T) {
			random := mathrand.New(mathrand.NewPCG(seed, 44))
			store := newMemory()
			faults := mathrand.New(mathrand.NewPCG(seed, 45))
			store.fault = func() (applied, lost bool) { return faults.IntN(4) > 0, faults.IntN(4) == 0 }
			w := newWorld()
			l := w.lead(t, store)
			for range 60 {
				live := slices.DeleteFunc(slices.Collect(maps.Values(w.states)), func(s *fact.Sandbox) bool { return s.Phase >= fact.Released })
				slices.SortFunc(live, func(a, b *fact.Sandbox) int { return strings.Compare(a.ID, b.ID) })
				var states []*fact.Sandbox
				for range random.IntN(4) {
					states = append(states, w.claim())
				}
				if n := len(live); n > 0 {
					s := *live[random.IntN(n)]
					switch asleep := s.Phase == fact.Asleep; {
					case asleep && random.IntN(2) == 0:
						waking, running := w.wake(s)
						states, s = append(states, waking, running), *running
					case !asleep && random.IntN(3) == 0:
						s = *w.sleep(s)
						states = append(states, w.states[s.ID])
					case !asleep && random.IntN(2) == 0:
						s = *w.move(s, time.Duration(1+random.IntN(1000))*time.Minute)
						states = append(states, w.states[s.ID])
					}
					if random.IntN(2) == 0 {
						states = append(states, w.release(s))
					}
				}
				// The leader may end after the commit.
				told := random.IntN(6) > 0
				if told {
					l.Tell(states...)
				}
				time.Sleep(time.Duration(random.IntN(700)) * time.Millisecond)
				if random.IntN(8) == 0 {
					earlier := l
					if random.IntN(2) == 0 {
						earlier.stop()
					}
					l = w.lead(t, store)
					time.Sleep(time.Duration(random.IntN(700)) * time.Millisecond)
					earlier.stop()
				} else if !told {
					l.Tell(states...) // before the next commit
				}
			}
			store.mu.Lock()
			store.fault = nil
			store.mu.Unlock()
			l.stop()
			l = w.lead(t, store)
			time.Sleep(time.Minute)
			require.Zero(t, l.Stats().Waiting)
			judge(t, l.everything(t), w.states)
			l.stop()
		})
	}
}

// Invariant: P20
func TestWriteWhoseAnswerIsLostIsAdopted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, store := newWorld(), newMemory()
		store.fault = func() (applied, lost bool) { return true, store.writes%2 == 0 }
		l := w.lead(t, store)
		for n := 1; n < 4; n++ {
			l.Tell(w.claim())
			time.Sleep(time.Minute)
			require.Zero(t, l.Stats().Waiting)
			require.Len(t, l.everything(t), n)
		}
		l.stop()
	})
}

// A burst needs several segments, and the leader ends after the first one.
//
// Invariant: P20
func TestBurstIsToldAlsoWhenItsLeaderEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, store := newWorld(), newMemory()
		store.fault = func() (applied, lost bool) { return store.writes == 0, store.writes > 0 }
		l := w.lead(t, store)
		var states []*fact.Sandbox
		for range 3 * maxEvents {
			states = append(states, w.claim())
		}
		l.Tell(states...)
		time.Sleep(time.Minute)
		require.Equal(t, 2*maxEvents, l.Stats().Waiting)
		l.stop()
		store.fault = nil
		l = w.lead(t, store)
		time.Sleep(time.Minute)
		judge(t, l.everything(t), w.states)
		l.stop()
	})
}

// Invariant: P20
func TestEventsHaveTheSameIDUnderEveryLeader(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		first, second := newMemory(), newMemory()
		l := w.lead(t, first)
		s := w.claim()
		l.Tell(s)
		s = w.move(*s, time.Minute)
		l.Tell(s)
		l.Tell(w.release(*s))
		time.Sleep(time.Minute)
		told := l.everything(t)
		l.stop()
		require.Len(t, told, 3)
		other := w.lead(t, second) // derives from the last state alone
		time.Sleep(time.Minute)
		derived := other.everything(t)
		other.stop()
		require.Len(t, derived, 2)
		require.Equal(t, []string{told[0].ID(), told[2].ID()}, []string{derived[0].ID(), derived[1].ID()})
		require.NotEqual(t, told[0].ID(), told[1].ID())
	})
}

func TestOldSegmentsGoAndAreNotToldAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, store := newWorld(), newMemory()
		l := w.lead(t, store)
		old := w.claim()
		l.Tell(old)
		time.Sleep(time.Hour)
		for range 2 * keptInTests / 1000 {
			for range 500 {
				s := w.claim()
				l.Tell(s)
				l.Tell(w.release(*s))
			}
			time.Sleep(10 * time.Second)
		}
		time.Sleep(2 * time.Minute)
		s := l.Stats()
		require.GreaterOrEqual(t, s.Events, keptInTests)
		require.Less(t, s.Events, keptInTests+maxEvents)
		require.LessOrEqual(t, s.Bytes, KeepBytes)
		require.Zero(t, s.Missed)
		t.Logf("%d events in %d segments, %d bytes: %.1f bytes an event; %d bytes written", s.Events, len(store.objects), s.Bytes, float64(s.Bytes)/float64(s.Events), s.Written)
		events := l.everything(t)
		require.EqualValues(t, s.Events, len(events))
		last := events[len(events)-1].Number
		l.stop()

		l = w.lead(t, store)
		l.Tell(w.release(*old))
		time.Sleep(time.Minute)
		more, err := l.After(last, Filter{All: true}, 100)
		require.NoError(t, err)
		require.Len(t, more.Events, 1, "the claim is older than the log")
		require.Equal(t, Killed, more.Events[0].Type)

		time.Sleep(KeepFor)
		require.LessOrEqual(t, l.Stats().Events, maxEvents, "the newest segment stays")
		require.LessOrEqual(t, len(l.known), maxEvents)
		l.stop()
	})
}

func TestReadsSelectAndPage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, store := newWorld(), newMemory()
		l := w.lead(t, store)
		_, err := (&Log{err: ErrLoading}).Read(Filter{}, Page{})
		require.ErrorIs(t, err, ErrLoading)
		one := ""
		for i := range 1200 { // more than a segment
			s := w.claim()
			if i == 1194 {
				one = s.ID
			}
			l.Tell(s)
			l.Tell(w.release(*s))
		}
		time.Sleep(time.Minute)
		read := func(f Filter, p Page) (numbers []uint64) {
			events, err := l.Read(f, p)
			require.NoError(t, err)
			for _, e := range events {
				numbers = append(numbers, e.Number)
			}
			return numbers
		}
		require.Equal(t, []uint64{2400, 2399, 2398}, read(Filter{All: true}, Page{Most: 3}))
		require.Equal(t, []uint64{1001, 1002}, read(Filter{All: true}, Page{Offset: 1000, Most: 2, Ascending: true}))
		require.Equal(t, []uint64{2400, 2396}, read(Filter{Team: "team-0", Types: []Type{Killed}}, Page{Most: 2}))
		require.Equal(t, []uint64{2390, 2389}, read(Filter{All: true, Sandbox: one}, Page{Most: 9}))
		require.Empty(t, read(Filter{Team: "team-0", Sandbox: one}, Page{Most: 9}), "it is of another team")
		require.Empty(t, read(Filter{All: true, Types: []Type{Paused}}, Page{Most: 9}))

		b, err := l.After(998, Filter{Team: "team-1", Types: []Type{Created}}, 3)
		require.NoError(t, err)
		require.Equal(t, []uint64{1001, 1005, 1009}, []uint64{b.Events[0].Number, b.Events[1].Number, b.Events[2].Number})
		require.EqualValues(t, 1009, b.Next)
		b, err = l.After(2400, Filter{All: true}, 3)
		require.NoError(t, err)
		require.Empty(t, b.Events)
		l.Tell(w.claim())
		<-b.Changed
		l.stop()
	})
}

// A log that cannot be written drops the oldest states at a bound, and delays no caller.
func TestRefusedLogHasABound(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, store := newWorld(), newMemory()
		store.fault = func() (bool, bool) { return false, true }
		l := w.lead(t, store)
		first := w.claim()
		l.Tell(first)
		time.Sleep(time.Second)
		require.False(t, l.Stored(first.ID))
		for range maxWaiting {
			l.Tell(w.claim())
		}
		require.Equal(t, maxWaiting, l.Stats().Waiting)
		require.EqualValues(t, 1, l.Stats().Missed)
		require.True(t, l.Stored(first.ID))
		store.mu.Lock()
		store.fault = nil
		store.mu.Unlock()
		time.Sleep(10 * time.Minute)
		require.Zero(t, l.Stats().Waiting)
		l.stop()
	})
}

func TestMissingCRDSwitchesTheLogOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, store := newWorld(), newMemory()
		store.off = true
		l := w.lead(t, store)
		time.Sleep(time.Second)
		s := w.claim()
		l.Tell(s)
		require.True(t, l.Stored(s.ID), "its object need not stay")
		_, err := l.Read(Filter{All: true}, Page{Most: 1})
		require.ErrorIs(t, err, ErrOff)
		store.mu.Lock()
		store.off = false
		store.mu.Unlock()
		time.Sleep(time.Minute)
		l.Tell(w.claim())
		time.Sleep(time.Minute)
		require.Len(t, l.everything(t), 1)
		l.stop()
	})
}

// A segment that cannot be read keeps its numbers, so that no other event gets them.
func TestUnreadableSegmentKeepsItsNumbers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, store := newWorld(), newMemory()
		l := w.lead(t, store)
		l.Tell(w.claim(), w.claim())
		time.Sleep(time.Minute)
		l.stop()
		for name, o := range store.objects {
			o.Spec.Data = []byte("not zstd")
			store.objects[name] = o
		}
		l = w.lead(t, store)
		l.Tell(w.claim())
		time.Sleep(time.Minute)
		events := l.everything(t)
		require.Len(t, events, 1)
		require.EqualValues(t, 3, events[0].Number)
		b, err := l.After(0, Filter{All: true}, 10)
		require.NoError(t, err)
		require.Len(t, b.Events, 1)
		l.stop()
	})
}

// The largest metadata that a claim can have does not exceed what etcd takes.
func TestSegmentsOfLargeMetadataStayWritable(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, store := newWorld(), newMemory()
		l := w.lead(t, store)
		random := mathrand.NewChaCha8([32]byte{44})
		for range 1500 {
			noise := make([]byte, 1000)
			_, _ = random.Read(noise)
			s := *w.claim()
			s.Metadata = map[string]string{"k": fmt.Sprintf("%x", noise)}
			l.Tell(w.commit(s))
		}
		time.Sleep(time.Hour)
		require.Zero(t, l.Stats().Waiting)
		require.LessOrEqual(t, l.Stats().Bytes, KeepBytes)
		for _, o := range store.objects {
			require.Less(t, len(o.Spec.Data), 512<<10)
		}
		t.Logf("%d of 1500 events in %d bytes", l.Stats().Events, l.Stats().Bytes)
		l.stop()
	})
}

// A full log and a backlog: what a takeover costs.
func BenchmarkLoad(b *testing.B) {
	w, store := newWorld(), newMemory()
	c, err := newCodec()
	require.NoError(b, err)
	for first := uint64(1); first < KeepEvents; first += maxEvents {
		var events []Event
		for range maxEvents / 2 {
			s := *w.claim()
			events = append(events, derive(&s, nil, false, time.Now(), "uid")...)
			events = append(events, derive(w.release(s), &known{end: micros(s.EndAt)}, false, time.Now(), "uid")...)
		}
		text, err := lines(events)
		require.NoError(b, err)
		s := &segment{first: first, n: len(events), term: 1, through: fact.Revision{Term: 1, Counter: 1}, data: c.encoder.EncodeAll(text, nil)}
		o := s.toObject()
		store.objects[o.Name] = *o
	}
	for b.Loop() {
		l, err := New(Options{Store: store, Term: 9, Valid: func() bool { return true }, Yield: func(context.Context) {}, Build: func(string) string { return "" }, Wall: time.Now, Log: zap.NewNop()})
		require.NoError(b, err)
		require.NoError(b, l.load(b.Context()))
	}
}

// The end that a sleep takes away, and that a wake sets, is no update.
//
// Invariant: P20
func TestSleepAndWakeAreAPauseAndAResume(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, store := newWorld(), newMemory()
		l := w.lead(t, store)
		s := w.claim()
		s.Workload = &fact.Workload{Limits: fact.Resources{CPU: "2", Memory: "1Gi"}}
		l.Tell(s)
		time.Sleep(time.Minute)
		asleep := w.sleep(*s)
		l.Tell(asleep)
		time.Sleep(time.Hour)
		waking, running := w.wake(*asleep)
		l.Tell(waking, running)
		time.Sleep(30 * time.Second)
		again := w.sleep(*running)
		l.Tell(again)
		time.Sleep(time.Hour)
		l.Tell(w.release(*again))
		time.Sleep(time.Minute)
		told := l.everything(t)
		l.stop()
		var types []Type
		for i := range told {
			types = append(types, told[i].Type)
		}
		require.Equal(t, []Type{Created, Paused, Resumed, Paused, Killed}, types)
		for i, want := range map[int]time.Duration{1: time.Minute, 3: 30 * time.Second, 4: 0} {
			ran := told[i].Data().Execution
			require.Equal(t, want.Milliseconds(), ran.ExecutionTime, "event %d: since it ran", i)
			require.Equal(t, told[i].Time().Add(-want), ran.StartedAt, "event %d", i)
			require.Equal(t, []int{2, 1024}, []int{ran.VcpuCount, ran.MemoryMb})
		}
		require.Nil(t, told[2].Data().Execution)
		require.Nil(t, told[2].Data().SetTimeout)
		require.Equal(t, []string{"create", "pause", "resume", "pause", "kill"},
			[]string{told[0].Label(), told[1].Label(), told[2].Label(), told[3].Label(), told[4].Label()})
		require.NotEqual(t, told[1].ID(), told[3].ID())
	})
}

// A leader that ends before it has told a sleep leaves that to the next one, which sees the latest state alone.
//
// Invariant: P20
func TestNextLeaderTellsHowASandboxSleepsNow(t *testing.T) {
	for name, c := range map[string]struct {
		told, found func(w *world, s fact.Sandbox) *fact.Sandbox
		want        []Type
	}{
		"it sleeps":               {nil, (*world).sleep, []Type{Paused}},
		"it has slept":            {nil, func(w *world, s fact.Sandbox) *fact.Sandbox { return w.woken(*w.sleep(s)) }, []Type{Updated}},
		"it was woken":            {(*world).sleep, (*world).woken, []Type{Paused, Resumed}},
		"it was woken and sleeps": {(*world).sleep, func(w *world, s fact.Sandbox) *fact.Sandbox { return w.sleep(*w.woken(s)) }, []Type{Paused, Resumed, Paused}},
		"it is about to wake": {(*world).sleep, func(w *world, s fact.Sandbox) *fact.Sandbox {
			waking, _ := w.wake(s)
			return w.commit(*waking)
		}, []Type{Paused}},
		"it is released": {nil, func(w *world, s fact.Sandbox) *fact.Sandbox { return w.release(*w.sleep(s)) }, []Type{Paused, Killed}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w, store := newWorld(), newMemory()
				l := w.lead(t, store)
				s := w.claim()
				l.Tell(s)
				time.Sleep(time.Minute)
				if c.told != nil {
					s = c.told(w, *s)
					l.Tell(s)
					time.Sleep(time.Minute)
				}
				l.stop()
				time.Sleep(time.Minute)
				c.found(w, *s)
				l = w.lead(t, store)
				time.Sleep(time.Minute)
				told := l.everything(t)
				judge(t, told, w.states)
				l.stop()
				var types []Type
				for i := range told[1:] {
					types = append(types, told[1+i].Type)
					require.False(t, told[1+i].Time().Before(told[i].Time()), "in the order of time")
				}
				require.Equal(t, c.want, types)
			})
		})
	}
}

// woken is the last state of a wake.
func (w *world) woken(s fact.Sandbox) *fact.Sandbox {
	_, running := w.wake(s)
	return running
}
