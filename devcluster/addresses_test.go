package devcluster

import (
	"net"
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestBlocksDoNotOverlapAndComeBack(t *testing.T) {
	a, err := reserveBlock()
	require.NoError(t, err)
	b, err := reserveBlock()
	require.NoError(t, err)
	require.False(t, a.prefix.Overlaps(b.prefix))
	require.True(t, netip.MustParsePrefix("127.64.0.0/10").Overlaps(b.prefix))
	require.NoError(t, a.free())
	again, err := reserveBlock()
	require.NoError(t, err)
	require.False(t, again.prefix.Overlaps(b.prefix))
	require.NoError(t, again.free())
	require.NoError(t, b.free())
}

func TestPartsOfABlockDoNotOverlap(t *testing.T) {
	b, err := reserveBlock()
	require.NoError(t, err)
	defer b.free()
	parts := []netip.Prefix{netip.PrefixFrom(b.server(), 20).Masked(), b.fake()}
	for i := range MaxNodes {
		parts = append(parts, b.node(i))
	}
	for i, p := range parts {
		require.True(t, b.prefix.Contains(p.Addr()), p)
		for _, q := range parts[:i] {
			require.False(t, p.Overlaps(q), "%v and %v", p, q)
		}
	}
}

func TestFreeAddrGivesNoAddressTwice(t *testing.T) {
	b, err := reserveBlock()
	require.NoError(t, err)
	defer b.free()
	// Another program may listen on this port on all addresses. It is then not returned.
	taken, err := net.Listen("tcp", netip.AddrPortFrom(b.server(), firstOwnPort).String())
	require.NoError(t, err)
	defer taken.Close()
	seen := map[netip.AddrPort]bool{netip.MustParseAddrPort(taken.Addr().String()): true}
	for range 20 {
		a, err := b.freeAddr(0)
		require.NoError(t, err)
		require.False(t, seen[a], a)
		seen[a] = true
		require.Equal(t, b.server(), a.Addr())
	}
	a, err := b.freeAddr(firstOwnPort)
	require.NoError(t, err)
	require.NotEqual(t, uint16(firstOwnPort), a.Port())
}
