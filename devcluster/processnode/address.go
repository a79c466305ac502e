package processnode

import (
	"net/netip"
	"sync"
)

// addressPool hands out the lowest free address of a range, and an address that
// was given back before any higher one: a deleted pod's address is the next
// pod's at once, which is what anything that routes to pods must survive.
type addressPool struct {
	prefix netip.Prefix

	mu    sync.Mutex
	taken map[netip.Addr]bool
}

func newAddressPool(prefix netip.Prefix) *addressPool {
	return &addressPool{prefix: prefix.Masked(), taken: map[netip.Addr]bool{}}
}

// take reports false when the range is used up.
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

// release gives an address back. Nothing may listen on it any more.
func (p *addressPool) release(a netip.Addr) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.taken, a)
}
