package controlclient

import (
	"cmp"
	"context"
	"crypto/sha256"
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
	"github.com/berth-sandbox/berth/internal/options"
	"github.com/berth-sandbox/berth/lastactive"
	"github.com/berth-sandbox/berth/routecache"
)

// Gate is what the routers of both kinds of gateways know about their session.
type Gate interface {
	SetFreshUntil(at time.Duration)
	Expire()
	// Fresh reports whether routes may be served now.
	Fresh() bool
	// Connected says that Ask can ask, until Disconnected.
	Connected()
	Disconnected()
	// Barrier calls drained once Envoy has read all earlier answers, in the order of the
	// barriers. If several are drained together, it may call only the newest:
	// acknowledgements are cumulative.
	Barrier(drained func())
	// Unread is the number of answers that Envoy has not read yet.
	Unread() int
}

// Sandboxes are what the router knows of each sandbox. *admission.Sandboxes implements it.
type Sandboxes interface {
	Gate
	Put(id string, r routecache.Route)
	Resolve(id string, a routecache.Answer)
	Release(id string, end routecache.End)
	Replace(routes map[string]routecache.Route)
	// Quiesce reports false if there is no room for another sandbox.
	Quiesce(id string) bool
	Resume(id string)
	Close(id string)
}

// Egress is what the router of an egress gateway knows of each sandbox. *control.Sandboxes of package egress/control
// implements it. Barrier calls drained once all requests have ended that the earlier calls do not permit any more, and
// Unread is the number of requests that may not have ended.
type Egress interface {
	Gate
	Set(r *controlv1.Route) error
	Forget(id string)
	Replace(all []*controlv1.Route) error
	// SetCredentials replaces the values that the headers of routes name; nil: the allocator has not read them.
	SetCredentials(values map[string]string)
	// Answered says that what the allocator knows of a sandbox, about which Ask has asked, is in effect.
	Answered(id string)
	// Usage returns how a sandbox uses the gateway. The number is not set.
	Usage(id string) *controlv1.EgressUsage
}

// Uses is how sandboxes are used. The view of *admission.Sandboxes implements it.
type Uses interface {
	// LookDone receives a value after a look. Its capacity is 1.
	LookDone() <-chan struct{}
	// Report returns what is in use, and what looks have found to be no longer in use since
	// the previous call. If all is set, it returns everything.
	Report(all bool) lastactive.Report
	// Ask returns how these sandboxes were used, from two looks that begin after the call. An
	// error says why the looks failed.
	Ask(ctx context.Context, ids []string) ([]lastactive.Activity, error)
	// FinalReport returns everything, from a look that begins after the call. Age 0 marks use
	// that may continue without this router.
	FinalReport(ctx context.Context) lastactive.Report
}

// Keys are the hashes of the API keys, by team. *extproc.TeamKeys implements it.
type Keys interface {
	// Replace replaces all keys. nil: the allocator has not read them.
	Replace(byTeam map[string][][sha256.Size]byte)
}

// DeadRouters finds the routers of this gateway whose processes have ended. *lockfile.File
// implements it.
type DeadRouters interface {
	// Dead lists their IDs in a stable order.
	Dead() []string
	// Forget removes some of them from the list, because the allocator has recorded them.
	Forget(ids []string) error
}

// MaxMaxStale bounds Options.MaxStale: an allocator takes no longer one.
const MaxMaxStale = 24 * time.Hour

// Options configure a Client. All are required unless they say otherwise. With Egress, which makes the session that of
// an egress router, Sandboxes, Uses, Keys and Probe have no meaning and must not be set.
type Options struct {
	// Allocators are control addresses, host:port, tried in turn. One reachable replica is
	// enough, because it names the leader. If a name has several addresses, each is tried,
	// in random order.
	Allocators []string
	// RouterID identifies this process: random, 16 to 64 characters of [a-z0-9-].
	RouterID string
	// MaxStale is how long routes may be served after the last answered ping, at most 24 h.
	MaxStale time.Duration
	// PingInterval is the time between pings. A stream is dropped when no ping was answered
	// for 5 of them. Default 1 s.
	PingInterval time.Duration
	Egress       Egress
	Sandboxes    Sandboxes
	Uses         Uses
	Keys         Keys
	// DeadRouters are reported to the allocator. GatewaySecret has 32 bytes that only routers of this
	// gateway know. It proves that the dead ones are of this gateway.
	DeadRouters   DeadRouters
	GatewaySecret []byte
	// Probe asks a sandbox, within 5 s, whether it is busy. busy.Ask implements it.
	Probe func(ctx context.Context, addr netip.AddrPort, path string) bool
	// OnPong is called with the time from each ping to its pong. Optional.
	OnPong func(took time.Duration)
	// Dial are options for the connection, credentials among them.
	Dial []grpc.DialOption
	// Now is a monotonic clock that counts suspended time (CLOCK_BOOTTIME).
	Now func() time.Duration
	Log *zap.Logger
}

