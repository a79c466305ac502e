package core

import (
	"slices"
	"strings"
	"time"
)

// How a sandbox is released for being idle, and never while it is in use.
//
// What is known of its activity comes from reports, calls and earlier questions, and is
// a lower bound: it only says when to ask. When its idle timeout has passed since then,
// every session that could route to it is asked (SendQuiesce). A router that has been
// asked admits no request for the sandbox until it is told (SendResume, SendRelease, a
// snapshot), and answers what it knows. The sandbox is released if every one of them
// has answered within Config.QuiesceWait, is in no doubt, and knows of nothing that was
// in progress within the idle timeout. In every other case all of them are told to go
// on. From the verdict on nobody is told of the sandbox any more.
//
// A session that is not connected, or has not reported since, cannot be asked. What it
// could serve is not released while it may serve it: until it has joined and reported,
// or has ended. When it has ended without a Goodbye that was sure of what it had
// reported, everything that it could serve was active until that moment.
//
// What a router knew to be in use when it said Goodbye may go on at its Envoy, and end
// there, with nobody to see it until another router stands beside that Envoy. So it
// counts as in use for as long as a router without a Goodbye would be waited for; and so
// does everything if that router was in doubt. If its Envoy has ended before, nothing
// goes on.
//
// Questions are asked in rounds, one at a time: all that is due, in one message to each
// router.

const (
	// roundMost bounds the sandboxes that one round asks about.
	roundMost = 500
	// askAgain is the pause after a round that came to nothing.
	askAgain = 250 * time.Millisecond
	// doubtMost is for how long a router that is in doubt, or does not know yet, can put a
	// question off at a time. It may have ended before that would.
	doubtMost = time.Minute
	// muteMost is how long a router that is connected may leave questions unanswered
	// before its stream is closed, and cutsMost how often in a row that helps: after that
	// it is not let in again before it has expired, which ends what it could serve.
	muteMost = 5 * time.Second
	cutsMost = 3
	// muteGap is the longest pause between two questions without an answer that count as
	// one silence. What was not answered is asked again after askAgain, if it is still due.
	muteGap = time.Second
	// reapHold is how long a request may wait for a sandbox whose release is on its way
	// into the journal.
	reapHold = 5 * time.Second
	// showEvery is how often the activity of one sandbox is written to its object, at
	// most, and showStep by how much it must have moved.
	showEvery = time.Minute
	showStep  = time.Second
	// showWithin is in how long all that wait get their turn, if showRate, the writes
	// each second that are always allowed, is not enough.
	showWithin = 2 * time.Minute
	showRate   = 50
	// recoveryMargin is by how much what a new leader reads of activity may be older
	// than what its predecessor knew: clocks of allocators may each be off by ten minutes,
	// one ahead and the other behind, and the objects lag behind, by showEvery, showWithin
	// and what the projection takes. See Core.recoveryMargin.
	recoveryMargin = 25 * time.Minute
	// reportedParts: a router reports the use of a sandbox when it has moved by this part
	// of the idle timeout (package lastactive).
	reportedParts = 4
)

// reaping is where a sandbox is on its way to being released for being idle.
type reaping int

const (
	notDue  reaping = iota
	blocked         // due, and a session that could serve it cannot be asked
	toAsk           // due, and waits for its round
	asked
	decided // its release is on its way
)

// activity is what is known of the use of a sandbox.
type activity struct {
	at     time.Duration // the newest that is known of, on the boot clock; it may be to come
	source ActivitySource
	router string
	open   int
	// told is its number among those that routers were told of; 0: they were not.
	told    uint64
	reaping reaping
	// notBefore is when it may be asked about again.
	notBefore time.Duration
	// shownAt is when its object was written last for this, showing that it waits for
	// its turn.
	shownAt time.Duration
	showing bool
}

