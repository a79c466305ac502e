package core

import (
	"maps"
	"slices"
	"time"
)

// declaration is an operator's statement that a router and its Envoy have ended, on its way into
// the journal. Fences wait for the router until it is durable.
type declaration struct {
	session *session
	fact    *pendingFact
	tokens  []uint64 // of the callers
}

// ban refuses the ID of a router that was declared dead while its routes may be fresh. Fences no
// longer wait for that ID. If the router lives after all, it must join under a new ID.
type ban struct {
	until    time.Duration
	revision Revision // of the fact
	fences   int      // that waited for it
}

// declareDead ends a session on the statement of an operator. It refuses to end a router that is
// connected or was heard within Config.DeclareAfter: such a router may live and must be stopped.
func (c *Core) declareDead(ev DeclareDead) {
	s := c.sessions[ev.Session]
	if s == nil {
		answer := DeadDeclared{Token: ev.Token}
		if b, ok := c.bans[ev.Session]; ok { // a repeated call whose first answer was lost
			answer.Status, answer.Fences = DeclareOK, b.fences
		}
		c.emit(answer)
		return
	}
	switch wait := c.returns(s); {
	case s.stream != 0:
		c.emit(DeadDeclared{Token: ev.Token, Status: DeclareConnected})
	case wait > 0:
		c.emit(DeadDeclared{Token: ev.Token, Status: DeclareHeard, Wait: wait})
	case s.declared != nil:
		s.declared.tokens = append(s.declared.tokens, ev.Token)
	default:
		d := &declaration{session: s, tokens: []uint64{ev.Token}}
		s.declared = d
		c.discardEarly(s)
		said := &Declaration{By: ev.By, Reason: ev.Reason, At: c.now.Wall}
		d.fact = c.commit(Fact{Session: s.id, From: s.from, Left: true, Declared: said}, true,
			func(f Fact, _ time.Duration) { c.declaredDead(d, f) })
	}
}

// declaredDead acts on a committed declaration.
func (c *Core) declaredDead(d *declaration, f Fact) {
	s := d.session
	fences := 0
	if c.sessions[s.id] != s {
		// It has ended in another way since, and that fact is journaled or on its way.
		c.emit(Settle{Session: s.id, Revision: f.Revision})
	} else {
		fences = c.fences.CountFor(s.id)
		c.ban(s.id, f.Revision, fences)
		left := c.leaves(s, false)
		left.until = c.now.Boot // its Envoy has ended with it
		c.dropSession(s, left)
		c.emit(SessionDeclaredDead{Session: s.id, From: s.from, Declaration: *f.Declared, Fences: fences})
	}
	for _, token := range d.tokens {
		c.emit(DeadDeclared{Token: token, Status: DeclareOK, Fences: fences})
	}
}

// ban refuses a session ID until the routes of that router must be stale.
func (c *Core) ban(id string, revision Revision, fences int) {
	c.bans[id] = ban{until: c.now.Boot + c.expiry(), revision: revision, fences: fences}
}

// liftBans ends the bans whose time is over.
func (c *Core) liftBans() {
	for _, id := range slices.Sorted(maps.Keys(c.bans)) {
		if b := c.bans[id]; c.now.Boot > b.until {
			delete(c.bans, id)
			c.emit(Settle{Session: id, Revision: b.revision})
		}
	}
}

// mayJoin reports whether a router may join. It may not after it was declared dead. If it joins
// before the declaration was handed to the writer, it lives, and the declaration is withdrawn.
func (c *Core) mayJoin(ev SessionJoined) bool {
	if _, ok := c.bans[ev.Session]; ok {
		c.emit(CloseStream{Stream: ev.Stream, Banned: true})
		return false
	}
	s := c.sessions[ev.Session]
	if s == nil || s.declared == nil {
		return true
	}
	if s.declared.fact.handed {
		c.emit(CloseStream{Stream: ev.Stream}) // it tries again, and learns the reason then
		return false
	}
	s.declared.fact.withdrawn = true
	for _, token := range s.declared.tokens {
		c.emit(DeadDeclared{Token: token, Status: DeclareConnected})
	}
	s.declared = nil
	return true
}
