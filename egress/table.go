package egress

import (
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/berth-sandbox/berth/api/sandboxid"
	"github.com/berth-sandbox/berth/egress/policy"
	"github.com/berth-sandbox/berth/extproc/h2"
)

// Sandbox is what the router knows of one sandbox.
type Sandbox struct {
	ID          string
	Incarnation uint64
	// Addr is the address of its pod.
	Addr netip.Addr
	// TokenHash is the SHA-256 of its token for the proxy.
	TokenHash [sha256.Size]byte
	Policy    policy.Policy
	// Headers are set on its requests. Of two with one host, port and name the last counts. The slice must not be changed.
	Headers []Header
	// HeadersUnknown: there are headers that cannot be read, so no plain request to a name is let through.
	HeadersUnknown bool
	// Pool is its name, for the log.
	Pool string
}

// Check returns an error that names a field which no sandbox can have so.
func (s *Sandbox) Check() error {
	var errs []error
	if _, ok := sandboxid.KeyOf(s.ID); !ok {
		errs = append(errs,
			fmt.Errorf("sandbox ID %q: must have 1 to %d characters of a-z and 0-9", s.ID, sandboxid.MaxKeyLen))
	}
	if !s.Addr.IsValid() || s.Addr.Zone() != "" || s.Addr.Is4In6() {
		errs = append(errs, fmt.Errorf("sandbox %s: address %s: must be an address without a zone, and not IPv4-mapped",
			sandboxid.Short(s.ID), s.Addr))
	}
	return errors.Join(errs...)
}

// isPod reports whether two values are of one pod of one sandbox.
func (s *Sandbox) isPod(other *Sandbox) bool {
	return s.ID == other.ID && s.Incarnation == other.Incarnation && s.Addr == other.Addr
}

// entry is a sandbox in the table. The lock of the table guards it.
type entry struct {
	Sandbox
	open   int // requests that are deciding, admitted or cut
	admits map[*request]struct{}
	counts Counts // without Open and Destinations
	recent recent
	// audits are those of requests that were admitted and refused.
	audits [2]audit
	// full is when the bucket of the sandbox is full: see rate.Limit.
	full time.Duration
	// origins are when the buckets of the addresses are full that the sandbox sends requests to. nil: all are.
	origins *[origins]time.Duration
	// lookups has a place for each look-up of the sandbox that may run at one time.
	lookups chan struct{}
}

// request is a request that is or was admitted.
type request struct {
	table       *table
	of          *entry
	id          string
	incarnation uint64
	dest        policy.Dest
	addr        netip.Addr // where it goes
	headers     []Header   // what it gets. Without any it is not changed, and goes out as it came
	ending      h2.Ending
	cut         *epoch // in which it was cut; nil: it was not. The lock of the table guards it.
}

// Ended ends a request. After an end by this process it is not known when Envoy reads that, so the request counts as
// one that has not ended.
func (r *request) Ended(byPeer bool) {
	r.table.mu.Lock()
	defer r.table.mu.Unlock()
	delete(r.of.admits, r)
	r.of.open--
	if !byPeer {
		return
	}
	r.table.unended--
	if r.cut != nil {
		r.cut.left--
		r.table.advance()
	}
}

// epoch is what was cut between one barrier and the next one.
type epoch struct {
	left int // requests that have not ended
	done func()
}

// table has all sandboxes.
type table struct {
	mu    sync.Mutex
	ready bool // the first snapshot was there
	shut  bool // nothing more is admitted
	all   map[string]*entry
	at    map[netip.Addr][]*entry
	// unended is how many requests were admitted and have not ended, of sandboxes that are gone, too.
	unended int
	// cuts is how many were ever cut.
	cuts  uint64
	flows flows
	// epochs are those whose barrier waits, in their order, and the present one.
	epochs []*epoch
}

// advance calls what waits for the end of requests that have ended.
func (t *table) advance() {
	for len(t.epochs) > 1 && t.epochs[0].left == 0 {
		t.epochs[0].done()
		t.epochs = t.epochs[1:]
	}
}

