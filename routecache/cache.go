package routecache

import (
	"cmp"
	"context"
	"errors"
	"sync"
	"time"

	"github.com/hashicorp/golang-lru/v2/simplelru"

	"github.com/berth-sandbox/berth/api/sandboxid"
)

// Options configure a Cache.
type Options struct {
	// Size is the maximum number of routes, 1 or more. The least recently used route is
	// evicted first. Default 100,000.
	Size int
	// NegativeTTL is how long an Unknown, Starting or Asleep answer is kept. A pushed route
	// removes it earlier. Default 1 s.
	NegativeTTL time.Duration
	// MaxQuestions bounds the IDs being asked about at one time. Default 10,000.
	MaxQuestions int
	// Now is a monotonic clock that counts suspended time (CLOCK_BOOTTIME).
	// Required.
	Now func() time.Duration
	// Ask sends the question about an ID to the allocator and reports whether it was
	// sent. wake: the sandbox is to be woken if it is asleep. The answer arrives through
	// Resolve. Ask is called without a lock and must not block. Required.
	Ask func(id string, wake bool) bool
}

// Cache holds routes. See the package comment for its guarantees.
type Cache struct {
	now          func() time.Duration
	ask          func(id string, wake bool) bool
	negativeTTL  time.Duration
	maxQuestions int

	mu         sync.Mutex
	routes     *simplelru.LRU[sandboxid.Key, *Route]
	negative   *simplelru.LRU[sandboxid.Key, negative]
	tombstones *simplelru.LRU[sandboxid.Key, End]
	questions  map[sandboxid.Key]*question
	awaited    map[sandboxid.Key]*awaited
	quiesced   map[sandboxid.Key]struct{}
	freshUntil time.Duration
	connected  bool
	// joined is closed when the cache is connected and fresh. nil: nobody waits for that.
	joined chan struct{}
	// stale: Holds has found that freshUntil is over, so that Find need not read the clock.
	stale bool
	stats Stats
}

// question is one open question about an ID, shared by all Lookups of that ID, and by all Wakes if wake is set.
type question struct {
	wake   bool
	done   chan struct{} // closed after answer and err are set
	answer Answer
	err    error
}

// negative is an answer other than a route, and the moment at which it expires. woken: it answered a question with wake.
type negative struct {
	answer Answer
	until  time.Duration
	woken  bool
}

// Stats counts since the start.
type Stats struct {
	// Hits are Finds that returned a route, and Lookups and Wakes answered by a negative entry, a tombstone or a
	// quiesced ID. A Lookup answered by a route does not count, because a Find of the same request did.
	Hits uint64
	// Misses are Lookups and Wakes that needed the allocator.
	Misses uint64
	// Questions are questions opened: the misses less those that shared a question.
	Questions uint64
	// Evictions are routes dropped because the cache was full.
	Evictions uint64
	// Routes, Tombstones, Open (questions) and Quiesced (IDs) are present numbers.
	Routes, Tombstones, Open, Quiesced int
}

// New returns an empty cache that is not fresh.
func New(o Options) (*Cache, error) {
	if o.Now == nil || o.Ask == nil {
		return nil, errors.New("routecache.Options.Now and Ask are required")
	}
	if o.Size < 0 || o.MaxQuestions < 0 || o.NegativeTTL < 0 {
		return nil, errors.New("routecache.Options.Size, MaxQuestions and NegativeTTL must not be negative")
	}
	c := &Cache{
		now: o.Now, ask: o.Ask,
		negativeTTL: cmp.Or(o.NegativeTTL, time.Second), maxQuestions: cmp.Or(o.MaxQuestions, 10_000),
		questions: map[sandboxid.Key]*question{}, awaited: map[sandboxid.Key]*awaited{}, quiesced: map[sandboxid.Key]struct{}{},
	}
	size := cmp.Or(o.Size, 100_000)
	c.routes, _ = simplelru.NewLRU[sandboxid.Key, *Route](size, nil) // fails only for a size below 1
	c.negative, _ = simplelru.NewLRU[sandboxid.Key, negative](size, nil)
	c.tombstones, _ = simplelru.NewLRU[sandboxid.Key, End](size, nil)
	return c, nil
}

// Find returns the route of id if the cache has one, without asking the allocator and without reading the
// clock. The route may be stale, so a caller must check Holds before it uses the route. Find does not
// allocate.
func (c *Cache) Find(id sandboxid.Key) (route Route, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.stale || c.isQuiesced(id) {
		return Route{}, false
	}
	r, ok := c.routes.Get(id)
	if !ok {
		return Route{}, false
	}
	c.stats.Hits++
	return *r, true
}

