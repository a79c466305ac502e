package routecache

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"time"

	"github.com/hashicorp/golang-lru/v2/simplelru"
)

// Route says which pod holds a sandbox.
type Route struct {
	// Addr is the pod's IP address.
	Addr netip.Addr
	// DefaultPort is the port that a host without one means.
	DefaultPort uint16
	// Ports are those that may be reached.
	Ports Ports
	// MinBytes is how many bytes a minute must move over an open connection for it to be
	// use of the sandbox; 0: it is use in any case. The cache only keeps it.
	MinBytes uint64
}

// Status is what is known about a sandbox ID.
type Status int

// The answers to a Lookup.
const (
	// Unknown: the allocator knows no such sandbox.
	Unknown Status = iota
	// Routable: the route is valid.
	Routable
	// Gone: there was such a sandbox; it has been released.
	Gone
	// Starting: there is such a sandbox, and nobody may be sent to it yet.
	Starting
	// Quiesced: requests for the sandbox are to be held, because it may be released for
	// being idle. See Quiesce.
	Quiesced
)

func (s Status) String() string {
	switch s {
	case Unknown:
		return "unknown"
	case Routable:
		return "routable"
	case Gone:
		return "gone"
	case Starting:
		return "starting"
	case Quiesced:
		return "quiesced"
	}
	return fmt.Sprintf("Status(%d)", int(s))
}

// Answer is the result of a Lookup. Route is set when Status is Routable. Hold, when
// it is Starting, is for how long a request may wait for the sandbox: see Await.
type Answer struct {
	Status Status
	Route  Route
	Hold   time.Duration
}

// Options configure a Cache.
type Options struct {
	// Size is the most routes to keep, 1 or more; the least recently used goes
	// first. Default 100,000.
	Size int
	// NegativeTTL is how long an "unknown", or a "starting", is believed. A route
	// that is pushed ends it. Default 1 s.
	NegativeTTL time.Duration
	// Questions bounds the IDs being asked about at one time. Default 10,000.
	Questions int
	// Now is a monotonic clock that counts suspended time (CLOCK_BOOTTIME).
	// Required.
	Now func() time.Duration
	// Ask sends the question about an ID to the allocator and reports whether
	// it could be sent. It is called with no lock held and must not block; the
	// answer comes through Resolve. Required.
	Ask func(id string) bool
}

// Cache holds routes. See the package comment for what it guarantees.
type Cache struct {
	now         func() time.Duration
	ask         func(string) bool
	negativeTTL time.Duration
	questionMax int

	mu         sync.Mutex
	routes     *simplelru.LRU[string, *Route] // what they point to never changes
	negative   *simplelru.LRU[string, negative]
	tombstones *simplelru.LRU[string, struct{}]
	questions  map[string]*question
	awaited    map[string]*awaited
	quiesced   map[string]struct{}
	freshUntil time.Duration
	stats      Stats
}

// question is one flight: everybody who waits for the answer about one ID.
type question struct {
	done   chan struct{} // closed once answer and err are set
	answer Answer
	err    error
}

// awaited is an ID that callers of Await wait for.
type awaited struct {
	changed chan struct{} // closed when something else may be known of it
	callers int
}

// Stats counts since the start.
type Stats struct {
	// Hits are Lookups answered from the cache (route, negative entry or tombstone).
	Hits uint64
	// Misses are Lookups that needed the allocator.
	Misses uint64
	// Questions were opened: about the misses less those that shared one.
	Questions uint64
	// Evictions are routes dropped for want of room.
	Evictions uint64
	// Routes, Tombstones, Open questions and Quiesced IDs are how many there are now.
	Routes, Tombstones, Open, Quiesced int
}

