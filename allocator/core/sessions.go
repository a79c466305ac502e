package core

import (
	"slices"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/core/fence"
	"github.com/berth-sandbox/berth/allocator/core/idle"
	"github.com/berth-sandbox/berth/allocator/core/member"
	"github.com/berth-sandbox/berth/allocator/core/sandboxes"
	"github.com/berth-sandbox/berth/allocator/core/step"
)

// expiry is how long after the receipt of its last ping a router with this max-stale counts as
// serving its routes: that max-stale, or the one of the allocators if it is longer, and 1 % for
// clocks that run at different speeds. Every egress router has said its own, so that one counts alone, and it gets
// egressEnds.
func (c Config) expiry(maxStale time.Duration, egress bool) time.Duration {
	if egress {
		return maxStale + maxStale/100 + egressEnds
	}
	longer := max(maxStale, c.MaxStale)
	return longer + longer/100
}

// egressEnds is what an egress router may take, once its rules are stale, to notice that and to end what it has admitted,
// and Envoy to close the connections. New rules are answered when its session has expired, with no window after that.
const egressEnds = 2 * time.Second

// routers sends the routers their messages, and keeps the ledgers in step that know their sessions.
type routers struct {
	*step.Current
	cfg       *Config
	outbox    *fact.Outbox
	sandboxes *sandboxes.Table
	members   *member.Ledger
	fences    *fence.Ledger
	closings  *fence.Ledger
	// rulings has new rules by the token of the call that waits for them, as text: egress routers acknowledge them.
	rulings *fence.Ledger
	idle    *idle.Ledger
	// changed are the sandboxes whose fences may wait for less than when advanceFences looked last. closed are those
	// whose closings may, for advanceClosings, and ruled the names of the rulings that may, for advanceRulings.
	changed, closed, ruled []string
	// longest is the longest max-stale of all routers that this leader knows or has known.
	longest time.Duration
	// ends are kept by the journal.
	ends []journaledEnd
	// earlierEnds is called before the last session of an earlier journal ends.
	earlierEnds func()
}

// join connects a router. A router that was declared dead may not join. A declaration that was not
// handed to the writer is withdrawn, because the router lives.
func (r *routers) join(ev SessionJoined) {
	if !ev.Egress { // use through it is unseen for as long as its routes are fresh
		r.longest = max(r.longest, ev.MaxStale)
	}
	ok, banned, withdrawn := r.members.MayJoin(ev.Session, ev.Gateway, ev.Egress)
	for _, token := range withdrawn {
		r.Emit(DeadDeclared{Token: token, Status: DeclareConnected})
	}
	if !ok { // unless it is banned it tries again, and learns the reason then
		r.Emit(CloseStream{Stream: ev.Stream, Banned: banned})
		return
	}
	if s := r.members.Get(ev.Session); s != nil && r.members.Learn(s, ev.MaxStale, ev.Gateway) {
		// An earlier version has not journaled what the router says of itself. The router gets nothing
		// before that is durable: it tries again.
		f := r.factOf(s)
		f.From = s.From
		r.outbox.Commit(r.Now.Boot, f, true, func(Revision, time.Duration) { r.members.Learned(s) })
		r.Emit(CloseStream{Stream: ev.Stream})
		return
	}
	if s := r.members.Get(ev.Session); s != nil && s.Stream != 0 {
		r.Emit(CloseStream{Stream: s.Stream})
		r.disconnect(s)
	}
	if !ev.Egress {
		r.resume(r.idle.Joined(ev.Session, r.Now.Boot))
	}
	s, isNew := r.members.Join(ev.Session, ev.From, ev.MaxStale, ev.Gateway, ev.Egress, ev.Stream, r.Now.Boot)
	if isNew {
		// The session must be durable before the router receives a route, because the next
		// leader must wait for every router that has one, for as long as its own max-stale.
		f := r.factOf(s)
		f.From = ev.From
		r.outbox.Commit(r.Now.Boot, f, true, func(Revision, time.Duration) {
			if r.members.Recorded(s) {
				r.welcome(s)
			}
		})
	}
	if s.Durable {
		r.welcome(s)
	}
}

