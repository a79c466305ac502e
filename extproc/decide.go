package extproc

import (
	"cmp"
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
	"github.com/berth-sandbox/berth/extproc/admission"
	"github.com/berth-sandbox/berth/internal/wait"
	"github.com/berth-sandbox/berth/routecache"
)

// Routes knows where sandboxes are. The view of *admission.Sandboxes implements it.
type Routes interface {
	// Find returns the route of id if it is known, without waiting. It may be stale.
	Find(id sandboxid.Key) (route routecache.Route, ok bool)
	// Known reports whether Lookup would return without waiting, and the answer needs no wait either.
	Known(id sandboxid.Key) bool
	Lookup(ctx context.Context, id sandboxid.Key) (routecache.Answer, error)
	// Wake is a Lookup for a request that waits for a sandbox that is asleep, and has it woken.
	Wake(ctx context.Context, id sandboxid.Key) (routecache.Answer, error)
	// Await waits until a Lookup of id may return another status than answered.
	Await(ctx context.Context, id sandboxid.Key, answered routecache.Status) error
	// AwaitJoined waits until the allocator can be asked and routes may be served.
	AwaitJoined(ctx context.Context) error
}

// Sandboxes admits requests. *admission.Sandboxes implements it.
type Sandboxes interface {
	// Admit admits a request if route is still that of id. Otherwise it has done nothing, and why says what to do.
	Admit(id sandboxid.Key, route routecache.Route, port uint16, http2 bool) (a admission.Admission, why admission.Why, pause time.Duration)
	// Unread is the number of answers that Envoy may not have read yet.
	Unread() int
}

// decision is what becomes of a request that is not refused. The zero value: that is not decided yet.
type decision struct {
	id sandboxid.Key
	// dst is valid if the request is admitted.
	dst netip.AddrPort
	// path and host replace those of the request. Empty: they stay. asked is the host
	// of the request, if host is set.
	path, host, asked string
	// tls: Envoy speaks TLS to the pod.
	tls bool
	// held: the request has waited for a sandbox that started or woke, and wakeWait is how long for one that was asleep,
	// also if the request is refused.
	held      bool
	wakeWait  time.Duration
	admission admission.Admission
	// redirect, if set, is the answer to the client. No other field is set then.
	redirect *redirect
	// preflight: the router answers a CORS preflight. No other field is set then.
	preflight bool
}

// made reports whether the request is admitted or redirected.
func (d *decision) made() bool { return d.redirect != nil || d.dst.IsValid() }

type decider struct {
	o Options
	// park reports whether one more request for a sandbox may wait, and counts it until release is called.
	park func(id sandboxid.Key) (release func(), ok bool)
	// full reports whether requests that wait have all the memory that they may have.
	full func() bool
	// limited counts a request that a limit of its sandbox has refused, for the pool of the sandbox.
	limited func(pool string, reason apierror.Reason)
	// verdictWait receives how long a request has waited for a verdict, and wakeWait for a wake.
	verdictWait, wakeWait func(time.Duration)
}

const (
	// MaxWait bounds how long a request waits in the router in all, for lookups, for a leader and for
	// verdicts. A request that is held for a sandbox that starts or wakes gets that time in addition:
	// Envoy is asked for it, and MaxWait then starts again.
	MaxWait = envoy.MessageTimeout - waitMargin
	// waitMargin is the part of Envoy's timeout that Envoy and the router need themselves.
	waitMargin = time.Second
	// joinPause precedes each repeated lookup. A question may fail although there is a stream: the stream is
	// about to end, or its queue is full.
	joinPause = 10 * time.Millisecond
	// maxVerdictWait bounds the part of MaxWait that is spent on waiting for verdicts.
	maxVerdictWait = 2 * time.Second
	// maxWakeWait bounds how long a request is held for a sandbox that is asleep.
	maxWakeWait = envoy.MaxHold
)

// This does not compile unless the wait for a verdict leaves a second for a lookup.
const _ = uint(MaxWait - maxVerdictWait - time.Second)

// holder asks Envoy for more time and reports whether a request for a sandbox may be held that long. The
// request is counted as held until release is called.
type holder func(id sandboxid.Key, limit time.Duration) (release func(), ok bool)

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

// hit decides about a request whose route is known and which is admitted. It does not wait, and returns false for
// every other request: decide decides then.
func (d *decider) hit(r *request) (decision, bool) {
	target, refusal := d.target(r)
	if refusal != nil {
		return decision{}, false
	}
	route, found := d.o.Routes.Find(target.ID)
	if !found || r.isPreflight() && preflightAt(target, route) {
		return decision{}, false
	}
	to, _, refusal := d.try(r, target, &route)
	return to, refusal == nil && to.dst.IsValid()
}