// round is a question to all routers about sandboxes that are due.
type round struct {
	number    uint64
	sandboxes []*sandbox
	asked     []questioned
	waiting   map[*session]struct{} // those that have not answered
	deadline  time.Duration
	doubt     time.Duration
}

// questioned is a session and the stream on which it was asked.
type questioned struct {
	session *session
	stream  uint64
}

// reaper is the part of the Core that is about activity.
type reaper struct {
	round   *round
	rounds  uint64
	blocked []*sandbox
	toAsk   []*sandbox
	told    uint64 // how many sandboxes routers were told of
	// Everything up to number floorTold was active at floorAt, for all that is known.
	floorAt   time.Duration
	floorTold uint64
	// recoveredAt is when this leader has read what there was.
	recoveredAt time.Duration
	// waitShow are those whose objects are to be written for their activity, in the order in
	// which they came.
	waitShow []*sandbox
	showNext time.Duration
}

// activeAt is the newest activity of a sandbox, for all that is known.
func (c *Core) activeAt(s *sandbox) (at time.Duration, from ActivitySource) {
	if s.told != 0 && s.told <= c.floorTold && s.at < c.floorAt {
		return c.floorAt, Doubted
	}
	return s.at, s.source
}

// idleAt is when a sandbox will have been idle for long enough; ok is false if that
// never comes, or not before a call about it has been answered.
func (c *Core) idleAt(s *sandbox) (at time.Duration, ok bool) {
	if s.Phase != Running || s.IdleTimeout <= 0 || s.changing > 0 {
		return 0, false
	}
	at, _ = c.activeAt(s)
	return at + c.idleTimeout(s), true
}

func (c *Core) idleTimeout(s *sandbox) time.Duration { return max(s.IdleTimeout, c.cfg.ActivityWindow) }

// note remembers that a sandbox was active.
func (c *Core) note(s *sandbox, at time.Duration, from ActivitySource, router string, open int) {
	if s.Phase != Starting && s.Phase != Running {
		return
	}
	if at < s.at {
		if s.at > c.now.Boot { // what is known is to come, and the object shows what was
			c.show(s)
		}
		return
	}
	s.at, s.source, s.router, s.open = at, from, router, open
	c.show(s)
}

// begin notes that a sandbox has begun to run: routers are told of it from now on.
func (c *Core) begin(s *sandbox) {
	c.told++
	s.told = c.told
	s.at, s.source, s.shownAt = c.now.Boot, Began, c.now.Boot
	c.schedule(s)
}

// recoveryMargin is by how much what a new leader reads of a sandbox's activity may be
// older than what was so. Routers that are still there tell the rest. Of one that ended in
// an earlier term only its predecessor knew that everything was active until then, or
// counted as active for max-stale longer, and what it had reported was older: by what it
// need not report, and by all the time in which it served without being connected.
func (c *Core) recoveryMargin(s *sandbox) time.Duration {
	return recoveryMargin + s.IdleTimeout/reportedParts + 2*c.expiry()
}

// recoverActivity notes what an earlier leader has left on the object of a running
// sandbox.
func (c *Core) recoverActivity(s *sandbox) {
	c.told++
	s.told = c.told
	last, from := s.ClaimedAt, Began
	if s.LastActive.After(last) {
		last, from = s.LastActive, OnRecord
	}
	s.at, s.source, s.shownAt = min(c.now.Boot, c.bootOf(last)+c.recoveryMargin(s)), from, c.now.Boot
}

// tracked takes what a router says of one sandbox.
func (c *Core) tracked(a Activity, router string, from ActivitySource) {
	s := c.sandboxes[a.ID]
	switch {
	case s == nil:
	case from == Asked && a.Settles > 0 && (s.BytesOnly || a.Open == 0):
		// What it will have been is known then, and not before.
		s.notBefore = max(s.notBefore, c.now.Boot+min(a.Settles, doubtMost))
	default:
		c.note(s, max(0, c.now.Boot-s.ageOf(a)), from, router, a.Open)
	}
}

