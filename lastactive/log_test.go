package lastactive_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/lastactive"
)

func entry(id, stream string, bytes uint64) []lastactive.LogEntry {
	return []lastactive.LogEntry{{ID: id, Stream: stream, Bytes: bytes}}
}

func end(id, stream string, bytes uint64) []lastactive.LogEntry {
	return []lastactive.LogEntry{{ID: id, Stream: stream, Bytes: bytes, End: true}}
}

func TestAStreamIsOpenUntilItsEndHoweverFrozenItsCountersAre(t *testing.T) {
	w := newWorld(t, nil)
	l := w.OpenLog(flush)
	defer l.Close()
	w.sure()
	l.Record(entry("a", "1", 7))
	w.pass(flush)
	w.periodic(l, "a", "1", 7, 10*time.Minute)
	a := w.ask("a")
	require.Equal(t, 1, a.Open)
	require.Zero(t, a.Age)
	require.Equal(t, 10*time.Minute+flush-(flush+time.Second), a.Quiet, "its bytes moved when it was first seen")
	require.Zero(t, w.Doubt())
	l.Record(end("a", "1", 7))
	a = w.ask("a")
	require.Zero(t, a.Open)
	require.Zero(t, a.Age, "it has ended just now")
	require.Equal(t, 10*time.Minute+flush, a.Quiet)
	w.pass(time.Second)
	require.Equal(t, time.Second, w.ask("a").Age)
}

func TestBytesAreJudgedOneFlushLater(t *testing.T) {
	w := newWorld(t, nil)
	l := w.OpenLog(flush)
	defer l.Close()
	l.Record(entry("a", "1", 1))
	w.pass(flush)
	l.Record(entry("a", "1", 2))
	require.Zero(t, w.ask("a").Quiet)
	w.pass(flush)
	l.Record(entry("a", "1", 2))
	require.Zero(t, w.ask("a").Quiet)
	w.pass(2 * time.Second)
	require.Equal(t, time.Second, w.ask("a").Quiet)
	l.Record(end("a", "1", 3))
	require.Zero(t, w.ask("a").Quiet, "the last bytes moved shortly before the end")
}

func TestAStreamThatIsNotHeardOfMayMoveBytes(t *testing.T) {
	w := newWorld(t, nil)
	l := w.OpenLog(flush)
	defer l.Close()
	w.periodic(l, "a", "1", 1, time.Minute)
	require.NotZero(t, w.ask("a").Quiet)
	w.pass(window)
	require.Zero(t, w.ask("a").Quiet)
}

func TestAnEntryWithoutAStreamIsActivityAndNothingOpen(t *testing.T) {
	w := newWorld(t, nil)
	l := w.OpenLog(flush)
	defer l.Close()
	l.Record(entry("a", "", 0))
	w.pass(time.Second)
	require.Equal(t, lastactive.Activity{ID: "a", Age: time.Second, Quiet: time.Second}, w.ask("a"))
	l.Record(entry("", "1", 0)) // not admitted yet
	require.Equal(t, 1, w.Len())
	require.Zero(t, w.Streams())
}

func TestALogThatSaysNothingKeepsItsStreamsOpen(t *testing.T) {
	w := newWorld(t, nil)
	l := w.OpenLog(flush)
	other := w.OpenLog(flush)
	w.sure()
	l.Record(entry("a", "1", 0))
	w.periodic(other, "b", "2", 0, 10*time.Minute)
	require.Equal(t, lastactive.Activity{ID: "a", Open: 1}, w.ask("a"))
	l.Close()
	other.Close()
}

