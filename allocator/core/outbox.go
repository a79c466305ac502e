package core

import "time"

// maxFactsPerWrite bounds the facts of one Write. A burst of claims fits.
const maxFactsPerWrite = 4000

// maxPendingFacts bounds the facts that wait to be written. Beyond it no new claim is
// taken; releases and deletions are bounded by what there is to release.
const maxPendingFacts = 4 * maxFactsPerWrite

// outbox is what is on its way into the journal.
type outbox struct {
	ready   bool // a Write may be made
	pending []*pendingFact
	writing []*pendingFact
	// since is when the first of pending was added. urgent: a caller waits for one of them.
	since  time.Duration
	urgent bool
	// handedAt is when the Write under way was made.
	handedAt time.Duration
}

// pendingFact is a fact that is not durable yet.
type pendingFact struct {
	fact Fact
	// then makes true what the fact says, once it is durable.
	then committed
	// withdrawn: it was called off before it was handed to a Write.
	withdrawn bool
	// handed: it was handed to a Write.
	handed bool
}

// withdraw calls a fact off. It returns false if the fact was handed to a Write.
func (pf *pendingFact) withdraw() bool {
	pf.withdrawn = !pf.handed
	return pf.withdrawn
}

// committed acts on a durable fact. at is when the writer learned that it is durable, on the
// boot clock.
type committed func(f Fact, at time.Duration)

// commit has a fact journaled, with a new revision. then runs when it is durable, after those
// of all earlier facts. urgent: a caller waits for it.
func (c *Core) commit(fact Fact, urgent bool, then committed) *pendingFact {
	c.counter++
	fact.Revision = Revision{c.cfg.Term, c.counter}
	if fact.Sandbox != nil {
		fact.Sandbox.Revision = fact.Revision
	}
	if len(c.outbox.pending) == 0 {
		c.outbox.since = c.now.Boot
	}
	pf := &pendingFact{fact: fact, then: then}
	c.outbox.pending = append(c.outbox.pending, pf)
	c.outbox.urgent = c.outbox.urgent || urgent
	return pf
}

// flush hands the pending facts to the writer if it is free.
func (c *Core) flush() {
	o := &c.outbox
	if !o.ready || len(o.pending) == 0 || !o.urgent && c.now.Boot-o.since < c.cfg.Linger {
		return
	}
	taken := 0
	var facts []Fact
	for _, pf := range o.pending {
		if len(facts) == maxFactsPerWrite {
			break
		}
		taken++
		if !pf.withdrawn {
			pf.handed = true
			facts = append(facts, pf.fact)
			o.writing = append(o.writing, pf)
		}
	}
	rest := copy(o.pending, o.pending[taken:])
	clear(o.pending[rest:])
	o.pending = o.pending[:rest]
	if rest == 0 {
		o.urgent = false
	}
	if len(facts) > 0 {
		o.ready, o.handedAt = false, c.now.Boot
		c.emit(Write{facts})
	}
}

// standsAfter is how long a Write may take before the journal counts as standing still.
const standsAfter = time.Second

// journalStands reports whether what is journaled now would not be durable soon.
func (c *Core) journalStands() bool {
	return len(c.outbox.writing) > 0 && c.now.Boot-c.outbox.handedAt > standsAfter
}

// written makes the facts of the last Write true, in their order. at is when the writer learned
// that they are durable.
func (c *Core) written(at time.Duration) {
	if at == 0 {
		at = c.now.Boot
	}
	done := c.outbox.writing
	c.outbox.writing = nil
	for _, pf := range done {
		pf.then(pf.fact, at)
	}
}
