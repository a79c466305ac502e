package core

import (
	"context"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/berth-sandbox/berth/extproc/admission"
	"github.com/berth-sandbox/berth/lastactive"
	"github.com/berth-sandbox/berth/routecache"
)

// router is a router process with the production route cache and the production
// count of answers that its Envoy has not read. Between them and the core stands what
// extproc/controlclient does, without a network.
type router struct {
	id      string
	envoy   int // that it stands beside; there may be others
	cache   *routecache.Cache
	answers *admission.Answers
	tracker *lastactive.Tracker
	// egress: it has the rules of sandboxes instead of routes, and uses none of them.
	egress bool
	room   int // of the cache
	// rules are those that an egress router has, by sandbox.
	rules map[string]int
	// gateway is that of its Envoy; zero: it is of an earlier version.
	gateway Gateway
	// maxStale is its own: that of the leaders, longer or shorter.
	maxStale time.Duration
	// slow: its clock is behind that of the allocator, as far as is allowed for. small:
	// its cache has no room for all routes.
	slow, small bool

	dead, stopping bool
	// frozen: its process stands still. everJoined: it has had a snapshot.
	frozen, everJoined bool
	// looksAt is the process of its Envoy that it has looked at, below 0: none; lookedAt
	// when it did, asking the question that waits for its looks, ponged the newest pong that
	// has arrived, and heardAt when a leader heard it last.
	looksAt           int
	lookedAt, heardAt time.Duration
	asking            *question
	ponged            uint64
	diedAt            time.Duration
	// lockless: it has taken the proof of its death away with it.
	lockless bool

	stream     uint64 // 0: not connected
	cut        bool   // the allocator's side has ended
	away       bool   // it does not get a connection
	refused    moment // when it was refused last
	deaf, mute bool   // nothing reaches it, nothing that it says arrives, and it does not know
	in         []message
	out        []Event
	term       uint64
	joined     bool
	sent       map[string]Sandbox // what was last said on the stream of each sandbox
	sequence   uint64             // of the last message
	applied    uint64             // of the last one that is in effect for good
	acked      uint64             // of the last one that it has acknowledged
	gone       map[string]bool    // sandboxes whose release it received
	held       map[string]bool    // it was asked whether these are idle, and has received no outcome
	ending     []ending           // what follows once it has acknowledged
	over       map[string]bool    // it has acknowledged that
	freshUntil time.Duration      // by the allocator's clock
	nonce      uint64
	pings      map[uint64]time.Duration
	entries    []routecache.Entry // of the cache
}

// ending are sandboxes that are over for a router once it has acknowledged this.
type ending struct {
	sequence uint64
	ids      []string
}

type message struct {
	term   uint64
	effect Effect
	over   []string // what was over when it was sent, of all that a snapshot does not hold
}

// over is a context that has ended, because the model does not wait.
var over = func() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}()

// egressEnvoy is that of the egress gateway.
const egressEnvoy = 7

func (w *world) addRouter(envoy int) *router {
	r := &router{
		id: "router" + strconv.Itoa(len(w.routers)), envoy: envoy, egress: envoy == egressEnvoy, slow: w.draw(2) == 1, looksAt: -1,
		maxStale: []time.Duration{maxStale, 2 * maxStale, maxStale / 2}[w.draw(3)],
		gone:     map[string]bool{}, held: map[string]bool{}, over: map[string]bool{}, answers: admission.NewAnswers(),
		rules: map[string]int{},
	}
	if w.draw(4) < 3 {
		r.gateway = gatewayOf(envoy)
	}
	size := 100
	if w.draw(4) == 3 {
		size, r.small = 2, true
	}
	var err error
	r.room = size
	r.cache, err = routecache.New(routecache.Options{
		Size: size,
		Now:  func() time.Duration { return r.clock(w.now.Boot) },
		Ask: func(id string, wake bool) bool {
			if r.stream == 0 || !r.joined {
				return false
			}
			r.out = append(r.out, Resolve{Session: r.id, Stream: r.stream, ID: id, Wake: wake})
			return true
		},
	})
	if err != nil {
		w.t.Fatal(err)
	}
	r.tracker = w.tracker(r)
	w.routers = append(w.routers, r)
	return r
}

func alive(r *router) bool     { return !r.dead }
func connected(r *router) bool { return !r.dead && !r.frozen && r.stream != 0 && !r.cut }

// clock is what the router's clock says.
func (r *router) clock(at time.Duration) time.Duration {
	if r.slow {
		return at * 100 / 101
	}
	return at
}

// stale is how long it may serve what it knows after it has sent a ping.
func (r *router) stale() time.Duration {
	if r.slow {
		return r.maxStale + r.maxStale/100
	}
	return r.maxStale
}

