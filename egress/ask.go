package egress

import (
	"context"
	"hash/maphash"
	"net/netip"
	"sync"
	"time"

	"github.com/berth-sandbox/berth/internal/rate"
)

const (
	// askTimeout bounds how long a request of a sandbox that is not known waits for the allocator's answer.
	askTimeout = time.Second
	// maxAsks bounds the sandboxes that are asked about at one time.
	maxAsks = 64
	// askers is how many buckets the addresses share that have questions asked.
	askers = 1024
)

// askRate bounds the questions to the allocator: every pod that reaches the gateway can have one asked. askerRate
// bounds those of one address.
var askRate, askerRate = rate.PerSecond(100), rate.New(2, 16)

// asks are the questions to the allocator about sandboxes that are not known, each one once at a time.
type asks struct {
	ask   func(id string) bool // nil: none is asked
	began time.Time            // of the clock of full
	seed  maphash.Seed

	mu      sync.Mutex
	pending map[string]chan struct{} // closed by the answer
	full    time.Duration            // when the bucket of askRate is full
	askers  [askers]time.Duration    // the same of askerRate, by a hash of the address
}

// wait has the allocator asked about a sandbox and waits for the answer, unless too many are asked about.
func (a *asks) wait(ctx context.Context, id string, peer netip.Addr) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	answered := a.begin(id, peer)
	if answered == nil {
		return
	}
	select {
	case <-answered:
	case <-ctx.Done():
		a.end(id, answered)
	}
}

// begin returns the question about a sandbox, nil if there is none.
func (a *asks) begin(id string, peer netip.Addr) chan struct{} {
	a.mu.Lock()
	defer a.mu.Unlock()
	if answered := a.pending[id]; answered != nil {
		return answered
	}
	now, asker := time.Since(a.began), &a.askers[maphash.Comparable(a.seed, peer)%askers]
	own, pause := askerRate.Take(*asker, now)
	if pause > 0 {
		return nil
	}
	*asker = own
	after, pause := askRate.Take(a.full, now)
	if len(a.pending) >= maxAsks || pause > 0 || !a.ask(id) {
		return nil
	}
	a.full = after
	a.pending[id] = make(chan struct{})
	return a.pending[id]
}

// end ends the question about a sandbox. If only is set it ends no other one.
func (a *asks) end(id string, only chan struct{}) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if answered := a.pending[id]; answered != nil && (only == nil || only == answered) {
		delete(a.pending, id)
		close(answered)
	}
}

// Answered says that what the allocator knows of a sandbox is in effect.
func (s *Server) Answered(id string) { s.asks.end(id, nil) }
