package core

import (
	"maps"
	"slices"
	"time"
)

// declaration is an operator's word that a router and its Envoy have ended, on its
// way into the journal. Until it is durable the router is waited for.
type declaration struct {
	session *session
	fact    *pendingFact
	tokens  []uint64 // of the callers
}

// ban keeps a session that was declared dead from coming back under its name, while what
// it knew may be fresh: should it live after all, then nobody has waited for it, and it
// has to begin anew.
type ban struct {
	until    time.Duration
	revision Revision // of the fact
	fences   int      // that waited for it
}

// declareDead ends a session that nothing else proves dead. A router that is
// connected lives, and so may one that was heard a moment ago: it must be stopped
// instead.
func (c *Core) declareDead(ev DeclareDead) {
	s := c.sessions[ev.Session]
	if s == nil {
		answer := DeadDeclared{Token: ev.Token}
		if b, ok := c.bans[ev.Session]; ok { // the answer was lost, and it is said again
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
		// It has ended in another way meanwhile, which is on its way into the journal,
		// whether it is back or not.
		c.emit(Settle{Session: s.id, Revision: f.Revision})
	} else {
		fences = c.fences.CountByRouter()[s.id]
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

// ban keeps a session away until what it knew cannot be fresh any more.
func (c *Core) ban(id string, revision Revision, fences int) {
	c.bans[id] = ban{until: c.now.Boot + c.expiry(), revision: revision, fences: fences}
}

// liftBans lets those in again that have nothing to serve any more.
func (c *Core) liftBans() {
	for _, id := range slices.Sorted(maps.Keys(c.bans)) {
		if b := c.bans[id]; c.now.Boot > b.until {
			delete(c.bans, id)
			c.emit(Settle{Session: id, Revision: b.revision})
		}
	}
}

// mayJoin reports whether a router is let in. One that was declared dead is not, and
// one that comes before that was handed to the writer shows that it lives.
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
		c.emit(CloseStream{Stream: ev.Stream}) // it tries again, and is told then
		return false
	}
	s.declared.fact.withdrawn = true
	for _, token := range s.declared.tokens {
		c.emit(DeadDeclared{Token: token, Status: DeclareConnected})
	}
	s.declared = nil
	return true
}