// decide decides about the request or returns why it is refused. Exactly one result is set, but for
// decision.wakeWait. It calls hold at most once, before the request waits for a sandbox that starts or wakes.
func (d *decider) decide(ctx context.Context, r *request, hold holder) (to decision, refusal *apierror.Error) {
	target, refusal := d.target(r)
	if d.answersPreflight(r, target) {
		return decision{preflight: true}, nil
	}
	if refusal != nil {
		return decision{}, refusal
	}
	if d.full() && !d.o.Routes.Known(target.ID) {
		return decision{}, target.refuse(apierror.RouterNotReady, "too many requests wait at this gateway; try again")
	}
	deadline := time.Now().Add(MaxWait)
	verdictWait := maxVerdictWait // what is left of it
	var held context.Context      // set once the request is held for a sandbox that starts or wakes
	wakes := false                // set once the request may reach a sandbox that is asleep, and waits for it
	for {
		answer, err := d.lookup(ctx, target.ID, wakes, deadline)
		if errors.Is(err, routecache.ErrNotFresh) || errors.Is(err, routecache.ErrDisconnected) {
			// There is no leader, or this router has not found it yet, while a claim may have been answered.
			if d.awaitJoined(ctx, target.ID, held != nil, deadline) {
				continue
			}
		}
		if err != nil {
			return decision{}, target.refuse(apierror.RouterNotReady,
				"the router does not know at the moment where this sandbox is; try again")
		}
		switch answer.Status {
		case routecache.Gone:
			return decision{}, target.refuse(apierror.SandboxGone, gone(answer.End))
		case routecache.Unknown:
			return decision{}, target.noSuchSandbox()
		case routecache.Starting, routecache.Asleep:
			asleep := answer.Status == routecache.Asleep
			if asleep {
				if to, refusal := d.mayWake(r, target, &answer); refusal != nil || to.redirect != nil || to.preflight {
					return to, refusal
				}
				answer.Hold = maxWakeWait
			}
			if held == nil {
				release, ok := hold(target.ID, answer.Hold)
				if !ok {
					return decision{}, target.startsOrWakes(asleep, "")
				}
				defer release()
				var cancel context.CancelFunc
				held, cancel = context.WithTimeout(ctx, answer.Hold)
				defer cancel()
				deadline = time.Now().Add(answer.Hold + MaxWait)
			}
			if asleep && !wakes {
				wakes = true
				defer func(began time.Time) {
					to.wakeWait = time.Since(began)
					d.wakeWait(to.wakeWait)
				}(time.Now())
				continue
			}
			if d.o.Routes.Await(held, target.ID, answer.Status) != nil {
				return decision{}, target.startsOrWakes(asleep, "still ")
			}
		case routecache.Quiesced:
			began := time.Now()
			if !d.awaitVerdict(ctx, target.ID, held != nil, min(verdictWait, time.Until(deadline))) {
				return decision{}, target.refuse(apierror.SandboxQuiesced, "Berth is checking whether this sandbox is idle; try again")
			}
			verdictWait -= time.Since(began)
		case routecache.Routable:
			to, pause, refusal := d.try(r, target, &answer.Route)
			if refusal != nil && (refusal.Reason == apierror.RateLimited || refusal.Reason == apierror.TooManyOpen) {
				d.limited(answer.Route.Pool, refusal.Reason)
			}
			if refusal != nil || to.made() {
				to.held = refusal == nil && held != nil
				return to, refusal
			}
			// The route was released, replaced or evicted since the lookup, or the request must wait for a
			// port: look it up again.
			if pause > 0 && (pause >= time.Until(deadline) || d.full() || !wait.Sleep(ctx, pause)) {
				return decision{}, target.tooManyPorts()
			}
		}
	}
}

func (t Target) noSuchSandbox() *apierror.Error {
	return t.refuse(apierror.SandboxNotFound, "there is no such sandbox")
}

// startsOrWakes refuses a request that may not wait for a sandbox, or not longer.
func (t Target) startsOrWakes(asleep bool, still string) *apierror.Error {
	if !asleep {
		return t.refuse(apierror.SandboxStarting, "this sandbox is "+still+"starting; try again")
	}
	return t.tryWake("this sandbox is " + still + "waking; try again")
}