func TestALostEndIsNoticedOnceTheLogHasGoneOnWithoutTheStream(t *testing.T) {
	const enough = 3 * (flush + time.Second)
	w := newWorld(t, nil)
	l := w.OpenLog(flush)
	defer l.Close()
	l.Record(append(entry("a", "1", 0), entry("b", "2", 0)...))
	seen := w.now()
	for w.now()-seen < enough-3*time.Second {
		w.pass(3 * time.Second)
		l.Record(entry("b", "2", 0))
	}
	w.pass(3*time.Second - time.Millisecond)
	l.Record(nil)
	require.Equal(t, 1, w.ask("a").Open)
	w.pass(time.Millisecond)
	require.Equal(t, 1, w.ask("a").Open, "time alone closes nothing")
	l.Record(nil)
	a := w.ask("a")
	require.Zero(t, a.Open)
	require.Equal(t, enough-(flush+time.Second), a.Age, "it can have been open until it was to be reported")
	require.Equal(t, a.Age, a.Quiet)
	require.Equal(t, 1, w.ask("b").Open)
}

func TestWhatALogDidNotSayBeforeItStoodStillProvesNothing(t *testing.T) {
	w := newWorld(t, nil)
	l := w.OpenLog(flush)
	defer l.Close()
	l.Record(append(entry("a", "1", 0), entry("b", "2", 0)...))
	w.pass(10 * time.Minute)
	w.periodic(l, "b", "2", 0, 3*(flush+time.Second)-2*time.Second)
	require.Equal(t, 1, w.ask("a").Open, "the log is alive again, and not for long enough")
	w.periodic(l, "b", "2", 0, 2*flush)
	require.Zero(t, w.ask("a").Open)
}

func TestALogThatStandsStillIsDoubt(t *testing.T) {
	w := newWorld(t, nil)
	l, idle := w.OpenLog(flush), w.OpenLog(0)
	w.sure()
	l.Record(entry("a", "1", 0))
	idle.Record(nil)
	w.pass(window)
	require.Zero(t, w.Doubt())
	w.pass(time.Millisecond)
	require.Equal(t, 3*flush-time.Millisecond, w.Doubt(), "it stands still now")
	require.Equal(t, "a log stream stands still", w.DoubtReason())
	w.pass(3 * flush)
	require.Zero(t, w.Doubt(), "not for ever: what is open on it is known")
	idle.Record(nil)
	require.Zero(t, w.Doubt(), "it had nothing to say")
	l.Record(entry("a", "1", 0))
	require.Equal(t, 3*flush, w.Doubt(), "what else was held back comes now")
	require.Equal(t, "a log stream stood still", w.DoubtReason())
	w.periodic(l, "a", "1", 0, 3*flush)
	require.Zero(t, w.Doubt())
	l.Close()
	idle.Close()
}

func TestALogThatIsCutIsDoubtAndItsStreamsStayOpenMeanwhile(t *testing.T) {
	for name, streams := range map[string]int{"with streams": 1, "without": 0} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, nil)
			l := w.OpenLog(flush)
			w.sure()
			w.request("a")
			if streams > 0 {
				l.Record(entry("a", "1", 0))
			}
			w.pass(time.Second)
			l.Close()
			l.Close()
			require.Equal(t, 3*flush, w.Doubt())
			require.Equal(t, "a log stream was cut", w.DoubtReason())
			_, doubt, _ := w.Final()
			require.True(t, doubt)
			w.pass(3*flush - time.Millisecond)
			require.Equal(t, streams, w.ask("a").Open)
			require.NotZero(t, w.Doubt())
			w.pass(time.Millisecond)
			require.Zero(t, w.ask("a").Open)
			require.Zero(t, w.Streams())
			require.NotZero(t, w.ask("a").Age)
			require.Zero(t, w.Doubt())
		})
	}
}

func TestAStreamGoesOnOnAnotherLog(t *testing.T) {
	w := newWorld(t, nil)
	l := w.OpenLog(flush)
	w.periodic(l, "a", "1", 5, time.Minute)
	quiet := w.ask("a").Quiet
	l.Close()
	next := w.OpenLog(flush)
	w.periodic(next, "a", "1", 5, time.Minute)
	require.Equal(t, 1, w.Streams())
	require.Equal(t, lastactive.Activity{ID: "a", Quiet: quiet + time.Minute, Open: 1}, w.ask("a"))
	next.Record(end("a", "1", 5))
	require.Zero(t, w.ask("a").Open)
	next.Close()
}

