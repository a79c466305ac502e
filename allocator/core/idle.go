package core

import (
	"net/netip"
	"slices"
	"time"

	"github.com/berth-sandbox/berth/api/activity"
)

// How a sandbox is released for being idle, and never while it is in use.
//
// Routers look at what their Envoys hold open, and report it. What is known from reports,
// from calls and from earlier questions is a lower bound: it only says when to ask. When
// the idle timeout has passed since then, all routers are asked (SendQuiesce), about all
// sandboxes that are due, one round at a time. A router that was asked admits no request
// for them until SendResume, SendRelease or a snapshot, looks twice, and answers. A sandbox
// is released if all have answered in time, each could tell what is open, and nothing was
// in use within the idle timeout. From that verdict on no router is sent its route.
//
// A session that cannot be asked blocks the question about all that it could serve: it is
// not connected, has not reported yet, cannot tell what its Envoy holds open, or did not
// answer the last question. So does a router that has ended, for what it may have left
// open (leftover).
//
// A pool can name a busy probe. One router then asks the pod before the round (SendProbe).
//
// A new leader takes a sandbox to have been in use until recoveryMargin and twice the
// expiry after what its object shows, at most until it began to lead.

const (
	// roundMost bounds the sandboxes that one round asks about, and probesMost the pods
	// that are probed in one tick.
	roundMost  = 1000
	probesMost = 64
	// askAgain is the pause before it is tried again to ask about a sandbox.
	askAgain = 500 * time.Millisecond
	// answerWait is how long routers may take to look twice and to answer. Requests are
	// held meanwhile, for 2 s.
	answerWait = 1500 * time.Millisecond
	// A round follows the one before by the duration of roundsApart looks, so that its two
	// looks are 5 % of the time of Envoy's main thread, and at most by roundsMost.
	roundsApart = 40
	roundsMost  = 10 * time.Second
	// bytesLeast is the shortest idle timeout of a sandbox that is judged by bytes: they
	// are counted by the minute.
	bytesLeast = time.Minute
	// probeWait is when a probe that was not answered is made again: a router tries three
	// times, 200 ms each and a second apart.
	probeWait = 6 * time.Second
	// reapHold is how long a request may wait for a sandbox whose release is on its way
	// into the journal.
	reapHold = 5 * time.Second
	// The activity of one sandbox is written to its object at most every showEvery. In
	// showWithin the turn comes to each of them.
	showEvery  = time.Minute
	showWithin = 2 * time.Minute
	// recoveryMargin is by how much the use of a sandbox may be later than what its
	// object shows: clocks of allocators may each be off by ten minutes, one ahead and the
	// other behind, and objects lag behind by showEvery, showWithin and the write.
	recoveryMargin = 25 * time.Minute
	// pongsKept bounds the pongs of a session whose times are remembered.
	pongsKept = 64
)

// reaping is where a sandbox is on its way to being released for being idle.
type reaping int

const (
	notDue  reaping = iota
	asked           // it is in a round, or waits for one
	decided         // its release is on its way
)

// lastUse is what is known of the use of a sandbox.
type lastUse struct {
	at     time.Duration // the newest that is known of, on the boot clock
	kind   activity.Kind
	router string // that has reported it
	open   int
	// told is its number among those that routers were told of; 0: they were not.
	told    uint64
	reaping reaping
	// notBefore is when it may be asked about again, and prober the stream whose router
	// probes it until then; 0: none.
	notBefore time.Duration
	prober    uint64
	shownAt   time.Duration // when its object was written last for this
}

// leftover is what a router that has ended may have left open at its Envoy: sandboxes up to
// the number upTo, and those of shown. It counts as in use until a router beside the same
// Envoy has begun a look after the end was known, or the one that has ended would have
// expired.
type leftover struct {
	session, gateway string
	since, until     time.Duration
	upTo             uint64
	shown            map[*sandbox]struct{}
}

func (l *leftover) holds(s *sandbox) bool {
	_, shown := l.shown[s]
	return shown || s.told <= l.upTo
}

// ponged is a pong and when it was sent.
type ponged struct {
	nonce uint64
	at    time.Duration
}

// settling is the end of a router that may have left something open. The journal keeps it
// for the next leader until that is over and the objects show it.
type settling struct {
	at     time.Duration
	settle Settle
}

