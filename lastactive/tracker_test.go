package lastactive_test

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/lastactive"
)

const (
	flush  = 5 * time.Second
	window = 7 * time.Second
	tick   = 50 * time.Millisecond
	slack  = 100 * time.Millisecond // how much later than it stored a touch may have been
	start  = time.Hour
)

// world is a tracker and the time that it lives in.
type world struct {
	t  *testing.T
	at atomic.Int64
	*lastactive.Tracker
	mu   sync.Mutex
	gone map[string]bool
}

func newWorld(t *testing.T, change func(*lastactive.Options)) *world {
	w := &world{t: t, gone: map[string]bool{}}
	w.at.Store(int64(start))
	o := lastactive.Options{Flush: flush, Window: window, Now: w.now, Gone: func(id string) bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		return w.gone[id]
	}}
	if change != nil {
		change(&o)
	}
	var err error
	w.Tracker, err = lastactive.New(o)
	require.NoError(t, err)
	return w
}

func (w *world) now() time.Duration { return time.Duration(w.at.Load()) }

// jump moves the time on with nobody ticking.
func (w *world) jump(d time.Duration) { w.at.Add(int64(d)) }

// pass moves the time on as it passes in a healthy process.
func (w *world) pass(d time.Duration) {
	for ; d > 0; d -= tick {
		w.jump(min(d, tick))
		w.Tick()
	}
}

func (w *world) release(id string) {
	w.mu.Lock()
	w.gone[id] = true
	w.mu.Unlock()
	w.Forget(id)
}

// sure lets the doubt of the start pass.
func (w *world) sure() {
	w.pass(w.Doubt())
	require.Zero(w.t, w.Doubt())
}

// ask is Ask of one ID that is tracked.
func (w *world) ask(id string) lastactive.Activity {
	w.t.Helper()
	all, _ := w.Ask([]string{id})
	require.Len(w.t, all, 1)
	require.Equal(w.t, id, all[0].ID)
	return all[0]
}

func (w *world) request(id string) {
	w.Begin(id, time.Hour).Read()
}

// periodic has the log say for d, every flush interval, that a stream is open; bytes
// are what it has moved.
func (w *world) periodic(l *lastactive.Log, id, stream string, bytes uint64, d time.Duration) {
	for ; d > 0; d -= flush {
		l.Record([]lastactive.LogEntry{{ID: id, Stream: stream, Bytes: bytes}})
		w.pass(min(d, flush))
	}
}

func ids(activities []lastactive.Activity) []string {
	all := []string{}
	for _, a := range activities {
		all = append(all, a.ID)
	}
	return all
}

func TestAnAdmittedRequestIsOpenUntilTheWindowEndsAndWasShortThen(t *testing.T) {
	for name, c := range map[string]struct {
		pass         time.Duration
		age, settles time.Duration
	}{
		"at once":                {0, 0, window},
		"shortly before it ends": {slack + window - time.Millisecond, 0, time.Millisecond},
		"when it ends":           {slack + window, window - time.Second, 0},
		"later":                  {slack + time.Minute, time.Minute - time.Second, 0},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, nil)
			w.request("a")
			w.pass(c.pass)
			require.Equal(t, lastactive.Activity{ID: "a", Age: c.age, Quiet: c.age, Settles: c.settles}, w.ask("a"))
		})
	}
}

func TestAnAnswerThatIsNotReadIsOpenForHoweverLong(t *testing.T) {
	w := newWorld(t, nil)
	a, b := w.Begin("a", time.Hour), w.Begin("a", time.Hour)
	w.pass(time.Minute)
	require.Zero(t, w.ask("a").Age)
	require.Zero(t, w.ask("a").Quiet)
	a.Read()
	w.pass(time.Minute)
	require.Zero(t, w.ask("a").Age, "one of two was read")
	require.Equal(t, 1, w.Dump(nil)[0].Unread)
	b.Read()
	w.pass(slack + window - time.Millisecond)
	require.Zero(t, w.ask("a").Age, "the window begins when the answer has been read")
	w.pass(time.Millisecond)
	require.Equal(t, window-time.Second, w.ask("a").Age)
}