func (r *router) fresh() bool { return !r.dead && r.cache.Fresh() }

// known are the routes in the cache, by ID.
func (r *router) known() []routecache.Entry {
	all := r.cache.Dump()
	slices.SortFunc(all, func(a, b routecache.Entry) int { return strings.Compare(a.ID, b.ID) })
	return all
}

// routable reports whether the router would admit a request for id.
func (r *router) routable(id string) bool {
	return r.fresh() && slices.ContainsFunc(r.entries, func(e routecache.Entry) bool { return e.ID == id })
}

// used notes, until then, what is in use. It comes before whatever may end a
// use.
func (w *world) used(until time.Duration) {
	for _, r := range w.routers {
		if r.fresh() {
			for _, e := range r.entries {
				w.lastUse[e.ID] = max(w.lastUse[e.ID], min(until, r.freshUntil))
			}
		}
	}
}

func (w *world) send(stream uint64, e Effect) {
	for _, r := range w.routers {
		if r.stream == stream {
			r.in = append(r.in, message{w.term, e, w.overBy(e)})
			r.hear(e)
		}
	}
}

// overBy are the sandboxes that are over for a router which has heard this.
func (w *world) overBy(e Effect) (ids []string) {
	switch e := e.(type) {
	case SendRelease:
		return e.IDs
	case SendSnapshot:
		for id, s := range w.disk.sandboxes {
			if s.Phase == Released && !slices.ContainsFunc(e.Routes, func(s Sandbox) bool { return s.ID == id }) {
				ids = append(ids, id)
			}
		}
	}
	return ids
}

// hear notes what the stream has said, whether it has arrived or not.
func (r *router) hear(e Effect) {
	switch e := e.(type) {
	case SendSnapshot:
		r.sent = map[string]Sandbox{}
		for _, s := range e.Routes {
			r.sent[s.ID] = s
		}
	case SendRoute:
		r.sent[e.Sandbox.ID] = e.Sandbox
	case SendRelease:
		for _, id := range e.IDs {
			delete(r.sent, id)
		}
	case SendClose:
		delete(r.sent, e.ID)
	case SendResolved:
		delete(r.sent, e.ID)
		if e.Sandbox != nil {
			r.sent[e.ID] = *e.Sandbox
		}
	}
}

func (w *world) join(r *router) {
	if r == nil {
		return
	}
	if r.stream != 0 {
		w.leave(r)
	}
	w.lastStream++
	r.stream, r.cut, r.joined, r.sequence, r.applied, r.acked, r.in, r.out, r.pings = w.lastStream, false, false, 0, 0, 0, nil, nil, map[uint64]time.Duration{}
	r.sent, r.ending, r.asking, r.ponged = map[string]Sandbox{}, nil, nil, 0
	w.step(SessionJoined{Session: r.id, Stream: r.stream, MaxStale: r.maxStale, Gateway: r.gateway, Egress: r.egress})
	w.ping(r)
}

// leave ends the stream. What it carried may reach the core later, and in any
// order with what comes from another stream.
func (w *world) leave(r *router) {
	if !r.cut && !r.mute && w.draw(2) == 0 {
		w.strays = append(w.strays, r.out...)
	}
	w.strays = append(w.strays, SessionLeft{Session: r.id, Stream: r.stream})
	w.disconnected(r)
}

func (w *world) disconnected(r *router) {
	r.stream, r.cut, r.deaf, r.mute, r.in, r.out = 0, false, false, false, nil, nil
	r.cache.Disconnected()
	if now := r.known(); !slices.Equal(now, r.entries) { // I8
		w.t.Fatalf("%s knew %v while it was connected, and %v since it is not", r.id, r.entries, now)
	}
}

func (w *world) breakOff(r *router) {
	if r != nil {
		w.leave(r)
	}
}

func (w *world) ping(r *router) {
	if r != nil {
		r.nonce++
		r.pings[r.nonce] = w.now.Boot
		r.out = append(r.out, SessionPing{Session: r.id, Stream: r.stream, Nonce: r.nonce})
	}
}

func (w *world) ack(r *router) {
	if r == nil || r.applied == 0 {
		return
	}
	r.acked = r.applied
	r.out = append(r.out, SessionAck{Session: r.id, Stream: r.stream, Sequence: r.applied})
	for len(r.ending) > 0 && r.ending[0].sequence <= r.applied {
		for _, id := range r.ending[0].ids {
			r.over[id] = true
		}
		r.ending = r.ending[1:]
	}
}

