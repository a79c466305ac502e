package core

import (
	"math"
	"slices"
	"strings"
	"time"
)

// session is the membership of one router process.
type session struct {
	id string
	// durable: the session is in the journal. The router receives nothing before that.
	durable bool
	from    string // where it joined from last, for people
	stream  uint64 // 0: not connected
	// lastPing is an upper bound of when a leader last heard the router. heardAt is when this
	// leader last heard it, 0 if never.
	lastPing, heardAt time.Duration
	unponged          uint64 // the nonce of the last ping, if it has to wait for its answer
	// burying is how many deaths it has reported that are not durable yet. Its ping is answered
	// only then, because the router forgets the proof when it gets the pong.
	burying  int
	sequence uint64 // of the last message sent on the stream
	acked    uint64 // of the last one that was acknowledged
	// declared is set while an operator's declaration that it has ended is on its way into the
	// journal.
	declared *declaration
	// blind says why the router cannot be asked what is idle; empty: it can. answered is the last
	// round in which it answered.
	blind    string
	answered uint64
	// gateway, took and shown are of its newest look: which gateway it read, how long it took,
	// and which sandboxes it showed in use. inUse collects a report that is not complete.
	gateway      string
	took         time.Duration
	shown, inUse map[*sandbox]struct{}
	pongs        []ponged // the last ones on this stream
	// seenUpTo: the router may have the routes of sandboxes up to this number (lastUse.routeSeq).
	seenUpTo uint64
	// earlier: it stands for all routers of an earlier journal.
	earlier bool
}

// expiry is how long after the receipt of its last ping a router may still serve its routes:
// max-stale, and 1 % for clocks that run at different speeds.
func (c *Core) expiry() time.Duration { return c.cfg.MaxStale + c.cfg.MaxStale/100 }

func (c *Core) sessionJoined(ev SessionJoined) {
	if !c.mayJoin(ev) {
		return
	}
	s := c.sessions[ev.Session]
	if s == nil {
		// The session must be durable before the router receives a route, because the next
		// leader must wait for every router that has one.
		s = &session{id: ev.Session}
		c.addSession(s)
		c.commit(Fact{Session: s.id, From: ev.From}, true, func(Fact, time.Duration) { c.sessionDurable(s) })
	}
	if s.stream != 0 {
		c.emit(CloseStream{Stream: s.stream})
		c.disconnect(s)
	}
	c.endRound(false) // it was not asked, may have much to tell, and may admit what the snapshot holds
	s.stream, s.from, s.unponged, s.seenUpTo = ev.Stream, ev.From, 0, math.MaxUint64
	s.blind, s.pongs, s.inUse = "it has not reported yet", nil, nil
	s.heard(c.now.Boot)
	c.streams[ev.Stream] = s
	if s.durable {
		c.welcome(s)
	}
}

// sessionDurable acts on a committed session.
func (c *Core) sessionDurable(s *session) {
	if c.sessions[s.id] != s {
		return // it has ended since
	}
	s.durable = true
	if s.stream != 0 {
		c.welcome(s)
	}
}

// settleEnd acts on a committed end of a session. The journal keeps an end that may have left
// requests open.
func (c *Core) settleEnd(f Fact, mayBeOpen bool) {
	if settle := (Settle{Session: f.Session, Revision: f.Revision}); mayBeOpen {
		c.settleLater(settle)
	} else {
		c.emit(settle)
	}
}

func (c *Core) addSession(s *session) {
	c.sessions[s.id] = s
	c.byID = slices.Insert(c.byID, c.indexOf(s.id), s)
}

// indexOf is the place of a session in byID.
func (c *Core) indexOf(id string) int {
	at, _ := slices.BinarySearchFunc(c.byID, id, func(s *session, id string) int { return strings.Compare(s.id, id) })
	return at
}

// welcome sends a router the snapshot of all routes.
func (c *Core) welcome(s *session) {
	s.sequence, s.acked = 1, 0
	c.fences.SentSnapshot(s.id, s.sequence)
	c.emit(SendSnapshot{Stream: s.stream, Sequence: s.sequence, Routes: c.Running()})
	c.pong(s)
}

// pong answers the ping that had to wait, if there is one and it can be answered now.
func (c *Core) pong(s *session) {
	if s.unponged != 0 && s.durable && s.burying == 0 && s.stream != 0 {
		c.sendPong(s, s.unponged)
		s.unponged = 0
	}
}

