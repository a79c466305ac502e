package fact

import (
	"fmt"
	"slices"
	"time"
)

// MaxPerWrite bounds the facts of one Write, except that a batch is not divided. A burst of
// claims fits.
const MaxPerWrite = 4000

// MaxPending bounds the facts that wait to be written: beyond it Core takes no new claim. Releases and deletions are
// bounded by what there is to release.
const MaxPending = 4 * MaxPerWrite

// StalledAfter is how long a Write may take before the journal counts as stalled.
const StalledAfter = time.Second

// Outbox has the facts that are on their way into the journal. Times are on the boot clock.
type Outbox struct {
	term    uint64
	counter uint64 // of revisions in this term
	linger  time.Duration
	busy    bool // a Write is under way, or the writer pauses after one
	pending []*Pending
	writing []*Pending
	// since is when the first of pending was added. urgent: a caller waits for one of them.
	since  time.Duration
	urgent bool
	// handedAt is when the Write under way was made.
	handedAt time.Duration
}

// NewOutbox returns an empty outbox of a term. Facts that no caller waits for are held back for linger.
func NewOutbox(term uint64, linger time.Duration) *Outbox { return &Outbox{term: term, linger: linger} }

// Pending is a fact that is not durable yet.
type Pending struct {
	fact              Fact
	then              Committed
	withdrawn, handed bool
}

// Committed acts on a durable fact. at is when the writer learned that it is durable.
type Committed func(revision Revision, at time.Duration)

// Revision is that of the fact.
func (p *Pending) Revision() Revision { return p.fact.Revision }

// Subject is what the fact says. It is for tests.
func (p *Pending) Subject() Subject { return p.fact.Subject }

// Handed reports whether the fact was handed to a Write.
func (p *Pending) Handed() bool { return p.handed }

// Withdraw calls a fact off. It returns false if the fact was handed to a Write.
func (p *Pending) Withdraw() bool {
	p.withdrawn = !p.handed
	return p.withdrawn
}

// Next returns a new revision. It is higher than all before.
func (o *Outbox) Next() Revision {
	o.counter++
	return Revision{o.term, o.counter}
}

// Commit has a fact journaled, with a new revision. then runs when it is durable, after those
// of all earlier facts. urgent: a caller waits for it.
func (o *Outbox) Commit(now time.Duration, s Subject, urgent bool, then Committed) *Pending {
	p := &Pending{fact: Fact{Revision: o.Next(), Subject: s}, then: then}
	if sb, ok := s.(*SandboxFact); ok {
		sb.Revision = p.fact.Revision
	}
	if len(o.pending) == 0 {
		o.since = now
	}
	o.pending = append(o.pending, p)
	o.urgent = o.urgent || urgent
	return p
}

// Len is how many facts are pending.
func (o *Outbox) Len() int { return len(o.pending) }

// Join has the pending facts from an index on written in one Write.
func (o *Outbox) Join(first int) {
	for i, p := range o.pending[first:] {
		p.fact.Joined = i > 0
	}
}

// Flush returns the facts of the next Write; nil: none is to be made now.
func (o *Outbox) Flush(now time.Duration) (facts []Fact) {
	if o.busy || len(o.pending) == 0 || !o.urgent && now-o.since < o.linger {
		return nil
	}
	taken := 0
	for _, p := range o.pending {
		if len(facts) >= MaxPerWrite && !p.fact.Joined {
			break
		}
		taken++
		if !p.withdrawn {
			p.handed = true
			facts = append(facts, p.fact)
			o.writing = append(o.writing, p)
		}
	}
	rest := copy(o.pending, o.pending[taken:])
	clear(o.pending[rest:])
	o.pending = o.pending[:rest]
	if rest == 0 {
		o.urgent = false
	}
	if len(facts) > 0 {
		o.busy, o.handedAt = true, now
	}
	return facts
}

// Ready notes that the writer can take the next Write.
func (o *Outbox) Ready() { o.busy = false }

// Stalled reports whether what is committed now would not be durable soon.
func (o *Outbox) Stalled(now time.Duration) bool {
	return len(o.writing) > 0 && now-o.handedAt > StalledAfter
}

// Written makes the facts of the last Write true, in their order. at is when the writer learned that they are durable.
func (o *Outbox) Written(at time.Duration) {
	done := o.writing
	o.writing = nil
	for _, p := range done {
		p.then(p.fact.Revision, at)
	}
}

// Empty reports whether no fact is on its way into the journal. It is for tests.
func (o *Outbox) Empty() bool { return len(o.pending)+len(o.writing) == 0 }

// Check returns the first contradiction between the outbox and the writer, for which a Write is under way or not. It
// is for tests.
func (o *Outbox) Check(underWay bool) error {
	switch {
	case underWay != (len(o.writing) > 0) || underWay && !o.busy:
		return fmt.Errorf("fact: %d facts are being written, busy: %v; a Write is under way: %v", len(o.writing), o.busy, underWay)
	case !o.busy && o.urgent && slices.ContainsFunc(o.pending, func(p *Pending) bool { return !p.withdrawn }):
		return fmt.Errorf("fact: %d facts wait, though the writer is free", len(o.pending))
	}
	return nil
}