// factOf begins a fact about a session. Each one has the max-stale of the router, because its end
// and its declaration outlast the fact of its begin, and the gateway, because it may replace that fact.
func (r *routers) factOf(s *member.Session) *SessionFact {
	f := &SessionFact{ID: s.ID, MaxStale: s.MaxStale, Assumed: s.Assumed, Gateway: s.Gateway, Egress: s.Egress}
	f.Longer = r.isLonger(f)
	return f
}

// isLonger reports whether an allocator that does not know the max-stale of a session must not lead.
func (r *routers) isLonger(f *SessionFact) bool { return f.MaxStale > r.cfg.MaxStale && !f.Assumed }

// know makes a session known whose router is not connected to this leader.
func (r *routers) know(s member.Session) *member.Session {
	if !s.Egress {
		r.resume(r.idle.Known(s.ID, r.Now.Boot))
	}
	return r.members.Add(s)
}

// recover restores a session of an earlier term, its end, or its declaration.
func (r *routers) recover(f *SessionFact, revision Revision) {
	if r.isLonger(f) && !f.Longer { // the value of the allocators was lowered since
		longer := *f
		longer.Longer = true
		revision = r.outbox.Commit(r.Now.Boot, &longer, true, func(Revision, time.Duration) {}).Revision()
	}
	switch {
	case f.Declared != nil:
		r.members.Ban(f.ID, revision, 0, r.Now.Boot+r.cfg.expiry(f.MaxStale, f.Egress))
	case f.Left && f.Egress:
		r.settleEnd(f.ID, revision, false)
	case f.Left: // the objects may not show yet what it left open
		r.idle.Known(f.ID, r.Now.Boot)
		r.idle.End(f.ID, false, r.Now.Boot+r.cfg.expiry(f.MaxStale, false), r.Now.Boot)
		r.settleEnd(f.ID, revision, true)
	default:
		r.know(member.Session{
			ID: f.ID, From: f.From, Durable: true, Earlier: f.Earlier, MaxStale: f.MaxStale, Assumed: f.Assumed, Gateway: f.Gateway, Egress: f.Egress,
			LastPing: r.Now.Boot + r.cfg.Lease,
		})
	}
}

// welcome sends a router the snapshot of all that it has.
func (r *routers) welcome(s *member.Session) {
	routes := r.sandboxes.Routable()
	if s.Egress {
		routes = slices.DeleteFunc(routes, func(sb Sandbox) bool { return !s.Has(sb.Agent) })
	}
	sequence := r.members.FirstSequence(s)
	r.fences.SentSnapshot(s.ID, sequence)
	r.closings.SentSnapshot(s.ID, sequence)
	r.rulings.SentSnapshot(s.ID, sequence)
	r.Emit(SendSnapshot{Stream: s.Stream, Sequence: sequence, Routes: routes})
	r.pong(s)
}

// pong answers the last ping of a router if it can be answered now. It keeps the time, so that a
// look of the router that names this pong is known to have begun after now.
func (r *routers) pong(s *member.Session) {
	if nonce, ok := r.members.Pong(s); ok {
		r.Emit(SendPong{Stream: s.Stream, Nonce: nonce, Keep: r.members.Reports(s)})
		if !s.Egress {
			r.idle.Ponged(s.ID, nonce)
		}
	}
}

func (r *routers) left(ev SessionLeft) {
	if s := r.members.OfStream(ev.Stream); s != nil && s.ID == ev.Session {
		r.disconnect(s)
		if by, ok := r.members.Reported(s); ok {
			r.dead(SessionDead{Session: s.ID, By: by, Gateway: s.Gateway})
		}
	}
}

// disconnect notes that the stream of a session has ended. The router may serve its routes until
// the session expires.
func (r *routers) disconnect(s *member.Session) {
	r.members.Disconnect(s)
	r.fences.Disconnected(s.ID)
	r.closings.Disconnected(s.ID)
	r.rulings.Disconnected(s.ID)
	if !s.Egress {
		r.resume(r.idle.Left(s.ID, r.Now.Boot))
	}
	r.changed = slices.AppendSeq(r.changed, r.fences.UnderWay()) // callers of Release may not wait for it
}

// goodbye ends the session of a router that leaves cleanly. Its stream is closed when the end is
// durable.
func (r *routers) goodbye(ev SessionGoodbye) {
	s, here := r.members.Goodbye(ev.Session, ev.Gateway, ev.Egress, ev.Stream, r.Now.Boot)
	if s == nil {
		return
	}
	var mayBeOpen bool
	f := r.factOf(s)
	f.Left = true
	r.outbox.Commit(r.Now.Boot, f, true, func(revision Revision, _ time.Duration) {
		r.settleEnd(s.ID, revision, mayBeOpen)
		if ev.Stream != 0 {
			r.Emit(CloseStream{Stream: ev.Stream, Left: true})
		}
	})
	mayBeOpen = r.end(s, ev.Looked && here, r.members.ExpiresAt(s))
}