// New returns an empty cache that is not fresh.
func New(o Options) (*Cache, error) {
	var errs []error
	if o.Now == nil {
		errs = append(errs, errors.New("routecache: Options.Now is required"))
	}
	if o.Ask == nil {
		errs = append(errs, errors.New("routecache: Options.Ask is required"))
	}
	if o.Size < 0 || o.Questions < 0 || o.NegativeTTL < 0 {
		errs = append(errs, errors.New("routecache: Options.Size, Questions and NegativeTTL must not be negative"))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	if o.Size == 0 {
		o.Size = 100_000
	}
	if o.Questions == 0 {
		o.Questions = 10_000
	}
	if o.NegativeTTL == 0 {
		o.NegativeTTL = time.Second
	}
	c := &Cache{
		now: o.Now, ask: o.Ask, negativeTTL: o.NegativeTTL, questionMax: o.Questions,
		questions: map[string]*question{}, awaited: map[string]*awaited{}, quiesced: map[string]struct{}{},
	}
	var err error
	if c.routes, err = simplelru.NewLRU[string, *Route](o.Size, nil); err == nil {
		if c.negative, err = simplelru.NewLRU[string, negative](o.Size, nil); err == nil {
			c.tombstones, err = simplelru.NewLRU[string, struct{}](o.Size, nil)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("routecache: Options.Size %d: %w", o.Size, err)
	}
	return c, nil
}

// Lookup answers where id is, asking the allocator when the cache does not
// know. It waits until the answer arrives or ctx ends. Errors are ErrNotFresh,
// ErrDisconnected, ErrTooManyQuestions or ctx's cause.
//
// The route was valid at a moment within the call. A caller that does anything
// before it uses the route asks Holds when it is about to.
func (c *Cache) Lookup(ctx context.Context, id string) (Answer, error) {
	c.mu.Lock()
	if r := c.hit(id, c.now()); r != nil {
		c.stats.Hits++
		c.mu.Unlock()
		return Answer{Status: Routable, Route: *r}, nil
	}
	return c.lookupOrAsk(ctx, id)
}

// lookupOrAsk is Lookup for what is not simply a route. c.mu is held when it is called,
// and not when it returns.
func (c *Cache) lookupOrAsk(ctx context.Context, id string) (Answer, error) {
	var waited *question // the last one this call waited for
	for {
		a, known, err := c.lookup(id)
		if waited == nil {
			if known {
				c.stats.Hits++
			} else if err == nil {
				c.stats.Misses++
			}
		}
		if known || err != nil {
			c.mu.Unlock()
			return a, err
		}
		if waited != nil && waited.answer.Status != Routable {
			c.mu.Unlock()
			return waited.answer, nil // its negative entry or tombstone has gone already
		}
		q, mine, err := c.join(id)
		c.mu.Unlock()
		if err != nil {
			return Answer{}, err
		}
		if mine && !c.ask(id) {
			c.mu.Lock()
			// A reconnect may have replaced the question meanwhile; it is then
			// not ours to fail.
			if c.questions[id] == q {
				c.fail(id, q, ErrDisconnected)
			}
			c.mu.Unlock()
		}
		select {
		case <-q.done:
		case <-ctx.Done():
			return Answer{}, context.Cause(ctx)
		}
		if q.err != nil {
			return Answer{}, q.err
		}
		// Until this goroutine got its turn the sandbox may have been released or
		// pushed, the cache replaced or gone stale: what counts is now, so look
		// again.
		waited = q
		c.mu.Lock()
	}
}

// Await returns when something else may be known of id than what a Lookup has answered,
// Starting or Quiesced: it runs, is quiesced, resumed or gone, or the cache was
// replaced. It returns ctx's cause if that ends first. The caller looks the ID up again,
// and may find the same.
func (c *Cache) Await(ctx context.Context, id string, answered Status) error {
	c.mu.Lock()
	if c.moved(id, answered) {
		c.mu.Unlock()
		return nil // since the caller has looked
	}
	w := c.awaited[id]
	if w == nil {
		w = &awaited{changed: make(chan struct{})}
		c.awaited[id] = w
	}
	w.callers++
	c.mu.Unlock()
	defer func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if w.callers--; w.callers == 0 && c.awaited[id] == w {
			delete(c.awaited, id)
		}
	}()
	select {
	case <-w.changed:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// moved reports whether something else is known of id than what was answered. c.mu is
// held.
func (c *Cache) moved(id string, answered Status) bool {
	if c.tombstones.Contains(id) || c.held(id) != (answered == Quiesced) {
		return true
	}
	n, ok := c.negative.Peek(id)
	return answered == Starting && (c.routes.Contains(id) || ok && n.answer.Status != Starting)
}

// wake lets those go on who wait for id. c.mu is held.
func (c *Cache) wake(id string) {
	if w := c.awaited[id]; w != nil {
		delete(c.awaited, id)
		close(w.changed)
	}
}

// negative is an answer other than a route, and when it stops to count.
type negative struct {
	answer Answer
	until  time.Duration
}

// Holds reports whether a Lookup of id would be answered with r now, without
// asking the allocator.
func (c *Cache) Holds(id string, r Route) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.held(id) {
		return false
	}
	held, ok := c.routes.Peek(id)
	return ok && *held == r && c.now() < c.freshUntil
}

// join returns the open question about id, opening it if need be; mine: the
// caller is the one to ask it. c.mu is held.
func (c *Cache) join(id string) (q *question, mine bool, err error) {
	if q, ok := c.questions[id]; ok {
		return q, false, nil
	}
	if len(c.questions) >= c.questionMax {
		return nil, false, ErrTooManyQuestions
	}
	q = &question{done: make(chan struct{})}
	c.questions[id] = q
	c.stats.Questions++
	return q, true, nil
}

// hit returns the route that may be served now, or nil. c.mu is held.
//
// An ID has no route and a tombstone at one time: see set. So whoever finds a route
// need not look for a tombstone.
func (c *Cache) hit(id string, now time.Duration) *Route {
	if now >= c.freshUntil || c.held(id) {
		return nil
	}
	r, _ := c.routes.Get(id)
	return r
}

// lookup answers from what is held. c.mu is held.
func (c *Cache) lookup(id string) (a Answer, known bool, err error) {
	// A tombstone is final, so it needs no freshness.
	if c.tombstones.Contains(id) {
		c.tombstones.Get(id) // moves it to the young end
		return Answer{Status: Gone}, true, nil
	}
	now := c.now()
	if now >= c.freshUntil {
		return Answer{}, false, ErrNotFresh
	}
	if c.held(id) {
		return Answer{Status: Quiesced}, true, nil
	}
	if r := c.hit(id, now); r != nil {
		return Answer{Status: Routable, Route: *r}, true, nil
	}
	if n, ok := c.negative.Peek(id); ok {
		if now < n.until {
			return n.answer, true, nil
		}
		c.negative.Remove(id)
	}
	return Answer{}, false, nil
}

// SetFreshUntil says until when, on the cache's clock, what the stream has
// told is good enough to serve. It never shortens: freshness that was granted
// stands.
func (c *Cache) SetFreshUntil(at time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.freshUntil = max(c.freshUntil, at)
}

// Expire makes everything stale at once: the allocator waits no more for what is known
// here to be forgotten.
func (c *Cache) Expire() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.freshUntil = c.now()
}

// Fresh reports whether routes may be served now.
func (c *Cache) Fresh() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now() < c.freshUntil
}