func TestARequestThatWasNotAdmittedLeavesNothingOpen(t *testing.T) {
	w := newWorld(t, nil)
	e := w.Begin("a", time.Hour)
	w.pass(time.Minute)
	e.Cancel()
	require.Equal(t, time.Minute-slack-time.Second, w.ask("a").Age)
}

func TestWhatWasNeverUsedIsNotAmongTheAnswers(t *testing.T) {
	w := newWorld(t, nil)
	w.request("a")
	all, _ := w.Ask([]string{"b", "a", "c"})
	require.Equal(t, []string{"a"}, ids(all))
}

func TestATouchCanHaveHappenedUntilTheTickAfterIt(t *testing.T) {
	w := newWorld(t, nil)
	w.sure()
	w.Tick()
	w.jump(400 * time.Millisecond) // late, and no pause yet
	w.request("a")                 // stores a tick that is 400 ms old
	w.Tick()
	require.Zero(t, w.Doubt())
	w.pass(window - time.Millisecond)
	require.Zero(t, w.ask("a").Age)
	w.pass(time.Millisecond)
	require.Equal(t, window-time.Second, w.ask("a").Age, "not later than need be")
}

// Only the shortest are forgotten: one that is forgotten makes every touch before it later
// by as much.
func TestLateTicksThatAreNotRememberedCountAsTheLatestOfThem(t *testing.T) {
	w := newWorld(t, nil)
	w.sure()
	late := func(by time.Duration) {
		w.jump(by)
		w.Tick()
	}
	w.request("in a pause")
	late(8 * time.Hour)
	began := w.now() // until then it can have been in use
	w.pass(time.Minute)
	w.request("with a late tick")
	requested := w.now()
	late(slack + time.Millisecond)
	for range 100 {
		late(slack + 50*time.Millisecond)
	}
	w.pass(time.Minute)
	w.request("later")
	later := w.now()
	w.pass(time.Minute)
	require.Equal(t, w.now()-began-time.Second, w.ask("in a pause").Age)
	require.Equal(t, w.now()-requested-(slack+50*time.Millisecond)-time.Second, w.ask("with a late tick").Age)
	require.Equal(t, w.now()-later-slack-time.Second, w.ask("later").Age)
}

func TestAskRefreshesTheClockThatTouchesStore(t *testing.T) {
	w := newWorld(t, nil)
	w.sure()
	w.jump(300 * time.Millisecond)
	w.Ask(nil)
	w.request("a") // nobody else has ticked since
	w.pass(slack + window - time.Millisecond)
	require.Zero(t, w.ask("a").Age)
	w.jump(time.Second)
	_, doubt := w.Ask([]string{"a"})
	require.Equal(t, 3*flush, doubt, "the pause is noticed by whoever looks first")
}

func TestAPauseIsDoubtForThreeIntervals(t *testing.T) {
	for name, c := range map[string]struct {
		pause time.Duration
		doubt time.Duration
	}{
		"a late tick": {500 * time.Millisecond, 0},
		"a pause":     {501 * time.Millisecond, 3 * flush},
		"suspended":   {time.Hour, 3 * flush},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, nil)
			w.sure()
			w.jump(c.pause)
			w.Tick()
			require.Equal(t, c.doubt, w.Doubt())
			if c.doubt > 0 {
				require.Equal(t, "this router was paused", w.DoubtReason())
			}
			w.pass(c.doubt)
			require.Zero(t, w.Doubt())
			require.Empty(t, w.DoubtReason())
		})
	}
}

func TestANewTrackerIsInDoubt(t *testing.T) {
	w := newWorld(t, nil)
	require.Equal(t, 3*flush, w.Doubt())
	_, doubt, _ := w.Final()
	require.True(t, doubt)
	w.pass(3*flush - time.Millisecond)
	require.Equal(t, time.Millisecond, w.Doubt())
	w.pass(time.Millisecond)
	_, doubt, _ = w.Final()
	require.False(t, doubt)
}