// dead ends the session of a router whose process another router has proven to have ended, or keeps the
// report until the stream of the session has ended.
func (r *routers) dead(ev SessionDead) {
	s, by := r.members.Dead(ev.Session, ev.By, ev.Gateway, r.Now.Boot)
	if s == nil {
		return
	}
	r.ending(s)
	f := r.factOf(s)
	f.Left = true
	r.outbox.Commit(r.Now.Boot, f, by != nil, func(revision Revision, _ time.Duration) {
		r.settleEnd(s.ID, revision, true)
		if by != nil {
			r.members.DeathRecorded(by)
			r.pong(by)
		}
	})
	r.end(s, false, r.members.ExpiresAt(s))
}

func (r *routers) ping(ev SessionPing) {
	if s := r.members.Ping(ev.Stream, ev.Nonce, r.Now.Boot); s != nil {
		r.pong(s)
	}
}

func (r *routers) acknowledge(ev SessionAck) {
	if s := r.members.Acknowledge(ev.Stream, ev.Sequence); s != nil {
		r.changed = append(r.changed, r.fences.Acknowledge(s.ID, ev.Sequence)...)
		r.closed = append(r.closed, r.closings.Acknowledge(s.ID, ev.Sequence)...)
		r.ruled = append(r.ruled, r.rulings.Acknowledge(s.ID, ev.Sequence)...)
	}
}

// expire ends a session whose routes must be stale, as far as this leader knows. If it was deposed, the router may
// have heard a later leader. So the session ends when that is durable.
func (r *routers) expire(s *member.Session) {
	r.ending(s)
	if s.Stream != 0 {
		r.Emit(CloseStream{Stream: s.Stream})
		r.disconnect(s)
	}
	f := r.factOf(s)
	f.Left = true
	r.outbox.Commit(r.Now.Boot, f, true, func(revision Revision, _ time.Duration) { // the router may wait to join
		if !s.Ended() { // else in another way
			r.end(s, false, r.members.ExpiresAt(s))
		}
		r.settleEnd(s.ID, revision, true)
	})
}

// ending is called before a fact that ends a session is journaled.
func (r *routers) ending(s *member.Session) {
	if r.members.LastEarlier(s) {
		r.earlierEnds()
	}
}

// end ends a session. Its router may have left requests open at its Envoy, at the latest until the
// given time. looked: the last report of the router shows which. It returns whether there may be
// any.
func (r *routers) end(s *member.Session, looked bool, until time.Duration) (mayBeOpen bool) {
	r.ending(s)
	if stream := r.members.End(s); stream != 0 {
		r.Emit(CloseStream{Stream: stream})
	}
	if !s.Egress { // an egress router ends everything that is open when it ends
		var verdict idle.Verdict
		mayBeOpen, verdict = r.idle.End(s.ID, looked, until, r.Now.Boot)
		r.resume(verdict)
	}
	r.changed = append(r.changed, r.fences.Remove(s.ID)...)
	r.closed = append(r.closed, r.closings.Remove(s.ID)...)
	r.ruled = append(r.ruled, r.rulings.Remove(s.ID)...)
	return mayBeOpen
}

// journaledEnd is the journaled end of a router that may have left something open. The objects
// show at the time until what the end of its leftover means.
type journaledEnd struct {
	until    time.Duration
	session  string
	revision Revision
}

// settleEnd acts on a committed end of a session. If the router may have left requests open, the
// journal keeps the end for the next leader, until the leftover is over and the objects show the
// activity.
func (r *routers) settleEnd(session string, revision Revision, mayBeOpen bool) {
	if mayBeOpen {
		r.ends = append(r.ends, journaledEnd{r.Now.Boot + persistLag, session, revision})
	} else {
		r.Emit(Settle{Thing: SessionID(session), Revision: revision})
	}
}

