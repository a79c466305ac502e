package lastactive

import (
	"context"
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/api/activity"
	"github.com/berth-sandbox/berth/lastactive/look"
)

func TestShortRequestIsUseUntilTheNextLook(t *testing.T) {
	inWorld(t, func(w *world) {
		w.change(func() { w.took = 100 * time.Millisecond }) // from the look after the next on they are 10 s apart
		w.passes(12 * time.Second)
		before := w.looks()
		w.begin("a", podA).Read()
		for w.looks() == before {
			require.Zero(w, w.age("a"))
			w.passes(100 * time.Millisecond)
		}
		w.passes(200 * time.Millisecond)
		require.Equal(w, w.options.Now()-w.lookBegan(before)-w.took, w.age("a"))
		w.passes(10 * time.Second)
		require.Equal(w, w.options.Now()-w.lookBegan(before+1)-w.took, w.age("a"), "the look before could not show it yet")
		w.passes(30 * time.Second)
		require.Equal(w, w.options.Now()-w.lookBegan(before+1)-w.took, w.age("a"), "later looks change nothing")
	})
}

// Envoy may open a connection a connect window after its answer was read, and the request may have ended before the
// next look, if that comes late.
// Invariant: I4
func TestRequestThatNoLookHasShownIsUse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, func(*Options) {})
		looks := func() { require.NoError(t, w.tracker.Look(t.Context())) }
		looks()
		w.begin("a", podA).Read()
		for range 2 {
			w.passes(time.Second)
			looks()
		}
		w.passes(30 * time.Second) // the router stands still, and the request begins and ends
		looks()
		require.Less(t, w.age("a"), time.Second)
	})
}

func TestLookDoesNotProveAnAnswerReadMeanwhile(t *testing.T) {
	inWorld(t, func(w *world) {
		w.change(func() { w.took = 8 * time.Millisecond })
		before := w.looks()
		e := w.begin("a", podA)
		for w.looks() == before {
			w.passes(time.Millisecond)
		}
		w.passes(6 * time.Millisecond) // what is open has been shown, the answer of the look is on its way
		e.Read()
		w.passes(5 * time.Millisecond)
		require.Zero(w, w.age("a"))
		w.passes(2 * time.Second)
		require.NotZero(w, w.age("a"))
	})
}

// Invariant: I4
func TestUnreadAnswerIsUseOfOneSandbox(t *testing.T) {
	inWorld(t, func(w *world) {
		w.begin("a", podA).Read()
		e := w.begin("b", podB)
		w.passes(time.Hour)
		activities, err := w.ask("a", "b")
		require.NoError(w, err)
		require.Len(w, activities, 2)
		require.Greater(w, activities[0].Age, 59*time.Minute)
		require.Equal(w, Activity{ID: "b", Addr: addr(podB), Kind: activity.Admission, Unread: 1}, activities[1])
		e.Read()
		w.passes(3 * time.Second)
		require.InDelta(w, 2*time.Second, w.age("b"), float64(time.Second))
	})
}

func TestOpenRequestIsUseUntilALookMissesIt(t *testing.T) {
	inWorld(t, func(w *world) {
		w.begin("a", podA).Read()
		w.opens(podA, 1)
		w.opens("10.0.0.1:9000", 2) // another port of the same sandbox
		w.passes(time.Hour)
		require.Equal(w, &Activity{ID: "a", Addr: addr(podA), Open: 3, Kind: activity.Open}, w.use("a"))
		w.opens(podA, 0)
		w.passes(time.Minute)
		require.Zero(w, w.age("a"))
		w.opens("10.0.0.1:9000", 0)
		ended := w.options.Now()
		w.passes(time.Minute)
		require.InDelta(w, w.options.Now()-ended, w.age("a"), float64(1100*time.Millisecond))
		require.Equal(w, activity.Open, w.use("a").Kind)
	})
}

// Invariant: I4
func TestFailedLooksProveNothing(t *testing.T) {
	inWorld(t, func(w *world) {
		e := w.begin("a", podA)
		w.change(func() { w.err = errStopped })
		e.Read()
		w.passes(time.Minute)
		require.Equal(w, &Activity{ID: "a", Addr: addr(podA), Kind: activity.Unknown}, w.use("a"))
		require.Equal(w, errStopped.Error(), w.tracker.LookError())
		r := w.tracker.Report(false)
		require.Equal(w, Report{Activities: r.Activities, LookError: errStopped.Error(), Took: r.Took}, r)
		_, err := w.ask("a")
		require.ErrorIs(w, err, errStopped)
		w.change(func() { w.err = nil })
		w.passes(2 * time.Second)
		require.Empty(w, w.tracker.LookError())
		require.NotZero(w, w.age("a"))
	})
}

