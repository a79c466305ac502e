package egress

import (
	"context"
	"net/netip"
	"strconv"
	"sync"
	"time"

	ratelimitv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/berth-sandbox/berth/envoy"
	"github.com/berth-sandbox/berth/extproc/h2"
	"github.com/berth-sandbox/berth/internal/rate"
	"github.com/berth-sandbox/berth/internal/wait"
)

const (
	// share: an address may have as many connections as the share of those that are still free, 1/share.
	share = 40
	// Of one address so many connections per second are accepted, and at once. Further ones wait for their turn, for at
	// most maxTurn, and those behind them are refused.
	connectRate, connectBurst = 100, 1000
	maxTurn                   = 2 * time.Second
	// lookPause is the pause between two looks. After a look that took long it is idleShare times as long as that: the
	// kernel has a line for each connection that ended in the last minute, too.
	lookPause = 100 * time.Millisecond
	idleShare = 4
)

// turns has the tokens of those that wait, too.
var turns = rate.New(connectRate, connectBurst+int(connectRate*maxTurn/time.Second))

// peers bound the connections of each address to the gateway. What an address has is what the kernel had at the newest
// look, without those that waited for it, and what was admitted since that began. So it is never too low. A connection
// that ended since counts until the next look, and who would be refused waits for that. One that waits is not one that
// an address has: the kernel has it from the moment at which Envoy accepts it, but most of them are refused.
type peers struct {
	max   int
	read  func(port uint16) (map[netip.Addr]int, error)
	began time.Time
	kick  chan struct{} // asks for a look

	mu     sync.Mutex
	port   uint16 // of the gateway, as Envoy has said. 0: not yet
	looked bool
	all    map[netip.Addr]*peer
	total  int           // connections of all
	waits  int           // of all, that wait for a look
	next   chan struct{} // closed at the end of the next look that begins
	looks  chan struct{} // that of the look in progress, or nil
}

// peer is an address with connections, or with a bucket that is not full.
type peer struct {
	open  int // at the newest look
	since int // admitted since it began
	waits int // that wait for a look
	late  int // of waits, that came during a look, and wait for the next one
	full  time.Duration
}

func newPeers(most int, read func(uint16) (map[netip.Addr]int, error)) *peers {
	return &peers{
		max: most, read: read, began: time.Now(), kick: make(chan struct{}, 1), all: map[netip.Addr]*peer{},
		next: make(chan struct{}),
	}
}

// verdict is what becomes of a new connection.
type verdict int

const (
	refusedNow verdict = iota
	admittedNow
	// awaitsLook must ask again after the next look.
	awaitsLook
)

// of returns the peer at an address, nil if there is no room for another one. The next look removes one without
// connections.
func (p *peers) of(addr netip.Addr) *peer {
	of := p.all[addr]
	if of == nil && len(p.all) < 2*p.max {
		of = &peer{}
		p.all[addr] = of
	}
	return of
}

// connect decides about a new connection of an address. One that is admitted waits for the pause first. again: it has
// waited for a look.
func (p *peers) connect(
	addr netip.Addr, port uint16, again bool,
) (v verdict, pause time.Duration, look <-chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.port = port
	of := p.of(addr)
	if of == nil || !p.looked || of.open+of.since >= (p.max-p.total)/share {
		select {
		case p.kick <- struct{}{}:
		default: // it is asked for
		}
		if again || of == nil || of.waits >= (p.max-p.total-p.waits)/share {
			return refusedNow, 0, nil
		}
		p.await(of, 1)
		return awaitsLook, 0, p.next
	}
	pause, ok := of.turn(time.Since(p.began))
	if !ok {
		return refusedNow, 0, nil
	}
	of.since++
	p.total++
	return admittedNow, pause, nil
}

// turn takes a token, and returns how long it waits for its turn. Without one ok is false.
func (of *peer) turn(now time.Duration) (pause time.Duration, ok bool) {
	after, missing := turns.Take(of.full, now)
	if missing > 0 {
		return 0, false
	}
	of.full = after
	return max(0, after-now-connectBurst*turns.Every()), true
}

// await adds connections to those of an address that wait for the next look.
func (p *peers) await(of *peer, n int) {
	of.waits += n
	p.waits += n
	if p.looks != nil {
		of.late += n
	}
}