// Lookup answers where id is. It asks the allocator when the cache does not know, and
// waits until the answer arrives or ctx ends. Errors are ErrNotFresh, ErrDisconnected,
// ErrTooManyQuestions or ctx's cause.
//
// The route was valid at some moment within the call. A caller that does other work
// before it uses the route must check Holds just before the use.
func (c *Cache) Lookup(ctx context.Context, id sandboxid.Key) (Answer, error) {
	c.mu.Lock()
	if r := c.servable(id, c.now()); r != nil {
		c.mu.Unlock()
		return Answer{Status: Routable, Route: *r}, nil
	}
	return c.lookupOrAsk(ctx, id, false)
}

// Wake is a Lookup for a request that may reach the sandbox when it is awake, and that waits for that. The allocator is
// asked to wake a sandbox that is asleep, once for all callers. The answer may still be Asleep, as may be that of every
// Lookup until the sandbox is awake. See Await.
func (c *Cache) Wake(ctx context.Context, id sandboxid.Key) (Answer, error) {
	c.mu.Lock()
	return c.lookupOrAsk(ctx, id, true)
}

// lookupOrAsk is Wake, and the slow path of Lookup. The caller holds c.mu; lookupOrAsk returns
// with c.mu released.
func (c *Cache) lookupOrAsk(ctx context.Context, id sandboxid.Key, wake bool) (Answer, error) {
	var waited *question // the latest question this call waited for
	for {
		a, known, err := c.lookup(id, wake)
		if waited == nil {
			switch {
			case !known && err == nil:
				c.stats.Misses++
			case known && a.Status != Routable:
				c.stats.Hits++
			}
		}
		if known || err != nil {
			c.mu.Unlock()
			return a, err
		}
		if waited != nil && waited.answer.Status != Routable && (waited.answer.Status != Asleep || waited.wake || !wake) {
			c.mu.Unlock()
			return waited.answer, nil // its negative entry or tombstone is gone already
		}
		q, opened, err := c.questionFor(id, wake)
		c.mu.Unlock()
		if err != nil {
			return Answer{}, err
		}
		if opened && !c.ask(id.String(), wake) {
			c.mu.Lock()
			// After a reconnect another call may own the question about this ID.
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
		// Before this goroutine ran, the sandbox may have been released or pushed, and the
		// cache may have been replaced or become stale. The present state counts.
		waited = q
		c.mu.Lock()
	}
}

// Known reports whether a Lookup of id would be answered now, without asking the allocator, with what does not change
// by waiting: the answer is Routable, Gone or Unknown. It is not counted in Stats.
func (c *Cache) Known(id sandboxid.Key) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	a, known, _ := c.lookup(id, false)
	return known && a.Status != Starting && a.Status != Quiesced && a.Status != Asleep
}

// Holds reports whether a Lookup of id would be answered with r now, without asking the
// allocator.
func (c *Cache) Holds(id sandboxid.Key, r Route) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.isQuiesced(id) {
		return false
	}
	stored, ok := c.routes.Peek(id)
	if !ok || *stored != r {
		return false
	}
	c.stale = c.now() >= c.freshUntil
	return !c.stale
}

// questionFor returns the open question about id, and opens one if there is none. The
// caller that opened it must ask the allocator. c.mu is held.
func (c *Cache) questionFor(id sandboxid.Key, wake bool) (q *question, opened bool, err error) {
	if q, ok := c.questions[id]; ok {
		return q, false, nil
	}
	if len(c.questions) >= c.maxQuestions {
		return nil, false, ErrTooManyQuestions
	}
	q = &question{wake: wake, done: make(chan struct{})}
	c.questions[id] = q
	c.stats.Questions++
	return q, true, nil
}

// servable returns the route of id if it may be served at now, or nil. c.mu is held.
//
// An ID never has a route and a tombstone at the same time (see set), so a found route
// needs no check for a tombstone.
func (c *Cache) servable(id sandboxid.Key, now time.Duration) *Route {
	if now >= c.freshUntil || c.isQuiesced(id) {
		return nil
	}
	r, _ := c.routes.Get(id)
	return r
}

// lookup answers from the cache alone. wake: that the sandbox is asleep is no answer, unless the allocator said so when
// it was asked to wake it. c.mu is held.
func (c *Cache) lookup(id sandboxid.Key, wake bool) (a Answer, known bool, err error) {
	// A tombstone is final, so it needs no freshness.
	if end, ok := c.tombstones.Get(id); ok {
		return Answer{Status: Gone, End: end}, true, nil
	}
	now := c.now()
	if now >= c.freshUntil {
		return Answer{}, false, ErrNotFresh
	}
	if c.isQuiesced(id) {
		return Answer{Status: Quiesced}, true, nil
	}
	if r := c.servable(id, now); r != nil {
		return Answer{Status: Routable, Route: *r}, true, nil
	}
	if n, ok := c.negative.Peek(id); ok {
		switch {
		case now >= n.until:
			c.negative.Remove(id)
		case !wake || n.woken || n.answer.Status != Asleep:
			return n.answer, true, nil
		}
	}
	return Answer{}, false, nil
}