// ageOf is the age that counts.
func (s *sandbox) ageOf(a Activity) time.Duration {
	if s.BytesOnly {
		return a.Quiet
	}
	return a.Age
}

func (c *Core) report(ev Report) {
	s := c.streams[ev.Stream]
	if s == nil || !s.durable {
		return
	}
	for _, a := range ev.Activities {
		c.tracked(a, s.id, Reported)
		if sb := c.sandboxes[a.ID]; sb != nil && ev.Handover && (a.Open > 0 || a.Age == 0) {
			c.note(sb, c.now.Boot+c.expiry(), Doubted, "", 0)
		}
	}
	if ev.Complete && !s.reported {
		s.reported = true
		c.unblock()
	}
}

// askable reports whether a session can be asked what is idle.
func (s *session) askable() bool { return s.stream != 0 && s.durable && s.quiesces && s.reported }

// couldServe reports whether a session may know of use of a sandbox. One that is not
// durable yet has been told nothing, and may be a router that had expired for this leader:
// what is open at its Envoy it will tell.
func (s *session) couldServe(sb *sandbox) bool { return s.stream != 0 || sb.told <= s.knows }

// awaited lists the sessions, by ID, without whose word a sandbox is not released for
// being idle, at most so many.
func (c *Core) awaited(sb *sandbox, most int) (list []*session) {
	for _, s := range c.byID {
		if len(list) == most {
			break
		}
		if !s.askable() && s.couldServe(sb) {
			list = append(list, s)
		}
	}
	return list
}

// due acts on a sandbox for which a moment has come.
func (c *Core) due(s *sandbox) {
	if at, reason := s.ends(); reason != "" && at <= c.now.Boot {
		c.startRelease(s, reason)
		return
	}
	if at, ok := c.idleAt(s); ok && s.reaping == notDue && max(at, s.notBefore) <= c.now.Boot {
		s.reaping = toAsk
		c.toAsk = append(c.toAsk, s)
	}
	c.schedule(s)
}

// unblock looks again at what could not be asked about.
func (c *Core) unblock() {
	for _, s := range c.blocked {
		if s.reaping == blocked {
			s.reaping = toAsk
			c.toAsk = append(c.toAsk, s)
		}
	}
	clear(c.blocked)
	c.blocked = c.blocked[:0]
}

// forgetBlocked lets go of those that were released while they could not be asked about: a
// router of an earlier version may stay for weeks.
func (c *Core) forgetBlocked() {
	for _, s := range c.blocked {
		if s.Phase != Running {
			s.reaping = notDue
		}
	}
	c.blocked = slices.DeleteFunc(c.blocked, func(s *sandbox) bool { return s.reaping != blocked })
}

// ask begins a round, if there is none and something is due. A verdict has to become
// durable at once, because requests are held meanwhile: while the journal does not
// answer nothing is asked.
func (c *Core) ask() {
	for c.round == nil && len(c.toAsk) > 0 && !c.closing && !c.journalStands() {
		var all []*sandbox
		n := 0
		for _, s := range c.toAsk {
			if len(all) == roundMost {
				break
			}
			n++
			if s.reaping != toAsk {
				continue // it was released
			}
			switch at, ok := c.idleAt(s); {
			case !ok || max(at, s.notBefore) > c.now.Boot: // it was active since
				s.reaping = notDue
				c.schedule(s)
			case len(c.awaited(s, 1)) > 0:
				s.reaping = blocked
				if len(c.blocked) == cap(c.blocked) {
					c.forgetBlocked()
				}
				c.blocked = append(c.blocked, s)
			default:
				s.reaping = asked
				all = append(all, s)
			}
		}
		rest := copy(c.toAsk, c.toAsk[n:])
		clear(c.toAsk[rest:])
		c.toAsk = c.toAsk[:rest]
		if len(all) > 0 {
			c.begins(all)
		}
	}
}

