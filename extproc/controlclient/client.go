// Package controlclient is the router's side of the control stream. It keeps one session
// with the allocator's leader and tells the route cache what arrives on it, in
// the order in which it arrives.
//
// # Guarantees
//
//   - The cache is told by one goroutine, from one stream at a time. A new
//     stream begins only after the last message of the old one was applied.
//   - A message of a lower term than this router has seen is refused, with the
//     stream it came on.
//   - Terms count within one journal. A leader of another one begins another world: its
//     snapshot replaces everything. A journal that was left is never entered again, so
//     that a leader that was deposed before cannot bring it back.
//   - A message is acknowledged after it took effect in the cache, and after Envoy
//     has read every answer that was given before. One that is missing from the
//     stream, or makes no sense, ends the session before anything that comes after
//     it is acknowledged.
//   - After every look at what Envoy holds open one report is sent, and after a snapshot
//     one of everything. A report names the newest Pong that was received before its look
//     began, so that the leader knows a moment after which it began.
//   - Goodbye is said only when Envoy has read every answer, and after a report of what a
//     look has shown that began after that, or without a look if none succeeds within 1 s.
//     It counts as heard when the leader ends the stream without an error, which it does
//     once that is durable. If no leader does, one is looked for.
//   - A Quiesce is answered after it took effect in the cache, with looks that began after
//     that, within 1.2 s: if they fail, the answer says so. One that the cache has no room
//     for, that a newer one follows, or whose answer finds no room in the queue, is not
//     answered: what is held stays so. The reader of the stream does not wait for looks.
//   - At most 64 sandboxes are probed at one time. A probe beyond that is not answered.
//   - The cache is fresh until the send time of the last answered ping plus
//     max-stale, on a clock that counts suspended time.
//   - A router that was declared dead by an operator serves nothing any more once it
//     learns of that, and its process has to end. Only what the allocator says for that
//     (controlv1.IsDeclaredDead) counts as it; however else a stream ends, another is tried.
//   - Queues are bounded. A stream on which nothing comes back, because it cannot
//     be opened, cannot be written to or is not answered, is dropped.
package controlclient

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	controlv1 "github.com/berth-sandbox/berth/api/control/v1"
	"github.com/berth-sandbox/berth/lastactive"
	"github.com/berth-sandbox/berth/routecache"
)

// Cache is what the link feeds. *routecache.Cache is one.
type Cache interface {
	Put(id string, r routecache.Route)
	Resolve(id string, a routecache.Answer)
	Release(id string)
	Replace(routes map[string]routecache.Route)
	SetFreshUntil(at time.Duration)
	Expire()
	Disconnected()
	// Quiesce reports false if there is no room for another one.
	Quiesce(id string) bool
	Resume(id string)
}

// Activity is what remembers sandboxes by ID and must forget those that are
// gone. *lastactive.Tracker is one.
type Activity interface {
	// Forget drops a sandbox that has been released.
	Forget(id string)
	// Retain drops all but the sandboxes for which keep returns true.
	Retain(keep func(id string) bool)
	// Expect says that a sandbox has a route.
	Expect(id string, addr netip.Addr, minBytes uint64)
	// Looked has room for one: a look has ended since Report was called last.
	Looked() <-chan struct{}
	// Report returns what is in use, and what looks have shown to be in use no more since
	// it was called last; or all.
	Report(all bool) lastactive.Report
	// Ask returns how these were used, after two looks that begin after the call. An error
	// says why that is not known.
	Ask(ctx context.Context, questions []lastactive.Question) ([]lastactive.Activity, error)
	// Last returns everything, as a look shows it that begins after the call. Age 0 has what
	// may go on without this router.
	Last(ctx context.Context) lastactive.Report
}

// Answers knows which answers Envoy has not read yet. *extproc.Answers is one.
type Answers interface {
	// Barrier calls passed once those that have begun before it have been read, in
	// the order of the barriers. One that passes together with a later one need not be
	// called: acknowledgements are cumulative.
	Barrier(passed func())
	// Unread is how many there are.
	Unread() int
}