// die ends a router's process without a word.
func (w *world) die(r *router) {
	if r == nil {
		return
	}
	if r.stream != 0 {
		w.leave(r)
	}
	w.buried(r)
}

// stopRouter ends a router's process cleanly: its Envoy sends no more requests to it. Goodbye comes
// when Envoy has read every answer. If that takes too long the process ends without it.
func (w *world) stopRouter(r *router) {
	if r == nil {
		return
	}
	w.used(w.now.Boot)
	r.stopping = true
	if r.answers.Unread() > 0 {
		if w.draw(2) == 1 {
			r.lockless = true
			w.die(r)
		}
		return
	}
	nonce := r.ponged
	r.tracker.Look(context.Background())
	if r.egress && r.stream != 0 {
		r.out = append(r.out, SessionGoodbye{Session: r.id, Stream: r.stream, Gateway: r.gateway, Egress: true})
	} else if r.stream != 0 {
		last := w.toReport(r, r.tracker.FinalReportNow(), nonce, false)
		r.out = append(r.out, last, SessionGoodbye{Session: r.id, Stream: r.stream, Looked: last.Blind == "", Gateway: r.gateway})
	}
	if r.mute {
		r.out = nil
	}
	w.strays = append(w.strays, r.out...)
	w.strays = append(w.strays, SessionLeft{Session: r.id, Stream: r.stream})
	w.disconnected(r)
	w.buried(r)
}

func (w *world) buried(r *router) {
	w.used(w.now.Boot)
	r.dead, r.diedAt = true, w.now.Boot
	living, beside := 0, 0
	for _, o := range w.routers {
		if !o.dead {
			living++
			if o.envoy == r.envoy {
				beside++
			}
		}
	}
	if living < 2 || beside == 0 { // the kubelet starts the container again
		w.addRouter(r.envoy)
	}
}

// findDead has a router say that another one beside the same Envoy has ended: it has
// got hold of its lock file.
func (w *world) findDead() {
	r := pick(w, w.routers, func(r *router) bool { return r.dead && !r.lockless })
	if r == nil {
		return
	}
	if by := pick(w, w.routers, func(o *router) bool { return !o.dead && o.envoy == r.envoy }); by != nil {
		w.strays = append(w.strays, SessionDead{Session: r.id, By: by.id, Gateway: by.gateway})
	}
}

// gatewayOf is the gateway of an Envoy.
func gatewayOf(envoy int) Gateway { return Gateway{byte(1 + envoy)} }

// findWrongly has a router of another gateway report one that lives.
func (w *world) findWrongly() {
	r := pick(w, w.routers, func(r *router) bool { return !r.dead && r.gateway != Gateway{} })
	if r == nil {
		return
	}
	if by := pick(w, w.routers, func(o *router) bool { return !o.dead && o.envoy != r.envoy }); by != nil {
		w.strays = append(w.strays, SessionDead{Session: r.id, By: by.id, Gateway: by.gateway})
	}
}

// declareDead is an operator's word, who is right.
func (w *world) declareDead() {
	if r := pick(w, w.routers, func(r *router) bool { return r.dead && !r.lockless }); r != nil {
		token := w.token()
		w.declared[token] = r.id
		w.step(DeclareDead{Token: token, Session: r.id})
	}
}

func (w *world) fromRouter(r *router) {
	if r != nil {
		ev := r.out[0]
		r.out = r.out[1:]
		w.step(ev)
	}
}

// replace has the cache keep as many of the routes as it has room for. Which ones, and which it drops first, does not
// depend on the order of a map, so that a history can be run again.
func (r *router) replace(routes map[string]routecache.Route) {
	ids := slices.Sorted(maps.Keys(routes))
	ids = ids[max(0, len(ids)-r.room):]
	kept := make(map[string]routecache.Route, len(ids))
	for _, id := range ids {
		kept[id] = routes[id]
	}
	r.cache.Replace(kept)
	for _, id := range ids {
		r.cache.Put(id, routes[id])
	}
}

func routeTo(s Sandbox) routecache.Route {
	return routecache.Route{Addr: s.IP, DefaultPort: s.DefaultPort, Ports: routecache.NewPorts(s.Ports), MinBytes: s.MinBytes}
}

