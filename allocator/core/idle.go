package core

import (
	"math"
	"net/netip"
	"slices"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/member"
	"github.com/berth-sandbox/berth/api/activity"
)

// A sandbox is released for being idle, and never while it is in use.
//
// Reports of routers, calls and earlier answers give a lower bound of the last use. The bound
// only says when to ask. When the idle timeout has passed since the bound, the leader asks all
// routers (SendQuiesce) about all sandboxes that are due, in one round at a time. A router that
// was asked admits no request for these sandboxes until SendResume, SendRelease or a snapshot,
// takes two looks, and answers. A sandbox is released if all routers have answered in time, every
// one of them could tell what is open, and nothing was in use within the idle timeout. After
// that verdict no router receives the route of the sandbox.
//
// A session that cannot be asked blocks the question about every sandbox that its router could
// serve. It cannot be asked if it is not connected, has not reported yet, cannot tell what its
// Envoy holds open, or did not answer the last question. A router that has ended blocks the
// question about what it may have left open (leftover).
//
// A pool can name a busy probe. One router then asks the pod before the round (SendProbe).
//
// A new leader assumes that a sandbox was in use until recoveryMargin and twice the expiry after
// the time that its object shows, but not later than the begin of the term.

const (
	// roundMost bounds the sandboxes that one round asks about, and probesMost the pods
	// that are probed in one tick.
	roundMost  = 1000
	probesMost = 64
	// askAgain is the pause before the next attempt to ask about a sandbox.
	askAgain = 500 * time.Millisecond
	// answerWait is how long routers may take to look twice and to answer. Requests are
	// held meanwhile, for 2 s.
	answerWait = 1500 * time.Millisecond
	// The pause between two rounds is the duration of roundsApart looks, so that the two looks of
	// a round are 5 % of the time of Envoy's main thread. It is at most roundsMost.
	roundsApart = 40
	roundsMost  = 10 * time.Second
	// bytesLeast is the shortest idle timeout of a sandbox whose bytes count, because routers
	// count bytes per minute.
	bytesLeast = time.Minute
	// probeWait is the pause before a probe without an answer is repeated. A router tries three
	// times, 200 ms each and a second apart.
	probeWait = 6 * time.Second
	// reapHold is how long a request may wait for a sandbox whose release is on its way
	// into the journal.
	reapHold = 5 * time.Second
	// The activity of one sandbox is written to its object at most every showEvery, and at least
	// every showWithin if it has changed.
	showEvery  = time.Minute
	showWithin = 2 * time.Minute
	// recoveryMargin is how much later than its object shows a sandbox may have been in use. The
	// clocks of two allocators may each be off by ten minutes, in opposite directions. Objects
	// lag behind by showEvery, showWithin and the write.
	recoveryMargin = 25 * time.Minute
	// pongsKept bounds the pongs of a session whose times are remembered.
	pongsKept = 64
)

// reaping is where a sandbox is on its way to being released for being idle.
type reaping int

const (
	notDue  reaping = iota
	asked           // in a round, or waiting for one
	decided         // released by a verdict; the fact is on its way into the journal
)

// lastUse is the newest known use of a sandbox.
type lastUse struct {
	at     time.Duration // on the boot clock
	kind   activity.Kind
	router string // that has reported it
	open   int
	// routeSeq numbers the sandboxes in the order in which routers could learn their routes; 0: not yet.
	routeSeq uint64
	reaping  reaping
	// notBefore is the earliest time of the next question about it. prober is the stream whose
	// router probes it until then; 0: none.
	notBefore time.Duration
	prober    uint64
	shownAt   time.Duration // when its activity was last written to its object
}

// leftover is what a router that has ended may have left open at its Envoy: the sandboxes up to
// the number upTo, and those of shown. They count as in use until another router beside the same
// Envoy has begun a look after the leader learned of the end, or until the session of the router
// would have expired.
type leftover struct {
	session, gateway string
	since, until     time.Duration
	upTo             uint64
	shown            map[*sandbox]struct{}
}

func (l *leftover) holds(s *sandbox) bool {
	_, shown := l.shown[s]
	return shown || s.routeSeq <= l.upTo
}

