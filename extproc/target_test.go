package extproc

import (
	"fmt"
	"net/http"
	"net/url"
	"path"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/sandboxid"
)

const domain = "sandbox.example.com"

// byHost returns the target of a request that has only a host.
func byHost(host, domain string) (Target, *apierror.Error) {
	return (&Hosts{Domain: domain}).target(&request{authority: []byte(host)})
}

func TestHostNamesExactlyOneTarget(t *testing.T) {
	longest, longer := strings.Repeat("z", sandboxid.MaxKeyLen), strings.Repeat("z", sandboxid.MaxLen)
	for host, want := range map[string]Target{
		"8080-abc.sandbox.example.com":              {ID: key("abc"), Port: 8080},
		"abc.sandbox.example.com":                   {ID: key("abc")},
		"1-a.sandbox.example.com":                   {ID: key("a"), Port: 1},
		"65535-a.sandbox.example.com":               {ID: key("a"), Port: 65535},
		"8080.sandbox.example.com":                  {ID: key("8080")}, // an ID of digits, not a port
		"80-80.sandbox.example.com":                 {ID: key("80"), Port: 80},
		"8080-ABC.SANDBOX.Example.COM":              {ID: key("abc"), Port: 8080},
		"8080-abc.sandbox.example.com.":             {ID: key("abc"), Port: 8080},
		"8080-abc.sandbox.example.com:1":            {ID: key("abc"), Port: 8080},
		"8080-abc.sandbox.example.com:65535":        {ID: key("abc"), Port: 8080},
		"abc.sandbox.example.com:9999":              {ID: key("abc")}, // the listener's port is not the sandbox's
		"8080-abc.sandbox.example.com.:8443":        {ID: key("abc"), Port: 8080},
		"65535-" + longest + ".sandbox.example.com": {ID: key(longest), Port: 65535},
		"65535-" + longer + ".sandbox.example.com":  {foreign: longer, Port: 65535}, // of no sandbox
	} {
		got, err := byHost(host, domain)
		require.Nil(t, err, host)
		require.Equal(t, want, got, host)
	}
}

// The E2B SDKs of version 1 append the client ID to the sandbox ID.
func TestClientIDAfterSandboxIDIsIgnored(t *testing.T) {
	h := Hosts{Domain: domain, Paths: true}
	for name, c := range map[string]struct {
		r    request
		want Target
	}{
		"host":           {request{authority: []byte("49983-abc-6532622b." + domain)}, Target{ID: key("abc"), Port: 49983}},
		"of digits only": {request{authority: []byte("80-abc-8080." + domain + ":443")}, Target{ID: key("abc"), Port: 80}},
		"upper case":     {request{authority: []byte("80-ABC-DEF." + domain + ".")}, Target{ID: key("abc"), Port: 80}},
		"E2B header":     {request{authority: []byte(domain), e2bID: one("abc-6532622b"), e2bPort: one("49983")}, Target{ID: key("abc"), Port: 49983}},
		"other header":   {request{authority: []byte(domain), id: one("ABC-6532622B")}, Target{ID: key("abc")}},
		"path":           {request{authority: []byte(domain), path: []byte("/sandboxes/abc-6532622b/80/x?y")}, Target{ID: key("abc"), Port: 80, Path: "/x?y"}},
	} {
		got, err := h.target(&c.r)
		require.Nil(t, err, name)
		require.Equal(t, c.want, got, name)
	}
	for _, id := range []string{"abc-", "-abc", "abc-d-e", "abc--d", "abc-d_e", "-"} {
		for name, r := range map[string]request{
			"header": {authority: []byte(domain), e2bID: one(id)}, "path": {authority: []byte(domain), path: []byte("/sandboxes/" + id + "/80/")}, "host": {authority: []byte("80-" + id + "." + domain)},
		} {
			_, err := h.target(&r)
			require.NotNil(t, err, "%s %s", name, id)
		}
	}
}