// toRouter puts one message into effect, as extproc/controlclient does.
func (w *world) toRouter(r *router) {
	if r == nil || len(r.in) == 0 {
		return
	}
	w.used(w.now.Boot)
	m := r.in[0]
	r.in = r.in[1:]
	if m.term < r.term {
		w.leave(r)
		return
	}
	r.term = m.term
	if _, ok := m.effect.(SendSnapshot); !ok && !r.joined {
		w.t.Fatalf("%s got %T before the snapshot", r.id, m.effect)
	}
	route := func(s Sandbox) routecache.Route {
		if r.egress && !s.Agent.Egress {
			w.t.Fatalf("%s is an egress router, and receives %s, which it has no rules of", r.id, s.ID)
		}
		if r.gone[s.ID] {
			w.t.Fatalf("%s receives a route to %s after the release", r.id, s.ID)
		}
		return routeTo(s)
	}
	sequence := uint64(0)
	switch e := m.effect.(type) {
	case SendSnapshot:
		routes := map[string]routecache.Route{}
		for _, s := range e.Routes {
			routes[s.ID] = route(s)
			r.tracker.Expect(s.ID, s.IP, s.MinBytes)
		}
		r.replace(routes)
		clear(r.rules)
		r.hasRules(e.Routes...)
		r.tracker.Retain(func(id string) bool { _, ok := routes[id]; return ok })
		clear(r.held)
		r.joined, r.everJoined, sequence = true, true, e.Sequence
		r.asking = nil
		w.reports(r, true, 0)
		r.ending = append(r.ending, ending{sequence, m.over})
	case SendRoute:
		r.tracker.Expect(e.Sandbox.ID, e.Sandbox.IP, e.Sandbox.MinBytes)
		r.cache.Put(e.Sandbox.ID, route(e.Sandbox))
		r.hasRules(e.Sandbox)
		sequence = e.Sequence
	case SendRelease:
		for i, id := range e.IDs {
			r.cache.Release(id, routecache.End{Reason: e.Ends[i].Reason, AtUnix: e.Ends[i].At.Unix()})
			r.tracker.Forget(id)
			delete(r.held, id)
			delete(r.rules, id)
			r.gone[id] = true
		}
		sequence = e.Sequence
		r.ending = append(r.ending, ending{sequence, m.over})
	case SendResolved:
		answer := routecache.Answer{Status: routecache.Unknown}
		delete(r.rules, e.ID)
		switch {
		case e.Sandbox != nil:
			r.hasRules(*e.Sandbox)
			answer = routecache.Answer{Status: routecache.Routable, Route: route(*e.Sandbox)}
		case e.Gone:
			r.gone[e.ID] = true
			answer.Status = routecache.Gone
		case e.Sleeper != nil:
			answer = r.asleep(e.Sleeper, e.Busy)
		case e.Starting:
			answer = routecache.Answer{Status: routecache.Starting, Hold: e.Hold}
		}
		r.cache.Resolve(e.ID, answer)
	case SendClose:
		if r.gateway == (Gateway{}) { // a router of an earlier version
			r.cache.Resolve(e.ID, routecache.Answer{Status: routecache.Starting})
		} else {
			r.cache.Close(e.ID)
		}
		delete(r.rules, e.ID)
		sequence = e.Sequence
	case SendQuiesce:
		w.quiesced(r, e)
	case SendResume:
		if r.egress {
			w.t.Fatalf("%s is an egress router, and hears of a verdict about %v", r.id, e.IDs)
		}
		for _, id := range e.IDs {
			r.cache.Resume(id)
			delete(r.held, id)
		}
	case SendPong:
		w.ponged(r, e)
	}
	r.entries = r.known()
	w.judgeRouterRules()
	if sequence > 0 {
		w.applies(r, sequence)
	}
}

// asleep is the answer about a sandbox that sleeps. A router of an earlier version takes it for one that it does not know.
func (r *router) asleep(s *Sandbox, busy bool) routecache.Answer {
	if r.gateway == (Gateway{}) {
		return routecache.Answer{Status: routecache.Unknown}
	}
	return routecache.Answer{Status: routecache.Asleep, Route: routeTo(*s), Wakeable: s.Wakeable, Busy: busy}
}

// applies: a router acknowledges a message when its Envoy has read every answer before it.
func (w *world) applies(r *router, sequence uint64) {
	if sequence != r.sequence+1 {
		w.t.Fatalf("%s got message %d after message %d", r.id, sequence, r.sequence)
	}
	r.sequence = sequence
	stream := r.stream
	r.answers.Barrier(func() {
		if r.stream == stream {
			r.applied = sequence
		}
	})
}

func (w *world) ponged(r *router, e SendPong) {
	r.ponged = max(r.ponged, e.Nonce)
	if sent, ok := r.pings[e.Nonce]; ok {
		r.cache.SetFreshUntil(r.clock(sent) + r.maxStale)
		r.freshUntil = max(r.freshUntil, sent+r.stale())
		for _, q := range w.requests {
			if q.router == r && w.now.Boot < q.fresh { // since it was admitted, without a gap
				q.fresh = r.freshUntil
			}
		}
	}
}