func (c *Core) begins(all []*sandbox) {
	c.rounds++
	r := &round{number: c.rounds, sandboxes: all, waiting: map[*session]struct{}{}, deadline: c.now.Boot + c.cfg.QuiesceWait}
	c.round = r
	var ids []string
	for _, s := range all {
		ids = append(ids, s.ID)
	}
	for _, s := range c.byID {
		if s.askable() {
			r.asked = append(r.asked, questioned{s, s.stream})
			r.waiting[s] = struct{}{}
			c.emit(SendQuiesce{Stream: s.stream, Number: r.number, IDs: ids})
		}
	}
	c.judge()
}

// quiesced takes the answer of a router.
func (c *Core) quiesced(ev Quiesced) {
	s, r := c.streams[ev.Stream], c.round
	if s != nil && ev.Number <= c.rounds {
		// Late or not, it is not mute. It may be this leader that is slow, and all routers
		// would be sent away at once.
		s.muteSince, s.cuts = 0, 0
	}
	if s == nil || r == nil || ev.Number != r.number || c.now.Boot > r.deadline {
		return
	}
	if _, waits := r.waiting[s]; !waits {
		return
	}
	for _, a := range ev.Activities {
		c.tracked(a, s.id, Asked)
	}
	r.doubt = max(r.doubt, ev.Doubt)
	delete(r.waiting, s)
	c.judge()
}

// judge ends the round if everybody has answered.
func (c *Core) judge() {
	if len(c.round.waiting) == 0 {
		c.endRound(c.round.doubt, c.round.doubt == 0)
	}
}

