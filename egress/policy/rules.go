package policy

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
)

const (
	maxEntries = 256
	maxEntry   = 1024 // bytes: enough for each name in Unicode that has at most maxName bytes in A-labels
)

// All is the entry that means all traffic, of IPv6 too.
const All = "0.0.0.0/0"

// Verdict says whether a destination may be reached, as far as that is known without its addresses. The lower of two
// verdicts is the verdict of both.
type Verdict int

// The verdicts.
const (
	// Refused: it may not, and a name must not be looked up.
	Refused Verdict = iota
	// ByAddress: a name may be looked up, and its addresses decide.
	ByAddress
	// Allowed: it may. Addresses that are not outside are still refused.
	Allowed
)

// List is a list of entries, and what the field is called from which it comes, for errors: "network.allowOut".
type List struct {
	Field   string
	Entries []string
}

// Rules are what one allow list and one deny list say. Nil Rules allow everything.
type Rules struct {
	// names has the names of allow, and ".x" for the entry "*.x".
	names             map[string]struct{}
	allow, deny       prefixes
	allowAll, denyAll bool
}

// Parse returns the rules of two lists. The error names the entry and what to write instead.
//
// Both lists have addresses and CIDRs. Allow has names too, in Unicode or with A-labels: "x.org" is this name only, and
// "*.x.org" is every name below it, however many labels it has more, and not x.org itself. A name of one label and a
// wildcard for a whole top-level domain are errors. So is a name in allow while deny has no 0.0.0.0/0: everything that
// is not denied is allowed then, so the name would have no effect, which its author cannot want.
func Parse(allow, deny List) (*Rules, error) {
	r := &Rules{names: map[string]struct{}{}}
	firstName, err := r.read(allow, &r.allow, &r.allowAll, true)
	if err != nil {
		return nil, err
	}
	if _, err := r.read(deny, &r.deny, &r.denyAll, false); err != nil {
		return nil, err
	}
	if firstName >= 0 && !r.denyAll {
		return nil, wrong(allow, firstName, fmt.Errorf("a name has no effect while all traffic is allowed: "+
			"add %q to %s, or leave out the name", All, deny.Field))
	}
	return r, nil
}

// read adds the entries of a list to the rules, and returns where its first name is, or -1.
func (r *Rules) read(l List, into *prefixes, everything *bool, names bool) (firstName int, err error) {
	if n := len(l.Entries); n > maxEntries {
		return -1, fmt.Errorf("%s has %d entries, and at most %d are possible", l.Field, n, maxEntries)
	}
	var cidrs []netip.Prefix
	firstName = -1
	for i, text := range l.Entries {
		cidr, err := parseCIDR(text)
		switch {
		case err != nil:
			return -1, wrong(l, i, err)
		case cidr.IsValid() && cidr.Bits() == 0 && cidr.Addr().Is4():
			*everything = true
		case cidr.IsValid():
			cidrs = append(cidrs, cidr)
		case !names:
			return -1, wrong(l, i, fmt.Errorf("it is not an address or a CIDR, and names cannot be denied: "+
				"deny %q and allow the names that may be reached", All))
		default:
			name, err := parseName(text)
			if err != nil {
				return -1, wrong(l, i, err)
			}
			r.names[strings.Clone(name)] = struct{}{}
			if firstName < 0 {
				firstName = i
			}
		}
	}
	*into = newPrefixes(cidrs)
	return firstName, nil
}

func wrong(l List, i int, err error) error {
	return fmt.Errorf("%s[%d] %s: %w", l.Field, i, clip(l.Entries[i]), err)
}

// parseCIDR returns the range of an entry that is an address or a CIDR, and an invalid one for an entry that may be a
// name.
func parseCIDR(text string) (netip.Prefix, error) {
	if len(text) > maxEntry {
		return netip.Prefix{}, fmt.Errorf("it is longer than %d bytes", maxEntry)
	}
	p, err := netip.ParsePrefix(text)
	if err != nil {
		a, err := netip.ParseAddr(text)
		if err != nil {
			return netip.Prefix{}, notAddress(text)
		}
		if a.Zone() != "" {
			return netip.Prefix{}, errors.New("an address has no zone here: leave out the % and what follows")
		}
		p = netip.PrefixFrom(a, a.BitLen())
	}
	if p.Addr().Is4In6() {
		return netip.Prefix{}, errMapped
	}
	return p, nil
}

// notAddress says what is wrong with an entry that is not an address and cannot be a name either.
func notAddress(text string) error {
	switch {
	case strings.Contains(text, "://"):
		return errors.New("write the name only, without a scheme and a path")
	case strings.ContainsRune(text, '/'):
		return errors.New(`it is not a CIDR such as "192.0.2.0/24", and a name has no path: write the name only`)
	case strings.ContainsRune(text, '['):
		return errors.New("write an IPv6 address without brackets and without a port")
	case strings.ContainsRune(text, ':'):
		return errors.New("write the name or the address only, without a port")
	}
	return nil
}

// parseName returns the key in Rules.names of an entry.
func parseName(text string) (string, error) {
	if text == "*" {
		return "", fmt.Errorf("write %q for all traffic", All)
	}
	parent, wildcard := strings.CutPrefix(text, "*.")
	if strings.ContainsRune(parent, '*') {
		return "", errors.New(`a wildcard stands for whole labels, and only in front: write "*.example.com"`)
	}
	name, err := unicodeName(parent)
	if wildcard && err == nil {
		name = "." + name
	}
	return name, err
}

// Name says whether a name in the form of [Dest] may be reached and looked up.
func (r *Rules) Name(host string) Verdict {
	switch {
	case r == nil, r.allowAll, !r.denyAll && len(r.deny) == 0:
		return Allowed
	case !r.denyAll:
		return ByAddress
	}
	if _, ok := r.names[host]; ok {
		return Allowed
	}
	for i := range len(host) {
		if host[i] == '.' {
			if _, ok := r.names[host[i:]]; ok {
				return Allowed
			}
		}
	}
	return Refused
}

// Address reports whether an address may be reached that a request names, or that a name has whose verdict is
// ByAddress. It is not to be asked about a name that is Allowed.
func (r *Rules) Address(a netip.Addr) bool {
	switch {
	case r == nil:
		return true
	case !plain(a):
		return false
	}
	return r.allowAll || r.allow.contains(a) || !r.denyAll && !r.deny.contains(a)
}

// permits reports whether a name may be reached at an address.
func (r *Rules) permits(host string, a netip.Addr) bool {
	verdict := r.Name(host)
	return verdict == Allowed || verdict == ByAddress && r.Address(a)
}