func TestReportNamesWhatHasMovedByAQuarterOfItsTimeout(t *testing.T) {
	for name, c := range map[string]struct {
		timeout, every time.Duration
	}{
		"five minutes": {5 * time.Minute, 75 * time.Second},
		"none":         {0, time.Minute},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, nil)
			use := func() { w.Begin("a", c.timeout).Read() }
			use()
			require.Equal(t, []lastactive.Activity{{ID: "a", Settles: window}}, w.Report(false))
			use()
			require.Empty(t, w.Report(false))
			w.pass(c.every - tick)
			use()
			require.Empty(t, w.Report(false))
			w.pass(tick)
			require.Empty(t, w.Report(false), "it is due, and was not used")
			use()
			use()
			require.Equal(t, []string{"a"}, ids(w.Report(false)), "once")
			require.Empty(t, w.Report(false))
		})
	}
}

func TestReportOfAllNamesEverythingAndIsAReport(t *testing.T) {
	w := newWorld(t, nil)
	w.request("a")
	w.request("b")
	require.ElementsMatch(t, []string{"a", "b"}, ids(w.Report(true)))
	require.Empty(t, w.Report(false))
	require.ElementsMatch(t, []string{"a", "b"}, ids(w.Report(true)))
}

func TestWhatTheLogSaysIsReportedToo(t *testing.T) {
	w := newWorld(t, func(o *lastactive.Options) {
		o.IdleTimeout = func(id string) (time.Duration, bool) { return 40 * time.Second, id == "known" }
	})
	l := w.OpenLog(flush)
	defer l.Close()
	for _, c := range []struct {
		id    string
		every time.Duration
	}{{"known", 10 * time.Second}, {"unknown", window / 4}} {
		record := func() { l.Record([]lastactive.LogEntry{{ID: c.id, Stream: c.id}}) }
		record()
		require.Equal(t, []lastactive.Activity{{ID: c.id, Open: 1}}, w.Report(false))
		w.pass(c.every - time.Millisecond)
		record()
		require.Empty(t, w.Report(false))
		w.pass(time.Millisecond)
		record()
		require.Equal(t, []string{c.id}, ids(w.Report(false)))
	}
}

func TestFinalNamesWhatIsOpenOrWasALittleAgo(t *testing.T) {
	w := newWorld(t, nil)
	w.request("long ago")
	w.request("not reported since")
	w.pass(slack + window)
	w.Report(true)
	w.request("not reported since")
	unread := w.Begin("unread", time.Hour)
	l := w.OpenLog(flush)
	w.periodic(l, "open", "1", 0, time.Minute)
	w.request("short")
	w.pass(slack + window)
	w.request("now")
	final, _, _ := w.Final()
	require.ElementsMatch(t, []string{"unread", "open", "short", "now", "not reported since"}, ids(final))
	w.Report(true)
	w.pass(slack + time.Second)
	final, _, _ = w.Final()
	require.ElementsMatch(t, []string{"unread", "open", "now"}, ids(final))
	unread.Read()
	l.Close()
}

// What was dropped for want of room cannot be named in the end, only when it is asked for.
func TestFinalIsInDoubtOnceSomethingWasDroppedThatHadBeenUsedSinceItWasReported(t *testing.T) {
	for name, used := range map[string]bool{"used since": true, "not used since": false} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, func(o *lastactive.Options) { o.Size = 1 })
			w.sure()
			w.request("a")
			w.pass(time.Minute)
			w.Report(true)
			if used {
				w.request("a") // less than a quarter of its timeout later: it is not reported
				require.Empty(t, w.Report(false))
			}
			w.pass(time.Minute)
			w.request("b")
			w.Report(false)
			require.EqualValues(t, 1, w.Evicted())
			require.Less(t, w.ask("a").Age, 3*time.Minute)
			_, doubt, _ := w.Final()
			require.Equal(t, used, doubt)
			w.EnvoyEnded()
			_, doubt, _ = w.Final()
			require.Equal(t, used, doubt)
		})
	}
}

