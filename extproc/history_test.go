package extproc

import (
	"context"
	"errors"
	"net/netip"
	"time"

	"github.com/berth-sandbox/berth/api/sandboxid"
	"github.com/berth-sandbox/berth/envoy"
	"github.com/berth-sandbox/berth/lastactive"
	"github.com/berth-sandbox/berth/lastactive/look"
	"github.com/berth-sandbox/berth/routecache"
)

var podRoute = routecache.Route{Addr: netip.MustParseAddr("10.1.2.3"), DefaultPort: 8080}

// history records the calls of a decision in order.
type history struct {
	events []string
	answer func(ctx context.Context, id string) (routecache.Answer, error)
	holds  func() bool
	await  func(ctx context.Context) error
	joined func(ctx context.Context) error // nil: never
	began  []begun
	full   time.Time // until then Begin returns nil and wait
	wait   time.Duration
	keys   TeamKeys
	*lastactive.Tracker
}

// begun has the arguments of one Begin.
type begun struct {
	to    netip.AddrPort
	http2 bool
}

// unheld is a holder that holds no request.
func unheld(time.Duration) (func(), bool) { return nil, false }

// Find finds nothing, so that every decision looks up.
func (h *history) Find(sandboxid.Key) (routecache.Route, bool) {
	return routecache.Route{}, false
}

func (h *history) Await(ctx context.Context, id sandboxid.Key, _ routecache.Status) error {
	h.events = append(h.events, "await "+id.String())
	return h.await(ctx)
}

func (h *history) AwaitJoined(ctx context.Context) error {
	h.events = append(h.events, "await joined")
	if h.joined != nil {
		return h.joined(ctx)
	}
	<-ctx.Done()
	return context.Cause(ctx)
}

func (h *history) Lookup(ctx context.Context, id sandboxid.Key) (routecache.Answer, error) {
	h.events = append(h.events, "lookup "+id.String())
	return h.answer(ctx, id.String())
}

func (h *history) Holds(id sandboxid.Key, _ routecache.Route) bool {
	h.events = append(h.events, "holds "+id.String())
	return h.holds == nil || h.holds()
}

func (h *history) Begin(id sandboxid.Key, to netip.AddrPort, http2 bool) (*lastactive.Entry, time.Duration) {
	h.events = append(h.events, "begin "+id.String())
	h.began = append(h.began, begun{to, http2})
	if time.Now().Before(h.full) {
		return nil, h.wait
	}
	return expecting{h.Tracker}.Begin(id, to, http2)
}

// unread counts the uses that have begun and not ended.
func (h *history) unread() int {
	n := 0
	for _, s := range h.Dump() {
		n += s.Unread
	}
	return n
}

// expecting takes every request for one of a sandbox that has a route.
type expecting struct{ *lastactive.Tracker }

func (t expecting) Begin(id sandboxid.Key, to netip.AddrPort, http2 bool) (*lastactive.Entry, time.Duration) {
	t.Expect(id.String(), to.Addr(), 0)
	return t.Tracker.Begin(id, to, http2)
}

// newTracker returns a tracker that does not look.
func newTracker() *lastactive.Tracker {
	started := time.Now()
	tracker, err := lastactive.New(lastactive.Options{
		ConnectWindow: envoy.ConnectWindow, Now: func() time.Duration { return time.Hour + time.Since(started) },
		Look: func(context.Context) (look.Look, error) { return look.Look{}, errors.New("there is no Envoy") },
	})
	if err != nil {
		panic(err)
	}
	return tracker
}

func always(a routecache.Answer, err error) *history {
	return &history{answer: func(context.Context, string) (routecache.Answer, error) { return a, err }}
}

func (h *history) decider() *decider {
	h.Tracker = newTracker()
	return &decider{
		o: Options{
			Hosts: Hosts{Domain: domain}, PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.1.0.0/16"), netip.MustParsePrefix("fd00::/8")},
			LookupTimeout: time.Second, Routes: h, Activity: h, Admissions: NewAdmissions(), TeamKeys: &h.keys,
		},
		full: func() bool { return false },
		park: func() (func(), bool) { return func() {}, true }, verdictWait: func(time.Duration) {},
	}
}

func routeTo(addr string, defaultPort uint16) routecache.Answer {
	return routecache.Answer{Status: routecache.Routable, Route: routecache.Route{Addr: netip.MustParseAddr(addr), DefaultPort: defaultPort}}
}

// opening returns the answer with a route that opens only these ports.
func opening(a routecache.Answer, ports ...uint16) routecache.Answer {
	a.Route.Ports = routecache.NewPorts(ports)
	return a
}
