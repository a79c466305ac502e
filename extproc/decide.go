package extproc

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"slices"
	"time"

	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/sandboxid"
	"github.com/berth-sandbox/berth/envoy"
	"github.com/berth-sandbox/berth/internal/wait"
	"github.com/berth-sandbox/berth/lastactive"
	"github.com/berth-sandbox/berth/routecache"
)

// Routes knows where sandboxes are. *routecache.Cache implements it.
type Routes interface {
	// Find returns the route of id if it is known, without waiting. It may be stale.
	Find(id sandboxid.Key) (route routecache.Route, ok bool)
	Lookup(ctx context.Context, id sandboxid.Key) (routecache.Answer, error)
	// Await waits until a Lookup of id may return another status than answered.
	Await(ctx context.Context, id sandboxid.Key, answered routecache.Status) error
	// AwaitJoined waits until the allocator can be asked and routes may be served.
	AwaitJoined(ctx context.Context) error
	// Holds reports whether r is still the route of id, and may be served now.
	Holds(id sandboxid.Key, r routecache.Route) bool
}

// Activity records how sandboxes are used. *lastactive.Tracker implements it.
type Activity interface {
	// Begin records that a request for id to this address is about to be admitted. The
	// caller ends it with Read when Envoy has read the answer, or with Cancel if no answer
	// is sent. If the sandbox has no such route, or Envoy's list of open requests would become
	// too long for it, Begin returns nil. The route may be looked up again after wait; if wait
	// is 0, the request must be refused.
	Begin(id sandboxid.Key, to netip.AddrPort, http2 bool) (use *lastactive.Entry, wait time.Duration)
}

// admission is a decision to let a request through, or to answer it with a redirect. The zero value is
// neither.
type admission struct {
	id  sandboxid.Key
	dst netip.AddrPort
	// path and host replace those of the request. Empty: they stay. asked is the host
	// of the request, if host is set.
	path, host, asked string
	// tls: Envoy speaks TLS to the pod.
	tls   bool
	epoch *Epoch
	use   *lastactive.Entry
	// redirect, if set, is the answer to the client. No other field is set then.
	redirect *redirect
}

type decider struct {
	o Options
	// park reports whether one more request may wait, and counts it until release is called.
	park func() (release func(), ok bool)
	// full reports whether requests that wait have all the memory that they may have.
	full func() bool
	// verdictWait receives how long a request has waited for a verdict.
	verdictWait func(time.Duration)
}

const (
	// MaxWait bounds how long a request waits in the router in all, for lookups, for a leader and for
	// verdicts. A request that is held for a starting sandbox gets that time in addition:
	// Envoy is asked for it, and MaxWait then starts again.
	MaxWait = envoy.MessageTimeout - waitMargin
	// waitMargin is the part of Envoy's timeout that Envoy and the router need themselves.
	waitMargin = time.Second
	// joinPause precedes each repeated lookup. A question may fail although there is a stream: the stream is
	// about to end, or its queue is full.
	joinPause = 10 * time.Millisecond
	// maxVerdictWait bounds the part of MaxWait that is spent on waiting for verdicts.
	maxVerdictWait = 2 * time.Second
)

// This does not compile unless the wait for a verdict leaves a second for a lookup.
const _ = uint(MaxWait - maxVerdictWait - time.Second)

// holder asks Envoy for more time and reports whether a request may be held that long. The
// request is counted as held until release is called.
type holder func(time.Duration) (release func(), ok bool)

// target returns the sandbox that the request is for, or why it is refused.
func (d *decider) target(r *request) (Target, *apierror.Error) {
	if string(r.method) == http.MethodConnect {
		return Target{}, apierror.New(apierror.MethodRefused,
			"CONNECT is not supported; connect to the sandbox's host name directly")
	}
	target, refusal := d.o.Hosts.target(r)
	if refusal == nil && target.foreign != "" {
		refusal = target.noSuchSandbox()
	}
	return target, refusal
}