// Neighbours are the other routers beside the same Envoy. *instance.Instance is one.
type Neighbours interface {
	// Dead lists those whose processes have ended, in an order of their own.
	Dead() []string
	// Forget drops some of them: the allocator knows.
	Forget(ids []string) error
}

// Options configure a Client. All are required unless they say otherwise.
type Options struct {
	// Allocators are control addresses, host:port, tried in turn. One is enough
	// while it answers, because a replica that does not lead names the leader. Of a
	// name with several addresses each is tried, in random order.
	Allocators []string
	// InstanceID names this process: random, 16 to 64 characters of [a-z0-9-].
	InstanceID string
	// MaxStale is how long the cache may be served after the last answered
	// ping. An allocator that would not wait as long refuses the session, which is
	// tried again like any other that fails.
	MaxStale time.Duration
	// PingEvery is the pause between pings. A stream on which no ping was answered for 5 of
	// them is dropped. Default 1 s.
	PingEvery time.Duration
	Cache     Cache
	// Activity is told what the cache was told, after the cache.
	Activity Activity
	Answers  Answers
	// Neighbours that have ended are told to the allocator.
	Neighbours Neighbours
	// Probe asks a sandbox whether it works, within 5 s. busy.Ask is one.
	Probe func(ctx context.Context, addr netip.AddrPort, path string) bool
	// Dial are options for the connection, credentials among them.
	Dial []grpc.DialOption
	// Now is a monotonic clock that counts suspended time.
	Now func() time.Duration
	Log *zap.Logger
}

// Client keeps a session.
type Client struct {
	o Options

	mu      sync.Mutex
	current *session // nil: not connected
	seen    seen
	left    []string // journals that this router was in before, the last ones
	// freshUntil is until when the cache may be served.
	freshUntil time.Duration

	served     chan struct{} // closed once routes can be served
	closeServe func()
}

// seen is the journal that the router is in, "" if it was told none, the highest term
// that it has seen there, and the highest position in that term.
type seen struct {
	journal        string
	term, position uint64
}

// leftMost bounds the journals that are remembered. One is left when the journal is lost,
// or restored from a backup, while this process runs.
const leftMost = 16

// How many messages may wait to be sent to the allocator. More open questions
// than this fail at once.
const outQueue = 16 << 10

// Pauses between rounds of attempts to connect to each allocator. Until a leader is found they stay below
// seekMost: new sandboxes cannot be reached, and DELETE waits for this router. After
// any other failure, a refusal for example, they grow to reconnectMost.
const (
	reconnectFirst = 50 * time.Millisecond
	seekMost       = 250 * time.Millisecond
	reconnectMost  = 2 * time.Second
)

// connectWait is how long a connection may take, TLS included. It doubles with each
// one that takes longer, as on a busy machine, up to pingsMissed pings, until a
// replica has answered: an address at which nothing answers delays the next one.
const connectWait = time.Second

// logEvery is the least time between two lines about attempts that fail.
const logEvery = 2 * time.Second

// errNoLeader: the replica that was asked does not lead.
var errNoLeader = errors.New("it does not lead")

// errLeft: the leader has made Goodbye durable, or there is none to be said.
var errLeft = errors.New("left")

// errConnect: no connection within the time for one.
var errConnect = errors.New("no connection")

// pauseMost is the longest pause after a session that ended with err.
func pauseMost(err error) time.Duration {
	if errors.Is(err, errNoLeader) || errors.Is(err, errConnect) || status.Code(err) == codes.Unavailable {
		return seekMost
	}
	return reconnectMost
}

// deadMost is how many neighbours are reported as dead at a time: the protocol's bound.
const deadMost = 1000

// redirectsMost bounds how often in a row the name of a leader is followed
// without a pause: two replicas that each take the other for the leader must not
// make a router busy.
const redirectsMost = 3