func TestSlowLooksAreFurtherApart(t *testing.T) {
	for took, every := range map[time.Duration]time.Duration{
		2 * time.Millisecond: time.Second + 2*time.Millisecond, 100 * time.Millisecond: 10*time.Second + 100*time.Millisecond,
		time.Second: 16 * time.Second,
	} {
		inWorld(t, func(w *world) {
			w.change(func() { w.took = took })
			w.passes(time.Minute)
			n := w.looks()
			require.Equal(w, every, w.lookBegan(n-1)-w.lookBegan(n-2))
		})
	}
}

func TestLooksOfAskBeginApartAndAfterIt(t *testing.T) {
	inWorld(t, func(w *world) {
		for range 50 {
			w.change(func() { w.took = 50 * time.Millisecond })
			w.passes(time.Duration(w.looks()*7%40) * time.Millisecond)
			asked, before := w.options.Now(), w.looks()
			_, err := w.ask("a")
			require.NoError(t, err)
			first, second := w.lookBegan(before), w.lookBegan(w.looks()-1)
			require.GreaterOrEqual(w, first, asked)
			require.Greater(w, second-first-50*time.Millisecond, 100*time.Millisecond)
			require.LessOrEqual(w, w.options.Now()-asked, 1100*time.Millisecond)
		}
	})
}

// Looks for questions and those that are taken all the time follow one another.
func TestLooksTakeTurns(t *testing.T) {
	inWorld(t, func(w *world) {
		var looking atomic.Int32
		w.change(func() {
			w.tracker.o.Look = func(ctx context.Context) (look.Look, error) {
				defer looking.Add(-1)
				require.EqualValues(w, 1, looking.Add(1))
				return w.look(ctx)
			}
		})
		var asking sync.WaitGroup
		for i := range 100 {
			asking.Go(func() {
				_, err := w.ask(fmt.Sprint(i))
				require.NoError(w, err)
			})
		}
		asking.Wait()
	})
}

func TestSecondLookSeesARetriedRequest(t *testing.T) {
	inWorld(t, func(w *world) {
		w.begin("a", podA).Read()
		w.passes(time.Minute)
		before := w.looks()
		w.change(func() { // a retry waits: it is counted nowhere until the second look of the question
			w.tracker.o.Look = func(ctx context.Context) (look.Look, error) {
				l, err := w.look(ctx)
				if w.looks() == before+2 {
					l.Hosts[host(podA)] = 1
				}
				return l, err
			}
		})
		activities, err := w.ask("a")
		require.NoError(w, err)
		require.Equal(w, []Activity{{ID: "a", Addr: addr(podA), Open: 1, Kind: activity.Open}}, activities)
	})
}

// Another router of this gateway has admitted the request.
func TestOpenAddressIsUseOfItsSandbox(t *testing.T) {
	inWorld(t, func(w *world) {
		w.opens(podA, 1)
		w.passes(2 * time.Second)
		require.Empty(w, w.tracker.Report(false).Activities, "no sandbox has a route to it")
		w.tracker.Expect("a", addr(podA), 0)
		w.tracker.Expect("b", addr(podB), 0)
		open := []Activity{{ID: "a", Addr: addr(podA), Open: 1, Kind: activity.Open}}
		require.Equal(w, open, w.tracker.Report(false).Activities, "without another look")
		activities, err := w.ask("a", "b")
		require.NoError(w, err)
		require.Equal(w, open, activities)
		w.change(func() { clear(w.open) })
		before := w.looks()
		for w.looks() == before {
			require.NotEmpty(w, w.tracker.Report(false).Activities)
			w.passes(10 * time.Millisecond)
		}
		w.passes(10 * time.Millisecond)
		require.Len(w, w.tracker.Report(false).Activities, 1, "it was open until this look at most")
		w.passes(2 * time.Second)
		require.Empty(w, w.tracker.Report(false).Activities)
	})
}

// The leader may not have received the report. Its next snapshot has the route.
// Invariant: I4
func TestEndedUseOfAnotherRouterIsRemembered(t *testing.T) {
	inWorld(t, func(w *world) {
		w.tracker.Expect("a", addr(podA), 0)
		w.opens(podA, 1)
		w.passes(2 * time.Second)
		w.tracker.Report(false)
		w.change(func() { clear(w.open) })
		ended := w.options.Now()
		w.passes(2 * time.Second)
		w.tracker.Report(false) // is lost
		w.passes(10 * time.Minute)
		w.tracker.Expect("a", addr(podA), 0)
		w.tracker.Retain(func(id string) bool { return id == "a" })
		all := w.tracker.Report(true).Activities
		require.Len(w, all, 1)
		require.InDelta(w, w.options.Now()-ended, all[0].Age, float64(1100*time.Millisecond))
		asked, err := w.ask("a")
		require.NoError(w, err)
		require.Len(w, asked, 1)
	})
}

