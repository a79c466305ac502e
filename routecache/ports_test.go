package routecache_test

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/berth-sandbox/berth/routecache"
)

func TestPortsAreASet(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		// Few different ones, so that they come more than once, on both sides of
		// what fits in a byte.
		some := rapid.SliceOfN(rapid.SampledFrom([]uint16{0, 1, 22, 80, 255, 256, 257, 8080, 20480, 49983, 65535}), 1, 12)
		given := some.Draw(rt, "given")
		before := slices.Clone(given)
		ports := routecache.NewPorts(given)
		require.Equal(rt, before, given, "the caller's slice was changed")

		want := slices.Compact(slices.Sorted(slices.Values(given)))
		require.Equal(rt, want, ports.List())
		for _, asked := range append(some.Draw(rt, "asked"), given...) {
			require.Equal(rt, slices.Contains(given, asked), ports.Allows(asked), "port %d of %v", asked, ports)
		}
		other := some.Draw(rt, "other")
		require.Equal(rt, slices.Equal(want, slices.Compact(slices.Sorted(slices.Values(other)))), ports == routecache.NewPorts(other),
			"%v and %v", given, other)
	})
}

func TestEmptyPortsAllowEveryPort(t *testing.T) {
	for _, ports := range []routecache.Ports{{}, routecache.NewPorts(nil), routecache.NewPorts([]uint16{})} {
		require.Equal(t, routecache.Ports{}, ports)
		require.Nil(t, ports.List())
		for port := range 65536 {
			require.True(t, ports.Allows(uint16(port)))
		}
	}
	// A set of only port 0 must not become the set of all ports.
	require.False(t, routecache.NewPorts([]uint16{0}).Allows(80))
}

func TestAllowsDoesNotAllocate(t *testing.T) {
	var many []uint16
	for port := uint16(1); port <= 64; port++ {
		many = append(many, 1000*port)
	}
	ports := routecache.NewPorts(many)
	right := false
	require.Zero(t, testing.AllocsPerRun(100, func() { right = ports.Allows(64000) && !ports.Allows(1) }))
	require.True(t, right)
}

// Holds compares whole routes: one whose ports have changed is another route.
func TestRouteDoesNotHoldAfterItsPortsChange(t *testing.T) {
	c := newWorld(t, routecache.Options{})
	open, narrow := routeA, routeA
	narrow.Ports = routecache.NewPorts([]uint16{8080})
	c.Put("id", open)
	require.True(t, c.Holds(key("id"), open))
	c.Put("id", narrow)
	require.False(t, c.Holds(key("id"), open))
	require.True(t, c.Holds(key("id"), narrow))
}