// tryWake refuses a request that may wake a sandbox later.
func (t Target) tryWake(message string) *apierror.Error {
	refusal := t.refuse(apierror.SandboxAsleep, message)
	refusal.RetryAfter = 1
	return refusal
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

func (d *decider) lookup(ctx context.Context, id sandboxid.Key, wake bool, deadline time.Time) (routecache.Answer, error) {
	ctx, cancel := context.WithTimeout(ctx, min(d.o.LookupTimeout, time.Until(deadline)))
	defer cancel()
	if wake {
		return d.o.Routes.Wake(ctx, id)
	}
	return d.o.Routes.Lookup(ctx, id)
}

// check decides whether a request may reach the sandbox at a route, and returns a redirect or a refusal if not. It
// notes the port in target, because refusals depend on it.
func (d *decider) check(r *request, target *Target, route *routecache.Route) (*redirect, *apierror.Error) {
	target.Port = cmp.Or(target.Port, route.DefaultPort)
	if target.Port == 0 {
		return nil, target.refuse(apierror.NoRoute, "this sandbox's default port is not known; name the port")
	}
	// Access comes first, so that a client without it learns nothing of the sandbox.
	if redirect, refusal := d.access(r, *target, target.Port, route.Terms); refusal != nil || redirect != nil {
		return redirect, refusal
	}
	if !route.Ports.Allows(target.Port) {
		refusal := target.refuse(apierror.PortPrivate, portPrivate(target.Port, route.Ports))
		refusal.Links = d.o.Hosts.links(r, target.ID, *route)
		return nil, refusal
	}
	if !slices.ContainsFunc(d.o.PodCIDRs, func(p netip.Prefix) bool { return p.Contains(route.Addr) }) {
		return nil, target.refuse(apierror.NoRoute,
			"the sandbox's address is outside the configured pod address ranges; tell the operator")
	}
	return nil, nil
}

// mayWake decides about a request to a sandbox that is asleep. If no field of the decision is set, and the request is not
// refused, the request may wake the sandbox.
func (d *decider) mayWake(r *request, target Target, asleep *routecache.Answer) (decision, *apierror.Error) {
	route := &asleep.Route
	if r.isPreflight() && preflightAt(target, *route) {
		return decision{preflight: true}, nil
	}
	if redirect, refusal := d.check(r, &target, route); refusal != nil || redirect != nil {
		return decision{redirect: redirect}, refusal
	}
	path, _ := r.pathAt(target)
	isHealth := route.Terms != nil && route.Terms.AgentPort == target.Port && path == pathHealth
	switch {
	case !asleep.Wakeable || isHealth: // programs ask for the health to learn whether the sandbox runs
		return decision{}, target.refuse(apierror.SandboxAsleep,
			"this sandbox is asleep, and this request does not wake it; resume it with a call, as POST /sandboxes/"+target.ID.String()+"/connect")
	case asleep.Busy:
		return decision{}, target.tryWake("this sandbox is asleep, and too many sandboxes are waking; try again")
	}
	return decision{}, nil
}

// try decides about a request to the sandbox at a route, or returns why it is refused. If neither is possible, the
// caller must look the route up again after pause.
func (d *decider) try(r *request, target Target, route *routecache.Route) (to decision, pause time.Duration, refusal *apierror.Error) {
	if redirect, refusal := d.check(r, &target, route); refusal != nil || redirect != nil {
		return decision{redirect: redirect}, 0, refusal
	}
	port := target.Port
	admitted, why, pause := d.o.Sandboxes.Admit(target.ID, *route, port, isGRPC(r.contentType))
	switch why {
	case admission.Admitted:
	case admission.TooManyPorts:
		return to, 0, target.tooManyPorts()
	case admission.TooFast:
		refusal = target.refuse(apierror.RateLimited, "this sandbox gets more requests per second than this gateway lets pass for one sandbox; try again")
		refusal.RetryAfter = int((pause + time.Second - 1) / time.Second)
		return to, 0, refusal
	case admission.TooManyOpen:
		return to, 0, target.refuse(apierror.TooManyOpen, "this sandbox has as many requests open as one sandbox may have at this gateway; try again")
	case admission.Again:
		return to, pause, nil
	}
	to = decision{
		id: target.ID, dst: netip.AddrPortFrom(route.Addr, port), path: target.Path, tls: overTLS(route.Terms, port), admission: admitted,
	}
	if to.host = maskedHost(route.Terms, port); to.host != "" {
		to.asked = string(r.authority)
	}
	return to, 0, nil
}

// room takes a place for a request that waits. One that is held has its place already.
func (d *decider) room(id sandboxid.Key, held bool) (release func(), ok bool) {
	if held {
		return func() {}, true
	}
	return d.park(id)
}

// awaitJoined returns true when a lookup that has failed may be repeated, and false if that is not so before
// deadline, or if there is no room to wait for it.
func (d *decider) awaitJoined(ctx context.Context, id sandboxid.Key, held bool, deadline time.Time) bool {
	release, ok := d.room(id, held)
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
	release, ok := d.room(id, held)
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