// endRound ends the round. sure: what is known is all that there is to know. Else it is
// asked again after a pause.
func (c *Core) endRound(pause time.Duration, sure bool) {
	r := c.round
	c.round = nil
	var resumed []string
	for _, s := range r.sandboxes {
		if s.reaping != asked {
			continue // it was released meanwhile, which routers are about to be told
		}
		s.reaping = notDue
		switch at, ok := c.idleAt(s); {
		case !sure:
			s.notBefore = max(s.notBefore, c.now.Boot+min(max(pause, askAgain), doubtMost))
		case !ok || c.now.Boot < max(at, s.notBefore): // it is in use, or was until now, or may be
		case c.cfg.DryRun:
			s.notBefore = c.now.Boot + c.idleTimeout(s)
			c.emit(WouldReap{Sandbox: s.Sandbox, Idle: c.now.Boot - at + c.idleTimeout(s)})
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
	for _, q := range r.asked {
		if q.session.stream == q.stream { // else a snapshot resumes it
			c.emit(SendResume{Stream: q.stream, IDs: resumed})
		}
	}
}

// abortRound ends the round without a verdict: a session has come or gone, and what it
// does now was not asked.
func (c *Core) abortRound() {
	if c.round != nil {
		c.endRound(askAgain, false)
	}
}

// expireRound ends the round when the time for answers is over.
func (c *Core) expireRound() {
	r := c.round
	if r == nil || c.now.Boot < r.deadline {
		return
	}
	c.endRound(askAgain, false)
	for _, q := range r.asked {
		s := q.session
		if _, mute := r.waiting[s]; !mute || s.stream != q.stream {
			continue
		}
		began := r.deadline - c.cfg.QuiesceWait
		if s.muteSince == 0 || began-s.missedAt > muteGap {
			s.muteSince = began
		}
		s.missedAt = c.now.Boot
		if c.now.Boot-s.muteSince >= muteMost {
			s.cuts++
			c.emit(RouterMute{Session: s.id, From: s.from, Banned: s.cuts >= cutsMost})
			c.emit(CloseStream{Stream: s.stream})
			c.disconnect(s)
		}
	}
}

// disconnect notes that a session's stream is gone. It may serve what it knows.
func (c *Core) disconnect(s *session) {
	delete(c.streams, s.stream)
	s.stream, s.pending, s.reported, s.muteSince, s.knows = 0, nil, false, 0, c.told
	c.abortRound()
	c.eachFence(c.answerReleases)
}

// sessionOver notes what the end of a session means for what it could serve: that it was
// in use until then, or nothing, if the session has reported what was.
func (c *Core) sessionOver(s *session, inUse time.Duration) {
	c.abortRound()
	if inUse > 0 {
		c.floorAt, c.floorTold = max(c.floorAt, inUse), max(c.floorTold, s.knows)
	}
	c.unblock()
}

// ---- what people see

// show has the activity of a sandbox written to its object, if it is time.
func (c *Core) show(s *sandbox) {
	if s.showing || s.IdleTimeout <= 0 || s.Phase != Running || c.now.Boot-s.shownAt < showEvery {
		return
	}
	s.showing = true
	c.waitShow = append(c.waitShow, s)
}

// showSome writes the activity of those that have waited longest. Nobody is passed
// over, and no more is written than the rate allows.
func (c *Core) showSome() {
	if len(c.waitShow) == 0 {
		return
	}
	rate := max(showRate, len(c.waitShow)*int(time.Second)/int(showWithin))
	pause := time.Second / time.Duration(rate)
	c.showNext = max(c.showNext, c.now.Boot-100*time.Millisecond) // what was not used is lost
	n := 0
	for ; n < len(c.waitShow) && c.showNext <= c.now.Boot && !c.pressure; n++ {
		s := c.waitShow[n]
		s.showing = false
		at, _ := c.activeAt(s)
		active := c.now.Wall.Add(min(at-c.now.Boot, 0)).Truncate(time.Microsecond)
		if s.Phase != Running || s.changing > 0 || active.Sub(s.LastActive) < showStep {
			continue
		}
		s.LastActive, s.shownAt = active, c.now.Boot
		c.revise(s)
		c.showNext += pause
	}
	rest := copy(c.waitShow, c.waitShow[n:])
	clear(c.waitShow[rest:])
	c.waitShow = c.waitShow[:rest]
}

// Activities lists the live sandboxes for which keep returns true, by ID, at most so
// many, and says how many more there are.
func (c *Core) Activities(keep func(id string) bool, most int) (list []ActivityStatus, others int) {
	byID := func(a, b *sandbox) int { return strings.Compare(a.ID, b.ID) }
	// There may be very many, and everybody waits for this: only the first are sorted.
	var first []*sandbox
	n := 0
	var last string // of the first, if there are enough
	cut := func(to int) {
		slices.SortFunc(first, byID)
		if first = first[:min(to, len(first))]; len(first) == most && most > 0 {
			last = first[most-1].ID
		}
	}
	for id, s := range c.sandboxes {
		if s.Phase != Starting && s.Phase != Running || s.lost || !keep(id) {
			continue
		}
		n++
		if last != "" && id > last {
			continue
		}
		if first = append(first, s); len(first) >= 2*most+1000 {
			cut(most)
		}
	}
	cut(most)
	for _, s := range first {
		list = append(list, c.activityOf(s))
	}
	return list, n - len(list)
}

func (c *Core) activityOf(s *sandbox) ActivityStatus {
	at, from := c.activeAt(s)
	st := ActivityStatus{Sandbox: s.Sandbox, Age: max(0, c.now.Boot-at), Source: from}
	if from == Reported || from == Asked {
		st.Router, st.Open = s.router, s.open
	}
	end, reason := s.ends()
	if idle, ok := c.idleAt(s); ok {
		if reason == "" || idle < end {
			end, reason = idle, ReasonIdle
		}
		for _, x := range c.awaited(s, awaitedMost) {
			st.Awaits = append(st.Awaits, x.id)
		}
	}
	if reason != "" {
		st.Next, st.In = reason, max(0, end-c.now.Boot)
	}
	return st
}