// Invariant: I4
func TestSandboxWithoutARouteMayBeInUse(t *testing.T) {
	inWorld(t, func(w *world) {
		activities, err := w.ask("a")
		require.NoError(w, err)
		require.Equal(w, []Activity{{ID: "a", Kind: activity.Unknown}}, activities)
		e, refusal := w.tracker.Begin(key("a"), netip.MustParseAddrPort(podA), false)
		require.Nil(w, e)
		require.Equal(w, Refusal{Again, lookUpAgain}, refusal)
		w.tracker.Expect("a", addr(podB), 0)
		e, _ = w.tracker.Begin(key("a"), netip.MustParseAddrPort(podA), false)
		require.Nil(w, e, "its route has another address")
	})
}

// A question may arrive before the release, and be answered after it.
func TestQuestionAfterAReleaseAddsNoEntry(t *testing.T) {
	inWorld(t, func(w *world) {
		w.tracker.Expect("a", addr(podA), 1024)
		w.tracker.Forget("a")
		_, err := w.ask("a")
		require.NoError(w, err)
		w.tracker.Begin(key("a"), netip.MustParseAddrPort(podA), false)
		require.Zero(w, w.tracker.Len())
	})
}

func TestRequestThroughAnotherRouterIsUse(t *testing.T) {
	inWorld(t, func(w *world) {
		w.begin("a", podA).Read()
		w.passes(time.Minute)
		w.tracker.Report(false)
		w.opens(podA, 1)
		w.passes(2 * time.Second)
		require.Equal(w, []Activity{{ID: "a", Addr: addr(podA), Open: 1, Kind: activity.Open}}, w.tracker.Report(false).Activities)
	})
}

func TestReportHasOpenAndEndedUse(t *testing.T) {
	inWorld(t, func(w *world) {
		ids := func(all bool) (ids []string) {
			for _, a := range w.tracker.Report(all).Activities {
				ids = append(ids, fmt.Sprint(a.ID, a.Age == 0))
			}
			return ids
		}
		w.begin("a", podA).Read()
		e := w.begin("b", podB)
		require.ElementsMatch(w, []string{"atrue", "btrue"}, ids(false))
		w.passes(time.Minute) // many looks, of which only one has ended the use of a
		require.ElementsMatch(w, []string{"afalse", "btrue"}, ids(false))
		require.ElementsMatch(w, []string{"btrue"}, ids(false))
		e.Read()
		w.passes(2 * time.Second)
		w.begin("b", podB)
		require.ElementsMatch(w, []string{"btrue"}, ids(false))
		require.ElementsMatch(w, []string{"afalse", "btrue"}, ids(true))
		r := w.tracker.Report(false)
		require.Equal(w, "envoy-1", r.Gateway)
		require.Equal(w, w.lookBegan(w.looks()-1), r.Began)
		require.Equal(w, 2*time.Millisecond, r.Took)
		w.passes(2 * time.Second)
		require.Len(w, w.tracker.LookDone(), 1)
	})
}

func TestCanceledRequestIsNoUse(t *testing.T) {
	inWorld(t, func(w *world) {
		w.begin("a", podA).Cancel()
		w.begin("b", podB).Read()
		w.passes(time.Minute)
		require.Nil(w, w.use("a"))
		before := w.age("b")
		w.begin("b", podB).Cancel()
		w.passes(2 * time.Second)
		require.Equal(w, before+2*time.Second, w.age("b"))
	})
}

func TestFinalReportCountsTheConnectWindow(t *testing.T) {
	for name, c := range map[string]struct {
		silent time.Duration
		ended  bool
		inUse  bool
	}{
		"just read":                       {silent: 0, inUse: true},
		"less than the window ago":        {silent: window - 2*time.Second, inUse: true},
		"longer ago":                      {silent: 2*window + 2*time.Second},
		"just read, but Envoy has ended":  {silent: 0, ended: true},
		"and reported to be idle already": {silent: 2 * time.Second, inUse: true},
	} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, func(w *world) {
				w.begin("a", podA).Read()
				w.passes(c.silent)
				w.tracker.Report(false)
				w.change(func() { w.ended = c.ended })
				before := w.looks()
				ctx, cancel := context.WithTimeout(w.Context(), time.Minute)
				defer cancel()
				r := w.tracker.FinalReport(ctx)
				require.Equal(w, before+1, w.looks())
				require.Equal(w, w.lookBegan(before), r.Began)
				inUse := false
				for _, a := range r.Activities {
					inUse = inUse || a.ID == "a" && a.Age == 0
				}
				require.Equal(w, c.inUse, inUse)
			})
		})
	}
}

