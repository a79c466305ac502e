package processnode

import (
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func take(t require.TestingT, p *addressPool) string {
	a, ok := p.take()
	require.True(t, ok)
	return a.String()
}

func TestLowestFreeAddressIsTakenFirst(t *testing.T) {
	p := newAddressPool(netip.MustParsePrefix("127.3.0.0/16"))
	require.Equal(t, "127.3.0.1", take(t, p))
	require.Equal(t, "127.3.0.2", take(t, p))
	require.Equal(t, "127.3.0.3", take(t, p))
	p.release(netip.MustParseAddr("127.3.0.2"))
	require.Equal(t, "127.3.0.2", take(t, p))
	require.Equal(t, "127.3.0.4", take(t, p))
}

func TestReservedAddressesAreNeverTaken(t *testing.T) {
	p := newAddressPool(netip.MustParsePrefix("127.0.0.0/23"))
	for range 2*254 - 1 {
		a := netip.MustParseAddr(take(t, p))
		require.NotContains(t, []byte{0, 255}, a.As4()[3])
		require.NotEqual(t, hostIP, a.String())
	}
	_, ok := p.take()
	require.False(t, ok, "the range is used up")
}

func TestNoAddressHasTwoOwners(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := newAddressPool(netip.MustParsePrefix("127.3.0.0/28"))
		owned := map[netip.Addr]bool{}
		for range rapid.IntRange(1, 100).Draw(t, "steps") {
			if len(owned) > 0 && rapid.Bool().Draw(t, "release") {
				for a := range owned {
					p.release(a)
					delete(owned, a)
					break
				}
				continue
			}
			a, ok := p.take()
			require.Equal(t, len(owned) < 15, ok)
			require.False(t, owned[a])
			if ok {
				owned[a] = true
			}
		}
	})
}
