package lastactive

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestPortsOfASandboxAreBounded(t *testing.T) {
	inWorld(t, func(w *world) {
		w.tracker.Expect("a", addr(podA), 0)
		begin := func(port int) bool {
			e, wait := w.tracker.Begin(key("a"), netip.AddrPortFrom(addr(podA), uint16(port)), false)
			if e != nil {
				e.Read()
			}
			require.Zero(w, wait)
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
				e, after := w.tracker.Begin(key("a"), netip.MustParseAddrPort(to), http2)
				if e != nil {
					e.Read()
					admitted++
				}
				wait = max(wait, after)
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
				e, wait := w.tracker.Begin(key("a"), netip.MustParseAddrPort(podA), false)
				if e == nil {
					require.Positive(w, wait)
					w.passes(wait)
					e = w.begin("a", podA)
				}
				e.Read()
			}
			w.passes(200 * time.Millisecond)
		}
	})
}