// looker is what a router that has a session says about use.
type looker struct {
	*member.Session
	// blind says why the router cannot be asked what is idle; empty: it can. answered is the last
	// round in which it answered.
	blind    string
	answered uint64
	// gateway, took and shown are of its newest look: which gateway it read, how long it took,
	// and which sandboxes it showed in use. inUse collects a report that is not complete.
	gateway      string
	took         time.Duration
	shown, inUse map[*sandbox]struct{}
	pongs        []sentPong // the last ones on this stream
	// seenUpTo: the router may have the routes of sandboxes up to this number (lastUse.routeSeq).
	seenUpTo uint64
}

// sentPong is a pong and when it was sent.
type sentPong struct {
	nonce uint64
	at    time.Duration
}

// lookerJoined notes that a router has connected.
func (c *Core) lookerJoined(s *member.Session) {
	l := c.lookers[s]
	if l == nil {
		l = &looker{Session: s}
		c.lookers[s] = l
	}
	l.blind, l.pongs, l.inUse, l.seenUpTo = "it has not reported yet", nil, nil, math.MaxUint64
}

// ponged notes a pong.
func (s *looker) ponged(nonce uint64, at time.Duration) {
	s.pongs = append(s.pongs[max(0, len(s.pongs)+1-pongsKept):], sentPong{nonce, at})
}

// settling is the journaled end of a router that may have left something open. The journal keeps
// it for the next leader until the leftover is over and the objects show the activity.
type settling struct {
	at     time.Duration
	settle Settle
}

// reaper is the part of Core that is about activity.
type reaper struct {
	due          []*sandbox // that wait for a round
	round        []*sandbox // that routers are asked about
	rounds       uint64     // the number of the last round
	until        time.Duration
	nextRound    time.Duration
	probes       int // in this tick
	leftovers    []*leftover
	lookers      map[*member.Session]*looker
	settlings    []settling // in the order of time
	lastRouteSeq uint64     // the newest lastUse.routeSeq
	// shown is the sandbox whose activity was considered for its object last, and showNext is
	// when the next one is considered.
	shown    Mark
	showNext time.Duration
}

// idleAt is when the idle timeout of a sandbox ends. ok is false if it has none, or if a change of
// its end is on its way into the journal. The timeout is not shorter than the connect window,
// because a look may miss a request that was admitted less than that ago.
func (c *Core) idleAt(s *sandbox) (at time.Duration, ok bool) {
	least := c.cfg.ConnectWindow
	if s.MinBytes > 0 {
		least = max(least, bytesLeast)
	}
	return s.at + max(s.IdleTimeout, least), s.Phase == Running && s.IdleTimeout > 0 && s.pendingTimeouts == 0
}

// note records a use of a sandbox, and reports whether it is the newest.
func (c *Core) note(s *sandbox, at time.Duration, kind activity.Kind) bool {
	if s.Phase != Starting && s.Phase != Running || at < s.at {
		return false
	}
	s.at, s.kind, s.router, s.open = at, kind, "", 0
	return true
}

// begin notes that a sandbox runs. Routers may have its route from now on.
func (c *Core) begin(s *sandbox) {
	c.lastRouteSeq++
	s.routeSeq, s.at, s.kind, s.shownAt = c.lastRouteSeq, c.now.Boot, activity.Claim, c.now.Boot
	c.schedule(s)
}

// recoverActivity reads the activity of a running sandbox from its object. It may have been used
// later, through routers that never report to this leader.
func (c *Core) recoverActivity(s *sandbox) {
	c.begin(s)
	last := s.ClaimedAt
	if s.LastActive.After(last) {
		last, s.kind = s.LastActive, activity.Record
	}
	s.at = min(c.now.Boot, c.bootOf(last)+recoveryMargin+2*c.cfg.expiry())
}

