package egress

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/hashicorp/golang-lru/v2/simplelru"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/berth-sandbox/berth/api/apierror"
)

// Resolver looks names up. *net.Resolver is one.
type Resolver interface {
	// LookupNetIP returns the addresses of a name that ends with a dot. The network is "ip".
	LookupNetIP(ctx context.Context, network, host string) ([]netip.Addr, error)
}

const (
	// lookupTimeout bounds a look-up, and what a request waits for one, with the wait for a place.
	lookupTimeout = 2 * time.Second
	// lookupAge is how long an answer is used again.
	lookupAge = 5 * time.Second
	// maxSandboxLookups and maxLookups bound the look-ups at one time. A pool may have as many as are free.
	maxSandboxLookups, maxLookups = 8, 1024
	// maxNames bounds the answers that are kept, and maxAddrs their addresses.
	maxNames, maxAddrs = 4096, 32
)

// names looks names up, each one once at a time, and keeps the answers for a moment.
type names struct {
	resolver Resolver
	counted  prometheus.Counter // of look-ups

	lookups sync.WaitGroup // that run
	mu      sync.Mutex
	answers *simplelru.LRU[string, *answer]
	running map[string]*answer
	pools   map[string]int // look-ups that run for each pool
}

// answer is what a name has, once done is closed. No addresses and no err: there is no such name.
type answer struct {
	done  chan struct{}
	addrs []netip.Addr
	err   *apierror.Error
	until time.Time // it may be used again
}

func newNames(r Resolver, counted prometheus.Counter) *names {
	answers, _ := simplelru.NewLRU[string, *answer](maxNames, nil) // fails for a wrong size only
	return &names{
		resolver: r, counted: counted, answers: answers, running: map[string]*answer{}, pools: map[string]int{},
	}
}

// known returns the addresses of a name, if no look-up is needed.
func (n *names) known(host string) (addrs []netip.Addr, ok bool) {
	a := n.find(host)
	if a == nil {
		return nil, false
	}
	select {
	case <-a.done:
		return a.addrs, a.err == nil
	default:
		return nil, false
	}
}

// lookup returns the addresses of a name. places are those of its sandbox, so that no other one waits for them.
func (n *names) lookup(ctx context.Context, host, pool string, places chan struct{}) ([]netip.Addr, *apierror.Error) {
	ctx, cancel := context.WithTimeout(ctx, lookupTimeout)
	defer cancel()
	a := n.find(host)
	if a == nil {
		select {
		case places <- struct{}{}:
		case <-ctx.Done():
			return nil, apierror.New(apierror.TooManyOpen,
				"the sandbox looks up %d names at the moment; try again", maxSandboxLookups)
		}
		var first bool
		if a, first = n.begin(host, pool); first {
			n.lookups.Go(func() {
				defer func() { <-places }()
				n.run(a, host, pool)
			})
		} else {
			<-places
		}
		if a == nil {
			return nil, apierror.New(apierror.Overloaded,
				"the egress gateway looks up too many names for sandboxes of this pool at the moment; try again")
		}
	}
	select {
	case <-a.done:
		return a.addrs, a.err
	case <-ctx.Done():
		return nil, failed(host)
	}
}

func failed(host string) *apierror.Error {
	return apierror.New(apierror.EgressUnreachable, "%s could not be looked up in time; try again", host)
}

// find returns the answer for a name that is known or is being looked up, nil if there is none.
func (n *names) find(host string) *answer {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.have(host)
}

// have is find. The caller has the lock.
func (n *names) have(host string) *answer {
	if a := n.running[host]; a != nil {
		return a
	}
	if a, ok := n.answers.Get(host); ok && time.Now().Before(a.until) {
		return a
	}
	return nil
}

// begin is find, and begins an answer if there is none. It returns nil if the pool has as many as are free.
func (n *names) begin(host, pool string) (a *answer, first bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if a := n.have(host); a != nil {
		return a, false
	}
	if n.pools[pool] >= maxLookups-len(n.running) {
		return nil, false
	}
	a = &answer{done: make(chan struct{})}
	n.running[host] = a
	n.pools[pool]++
	return a, true
}

// run looks a name up. Others wait for it, too, so it does not end with its client.
func (n *names) run(a *answer, host, pool string) {
	ctx, cancel := context.WithTimeout(context.Background(), lookupTimeout)
	defer cancel()
	a.addrs, a.err = n.ask(ctx, host)
	a.until = time.Now().Add(lookupAge)
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.running, host)
	if n.pools[pool]--; n.pools[pool] == 0 {
		delete(n.pools, pool)
	}
	if a.err == nil {
		n.answers.Add(host, a)
	}
	close(a.done)
}

// ask asks the resolver.
func (n *names) ask(ctx context.Context, host string) ([]netip.Addr, *apierror.Error) {
	n.counted.Inc()
	addrs, err := n.resolver.LookupNetIP(ctx, "ip", host+".") // with the dot no search domain is tried
	var missing *net.DNSError
	switch {
	case errors.As(err, &missing) && missing.IsNotFound:
		return nil, nil
	case err != nil:
		return nil, failed(host)
	}
	addrs = addrs[:min(len(addrs), maxAddrs)]
	own := make([]netip.Addr, len(addrs))
	for i, addr := range addrs {
		own[i] = addr.Unmap() // as a resolver may return those of IPv4
	}
	return own, nil
}
