package policy

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func parse(allow, deny []string) (*Rules, error) {
	return Parse(List{"allowOut", allow}, List{"denyOut", deny})
}

func mustRules(t testing.TB, allow, deny []string) *Rules {
	t.Helper()
	r, err := parse(allow, deny)
	require.NoError(t, err)
	return r
}

var denyAll = []string{all}

func TestNamesMatchExactlyOrBelowTheWildcard(t *testing.T) {
	r := mustRules(t, []string{"api.example.com", "*.example.org", "*.a.example.net", "Bücher.example",
		"*.faß.example", "DOT.example.", "api.example.com", "x_y.example"}, denyAll)
	for _, host := range []string{"api.example.com", "a.example.org", "a.b.c.example.org", "x.a.example.net",
		"xn--bcher-kva.example", "a.xn--fa-hia.example", "dot.example", "x_y.example"} {
		require.Equal(t, Allowed, r.Name(host), host)
	}
	for _, host := range []string{"example.com", "www.api.example.com", "xapi.example.com", "api.example.com.evil.example",
		"api.example.comx", "example.org", "xexample.org", "a.example.org.evil.example", "a.example.net", "b.example.net",
		"org", "com", "", "fass.example", "a.fass.example", "xn--fa-hia.example", "b.example"} {
		require.Equal(t, Refused, r.Name(host), host)
	}
}

func TestNameIsLookedUpOnlyIfItMayBeAllowed(t *testing.T) {
	for _, c := range []struct {
		allow, deny []string
		want        Verdict
	}{
		{nil, nil, Allowed},
		{[]string{"192.0.2.0/24"}, nil, Allowed},
		{nil, []string{"192.0.2.0/24"}, ByAddress},
		{[]string{"192.0.2.1"}, []string{"192.0.2.0/24"}, ByAddress},
		{nil, []string{"::/0"}, ByAddress},
		{nil, denyAll, Refused},
		{nil, []string{"1.2.3.4/0"}, Refused},
		{[]string{"192.0.2.0/24"}, denyAll, Refused},
		{[]string{"other.example"}, denyAll, Refused},
		{[]string{"*.a.example"}, denyAll, Refused},
		{[]string{"a.example"}, denyAll, Allowed},
		{[]string{"a.example"}, []string{all, "192.0.2.0/24"}, Allowed},
		{denyAll, denyAll, Allowed},
		{denyAll, []string{"192.0.2.0/24"}, Allowed},
		{[]string{all, "other.example"}, denyAll, Allowed},
	} {
		require.Equal(t, c.want, mustRules(t, c.allow, c.deny).Name("a.example"), "%v %v", c.allow, c.deny)
	}
	var none *Rules
	require.Equal(t, Allowed, none.Name("a.example"))
}

func TestAllowBeatsDenyForAnAddress(t *testing.T) {
	r := mustRules(t, []string{"192.0.2.7", "198.51.100.9/25", "2001:db8::/48"},
		[]string{"192.0.2.0/24", "198.51.100.0/24", "2001:db8::/32"})
	for _, a := range addrs("192.0.2.7", "198.51.100.127", "2001:db8::1", "8.8.8.8", "2606::1") {
		require.True(t, r.Address(a), a)
	}
	refused := append(addrs("192.0.2.8", "198.51.100.128", "2001:db8:1::1", "::ffff:8.8.8.8", "::ffff:192.0.2.8",
		"2606::1%eth0"), netip.Addr{})
	for _, a := range refused {
		require.False(t, r.Address(a), a)
	}
}

func TestAllTrafficMeansBothAddressFamilies(t *testing.T) {
	v4, v6 := netip.MustParseAddr("8.8.8.8"), netip.MustParseAddr("2606::1")
	var none *Rules
	for _, c := range []struct {
		r          *Rules
		has4, has6 bool
	}{
		{none, true, true},
		{mustRules(t, nil, nil), true, true},
		{mustRules(t, nil, denyAll), false, false},
		{mustRules(t, denyAll, denyAll), true, true},
		{mustRules(t, []string{"::/0"}, denyAll), false, true},
		{mustRules(t, nil, []string{"::/0"}), true, false},
		{mustRules(t, []string{"8.0.0.0/8", "x.example"}, denyAll), true, false},
	} {
		require.Equal(t, c.has4, c.r.Address(v4), c.r)
		require.Equal(t, c.has6, c.r.Address(v6), c.r)
	}
}