func TestForgottenIsForgotten(t *testing.T) {
	w := newWorld(t, nil)
	l := w.OpenLog(flush)
	defer l.Close()
	e := w.Begin("a", time.Hour)
	l.Record([]lastactive.LogEntry{{ID: "a", Stream: "1"}, {ID: "a", Stream: "2"}})
	w.release("a")
	require.Zero(t, w.Streams())
	e.Read()
	w.pass(time.Hour)
	e.Cancel()
	l.Record([]lastactive.LogEntry{{ID: "a", Stream: "1"}, {ID: "a", Stream: "3"}, {ID: "a", Stream: "2", End: true}, {ID: "a"}})
	all, _ := w.Ask([]string{"a"})
	require.Empty(t, all)
	require.Empty(t, w.Report(false))
	require.Empty(t, w.Report(true))
	require.Empty(t, w.Dump(nil))
	require.Zero(t, w.Len())
	require.Zero(t, w.Streams())
	w.Forget("never seen")
}

func TestAReleaseBetweenTheQuestionAndTheCreationWins(t *testing.T) {
	asked := 0
	w := newWorld(t, func(o *lastactive.Options) {
		o.Gone = func(string) bool { asked++; return asked > 1 }
	})
	l := w.OpenLog(flush)
	defer l.Close()
	l.Record([]lastactive.LogEntry{{ID: "a", Stream: "1"}})
	require.Equal(t, 2, asked)
	require.Zero(t, w.Len())
	require.Zero(t, w.Streams())
}

func TestRetainKeepsTheTimesOfTheOthers(t *testing.T) {
	w := newWorld(t, nil)
	for _, id := range []string{"a", "b", "c"} {
		w.request(id)
	}
	w.pass(time.Minute)
	w.Retain(func(id string) bool { return id == "b" })
	require.Equal(t, 1, w.Len())
	require.Equal(t, time.Minute-slack-time.Second, w.ask("b").Age)
	require.Equal(t, time.Minute-slack-time.Second, w.ask("a").Age, "it may exist, and was used until then")
}

func TestSilentLongestGoesFirstAndIsNotTakenForUnused(t *testing.T) {
	w := newWorld(t, func(o *lastactive.Options) { o.Size = 3 })
	for _, id := range []string{"a", "b", "c"} {
		w.request(id)
		w.pass(time.Minute)
	}
	all, _ := w.Ask([]string{"x"})
	require.Empty(t, all, "none was ever dropped")
	w.request("d")
	require.EqualValues(t, 1, w.Evicted())
	require.Equal(t, 3, w.Len())
	require.Equal(t, 3*time.Minute-slack-time.Second, w.ask("a").Age)
	require.Equal(t, 3*time.Minute-slack-time.Second, w.ask("x").Age, "who knows whether it was that")
	require.Zero(t, w.ask("x").Open)
}

func TestWhatIsInUseIsNotDroppedForWantOfRoom(t *testing.T) {
	w := newWorld(t, func(o *lastactive.Options) { o.Size = 2 })
	l := w.OpenLog(flush)
	defer l.Close()
	unread := w.Begin("unread", time.Hour)
	l.Record([]lastactive.LogEntry{{ID: "open", Stream: "1"}})
	w.pass(time.Minute)
	for i := range 20 {
		w.request(fmt.Sprint(i))
	}
	require.Zero(t, w.ask("unread").Age)
	require.Zero(t, w.ask("open").Age)
	require.LessOrEqual(t, w.Len(), 3)
	unread.Read()
	l.Record([]lastactive.LogEntry{{ID: "open", Stream: "1", End: true}})
	for i := range 20 {
		w.request(fmt.Sprint("later ", i))
	}
	require.Equal(t, 2, w.Len(), "it shrinks again")
}