// admitAtOnce admits a request whose route is known. It does not wait, and returns false if it has not
// admitted the request: decide decides then.
func (d *decider) admitAtOnce(r *request) (admission, bool) {
	target, refusal := d.target(r)
	if refusal != nil {
		return admission{}, false
	}
	route, found := d.o.Routes.Find(target.ID)
	if !found {
		return admission{}, false
	}
	a, _, refusal := d.admit(r, target, &route)
	return a, refusal == nil && a.use != nil
}

// decide admits the request or returns why it is refused. Exactly one result is set. It calls
// hold at most once, before the request waits for a starting sandbox.
func (d *decider) decide(ctx context.Context, r *request, hold holder) (admission, *apierror.Error) {
	target, refusal := d.target(r)
	if refusal != nil {
		return admission{}, refusal
	}
	if d.full() {
		return admission{}, target.refuse(apierror.RouterNotReady, "too many requests wait at this gateway; try again")
	}
	deadline := time.Now().Add(MaxWait)
	verdictWait := maxVerdictWait // what is left of it
	var held context.Context      // set once the request is held for a starting sandbox
	for {
		answer, err := d.lookup(ctx, target.ID, deadline)
		if errors.Is(err, routecache.ErrNotFresh) || errors.Is(err, routecache.ErrDisconnected) {
			// There is no leader, or this router has not found it yet, while a claim may have been answered.
			if d.awaitJoined(ctx, held != nil, deadline) {
				continue
			}
		}
		if err != nil {
			return admission{}, target.refuse(apierror.RouterNotReady,
				"the router does not know at the moment where this sandbox is; try again")
		}
		switch answer.Status {
		case routecache.Gone:
			return admission{}, target.refuse(apierror.SandboxGone, gone(answer.End))
		case routecache.Unknown:
			return admission{}, target.noSuchSandbox()
		case routecache.Starting:
			if held == nil {
				release, ok := hold(answer.Hold)
				if !ok {
					return admission{}, target.refuse(apierror.SandboxStarting, "this sandbox is starting; try again")
				}
				defer release()
				var cancel context.CancelFunc
				held, cancel = context.WithTimeout(ctx, answer.Hold)
				defer cancel()
				deadline = time.Now().Add(answer.Hold + MaxWait)
			}
			if d.o.Routes.Await(held, target.ID, answer.Status) != nil {
				return admission{}, target.refuse(apierror.SandboxStarting, "this sandbox is still starting; try again")
			}
		case routecache.Quiesced:
			began := time.Now()
			if !d.awaitVerdict(ctx, target.ID, held != nil, min(verdictWait, time.Until(deadline))) {
				return admission{}, target.refuse(apierror.SandboxQuiesced, "Berth is checking whether this sandbox is idle; try again")
			}
			verdictWait -= time.Since(began)
		case routecache.Routable:
			a, retryAfter, refusal := d.admit(r, target, &answer.Route)
			if refusal != nil || a.use != nil || a.redirect != nil {
				return a, refusal
			}
			// The route was released, replaced or evicted since the lookup, or the request must wait for a
			// port: look it up again.
			if retryAfter > 0 && (retryAfter >= time.Until(deadline) || !wait.Sleep(ctx, retryAfter)) {
				return admission{}, target.tooManyPorts()
			}
		}
	}
}

func (t Target) noSuchSandbox() *apierror.Error {
	return t.refuse(apierror.SandboxNotFound, "there is no such sandbox")
}

func (t Target) tooManyPorts() *apierror.Error {
	return t.refuse(apierror.TooManyPorts,
		"too many ports of this sandbox are in use, or were requested at the same time; try again")
}

// gone says that a sandbox has ended, and when and why, as far as a client with its ID may know.
func gone(end routecache.End) string {
	if end.Reason == "" {
		return "this sandbox has been released"
	}
	return fmt.Sprintf("this sandbox was released at %s: %s", time.Unix(end.AtUnix, 0).UTC().Format(time.RFC3339), end.Reason)
}

func (d *decider) lookup(ctx context.Context, id sandboxid.Key, deadline time.Time) (routecache.Answer, error) {
	ctx, cancel := context.WithTimeout(ctx, min(d.o.LookupTimeout, time.Until(deadline)))
	defer cancel()
	return d.o.Routes.Lookup(ctx, id)
}

