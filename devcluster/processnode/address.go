package processnode

import (
	"net/netip"
	"sync"
)

// addressPool assigns the lowest free address of a range. So the address of a
// deleted pod goes to the next pod at once. Berth must survive that.
type addressPool struct {
	prefix netip.Prefix

	mu    sync.Mutex
	taken map[netip.Addr]bool
}

func newAddressPool(prefix netip.Prefix) *addressPool {
	return &addressPool{prefix: prefix.Masked(), taken: map[netip.Addr]bool{}}
}

// take reports false if no address is free.
func (p *addressPool) take() (netip.Addr, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for a := p.prefix.Addr(); p.prefix.Contains(a); a = a.Next() {
		if last := a.As4()[3]; last == 0 || last == 255 || a.String() == hostIP || p.taken[a] {
			continue
		}
		p.taken[a] = true
		return a, true
	}
	return netip.Addr{}, false
}

// release gives an address back. No process may listen on it.
func (p *addressPool) release(a netip.Addr) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.taken, a)
}
