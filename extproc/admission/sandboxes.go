package admission

import (
	"context"
	"net/netip"
	"time"

	"github.com/berth-sandbox/berth/api/sandboxid"
	"github.com/berth-sandbox/berth/lastactive"
	"github.com/berth-sandbox/berth/routecache"
)

// Options configure Sandboxes.
type Options struct {
	Routes routecache.Options
	Uses   lastactive.Options
}

// Sandboxes are those that one router knows. See the package comment. All methods may be called concurrently, but changes
// come one after the other, in the order of the allocator's stream.
type Sandboxes struct {
	routes  routes
	uses    uses
	answers *Answers
}

// routes is a *routecache.Cache.
type routes interface {
	Routes
	Holds(id sandboxid.Key, r routecache.Route) bool
	Resolve(id string, a routecache.Answer) (gone bool)
	Replace(routes map[string]routecache.Route)
	Quiesce(id string) bool
	Resume(id string)
	Close(id string)
	SetFreshUntil(at time.Duration)
	Expire()
	Connected()
	Disconnected()
}

// uses is a *lastactive.Tracker.
type uses interface {
	Uses
	Begin(id sandboxid.Key, to netip.AddrPort, http2 bool) (*lastactive.Entry, lastactive.Refusal)
	Expect(id string, addr netip.Addr, minBytes uint64)
	Forget(id string)
	Retain(keep func(id string) bool)
	Run(ctx context.Context)
}

// Routes is a view of the routes. Package routecache describes the methods.
type Routes interface {
	Find(id sandboxid.Key) (route routecache.Route, ok bool)
	Known(id sandboxid.Key) bool
	Lookup(ctx context.Context, id sandboxid.Key) (routecache.Answer, error)
	Wake(ctx context.Context, id sandboxid.Key) (routecache.Answer, error)
	Await(ctx context.Context, id sandboxid.Key, answered routecache.Status) error
	AwaitJoined(ctx context.Context) error
	Fresh() bool
	Dump() []routecache.Entry
	Stats() routecache.Stats
}

// Uses is a view of how sandboxes are used. Package lastactive describes the methods.
type Uses interface {
	LookDone() <-chan struct{}
	LookError() string
	Report(all bool) lastactive.Report
	Ask(ctx context.Context, ids []string) ([]lastactive.Activity, error)
	FinalReport(ctx context.Context) lastactive.Report
	Dump() []lastactive.Activity
	Len() int
}

// New returns Sandboxes of which none is known.
func New(o Options) (*Sandboxes, error) {
	cache, err := routecache.New(o.Routes)
	if err != nil {
		return nil, err
	}
	tracker, err := lastactive.New(o.Uses)
	if err != nil {
		return nil, err
	}
	return &Sandboxes{routes: cache, uses: tracker, answers: NewAnswers()}, nil
}

// Routes returns the routes.
func (s *Sandboxes) Routes() Routes { return s.routes }

// Uses returns how the sandboxes are used.
func (s *Sandboxes) Uses() Uses { return s.uses }

// Why says why Admit has not admitted a request.
type Why = lastactive.Why

// What a caller of Admit does next.
const (
	// Admitted: it has.
	Admitted = lastactive.Begun
	// Again: the route must be looked up again, because it has changed, or because the request must wait until Envoy's
	// threads know the port.
	Again = lastactive.Again
	// TooManyPorts: Envoy's list of open requests has no room for another port of this sandbox.
	TooManyPorts = lastactive.TooManyPorts
	// TooFast: the sandbox gets more requests than its rate allows. The pause is the time until the next one may pass.
	TooFast = lastactive.TooFast
	// TooManyOpen: the sandbox has as many open requests as it may have.
	TooManyOpen = lastactive.TooManyOpen
)

// Admission is a request that may go to its sandbox. It is ended by one call of Read.
type Admission struct {
	of    *Sandboxes
	use   *lastactive.Entry
	epoch *Epoch
}