func TestALongerFlushThatIsAnnouncedWithARequestIsDoubtUntilTheLogSaysSo(t *testing.T) {
	w := newWorld(t, nil)
	w.sure()
	w.Announce(flush)
	w.Announce(time.Second)
	require.Zero(t, w.Doubt())
	w.Announce(2 * flush)
	require.Equal(t, 6*flush, w.Doubt())
	require.Equal(t, "Envoy's flush interval is longer than this router was told", w.DoubtReason())
	w.pass(6 * flush)
	require.Zero(t, w.Doubt())
}

func TestALongerFlushThanThisRouterWasToldIsDoubtForAsLongAsTheLogIsOpen(t *testing.T) {
	w := newWorld(t, nil)
	w.sure()
	shorter := w.OpenLog(time.Second)
	unknown := w.OpenLog(0)
	require.Zero(t, w.Doubt())
	l := w.OpenLog(2 * flush)
	w.pass(time.Hour)
	require.Equal(t, 6*flush, w.Doubt())
	require.Equal(t, "Envoy's flush interval is longer than this router was told", w.DoubtReason())
	_, doubt := w.Ask(nil)
	require.NotZero(t, doubt)
	l.Close()
	require.Equal(t, 6*flush, w.Doubt())
	w.pass(6 * flush)
	require.Zero(t, w.Doubt())
	shorter.Close()
	unknown.Close()
}

func TestMoreStreamsThanAreRememberedAreDoubt(t *testing.T) {
	w := newWorld(t, func(o *lastactive.Options) { o.Streams = 2 })
	l := w.OpenLog(flush)
	defer l.Close()
	w.sure()
	for i := range 2 {
		l.Record(entry("a", fmt.Sprint(i), 0))
	}
	require.Zero(t, w.Doubt())
	l.Record(entry("a", "1", 0))
	require.Zero(t, w.Doubt(), "it is remembered already")
	l.Record(entry("b", "2", 0))
	require.Equal(t, 3*flush, w.Doubt())
	require.Equal(t, 2, w.Streams())
	l.Record(end("a", "0", 0))
	l.Record(entry("b", "2", 0))
	require.Equal(t, 1, w.ask("b").Open)
}

func TestAStreamBelongsToOneSandboxAtATime(t *testing.T) {
	w := newWorld(t, nil)
	l := w.OpenLog(flush)
	defer l.Close()
	l.Record(entry("a", "1", 0))
	l.Record(entry("b", "1", 0))
	require.Zero(t, w.ask("a").Open)
	require.Equal(t, 1, w.ask("b").Open)
	require.Equal(t, 1, w.Streams())
}

func TestWhatALogMightHaveSaidAfterThisSideStoppedItIsNotTakenToBeKnown(t *testing.T) {
	w := newWorld(t, nil)
	l := w.OpenLog(flush)
	w.sure()
	l.Record(entry("open", "1", 0))
	w.request("short")
	w.pass(2 * time.Second)
	w.request("who knows")
	w.pass(slack + window - 2*time.Second)
	w.Report(true)
	l.Stop()
	w.pass(time.Minute)
	final, doubt, _ := w.Final()
	require.ElementsMatch(t, []string{"open", "who knows"}, ids(final))
	for _, a := range final {
		require.Zero(t, a.Age, a.ID)
	}
	require.False(t, doubt, "what was open then is known")
}