// New checks the options.
func New(o Options) (*Client, error) {
	var errs []error
	for _, required := range []struct {
		name    string
		missing bool
	}{
		{"Allocators", len(o.Allocators) == 0 || slices.Contains(o.Allocators, "")}, {"InstanceID", o.InstanceID == ""}, {"Cache", o.Cache == nil},
		{"Activity", o.Activity == nil}, {"Answers", o.Answers == nil}, {"Neighbours", o.Neighbours == nil}, {"Probe", o.Probe == nil}, {"Dial", len(o.Dial) == 0}, {"Now", o.Now == nil}, {"Log", o.Log == nil},
		{"MaxStale", o.MaxStale <= 0},
	} {
		if required.missing {
			errs = append(errs, fmt.Errorf("link: Options.%s is required", required.name))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	if o.PingEvery == 0 {
		o.PingEvery = time.Second
	}
	served := make(chan struct{})
	return &Client{o: o, served: served, closeServe: sync.OnceFunc(func() { close(served) })}, nil
}

// ErrDeclaredDead ends Run: an operator has told the allocator that this router has ended,
// so nobody waits for it before addresses are used again. Its process must end; what
// is started in its place joins under another name.
var ErrDeclaredDead = errors.New("link: this router was declared dead")

// Served is closed once routes can be served for the first time.
func (l *Client) Served() <-chan struct{} { return l.served }

// Run keeps a session until ctx ends, and then says Goodbye, unless an answer may not
// have been read: the caller must have stopped admitting requests before it ends ctx.
// When there is no leader to say it to, or it has not heard it, Run looks for one
// until last ends; an allocator that has never spoken to this router need not hear it.
// It returns nil then. The only error is ErrDeclaredDead: nothing is fresh any more.
func (l *Client) Run(ctx, last context.Context) error {
	next, redirects, pause, patience := 0, 0, reconnectFirst, connectWait
	address := l.o.Allocators[next]
	most, logged := time.Duration(0), -logEvery
	for {
		if ctx.Err() != nil {
			unread := l.o.Answers.Unread()
			if l.Term() == 0 {
				return nil
			}
			if last.Err() != nil || unread > 0 {
				l.o.Log.Warn("ends without a Goodbye: the allocator must wait for what this router may have admitted", zap.Int("unread", unread))
				return nil
			}
		}
		began := l.o.Now()
		leader, err := l.session(ctx, last, address, patience)
		declaredDead := controlv1.IsDeclaredDead(err)
		if declaredDead {
			l.o.Cache.Expire()
		}
		l.o.Cache.Disconnected()
		switch {
		case errors.Is(err, errLeft), declaredDead && ctx.Err() != nil:
			return nil
		case declaredDead:
			return fmt.Errorf("%w: %w", ErrDeclaredDead, err)
		}
		if leader != "" {
			if leader != address && redirects < redirectsMost {
				address = leader
				redirects++
				continue
			}
			err = fmt.Errorf("%w, and names %s as the leader", errNoLeader, leader)
		}
		if now := l.o.Now(); now-logged >= logEvery {
			logged = now
			l.o.Log.Warn("no session with the allocator", zap.String("address", address), zap.Error(err))
		}
		if errors.Is(err, errConnect) {
			patience = min(2*patience, pingsMissed*l.o.PingEvery)
		} else if status.Code(err) != codes.Unavailable {
			patience = connectWait
		}
		if l.o.Now()-began > reconnectMost {
			pause = reconnectFirst // it had worked for a while
		}
		redirects, most = 0, max(most, pauseMost(err))
		next = (next + 1) % len(l.o.Allocators)
		address = l.o.Allocators[next]
		if next != 0 {
			continue // a pause follows when all have been tried
		}
		pause, most = min(pause, most), 0
		stop := ctx.Done()
		if ctx.Err() != nil {
			stop, pause = last.Done(), min(pause, seekMost)
		}
		select {
		case <-stop:
		case <-time.After(pause/2 + rand.N(pause)):
		}
		pause = min(2*pause, reconnectMost)
	}
}

// Ask puts the question about an ID to the allocator. It reports false when
// there is no session or it cannot take any more.
func (l *Client) Ask(id string) bool {
	l.mu.Lock()
	s := l.current
	l.mu.Unlock()
	return s != nil && s.send(&controlv1.RouterMessage{Message: &controlv1.RouterMessage_Resolve{
		Resolve: &controlv1.Resolve{SandboxId: id},
	}})
}

// Connected reports whether there is a session whose snapshot was applied.
func (l *Client) Connected() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.current != nil
}

// Term is the highest term seen, 0 before the first.
func (l *Client) Term() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.seen.term
}

