package lastactive

import (
	"cmp"
	"context"
	"errors"
	"github.com/berth-sandbox/berth/api/sandboxid"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/lastactive/look"
	"github.com/berth-sandbox/berth/lastactive/sockets"
)

const window = 5 * time.Second

// world is a tracker that looks at a scripted Envoy, in a bubble of testing/synctest.
type world struct {
	*testing.T
	tracker *Tracker
	options Options

	mu      sync.Mutex
	open    map[look.Host]int
	entries int // in Envoy's list beside one of each host
	envoy   string
	ended   bool
	err     error
	took    time.Duration // a look; it shows what is open when half of it is over
	began   []time.Duration
	sockets []sockets.Socket
	blocked error // of sockets
	read    int   // sockets
}

// inWorld runs a test whose tracker looks.
func inWorld(t *testing.T, test func(*world)) {
	t.Helper()
	inWorldWith(t, func(*Options) {}, test)
}

func inWorldWith(t *testing.T, change func(*Options), test func(*world)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, change)
		ctx, cancel := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() { w.tracker.Run(ctx) })
		defer running.Wait()
		defer cancel()
		w.passes(10 * time.Millisecond) // the first look
		test(w)
	})
}

func newWorld(t *testing.T, change func(*Options)) *world {
	w := &world{T: t, open: map[look.Host]int{}, envoy: "envoy-1", took: 2 * time.Millisecond}
	started := time.Now()
	w.options = Options{
		Now: func() time.Duration { return time.Hour + time.Since(started) }, Look: w.look, ConnectWindow: window,
		Sockets: func() ([]sockets.Socket, error) {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.read++
			return slices.Clone(w.sockets), w.blocked
		},
	}
	change(&w.options)
	var err error
	w.tracker, err = New(w.options)
	require.NoError(t, err)
	return w
}

func (w *world) look(ctx context.Context) (look.Look, error) {
	w.mu.Lock()
	half := w.took / 2
	w.began = append(w.began, w.options.Now())
	w.mu.Unlock()
	time.Sleep(half)
	w.mu.Lock()
	l, err := look.Look{Gateway: w.envoy, Hosts: map[look.Host]int{}}, w.err
	for at, h := range w.open {
		l.Hosts[at] = h
	}
	l.Entries = len(l.Hosts) + w.entries
	if w.ended {
		l.Hosts, l.Entries = nil, 0
	}
	w.mu.Unlock()
	time.Sleep(half)
	return l, cmp.Or(err, ctx.Err())
}

// passes lets time pass.
func (w *world) passes(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

// change changes the world beside looks.
func (w *world) change(f func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	f()
}

func (w *world) opens(to string, n int) {
	w.change(func() { w.open[host(to)] = n })
}

func (w *world) looks() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.began)
}

// lookBegan is when the look began before which there were so many.
func (w *world) lookBegan(before int) time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.began[before]
}

func (w *world) begin(id, to string) *Entry {
	w.Helper()
	w.tracker.Expect(id, addr(to), 0)
	e, _ := w.tracker.Begin(key(id), netip.MustParseAddrPort(to), false)
	require.NotNil(w, e)
	return e
}

// use is what the tracker remembers of a sandbox; nil: nothing.
func (w *world) use(id string) *Activity {
	for _, a := range w.tracker.Dump() {
		if a.ID == id {
			return &a
		}
	}
	return nil
}

func (w *world) age(id string) time.Duration {
	w.Helper()
	a := w.use(id)
	require.NotNil(w, a)
	return a.Age
}

func (w *world) ask(ids ...string) ([]Activity, error) {
	ctx, cancel := context.WithTimeout(w.Context(), 10*time.Second)
	defer cancel()
	return w.tracker.Ask(ctx, ids)
}

var errStopped = errors.New("no answer from Envoy in time")

const (
	podA = "10.0.0.1:8080"
	podB = "10.0.0.2:8080"
)

func host(at string) look.Host { return look.Host{AddrPort: netip.MustParseAddrPort(at)} }

func addr(pod string) netip.Addr { return netip.MustParseAddrPort(pod).Addr() }

var key = sandboxid.MustKey
