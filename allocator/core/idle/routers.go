package idle

import (
	"cmp"
	"slices"
	"strings"
	"time"

	"github.com/berth-sandbox/berth/api/activity"
)

// Activity is what one router says about the use of one sandbox.
type Activity struct {
	ID string
	// Age is the time since it was last in use, 0 if it is, or may be.
	Age time.Duration
	// Open is how many requests the newest look showed to be open.
	Open int
	Kind activity.Kind
}

// Report is what a router says after a look. A report names everything in use, in one or more
// parts. Only the last part has Gateway or Blind.
type Report struct {
	Activities []Activity
	// Gateway identifies the Envoy and its successors at which the router has looked.
	Gateway string
	// Nonce is that of a pong that the router had received before the look began; 0: of none.
	Nonce uint64
	// Took is the duration of the look.
	Took time.Duration
	// Blind says why the router cannot tell what is open; empty: it can.
	Blind string
}

// router is a router that has not ended.
type router struct {
	id        string
	connected bool
	// blind says why it cannot be asked although it is connected; empty: it can.
	blind string
	// mute: it has not answered the last question that it was asked in time.
	mute bool
	// seenUpTo: while it is away, it may have the routes of sandboxes up to this number.
	seenUpTo uint64
	answered uint64 // the last round that it answered
	// gateway, took and inUse are of its newest look. collected is that of a report of which
	// the last part has not come yet.
	gateway          string
	took             time.Duration
	inUse, collected map[string]bool
	// firstPong is the nonce of the first pong on this stream since a router ended last, lastPong
	// that of the last pong; 0: none. Nonces increase.
	firstPong, lastPong uint64
}

// The reasons of this package for not asking a router.
const (
	notConnected = "it is not connected"
	notReported  = "it has not reported yet"
	unanswered   = "it did not answer in time"
	slow         = "its looks at Envoy take too long"
	ended        = "it has ended and may have left requests open"
)

// obstacle says why the router cannot be asked; empty: it can.
func (r *router) obstacle() string {
	switch {
	case !r.connected:
		return notConnected
	case r.blind == "" && r.took > MaxLook:
		return slow
	}
	return r.blind
}

// mayKnow reports whether the router may have the route of a sandbox. A connected router counts
// for every sandbox, even before it has received a route: it may have rejoined after it expired,
// with requests still open.
func (r *router) mayKnow(s *sandbox) bool { return r.connected || s.routeSeq <= r.seenUpTo }

// leftover is what a router that has ended may have left open at its Envoy: the sandboxes up to
// the number seenUpTo, and those of inUse.
type leftover struct {
	*router
	until time.Duration
}

func (o *leftover) includes(s *sandbox) bool {
	return o.inUse[s.ID] || s.routeSeq <= o.seenUpTo
}

func (l *Ledger) find(id string) (at int, found bool) {
	return slices.BinarySearchFunc(l.routers, id, func(r *router, id string) int { return strings.Compare(r.id, id) })
}

// router returns a connected router, or nil.
func (l *Ledger) router(id string) *router {
	if at, found := l.find(id); found && l.routers[at].connected {
		return l.routers[at]
	}
	return nil
}

// Known adds a router that is not connected and may have the routes of all sandboxes so far. It
// ends the round.
func (l *Ledger) Known(id string, now time.Duration) Verdict {
	at, found := l.find(id)
	if !found {
		l.routers = slices.Insert(l.routers, at, &router{id: id, seenUpTo: l.lastRouteSeq})
	}
	return l.endRound(false, now)
}

// Joined notes that a router has a new stream. It ends the round: the router was not asked, may
// have requests open, and may admit what the snapshot that it gets has.
func (l *Ledger) Joined(id string, now time.Duration) Verdict {
	v := l.Known(id, now)
	at, _ := l.find(id)
	r := l.routers[at]
	r.connected, r.blind, r.firstPong, r.lastPong, r.collected = true, notReported, 0, 0, map[string]bool{}
	return v
}

// Left notes that the stream of a router has ended. It ends the round. The router may serve its
// routes until End.
func (l *Ledger) Left(id string, now time.Duration) Verdict {
	if r := l.router(id); r != nil {
		r.connected, r.seenUpTo = false, l.lastRouteSeq
	}
	return l.endRound(false, now)
}

