package lastactive

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/lastactive/look"
)

func TestPortsOfASandboxAreBounded(t *testing.T) {
	inWorld(t, func(w *world) {
		w.tracker.Expect("a", addr(podA), 0)
		begin := func(port int) bool {
			e, refusal := w.tracker.Begin(key("a"), netip.AddrPortFrom(addr(podA), uint16(port)), false)
			if e != nil {
				e.Read()
			}
			require.Zero(w, refusal.Wait)
			return e != nil
		}
		for port := range maxPorts {
			require.True(w, begin(1+port))
			w.opens(fmt.Sprintf("10.0.0.1:%d", 1+port), 0)
		}
		require.False(w, begin(60_000))
		require.True(w, begin(1), "again")
		w.passes(2 * time.Second) // Envoy has listed them
		require.False(w, begin(60_000))
		require.True(w, begin(1))
		w.begin("b", podB).Read() // is not concerned
		w.change(func() { clear(w.open) })
		w.passes(2 * time.Second)
		require.True(w, begin(60_000))
	})
}

func TestFirstRequestsAboveTheBoundWait(t *testing.T) {
	inWorld(t, func(w *world) {
		w.tracker.Expect("a", addr(podA), 0)
		begin := func(to string, http2 bool, n int) (admitted int, wait time.Duration) {
			for range n {
				e, refusal := w.tracker.Begin(key("a"), netip.MustParseAddrPort(to), http2)
				if e != nil {
					e.Read()
					admitted++
				}
				wait = max(wait, refusal.Wait)
			}
			return admitted, wait
		}
		admitted, wait := begin(podA, false, 10_000)
		require.Equal(w, maxFirst, admitted)
		require.Equal(w, firstRequestTime, wait)
		admitted, wait = begin("10.0.0.1:81", false, 10_000)
		require.Equal(w, minFirst, admitted, "the sandbox has one bound, but each port has a few")
		require.Equal(w, firstRequestTime, wait)
		w.begin("b", podB).Read() // is not concerned
		w.passes(wait)
		admitted, _ = begin(podA, false, 10_000)
		require.Equal(w, 10_000, admitted, "all threads of Envoy know the port")
		admitted, _ = begin("10.0.0.1:82", false, 10_000)
		require.Equal(w, minFirst, admitted, "there was no look")
		w.opens(podA, 1)
		w.passes(2 * time.Second)
		admitted, _ = begin(podA, false, 10_000)
		require.Equal(w, 10_000, admitted, "Envoy lists it")
		admitted, _ = begin(podA, true, 10_000)
		require.Equal(w, maxFirst, admitted, "but not for HTTP/2")
	})
}

// A sandbox that gets many requests a second from its first one on is never refused.
func TestBusySandboxMayUseNewPorts(t *testing.T) {
	inWorld(t, func(w *world) {
		w.tracker.Expect("a", addr(podA), 0)
		for range 50 { // over 10 s
			for range 1000 {
				e, refusal := w.tracker.Begin(key("a"), netip.MustParseAddrPort(podA), false)
				if e == nil {
					require.Equal(w, Again, refusal.Why)
					w.passes(refusal.Wait)
					e = w.begin("a", podA)
				}
				e.Read()
			}
			w.passes(200 * time.Millisecond)
		}
	})
}

// Each sandbox keeps within the bounds of one sandbox. All of them together would make looks so
// long that the leader asks no question.
//
// Invariant: I4
func TestManySandboxesTogetherKeepLooksShort(t *testing.T) {
	inWorld(t, func(w *world) {
		const many = 100
		begin := func(id, to string, port int) (admitted bool, wait time.Duration) {
			e, refusal := w.tracker.Begin(key(id), netip.AddrPortFrom(addr(to), uint16(port)), false)
			if e != nil {
				e.Read()
			}
			return e != nil, refusal.Wait
		}
		name := func(i int) (id, at string) { return fmt.Sprint("many", i), fmt.Sprintf("10.1.0.%d:80", i) }
		for i := range many {
			id, at := name(i)
			w.tracker.Expect(id, addr(at), 0)
		}
		w.tracker.Expect("b", addr(podB), 0)
		for round := range 4 { // each request makes an entry, and no entry goes
			for i := range many {
				id, at := name(i)
				for n := range maxFirst {
					port := 1 + round*8 + n%8
					if ok, _ := begin(id, at, port); ok {
						w.change(func() {
							if _, listed := w.open[look.Host{AddrPort: netip.AddrPortFrom(addr(at), uint16(port))}]; listed {
								w.entries++
							}
							w.open[look.Host{AddrPort: netip.AddrPortFrom(addr(at), uint16(port))}]++
						})
					}
				}
			}
			w.change(func() { require.LessOrEqual(w, len(w.open)+w.entries, maxEntries, "round %d", round) })

			// Another sandbox is served, if not as fast.
			for port := range maxPorts / 4 {
				at := 1000*round + port
				ok, _ := begin("b", podB, at)
				require.True(w, ok)
				ok, wait := begin("b", podB, at)
				require.False(w, ok)
				require.Equal(w, firstRequestTime, wait)
			}
			w.passes(firstRequestTime)
			for range 1000 {
				ok, _ := begin("b", podB, 1000*round)
				require.True(w, ok)
			}
			w.passes(2 * time.Second) // a look
		}
		w.change(func() { clear(w.open); w.entries = 0 })
		w.passes(2 * time.Second)
		for range maxFirst {
			ok, _ := begin("b", podB, 80)
			require.True(w, ok)
		}
	})
}

// A sandbox that comes late gets as many ports as one that came early, and never less than a few.
func TestFullListIsSharedAmongSandboxes(t *testing.T) {
	for all, ports := range map[int]int{1: maxPorts, 1000: 20, 100_000: leastPorts} {
		inWorld(t, func(w *world) {
			for i := range all {
				a := netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)})
				w.tracker.Expect(fmt.Sprint("sandbox", i), a, 0)
			}
			w.change(func() { w.entries = maxEntries / 2 })
			w.passes(2 * time.Second)
			admitted := 0
			for port := range maxPorts + 1 {
				e, refusal := w.tracker.Begin(key("sandbox0"), netip.AddrPortFrom(netip.AddrFrom4([4]byte{10}), uint16(1+port)), false)
				require.Zero(w, refusal.Wait)
				if e != nil {
					e.Read()
					admitted++
				}
			}
			require.Equal(w, ports, admitted, "of %d", all)
		})
	}
}
