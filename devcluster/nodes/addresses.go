package nodes

import (
	"net/netip"
	"sync"
)

// HostIP is the address of every node: they share one machine.
const HostIP = "127.0.0.1"

// Addresses assigns pod addresses from a range inside 127.0.0.0/8. It assigns none that
// ends in .0 or .255, and not HostIP. The address that was released last is assigned
// next, so the address of a deleted pod goes to the next pod at once. Berth must
// survive that. Methods may be called concurrently.
type Addresses struct {
	prefix netip.Prefix

	mu   sync.Mutex
	next netip.Addr // no address from here on has been assigned yet
	free []netip.Addr
}

// NewAddresses returns a pool of the addresses in prefix, which must be IPv4.
func NewAddresses(prefix netip.Prefix) *Addresses {
	return &Addresses{prefix: prefix.Masked(), next: prefix.Masked().Addr()}
}

// Take reports false if no address is free.
func (p *Addresses) Take() (netip.Addr, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if last := len(p.free) - 1; last >= 0 {
		a := p.free[last]
		p.free = p.free[:last]
		return a, true
	}
	for p.prefix.Contains(p.next) {
		a := p.next
		p.next = a.Next()
		if last := a.As4()[3]; last != 0 && last != 255 && a.String() != HostIP {
			return a, true
		}
	}
	return netip.Addr{}, false
}

// Release gives an address back that Take returned. No process may listen on it.
func (p *Addresses) Release(a netip.Addr) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.free = append(p.free, a)
}
