package core

import (
	"time"

	"github.com/berth-sandbox/berth/allocator/core/member"
)

// declareDead ends a session on the statement of an operator. It refuses to end a router that is
// connected or was heard within Config.DeclareAfter: such a router may live and must be stopped.
func (r *routers) declareDead(ev DeclareDead) {
	answer := DeadDeclared{Token: ev.Token}
	s := r.members.Get(ev.Session)
	switch b, banned := r.members.Banned(ev.Session); {
	case banned: // a repeated call whose first answer was lost
		answer.Status, answer.Fences = DeclareOK, b.Fences
	case s == nil:
	case s.Stream != 0:
		answer.Status = DeclareConnected
	case r.members.Returns(s, r.Now.Boot) > 0:
		answer.Status, answer.Wait = DeclareHeard, r.members.Returns(s, r.Now.Boot)
	default:
		d, isNew := r.members.Declare(s, ev.Token)
		if isNew {
			r.ending(s)
			said := &Declaration{By: ev.By, Reason: ev.Reason, At: r.Now.Wall}
			f := r.factOf(s)
			f.From, f.Left, f.Declared = s.From, true, said
			d.Withdraw = r.outbox.Commit(r.Now.Boot, f, true, func(rev Revision, _ time.Duration) { r.declaredDead(s, d, said, rev) }).Withdraw
		}
		return
	}
	r.Emit(answer)
}

// declaredDead acts on a committed declaration.
func (r *routers) declaredDead(s *member.Session, d *member.Declaration, said *Declaration, revision Revision) {
	fences := 0
	if s.Ended() { // in another way; that fact is journaled or on its way
		r.Emit(Settle{Thing: SessionID(s.ID), Revision: revision})
	} else {
		fences = r.fences.CountByRouter()[s.ID]
		r.end(s, false, r.Now.Boot) // its Envoy has ended with it
		r.members.Ban(s.ID, revision, fences, r.Now.Boot+r.cfg.expiry(s.MaxStale, s.Egress))
		r.Emit(SessionDeclaredDead{Session: s.ID, From: s.From, Declaration: *said, Fences: fences})
	}
	for _, token := range d.Tokens {
		r.Emit(DeadDeclared{Token: token, Status: DeclareOK, Fences: fences})
	}
}