// Admit admits a request to a port of a sandbox, over HTTP/2 or 1.1, if route is still the sandbox's route and may be
// served. The caller has found route in Routes and has checked the request against it. If it is not admitted, the
// caller does what why says, for Again after the pause. If the limit of the rate is reached, pause is the time until the
// next request may pass.
func (s *Sandboxes) Admit(id sandboxid.Key, route routecache.Route, port uint16, http2 bool) (a Admission, why Why, pause time.Duration) {
	use, refusal := s.uses.Begin(id, netip.AddrPortFrom(route.Addr, port), http2)
	if use == nil {
		return Admission{}, refusal.Why, refusal.Wait
	}
	epoch := s.answers.Begin()
	if !s.routes.Holds(id, route) {
		s.answers.Done(epoch)
		use.Cancel()
		return Admission{}, Again, 0
	}
	return Admission{s, use, epoch}, Admitted, 0
}

// Read records that Envoy has read the answer that admits the request, or no longer wants it.
func (a Admission) Read() {
	a.use.Read() // first, so that an acknowledged release has no unread use
	a.of.answers.Done(a.epoch)
}

// Put gives a sandbox the route that the allocator has pushed.
func (s *Sandboxes) Put(id string, r routecache.Route) {
	s.Resolve(id, routecache.Answer{Status: routecache.Routable, Route: r})
}

// Resolve puts the allocator's answer about a sandbox into effect.
func (s *Sandboxes) Resolve(id string, a routecache.Answer) {
	if a.Status == routecache.Routable {
		s.learn(id, &a.Route)
	}
	if gone := s.routes.Resolve(id, a); gone {
		s.uses.Forget(id)
	}
}

// Release ends a sandbox. Admit admits nothing for it any more.
func (s *Sandboxes) Release(id string, end routecache.End) {
	s.Resolve(id, routecache.Answer{Status: routecache.Gone, End: end})
}

// Close takes the route of a sandbox that may get one again. Admit admits nothing for it until then.
func (s *Sandboxes) Close(id string) { s.routes.Close(id) }

// Replace puts a snapshot into effect: these are all routes, and no sandbox is quiesced.
func (s *Sandboxes) Replace(routes map[string]routecache.Route) {
	for id, r := range routes {
		s.learn(id, &r)
	}
	s.routes.Replace(routes)
	s.uses.Retain(func(id string) bool { _, ok := routes[id]; return ok })
}

// learn makes the record of use of a sandbox that is about to get a route. One that it has stays.
func (s *Sandboxes) learn(id string, r *routecache.Route) { s.uses.Expect(id, r.Addr, r.MinBytes) }

// Quiesce has Admit admit nothing for a sandbox until Resume, Release or Replace. It reports false, and does nothing,
// if too many are quiesced.
func (s *Sandboxes) Quiesce(id string) bool { return s.routes.Quiesce(id) }

// Resume ends the effect of Quiesce.
func (s *Sandboxes) Resume(id string) { s.routes.Resume(id) }

// Barrier calls drained once Envoy has read every answer that was admitted before. See Answers.Barrier.
func (s *Sandboxes) Barrier(drained func()) { s.answers.Barrier(drained) }

// Unread is the number of answers that Envoy may not have read yet.
func (s *Sandboxes) Unread() int { return s.answers.Unread() }

// SetFreshUntil sets until when routes may be served, on the clock of the routes. See routecache.Cache.
func (s *Sandboxes) SetFreshUntil(at time.Duration) { s.routes.SetFreshUntil(at) }

// Expire makes all routes stale at once.
func (s *Sandboxes) Expire() { s.routes.Expire() }

// Fresh reports whether routes may be served now.
func (s *Sandboxes) Fresh() bool { return s.routes.Fresh() }

// Connected says that the allocator can be asked, on a stream whose snapshot was given to Replace.
func (s *Sandboxes) Connected() { s.routes.Connected() }

// Disconnected says that the allocator cannot be asked.
func (s *Sandboxes) Disconnected() { s.routes.Disconnected() }

// Run looks until ctx ends.
func (s *Sandboxes) Run(ctx context.Context) { s.uses.Run(ctx) }
