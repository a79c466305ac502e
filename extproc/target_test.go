package extproc

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/api/sandboxid"
)

const domain = "sandbox.example.com"

func TestHostNamesExactlyOneTarget(t *testing.T) {
	longest := strings.Repeat("z", sandboxid.MaxLen)
	for host, want := range map[string]Target{
		"8080-abc.sandbox.example.com":              {ID: "abc", Port: 8080},
		"abc.sandbox.example.com":                   {ID: "abc"},
		"1-a.sandbox.example.com":                   {ID: "a", Port: 1},
		"65535-a.sandbox.example.com":               {ID: "a", Port: 65535},
		"8080.sandbox.example.com":                  {ID: "8080"}, // an ID of digits, not a port
		"80-80.sandbox.example.com":                 {ID: "80", Port: 80},
		"8080-ABC.SANDBOX.Example.COM":              {ID: "abc", Port: 8080},
		"8080-abc.sandbox.example.com.":             {ID: "abc", Port: 8080},
		"8080-abc.sandbox.example.com:1":            {ID: "abc", Port: 8080},
		"8080-abc.sandbox.example.com:65535":        {ID: "abc", Port: 8080},
		"abc.sandbox.example.com:9999":              {ID: "abc"}, // the listener's port is not the sandbox's
		"8080-abc.sandbox.example.com.:8443":        {ID: "abc", Port: 8080},
		"65535-" + longest + ".sandbox.example.com": {ID: longest, Port: 65535},
	} {
		got, err := parseHost(host, domain)
		require.NoError(t, err, host)
		require.Equal(t, want, got, host)
	}
}

func TestHostWithAnythingElseIsRefused(t *testing.T) {
	for _, host := range []string{
		"", " ", ".", ":", ":80", "-", "..",
		// Not this domain.
		"sandbox.example.com", ".sandbox.example.com", "8080-abc", "8080-abc.", "8080-abc.example.com",
		"8080-abc.sandbox.example.org", "8080-abc.sandbox.example.com.evil.org", "8080-abcsandbox.example.com",
		"8080-abc.xsandbox.example.com", "8080-abc.sandboxxexample.com", "localhost", "10.0.0.1", "10.0.0.1:80", "[::1]", "[::1]:80",
		// Two Host lines, in any order.
		"8080-abc.sandbox.example.com,8080-def.sandbox.example.com", "evil.org,8080-abc.sandbox.example.com",
		"8080-abc.sandbox.example.com, evil.org", "8080-abc,8080-def.sandbox.example.com", "8080-abc,.sandbox.example.com",
		// More labels, or none.
		"a.8080-abc.sandbox.example.com", "8080-abc..sandbox.example.com", "8080-abc.sandbox.example.com..", ".8080-abc.sandbox.example.com",
		"8080-abc.sandbox..example.com", "8080.abc.sandbox.example.com",
		// The ID.
		"8080-.sandbox.example.com", "8080-abc-def.sandbox.example.com", "8080--abc.sandbox.example.com", "8080-abc-.sandbox.example.com",
		"8080-ab_c.sandbox.example.com", "8080-ab c.sandbox.example.com", "8080-abc\x00.sandbox.example.com", "8080-abc\t.sandbox.example.com",
		"8080-abc%2e.sandbox.example.com", "8080-%61bc.sandbox.example.com", "8080-ab/c.sandbox.example.com", "8080-ab\\c.sandbox.example.com",
		"8080-ab:c.sandbox.example.com", "8080-" + strings.Repeat("z", sandboxid.MaxLen+1) + ".sandbox.example.com",
		"*.sandbox.example.com", "8080-*.sandbox.example.com",
		// Beyond ASCII: the Kelvin sign is k in lower case, the long s is S in upper case.
		"8080-\u212aabc.sandbox.example.com", "8080-ab\u017f.sandbox.example.com", "8080-äbc.sandbox.example.com", "8080-abc.sandbox.example.com\u3002",
		"8080-abc.\u017fandbox.example.com", "８０-abc.sandbox.example.com", "8080-abc\xff.sandbox.example.com", "8080\u2010abc.sandbox.example.com",
		// The port.
		"0-abc.sandbox.example.com", "00-abc.sandbox.example.com", "080-abc.sandbox.example.com", "08080-abc.sandbox.example.com",
		"65536-abc.sandbox.example.com", "99999-abc.sandbox.example.com", "100000-abc.sandbox.example.com", "4294967376-abc.sandbox.example.com",
		"18446744073709551696-abc.sandbox.example.com", "+80-abc.sandbox.example.com", "-80-abc.sandbox.example.com", "-abc.sandbox.example.com",
		"8x-abc.sandbox.example.com", "0x50-abc.sandbox.example.com", "8e1-abc.sandbox.example.com", "1_0-abc.sandbox.example.com", "80 -abc.sandbox.example.com", " 80-abc.sandbox.example.com",
		"http-abc.sandbox.example.com",
		// What follows the colon.
		"8080-abc.sandbox.example.com:", "8080-abc.sandbox.example.com:0", "8080-abc.sandbox.example.com:080", "8080-abc.sandbox.example.com:65536",
		"8080-abc.sandbox.example.com:80:80", "8080-abc.sandbox.example.com:+80", "8080-abc.sandbox.example.com:80.", "8080-abc.sandbox.example.com: 80",
		"8080-abc.sandbox.example.com:80,", "8080-abc.sandbox.example.com:http", "8080-abc.sandbox.example.com.:",
		// A URL, or a part of one.
		"user@8080-abc.sandbox.example.com", "user:pw@8080-abc.sandbox.example.com", "http://8080-abc.sandbox.example.com",
		"8080-abc.sandbox.example.com/", "8080-abc.sandbox.example.com?", "8080-abc.sandbox.example.com#", "8080-abc.sandbox.example.com ",
		" 8080-abc.sandbox.example.com", "8080-abc.sandbox.example.com\r\n", "8080-abc.sandbox.example.com\x00", "8080-abc.sandbox.example.com;x",
		strings.Repeat("a.", 4000) + domain, strings.Repeat("9", 8000),
	} {
		target, err := parseHost(host, domain)
		require.Error(t, err, "%q", host)
		require.Zero(t, target, "%q", host)
		require.LessOrEqual(t, len(err.Error()), 1000, "a client chooses how long the answer is")
	}
}