// reaper is the part of the Core that is about activity.
type reaper struct {
	due       []*sandbox // that wait for a round
	round     []*sandbox // that routers are asked about
	rounds    uint64     // the number of the last round
	until     time.Duration
	nextRound time.Duration
	probes    int // in this tick
	leftovers []*leftover
	settlings []settling // in the order of time
	told      uint64     // how many sandboxes routers were told of
	// shown is the sandbox whose turn it was last to be shown, and showNext when it comes to
	// the next one.
	shown    Mark
	showNext time.Duration
}

// idleAt is when a sandbox will have been idle for long enough; ok is false if that
// never comes, or not before a call about it has been answered. What was admitted a window
// ago shows in a look, if it is open.
func (c *Core) idleAt(s *sandbox) (at time.Duration, ok bool) {
	least := c.cfg.Window
	if s.MinBytes > 0 {
		least = max(least, bytesLeast)
	}
	return s.at + max(s.IdleTimeout, least), s.Phase == Running && s.IdleTimeout > 0 && s.changing == 0
}

// note remembers that a sandbox was in use, and returns whether that is news.
func (c *Core) note(s *sandbox, at time.Duration, kind activity.Kind) bool {
	if s.Phase != Starting && s.Phase != Running || at < s.at {
		return false
	}
	s.at, s.kind, s.router, s.open = at, kind, "", 0
	return true
}

// begin notes that a sandbox has begun to run: routers are told of it from now on.
func (c *Core) begin(s *sandbox) {
	c.told++
	s.told, s.at, s.kind, s.shownAt = c.told, c.now.Boot, activity.Claim, c.now.Boot
	c.schedule(s)
}

// recoverActivity notes what an earlier leader has left on the object of a running
// sandbox. It may have been used later, through routers that expire without a word.
func (c *Core) recoverActivity(s *sandbox) {
	c.begin(s)
	last := s.ClaimedAt
	if s.LastActive.After(last) {
		last, s.kind = s.LastActive, activity.Record
	}
	s.at = min(c.now.Boot, c.bootOf(last)+recoveryMargin+2*c.expiry())
}

