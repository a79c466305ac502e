package controlclient_test

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/test/bufconn"

	controlv1 "github.com/berth-sandbox/berth/api/control/v1"
	"github.com/berth-sandbox/berth/extproc"
	"github.com/berth-sandbox/berth/extproc/controlclient"
	"github.com/berth-sandbox/berth/routecache"
)

const (
	routerID     = "router-0123456789abcdef"
	maxStale     = 15 * time.Minute
	pingInterval = time.Second
)

// world is a client in a synctest bubble, and the allocators that it may reach.
// It uses the clock of the bubble, which advances when all goroutines wait.
type world struct {
	t          *testing.T
	began      time.Time
	client     *controlclient.Client
	cache      *recorder
	activity   *tracker
	probe      func(context.Context, netip.AddrPort, string) bool
	admissions *admissions
	keys       extproc.TeamKeys
	dead       *deadRouters
	pongs      []time.Duration    // the times that they took
	begin      func()             // starts Run, unless it has been started
	stop       context.CancelFunc // ends the context of Run
	giveUp     context.CancelFunc // ends the time for a Goodbye
	ended      chan error         // the result of Run

	mu      sync.Mutex
	servers map[string]*bufconn.Listener // nil: a black hole
	delay   time.Duration                // before each connection
	dialled []string

	grpc    []*grpc.Server
	streams chan *peer // opened by the client
}

// address returns the address of an allocator, or of several (comma-separated) under one name.
func address(names string) string { return "allocators:///" + names }

// resolve is a gRPC resolver whose names are their own addresses.
type resolve struct{}

func (resolve) Scheme() string { return "allocators" }

func (resolve) Build(target resolver.Target, conn resolver.ClientConn, _ resolver.BuildOptions) (resolver.Resolver, error) {
	var s resolver.State
	for name := range strings.SplitSeq(target.Endpoint(), ",") {
		s.Addresses = append(s.Addresses, resolver.Address{Addr: name})
	}
	return resolve{}, conn.UpdateState(s)
}

func (resolve) ResolveNow(resolver.ResolveNowOptions) {}
func (resolve) Close()                                {}

// run runs f in a bubble with a client of these allocators, which f starts. The client starts
// when f first waits for it, so allocators that f starts earlier exist at the first attempt.
func run(t *testing.T, allocators []string, f func(*world)) {
	t.Helper()
	runWith(t, allocators, func(w *world) controlclient.Uses {
		w.activity = &tracker{r: w.cache, looked: make(chan struct{}, 1)}
		return w.activity
	}, f)
}

// runWith is run with another implementation of Uses.
func runWith(t *testing.T, allocators []string, usesOf func(*world) controlclient.Uses, f func(*world)) {
	t.Helper()
	runChanged(t, allocators, usesOf, func(*world, *controlclient.Options) {}, f)
}

// runChanged is runWith with other options.
func runChanged(t *testing.T, allocators []string, usesOf func(*world) controlclient.Uses, change func(*world, *controlclient.Options), f func(*world)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		// Pings keep the clock of the bubble running, so a test that hangs must be ended.
		defer time.AfterFunc(24*time.Hour, func() { panic("what the test waits for does not happen") }).Stop()
		w := &world{
			t: t, began: time.Now(), ended: make(chan error, 1),
			servers: map[string]*bufconn.Listener{}, streams: make(chan *peer, 1000),
		}
		cache, err := routecache.New(routecache.Options{Now: w.now, Ask: func(id string, wake bool) bool { return w.client.Ask(id, wake) }})
		require.NoError(t, err)
		w.admissions, w.dead = &admissions{}, &deadRouters{}
		w.cache = &recorder{Cache: cache, admissions: w.admissions}
		uses := usesOf(w)
		o := controlclient.Options{
			RouterID: routerID, MaxStale: maxStale, PingInterval: pingInterval,
			Sandboxes: w.cache, Uses: uses, Keys: &w.keys, DeadRouters: w.dead, GatewaySecret: []byte("the secret of this gateway is 32."), Now: w.now, Log: zap.NewNop(),
			Probe: func(ctx context.Context, addr netip.AddrPort, path string) bool {
				return w.probe(ctx, addr, path)
			},
			OnPong: func(took time.Duration) { w.pongs = append(w.pongs, took) },
			Dial:   []grpc.DialOption{grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithContextDialer(w.dial), grpc.WithResolvers(resolve{})},
		}
		for _, name := range allocators {
			o.Allocators = append(o.Allocators, address(name))
		}
		change(w, &o)
		w.client, err = controlclient.New(o)
		require.NoError(t, err)
		ctx, cancel := context.WithCancel(context.Background())
		last, giveUp := context.WithCancel(context.Background())
		w.stop, w.giveUp = cancel, giveUp
		w.begin = sync.OnceFunc(func() {
			go func() { w.ended <- w.client.Run(ctx, last) }()
		})
		defer func() { // also when f fails
			cancel()
			giveUp()
			w.begin()
			for _, s := range w.grpc {
				s.Stop()
			}
			require.NoError(t, <-w.ended)
		}()
		f(w)
	})
}

