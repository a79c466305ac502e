package webhooks

import (
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// Invariant: P21
func TestOnlyPublicAddressesAreAllowed(t *testing.T) {
	g := &Guard{}
	for _, refused := range []string{
		"127.0.0.1", "127.8.8.8", "0.0.0.0", "0.1.2.3", "10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.1.1", "169.254.169.254", "100.64.0.1", "100.127.0.1",
		"192.0.0.1", "192.0.2.1", "198.18.0.1", "198.51.100.1", "203.0.113.1", "224.0.0.1", "239.1.1.1", "240.0.0.1", "255.255.255.255", "192.88.99.1",
		"::", "::1", "::7f00:1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:169.254.169.254", "fe80::1", "fe80::1%eth0", "fc00::1", "fd12::1", "fec0::1", "ff02::1", "2001:db8::1", "100::1",
		"64:ff9b::127.0.0.1", "64:ff9b::10.1.2.3", "64:ff9b:1::1", "2002:7f00:1::", "2002:a00:1::1", "2001::1", "3fff::1",
	} {
		require.ErrorIs(t, g.CheckAddress(netip.MustParseAddr(refused)), ErrAddress, refused)
	}
	for _, allowed := range []string{"1.1.1.1", "8.8.8.8", "100.128.0.1", "172.32.0.1", "2606:4700:4700::1111", "64:ff9b::8.8.8.8", "::ffff:8.8.8.8", "2002:808:808::1"} {
		require.NoError(t, g.CheckAddress(netip.MustParseAddr(allowed)), allowed)
	}
	g.Allowed, g.Denied = prefixes("10.0.0.0/8"), prefixes("10.9.0.0/16", "1.1.1.0/24")
	require.NoError(t, g.CheckAddress(netip.MustParseAddr("::ffff:10.1.0.1")))
	require.ErrorIs(t, g.CheckAddress(netip.MustParseAddr("10.9.0.1")), ErrAddress)
	require.ErrorIs(t, g.CheckAddress(netip.MustParseAddr("1.1.1.1")), ErrAddress)
	require.ErrorIs(t, g.CheckAddress(netip.MustParseAddr("64:ff9b::1.1.1.1")), ErrAddress)
	require.ErrorIs(t, g.CheckAddress(netip.MustParseAddr("192.168.0.1")), ErrAddress)
}

// Invariant: P21
func TestWrongURLsAreRefusedWithOneReason(t *testing.T) {
	g := &Guard{}
	for text, want := range map[string]string{
		"http://hooks.example.com/":              "must be https",
		"ftp://hooks.example.com/":               "must be https",
		"hooks.example.com":                      "must be a URL",
		"https://":                               "must be a URL",
		"https:///path":                          "must be a URL",
		"https:hooks.example.com":                "must be a URL",
		"https://:443/":                          "must be a URL",
		"https://user:secret@hooks.example.com/": "must not have a user",
		"https://hooks.example.com/#a":           "must not have a fragment",
		"https://127.0.0.1/":                     "not a public address",
		"https://[::1]:8443/":                    "not a public address",
		"https://LOCALHOST./":                    "not a public address",
		"https://a.localhost/":                   "not a public address",
		"https://hooks.example.com/" + strings.Repeat("a", maxURL): "at most 2048 bytes",
	} {
		require.ErrorContains(t, g.CheckURL(text), want, text)
	}
	require.NoError(t, g.CheckURL("https://hooks.example.com:8443/berth?x=1"))
	require.NoError(t, (&Guard{AllowHTTP: true, Allowed: prefixes("127.0.0.0/8")}).CheckURL("http://127.0.0.1:1/"))
}

// A name may resolve to any address, and to another one at the next request.
//
// Invariant: P21
func TestAddressIsCheckedAsItIsDialled(t *testing.T) {
	reached := false
	s := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { reached = true }))
	defer s.Close()
	_, port, err := net.SplitHostPort(s.Listener.Addr().String())
	require.NoError(t, err)
	t.Setenv("HTTP_PROXY", s.URL)
	g := &Guard{AllowHTTP: true}
	for _, host := range []string{"localhost", "127.0.0.1", "[::ffff:127.0.0.1]", "0.0.0.0", "2130706433", "0x7f.1"} {
		answer, err := g.client().Get("http://" + host + ":" + port + "/")
		require.Error(t, err, host)
		require.Nil(t, answer)
	}
	require.False(t, reached)
	g.Allowed = prefixes("127.0.0.0/8")
	answer, err := g.client().Get(s.URL)
	require.NoError(t, err)
	require.NoError(t, answer.Body.Close())
	require.True(t, reached)
}

// The log of deliveries must not show a team what the names of the cluster's network lead to.
//
// Invariant: P21
func TestDeliveryErrorNamesNoAddressOrResolver(t *testing.T) {
	_, err := (&Guard{AllowHTTP: true}).client().Get("http://localhost:1/")
	require.ErrorContains(t, err, "127.0.0.1")
	require.Equal(t, ErrAddress.Error(), short(err).Error())
	err = &url.Error{Op: "Post", URL: "https://a.svc/", Err: &net.OpError{Op: "dial", Err: &net.DNSError{Err: "no such host", Server: "10.96.0.10:53"}}}
	require.Equal(t, "the name cannot be resolved", short(err).Error())
}
