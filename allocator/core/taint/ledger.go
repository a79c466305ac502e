package taint

import (
	"fmt"
	"net/netip"
	"slices"
)

// Pod is what the ledger knows of a pod. K names it. Only the Ledger changes it.
type Pod[K comparable] struct {
	Key     K
	at      *address[K] // nil: it has none
	used    bool        // it has a sandbox
	ending  bool
	gone    bool
	tainted bool
	blocks  []string // sandboxes that are blocked until it is retired or gone
}

type address[K comparable] struct {
	ip     netip.Addr
	pods   []*Pod[K] // that were last seen there
	routes int       // of sandboxes, to this address, that are not fenced
	left   []*Pod[K] // tainted pods that were there since the address is tainted, and have moved away
}

// Ledger has the addresses of all pods and of all routes.
type Ledger[K comparable] struct {
	addresses map[netip.Addr]*address[K]
	routes    map[string]route[K] // by sandbox; those that are not fenced
	blocked   map[string]int      // by sandbox; how many pods block it
}

// route leads to the addresses of a sandbox, of which pod serves it.
type route[K comparable] struct {
	pod K
	to  []netip.Addr
}

// New returns an empty ledger.
func New[K comparable]() *Ledger[K] {
	return &Ledger[K]{addresses: map[netip.Addr]*address[K]{}, routes: map[string]route[K]{}, blocked: map[string]int{}}
}

// IP is the address of a pod, not valid if it has none.
func (p *Pod[K]) IP() (ip netip.Addr) {
	if p.at != nil {
		ip = p.at.ip
	}
	return ip
}

// AddressTainted reports whether stale routes may reach the address of a pod.
func (p *Pod[K]) AddressTainted() bool { return p.at != nil && p.at.routes > 0 }

// Tainted reports whether requests of another sandbox may have reached a pod while it was idle.
func (p *Pod[K]) Tainted() bool { return p.tainted }

// Contested reports whether another pod, which is not ending, seems to be at the address of a pod.
func (p *Pod[K]) Contested() bool {
	return p.at != nil && slices.ContainsFunc(p.at.pods, func(o *Pod[K]) bool { return o != p && !o.ending })
}

// addressOf returns an address, and creates its entry if there is none.
func (l *Ledger[K]) addressOf(ip netip.Addr) *address[K] {
	a := l.addresses[ip]
	if a == nil {
		a = &address[K]{ip: ip}
		l.addresses[ip] = a
	}
	return a
}

// drop forgets an address that nothing is known about.
func (l *Ledger[K]) drop(a *address[K]) {
	if len(a.pods) == 0 && a.routes == 0 {
		delete(l.addresses, a.ip)
	}
}

// Observation is how a pod was last seen.
type Observation struct {
	IP netip.Addr // not valid: none
	// Used: it has a sandbox, on record or in the table of the caller.
	Used bool
	// Ending: it is being deleted, or has ended.
	Ending bool
}

// Seen notes an observation of a pod. It reports whether that has tainted the pod, and returns the
// other pods at the address that it left and at the one where it is: they may be contested now, or
// no longer.
func (l *Ledger[K]) Seen(p *Pod[K], o Observation) (tainted bool, others []*Pod[K]) {
	p.used, p.ending = p.used || o.Used, o.Ending
	if p.at != nil && p.at.ip != o.IP {
		others = l.leave(p)
	}
	if !o.IP.IsValid() {
		return false, others
	}
	if p.at == nil {
		p.at = l.addressOf(o.IP)
		p.at.pods = append(p.at.pods, p)
		tainted = !p.used && !p.tainted && p.at.routes > 0
		p.tainted = p.tainted || tainted
	}
	return tainted, append(others, except(p.at.pods, p)...)
}

// leave takes a pod from its address. It returns the pods that stay.
func (l *Ledger[K]) leave(p *Pod[K]) (others []*Pod[K]) {
	a := p.at
	p.at = nil
	a.pods = except(a.pods, p)
	if p.tainted && !p.gone && a.routes > 0 {
		a.left = append(a.left, p)
	}
	l.drop(a)
	return a.pods
}

// Gone notes that a pod does not exist any more. It returns the other pods at its address, and the
// sandboxes that are done because of that.
func (l *Ledger[K]) Gone(p *Pod[K]) (others []*Pod[K], done []string) {
	p.gone = true
	if p.at != nil {
		others = l.leave(p)
	}
	return others, l.Retired(p)
}

