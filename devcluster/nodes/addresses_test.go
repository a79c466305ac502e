package nodes_test

import (
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/devcluster/nodes"
)

func TestReleasedAddressIsAssignedNext(t *testing.T) {
	t.Parallel()
	p := nodes.NewAddresses(netip.MustParsePrefix("127.0.0.0/29"))
	take := func() string {
		t.Helper()
		a, ok := p.Take()
		require.True(t, ok)
		return a.String()
	}
	for _, want := range []string{"127.0.0.2", "127.0.0.3", "127.0.0.4"} { // .1 is the host's
		require.Equal(t, want, take())
	}
	p.Release(netip.MustParseAddr("127.0.0.3"))
	require.Equal(t, "127.0.0.3", take())
	for range 3 {
		take()
	}
	_, ok := p.Take()
	require.False(t, ok, "all are taken")
}