// A log that stood still when this side ended it has said nothing of what was admitted
// meanwhile.
func TestALogThatStoodStillWhenItWasStoppedLeavesDoubt(t *testing.T) {
	w := newWorld(t, nil)
	l := w.OpenLog(flush)
	w.sure()
	l.Record(entry("open", "1", 0))
	w.pass(2 * time.Second)
	w.request("open, and nobody knows") // Envoy stands still from now on
	w.pass(slack + window)
	require.NotZero(t, w.Doubt())
	l.Stop()
	require.NotZero(t, w.Doubt(), "the log stood still")
	_, doubt, _ := w.Final()
	require.True(t, doubt)
}

// A request of which the log has said nothing yet, or which was open, can have ended while
// the log could not be read, and its end is not told a second time.
func TestWhatCanHaveEndedWhileTheLogCouldNotBeReadWasInUseUntilThen(t *testing.T) {
	// Each breaks the reading of the log, and ends at the moment in which it can be read again.
	gaps := map[string]func(w *world, l *lastactive.Log) *lastactive.Log{
		"cut": func(w *world, l *lastactive.Log) *lastactive.Log {
			w.pass(time.Second)
			l.Close()
			return w.OpenLog(flush)
		},
		"paused": func(w *world, l *lastactive.Log) *lastactive.Log { w.jump(10 * flush); w.Tick(); return l },
		"paused for a moment": func(w *world, l *lastactive.Log) *lastactive.Log {
			w.jump(window - time.Second - tick)
			w.Tick()
			return l
		},
		"stood still": func(w *world, l *lastactive.Log) *lastactive.Log {
			w.pass(10 * flush)
			l.Record(entry("another", "0", 1))
			return l
		},
		"paused and cut": func(w *world, l *lastactive.Log) *lastactive.Log {
			w.jump(10 * flush)
			w.Tick()
			w.Report(false)
			w.pass(time.Second)
			l.Close()
			return w.OpenLog(flush)
		},
	}
	for name, gap := range gaps {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, nil)
			l := w.OpenLog(flush)
			w.sure()
			w.request("known to be short")
			l.Record(append(entry("another", "0", 1), entry("went on", "2", 1)...))
			w.pass(flush)
			l.Record(append(entry("open", "1", 1), entry("went on", "2", 1)...))
			l.Record(append(entry("ended", "3", 1), end("ended", "3", 1)...))
			w.pass(slack + window + 2*time.Second - flush)
			l.Record(append(entry("another", "0", 1), append(entry("open", "1", 1), entry("went on", "2", 1)...)...))
			w.request("not yet told")
			w.pass(time.Second)
			ended := w.ask("ended").Age
			known := w.ask("known to be short").Age
			from := w.now()
			l = gap(w, l)
			lasted := w.now() - from
			for range 10 {
				l.Record(append(entry("another", "0", 1), entry("went on", "2", 1)...))
				w.pass(flush)
			}
			require.Zero(t, w.Doubt())
			since := w.now() - from - lasted
			require.LessOrEqual(t, w.ask("not yet told").Age, since)
			require.LessOrEqual(t, w.ask("not yet told").Quiet, since)
			require.LessOrEqual(t, w.ask("open").Age, since)
			require.LessOrEqual(t, w.ask("open").Quiet, since)
			require.Equal(t, known+lasted+since, w.ask("known to be short").Age, "that it was short had been certain")
			require.Equal(t, ended+lasted+since, w.ask("ended").Age, "its end had been told")
			require.Zero(t, w.ask("went on").Age)
			require.Greater(t, w.ask("went on").Quiet, since+lasted, "its counter says that nothing has moved")
		})
	}
}