// quiescedMost bounds the IDs that are quiesced at one time.
const quiescedMost = 10_000

// Quiesce makes id be answered with Quiesced, whatever else is or becomes known of it,
// until Resume, Release or Replace: nothing else ends that, and no time. From its
// return on no Lookup finds a route of id, and none holds. It reports false, and does
// nothing, if 10,000 other IDs are quiesced.
func (c *Cache) Quiesce(id string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.tombstones.Contains(id) || c.held(id) {
		return true
	}
	if len(c.quiesced) >= quiescedMost {
		return false
	}
	c.quiesced[id] = struct{}{}
	c.wake(id) // who waits for it to start has no time of its own for this
	return true
}

// Resume ends what Quiesce has begun.
func (c *Cache) Resume(id string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.held(id) {
		delete(c.quiesced, id)
		c.wake(id)
	}
}

// held reports whether id is quiesced. c.mu is held.
func (c *Cache) held(id string) bool {
	if len(c.quiesced) == 0 {
		return false
	}
	_, held := c.quiesced[id]
	return held
}

// Put stores a route that the allocator pushed.
func (c *Cache) Put(id string, r Route) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.set(id, Answer{Status: Routable, Route: r})
}

// Resolve stores the answer to the question about id.
func (c *Cache) Resolve(id string, a Answer) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.set(id, a)
}

// Release forgets the route of id for good.
func (c *Cache) Release(id string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.set(id, Answer{Status: Gone})
}

// Replace forgets every route, and what is quiesced, and stores these instead. What was routable and
// is not in routes becomes unknown, not gone: the caller cannot tell which.
// Questions stay open; those about an ID in routes are answered.
func (c *Cache) Replace(routes map[string]Route) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.routes.Purge()
	c.negative.Purge()
	clear(c.quiesced)
	for id, r := range routes {
		c.set(id, Answer{Status: Routable, Route: r})
	}
	for id := range c.awaited { // what was pushed meanwhile, nobody has heard
		c.wake(id)
	}
}

// Disconnected fails every open question: nobody will answer it.
func (c *Cache) Disconnected() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for id, q := range c.questions {
		c.fail(id, q, ErrDisconnected)
	}
}

// set stores what is now true of id and answers who waits for it. c.mu is held.
func (c *Cache) set(id string, a Answer) {
	if c.tombstones.Contains(id) {
		a = Answer{Status: Gone} // gone stays gone, whatever arrives late
	}
	switch a.Status {
	case Routable:
		c.negative.Remove(id)
		route := a.Route
		if c.routes.Add(id, &route) {
			c.stats.Evictions++
		}
	case Gone:
		c.negative.Remove(id)
		c.routes.Remove(id)
		delete(c.quiesced, id)
		c.tombstones.Add(id, struct{}{})
	case Unknown, Starting:
		c.routes.Remove(id)
		c.negative.Add(id, negative{a, c.now() + c.negativeTTL})
	}
	if a.Status != Starting {
		c.wake(id)
	}
	if q, ok := c.questions[id]; ok {
		q.answer = a
		delete(c.questions, id)
		close(q.done)
	}
}

// fail ends a question without an answer. c.mu is held.
func (c *Cache) fail(id string, q *question, err error) {
	q.err = err
	delete(c.questions, id)
	close(q.done)
}

// Entry is one line of Dump.
type Entry struct {
	ID    string
	Route Route
}

// Dump lists the routes, most recently used last.
func (c *Cache) Dump() []Entry {
	c.mu.Lock()
	defer c.mu.Unlock()
	entries := make([]Entry, 0, c.routes.Len())
	for _, id := range c.routes.Keys() {
		if r, ok := c.routes.Peek(id); ok {
			entries = append(entries, Entry{ID: id, Route: *r})
		}
	}
	return entries
}

// Stats returns the counters.
func (c *Cache) Stats() Stats {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.stats
	s.Routes, s.Tombstones, s.Open, s.Quiesced = c.routes.Len(), c.tombstones.Len(), len(c.questions), len(c.quiesced)
	return s
}