func TestParseNamesTheEntryAndTheFix(t *testing.T) {
	many := make([]string, maxEntries+1)
	for i := range many {
		many[i] = "10.0.0.1"
	}
	for _, c := range []struct {
		allow, deny []string
		want        string
	}{
		{[]string{"a.example"}, nil,
			`allowOut[0] "a.example": a name has no effect while all traffic is allowed: add "0.0.0.0/0" to denyOut`},
		{[]string{"192.0.2.1", "*.a.example"}, []string{"10.0.0.0/8", "::/0"},
			`allowOut[1] "*.a.example": a name has no effect`},
		{nil, []string{all, "a.example"},
			`denyOut[1] "a.example": it is not an address or a CIDR, and names cannot be denied`},
		{nil, []string{"*"}, `denyOut[0] "*": it is not an address or a CIDR`},
		{nil, []string{"10.0.0"}, `denyOut[0] "10.0.0": it is not an address or a CIDR`},
		{many, nil, "allowOut has 257 entries, and at most 256 are possible"},
		{nil, many, "denyOut has 257 entries, and at most 256 are possible"},
		{[]string{"a.example", "b.example", "c.example", "x..y"}, denyAll,
			`allowOut[3] "x..y": a label is empty: write one dot`},
		{[]string{""}, denyAll, `allowOut[0] "": a label is empty`},
		{[]string{"*"}, denyAll, `allowOut[0] "*": write "0.0.0.0/0" for all traffic`},
		{[]string{"*."}, denyAll, "a label is empty"},
		{[]string{"*.com"}, denyAll, "one label"},
		{[]string{"*.com."}, denyAll, "one label"},
		{[]string{"localhost"}, denyAll, "one label"},
		{[]string{"a.*.example"}, denyAll, `only in front: write "*.example.com"`},
		{[]string{"*.*.example"}, denyAll, "only in front"},
		{[]string{"a*.b.example"}, denyAll, "only in front"},
		{[]string{"*a.b.example"}, denyAll, "only in front"},
		{[]string{"**.b.example"}, denyAll, "only in front"},
		{[]string{".b.example"}, denyAll, "a label is empty"},
		{[]string{"a.example:443"}, denyAll, "without a port"},
		{[]string{"192.0.2.1:443"}, denyAll, "without a port"},
		{[]string{"[2001:db8::1]"}, denyAll, "without brackets"},
		{[]string{"[2001:db8::1]:443"}, denyAll, "without brackets"},
		{[]string{"https://a.example/x"}, denyAll, "without a scheme"},
		{[]string{"a.example/x"}, denyAll, "has no path"},
		{[]string{"192.0.2.0/33"}, denyAll, "is not a CIDR"},
		{[]string{"192.0.2/24"}, denyAll, "is not a CIDR"},
		{[]string{"192.0.2.0/024"}, denyAll, "is not a CIDR"},
		{[]string{"127.1"}, denyAll, "as an IPv4 address"},
		{[]string{"0177.0.0.1"}, denyAll, "as an IPv4 address"},
		{[]string{"1.2.3.4."}, denyAll, "as an IPv4 address"},
		{[]string{"*.1.2"}, denyAll, "as an IPv4 address"},
		{[]string{"１２７.０.０.１"}, denyAll, "as an IPv4 address"},
		{[]string{"fe80::1%eth0"}, denyAll, "no zone"},
		{[]string{"::ffff:10.0.0.1"}, denyAll, "write the IPv4 address"},
		{[]string{"::ffff:10.0.0.0/104"}, denyAll, "write the IPv4 address"},
		{nil, []string{"::ffff:10.0.0.1"}, "write the IPv4 address"},
		{[]string{" a.example"}, denyAll, "a host has no ' '"},
		{[]string{"user@a.example"}, denyAll, "a host has no '@'"},
		{[]string{"a.example\n"}, denyAll, "a host has no '\\n'"},
		{[]string{"kube-dns.kube-system.svc.cluster.local"}, denyAll, "names of the cluster"},
		{[]string{"*.cluster.local"}, denyAll, "names of the cluster"},
		{[]string{"\xff.example"}, denyAll, "not valid UTF-8"},
		{[]string{"\ufffd.example"}, denyAll, "no domain name has this form"},
		{[]string{"bü_cher.example"}, denyAll, "write its A-labels"},
		{[]string{"\u2100.example"}, denyAll, "no domain name has this form"},
		{[]string{"*.\uff0a.example"}, denyAll, "no domain name has this form"},
		{[]string{strings.Repeat("ü", 64) + ".example"}, denyAll, "63"},
		{[]string{strings.Repeat("ü", 600) + ".example"}, denyAll, "it is longer than 1024 bytes"},
		{[]string{strings.Repeat("a.", 130) + "example"}, denyAll, "the name is longer than 253 bytes"},
	} {
		_, err := parse(c.allow, c.deny)
		require.ErrorContains(t, err, c.want, "%q %q", c.allow, c.deny)
		require.NotContains(t, err.Error(), "\n")
		require.Less(t, len(err.Error()), 2048)
	}
}