// End removes a router that can route to nothing any more. It ends the round. looked: the last
// report of the router shows what it leaves open. Otherwise that may be everything that it could
// serve. until is when its leftover ends without a look. open: it may have left something open.
func (l *Ledger) End(id string, looked bool, until, now time.Duration) (open bool, v Verdict) {
	at, found := l.find(id)
	if !found {
		return false, Verdict{}
	}
	r := l.routers[at]
	l.routers = slices.Delete(l.routers, at, at+1)
	switch {
	case looked && r.connected && r.blind == "":
		r.seenUpTo = 0
		open = len(r.inUse) > 0
	case r.connected:
		r.seenUpTo, open = l.lastRouteSeq, true
	default:
		open = true
	}
	if open {
		for _, other := range l.routers {
			other.firstPong = 0 // its next look may have begun already
		}
		l.leftovers = append(l.leftovers, &leftover{r, until})
		l.expireLeftovers(now)
	}
	return open, l.endRound(false, now)
}

// MayBeOpen reports whether a router that has ended may have left something open.
func (l *Ledger) MayBeOpen(id string) bool {
	return slices.ContainsFunc(l.leftovers, func(o *leftover) bool { return o.id == id })
}

// Ponged notes that a router is sent a pong now.
func (l *Ledger) Ponged(id string, nonce uint64) {
	if r := l.router(id); r != nil {
		r.firstPong, r.lastPong = cmp.Or(r.firstPong, nonce), nonce
	}
}

// Report records a report of a connected router.
func (l *Ledger) Report(id string, report Report, now time.Duration) {
	r := l.router(id)
	if r == nil {
		return
	}
	for _, a := range report.Activities {
		if l.noteActivity(r, a, now); a.Age == 0 && (a.ID == "" || l.sandboxes[a.ID] != nil) {
			r.collected[a.ID] = true
		}
	}
	switch {
	case report.Blind != "":
		r.blind, r.collected = report.Blind, map[string]bool{}
	case report.Gateway != "":
		r.blind, r.gateway, r.took = "", report.Gateway, report.Took
		r.inUse, r.collected = r.collected, map[string]bool{}
		l.endLeftovers(r, report.Nonce, now)
	}
}

// noteActivity records what a router says about one sandbox.
func (l *Ledger) noteActivity(r *router, a Activity, now time.Duration) {
	if s := l.sandboxes[a.ID]; s != nil {
		s.note(Use{At: max(0, now-a.Age), Kind: a.Kind, Router: r.id, Open: a.Open})
	}
}

// endLeftovers ends the leftovers of the gateway at which r has begun a look since. That look
// reported what is still open.
func (l *Ledger) endLeftovers(r *router, nonce uint64, now time.Duration) {
	if r.firstPong == 0 || nonce < r.firstPong || nonce > r.lastPong {
		return
	}
	for _, o := range l.leftovers {
		if o.gateway == r.gateway {
			o.until = now
		}
	}
	l.expireLeftovers(now)
}

// expireLeftovers ends the leftovers whose time is over. Their sandboxes may have been in use until
// now.
func (l *Ledger) expireLeftovers(now time.Duration) {
	l.leftovers = slices.DeleteFunc(l.leftovers, func(o *leftover) bool {
		if now < o.until {
			return false
		}
		for _, s := range l.sandboxes {
			if o.includes(s) && now > s.At {
				s.note(Use{At: now, Kind: activity.Unknown})
			}
		}
		return true
	})
}

// Question describes the next question about a sandbox with an idle timeout.
type Question struct {
	// At is when it is due without further use.
	At time.Duration
	// Asks are the routers that have to answer. Awaits are those that delay the verdict: they may
	// have the route and cannot be asked, did not answer the last question, or have ended and may
	// have left something open.
	Asks, Awaits []string
	// Why is the reason of the first one of Awaits.
	Why string
}

// Question returns the next question about a sandbox, with at most so many routers of each kind.
func (l *Ledger) Question(id string, most int) (q Question, ok bool) {
	s := l.sandboxes[id]
	if s == nil || s.Timeout <= 0 {
		return q, false
	}
	q.At = l.idleAt(s)
	obstacles := l.obstacles(s)
	for _, r := range l.routers {
		if len(q.Asks) < most && r.mayKnow(s) {
			q.Asks = append(q.Asks, r.id)
		}
		if r.mute && r.obstacle() == "" {
			obstacles = append(obstacles, obstacle{r.id, unanswered})
		}
	}
	for _, o := range obstacles[:min(most, len(obstacles))] {
		q.Awaits, q.Why = append(q.Awaits, o.router), obstacles[0].why
	}
	return q, true
}

// obstacle is a router that blocks a question.
type obstacle struct{ router, why string }

func (l *Ledger) obstacles(s *sandbox) (all []obstacle) {
	for _, r := range l.routers {
		if why := r.obstacle(); why != "" && r.mayKnow(s) {
			all = append(all, obstacle{r.id, why})
		}
	}
	for _, o := range l.leftovers {
		if o.includes(s) {
			all = append(all, obstacle{o.id, ended})
		}
	}
	return all
}
