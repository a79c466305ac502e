package policy

import (
	"net/netip"
	"net/url"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestDestinationHasOneFormForEachHost(t *testing.T) {
	label63 := strings.Repeat("a", 63)
	name253 := strings.Repeat(label63+".", 3) + strings.Repeat("b", 61)
	for authority, want := range map[string]string{
		"api.example.com:443":               "api.example.com:443",
		"API.Example.COM:443":               "api.example.com:443",
		"api.example.com.:443":              "api.example.com:443",
		"api.example.com":                   "api.example.com:80",
		"api.example.com.":                  "api.example.com:80",
		"a_b._tcp.example.com:8080":         "a_b._tcp.example.com:8080",
		"r3---sn-4g5e.example.com:443":      "r3---sn-4g5e.example.com:443",
		"XN--BCHER-KVA.example:443":         "xn--bcher-kva.example:443",
		"1.2.3.example:443":                 "1.2.3.example:443",
		"1.2.3.4a:443":                      "1.2.3.4a:443",
		"0x7f.0x:443":                       "",
		"a.0xg:443":                         "a.0xg:443",
		"x.cluster.localhost:443":           "x.cluster.localhost:443",
		"printer.local:443":                 "printer.local:443",
		label63 + ".example:65535":          label63 + ".example:65535",
		name253 + ".:65535":                 name253 + ":65535",
		"93.184.215.14:443":                 "93.184.215.14:443",
		"127.0.0.1:1":                       "127.0.0.1:1",
		"93.184.215.14":                     "93.184.215.14:80",
		"[2606:2800:21f::1]:443":            "[2606:2800:21f::1]:443",
		"[2606:2800:021F:0:0:0:0:0001]:443": "[2606:2800:21f::1]:443",
		"[2606:2800:21f::1]":                "[2606:2800:21f::1]:80",
		"[64:ff9b::1.2.3.4]:443":            "[64:ff9b::102:304]:443",
	} {
		d, err := Destination(authority, 80)
		if want == "" {
			require.Error(t, err, authority)
			continue
		}
		require.NoError(t, err, authority)
		require.Equal(t, want, d.String(), authority)
		require.NotEqual(t, d.Addr.IsValid(), d.Host != "", authority)
	}
}

func TestDestinationRefusesWhatProgramsReadDifferently(t *testing.T) {
	const number, bad = "some programs read it as an IPv4 address", "a host has no"
	for authority, want := range map[string]string{
		"":                      "the host is missing",
		":443":                  "the host is missing",
		"[]:443":                "the host is missing",
		".:443":                 "a label is empty",
		"a..b:443":              "a label is empty",
		".a.b:443":              "a label is empty",
		"a.b..:443":             "a label is empty",
		"localhost:443":         "one label",
		"localhost.:443":        "one label",
		"kubernetes:443":        "one label",
		"a.b.svc.cluster.local": "names of the cluster are not outside it",
		"cluster.local.:443":    "names of the cluster are not outside it",
		"-a.example:443":        `the label "-a" begins or ends with "-"`,
		"a-.example:443":        `the label "a-" begins or ends with "-"`,

		"127.1:443":            number,
		"0x7f.1:443":           number,
		"0X7F.0.0.0X1:443":     number,
		"2130706433:443":       number,
		"0x7f000001:443":       number,
		"017700000001:443":     number,
		"0177.0.0.1:443":       number,
		"127.0.0.01:443":       number,
		"1.2.3.4.:443":         number,
		"1.2.3.256:443":        number,
		"1.2.3:443":            number,
		"1.2.3.4.5:443":        number,
		"example.1:443":        number,
		"127.0.0.0x:443":       number,
		"1.2.3.0xff:443":       number,
		"::1:443":              "in brackets",
		"2606:2800:21f::1":     "in brackets",
		"[1.2.3.4]:443":        "not an IPv6 address",
		"[a.example]:443":      "not an IPv6 address",
		"[::ffff:1.2.3.4]:443": "IPv4-mapped",
		"[::ffff:102:304]:443": "IPv4-mapped",
		"[fe80::1%eth0]:443":   bad,
		"[fe80::1%25eth0]:443": bad,
		"[::1:443":             `"]" is missing`,
		"[::1]443":             "may follow",
		"[::1]a:443":           "may follow",
		"[::1]]:443":           "may follow",
		"a[::1]:443":           "in brackets",
		"::1]:443":             "in brackets",

		"user@a.example:443":     bad + ` '@'`,
		"user:pass@a.example:80": bad + ` '@'`,
		"a.example/:443":         bad + ` '/'`,
		"http://a.example":       bad + ` '/'`,
		"a.example?:443":         bad + ` '?'`,
		"a.example#:443":         bad + ` '#'`,
		`a.example\:443`:         bad,
		"a%2eexample:443":        bad + ` '%'`,
		"a.example,b.example":    bad + ` ','`,
		"*.example:443":          bad + ` '*'`,
		" a.example:443":         bad + ` ' '`,
		"a.example:443 ":         bad + ` ' '`,
		"a.example\r\nb: c":      bad,
		"a.example\x00:443":      bad,
		"a.example\x7f:443":      bad,
		"bücher.example:443":     "A-label",
		"a。example:443":          "A-label",
		"１２７.０.０.１:443":          "A-label",
		"\u212aa.example:443":    "A-label", // lower case makes an ASCII k of it
		"a.example\xff:443":      "A-label",

		"a.example":         "the port is missing",
		"a.example:":        "is not a number from 1 to 65535",
		"a.example:0":       "is not a number from 1 to 65535",
		"a.example:00":      "is not a number from 1 to 65535",
		"a.example:0443":    "is not a number from 1 to 65535",
		"a.example:+443":    bad,
		"a.example:65536":   "is not a number from 1 to 65535",
		"a.example:443:443": "in brackets",
		"a.example:https":   "is not a number from 1 to 65535",
		"a.example:1_0":     "is not a number from 1 to 65535",

		strings.Repeat("a", 64) + ".example:443":            "a label is longer than 63 bytes",
		strings.Repeat("a.", 127) + "b:443":                 "the name is longer than 253 bytes",
		strings.Repeat("a.", 1<<20):                         "it is longer than 260 bytes",
		strings.Repeat("1", 100) + ":443":                   "a label is longer than 63 bytes",
		"a.example:" + strings.Repeat("4", 100):             "is not a number from 1 to 65535",
		"[" + strings.Repeat("0", 100) + "::1]:443":         "not an IPv6 address",
		strings.Repeat("\"", 200):                           bad,
		"[::ffff:0:0]:443":                                  "IPv4-mapped",
		"a.example:443" + strings.Repeat(":", maxAuthority): "it is longer than 260 bytes",
	} {
		d, err := Destination(authority, 0)
		if strings.HasSuffix(authority, "cluster.local") {
			d, err = Destination(authority, 80)
		}
		require.ErrorContains(t, err, want, authority)
		require.ErrorContains(t, err, "authority ", authority)
		require.Less(t, len(err.Error()), 600, authority)
		require.Zero(t, d, authority)
	}
}

// looseIPv4 reports whether inet_aton reads a text as an address.
func looseIPv4(text string) bool {
	parts := strings.Split(strings.TrimSuffix(text, "."), ".")
	if len(parts) > 4 {
		return false
	}
	for _, part := range parts {
		digits, base := part, 10
		switch {
		case strings.HasPrefix(part, "0x"), strings.HasPrefix(part, "0X"):
			if digits, base = part[2:], 16; digits == "" {
				digits = "0"
			}
		case strings.HasPrefix(part, "0"):
			base = 8
		}
		if _, err := strconv.ParseUint(digits, base, 32); err != nil {
			return false
		}
	}
	return true
}

func FuzzDestinationMeansOneHostEverywhere(f *testing.F) {
	for _, seed := range []string{"a.example:443", "A.Example.:1", "1.2.3.4:80", "[2606::1]:443", "127.1",
		"[::ffff:1.2.3.4]:1",
		"0x7f.1:80", "user@a.b:1", "a.b", "xn--a.b:9", "a_b.c:80", "1.2.3.4.:80", "[fe80::1%1]:80", "é.fr:80"} {
		f.Add(seed, uint16(80))
		f.Add(seed, uint16(0))
	}
	f.Fuzz(func(t *testing.T, authority string, defaultPort uint16) {
		d, err := Destination(authority, defaultPort)
		if err != nil {
			require.Zero(t, d)
			return
		}
		require.NotZero(t, d.Port)
		again, err := Destination(d.String(), 0)
		require.NoError(t, err)
		require.Equal(t, d, again)

		u, err := url.Parse("http://" + authority + "/")
		require.NoError(t, err)
		require.Nil(t, u.User)
		require.Equal(t, "/", u.Path)
		if port := u.Port(); port != "" {
			require.Equal(t, strconv.Itoa(int(d.Port)), port)
		} else {
			require.Equal(t, defaultPort, d.Port)
		}
		if d.Addr.IsValid() {
			require.Empty(t, d.Host)
			addr, err := netip.ParseAddr(u.Hostname())
			require.NoError(t, err)
			require.Equal(t, addr, d.Addr)
			require.True(t, plain(addr))
			return
		}
		require.Equal(t, strings.ToLower(strings.TrimSuffix(u.Hostname(), ".")), d.Host)
		_, err = netip.ParseAddr(d.Host)
		require.Error(t, err)
		require.False(t, looseIPv4(d.Host), d.Host)
		name, err := hostName(d.Host)
		require.NoError(t, err)
		require.Equal(t, d.Host, name)
	})
}