func TestOtherHostsAreRefused(t *testing.T) {
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
		"8080-.sandbox.example.com", "8080-abc-def-ghi.sandbox.example.com", "8080-abc-d_f.sandbox.example.com", "abc-def.sandbox.example.com", "abc-8080-def.sandbox.example.com", "8080-abc-" + strings.Repeat("z", sandboxid.MaxLen+1) + ".sandbox.example.com", "8080--abc.sandbox.example.com", "8080-abc-.sandbox.example.com",
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
		target, err := byHost(host, domain)
		require.NotNil(t, err, "%q", host)
		if host == domain {
			require.Equal(t, http.StatusNotFound, err.Code)
		} else {
			require.Equal(t, http.StatusBadRequest, err.Code, host)
		}
		require.Zero(t, target, "%q", host)
		require.LessOrEqual(t, len(err.Error()), 1000, "a client chooses how long the answer is")
	}
}

func TestRefusalNamesTheMistake(t *testing.T) {
	for host, want := range map[string]apierror.Reason{
		"0-abc.sandbox.example.com":        apierror.BadPort,
		"65536-abc.sandbox.example.com":    apierror.BadPort,
		"08-abc.sandbox.example.com":       apierror.BadPort,
		"8080-ab_c.sandbox.example.com":    apierror.BadHost,
		"8080-abc.example.org":             apierror.BadHost,
		"8080-abc.sandbox.example.com:0":   apierror.BadHost, // the port of the listener, not of a sandbox
		"8080-abc.sandbox.example.com,x":   apierror.BadHost,
		"0-abc.sandbox.example.com,0-x.io": apierror.BadHost,
		"sandbox.example.com":              apierror.NotFound,
		"api.sandbox.example.com":          apierror.NotFound,
		"API.sandbox.example.com.:8443":    apierror.NotFound,
		"80-api.sandbox.example.com":       apierror.BadHost,
	} {
		_, err := byHost(host, domain)
		require.NotNil(t, err, host)
		require.Equal(t, want, err.Reason, host)
	}
}

func one(s string) values { return several(s) }

// several returns the values of a header that was sent several times.
func several(all ...string) (v values) {
	for _, value := range all {
		v.add([]byte(value))
	}
	return v
}

func TestHeadersNameTheSandboxAtAGatewayHost(t *testing.T) {
	hosts := Hosts{Domain: domain, Gateways: []string{"gateway.example.com", "gw." + domain}}
	require.NoError(t, hosts.Check())
	for _, authority := range []string{domain, "SANDBOX.example.com.:8443", "gateway.example.com", "gw." + domain + ":80"} {
		for name, c := range map[string]struct {
			r    request
			want Target
		}{
			"of the E2B SDKs":        {request{e2bID: one("abc"), e2bPort: one("49983")}, Target{ID: key("abc"), Port: 49983}},
			"without the brand":      {request{id: one("abc"), port: one("80")}, Target{ID: key("abc"), Port: 80}},
			"no port":                {request{e2bID: one("abc")}, Target{ID: key("abc")}},
			"both, the same":         {request{e2bID: one("abc"), id: one("abc"), e2bPort: one("80"), port: one("80")}, Target{ID: key("abc"), Port: 80}},
			"ID of one, port of one": {request{e2bID: one("abc"), port: one("80")}, Target{ID: key("abc"), Port: 80}},
			"upper case":             {request{id: one("ABC")}, Target{ID: key("abc")}},
		} {
			for _, paths := range []bool{false, true} { // if a header names the sandbox, the path is not read
				h, r := hosts, c.r
				h.Paths, r.authority, r.path = paths, []byte(authority), []byte("/sandboxes/other/81/x")
				got, err := h.target(&r)
				require.Nil(t, err, "%s at %s", name, authority)
				require.Equal(t, c.want, got, "%s at %s", name, authority)
			}
		}
		for name, c := range map[string]struct {
			r    request
			want apierror.Reason
		}{
			"none":               {request{}, apierror.NotFound},
			"the API's name":     {request{id: one("api")}, apierror.BadTarget},
			"port alone":         {request{e2bPort: one("80")}, apierror.BadTarget},
			"twice":              {request{e2bID: several("abc", "abc")}, apierror.BadTarget},
			"twice, unbranded":   {request{id: several("abc", "def")}, apierror.BadTarget},
			"port twice":         {request{id: one("abc"), port: several("80", "80")}, apierror.BadTarget},
			"two IDs":            {request{e2bID: one("abc"), id: one("def")}, apierror.BadTarget},
			"two ports":          {request{e2bID: one("abc"), e2bPort: one("80"), port: one("81")}, apierror.BadTarget},
			"empty":              {request{id: one("")}, apierror.BadTarget},
			"comma":              {request{id: one("abc,def")}, apierror.BadTarget},
			"space":              {request{id: one("abc ")}, apierror.BadTarget},
			"Kelvin sign":        {request{id: one("\u212aabc")}, apierror.BadTarget},
			"a host":             {request{id: one("abc." + domain)}, apierror.BadTarget},
			"empty port":         {request{id: one("abc"), port: one("")}, apierror.BadPort},
			"port 0":             {request{id: one("abc"), port: one("0")}, apierror.BadPort},
			"leading zero":       {request{id: one("abc"), port: one("080")}, apierror.BadPort},
			"above 65535":        {request{id: one("abc"), port: one("65536")}, apierror.BadPort},
			"port with a sign":   {request{id: one("abc"), port: one("+80")}, apierror.BadPort},
			"port with an ID in": {request{id: one("abc"), port: one("80-def")}, apierror.BadPort},
		} {
			r := c.r
			r.authority = []byte(authority)
			got, err := hosts.target(&r)
			require.NotNil(t, err, "%s at %s: %+v", name, authority, got)
			require.Equal(t, c.want, err.Reason, "%s at %s", name, authority)
			require.Zero(t, got)
		}
	}
}

