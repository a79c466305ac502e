package extproc

import (
	"context"
	"fmt"
	"net/http"
	"net/netip"
	"time"

	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/envoy"
	"github.com/berth-sandbox/berth/lastactive"
	"github.com/berth-sandbox/berth/routecache"
)

// Routes knows where sandboxes are.
type Routes interface {
	Lookup(ctx context.Context, id string) (routecache.Answer, error)
	// Await returns when something else may be known of a sandbox than what was
	// answered.
	Await(ctx context.Context, id string, answered routecache.Status) error
	// Holds reports whether that route is still the answer.
	Holds(id string, r routecache.Route) bool
}

// Activity remembers how sandboxes are used. *lastactive.Tracker is one.
type Activity interface {
	// Begin records that a request for id, which is at to, is about to be admitted. It
	// ends with Read when Envoy has read the answer, or with Cancel if there is none.
	// minBytes is the route's. If Envoy's list of what is open would become too long for
	// this sandbox, nothing begins: it may after wait, or, if that is 0, not soon.
	Begin(id string, to netip.AddrPort, http2 bool, minBytes uint64) (use *lastactive.Entry, wait time.Duration)
	// Forget drops a sandbox that does not exist or has been released.
	Forget(id string)
}

// admission is a decision to let a request through.
type admission struct {
	id  string
	dst netip.AddrPort
	// path replaces the request's path. Empty: it stays.
	path  string
	epoch *Epoch            // of the answer
	use   *lastactive.Entry // begun with it
}

type decider struct {
	hosts    Hosts
	podCIDRs []netip.Prefix
	wait     time.Duration
	routes   Routes
	activity Activity
	answers  *Answers
	// park reports whether a request may be kept waiting.
	park func() (release func(), ok bool)
	// verdict is told how long one request waited for a verdict.
	verdict func(time.Duration)
}

const (
	// AnswerMost is how long a request waits in the router in all, for look-ups and for
	// verdicts, however many there are. Being held for a sandbox that starts counts apart:
	// Envoy is asked for that time, and AnswerMost then begins anew.
	AnswerMost = envoy.MessageTimeout - answerMargin
	// answerMargin is for what Envoy and the router need themselves.
	answerMargin = time.Second
	// quiescedMost is how much of that is spent on waiting for a verdict.
	quiescedMost = 2 * time.Second
)

// The wait for a verdict must leave time for a look-up.
const _ = uint(AnswerMost - quiescedMost - time.Second)