// tracked records what a router reports about one sandbox.
func (c *Core) tracked(s *looker, a Activity) {
	sb := c.sandboxes[a.ID]
	if a.ID == "" {
		sb = c.sandboxAt(a.Addr)
	}
	if sb == nil {
		return
	}
	if a.Age == 0 && s.inUse != nil {
		s.inUse[sb] = struct{}{}
	}
	if a.ID == "" && sb.MinBytes > 0 { // a router without the route does not count the bytes
		return
	}
	if c.note(sb, max(0, c.now.Boot-a.Age), a.Kind) {
		sb.router, sb.open = s.ID, a.Open
	}
}

// sandboxAt is the sandbox that runs at an address, if there is one.
func (c *Core) sandboxAt(at netip.Addr) *sandbox {
	if p := c.places[at]; p != nil {
		for _, q := range p.pods {
			if q.sandbox != nil && q.sandbox.Phase == Running {
				return q.sandbox
			}
		}
	}
	return nil
}

// report records what a router reports after a look. A report names everything in use, in one or
// more parts. Only the last part has the result of the look.
func (c *Core) report(ev Report) {
	s := c.lookers[c.members.OfStream(ev.Stream)]
	if s == nil || !s.Durable {
		return
	}
	if s.inUse == nil {
		s.inUse = map[*sandbox]struct{}{}
	}
	for _, a := range ev.Activities {
		c.tracked(s, a)
	}
	switch {
	case ev.Blind != "":
		s.blind, s.inUse = ev.Blind, nil
	case ev.Gateway != "":
		s.blind, s.gateway, s.took, s.shown, s.inUse = "", ev.Gateway, ev.Took, s.inUse, nil
		c.looked(s, ev.Nonce)
	}
}

// looked ends the leftovers of a gateway at which s has begun a look since. That look reported
// what is still open.
func (c *Core) looked(s *looker, nonce uint64) {
	i := slices.IndexFunc(s.pongs, func(p sentPong) bool { return p.nonce == nonce })
	for _, l := range c.leftovers {
		if i >= 0 && s.pongs[i].at > l.since && s.gateway == l.gateway {
			l.until = c.now.Boot
		}
	}
	c.expireLeftovers()
}

// expireLeftovers ends the leftovers whose time is over. Their sandboxes may have been in use until
// now.
func (c *Core) expireLeftovers() {
	c.leftovers = slices.DeleteFunc(c.leftovers, func(l *leftover) bool {
		if c.now.Boot < l.until {
			return false
		}
		for _, s := range c.live {
			if l.holds(s) && c.now.Boot > s.at {
				c.note(s, c.now.Boot, activity.Unknown)
			}
		}
		return true
	})
}

// leaves is what a router that ends may leave open; nil: nothing. looked: the last report of the
// router shows it. Otherwise it is everything that the router could serve.
func (c *Core) leaves(m *member.Session, looked bool) *leftover {
	s := c.lookers[m]
	l := &leftover{session: s.ID, gateway: s.gateway, since: c.now.Boot, until: c.members.ExpiresAt(m)}
	switch {
	case !looked:
		l.upTo = min(s.seenUpTo, c.lastRouteSeq)
	case len(s.shown) == 0:
		return nil
	default:
		l.shown = s.shown
	}
	return l
}

// settleLater has the journal keep a durable end of a router for a fixed time.
func (c *Core) settleLater(s Settle) {
	c.settlings = append(c.settlings, settling{c.now.Boot + c.cfg.expiry() + showEvery + showWithin, s})
}

func (c *Core) settleEnds() {
	for len(c.settlings) > 0 && c.settlings[0].at <= c.now.Boot {
		c.emit(c.settlings[0].settle)
		c.settlings = c.settlings[1:]
	}
}

// askable reports whether a session can be asked what is idle.
func (s *looker) askable() bool { return s.Stream != 0 && s.Durable && s.blind == "" }

// awaited lists the sessions, by ID and at most so many, that block the question whether a sandbox
// is idle. A connected session counts for every sandbox, even before it has received a route: its
// router may have rejoined after it expired, with requests still open.
func (c *Core) awaited(sb *sandbox, most int) (list []string) {
	for _, m := range c.members.All() {
		if s := c.lookers[m]; len(list) < most && !s.askable() && sb.routeSeq <= s.seenUpTo {
			list = append(list, s.ID)
		}
	}
	for _, l := range c.leftovers {
		if len(list) < most && l.holds(sb) {
			list = append(list, l.session)
		}
	}
	return list
}