// admit admits a request to the sandbox at a route, or returns why it is refused. It returns neither if
// the caller must look the route up again, after retryAfter.
func (d *decider) admit(
	r *request, target Target, route *routecache.Route,
) (a admission, retryAfter time.Duration, refusal *apierror.Error) {
	port := target.Port
	if port == 0 {
		port = route.DefaultPort
	}
	if port == 0 {
		return a, 0, target.refuse(apierror.NoRoute, "this sandbox's default port is not known; name the port")
	}
	// Access comes first, so that a client without it learns nothing of the sandbox.
	redirect, refusal := d.access(r, target, port, route.Terms)
	if refusal != nil || redirect != nil {
		return admission{redirect: redirect}, 0, refusal
	}
	if !route.Ports.Allows(port) {
		refusal := target.refuse(apierror.PortPrivate, portPrivate(port, route.Ports))
		refusal.Links = d.o.Hosts.links(r, target.ID, *route)
		return a, 0, refusal
	}
	if !slices.ContainsFunc(d.o.PodCIDRs, func(p netip.Prefix) bool { return p.Contains(route.Addr) }) {
		return a, 0, target.refuse(apierror.NoRoute,
			"the sandbox's address is outside the configured pod address ranges; tell the operator")
	}
	dst := netip.AddrPortFrom(route.Addr, port)
	// Begin comes before Holds. So a leader that stops admissions and then asks for activity
	// learns of this request.
	use, retryAfter := d.o.Activity.Begin(target.ID, dst, isGRPC(r.contentType))
	if use == nil {
		if retryAfter <= 0 {
			refusal = target.tooManyPorts()
		}
		return a, retryAfter, refusal
	}
	epoch, ok := d.o.Admissions.Admit(func() bool { return d.o.Routes.Holds(target.ID, *route) })
	if !ok {
		use.Cancel()
		return a, 0, nil
	}
	a = admission{
		id: target.ID, dst: dst, path: target.Path, tls: overTLS(route.Terms, port), epoch: epoch, use: use,
	}
	if a.host = maskedHost(route.Terms, port); a.host != "" {
		a.asked = string(r.authority)
	}
	return a, 0, nil
}

// room takes a place for a request that waits. One that is held has its place already.
func (d *decider) room(held bool) (release func(), ok bool) {
	if held {
		return func() {}, true
	}
	return d.park()
}

// awaitJoined returns true when a lookup that has failed may be repeated, and false if that is not so before
// deadline, or if there is no room to wait for it.
func (d *decider) awaitJoined(ctx context.Context, held bool, deadline time.Time) bool {
	release, ok := d.room(held)
	if !ok {
		return false
	}
	defer release()
	ctx, cancel := context.WithDeadline(ctx, deadline)
	defer cancel()
	return wait.Sleep(ctx, joinPause) && d.o.Routes.AwaitJoined(ctx) == nil
}

// awaitVerdict returns true when id may be looked up again, and false if there is no verdict
// within limit or no room to wait for it.
func (d *decider) awaitVerdict(ctx context.Context, id sandboxid.Key, held bool, limit time.Duration) bool {
	release, ok := d.room(held)
	if !ok {
		return false
	}
	defer release()
	defer func(began time.Time) { d.verdictWait(time.Since(began)) }(time.Now())
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	return d.o.Routes.Await(ctx, id, routecache.Quiesced) == nil
}

// maxPortsNamed bounds the open ports that a refusal lists.
const maxPortsNamed = 8

// portPrivate is the message for a port that is not open. It lists the open ones.
func portPrivate(port uint16, open routecache.Ports) string {
	named, more := open.List(), ""
	if n := len(named) - maxPortsNamed; n > 0 {
		named, more = named[:maxPortsNamed], fmt.Sprintf(" and %d more", n)
	}
	return fmt.Sprintf("port %d of this sandbox is not open to the outside; its pool opens %v%s",
		port, routecache.NewPorts(named), more)
}
