package lastactive

import (
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/internal/rate"
)

// atOnce is how many requests a limit of the rate lets pass at once.
const atOnce = 2000

// try begins a request to a port, and returns why that is refused. Envoy has read its answer.
func (w *world) try(id, to string) Refusal {
	e, refusal := w.tracker.Begin(key(id), netip.MustParseAddrPort(to), false)
	if e != nil {
		e.Read()
	}
	return refusal
}

func withRate(perSecond float64) func(*Options) {
	return func(o *Options) { o.Rate = rate.PerSecond(perSecond) }
}

// Invariant: P25
func TestRateOfEachSandboxIsBounded(t *testing.T) {
	inWorldWith(t, withRate(10), func(w *world) {
		w.opens(podA, 0)
		w.opens(podB, 0)
		w.passes(2 * time.Second) // Envoy lists the ports
		w.tracker.Expect("a", addr(podA), 0)
		w.tracker.Expect("b", addr(podB), 0)
		for range atOnce {
			require.Zero(w, w.try("a", podA))
		}
		for range 3 {
			require.Equal(w, Refusal{TooFast, 100 * time.Millisecond}, w.try("a", podA))
		}
		require.Zero(w, w.try("b", podB), "its neighbour is not concerned")
		w.passes(250 * time.Millisecond)
		require.Zero(w, w.try("a", podA))
		require.Zero(w, w.try("a", podA))
		require.Equal(w, Refusal{TooFast, 50 * time.Millisecond}, w.try("a", podA))
	})
}

// A route that comes again, as after an eviction or with a snapshot, refills no bucket.
// Invariant: P25
func TestRepeatedRouteRefillsNoLimit(t *testing.T) {
	inWorldWith(t, withRate(0.01), func(w *world) {
		w.opens(podA, 0)
		w.passes(2 * time.Second)
		for range atOnce {
			w.tracker.Expect("a", addr(podA), 0)
			require.Zero(w, w.try("a", podA))
		}
		w.tracker.Expect("a", addr(podA), 0)
		w.tracker.Retain(func(string) bool { return true })
		require.Equal(w, TooFast, w.try("a", podA).Why)
	})
}

// Invariant: P25
func TestRequestThatIsNotAdmittedCostsNothing(t *testing.T) {
	inWorldWith(t, withRate(0.01), func(w *world) {
		w.opens(podA, 0)
		w.passes(2 * time.Second)
		w.tracker.Expect("a", addr(podA), 0)
		for range 2 * atOnce {
			e, refusal := w.tracker.Begin(key("a"), netip.MustParseAddrPort(podA), false)
			require.Zero(w, refusal)
			e.Cancel()
		}
		const elsewhere = "10.0.0.1:81"
		taken := 0
		for range 2 * atOnce { // Envoy's threads do not know the port, so most must wait
			if refusal := w.try("a", elsewhere); refusal.Why == Begun {
				taken++
			} else {
				require.Equal(w, Again, refusal.Why)
			}
		}
		require.Equal(w, maxFirst, taken)
		for range atOnce - taken {
			require.Zero(w, w.try("a", podA))
		}
		require.Equal(w, TooFast, w.try("a", podA).Why)
	})
}

// Invariant: I4, P25
func TestRefusedRequestsAreNoUse(t *testing.T) {
	inWorldWith(t, withRate(0.001), func(w *world) {
		w.opens(podA, 0)
		w.passes(2 * time.Second)
		w.tracker.Expect("a", addr(podA), 0)
		for range atOnce {
			require.Zero(w, w.try("a", podA))
		}
		w.passes(10 * time.Second)
		idle := w.age("a")
		for range 100 {
			require.Equal(w, TooFast, w.try("a", podA).Why)
			w.passes(time.Second)
		}
		require.Equal(w, idle+100*time.Second, w.age("a"))
	})
}

// Invariant: P25
func TestOpenRequestsOfASandboxAreBounded(t *testing.T) {
	inWorldWith(t, func(o *Options) { o.MaxOpen = 3 }, func(w *world) {
		w.opens(podA, 1)
		w.opens("10.0.0.1:81", 1)
		w.tracker.Expect("a", addr(podA), 0)
		w.tracker.Expect("b", addr(podB), 0)
		w.passes(2 * time.Second)
		require.Zero(w, w.try("a", podA))
		w.opens(podA, 2) // on two ports together as many as it may have
		w.opens(podB, 0)
		require.Zero(w, w.try("a", podA), "no look has shown it yet")
		w.passes(2 * time.Second)
		require.Equal(w, Refusal{Why: TooManyOpen}, w.try("a", podA))
		require.Equal(w, Refusal{Why: TooManyOpen}, w.try("a", "10.0.0.1:82"))
		require.Zero(w, w.try("b", podB))
		w.change(func() { w.err = errStopped })
		w.passes(2 * time.Second)
		require.Zero(w, w.try("a", podA), "what cannot be seen has no bound")
		w.change(func() { w.err = nil })
		w.passes(2 * time.Second)
		require.Equal(w, TooManyOpen, w.try("a", podA).Why)
		w.opens(podA, 1)
		w.passes(2 * time.Second)
		require.Zero(w, w.try("a", podA))
	})
}

func TestLimitedBeginDoesNotAllocate(t *testing.T) {
	w := newWorld(t, func(o *Options) { o.Rate, o.MaxOpen = rate.PerSecond(1_000_000), 1000 })
	w.opens(podA, 1)
	to := netip.MustParseAddrPort(podA)
	w.begin("a", podA).Read()
	require.NoError(t, w.tracker.Look(t.Context()))
	require.Zero(t, testing.AllocsPerRun(1000, func() {
		e, _ := w.tracker.Begin(key("a"), to, false)
		e.Read()
	}))
}