// decide admits the request or says why not. Exactly one of the results is set. hold
// is asked once before the request is kept waiting for a sandbox that is starting, for
// so long at most, and reports whether it may be.
func (d *decider) decide(ctx context.Context, r *request, hold func(time.Duration) (release func(), ok bool)) (*admission, *apierror.Error) {
	if r.method == http.MethodConnect {
		return nil, apierror.New(apierror.MethodRefused, "CONNECT is not supported; connect to the sandbox's host name directly")
	}
	target, refusal := d.hosts.target(r)
	if refusal != nil {
		return nil, refusal
	}
	refused := func(reason apierror.Reason, message string) (*admission, *apierror.Error) {
		e := apierror.New(reason, "%s", message)
		e.SandboxID = target.ID
		return nil, e
	}

	deadline := time.Now().Add(AnswerMost)
	lookup := func() (routecache.Answer, error) {
		ctx, cancel := context.WithTimeout(ctx, min(d.wait, time.Until(deadline)))
		defer cancel()
		return d.routes.Lookup(ctx, target.ID)
	}
	var held context.Context // once the request is kept waiting for a sandbox that is starting
	patience := quiescedMost
	for {
		answer, err := lookup()
		if err != nil {
			return refused(apierror.RouterNotReady, "the router cannot tell at the moment where this sandbox is; try again")
		}
		switch answer.Status {
		case routecache.Gone:
			d.activity.Forget(target.ID) // what a Begin that came after the release has brought back
			return refused(apierror.SandboxGone, "this sandbox has been released")
		case routecache.Unknown:
			d.activity.Forget(target.ID)
			return refused(apierror.SandboxNotFound, "there is no such sandbox")
		case routecache.Starting:
			if held == nil {
				release, ok := hold(answer.Hold)
				if !ok {
					return refused(apierror.SandboxStarting, "this sandbox is starting; try again")
				}
				defer release()
				var cancel context.CancelFunc
				held, cancel = context.WithTimeout(ctx, answer.Hold)
				defer cancel()
				deadline = time.Now().Add(answer.Hold + AnswerMost)
			}
			if d.routes.Await(held, target.ID, answer.Status) != nil {
				return refused(apierror.SandboxStarting, "this sandbox is still starting; try again")
			}
			continue
		case routecache.Quiesced:
			began := time.Now()
			if !d.awaitVerdict(ctx, target.ID, min(patience, time.Until(deadline))) {
				return refused(apierror.SandboxQuiesced, "it is being decided whether this sandbox is idle; try again")
			}
			patience -= time.Since(began)
			continue
		case routecache.Routable:
		}
		port := target.Port
		if port == 0 {
			port = answer.Route.DefaultPort
		}
		if port == 0 {
			return refused(apierror.NoRoute, "this sandbox's default port is not known; name the port")
		}
		if !answer.Route.Ports.Allows(port) {
			return refused(apierror.PortPrivate, portPrivate(port, answer.Route.Ports))
		}
		if !d.inPodRange(answer.Route.Addr) {
			return refused(apierror.NoRoute, "the sandbox's address is outside the configured pod address ranges; tell the operator")
		}
		dst := netip.AddrPortFrom(answer.Route.Addr, port)
		// The use begins before it is asked whether the route holds. So a leader that has
		// stopped admissions and then asks for activity learns of this request.
		use, wait := d.activity.Begin(target.ID, dst, isGRPC(r.contentType), answer.Route.MinBytes)
		if use == nil {
			if wait > 0 && wait < time.Until(deadline) && d.pause(ctx, wait) {
				continue
			}
			return refused(apierror.TooManyPorts, "too many ports of this sandbox are in use, or were asked for at the same time; try again")
		}
		if epoch, ok := d.answers.Admit(func() bool { return d.routes.Holds(target.ID, answer.Route) }); ok {
			return &admission{id: target.ID, dst: dst, path: target.Path, epoch: epoch, use: use}, nil
		}
		use.Cancel()
		// Released, replaced or only dropped for want of room since the look-up.
	}
}

// awaitVerdict returns true once id may be looked up again, and false if there is no
// verdict in time or no room to wait for it.
func (d *decider) awaitVerdict(ctx context.Context, id string, most time.Duration) bool {
	release, ok := d.park()
	if !ok {
		return false
	}
	defer release()
	defer func(began time.Time) { d.verdict(time.Since(began)) }(time.Now())
	ctx, cancel := context.WithTimeout(ctx, most)
	defer cancel()
	return d.routes.Await(ctx, id, routecache.Quiesced) == nil
}

// pause returns true when wait is over, and false if there is no room to wait.
func (d *decider) pause(ctx context.Context, wait time.Duration) bool {
	release, ok := d.park()
	if !ok {
		return false
	}
	defer release()
	select {
	case <-ctx.Done():
		return false
	case <-time.After(wait):
		return true
	}
}

// portsNamed is how many of the open ports a refusal names.
const portsNamed = 8

// portPrivate says that port is not open, and which ports are.
func portPrivate(port uint16, open routecache.Ports) string {
	named, more := open.List(), ""
	if n := len(named) - portsNamed; n > 0 {
		named, more = named[:portsNamed], fmt.Sprintf(" and %d more", n)
	}
	return fmt.Sprintf("port %d of this sandbox is not open to the outside; its pool opens %v%s", port, routecache.NewPorts(named), more)
}

func (d *decider) inPodRange(addr netip.Addr) bool {
	for _, p := range d.podCIDRs {
		if p.Contains(addr) {
			return true
		}
	}
	return false
}
