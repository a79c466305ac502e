package policy

import (
	"net/netip"
	"slices"
)

// Policy is what one sandbox may reach: what the rules of its pool, the rules of its claim, the ports and the Reach
// all permit. The zero value permits ports 80 and 443 of all public addresses.
type Policy struct {
	Pool, Claim *Rules
	// Ports are the ports that may be reached. Default: 80 and 443.
	Ports []uint16
	// Reach is which addresses are outside. All sandboxes share it. Default: the public ones.
	Reach *Reach
}

// Reason is why a destination is refused. The values are few, so they can be labels of metrics.
type Reason string

// The reasons. They are empty for what is not refused.
const (
	// ClosedPort: the port is not one of Policy.Ports.
	ClosedPort Reason = "port"
	// NotOutside: the request names an address that the Reach does not permit.
	NotOutside Reason = "not-outside"
	// PoolRules: the rules of the pool refuse it.
	PoolRules Reason = "pool-rules"
	// ClaimRules: the rules of the claim refuse it.
	ClaimRules Reason = "claim-rules"
)

// Decide says whether a destination may be reached, and why not. A name that is not Refused may be looked up. Each of
// its addresses has to pass Permits, whatever the verdict. A literal address is never ByAddress.
func (p Policy) Decide(d Dest) (Verdict, Reason) {
	if !p.open(d.Port) {
		return Refused, ClosedPort
	}
	var pool, claim Verdict
	if d.Addr.IsValid() {
		if !p.Reach.Permits(d.Addr) {
			return Refused, NotOutside
		}
		pool, claim = literal(p.Pool, d.Addr), literal(p.Claim, d.Addr)
	} else {
		pool, claim = p.Pool.Name(d.Host), p.Claim.Name(d.Host)
	}
	switch Refused {
	case pool:
		return Refused, PoolRules
	case claim:
		return Refused, ClaimRules
	}
	return min(pool, claim), ""
}

func literal(r *Rules, a netip.Addr) Verdict {
	if r.Address(a) {
		return Allowed
	}
	return Refused
}

// Permits reports whether a connection to an address may be opened for a destination, or stay open after the policy has
// changed. The address is that of the destination, or one that the look-up of its name has returned. Permits implies
// that Decide does not refuse the destination.
func (p Policy) Permits(d Dest, a netip.Addr) bool {
	if !p.open(d.Port) || !p.Reach.Permits(a) {
		return false
	}
	if d.Addr.IsValid() {
		return a == d.Addr && p.Pool.Address(a) && p.Claim.Address(a)
	}
	return p.Pool.permits(d.Host, a) && p.Claim.permits(d.Host, a)
}

func (p Policy) open(port uint16) bool {
	return port != 0 && slices.Contains(p.Open(), port)
}

// defaultPorts are open unless a pool says otherwise.
var defaultPorts = [...]uint16{80, 443}

// Open returns the ports that may be reached. The caller must not change them.
func (p Policy) Open() []uint16 {
	if len(p.Ports) == 0 {
		return defaultPorts[:]
	}
	return p.Ports
}