// Client keeps the router's session.
type Client struct {
	o    Options
	gate Gate // Egress or Sandboxes

	mu           sync.Mutex
	current      *stream // nil: not connected
	newest       position
	leftJournals []string // journals that this router has left, the newest maxLeftJournals

	ready      chan struct{} // closed once routes can be served
	closeReady func()
}

// position is how much of the journal this router has seen: the journal, "" before the first
// message, the highest term in it, and the highest position in that term.
type position struct {
	journal        string
	term, position uint64
}

// maxLeftJournals bounds the journals that are remembered. A router leaves a journal when it
// is lost, or restored from a backup, while the process runs.
const maxLeftJournals = 16

// outQueueSize is how many messages to the allocator may be queued. Questions above that
// fail at once.
const outQueueSize = 16 << 10

// Pauses between rounds of attempts. A round tries each allocator once. Pauses are at most
// maxSeekPause while no leader is found, because new sandboxes are unreachable meanwhile and
// DELETE waits for this router. After any other failure, such as a refusal, they grow to
// maxReconnectPause.
const (
	minReconnectPause = 50 * time.Millisecond
	maxSeekPause      = 250 * time.Millisecond
	maxReconnectPause = 2 * time.Second
)

// minConnectTimeout bounds a connection attempt, TLS included. The timeout doubles after each
// attempt that exceeds it, as on a busy machine, up to maxMissedPings ping intervals, and is
// reset when a replica answers. It is short because an unresponsive address delays the next.
const minConnectTimeout = time.Second

// logInterval is the minimum time between two log lines about failed attempts.
const logInterval = 2 * time.Second

// maxPause is the longest pause after a stream that ended with err.
func maxPause(err error) time.Duration {
	if errors.Is(err, errNotLeader) || errors.Is(err, errConnect) || status.Code(err) == codes.Unavailable {
		return maxSeekPause
	}
	return maxReconnectPause
}

// maxDeadReported bounds the dead routers of one message: the protocol's limit.
const maxDeadReported = 1000

// maxRedirects bounds how many redirects in a row are followed without a pause. Two replicas
// may each take the other for the leader.
const maxRedirects = 3

// New checks the options and returns a Client that is not connected.
func New(o Options) (*Client, error) {
	err := options.Require(o, "Allocators", "RouterID", "DeadRouters", "GatewaySecret", "Dial", "Now", "Log", "MaxStale")
	var gate Gate = o.Egress
	if o.Egress == nil {
		err = errors.Join(err, options.Require(o, "Sandboxes", "Uses", "Keys", "Probe"))
		gate = o.Sandboxes
	} else if o.Sandboxes != nil || o.Uses != nil || o.Keys != nil || o.Probe != nil {
		err = errors.Join(err, errors.New(
			"controlclient.Options: Sandboxes, Uses, Keys and Probe must not be set with Egress"))
	}
	if slices.Contains(o.Allocators, "") {
		err = errors.Join(err, errors.New("controlclient.Options.Allocators must not have an empty address"))
	}
	if err != nil {
		return nil, err
	}
	o.PingInterval = cmp.Or(o.PingInterval, time.Second)
	if o.OnPong == nil {
		o.OnPong = func(time.Duration) {}
	}
	ready := make(chan struct{})
	return &Client{o: o, gate: gate, ready: ready, closeReady: sync.OnceFunc(func() { close(ready) })}, nil
}

// Ready is closed once routes can be served for the first time.
func (c *Client) Ready() <-chan struct{} { return c.ready }

// Run keeps a session until ctx ends, and then sends Goodbye. The caller must have stopped
// admissions before it ends ctx. If Envoy may not have read an answer, Run sends no Goodbye.
// If no leader takes the Goodbye, Run looks for one until goodbyeCtx ends. A router that
// never had a session needs no Goodbye.
//
// Run then returns nil. The only error is ErrDeclaredDead. The routes are expired in that case.
func (c *Client) Run(ctx, goodbyeCtx context.Context) error {
	next, redirects, pause, connectTimeout := 0, 0, minReconnectPause, minConnectTimeout
	address := c.o.Allocators[next]
	longest, logged := time.Duration(0), -logInterval
	for {
		if ctx.Err() != nil && c.mustNotSayGoodbye(goodbyeCtx) {
			return nil
		}
		began := c.o.Now()
		leader, err := c.runStream(ctx, goodbyeCtx, address, connectTimeout)
		declaredDead := controlv1.IsDeclaredDead(err)
		if declaredDead {
			c.gate.Expire()
		}
		c.gate.Disconnected()
		switch {
		case errors.Is(err, errLeft), declaredDead && ctx.Err() != nil:
			return nil
		case declaredDead:
			return fmt.Errorf("%w: %w", ErrDeclaredDead, err)
		}
		if leader != "" {
			if leader != address && redirects < maxRedirects {
				address = leader
				redirects++
				continue
			}
			err = fmt.Errorf("%w, and names %s as the leader", errNotLeader, leader)
		}
		if now := c.o.Now(); now-logged >= logInterval {
			logged = now
			c.o.Log.Warn("no session with the allocator", zap.String("address", address), zap.Error(err))
		}
		if errors.Is(err, errConnect) {
			connectTimeout = min(2*connectTimeout, maxMissedPings*c.o.PingInterval)
		} else if status.Code(err) != codes.Unavailable {
			connectTimeout = minConnectTimeout
		}
		if c.o.Now()-began > maxReconnectPause {
			pause = minReconnectPause // the stream had worked for a while
		}
		redirects, longest = 0, max(longest, maxPause(err))
		next = (next + 1) % len(c.o.Allocators)
		address = c.o.Allocators[next]
		if next != 0 {
			continue // pause only after a whole round
		}
		pause, longest = min(pause, longest), 0
		stop := ctx.Done()
		if ctx.Err() != nil {
			stop, pause = goodbyeCtx.Done(), min(pause, maxSeekPause)
		}
		select {
		case <-stop:
		case <-time.After(pause/2 + rand.N(pause)):
		}
		pause = min(2*pause, maxReconnectPause)
	}
}