// join is what a session begins with. Once ctx has ended nothing is admitted any more,
// however fresh the cache is.
func (l *Client) join(ctx context.Context) *controlv1.Join {
	l.mu.Lock()
	defer l.mu.Unlock()
	return &controlv1.Join{
		InstanceId: l.o.InstanceID, MaxStaleNanos: uint64(l.o.MaxStale), Looks: true,
		Journal: l.seen.journal, HighestTerm: l.seen.term, Position: l.seen.position, Serving: ctx.Err() == nil && l.o.Now() < l.freshUntil,
		Left: slices.Clone(l.left),
	}
}

// accept returns an error if a message must not be believed. first: no snapshot was
// complete on its stream before this.
func (l *Client) accept(m *controlv1.AllocatorMessage, first bool) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	is := seen{m.GetJournal(), m.GetTerm(), m.GetPosition()}
	if is.journal != l.seen.journal && is.journal != "" && l.seen.journal != "" {
		switch {
		case slices.Contains(l.left, is.journal):
			return fmt.Errorf("control stream: a leader of journal %s spoke, but journal %s was begun after that", is.journal, l.seen.journal)
		case !first || m.GetSnapshot() == nil:
			return fmt.Errorf("control stream: a leader of journal %s spoke in a session of journal %s", is.journal, l.seen.journal)
		case m.GetSnapshot().GetLast(): // from here on nothing of the other one is left
			l.o.Log.Warn("the allocator's journal was begun anew; what this router knew is replaced", zap.String("journal", is.journal), zap.String("earlier", l.seen.journal))
			l.left = append(l.left[max(0, len(l.left)+1-leftMost):], l.seen.journal)
			l.seen = is
		}
		return nil
	}
	switch {
	case is.term < l.seen.term:
		return fmt.Errorf("control stream: a leader of term %d spoke, but term %d has begun", is.term, l.seen.term)
	case is.term > l.seen.term:
		l.seen.term, l.seen.position = is.term, is.position
	default:
		l.seen.position = max(l.seen.position, is.position)
	}
	if is.journal != "" {
		l.seen.journal = is.journal
	}
	return nil
}

// fresh notes until when the cache may be served.
func (l *Client) fresh(until time.Duration) {
	l.o.Cache.SetFreshUntil(until)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.freshUntil = until
}

func (l *Client) setCurrent(s *session) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.current = s
}

func toRoute(r *controlv1.Route) (routecache.Route, error) {
	addr, err := netip.ParseAddr(r.GetPodIp())
	if err != nil {
		return routecache.Route{}, fmt.Errorf("route: pod_ip: %w", err)
	}
	// 0 is let through: of a sandbox whose pool is gone nobody knows the default
	// port, and its other ports must go on working.
	if r.GetDefaultPort() > 65535 {
		return routecache.Route{}, fmt.Errorf("route: default_port %d is above 65535", r.GetDefaultPort())
	}
	ports := make([]uint16, 0, len(r.GetPorts()))
	for _, port := range r.GetPorts() {
		if port == 0 || port > 65535 {
			return routecache.Route{}, fmt.Errorf("route: ports: %d is not in 1 to 65535", port)
		}
		ports = append(ports, uint16(port))
	}
	return routecache.Route{
		Addr: addr.Unmap(), DefaultPort: uint16(r.GetDefaultPort()), Ports: routecache.NewPorts(ports),
		MinBytes: r.GetMinBytesPerMinute(),
	}, nil
}
