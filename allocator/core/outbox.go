package core

import "time"

// maxFactsPerWrite bounds the facts of one Write, except that a batch is not divided. A burst of
// claims fits.
const maxFactsPerWrite = 4000

// maxPendingFacts bounds the facts that wait to be written. Beyond it no new claim is
// taken; releases and deletions are bounded by what there is to release.
const maxPendingFacts = 4 * maxFactsPerWrite

// outbox is what is on its way into the journal.
type outbox struct {
	*step
	term    uint64
	counter uint64 // of revisions in this term
	linger  time.Duration
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

// revision returns a new revision. It is higher than all before.
func (o *outbox) revision() Revision {
	o.counter++
	return Revision{o.term, o.counter}
}

// commit has a fact journaled, with a new revision. then runs when it is durable, after those
// of all earlier facts. urgent: a caller waits for it.
func (o *outbox) commit(fact Fact, urgent bool, then committed) *pendingFact {
	fact.Revision = o.revision()
	if fact.Sandbox != nil {
		fact.Sandbox.Revision = fact.Revision
	}
	if len(o.pending) == 0 {
		o.since = o.now.Boot
	}
	pf := &pendingFact{fact: fact, then: then}
	o.pending = append(o.pending, pf)
	o.urgent = o.urgent || urgent
	return pf
}

// join has the pending facts from an index on written in one Write.
func (o *outbox) join(first int) {
	for i, pf := range o.pending[first:] {
		pf.fact.Joined = i > 0
	}
}

// flush hands the pending facts to the writer if it is free. A fact that no caller waits for is
// held back for linger.
func (o *outbox) flush() {
	if !o.ready || len(o.pending) == 0 || !o.urgent && o.now.Boot-o.since < o.linger {
		return
	}
	var facts []Fact
	taken := 0
	for _, pf := range o.pending {
		if len(facts) >= maxFactsPerWrite && !pf.fact.Joined {
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
		o.ready, o.handedAt = false, o.now.Boot
		o.emit(Write{facts})
	}
}

// standsAfter is how long a Write may take before the journal counts as standing still.
const standsAfter = time.Second

// stands reports whether what is journaled now would not be durable soon.
func (o *outbox) stands() bool {
	return len(o.writing) > 0 && o.now.Boot-o.handedAt > standsAfter
}

// written makes the facts of the last Write true, in their order. at is when the writer learned
// that they are durable.
func (o *outbox) written(at time.Duration) {
	if at == 0 {
		at = o.now.Boot
	}
	done := o.writing
	o.writing = nil
	for _, pf := range done {
		pf.then(pf.fact, at)
	}
}