func TestWrongPortIsToldFromAWrongHost(t *testing.T) {
	for host, port := range map[string]bool{
		"0-abc.sandbox.example.com":        true,
		"65536-abc.sandbox.example.com":    true,
		"08-abc.sandbox.example.com":       true,
		"8080-ab_c.sandbox.example.com":    false,
		"8080-abc.example.org":             false,
		"8080-abc.sandbox.example.com:0":   false, // the port of the listener, not of a sandbox
		"8080-abc.sandbox.example.com,x":   false,
		"0-abc.sandbox.example.com,0-x.io": false,
	} {
		_, err := parseHost(host, domain)
		var he *hostError
		require.ErrorAs(t, err, &he, host)
		require.Equal(t, port, he.port, host)
	}
}

func TestValidDomain(t *testing.T) {
	label := strings.Repeat("a", 63)
	for _, d := range []string{"a", "localhost", "sandbox.example.com", "a-b.c0.1", label + "." + label + "." + label[:61]} {
		require.True(t, ValidDomain(d), d)
	}
	for _, d := range []string{
		"", ".", "a.", ".a", "a..b", "A.b", "a_b", "-a.b", "a-.b", "a.b:80", "a b", "ä.b", "a,b", "*.a", label + "a",
		label + "." + label + "." + label[:62],
	} {
		require.False(t, ValidDomain(d), d)
	}
}

// Every host that fits leaves room for the longest label before it.
func TestLongestDomainAndLabelMakeADNSName(t *testing.T) {
	label := strings.Repeat("a", 63)
	longest := label + "." + label + "." + label[:61]
	host := "65535-" + strings.Repeat("z", sandboxid.MaxLen) + "." + longest
	require.Len(t, host, 253) // RFC 1035, section 2.3.4, less the length octets
	_, err := parseHost(host, longest)
	require.NoError(t, err)
}

func FuzzParseHost(f *testing.F) {
	for _, seed := range []string{
		"8080-abc.sandbox.example.com", "abc.sandbox.example.com.:443", "8080-ABC.SANDBOX.example.com", "80-a.sandbox.example.com,b",
		"0-a.sandbox.example.com", "65536-a.sandbox.example.com", "\u212a.sandbox.example.com", "a.sandbox.example.com:0", "[::1]:80", "",
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, host string) {
		target, err := parseHost(host, domain)
		if err != nil {
			if target != (Target{}) {
				t.Fatalf("%q was refused and yet names %+v", host, target)
			}
			if he := (*hostError)(nil); !errors.As(err, &he) || len(err.Error()) > 1000 {
				t.Fatalf("%q: %v", host, err)
			}
			return
		}
		if !sandboxid.Valid(target.ID) {
			t.Fatalf("%q was accepted with ID %q", host, target.ID)
		}
		// The host is exactly what its target is written as, but for the case, a
		// trailing dot and the listener's port.
		composed := target.ID + "." + domain
		if target.Port != 0 {
			composed = fmt.Sprintf("%d-%s", target.Port, composed)
		}
		again, err := parseHost(composed, domain)
		if err != nil || again != target {
			t.Fatalf("%q names %+v, but %q names %+v, %v", host, target, composed, again, err)
		}
		if len(host) < len(composed) || !asciiEqualFold(host[:len(composed)], composed) {
			t.Fatalf("%q was accepted as %q", host, composed)
		}
		rest := strings.TrimPrefix(host[len(composed):], ".")
		if rest != "" {
			var port uint16
			if n, err := fmt.Sscanf(rest, ":%d", &port); n != 1 || err != nil || fmt.Sprintf(":%d", port) != rest || port == 0 {
				t.Fatalf("%q was accepted with %q left over", host, rest)
			}
		}
		if strings.Contains(host, ",") {
			t.Fatalf("%q was accepted with a comma", host)
		}
	})
}

func asciiEqualFold(a, b string) bool {
	fold := func(c byte) byte {
		if 'A' <= c && c <= 'Z' {
			c += 'a' - 'A'
		}
		return c
	}
	for i := range len(a) {
		if fold(a[i]) != fold(b[i]) {
			return false
		}
	}
	return len(a) == len(b)
}