// left takes back a connection that has not waited for the end of its look. The look may not have found it.
func (p *peers) left(addr netip.Addr, look <-chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch of := p.all[addr]; look {
	case p.next:
		p.await(of, -1)
	case p.looks:
		of.waits--
		p.waits--
	default: // it has ended
	}
}

// refused takes a token for a refused request of an address, and returns how long its answer waits for its turn. A
// connection has one request at a time, so no address has more refused per second than it has tokens, and half of its
// connections.
func (p *peers) refused(addr netip.Addr) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	if of := p.of(addr); of != nil {
		if pause, ok := of.turn(time.Since(p.began)); ok {
			return pause
		}
	}
	return maxTurn
}

// watch looks when it is asked for.
func (p *peers) watch(ctx context.Context, failed func(error)) {
	for {
		select {
		case <-p.kick:
		case <-ctx.Done():
			return
		}
		began := time.Now()
		if err := p.look(); err != nil {
			failed(err)
		}
		if !wait.Sleep(ctx, max(lookPause, idleShare*time.Since(began))) {
			return
		}
	}
}

// look counts the connections anew. After an error everything that was admitted counts as open.
func (p *peers) look() error {
	p.mu.Lock()
	port, done := p.port, p.next
	p.looks, p.next = done, make(chan struct{})
	for _, of := range p.all {
		of.open += of.since
		of.since = 0
	}
	p.mu.Unlock()
	defer close(done)
	found, err := p.read(port)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.looks, p.waits = nil, 0
	if err == nil {
		p.looked, p.total = true, 0
		for addr := range found {
			if p.all[addr] == nil {
				p.all[addr] = &peer{}
			}
		}
	}
	now := time.Since(p.began)
	for addr, of := range p.all {
		if err == nil {
			// It may have found those that came late, or not. So they count for their address, but not for the share of all.
			of.open = max(0, found[addr]-(of.waits-of.late))
			p.total += max(0, found[addr]-of.waits) + of.since
		}
		of.waits, of.late = of.late, 0
		p.waits += of.waits
		if of.open+of.since+of.waits == 0 && of.full <= now {
			delete(p.all, addr)
		}
	}
	return err
}

// connections answers Envoy about new connections.
type connections struct{ s *Server }

// Now implements h2.Handler.
func (c connections) Now(message []byte, _ string) (h2.Reply, h2.Later) {
	addr, port, ok := newConnection(message)
	if !ok {
		return h2.Reply{
			Status: codes.InvalidArgument,
			Text:   "expected the address and the port of a new connection: check the listener in Envoy's configuration",
		}, nil
	}
	v, pause, look := c.s.peers.connect(addr, port, false)
	if v != awaitsLook && pause == 0 {
		return c.reply(v), nil
	}
	return h2.Reply{}, func(ctx context.Context, _ func([]byte) error) h2.Reply {
		if v == awaitsLook {
			select {
			case <-look:
				v, pause, _ = c.s.peers.connect(addr, port, true)
			case <-ctx.Done():
				c.s.peers.left(addr, look)
				v = refusedNow
			}
		}
		if pause > 0 {
			wait.Sleep(ctx, pause) // if ctx has ended, none reads the answer
		}
		return c.reply(v)
	}
}

// reply counts a decision and returns its reply.
func (c connections) reply(v verdict) h2.Reply {
	count, code := c.s.metrics.closed, ratelimitv3.RateLimitResponse_OVER_LIMIT
	if v == admittedNow {
		count, code = c.s.metrics.connected, ratelimitv3.RateLimitResponse_OK
	}
	count.Inc()
	raw, err := proto.Marshal(&ratelimitv3.RateLimitResponse{OverallCode: code})
	if err != nil {
		return h2.Reply{Status: codes.Internal, Text: err.Error()}
	}
	return h2.Reply{Message: raw}
}

// newConnection reads a message about a new connection.
func newConnection(message []byte) (addr netip.Addr, port uint16, ok bool) {
	var m ratelimitv3.RateLimitRequest
	if err := proto.Unmarshal(message, &m); err != nil {
		return addr, 0, false
	}
	for _, d := range m.GetDescriptors() {
		for _, e := range d.GetEntries() {
			switch e.GetKey() {
			case envoy.PeerKey:
				addr, _ = netip.ParseAddr(e.GetValue())
			case envoy.PortKey:
				n, _ := strconv.ParseUint(e.GetValue(), 10, 16)
				port = uint16(n)
			}
		}
	}
	return addr.Unmap(), port, addr.IsValid() && port != 0
}