func (w *world) now() time.Duration { return time.Since(w.began) }

func (w *world) dial(ctx context.Context, name string) (net.Conn, error) {
	w.mu.Lock()
	w.dialled = append(w.dialled, name)
	l, listens := w.servers[name]
	delay := w.delay
	w.mu.Unlock()
	if delay > 0 {
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(delay):
		}
	}
	switch {
	case !listens:
		return nil, fmt.Errorf("connection to %s refused", name)
	case l == nil:
		<-ctx.Done()
		return nil, ctx.Err()
	}
	return l.DialContext(ctx)
}

// dials returns the allocators that were dialled since the previous call.
func (w *world) dials() string {
	w.begin()
	synctest.Wait()
	w.mu.Lock()
	defer w.mu.Unlock()
	dialled := strings.Join(w.dialled, " ")
	w.dialled = nil
	return dialled
}

// serve starts an allocator. handle handles its streams; if it is nil, the test does.
func (w *world) serve(name string, handle func(*peer) error) {
	l := bufconn.Listen(1 << 16)
	s := grpc.NewServer()
	controlv1.RegisterControlServer(s, &scripted{w: w, name: name, handle: handle})
	w.grpc = append(w.grpc, s)
	w.mu.Lock()
	w.servers[name] = l
	w.mu.Unlock()
	go func() { _ = s.Serve(l) }()
}

// refuse makes an address refuse connections.
func (w *world) refuse(name string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.servers, name)
}

// blackHole makes connection attempts to an address hang.
func (w *world) blackHole(name string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.servers[name] = nil
}

// slow delays every connection.
func (w *world) slow(delay time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.delay = delay
}

// names returns a handler that answers NotLeader with the address of another allocator.
func names(leader string) func(*peer) error {
	if leader != "" {
		leader = address(leader)
	}
	return func(p *peer) error {
		return p.Send(&controlv1.AllocatorMessage{Message: &controlv1.AllocatorMessage_NotLeader{
			NotLeader: &controlv1.NotLeader{LeaderAddress: leader},
		}})
	}
}

type scripted struct {
	controlv1.UnimplementedControlServer
	w      *world
	name   string
	handle func(*peer) error
}

// peer is the allocator's end of one stream.
type peer struct {
	grpc.BidiStreamingServer[controlv1.RouterMessage, controlv1.AllocatorMessage]
	w    *world
	name string
	end  chan error // ends the stream
	term uint64
	// journal and position are set in every message.
	journal  string
	position uint64

	reports []*controlv1.Report // that next has skipped
}

func (s *scripted) Session(stream grpc.BidiStreamingServer[controlv1.RouterMessage, controlv1.AllocatorMessage]) error {
	p := &peer{BidiStreamingServer: stream, w: s.w, name: s.name, end: make(chan error, 1), term: 1}
	if s.handle != nil {
		return s.handle(p)
	}
	return s.w.play(p)
}

// play passes a stream to the test.
func (w *world) play(p *peer) error {
	w.streams <- p
	select {
	case err := <-p.end:
		return err
	case <-p.Context().Done():
		return nil
	}
}