// comes acts on a sandbox whose deadline has come.
func (c *Core) comes(s *sandbox) {
	if at, reason := s.ends(); reason != "" && at <= c.now.Boot {
		c.startRelease(s, reason)
		return
	}
	if at, ok := c.idleAt(s); ok && s.reaping == notDue && max(at, s.notBefore) <= c.now.Boot {
		if len(c.awaited(s, 1)) > 0 {
			s.notBefore = c.now.Boot + askAgain
		} else if !c.probe(s) {
			c.pass(s)
		}
	}
	c.schedule(s)
}

// probe has a router ask the pod of a sandbox that is due whether it is busy. It returns false if
// the sandbox has no busy probe.
func (c *Core) probe(s *sandbox) bool {
	if !c.isProbed(s) {
		return false
	}
	p := c.pools[s.Pool]
	s.notBefore, s.prober = c.now.Boot+askAgain, 0
	all := c.members.All()
	for i := range all { // one after the other, for each sandbox
		r := c.lookers[all[(int(s.routeSeq)+int(c.now.Boot/probeWait)+i)%len(all)]]
		if r.askable() && c.probes < probesMost {
			c.probes++
			s.notBefore, s.prober = c.now.Boot+probeWait, r.Stream
			c.emit(SendProbe{Stream: r.Stream, ID: s.ID, To: netip.AddrPortFrom(s.IP, p.BusyProbe.Port), Path: p.BusyProbe.Path})
			break
		}
	}
	return true
}

// isProbed reports whether the pod of a sandbox is probed. The pool may have got its probe after
// the claim. A sandbox without a lifetime is not probed then, because a pod that is always busy
// would keep it for ever.
func (c *Core) isProbed(s *sandbox) bool {
	p := c.pools[s.Pool]
	return p != nil && p.BusyProbe.Port != 0 && !s.LifetimeEnd.IsZero()
}

// probed records the answer of a pod.
func (c *Core) probed(ev Probed) {
	s := c.sandboxes[ev.ID]
	switch {
	case s == nil || s.prober != ev.Stream || s.reaping != notDue: // it came late
	case ev.Busy:
		s.prober, s.notBefore = 0, 0
		c.note(s, c.now.Boot, activity.Busy)
		c.schedule(s)
	default:
		s.prober, s.notBefore = 0, c.now.Boot+probeWait+roundsMost // the answer holds until then
		c.pass(s)
	}
}

// pass adds a sandbox whose pod is not busy to the next round.
func (c *Core) pass(s *sandbox) {
	s.reaping = asked
	c.due = append(c.due, s)
}

// ask begins a round if none is under way and something is due. It does not while the journal
// does not answer: requests are held until the verdict is durable.
func (c *Core) ask() {
	if c.round != nil || c.now.Boot < c.nextRound || c.closing || c.journalStands() {
		return
	}
	n := min(len(c.due), roundMost)
	var questions []Question
	for _, s := range c.due[:n] {
		switch at, ok := c.idleAt(s); {
		case len(c.awaited(s, 1)) > 0:
			s.reaping, s.notBefore = notDue, c.now.Boot+askAgain
		case !ok || at > c.now.Boot: // it was active since, or is released
			s.reaping = notDue
		case c.isProbed(s) && c.now.Boot > s.notBefore: // its pod may be busy by now
			s.reaping = notDue
		default:
			c.round = append(c.round, s)
			questions = append(questions, Question{ID: s.ID, IP: s.IP, MinBytes: s.MinBytes})
		}
		c.schedule(s)
	}
	c.due = slices.Delete(c.due, 0, n)
	if c.round == nil {
		return
	}
	c.rounds++
	var took time.Duration
	for _, s := range c.connected() {
		took = max(took, s.took)
		c.emit(SendQuiesce{Stream: s.Stream, Number: c.rounds, Questions: questions})
	}
	c.until, c.nextRound = c.now.Boot+answerWait, c.now.Boot+min(roundsApart*took, roundsMost)
	c.judge()
}