func TestFinalReportNamesTheLookError(t *testing.T) {
	inWorld(t, func(w *world) {
		w.change(func() { w.err = errStopped })
		ctx, cancel := context.WithTimeout(w.Context(), time.Second)
		defer cancel()
		before := w.looks()
		require.Contains(w, w.tracker.FinalReport(ctx).LookError, errStopped.Error())
		require.LessOrEqual(w, w.looks()-before, 12)
		w.change(func() { w.err = nil })
		ctx, cancel = context.WithTimeout(w.Context(), time.Second)
		defer cancel()
		require.Empty(w, w.tracker.FinalReport(ctx).LookError)
	})
}

func TestCanceledAskIsNoLookError(t *testing.T) {
	inWorld(t, func(w *world) {
		w.passes(500 * time.Millisecond)
		w.change(func() { w.took = 200 * time.Millisecond })
		ctx, cancel := context.WithTimeout(w.Context(), 100*time.Millisecond)
		defer cancel()
		_, err := w.tracker.Ask(ctx, nil)
		require.Error(w, err)
		require.Empty(w, w.tracker.LookError())
	})
}

func TestAskWithoutALookEndsInTime(t *testing.T) {
	inWorld(t, func(w *world) {
		w.change(func() { w.took = time.Minute })
		w.passes(2 * time.Second)
		ctx, cancel := context.WithTimeout(w.Context(), time.Second)
		defer cancel()
		_, err := w.tracker.Ask(ctx, []string{"a"})
		require.ErrorContains(w, err, "no look in time")
	})
}

func TestRetainKeepsWhatIsKnownOrInUse(t *testing.T) {
	inWorld(t, func(w *world) {
		w.begin("a", podA).Read()
		w.begin("b", podB)
		w.begin("c", "10.0.0.3:80").Read()
		w.passes(2 * time.Second)
		w.tracker.Retain(func(id string) bool { return id == "a" })
		require.NotNil(w, w.use("a"))
		require.NotNil(w, w.use("b"), "its answer is unread")
		require.Nil(w, w.use("c"))
	})
}

func TestReleasedSandboxIsForgottenAtOnce(t *testing.T) {
	inWorld(t, func(w *world) {
		e := w.begin("a", podA)
		w.tracker.Forget("a")
		e.Read()
		require.Zero(w, w.tracker.Len())
		w.passes(2 * time.Second)
		require.Empty(w, w.tracker.Report(true).Activities)

		w.begin("b", podA).Read() // the next sandbox at that address
		w.passes(2 * time.Second)
		require.NotZero(w, w.age("b"))
		w.tracker.Forget("a")
		require.Equal(w, 1, w.tracker.Len())
	})
}

func TestMissingOptionsAreErrors(t *testing.T) {
	for name, change := range map[string]func(*Options){
		"no clock": func(o *Options) { o.Now = nil }, "no look": func(o *Options) { o.Look = nil }, "no window": func(o *Options) { o.ConnectWindow = 0 },
	} {
		t.Run(name, func(t *testing.T) {
			o := Options{Now: func() time.Duration { return 1 }, Look: (&world{}).look, ConnectWindow: window}
			change(&o)
			_, err := New(o)
			require.Error(t, err)
		})
	}
}

// Requests begin and end at any moment of a look, in all orders that the race detector's
// scheduler finds, and none is missed: admission, look at the flag, read.
func TestAskSeesEveryAdmissionBeforeTheFlag(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, func(*Options) {})
		w.took = 0
		w.tracker.Expect("a", addr(podA), 0)
		for range 2000 {
			var admitted, set bool
			var mu sync.Mutex // the flag, as a route cache has it
			var e *Entry
			var racing sync.WaitGroup
			racing.Go(func() {
				begun, _ := w.tracker.Begin(key("a"), netip.MustParseAddrPort(podA), false)
				require.NotNil(t, begun)
				mu.Lock()
				admitted = !set
				mu.Unlock()
				if admitted {
					e = begun
				} else {
					begun.Cancel()
				}
			})
			racing.Go(func() {
				mu.Lock()
				set = true
				mu.Unlock()
				w.tracker.Look(t.Context())
			})
			racing.Wait()
			if admitted {
				require.Zero(t, w.age("a"))
				e.Read()
			}
			time.Sleep(2 * time.Second)
			w.tracker.Look(t.Context())
		}
	})
}

func TestBeginOfAListedPortDoesNotAllocate(t *testing.T) {
	w := newWorld(t, func(*Options) {})
	w.opens(podA, 1)
	to := netip.MustParseAddrPort(podA)
	w.begin("a", podA).Read()
	w.tracker.Look(t.Context())
	require.Zero(t, testing.AllocsPerRun(1000, func() {
		e, _ := w.tracker.Begin(key("a"), to, false)
		e.Read()
	}))
}