// mustNotSayGoodbye reports whether a stopping router ends without another attempt to send
// Goodbye.
func (c *Client) mustNotSayGoodbye(goodbyeCtx context.Context) bool {
	unread := c.gate.Unread()
	if c.Term() == 0 {
		return true
	}
	if goodbyeCtx.Err() != nil || unread > 0 {
		c.o.Log.Warn("ends without a Goodbye: the allocator must wait for what this router may have admitted",
			zap.Int("unread", unread))
		return true
	}
	return false
}

// Ask asks the allocator about an ID, and to wake the sandbox if it is asleep and wake is set. It reports false
// if there is no session or its queue is full.
func (c *Client) Ask(id string, wake bool) bool {
	c.mu.Lock()
	s := c.current
	c.mu.Unlock()
	return s != nil && s.enqueue(&controlv1.RouterMessage{Message: &controlv1.RouterMessage_Resolve{
		Resolve: &controlv1.Resolve{SandboxId: id, Wake: wake},
	}})
}

// Connected reports whether there is a session with the leader: its snapshot is in effect.
func (c *Client) Connected() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.current != nil
}

// Term is the highest term seen, 0 before the first.
func (c *Client) Term() uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.newest.term
}

// join returns the first message of a stream. After ctx has ended the router admits nothing,
// so it does not claim to serve, however fresh the cache is.
func (c *Client) join(ctx context.Context) *controlv1.Join {
	c.mu.Lock()
	defer c.mu.Unlock()
	hash := sha256.Sum256(c.o.GatewaySecret)
	j := &controlv1.Join{
		RouterId: c.o.RouterID, MaxStaleNanos: uint64(c.o.MaxStale),
		Journal: c.newest.journal, HighestTerm: c.newest.term, Position: c.newest.position,
		Serving:      ctx.Err() == nil && c.gate.Fresh(),
		LeftJournals: slices.Clone(c.leftJournals), GatewayHash: hash[:],
	}
	if c.o.Egress != nil {
		j.MaxStaleNanos, j.EgressMaxStaleNanos = 0, j.MaxStaleNanos
	}
	return j
}

// accept checks the journal and term of a message and records its position. An error ends
// the stream. first means that no snapshot was complete on this stream before.
func (c *Client) accept(m *controlv1.AllocatorMessage, first bool) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	at := position{m.GetJournal(), m.GetTerm(), m.GetPosition()}
	if at.journal != c.newest.journal && c.newest.journal != "" {
		switch {
		case slices.Contains(c.leftJournals, at.journal):
			return fmt.Errorf("control stream: a message of journal %s, which this router has left for journal %s",
				at.journal, c.newest.journal)
		case !first || m.GetSnapshot() == nil:
			return fmt.Errorf("control stream: a message of journal %s on a stream of journal %s",
				at.journal, c.newest.journal)
		case m.GetSnapshot().GetLast(): // nothing of the old journal remains after this
			c.o.Log.Warn("the allocator has a new journal; its snapshot replaces all routes",
				zap.String("journal", at.journal), zap.String("earlier", c.newest.journal))
			oldest := max(0, len(c.leftJournals)+1-maxLeftJournals)
			c.leftJournals = append(c.leftJournals[oldest:], c.newest.journal)
			c.newest = at
		}
		return nil
	}
	switch {
	case at.term < c.newest.term:
		return fmt.Errorf("control stream: a message of term %d, but term %d has begun", at.term, c.newest.term)
	case at.term > c.newest.term:
		c.newest.term, c.newest.position = at.term, at.position
	default:
		c.newest.position = max(c.newest.position, at.position)
	}
	c.newest.journal = at.journal
	return nil
}

func (c *Client) setCurrent(s *stream) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.current = s
}
