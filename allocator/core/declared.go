package core

import (
	"time"

	"github.com/berth-sandbox/berth/allocator/core/member"
)

// declareDead ends a session on the statement of an operator. It refuses to end a router that is
// connected or was heard within Config.DeclareAfter: such a router may live and must be stopped.
func (c *Core) declareDead(ev DeclareDead) {
	answer := DeadDeclared{Token: ev.Token}
	s := c.members.Get(ev.Session)
	switch b, banned := c.members.Banned(ev.Session); {
	case banned: // a repeated call whose first answer was lost
		answer.Status, answer.Fences = DeclareOK, b.Fences
	case s == nil:
	case s.Stream != 0:
		answer.Status = DeclareConnected
	case c.members.Returns(s, c.now.Boot) > 0:
		answer.Status, answer.Wait = DeclareHeard, c.members.Returns(s, c.now.Boot)
	default:
		d, isNew := c.members.Declare(s, ev.Token)
		if isNew {
			c.retireQuarantined(s)
			said := &Declaration{By: ev.By, Reason: ev.Reason, At: c.now.Wall}
			fact := Fact{Session: s.ID, From: s.From, Left: true, Declared: said}
			d.Withdraw = c.outbox.commit(fact, true, func(f Fact, _ time.Duration) { c.declaredDead(s, d, f) }).withdraw
		}
		return
	}
	c.emit(answer)
}

// declaredDead acts on a committed declaration.
func (c *Core) declaredDead(s *member.Session, d *member.Declaration, f Fact) {
	fences := 0
	if s.Ended() { // in another way; that fact is journaled or on its way
		c.emit(Settle{Session: s.ID, Revision: f.Revision})
	} else {
		fences = c.fences.CountFor(s.ID)
		c.endSession(s, false, c.now.Boot) // its Envoy has ended with it
		c.members.Ban(s.ID, member.Revision(f.Revision), fences, c.now.Boot)
		c.emit(SessionDeclaredDead{Session: s.ID, From: s.From, Declaration: *f.Declared, Fences: fences})
	}
	for _, token := range d.Tokens {
		c.emit(DeadDeclared{Token: token, Status: DeclareOK, Fences: fences})
	}
}