func TestHeaderNeverOverridesASandboxHost(t *testing.T) {
	h := Hosts{Domain: domain, Gateways: []string{"gateway.example.com"}, Paths: true}
	for _, r := range []request{
		{e2bID: one("def"), e2bPort: one("81")}, {id: one("def"), port: one("81")}, {id: several("def", "ghi")}, {port: one("0")}, {path: []byte("/sandboxes/def/81/x")},
	} {
		r.authority = []byte("80-abc." + domain)
		got, err := h.target(&r)
		require.Nil(t, err)
		require.Equal(t, Target{ID: key("abc"), Port: 80}, got)
		// A header does not turn another host into a sandbox host.
		for _, authority := range []string{"example.com", "gateway.example.com,80-abc." + domain, "x.gateway.example.com", "80-abc_." + domain, ""} {
			r.authority = []byte(authority)
			_, err := h.target(&r)
			require.NotNil(t, err, authority)
			require.Contains(t, []apierror.Reason{apierror.BadHost, apierror.BadPort}, err.Reason, authority)
		}
	}
}

func TestPathNamesTheSandboxIfEnabled(t *testing.T) {
	h := Hosts{Domain: domain, Paths: true}
	for path, want := range map[string]Target{
		"/sandboxes/abc/8080/":                {ID: key("abc"), Port: 8080, Path: "/"},
		"/sandboxes/abc/8080":                 {ID: key("abc"), Port: 8080, Path: "/"},
		"/sandboxes/abc/8080?x=/../":          {ID: key("abc"), Port: 8080, Path: "/?x=/../"},
		"/sandboxes/ABC/80/a/b?c=d?e":         {ID: key("abc"), Port: 80, Path: "/a/b?c=d?e"},
		"/sandboxes/abc/80//a//b/":            {ID: key("abc"), Port: 80, Path: "//a//b/"},
		"/sandboxes/abc/80/%2F%zz;x/.../..a":  {ID: key("abc"), Port: 80, Path: "/%2F%zz;x/.../..a"},
		"/sandboxes/abc/80/sandboxes/def/81/": {ID: key("abc"), Port: 80, Path: "/sandboxes/def/81/"},
		"/sandboxes/abc/80/?":                 {ID: key("abc"), Port: 80, Path: "/?"},
	} {
		got, err := h.target(&request{authority: []byte(domain), path: []byte(path)})
		require.Nil(t, err, path)
		require.Equal(t, want, got, path)
	}
	for path, want := range map[string]apierror.Reason{
		"": apierror.BadPath, "*": apierror.BadPath, "/": apierror.NotFound, "/sandboxes/api/80/": apierror.BadPath, "/sandboxes": apierror.BadPath, "/sandboxes/": apierror.BadPath,
		"/sandboxes/abc": apierror.BadPath, "/sandboxes?/abc/80/": apierror.BadPath, "/Sandboxes/abc/80/": apierror.BadPath, "//sandboxes/abc/80/": apierror.BadPath,
		"/sandboxes//80/": apierror.BadPath, "/sandboxes/a_b/80/": apierror.BadPath, "/sandboxes/%61bc/80/": apierror.BadPath,
		"/sandboxes/abc%2F80/x": apierror.BadPath, "sandboxes/abc/80/": apierror.BadPath, "/x/sandboxes/abc/80/": apierror.BadPath,
		"/sandboxes/abc/": apierror.BadPort, "/sandboxes/abc/0/": apierror.BadPort, "/sandboxes/abc/080/": apierror.BadPort, "/sandboxes/abc/65536/": apierror.BadPort,
		"/sandboxes/abc/http/": apierror.BadPort, "/sandboxes/abc/80%2f": apierror.BadPort, "/sandboxes/abc/80;x/": apierror.BadPort,
		"/sandboxes/abc/80/..": apierror.BadPath, "/sandboxes/abc/80/.": apierror.BadPath, "/sandboxes/abc/80/../../def/81/": apierror.BadPath,
		"/sandboxes/abc/80/x/%2e%2e/y": apierror.BadPath, "/sandboxes/abc/80/.%2E": apierror.BadPath, "/sandboxes/abc/80/..;a=b/": apierror.BadPath, "/sandboxes/abc/80/..%3Ba/": apierror.BadPath,
		"/sandboxes/abc/80/a%2f..%2fb": apierror.BadPath, "/sandboxes/abc/80/a\\..\\b": apierror.BadPath, "/sandboxes/abc/80/a%5C%2e.%5cb": apierror.BadPath,
		"/sandboxes/../abc/80/": apierror.BadPath, "/sandboxes/./abc/80/": apierror.BadPath, "/../sandboxes/abc/80/": apierror.BadPath,
	} {
		got, err := h.target(&request{authority: []byte(domain), path: []byte(path)})
		require.NotNil(t, err, "%q: %+v", path, got)
		require.Equal(t, want, err.Reason, path)
		require.Zero(t, got)
	}
	// Off by default.
	_, err := (&Hosts{Domain: domain}).target(&request{authority: []byte(domain), path: []byte("/sandboxes/abc/80/")})
	require.NotNil(t, err)
	require.Equal(t, apierror.NotFound, err.Reason)
}

