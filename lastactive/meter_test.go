package lastactive

import (
	"errors"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/api/activity"
	"github.com/berth-sandbox/berth/lastactive/sockets"
)

// least is how many bytes a minute are use in these tests.
const least = 1024

// socket sets how many bytes have moved over a connection.
func (w *world) socket(cookie uint64, pod string, bytes uint64) {
	w.change(func() {
		s := sockets.Socket{Remote: netip.MustParseAddrPort(pod), Cookie: cookie, Bytes: bytes}
		for i := range w.sockets {
			if w.sockets[i].Cookie == cookie {
				w.sockets[i] = s
				return
			}
		}
		w.sockets = append(w.sockets, s)
	})
}

// openCounted is a connection over which bytes count.
func (w *world) openCounted() {
	w.Helper()
	w.tracker.Expect("a", addr(podA), least)
	e, _ := w.tracker.Begin(key("a"), netip.MustParseAddrPort(podA), false)
	require.NotNil(w, e)
	w.opens(podA, 1)
	e.Read()
}

func TestConnectionCountsWhileEnoughBytesMove(t *testing.T) {
	for name, c := range map[string]struct {
		each  uint64        // so many bytes
		every time.Duration // so often
		inUse bool
	}{
		"only pinged":   {20, 30 * time.Second, false},
		"just too few":  {least/60 - 1, time.Second, false},
		"just enough":   {least/60 + 1, time.Second, true},
		"in bursts":     {least, time.Minute, true},
		"in two halves": {600, 31 * time.Second, true},
		"late in each":  {1000, 55 * time.Second, true},
		"many":          {1 << 30, time.Second, true},
	} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, func(w *world) {
				w.openCounted()
				w.socket(1, podA, 0)
				w.passes(2 * time.Second)
				oldest := time.Duration(0)
				for i := range uint64(10 * time.Minute / c.every) {
					w.socket(1, podA, i*c.each)
					for range c.every / time.Second {
						w.passes(time.Second)
						oldest = max(oldest, w.age("a"))
					}
				}
				require.Equal(w, c.inUse, oldest <= 62*time.Second, oldest)
				if c.inUse {
					require.Equal(w, activity.Bytes, w.use("a").Kind)
				}
			})
		})
	}
}

func TestConnectionAtTheFirstReadingIsInUse(t *testing.T) {
	inWorld(t, func(w *world) {
		w.openCounted()
		w.socket(1, podA, 1)
		w.passes(900 * time.Millisecond)
		w.tracker.Report(false)
		w.passes(30 * time.Second)
		require.NotZero(w, w.age("a"))
		w.socket(2, podA, 1<<30) // that a later one begins is no use but for its admission
		w.passes(5 * time.Second)
		require.Greater(w, w.age("a"), 25*time.Second)
		w.socket(2, podA, 1<<30+least)
		w.passes(2 * time.Second)
		require.Less(w, w.age("a"), 3*time.Second)
	})
}

// A router that has just started finds connections of which it does not know when bytes last moved.
// Invariant: I4
func TestBytesBeforeTheFirstReadingMayBeUse(t *testing.T) {
	inWorld(t, func(w *world) {
		w.opens(podA, 1)
		w.socket(1, podA, 1<<30)
		w.passes(time.Minute)
		w.tracker.Expect("a", addr(podA), least)
		w.passes(time.Second)
		require.Equal(w, activity.Bytes, w.use("a").Kind)
		first := w.age("a")
		require.LessOrEqual(w, first, time.Second)
		w.passes(time.Minute) // no byte has moved since
		require.GreaterOrEqual(w, w.age("a"), first+time.Minute-time.Second)
	})
}

func TestCookiesDistinguishConnections(t *testing.T) {
	inWorld(t, func(w *world) {
		w.openCounted()
		w.socket(1, podA, 0)
		w.passes(2 * window)
		for i := range uint64(10) { // each too few, together enough
			w.socket(10+i, podA, least/4)
		}
		w.socket(99, podB, 1<<30) // another pod's
		w.passes(5 * time.Second)
		require.Greater(w, w.age("a"), 5*time.Second)
	})
}

func TestUnreadableSocketsKeepOpenConnectionsInUse(t *testing.T) {
	inWorld(t, func(w *world) {
		w.openCounted()
		w.change(func() { w.blocked = errors.New("no netlink") })
		w.passes(time.Hour)
		require.Equal(w, &Activity{ID: "a", Addr: addr(podA), Open: 1, Kind: activity.Unknown}, w.use("a"))
		require.Empty(w, w.tracker.LookError(), "other sandboxes are not affected")
		w.opens(podA, 0)
		w.passes(2 * time.Second)
		require.NotZero(w, w.age("a"))
	})
}

func TestSocketsAreReadOnlyIfBytesCount(t *testing.T) {
	inWorld(t, func(w *world) {
		w.begin("b", podB).Read()
		w.opens(podB, 1)
		w.passes(time.Minute)
		_, err := w.ask("b")
		require.NoError(w, err)
		require.Zero(w, w.read)
		w.tracker.Expect("a", addr(podA), least)
		_, err = w.ask("a")
		require.NoError(w, err)
		require.NotZero(w, w.read)
	})
}

// The router before it has opened the connection.
func TestExpectedRouteCountsBytesBeforeAnyRequest(t *testing.T) {
	inWorld(t, func(w *world) {
		w.opens(podA, 1)
		w.tracker.Expect("a", addr(podA), least)
		for i := range uint64(60) {
			w.socket(1, podA, i*least)
			w.passes(10 * time.Second)
		}
		require.Less(w, w.age("a"), 15*time.Second)
		w.opens(podA, 0)
		w.passes(30 * time.Second)
		activities, err := w.ask("a")
		require.NoError(w, err)
		require.InDelta(w, 30*time.Second, activities[0].Age, float64(15*time.Second))
	})
}

func TestOpenRequestWithoutASocketIsUse(t *testing.T) {
	inWorld(t, func(w *world) {
		w.openCounted()
		w.passes(time.Hour)
		require.Equal(w, &Activity{ID: "a", Addr: addr(podA), Open: 1, Kind: activity.Unknown}, w.use("a"))
	})
}

// From here on no router counts its bytes.
func TestFinalReportKeepsOpenConnectionsInUse(t *testing.T) {
	inWorld(t, func(w *world) {
		w.openCounted()
		w.socket(1, podA, 0)
		w.passes(time.Hour)
		require.NotZero(w, w.age("a"))
		w.tracker.Report(true)
		last := w.tracker.FinalReport(w.Context())
		require.Len(w, last.Activities, 1)
		require.Zero(w, last.Activities[0].Age)
		require.Equal(w, 1, last.Activities[0].Open)
	})
}

func TestConnectionIsIdleFromItsLastBytes(t *testing.T) {
	inWorld(t, func(w *world) {
		w.openCounted()
		for i := range uint64(30) { // two kilobytes a minute
			w.socket(1, podA, 340*i)
			w.passes(10 * time.Second)
		}
		w.socket(1, podA, 340*30+least)
		w.passes(2 * time.Second)
		for range 300 {
			before := w.age("a")
			w.passes(time.Second)
			require.Greater(w, w.age("a"), before)
		}
	})
}