func TestOptionsAreChecked(t *testing.T) {
	good := lastactive.Options{Flush: flush, Window: window, Now: func() time.Duration { return 0 }}
	for name, c := range map[string]struct {
		change func(*lastactive.Options)
		want   string
	}{
		"no clock":     {func(o *lastactive.Options) { o.Now = nil }, "Options.Now"},
		"no flush":     {func(o *lastactive.Options) { o.Flush = 0 }, "Options.Flush"},
		"short window": {func(o *lastactive.Options) { o.Window = flush }, "Options.Window"},
		"size":         {func(o *lastactive.Options) { o.Size = -1 }, "Options.Size"},
		"streams":      {func(o *lastactive.Options) { o.Streams = -1 }, "Streams"},
	} {
		t.Run(name, func(t *testing.T) {
			o := good
			c.change(&o)
			_, err := lastactive.New(o)
			require.ErrorContains(t, err, c.want)
		})
	}
	_, err := lastactive.New(good)
	require.NoError(t, err)
}

func TestRunTicks(t *testing.T) {
	w := newWorld(t, nil)
	w.sure()
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { w.Run(ctx) })
	w.jump(time.Second)
	// Doubt ticks itself, so what is looked at is what a touch stores.
	require.Eventually(t, func() bool {
		w.request("a")
		return w.Dump(func(string) bool { return true })[0].Age == 0
	}, 10*time.Second, time.Millisecond)
	cancel()
	running.Wait()
}

// A request is admitted only if admissions have not been stopped after it began, and
// whoever stops them asks afterwards.
func TestNoAdmissionEscapesWhoStopsThemAndAsks(t *testing.T) {
	for _, c := range []struct {
		name string
		size int
	}{{"tracked", 0}, {"dropped for want of room all the time", 1}} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t, func(o *lastactive.Options) { o.Size = c.size })
			for round := range 300 {
				id := fmt.Sprint(round % 7)
				var stopped atomic.Bool
				var admitted atomic.Int64
				var seen atomic.Bool
				w.pass(slack + window + time.Second)
				var all sync.WaitGroup
				for range 3 {
					all.Go(func() {
						for !stopped.Load() {
							e := w.Begin(id, time.Hour)
							if stopped.Load() {
								e.Cancel()
								return
							}
							admitted.Add(1)
							e.Read()
						}
					})
				}
				if c.size == 1 {
					all.Go(func() {
						for !stopped.Load() {
							w.request("other")
						}
					})
				}
				all.Go(func() {
					stopped.Store(true)
					answers, _ := w.Ask([]string{id})
					seen.Store(len(answers) == 1 && answers[0].Age == 0)
				})
				all.Wait()
				if admitted.Load() > 0 && !seen.Load() {
					t.Fatalf("round %d: %d were admitted, and Ask has seen none", round, admitted.Load())
				}
			}
		})
	}
}

func TestTouchesLogsReportsAndReleasesAtOnce(t *testing.T) {
	w := newWorld(t, func(o *lastactive.Options) { o.Size, o.Streams = 20, 40 })
	var working sync.WaitGroup
	for g := range 2 {
		working.Go(func() {
			for i := range 3000 {
				e := w.Begin(fmt.Sprint(i*7%31), time.Minute)
				if i%3 == g {
					e.Cancel()
				} else {
					e.Read()
				}
			}
		})
		working.Go(func() {
			var l *lastactive.Log
			for i := range 3000 {
				if i%500 == 0 {
					if l != nil {
						l.Close()
					}
					l = w.OpenLog(flush)
				}
				l.Record([]lastactive.LogEntry{{ID: fmt.Sprint(i % 29), Stream: fmt.Sprint(g, i%53), Bytes: uint64(i), End: i%5 == 0}})
			}
			l.Close()
		})
	}
	working.Go(func() {
		for i := range 1000 {
			w.jump(40 * time.Millisecond)
			w.Tick()
			w.Ask([]string{fmt.Sprint(i % 31)})
			w.Report(i%50 == 0)
			w.Forget(fmt.Sprint(i % 31))
			if i%100 == 0 {
				w.Final()
				w.Retain(func(id string) bool { return id > "15" })
			}
		}
	})
	working.Wait()
	w.pass(time.Minute)
	for _, s := range w.Dump(nil) {
		require.Zero(t, s.Unread)
		require.Zero(t, s.Open, "all logs are closed")
		require.NotZero(t, s.Age)
	}
	require.Zero(t, w.Streams())
	w.Report(true)
	require.Empty(t, w.Report(false))
}