func TestAmbiguousGatewayHostsAreRefused(t *testing.T) {
	for gateway, ok := range map[string]bool{
		"gateway.example.com": true, "api." + domain: false, "api.example.com": true, "a-b." + domain: true, "a.b." + domain: true,
		"80-abc." + domain: false, strings.Repeat("a", sandboxid.Len) + "." + domain: false,
		"Gateway.example.com": false, "gateway.example.com.": false, "gateway.example.com:80": false, "": false, "*.example.com": false,
	} {
		require.Equal(t, ok, (&Hosts{Domain: domain, Gateways: []string{gateway}}).Check() == nil, gateway)
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
func TestLongestDomainAndLabelFitADNSName(t *testing.T) {
	label := strings.Repeat("a", 63)
	longest := label + "." + label + "." + label[:61]
	host := "65535-" + strings.Repeat("z", sandboxid.MaxLen) + "." + longest
	require.LessOrEqual(t, len(host), 253) // RFC 1035, section 2.3.4, less the length octets
	_, err := byHost(host, longest)
	require.Nil(t, err)
}

// A client ID, which has no meaning.
var (
	hostClient = regexp.MustCompile(`^([0-9]+-[a-zA-Z0-9]+)-[a-zA-Z0-9]+\.`)
	pathClient = regexp.MustCompile(`^(/sandboxes/[a-zA-Z0-9]+)-[a-zA-Z0-9]+/`)
)

// Invariant: P5
func FuzzHost(f *testing.F) {
	for _, seed := range []string{
		"8080-abc.sandbox.example.com", "abc.sandbox.example.com.:443", "8080-ABC.SANDBOX.example.com", "80-a.sandbox.example.com,b", "80-a-B.sandbox.example.com",
		"0-a.sandbox.example.com", "65536-a.sandbox.example.com", "\u212a.sandbox.example.com", "a.sandbox.example.com:0", "[::1]:80", "", domain,
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, host string) {
		target, refusal := byHost(host, domain)
		if refusal != nil {
			if target != (Target{}) || len(refusal.Message) > 1000 || refusal.Code != http.StatusBadRequest && refusal.Code != http.StatusNotFound {
				t.Fatalf("%q was refused with %v and yet names %+v", host, refusal, target)
			}
			return
		}
		if !sandboxid.Valid(target.name()) || target.Path != "" {
			t.Fatalf("%q was accepted as %+v", host, target)
		}
		host = hostClient.ReplaceAllString(host, "$1.")
		// The host equals the written form of its target, except for case, a trailing dot and the
		// listener's port.
		composed := e2bHost(target)
		again, refusal := byHost(composed, domain)
		if refusal != nil || again != target {
			t.Fatalf("%q names %+v, but %q names %+v, %v", host, target, composed, again, refusal)
		}
		if len(host) < len(composed) || !asciiEqualFold(host[:len(composed)], composed) {
			t.Fatalf("%q was accepted as %q", host, composed)
		}
		// net/url reads the same host from a URL.
		u, err := url.Parse("http://" + host + "/")
		if err != nil || u.User != nil || u.Path != "/" || u.RawQuery != "" || !asciiEqualFold(strings.TrimSuffix(u.Hostname(), "."), composed) {
			t.Fatalf("%q was accepted as %q, but net/url reads %+v, %v", host, composed, u, err)
		}
		if port := u.Port(); port != "" {
			if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 || strconv.FormatUint(n, 10) != port {
				t.Fatalf("%q was accepted with port %q", host, port)
			}
		}
	})
}

// e2bHost is getHost of the E2B SDKs: <port>-<sandbox ID>.<domain>.
func e2bHost(t Target) string {
	if t.Port == 0 {
		return t.name() + "." + domain
	}
	return fmt.Sprintf("%d-%s.%s", t.Port, t.name(), domain)
}

// Invariant: P5
func FuzzPath(f *testing.F) {
	for _, seed := range []string{
		"/sandboxes/abc/8080/", "/sandboxes/abc/8080?x", "/sandboxes/ABC/80/a/b?c=d", "/sandboxes/a-B/80/", "/sandboxes/abc/80/%2e%2e/x", "/sandboxes/abc/80/a%2f../b",
		"/sandboxes/abc/80/a\\..\\b", "/sandboxes/abc/80/..;x/", "/sandboxes/abc/080/", "/sandboxes//80/", "/sandboxes/../abc/80/", "*", "",
	} {
		f.Add(seed)
	}
	h := Hosts{Domain: domain, Paths: true}
	f.Fuzz(func(t *testing.T, raw string) {
		target, refusal := h.target(&request{authority: []byte(domain), path: []byte(raw)})
		if refusal != nil {
			if target != (Target{}) || len(refusal.Message) > 1000 || refusal.Code != http.StatusBadRequest && refusal.Code != http.StatusNotFound {
				t.Fatalf("%q was refused with %v and yet names %+v", raw, refusal, target)
			}
			return
		}
		if !sandboxid.Valid(target.name()) || target.Port == 0 || !strings.HasPrefix(target.Path, "/") {
			t.Fatalf("%q was accepted as %+v", raw, target)
		}
		raw = pathClient.ReplaceAllString(raw, "$1/")
		// The rest of the path is unchanged.
		named := fmt.Sprintf("/sandboxes/%s/%d", target.name(), target.Port)
		if len(raw) < len(named) || !asciiEqualFold(raw[:len(named)], named) {
			t.Fatalf("%q was accepted as %q", raw, named)
		}
		if rest := raw[len(named):]; rest != target.Path && "/"+rest != target.Path {
			t.Fatalf("%q became %q", raw, target.Path)
		}
		// A proxy that decodes and cleans the path, as net/url and path do, finds the same
		// sandbox and the same rest.
		u, err := url.ParseRequestURI(raw)
		if err != nil {
			return // such a proxy refuses what net/url refuses
		}
		for _, p := range []string{u.Path, strings.ReplaceAll(u.Path, `\`, "/")} {
			clean := path.Clean(p)
			if len(clean) < len(named) || !asciiEqualFold(clean[:len(named)], named) || (len(clean) > len(named) && clean[len(named)] != '/') {
				t.Fatalf("%q was accepted as %q, and is cleaned to %q", raw, named, clean)
			}
		}
		sent, err := url.ParseRequestURI(target.Path)
		if err == nil && (sent.RawQuery != u.RawQuery || path.Clean("/"+strings.TrimLeft(u.Path[len(named):], "/")) != path.Clean("/"+strings.TrimLeft(sent.Path, "/"))) {
			t.Fatalf("%q became %q", raw, target.Path)
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