func TestFullListsAndDuplicatesAreAccepted(t *testing.T) {
	var names []string
	for i := range maxEntries {
		names = append(names, fmt.Sprintf("h%d.example", i/2))
	}
	r := mustRules(t, names, []string{all, all, "10.0.0.0/8", "10.1.1.1/8"})
	require.Equal(t, Allowed, r.Name("h127.example"))
	require.Equal(t, Refused, r.Name("h128.example"))
}

// FuzzParseNeverAllowsUnwrittenNames also shows that each rule stays the same when it is written in its normal form.
func FuzzParseNeverAllowsUnwrittenNames(f *testing.F) {
	for _, seed := range []string{"a.example", "*.a.example", "*.Bücher.example.", "10.0.0.0/8", "0.0.0.0/0",
		"2001:db8::1", "*", "a:1", "faß.de",
		"*.com", "a。b", "\u212a.example", "::ffff:1.2.3.4", "1.2.3.4/0"} {
		f.Add(seed, "host.example", []byte{1, 2, 3, 4})
	}
	f.Fuzz(func(t *testing.T, entry, host string, raw []byte) {
		r, err := parse([]string{entry}, denyAll)
		if err != nil {
			require.Contains(t, err.Error(), "allowOut[0] ")
			return
		}
		for key := range r.names {
			written := key
			if key[0] == '.' {
				written = "*" + key
				require.Equal(t, Allowed, r.Name("x"+key))
				require.Equal(t, Refused, r.Name(key[1:]))
			} else {
				require.Equal(t, Allowed, r.Name(key))
				require.Equal(t, Refused, r.Name("x."+key))
			}
			require.Equal(t, r, mustRules(t, []string{written}, denyAll))
			// A destination can have each name that a rule has.
			d, err := Destination(strings.TrimPrefix(key, ".")+":443", 0)
			require.NoError(t, err)
			require.Equal(t, strings.TrimPrefix(key, "."), d.Host)
		}
		if d, err := Destination(host, 443); err == nil && d.Host != "" && !r.allowAll {
			allowed := false
			for key := range r.names {
				allowed = allowed || d.Host == key || key[0] == '.' && strings.HasSuffix(d.Host, key)
			}
			require.Equal(t, allowed, r.Name(d.Host) == Allowed)
		}
		if a, ok := netip.AddrFromSlice(raw); ok {
			p, _ := parseCIDR(entry)
			require.Equal(t, plain(a) && (p.Contains(a) || r.allowAll), r.Address(a))
		}
	})
}
