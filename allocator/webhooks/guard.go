package webhooks

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"syscall"
	"time"
)

// Guard says where webhooks may lead.
type Guard struct {
	// AllowHTTP: plain HTTP too.
	AllowHTTP bool
	// Allowed are addresses that are allowed although they are not public, such as those of a network of the operator.
	// Denied are refused in any case, before Allowed.
	Allowed, Denied []netip.Prefix
}

// Bounds of a request.
const (
	dialWait    = 5 * time.Second
	deliverWait = 10 * time.Second
	maxHeader   = 16 << 10 // of an answer, in bytes
	maxURL      = 2048
)

// special are networks that lead to no public host, besides those that netip knows: the IANA registries of special-purpose
// addresses.
var special = prefixes(
	"0.0.0.0/8", "100.64.0.0/10", "192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "240.0.0.0/4",
	"::/96", "64:ff9b:1::/48", "100::/64", "2001::/23", "2001:db8::/32", "3fff::/20", "5f00::/16", "fec0::/10",
)

var (
	nat64  = netip.MustParsePrefix("64:ff9b::/96")
	sixTo4 = netip.MustParsePrefix("2002::/16")
)

func prefixes(texts ...string) (all []netip.Prefix) {
	for _, t := range texts {
		all = append(all, netip.MustParsePrefix(t))
	}
	return all
}

// ErrAddress is the error of an address to which no webhook may lead.
var ErrAddress = errors.New("not a public address, and --webhook-allow does not list it")

// CheckAddress returns ErrAddress for an address that is not allowed.
func (g *Guard) CheckAddress(at netip.Addr) error {
	at = at.WithZone("").Unmap()
	in := func(p netip.Prefix) bool { return p.Contains(at) }
	switch {
	case slices.ContainsFunc(g.Denied, in):
		return fmt.Errorf("%v: %w", at, ErrAddress)
	case slices.ContainsFunc(g.Allowed, in):
		return nil
	}
	raw := at.As16()
	switch { // an IPv6 address that stands for an IPv4 address
	case nat64.Contains(at):
		return g.CheckAddress(netip.AddrFrom4([4]byte(raw[12:])))
	case sixTo4.Contains(at):
		return g.CheckAddress(netip.AddrFrom4([4]byte(raw[2:6])))
	}
	if !at.IsGlobalUnicast() || at.IsPrivate() || slices.ContainsFunc(special, in) {
		return fmt.Errorf("%v: %w", at, ErrAddress)
	}
	return nil
}

// CheckURL returns an error for a URL that no webhook can have. A name is not resolved: the address is checked when it is
// dialled.
func (g *Guard) CheckURL(text string) error {
	u, err := url.Parse(text)
	switch {
	case len(text) > maxURL:
		return fmt.Errorf("must have at most %d bytes", maxURL)
	case err != nil || u.Host == "" || u.Opaque != "" || u.Hostname() == "":
		return errors.New("must be a URL, such as https://hooks.example.com/berth")
	case u.Scheme != "https" && (u.Scheme != "http" || !g.AllowHTTP):
		return errors.New("must be https")
	case u.User != nil:
		return errors.New("must not have a user or password; the signature proves the sender")
	case u.Fragment != "":
		return errors.New("must not have a fragment")
	}
	host := strings.TrimSuffix(strings.ToLower(u.Hostname()), ".")
	if host == "localhost" || strings.HasSuffix(host, ".localhost") {
		host = "127.0.0.1"
	}
	if at, err := netip.ParseAddr(host); err == nil {
		return g.CheckAddress(at)
	}
	return nil
}

// control checks an address before a connection to it is made.
func (g *Guard) control(_, address string, _ syscall.RawConn) error {
	at, err := netip.ParseAddrPort(address)
	if err != nil {
		return fmt.Errorf("%s: %w", address, ErrAddress)
	}
	return g.CheckAddress(at.Addr())
}

// client returns a client for deliveries. It uses no proxy of the environment, because a proxy would dial unchecked.
func (g *Guard) client() *http.Client {
	return &http.Client{
		Timeout:       deliverWait,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		Transport: &http.Transport{
			DialContext:         (&net.Dialer{Timeout: dialWait, Control: g.control}).DialContext,
			TLSHandshakeTimeout: dialWait, MaxResponseHeaderBytes: maxHeader, DisableCompression: true, ForceAttemptHTTP2: true,
			MaxIdleConns: maxHooks, MaxIdleConnsPerHost: lanes, IdleConnTimeout: 30 * time.Second,
		},
	}
}
