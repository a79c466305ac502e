package egress

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"fmt"
	"net/netip"
	"sync"

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

// Counts are numbers of the requests of one sandbox.
type Counts struct {
	// Admitted and Refused have grown since the router knows this pod of the sandbox.
	Admitted, Refused uint64
	// Open are in progress.
	Open int
}

// entry is a sandbox in the table. The lock of the table guards it.
type entry struct {
	Sandbox
	open   int // requests that are deciding, admitted or cut
	admits map[*request]struct{}
	counts Counts
	seen   map[audited]struct{}
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
	ending      h2.Ending
	// ended is closed when the request has ended. It is nil until the request is cut. The lock of the table guards it.
	ended chan struct{}
}

// Ended ends a request. An end by this process closes the connection to Envoy, by which Envoy ends the request, too.
func (r *request) Ended(bool) {
	r.table.mu.Lock()
	defer r.table.mu.Unlock()
	delete(r.of.admits, r)
	r.of.open--
	if r.ended != nil {
		delete(r.table.cut, r)
		close(r.ended)
	}
}

// table has all sandboxes.
type table struct {
	mu    sync.Mutex
	ready bool // the first snapshot was there
	shut  bool // nothing more is admitted
	all   map[string]*entry
	at    map[netip.Addr][]*entry
	// cut has the requests that were cut and have not ended, of sandboxes that are gone, too.
	cut map[*request]struct{}
}

// put adds a sandbox or replaces it, and returns the requests that may not go on.
func (t *table) put(s Sandbox) (victims []*request) {
	e := t.all[s.ID]
	if e == nil || !e.isPod(&s) {
		victims = t.remove(s.ID)
		e = &entry{
			Sandbox: s, admits: map[*request]struct{}{}, seen: map[audited]struct{}{},
			lookups: make(chan struct{}, maxSandboxLookups),
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

// change changes the table, cuts the requests that change returns, and waits until they have ended. It also waits for
// those that an earlier change of the sandbox has cut, or of any sandbox if id is empty.
func (t *table) change(ctx context.Context, id string, change func() (victims []*request)) error {
	t.mu.Lock()
	for _, r := range change() {
		if r.ended == nil {
			r.ended = make(chan struct{})
			t.cut[r] = struct{}{}
		}
	}
	var victims []*request
	for r := range t.cut {
		if id == "" || r.id == id {
			victims = append(victims, r)
		}
	}
	t.mu.Unlock()
	for _, r := range victims {
		r.ending.End(codes.Aborted, "the sandbox may not do this any more")
	}
	for i, r := range victims {
		select {
		case <-r.ended:
		case <-ctx.Done():
			return fmt.Errorf("%d requests at the egress gateway have not ended: %w", len(victims)-i, ctx.Err())
		}
	}
	return nil
}

// Set adds a sandbox, or replaces what is known of it. It returns nil when each request has ended that the new rules
// refuse, or that another incarnation or address of the sandbox has begun. The change holds also if ctx ends before.
func (s *Server) Set(ctx context.Context, sandbox Sandbox) error {
	if err := sandbox.Check(); err != nil {
		return err
	}
	return s.table.change(ctx, sandbox.ID, func() []*request { return s.table.put(sandbox) })
}

// Forget removes a sandbox. It returns nil when all its requests have ended.
func (s *Server) Forget(ctx context.Context, id string) error {
	return s.table.change(ctx, id, func() []*request { return s.table.remove(id) })
}

// Replace makes these all sandboxes that there are. Until its first call every request is refused. It returns nil when
// each request has ended that may not go on.
func (s *Server) Replace(ctx context.Context, all []Sandbox) error {
	known := make(map[string]bool, len(all))
	for i := range all {
		if err := all[i].Check(); err != nil {
			return err
		}
		known[all[i].ID] = true
	}
	return s.table.change(ctx, "", func() (victims []*request) {
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
}

// Counts returns the numbers of a sandbox, and false if it is not known.
func (s *Server) Counts(id string) (Counts, bool) {
	s.table.mu.Lock()
	defer s.table.mu.Unlock()
	e := s.table.all[id]
	if e == nil {
		return Counts{}, false
	}
	counts := e.counts
	counts.Open = e.open
	return counts, true
}

// hasToken reports whether a token is that of the sandbox, in a time that says nothing of it.
func (s *Sandbox) hasToken(token []byte) bool {
	hash := sha256.Sum256(token)
	return subtle.ConstantTimeCompare(hash[:], s.TokenHash[:]) == 1
}