// tracked takes what a router says of one sandbox.
func (c *Core) tracked(s *session, a Activity) {
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
	if a.ID == "" && sb.MinBytes > 0 { // whether bytes move is not known without its route
		return
	}
	if c.note(sb, max(0, c.now.Boot-a.Age), a.Kind) {
		sb.router, sb.open = s.id, a.Open
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

// report takes what a router says after a look. Each report names all that is in use, in
// one or more parts; only the last one says how the look went.
func (c *Core) report(ev Report) {
	s := c.streams[ev.Stream]
	if s == nil || !s.durable {
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

// looked lets go of what routers have left open at an Envoy that another one has looked
// at since: what is open still was reported with that look.
func (c *Core) looked(s *session, nonce uint64) {
	i := slices.IndexFunc(s.pongs, func(p ponged) bool { return p.nonce == nonce })
	for _, l := range c.leftovers {
		if i >= 0 && s.pongs[i].at > l.since && s.gateway == l.gateway {
			l.until = c.now.Boot
		}
	}
	c.expireLeftovers()
}

// expireLeftovers lets go of what has been waited for long enough. It may have been in use
// until now.
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

// leaves is what a session that ends may leave open, nil for nothing. looked: its last
// report shows that; else it is all that it could serve.
func (c *Core) leaves(s *session, looked bool) *leftover {
	l := &leftover{session: s.id, gateway: s.gateway, since: c.now.Boot, until: s.lastPing + c.expiryOf(s)}
	switch {
	case !looked:
		l.upTo = min(s.knows, c.told)
	case len(s.shown) == 0:
		return nil
	default:
		l.shown = s.shown
	}
	return l
}

// settleLater has the journal keep an end that is durable.
func (c *Core) settleLater(s Settle) {
	c.settlings = append(c.settlings, settling{c.now.Boot + c.expiry() + showEvery + showWithin, s})
}

func (c *Core) settleEnds() {
	for len(c.settlings) > 0 && c.settlings[0].at <= c.now.Boot {
		c.emit(c.settlings[0].settle)
		c.settlings = c.settlings[1:]
	}
}

// askable reports whether a session can be asked what is idle.
func (s *session) askable() bool { return s.stream != 0 && s.durable && s.blind == "" }

// awaited lists the sessions, by ID, without whose word a sandbox is not released for
// being idle, at most so many. One that is connected may know of use of any sandbox, also
// if it has been told nothing: it may have expired for this leader with something open.
func (c *Core) awaited(sb *sandbox, most int) (list []string) {
	for _, s := range c.byID {
		if len(list) < most && !s.askable() && sb.told <= s.knows {
			list = append(list, s.id)
		}
	}
	for _, l := range c.leftovers {
		if len(list) < most && l.holds(sb) {
			list = append(list, l.session)
		}
	}
	return list
}

// comes acts on a sandbox for which a moment has come.
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

// probe has the pod of a sandbox that is due asked whether it is busy, and returns false
// if that need not be known.
func (c *Core) probe(s *sandbox) bool {
	if !c.isProbed(s) {
		return false
	}
	p := c.pools[s.Pool]
	s.notBefore, s.prober = c.now.Boot+askAgain, 0
	for i := range c.byID { // one after the other, for each sandbox
		r := c.byID[(int(s.told)+int(c.now.Boot/probeWait)+i)%len(c.byID)]
		if r.askable() && c.probes < probesMost {
			c.probes++
			s.notBefore, s.prober = c.now.Boot+probeWait, r.stream
			c.emit(SendProbe{Stream: r.stream, ID: s.ID, To: netip.AddrPortFrom(s.IP, p.BusyProbe.Port), Path: p.BusyProbe.Path})
			break
		}
	}
	return true
}

// isProbed reports whether the pod of a sandbox is asked whether it is busy. The pool may
// have got its probe after the claim: a pod that always says that it is busy ends only if
// the claim has fixed an end for it.
func (c *Core) isProbed(s *sandbox) bool {
	p := c.pools[s.Pool]
	return p != nil && p.BusyProbe.Port != 0 && !s.LifetimeEnd.IsZero()
}

// probed takes what a pod has answered.
func (c *Core) probed(ev Probed) {
	s := c.sandboxes[ev.ID]
	switch {
	case s == nil || s.prober != ev.Stream || s.reaping != notDue: // it came late
	case ev.Busy:
		s.prober, s.notBefore = 0, 0
		c.note(s, c.now.Boot, activity.Busy)
		c.schedule(s)
	default:
		s.prober, s.notBefore = 0, c.now.Boot+probeWait+roundsMost // so long the answer holds
		c.pass(s)
	}
}

// pass has a sandbox whose pod is not busy asked about in the next round.
func (c *Core) pass(s *sandbox) {
	s.reaping = asked
	c.due = append(c.due, s)
}

// ask begins a round, if there is none and something is due. A verdict has to become
// durable at once, because requests are held meanwhile: while the journal does not
// answer nothing is asked.
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
		c.emit(SendQuiesce{Stream: s.stream, Number: c.rounds, Questions: questions})
	}
	c.until, c.nextRound = c.now.Boot+answerWait, c.now.Boot+min(roundsApart*took, roundsMost)
	c.judge()
}

// connected lists the sessions that a round is about: while one is connected that cannot
// be asked there is none.
func (c *Core) connected() (all []*session) {
	for _, s := range c.byID {
		if s.stream != 0 && s.durable {
			all = append(all, s)
		}
	}
	return all
}

// quiesced takes the answer of a router.
func (c *Core) quiesced(ev Quiesced) {
	s := c.streams[ev.Stream]
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

// endRound ends the round, if there is one. sure: what is known is all that there is to
// know. Else a session has come or gone, or cannot tell, and it is asked again after a pause.
func (c *Core) endRound(sure bool) {
	round := c.round
	c.round = nil
	var resumed []string
	for _, s := range round {
		s.reaping = notDue
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
		c.emit(SendResume{Stream: s.stream, IDs: resumed})
	}
}

// unanswered is why a router that has not answered in time cannot be asked.
const unanswered = "it did not answer in time"

// expireRound ends the round when the time for answers is over. A router that has not
// answered is asked again when it has, or when its next report shows that it can tell.
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

// showSome writes the activity of the next sandboxes to their objects. Each gets its turn,
// and no more is written than the rate allows.
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
		if s.Phase != Running || s.IdleTimeout <= 0 || s.changing > 0 || s.recorded.Less(s.Revision) ||
			c.now.Boot-s.shownAt < showEvery || active.Sub(s.LastActive) < time.Second {
			continue
		}
		s.LastActive, s.shownAt = active, c.now.Boot
		c.counter++
		s.Revision = Revision{c.cfg.Term, c.counter}
		c.emit(Record{Sandbox: s.Sandbox, Touch: true})
	}
}