// put adds a sandbox or replaces it, and returns the requests that may not go on.
func (t *table) put(s Sandbox) (victims []*request) {
	e := t.all[s.ID]
	if e == nil || !e.isPod(&s) {
		victims = t.remove(s.ID)
		e = &entry{
			Sandbox: s, admits: map[*request]struct{}{}, lookups: make(chan struct{}, maxSandboxLookups),
		}
		t.all[s.ID] = e
		t.at[s.Addr] = append(t.at[s.Addr], e)
		return victims
	}
	e.Sandbox = s
	for r := range e.admits {
		if !s.Policy.Permits(r.dest, r.addr) {
			victims = append(victims, r)
		}
	}
	return victims
}

// remove takes a sandbox out of the table, and returns its requests.
func (t *table) remove(id string) (victims []*request) {
	e := t.all[id]
	if e == nil {
		return nil
	}
	delete(t.all, id)
	var others []*entry
	for _, other := range t.at[e.Addr] {
		if other != e {
			others = append(others, other)
		}
	}
	if t.at[e.Addr] = others; len(others) == 0 {
		delete(t.at, e.Addr)
	}
	for r := range e.admits {
		victims = append(victims, r)
	}
	return victims
}

// everything returns all admitted requests.
func (t *table) everything() (victims []*request) {
	for _, e := range t.all {
		for r := range e.admits {
			victims = append(victims, r)
		}
	}
	return victims
}

// change changes the table, and cuts the requests that change returns.
func (t *table) change(change func() (victims []*request)) {
	t.mu.Lock()
	victims := change()
	present := t.epochs[len(t.epochs)-1]
	for _, r := range victims {
		if r.cut == nil {
			r.cut = present
			present.left++
			t.cuts++
		}
	}
	t.mu.Unlock()
	for _, r := range victims {
		r.ending.End(codes.Aborted, "the sandbox may not do this any more")
	}
}

// Set adds a sandbox, or replaces what is known of it. Requests are cut that the new rules refuse, or that belong to
// another incarnation or address of the sandbox.
func (s *Server) Set(sandbox Sandbox) error {
	if err := sandbox.Check(); err != nil {
		return err
	}
	s.table.change(func() []*request { return s.table.put(sandbox) })
	return nil
}

// Forget removes a sandbox, and cuts its requests.
func (s *Server) Forget(id string) {
	s.table.change(func() []*request { return s.table.remove(id) })
}

// Replace makes these all sandboxes that there are, and cuts the requests that may not go on. Until its first call
// every request is refused.
func (s *Server) Replace(all []Sandbox) error {
	known := make(map[string]bool, len(all))
	for i := range all {
		if err := all[i].Check(); err != nil {
			return err
		}
		if known[all[i].ID] {
			return fmt.Errorf("sandbox %s: it is there twice", sandboxid.Short(all[i].ID))
		}
		known[all[i].ID] = true
	}
	s.table.change(func() (victims []*request) {
		for id := range s.table.all {
			if !known[id] {
				victims = append(victims, s.table.remove(id)...)
			}
		}
		for i := range all {
			victims = append(victims, s.table.put(all[i])...)
		}
		s.table.ready = true
		return victims
	})
	return nil
}

// Barrier calls done once all requests that were cut before have ended at Envoy, in the order of the barriers. If
// several are due together it may call the newest only. done must not block, and must not call the Server.
func (s *Server) Barrier(done func()) {
	t := &s.table
	t.mu.Lock()
	defer t.mu.Unlock()
	n := len(t.epochs)
	if n > 1 && t.epochs[n-1].left == 0 { // it waits for what the one before waits for
		t.epochs[n-2].done = done
		return
	}
	t.epochs[n-1].done = done
	t.epochs = append(t.epochs, &epoch{})
	t.advance()
}

// Unended returns how many requests were admitted and are not known to have ended at Envoy.
func (s *Server) Unended() int {
	s.table.mu.Lock()
	defer s.table.mu.Unlock()
	return s.table.unended
}

// Sandboxes returns what the router knows.
func (s *Server) Sandboxes() []Sandbox {
	s.table.mu.Lock()
	defer s.table.mu.Unlock()
	all := make([]Sandbox, 0, len(s.table.all))
	for _, e := range s.table.all {
		all = append(all, e.Sandbox)
	}
	return all
}

// hasToken reports whether a token is that of the sandbox, in a time that says nothing of it.
func (s *Sandbox) hasToken(token []byte) bool {
	hash := sha256.Sum256(token)
	return subtle.ConstantTimeCompare(hash[:], s.TokenHash[:]) == 1
}
