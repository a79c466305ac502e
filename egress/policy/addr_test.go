package policy

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func addrs(texts ...string) (all []netip.Addr) {
	for _, text := range texts {
		all = append(all, netip.MustParseAddr(text))
	}
	return all
}

func TestSpecialAddressesAreNotPublicAtTheirBounds(t *testing.T) {
	// First and last address of each range, and what is beside it.
	for _, a := range addrs("0.0.0.0", "0.255.255.255", "10.0.0.0", "10.255.255.255", "100.64.0.0", "100.127.255.255",
		"100.100.100.200", "127.0.0.0", "127.0.0.1", "127.255.255.255", "168.63.129.16", "169.254.0.0", "169.254.169.254",
		"169.254.255.255", "172.16.0.0", "172.31.255.255", "192.0.0.0", "192.0.0.192", "192.0.0.255", "192.0.2.0",
		"192.0.2.255",
		"192.88.99.0", "192.88.99.255", "192.168.0.0", "192.168.255.255", "198.18.0.0", "198.19.255.255", "198.51.100.0",
		"198.51.100.255", "203.0.113.0", "203.0.113.255", "224.0.0.0", "239.255.255.255", "240.0.0.0", "255.255.255.255",
		"::", "::1", "::1.2.3.4", "::ffff:1.2.3.4", "::ffff:127.0.0.1", "64:ff9b::1.2.3.4", "64:ff9b:1::1", "100::1",
		"1fff::1",
		"2001::", "2001::1", "2001:1::1", "2001:1ff:ffff::1", "2001:db8::1", "2001:db8:ffff::1", "2002::1", "2002:102:304::1",
		"3fff::1", "3fff:fff::1", "4000::", "5f00::1", "fc00::1", "fd00:ec2::254", "fe80::1", "fec0::1", "ff02::1", "ff0e::1",
		"2606:4700::1%eth0", "fe80::1%1") {
		require.False(t, Public(a), a)
	}
	for _, a := range addrs("1.0.0.0", "1.1.1.1", "8.8.8.8", "9.255.255.255", "11.0.0.0", "100.63.255.255", "100.128.0.0",
		"126.255.255.255", "128.0.0.0", "168.63.129.15", "168.63.129.17", "169.253.255.255", "169.255.0.0", "172.15.255.255",
		"172.32.0.0", "192.0.1.0", "192.0.3.0", "192.31.196.1", "192.88.98.255", "192.88.100.0", "192.167.255.255",
		"192.169.0.0",
		"198.17.255.255", "198.20.0.0", "198.51.99.255", "198.51.101.0", "203.0.112.255", "203.0.114.0", "223.255.255.255",
		"2000::", "2001:200::1", "2001:4860:4860::8888", "2001:db7:ffff::1", "2001:db9::1", "2003::1", "2606:4700::1111",
		"2620:4f:8000::1", "3ffe::1", "3fff:1000::1") {
		require.True(t, Public(a), a)
	}
	require.False(t, Public(netip.Addr{}))
}

func TestNeverWinsOverPrivateAndPublic(t *testing.T) {
	r, err := NewReach(mustPrefixes("10.0.0.0/8", "127.0.0.0/8", "fd00::/8"),
		mustPrefixes("10.96.0.0/12", "8.8.8.8/32", "fd00:1::/32", "2606:4700::/32"))
	require.NoError(t, err)
	for _, a := range addrs("10.0.0.1", "10.95.255.255", "10.112.0.0", "127.0.0.1", "8.8.4.4", "fd00:2::1", "2600::1") {
		require.True(t, r.Permits(a), a)
	}
	for _, a := range append(addrs("10.96.0.1", "10.111.255.255", "8.8.8.8", "fd00:1::1", "2606:4700::1", "192.168.0.1",
		"fc00::1",
		"169.254.169.254", "::ffff:10.0.0.1", "::ffff:8.8.4.4", "64:ff9b::8.8.8.8", "fd00:2::1%eth0", "::1"), netip.Addr{}) {
		require.False(t, r.Permits(a), a)
	}
	mapped, err := NewReach(mustPrefixes("0:0:0:0:0:8000::/81"), mustPrefixes("10.0.0.0/8"))
	require.NoError(t, err)
	require.False(t, mapped.Permits(netip.MustParseAddr("::ffff:10.0.0.1")))
	var none *Reach
	require.True(t, none.Permits(netip.MustParseAddr("8.8.8.8")))
	require.False(t, none.Permits(netip.MustParseAddr("10.0.0.1")))
}

func TestSetHasWhatOneOfItsCIDRsHas(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		// Few different bits, so that CIDRs contain each other.
		addr := rapid.Custom(func(t *rapid.T) netip.Addr {
			b := rapid.SliceOfN(rapid.SampledFrom([]byte{0, 1, 0x80, 0xff}), 4, 4).Draw(t, "bytes")
			if rapid.Bool().Draw(t, "v6") {
				b = append(b, make([]byte, 12)...)
			}
			a, _ := netip.AddrFromSlice(b)
			return a
		})
		cidr := rapid.Custom(func(t *rapid.T) netip.Prefix {
			return netip.PrefixFrom(addr.Draw(t, "addr"), rapid.IntRange(0, 32).Draw(t, "bits"))
		})
		all := rapid.SliceOfN(cidr, 0, 12).Draw(t, "cidrs")
		set := newPrefixes(all)
		for _, a := range rapid.SliceOfN(addr, 1, 20).Draw(t, "addresses") {
			one := slices.ContainsFunc(all, func(p netip.Prefix) bool { return p.Contains(a) })
			require.Equal(t, one, set.contains(a), a)
		}
	})
}

func TestReachRefusesRangesThatHideOthers(t *testing.T) {
	for _, private := range []string{"0.0.0.0/0", "0.0.0.0/1", "128.0.0.0/1", "169.254.169.254/32", "224.0.0.0/4",
		"::/0", "64:ff9b::/96",
		"2002::/16", "2000::/3", "fe80::/64", "ff00::/16"} {
		_, err := NewReach(mustPrefixes(private), nil)
		require.ErrorContains(t, err, "which is never outside: write narrower ranges", private)
	}
	mapped := []netip.Prefix{netip.PrefixFrom(netip.MustParseAddr("::ffff:10.0.0.0"), 104)}
	_, err := NewReach(mapped, nil)
	require.ErrorContains(t, err, "write the IPv4 range")
	_, err = NewReach(nil, mapped)
	require.ErrorContains(t, err, "write the IPv4 range")
	_, err = NewReach(nil, make([]netip.Prefix, 1))
	require.ErrorContains(t, err, "is not a CIDR")
	_, err = NewReach(nil, mustPrefixes("0.0.0.0/0", "::/0"))
	require.NoError(t, err)
}
