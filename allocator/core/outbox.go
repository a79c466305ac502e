package core

import "time"

// writeMost bounds the facts of one Write. A burst of claims fits.
const writeMost = 4000

// pendingMost bounds the facts that wait to be written. Beyond it no new claim is
// taken; releases and deletions are bounded by what there is to release.
const pendingMost = 4 * writeMost

// outbox is what is on its way into the journal.
type outbox struct {
	ready   bool // a Write may be made
	pending []*change
	writing []*change
	// since is when the first of pending came; urgent: somebody waits for one.
	since  time.Duration
	urgent bool
	// handedAt is when the Write under way was made.
	handedAt time.Duration
}

// change is a fact that is not durable yet, and what becomes true with it.
type change struct {
	fact Fact
	// claim: a claim that was given a pod.
	claim *claim
	// sandbox becomes what the fact says: running, or released. kept: only its end is
	// moved, and the caller of that is answered.
	sandbox *sandbox
	kept    uint64
	// session is told what is so, or, if another one has left, that this is durable;
	// it may be nil then.
	session *session
	// unsure: it is not known what was in use through the session that has left.
	unsure bool
	// stream is closed: its router has said Goodbye. 0: none.
	stream uint64
	// declared: an operator says that a session has ended.
	declared *declaration
	// dropped: it was called off before it was handed to a Write.
	dropped bool
	// handed: it was handed to a Write.
	handed bool
}

// append puts a change at the end of those that wait, and stamps its revision.
func (c *Core) append(ch *change, urgent bool) {
	c.counter++
	ch.fact.Revision = Revision{c.cfg.Term, c.counter}
	if ch.fact.Sandbox != nil {
		ch.fact.Sandbox.Revision = ch.fact.Revision
	}
	if len(c.outbox.pending) == 0 {
		c.outbox.since = c.now.Boot
	}
	c.outbox.pending = append(c.outbox.pending, ch)
	c.outbox.urgent = c.outbox.urgent || urgent
}

// flush hands what waits to the writer, if that is free.
func (c *Core) flush() {
	o := &c.outbox
	if !o.ready || len(o.pending) == 0 || !o.urgent && c.now.Boot-o.since < c.cfg.Linger {
		return
	}
	taken := 0
	var facts []Fact
	for _, ch := range o.pending {
		if len(facts) == writeMost {
			break
		}
		taken++
		if !ch.dropped {
			ch.handed = true
			facts = append(facts, ch.fact)
			o.writing = append(o.writing, ch)
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

// written makes true what has become durable, in its order. at is when that was known.
func (c *Core) written(at time.Duration) {
	if at == 0 {
		at = c.now.Boot
	}
	done := c.outbox.writing
	c.outbox.writing = nil
	for _, ch := range done {
		switch {
		case ch.claim != nil:
			c.claimed(ch)
		case ch.kept != 0:
			c.changed(ch)
		case ch.sandbox != nil && ch.fact.Sandbox.Phase == Running:
			c.ready(ch)
		case ch.sandbox != nil:
			c.released(ch, at)
		case ch.fact.Session != "":
			c.sessionWritten(ch)
		default:
			c.discarded(ch.fact.Discard)
		}
	}
}