// Retired notes that the deletion of a pod is journaled. It returns the sandboxes that are done
// because of that.
func (l *Ledger[K]) Retired(p *Pod[K]) (done []string) {
	for _, sandbox := range p.blocks {
		if l.blocked[sandbox]--; l.blocked[sandbox] == 0 {
			delete(l.blocked, sandbox)
			done = append(done, sandbox)
		}
	}
	p.blocks = nil
	return done
}

// AddRoutes notes that routers may have routes to these addresses from now on, for a sandbox that
// a pod serves. It returns the pods that this has tainted, and all other pods at the addresses. It
// does nothing for a sandbox that is routed.
func (l *Ledger[K]) AddRoutes(sandbox string, pod K, to []netip.Addr) (tainted, others []*Pod[K]) {
	if l.Routed(sandbox) {
		return nil, nil
	}
	l.routes[sandbox] = route[K]{pod, to}
	for _, ip := range to {
		a := l.addressOf(ip)
		a.routes++
		for _, p := range a.pods {
			switch {
			case p.Key == pod:
				p.used = true
				continue
			case !p.used && !p.tainted:
				p.tainted = true
				tainted = append(tainted, p)
			}
			others = append(others, p)
		}
	}
	return tainted, others
}

// Fenced notes that no router has a route of a sandbox any more. It returns the pods at the
// addresses other than its own. retired reports whether the deletion of a pod is journaled.
func (l *Ledger[K]) Fenced(sandbox string, retired func(K) bool) (others []*Pod[K]) {
	r := l.routes[sandbox]
	delete(l.routes, sandbox)
	for _, ip := range r.to {
		a := l.addresses[ip]
		a.routes--
		for _, p := range slices.Concat(a.pods, a.left) {
			if p.tainted && !p.gone && !retired(p.Key) {
				p.blocks = append(p.blocks, sandbox)
				l.blocked[sandbox]++
			}
		}
		for _, p := range a.pods {
			if p.Key != r.pod {
				others = append(others, p)
			}
		}
		if a.routes == 0 {
			a.left = nil
		}
		l.drop(a)
	}
	return others
}

// Routed reports whether routers may have routes of a sandbox.
func (l *Ledger[K]) Routed(sandbox string) bool {
	_, ok := l.routes[sandbox]
	return ok
}

// Blocked reports whether a sandbox whose routes are fenced must not be forgotten.
func (l *Ledger[K]) Blocked(sandbox string) bool { return l.blocked[sandbox] > 0 }

func except[K comparable](pods []*Pod[K], p *Pod[K]) []*Pod[K] {
	return slices.DeleteFunc(slices.Clone(pods), func(o *Pod[K]) bool { return o == p })
}

// Check returns the first contradiction between the tables. pods are all that exist. It is for
// tests.
func (l *Ledger[K]) Check(pods []*Pod[K]) error {
	routes, blocked, located := map[netip.Addr]int{}, map[string]int{}, 0
	for _, r := range l.routes {
		for _, ip := range r.to {
			routes[ip]++
		}
	}
	for _, p := range pods {
		switch {
		case p.gone:
			return fmt.Errorf("taint: pod %v exists, and is gone", p.Key)
		case p.at != nil && (l.addresses[p.at.ip] != p.at || !slices.Contains(p.at.pods, p)):
			return fmt.Errorf("taint: pod %v is not kept with its address %v", p.Key, p.at.ip)
		case p.AddressTainted() && !p.used && !p.tainted:
			return fmt.Errorf("taint: pod %v is idle at %v, and is not tainted", p.Key, p.at.ip)
		}
		if p.at != nil {
			located++
		}
		for _, sandbox := range p.blocks {
			blocked[sandbox]++
		}
	}
	for ip, a := range l.addresses {
		if a.ip != ip || a.routes != routes[ip] || a.routes == 0 && (len(a.pods) == 0 || len(a.left) > 0) {
			return fmt.Errorf("taint: %d routes lead to %v, kept is %+v", routes[ip], ip, *a)
		}
		delete(routes, ip)
		located -= len(a.pods)
	}
	if len(routes) > 0 || located != 0 {
		return fmt.Errorf("taint: addresses with routes %v are not kept, and %d pods", routes, located)
	}
	if fmt.Sprint(blocked) != fmt.Sprint(l.blocked) {
		return fmt.Errorf("taint: pods block %v, counted are %v", blocked, l.blocked)
	}
	return nil
}
