package core

import (
	"slices"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/member"
)

// expiry is how long after the receipt of its last ping a router may still serve its routes:
// max-stale, and 1 % for clocks that run at different speeds.
func (c Config) expiry() time.Duration { return c.MaxStale + c.MaxStale/100 }

// sessionJoined connects a router. A router that was declared dead may not join. A declaration
// that was not handed to the writer is withdrawn, because the router lives.
func (c *Core) sessionJoined(ev SessionJoined) {
	ok, banned, withdrawn := c.members.MayJoin(ev.Session)
	for _, token := range withdrawn {
		c.emit(DeadDeclared{Token: token, Status: DeclareConnected})
	}
	if !ok { // unless it is banned it tries again, and learns the reason then
		c.emit(CloseStream{Stream: ev.Stream, Banned: banned})
		return
	}
	if s := c.members.Get(ev.Session); s != nil && s.Stream != 0 {
		c.emit(CloseStream{Stream: s.Stream})
		c.disconnect(s)
	}
	c.decide(c.idle.Joined(ev.Session, c.now.Boot))
	s, isNew := c.members.Join(ev.Session, ev.From, ev.Stream, c.now.Boot)
	if isNew {
		// The session must be durable before the router receives a route, because the next
		// leader must wait for every router that has one.
		c.outbox.commit(Fact{Session: s.ID, From: ev.From}, true, func(Fact, time.Duration) {
			if c.members.Recorded(s) {
				c.welcome(s)
			}
		})
	}
	if s.Durable {
		c.welcome(s)
	}
}

// welcome sends a router the snapshot of all routes.
func (c *Core) welcome(s *member.Session) {
	sequence := c.members.FirstSequence(s)
	c.fences.SentSnapshot(s.ID, sequence)
	c.emit(SendSnapshot{Stream: s.Stream, Sequence: sequence, Routes: c.sandboxes.routable()})
	c.pong(s)
}

// pong answers the last ping of a router if it can be answered now. It keeps the time, so that a
// look of the router that names this pong is known to have begun after now.
func (c *Core) pong(s *member.Session) {
	if nonce, ok := c.members.Pong(s); ok {
		c.emit(SendPong{Stream: s.Stream, Nonce: nonce})
		c.idle.Ponged(s.ID, nonce, c.now.Boot)
	}
}

func (c *Core) sessionLeft(ev SessionLeft) {
	if s := c.members.OfStream(ev.Stream); s != nil && s.ID == ev.Session {
		c.disconnect(s)
	}
}

// disconnect notes that the stream of a session has ended. The router may serve its routes until
// the session expires.
func (c *Core) disconnect(s *member.Session) {
	c.members.Disconnect(s)
	c.fences.Disconnected(s.ID)
	c.decide(c.idle.Left(s.ID, c.now.Boot))
	c.advanceFences(c.fences.UnderWay())
}

// goodbye ends the session of a router that leaves cleanly. Its stream is closed when the end is
// durable.
func (c *Core) goodbye(ev SessionGoodbye) {
	s, here := c.members.Goodbye(ev.Session, ev.Stream, c.now.Boot)
	if s == nil {
		return
	}
	var mayBeOpen bool
	c.outbox.commit(Fact{Session: s.ID, Left: true}, true, func(f Fact, _ time.Duration) {
		c.settleEnd(f, mayBeOpen)
		if ev.Stream != 0 {
			c.emit(CloseStream{Stream: ev.Stream, Left: true})
		}
	})
	mayBeOpen = c.endSession(s, ev.Looked && here, c.members.ExpiresAt(s))
}

// sessionDead ends the session of a router whose process another router has proven to have ended.
func (c *Core) sessionDead(ev SessionDead) {
	if s, by := c.members.Dead(ev.Session, ev.By); s != nil {
		c.removeSession(s, by)
	}
}

func (c *Core) sessionPing(ev SessionPing) {
	if s := c.members.Ping(ev.Stream, ev.Nonce, c.now.Boot); s != nil {
		c.pong(s)
	}
}

func (c *Core) sessionAck(ev SessionAck) {
	if s := c.members.Acknowledge(ev.Stream, ev.Sequence); s != nil {
		c.advanceFences(slices.Values(c.fences.Acknowledge(s.ID, ev.Sequence)))
	}
}

// removeSession ends a session whose router can route to nothing any more. by is the session that
// proved it; nil: it has expired.
func (c *Core) removeSession(s, by *member.Session) {
	c.retireQuarantined(s)
	c.outbox.commit(Fact{Session: s.ID, Left: true}, by != nil, func(f Fact, _ time.Duration) {
		c.settleEnd(f, true)
		if by != nil {
			c.members.DeathRecorded(by)
			c.pong(by)
		}
	})
	c.endSession(s, false, c.members.ExpiresAt(s))
}

// endSession ends a session. Its router may have left requests open at its Envoy, at the latest
// until the given time. looked: the last report of the router shows which. It returns whether
// there may be any.
func (c *Core) endSession(s *member.Session, looked bool, until time.Duration) (mayBeOpen bool) {
	c.retireQuarantined(s)
	if stream := c.members.End(s); stream != 0 {
		c.emit(CloseStream{Stream: stream})
	}
	mayBeOpen, verdict := c.idle.End(s.ID, looked, until, c.now.Boot)
	c.decide(verdict)
	c.advanceFences(slices.Values(c.fences.Remove(s.ID)))
	return mayBeOpen
}

// settleEnd acts on a committed end of a session. The journal keeps an end that may have left
// requests open.
func (c *Core) settleEnd(f Fact, mayBeOpen bool) {
	if settle := (Settle{Session: f.Session, Revision: f.Revision}); mayBeOpen {
		c.keepEnd(settle)
	} else {
		c.emit(settle)
	}
}

// tickSessions ends the sessions and the bans whose time is over.
func (c *Core) tickSessions() {
	for _, s := range c.members.Expired(c.now.Boot) {
		c.removeSession(s, nil)
	}
	for _, b := range c.members.Lift(c.now.Boot) {
		c.emit(Settle{Session: b.Session, Revision: Revision(b.Fact)})
	}
}