// heard notes that the router was alive. lastPing never goes back: for a session of an earlier
// term it is later than the join, because another leader may have heard the router since.
func (s *session) heard(at time.Duration) { s.lastPing, s.heardAt = max(s.lastPing, at), at }

func (c *Core) sessionLeft(ev SessionLeft) {
	s := c.streams[ev.Stream]
	if s == nil || s.id != ev.Session {
		return
	}
	c.disconnect(s)
}

// disconnect notes that the stream of a session has ended. The router may serve its routes until
// the session expires.
func (c *Core) disconnect(s *session) {
	delete(c.streams, s.stream)
	s.stream, s.seenUpTo = 0, c.lastRouteSeq
	c.fences.Disconnected(s.id)
	c.endRound(false)
	c.eachFence(c.answerReleases)
}

// goodbye ends the session of a router that leaves cleanly.
func (c *Core) goodbye(ev SessionGoodbye) {
	s := c.sessions[ev.Session]
	if s == nil {
		return
	}
	s.heard(c.now.Boot)
	here := s.stream != 0 && s.stream == ev.Stream
	left := c.leaves(s, ev.Looked && here && s.blind == "")
	if here { // the stream is closed when the end is durable
		delete(c.streams, s.stream)
		s.stream = 0
	}
	c.commit(Fact{Session: s.id, Left: true}, true, func(f Fact, _ time.Duration) {
		c.settleEnd(f, left != nil)
		if ev.Stream != 0 {
			c.emit(CloseStream{Stream: ev.Stream, Left: true})
		}
	})
	c.dropSession(s, left)
}

// sessionDead ends the session of a router whose process is proven to have ended. by reported it.
func (c *Core) sessionDead(id string, by *session) {
	s := c.sessions[id]
	if s == nil || s == by {
		return
	}
	if by != nil {
		by.burying++
	}
	c.removeSession(s, by)
}

func (c *Core) sessionPing(ev SessionPing) {
	s := c.streams[ev.Stream]
	if s == nil {
		return
	}
	s.heard(c.now.Boot)
	if !s.durable || s.burying > 0 {
		s.unponged = ev.Nonce
		return
	}
	c.sendPong(s, ev.Nonce)
}

// sendPong answers a ping. It keeps the time, so that a look of the router that names this pong is
// known to have begun after now.
func (c *Core) sendPong(s *session, nonce uint64) {
	c.emit(SendPong{Stream: s.stream, Nonce: nonce})
	s.pongs = append(s.pongs[max(0, len(s.pongs)+1-pongsKept):], ponged{nonce, c.now.Boot})
}

func (c *Core) sessionAck(ev SessionAck) {
	s := c.streams[ev.Stream]
	if s == nil || ev.Sequence > s.sequence {
		return // that message was never sent
	}
	s.acked = max(s.acked, ev.Sequence)
	for _, id := range c.fences.Acknowledge(s.id, ev.Sequence) {
		c.cleared(c.sandboxes[id])
	}
}

// removeSession ends a session whose router can route to nothing any more. by is the session that
// proved it; nil: it has expired.
func (c *Core) removeSession(s, by *session) {
	c.discardEarly(s)
	c.commit(Fact{Session: s.id, Left: true}, by != nil, func(f Fact, _ time.Duration) {
		c.settleEnd(f, true)
		if by != nil {
			by.burying--
			c.pong(by)
		}
	})
	c.dropSession(s, c.leaves(s, false))
}

// dropSession removes a session. left is what its router may have left open; nil: nothing.
func (c *Core) dropSession(s *session, left *leftover) {
	c.discardEarly(s)
	if s.earlier {
		c.earlier--
	}
	delete(c.sessions, s.id)
	at := c.indexOf(s.id)
	c.byID = slices.Delete(c.byID, at, at+1)
	if s.stream != 0 {
		delete(c.streams, s.stream)
		c.emit(CloseStream{Stream: s.stream})
		s.stream = 0
	}
	if left != nil {
		c.leftovers = append(c.leftovers, left)
	}
	c.endRound(false)
	for _, id := range c.fences.Remove(s.id) {
		c.cleared(c.sandboxes[id])
	}
}

func (c *Core) expireSessions() {
	for _, s := range slices.Clone(c.byID) {
		if c.now.Boot-s.lastPing > c.expiryOf(s) {
			c.removeSession(s, nil)
		}
	}
}

// returns is for how much longer a router that is not connected may be about to come
// back: this leader has heard it a moment ago, or the one before may have.
func (c *Core) returns(s *session) time.Duration {
	return max(0, s.lastPing+c.cfg.DeclareAfter-c.now.Boot)
}