// tick ends the sessions and the bans whose time is over, and has the journal drop the ends that it
// has kept for long enough. Every fence may go on.
func (r *routers) tick() {
	for _, s := range r.members.Expired(r.Now.Boot) {
		r.expire(s)
	}
	for _, b := range r.members.Lift(r.Now.Boot) {
		r.Emit(Settle{Thing: SessionID(b.Session), Revision: b.Fact})
	}
	kept := r.ends[:0]
	for _, e := range r.ends {
		if r.idle.MayBeOpen(e.session) {
			e.until = r.Now.Boot + persistLag
		}
		if e.until <= r.Now.Boot {
			r.Emit(Settle{Thing: SessionID(e.session), Revision: e.revision})
		} else {
			kept = append(kept, e)
		}
	}
	r.ends = kept
	r.changed = slices.Collect(r.fences.UnderWay())
}

// sendRoute sends the route of a sandbox to all connected routers.
func (r *routers) sendRoute(sb *sandboxes.Sandbox) {
	if !sb.Routable() {
		return
	}
	for _, s := range r.members.Reachable() { // the others get it with their snapshot
		if !s.Has(sb.Agent) {
			continue
		}
		r.Emit(SendRoute{Stream: s.Stream, Sequence: r.members.SentRoute(s, sb.ID), Sandbox: sb.Sandbox})
	}
}

// sendReleases sends the routers the releases of this step: one message to each router, because
// hundreds may be released in one step.
func (r *routers) sendReleases() {
	if !r.fences.HasUnsent() {
		return
	}
	for _, s := range r.members.Reachable() {
		if ids := r.fences.Unsent(s.ID); len(ids) > 0 {
			sequence := r.members.NextSequence(s)
			r.fences.Sent(s.ID, sequence, ids)
			ends := make([]End, len(ids))
			for i, id := range ids {
				if sb := r.sandboxes.Get(id); sb != nil {
					ends[i] = endOf(&sb.Sandbox)
				}
			}
			r.Emit(SendRelease{Stream: s.Stream, Sequence: sequence, IDs: ids, Ends: ends})
		}
	}
	r.fences.AllSent()
}

// report records what a router reports after a look. A router has nothing to report before it
// has a durable session.
func (r *routers) report(ev Report) {
	if s := r.members.OfStream(ev.Stream); s != nil && s.Durable && !s.Egress {
		r.idle.Report(s.ID, idle.Report{
			Activities: ev.Activities, Gateway: ev.Gateway, Nonce: ev.Nonce, Took: ev.Took, Blind: ev.Blind,
		}, r.Now.Boot)
	}
}

// probed records the answer of a pod to a probe.
func (r *routers) probed(ev Probed) {
	if s := r.members.OfStream(ev.Stream); s != nil && !s.Egress {
		r.idle.Probed(ev.ID, ev.Number, ev.Busy, r.Now.Boot)
	}
}

// resume lets the routers admit requests again for sandboxes that a round has found in use, or that
// were in a round without a verdict.
func (r *routers) resume(v idle.Verdict) {
	if len(v.Resume) == 0 {
		return
	}
	for _, s := range r.members.Reachable() {
		if !s.Egress {
			r.Emit(SendResume{Stream: s.Stream, IDs: v.Resume})
		}
	}
}

// resolve answers a router that asks for a route.
func (c *Core) resolve(ev Resolve) {
	router := c.routers.members.OfStream(ev.Stream)
	if router == nil || !router.Durable {
		return
	}
	e := SendResolved{Stream: ev.Stream, ID: ev.ID}
	if s := c.sandboxes.Get(ev.ID); s != nil && router.Has(s.Agent) {
		switch {
		case s.Routable():
			found := s.Sandbox
			e.Sandbox = &found
		case s.Sleeps() && s.Lives():
			c.resolveSleeper(&e, s, ev.Wake && !router.Egress)
		case s.Over():
			e.Gone, e.End = true, endOf(&s.Sandbox)
		default:
			// It starts, or its release is not durable yet. Gone would be final.
			e.Starting = true
			if s.FoundIdle() {
				e.Hold = reapHold
			} else if p := c.pools.Find(s.Pool); p != nil && !s.IsLost() {
				e.Hold = p.Hold
			}
		}
	}
	c.Emit(e)
}

// endOf is what every client may know of the end of a sandbox.
func endOf(s *Sandbox) End {
	if s.Access != AccessPublic {
		return End{}
	}
	return End{Reason: s.Reason, At: s.ReleasedAt}
}