// connected lists the sessions that have a stream and are durable. No round begins while one of
// them cannot be asked.
func (c *Core) connected() (all []*looker) {
	for _, s := range c.members.Reachable() {
		all = append(all, c.lookers[s])
	}
	return all
}

// quiesced records the answer of a router.
func (c *Core) quiesced(ev Quiesced) {
	s := c.lookers[c.members.OfStream(ev.Stream)]
	if s != nil && s.blind == unanswered && ev.Blind == "" {
		s.blind = "" // it does answer
	}
	if s == nil || c.round == nil || ev.Number != c.rounds || c.now.Boot > c.until {
		return
	}
	for _, a := range ev.Activities {
		c.tracked(s, a)
	}
	if ev.Blind != "" {
		s.blind = ev.Blind
		c.endRound(false)
		return
	}
	s.answered = ev.Number
	c.judge()
}

// judge ends the round if all have answered.
func (c *Core) judge() {
	for _, s := range c.connected() {
		if s.answered != c.rounds {
			return
		}
	}
	c.endRound(true)
}

// endRound ends the round, if one is under way. sure: every router has answered, so the verdict
// stands. Otherwise a session joined or ended, or could not tell; the question is repeated after
// a pause.
func (c *Core) endRound(sure bool) {
	round := c.round
	c.round = nil
	var resumed []string
	for _, s := range round {
		s.reaping = notDue
		if s.Phase == Released || s.Phase == Ended {
			continue // its release ends the question
		}
		switch at, ok := c.idleAt(s); {
		case !sure:
			s.notBefore = c.now.Boot + askAgain
		case !ok || c.now.Boot < at: // it is in use, or was
		case c.cfg.DryRun:
			s.notBefore = c.now.Boot + at - s.at
			c.emit(WouldReap{Sandbox: s.Sandbox, Idle: c.now.Boot - s.at})
		default:
			s.reaping = decided
			c.startRelease(s, ReasonIdle)
			continue
		}
		resumed = append(resumed, s.ID)
		c.schedule(s)
	}
	if len(resumed) == 0 {
		return
	}
	for _, s := range c.connected() {
		c.emit(SendResume{Stream: s.Stream, IDs: resumed})
	}
}

// unanswered is looker.blind of a router that did not answer in time.
const unanswered = "it did not answer in time"

// expireRound ends the round when the time for answers is over. A router that did not answer is
// asked again after its late answer, or after its next report of a good look.
func (c *Core) expireRound() {
	if c.round == nil || c.now.Boot < c.until {
		return
	}
	for _, s := range c.connected() {
		if s.answered != c.rounds {
			s.blind = unanswered
		}
	}
	c.nextRound = c.now.Boot + roundsMost // requests are held while routers do not answer
	c.endRound(false)
}

// showSome writes the activity of the next sandboxes to their objects, in turn and at a bounded
// rate.
func (c *Core) showSome() {
	c.showNext = max(c.showNext, c.now.Boot-100*time.Millisecond) // what was not used is lost
	for c.showNext <= c.now.Boot && len(c.live) > 0 && !c.pressure {
		c.showNext += min(showWithin/time.Duration(len(c.live)), 20*time.Millisecond)
		at, found := slices.BinarySearchFunc(c.live, c.shown, byClaim)
		if found {
			at++
		}
		s := c.live[at%len(c.live)]
		c.shown = s.mark()
		active := c.now.Wall.Add(s.at - c.now.Boot).Truncate(time.Microsecond)
		if s.Phase != Running || s.IdleTimeout <= 0 || s.pendingTimeouts > 0 || s.objectRevision.Less(s.Revision) ||
			c.now.Boot-s.shownAt < showEvery || active.Sub(s.LastActive) < time.Second {
			continue
		}
		s.LastActive, s.shownAt = active, c.now.Boot
		c.counter++
		s.Revision = Revision{c.cfg.Term, c.counter}
		c.emit(WriteObject{Sandbox: s.Sandbox, Touch: true})
	}
}