// While it is not known what is open, anything can end in a gap: also what was admitted by
// the router before this one.
func TestWhatEndsInAGapWhileThereIsDoubtMayBeAnything(t *testing.T) {
	for name, gap := range map[string]func(w *world, l *lastactive.Log){
		"cut":    func(_ *world, l *lastactive.Log) { l.Close() },
		"paused": func(w *world, _ *lastactive.Log) { w.jump(flush); w.Tick() },
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, nil)
			w.request("short")
			l := w.OpenLog(flush)
			w.pass(2 * flush)
			gap(w, l)
			at := w.now()
			w.pass(4 * flush)
			require.Zero(t, w.Doubt())
			for _, id := range []string{"short", "never heard of"} {
				require.Equal(t, w.now()-at, w.ask(id).Age, id)
				require.Equal(t, w.now()-at, w.ask(id).Quiet, id)
			}
		})
	}
}

func TestAGapLeavesThoseAloneWhoseUseIsKnown(t *testing.T) {
	w := newWorld(t, func(o *lastactive.Options) { o.Size = 1 })
	w.sure()
	w.request("dropped long ago")
	w.pass(slack + window + 2*time.Second)
	w.request("in its place")
	dropped := w.ask("dropped long ago").Age
	w.OpenLog(flush).Close()
	at := w.now()
	w.pass(time.Minute)
	require.Equal(t, dropped+time.Minute, w.ask("dropped long ago").Age)
	require.LessOrEqual(t, w.ask("in its place").Age, w.now()-at)
}

// When Envoy has ended its log is cut, and nothing is open any more.
func TestTheEndOfEnvoyIsNoDoubtIfItWasKnownWhatWasOpen(t *testing.T) {
	for name, c := range map[string]struct {
		before time.Duration // since the start
		doubt  bool
	}{"known": {3 * flush, false}, "this router had just started": {flush, true}} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, nil)
			l := w.OpenLog(flush)
			w.periodic(l, "open", "1", 0, c.before)
			l.Record(entry("open", "1", 0))
			w.request("not yet told")
			w.pass(time.Second)
			w.Report(true)
			l.Close()
			w.EnvoyEnded()
			at := w.now()
			w.pass(slack)
			require.NotZero(t, w.Doubt())
			final, doubt, handover := w.Final()
			require.Equal(t, c.doubt, doubt)
			require.False(t, handover)
			require.ElementsMatch(t, []string{"open", "not yet told"}, ids(final))
			for _, a := range final {
				require.LessOrEqual(t, a.Age, w.now()-at, a.ID)
			}
		})
	}
}

// Envoy drops entries when a router does not read for long. The log goes on, and says
// something so rarely that each time it might have stood still.
func TestAStreamWhoseEndWasLostIsNotOpenForEverHoweverRarelyTheLogSaysSomething(t *testing.T) {
	for _, every := range []time.Duration{2 * time.Second, flush, window + time.Second, 10 * time.Second, time.Minute} {
		t.Run(every.String(), func(t *testing.T) {
			w := newWorld(t, nil)
			l := w.OpenLog(flush)
			defer l.Close()
			w.sure()
			l.Record(entry("a", "1", 0)) // its end is never told
			named := w.now()
			lost := time.Duration(0) // since when it is not open
			for i := range 200 {
				w.pass(every)
				l.Record(end("b", fmt.Sprint("b", i), 0))
				if a := w.ask("a"); a.Open == 0 && lost == 0 {
					lost = w.now()
				}
			}
			require.NotZero(t, lost)
			require.GreaterOrEqual(t, lost-named, 3*(flush+time.Second), "it would have been named again")
			w.pass(3 * flush)
			l.Record(nil)
			require.Zero(t, w.Doubt())
		})
	}
}

func TestAPauseWhileTheLogIsSlowerThanItShouldBeIsAGapForWhatItHadNotShownYet(t *testing.T) {
	w := newWorld(t, nil)
	w.sure()
	l := w.OpenLog(3 * flush)
	w.request("a")
	w.pass(2 * flush) // it is not due to be shown
	w.jump(time.Minute)
	w.Tick()
	over := w.now()
	w.pass(10 * time.Minute)
	l.Close()
	w.pass(time.Minute)
	require.LessOrEqual(t, w.ask("a").Age, w.now()-over)
}