// SetFreshUntil sets the moment, on the cache's clock, until which the cache may be
// served. An earlier moment than the present one has no effect.
func (c *Cache) SetFreshUntil(at time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if at > c.freshUntil {
		c.freshUntil, c.stale = at, false
		c.wakeJoined()
	}
}

// Expire makes the cache stale at once. The router calls it when the allocator no longer
// waits for its acknowledgements.
func (c *Cache) Expire() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.freshUntil, c.stale = c.now(), true
}

// Fresh reports whether routes may be served now.
func (c *Cache) Fresh() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now() < c.freshUntil
}

// Put stores a route that the allocator pushed.
func (c *Cache) Put(id string, r Route) { c.Resolve(id, Answer{Status: Routable, Route: r}) }

// Resolve stores the answer to the question about id, and reports whether the sandbox is gone. That may be so
// whatever the answer is.
func (c *Cache) Resolve(id string, a Answer) (gone bool) {
	key, ok := sandboxid.KeyOf(id)
	if !ok {
		return false // no request can name it
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.set(key, a)
	return c.tombstones.Contains(key)
}

// Close forgets the route of id, which may get one again. The next Lookup asks the allocator. A question that is open
// stays open: its answer is yet to come.
func (c *Cache) Close(id string) {
	key, ok := sandboxid.KeyOf(id)
	c.mu.Lock()
	defer c.mu.Unlock()
	if ok {
		c.routes.Remove(key)
		c.negative.Remove(key)
		c.wake(key)
	}
}

// Release forgets the route of id for good.
func (c *Cache) Release(id string, end End) { c.Resolve(id, Answer{Status: Gone, End: end}) }

// Replace drops every route and every quiesced ID, and stores routes instead. An ID that
// was routable and is not in routes becomes unknown, not gone, because a snapshot does
// not say which IDs were released. Open questions about an ID in routes are answered; the
// others stay open.
func (c *Cache) Replace(routes map[string]Route) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.routes.Purge()
	c.negative.Purge()
	clear(c.quiesced)
	for id, r := range routes {
		if key, ok := sandboxid.KeyOf(id); ok {
			c.set(key, Answer{Status: Routable, Route: r})
		}
	}
	for id := range c.awaited { // pushes between the streams were missed
		c.wake(id)
	}
}

// Connected says that questions can be asked, on a stream whose snapshot was given to Replace.
func (c *Cache) Connected() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.connected = true
	c.wakeJoined()
}

// AwaitJoined waits until questions can be asked and the cache is fresh. It returns ctx's cause if ctx ends
// first. A Lookup that has failed for want of either may succeed then.
func (c *Cache) AwaitJoined(ctx context.Context) error {
	c.mu.Lock()
	if c.isJoined() {
		c.mu.Unlock()
		return nil
	}
	if c.joined == nil {
		c.joined = make(chan struct{})
	}
	joined := c.joined
	c.mu.Unlock()
	select {
	case <-joined:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// isJoined reports whether AwaitJoined need not wait. c.mu is held.
func (c *Cache) isJoined() bool { return c.connected && c.now() < c.freshUntil }

// wakeJoined lets callers of AwaitJoined return if they may. c.mu is held.
func (c *Cache) wakeJoined() {
	if c.joined != nil && c.isJoined() {
		close(c.joined)
		c.joined = nil
	}
}

// Disconnected fails every open question, because an answer cannot arrive any more. Connected ends that.
func (c *Cache) Disconnected() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.connected = false
	for id, q := range c.questions {
		c.fail(id, q, ErrDisconnected)
	}
}

// set stores the newest state of id and answers the open question about it. c.mu is held.
func (c *Cache) set(id sandboxid.Key, a Answer) {
	if end, ok := c.tombstones.Peek(id); ok {
		a = Answer{Status: Gone, End: end} // a late message does not bring the sandbox back
	}
	switch a.Status {
	case Routable:
		c.negative.Remove(id)
		route := a.Route // not the whole answer stays in memory
		if c.routes.Add(id, &route) {
			c.stats.Evictions++
		}
	case Gone:
		c.negative.Remove(id)
		c.routes.Remove(id)
		delete(c.quiesced, id)
		c.tombstones.Add(id, a.End)
	case Unknown, Starting, Asleep:
		c.routes.Remove(id)
		q := c.questions[id]
		c.negative.Add(id, negative{a, c.now() + c.negativeTTL, q != nil && q.wake})
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
func (c *Cache) fail(id sandboxid.Key, q *question, err error) {
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
			entries = append(entries, Entry{ID: id.String(), Route: *r})
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
