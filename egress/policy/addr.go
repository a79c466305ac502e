package policy

import (
	"fmt"
	"net/netip"
	"slices"
)

// plain reports whether an address stands for itself only.
func plain(a netip.Addr) bool { return a.IsValid() && a.Zone() == "" && !a.Is4In6() }

// prefixes is a set of CIDRs: sorted, and none contains another. It does not change once it is made.
type prefixes []netip.Prefix

func newPrefixes(all []netip.Prefix) prefixes {
	sorted := make(prefixes, 0, len(all))
	for _, p := range all {
		sorted = append(sorted, p.Masked())
	}
	slices.SortFunc(sorted, netip.Prefix.Compare)
	// Between a CIDR and one that it contains, the order has only others that it contains.
	kept := sorted[:0]
	for _, p := range sorted {
		if n := len(kept); n == 0 || !kept[n-1].Contains(p.Addr()) {
			kept = append(kept, p)
		}
	}
	return slices.Clip(kept)
}

// contains reports whether a CIDR of the set contains a plain address.
func (p prefixes) contains(a netip.Addr) bool {
	i, first := slices.BinarySearchFunc(p, a, func(p netip.Prefix, a netip.Addr) int { return p.Addr().Compare(a) })
	return first || i > 0 && p[i-1].Contains(a)
}

func mustPrefixes(all ...string) (parsed []netip.Prefix) {
	for _, text := range all {
		parsed = append(parsed, netip.MustParsePrefix(text))
	}
	return parsed
}

// global is what IANA gives out as global unicast of IPv6. Everything else of IPv6 is not public.
var global = netip.MustParsePrefix("2000::/3")

// special is what is not public of IPv4 and of global: the ranges that are not globally reachable by IANA's registries
// of special-purpose addresses (RFC 6890 and its updates), and multicast. Ranges that are reachable and lie in one
// that is not, such as anycast addresses for NAT traversal in 192.0.0.0/24 and 2001::/23, are left out with it.
var special = newPrefixes(mustPrefixes(
	"0.0.0.0/8",        // this network
	"10.0.0.0/8",       // private
	"100.64.0.0/10",    // shared by providers
	"127.0.0.0/8",      // loopback
	"168.63.129.16/32", // the platform's own services in Azure, on every node there; in no registry
	"169.254.0.0/16",   // link-local, with the metadata services of clouds
	"172.16.0.0/12",    // private
	"192.0.0.0/24",     // protocol assignments
	"192.0.2.0/24",     // documentation
	"192.88.99.0/24",   // relays of 6to4, deprecated
	"192.168.0.0/16",   // private
	"198.18.0.0/15",    // benchmarks
	"198.51.100.0/24",  // documentation
	"203.0.113.0/24",   // documentation
	"224.0.0.0/3",      // multicast, reserved, broadcast
	"2001::/23",        // protocol assignments, with Teredo, which contains IPv4 addresses
	"2001:db8::/32",    // documentation
	"2002::/16",        // 6to4, which contains IPv4 addresses
	"3fff::/20",        // documentation
))

// Public reports whether an address is one of the internet's: global unicast, and not special. An IPv4-mapped address,
// one of NAT64 and one with a zone are not.
func Public(a netip.Addr) bool {
	return plain(a) && (a.Is4() || global.Contains(a)) && !special.contains(a)
}

// Reach is which addresses count as outside. Nil: the public ones.
type Reach struct{ private, never prefixes }

// hidden is what no operator can count as outside: addresses that are of one link or of many hosts, and those that
// contain an IPv4 address, because never would not be asked about that.
var hidden = mustPrefixes("0.0.0.0/8", "169.254.0.0/16", "224.0.0.0/3",
	"::/128", "64:ff9b::/96", "64:ff9b:1::/48", "2001::/32", "2002::/16", "fe80::/10", "ff00::/8")

// NewReach returns the Reach of an operator who counts the ranges of private as outside too, though they are not
// public, and those of never as inside: those of pods, services and nodes, and Berth's own addresses. Never wins.
func NewReach(private, never []netip.Prefix) (*Reach, error) {
	for _, p := range slices.Concat(private, never) {
		switch {
		case !p.IsValid():
			return nil, fmt.Errorf("range %s is not a CIDR", p)
		case p.Addr().Is4In6():
			return nil, fmt.Errorf("range %s is IPv4-mapped: write the IPv4 range", p)
		}
	}
	for _, p := range private {
		for _, h := range hidden {
			if p.Overlaps(h) {
				return nil, fmt.Errorf("private range %s overlaps %s, which is never outside: write narrower ranges", p, h)
			}
		}
	}
	return &Reach{newPrefixes(private), newPrefixes(never)}, nil
}

// Permits reports whether an address is outside.
func (r *Reach) Permits(a netip.Addr) bool {
	if r == nil {
		return Public(a)
	}
	return plain(a) && !r.never.contains(a) && (r.private.contains(a) || Public(a))
}
