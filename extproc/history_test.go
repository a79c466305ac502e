package extproc

import (
	"context"
	"errors"
	"net/netip"
	"time"

	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/sandboxid"
	"github.com/berth-sandbox/berth/envoy"
	"github.com/berth-sandbox/berth/extproc/admission"
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
	tried  []tried
	full   time.Time // until then Envoy's list has no room, for wait
	wait   time.Duration
	keys   TeamKeys
	*admission.Sandboxes
}

// tried has the arguments of one Admit.
type tried struct {
	to    netip.AddrPort
	http2 bool
}

// unheld is a holder that holds no request.
func unheld(sandboxid.Key, time.Duration) (func(), bool) { return nil, false }

// Find finds nothing, so that every decision looks up.
func (h *history) Find(sandboxid.Key) (routecache.Route, bool) {
	return routecache.Route{}, false
}

// Known knows everything.
func (h *history) Known(sandboxid.Key) bool { return true }

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

func (h *history) Wake(ctx context.Context, id sandboxid.Key) (routecache.Answer, error) {
	h.events = append(h.events, "wake "+id.String())
	return h.answer(ctx, id.String())
}

func (h *history) Admit(id sandboxid.Key, route routecache.Route, port uint16, http2 bool) (admission.Admission, admission.Why, time.Duration) {
	h.events = append(h.events, "admit "+id.String())
	h.tried = append(h.tried, tried{netip.AddrPortFrom(route.Addr, port), http2})
	switch {
	case time.Now().Before(h.full) && h.wait > 0:
		return admission.Admission{}, admission.Again, h.wait
	case time.Now().Before(h.full):
		return admission.Admission{}, admission.TooManyPorts, 0
	case h.holds != nil && !h.holds():
		return admission.Admission{}, admission.Again, 0
	}
	return expecting{h.Sandboxes}.Admit(id, route, port, http2)
}

// unread counts the uses that have begun and not ended.
func (h *history) unread() int {
	n := 0
	for _, s := range h.Uses().Dump() {
		n += s.Unread
	}
	return n
}

// expecting takes every route for that of its sandbox.
type expecting struct{ *admission.Sandboxes }

func (e expecting) Admit(id sandboxid.Key, route routecache.Route, port uint16, http2 bool) (admission.Admission, admission.Why, time.Duration) {
	e.Put(id.String(), route)
	return e.Sandboxes.Admit(id, route, port, http2)
}

// newSandboxes returns sandboxes whose routes stay fresh, and that do not look.
func newSandboxes() *admission.Sandboxes {
	started := time.Now()
	sandboxes, err := admission.New(admission.Options{
		Routes: routecache.Options{Now: func() time.Duration { return 0 }, Ask: func(string, bool) bool { return false }},
		Uses: lastactive.Options{
			ConnectWindow: envoy.ConnectWindow, Now: func() time.Duration { return time.Hour + time.Since(started) },
			Look: func(context.Context) (look.Look, error) { return look.Look{}, errors.New("there is no Envoy") },
		},
	})
	if err != nil {
		panic(err)
	}
	sandboxes.SetFreshUntil(time.Hour)
	return sandboxes
}

func always(a routecache.Answer, err error) *history {
	return &history{answer: func(context.Context, string) (routecache.Answer, error) { return a, err }}
}

func (h *history) decider() *decider {
	h.Sandboxes = newSandboxes()
	return &decider{
		o: Options{
			Hosts: Hosts{Domain: domain}, PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.1.0.0/16"), netip.MustParsePrefix("fd00::/8")},
			LookupTimeout: time.Second, Routes: h, Sandboxes: h, TeamKeys: &h.keys,
		},
		full: func() bool { return false }, limited: func(string, apierror.Reason) {},
		park: func(sandboxid.Key) (func(), bool) { return func() {}, true }, verdictWait: func(time.Duration) {}, wakeWait: func(time.Duration) {},
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