// accept waits for the client to open a stream and send Join and Ping on it.
func (w *world) accept() (p *peer, join *controlv1.Join, nonce uint64) {
	w.t.Helper()
	w.begin()
	p = <-w.streams
	m, err := p.Recv()
	require.NoError(w.t, err)
	require.NotNil(w.t, m.GetJoin(), "the first message must be Join")
	ping, err := p.Recv()
	require.NoError(w.t, err)
	require.NotNil(w.t, ping.GetPing(), "freshness must be asked for at once")
	return p, m.GetJoin(), ping.GetPing().GetNonce()
}

// joined accepts a stream, sends a snapshot and grants freshness.
func (w *world) joined(routes ...*controlv1.Route) *peer {
	w.t.Helper()
	p, _, nonce := w.accept()
	p.snapshot(routes...)
	require.EqualValues(w.t, 1, p.ack())
	p.pong(nonce)
	synctest.Wait()
	return p
}

func (p *peer) send(sequence uint64, m *controlv1.AllocatorMessage) {
	p.w.t.Helper()
	m.Sequence = sequence
	if m.Term == 0 {
		m.Term = p.term
	}
	m.Journal, m.Position = p.journal, p.position
	require.NoError(p.w.t, p.Send(m))
}

func (p *peer) snapshot(routes ...*controlv1.Route) {
	p.w.t.Helper()
	p.send(1, snapshot(true, routes...))
}

func (p *peer) pong(nonce uint64) {
	p.w.t.Helper()
	p.send(0, &controlv1.AllocatorMessage{Message: &controlv1.AllocatorMessage_Pong{Pong: &controlv1.Pong{Nonce: nonce}}})
}

// next is the next message that is neither a Ping nor a Report.
func (p *peer) next() *controlv1.RouterMessage {
	p.w.t.Helper()
	for {
		m := p.any()
		if m.GetReport() == nil {
			return m
		}
		p.reports = append(p.reports, m.GetReport())
	}
}

// report is the next Report.
func (p *peer) report() *controlv1.Report {
	p.w.t.Helper()
	if len(p.reports) > 0 {
		r := p.reports[0]
		p.reports = p.reports[1:]
		return r
	}
	for {
		if r := p.any().GetReport(); r != nil {
			return r
		}
	}
}

// any is the next message that is not a Ping.
func (p *peer) any() *controlv1.RouterMessage {
	p.w.t.Helper()
	for {
		m, err := p.Recv()
		require.NoError(p.w.t, err)
		if m.GetPing() == nil {
			return m
		}
	}
}

// ping is the nonce of the next Ping.
func (p *peer) ping() uint64 {
	p.w.t.Helper()
	for {
		m, err := p.Recv()
		require.NoError(p.w.t, err)
		if m.GetPing() != nil {
			return m.GetPing().GetNonce()
		}
	}
}

// ack is the sequence of the next message, which is an Ack.
func (p *peer) ack() uint64 {
	p.w.t.Helper()
	m := p.next()
	require.NotNil(p.w.t, m.GetAck(), "got %v", m)
	return m.GetAck().GetSequence()
}

// acks reads acknowledgements up to last. One acknowledgement may cover several messages.
func (p *peer) acks(last uint64) {
	p.w.t.Helper()
	for acked := uint64(0); acked < last; {
		acked = p.ack()
		require.LessOrEqual(p.w.t, acked, last)
	}
}

func snapshot(last bool, routes ...*controlv1.Route) *controlv1.AllocatorMessage {
	return &controlv1.AllocatorMessage{Message: &controlv1.AllocatorMessage_Snapshot{Snapshot: &controlv1.Snapshot{Routes: routes, Last: last}}}
}

func route(id, ip string) *controlv1.Route {
	return &controlv1.Route{SandboxId: id, PodIp: ip, DefaultPort: 8080}
}

func push(r *controlv1.Route) *controlv1.AllocatorMessage {
	return &controlv1.AllocatorMessage{Message: &controlv1.AllocatorMessage_Route{Route: r}}
}

func release(ids ...string) *controlv1.AllocatorMessage {
	return &controlv1.AllocatorMessage{Message: &controlv1.AllocatorMessage_Release{Release: &controlv1.Release{SandboxIds: ids}}}
}

// ids returns the sandbox IDs of the routes in the cache.
func (w *world) ids() []string {
	synctest.Wait()
	all := []string{}
	for _, e := range w.cache.Dump() {
		all = append(all, e.ID)
	}
	slices.Sort(all)
	return all
}
