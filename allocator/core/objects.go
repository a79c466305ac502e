package core

func (c *Core) recorded(ev Recorded) {
	s := c.sandboxes[ev.ID]
	if s == nil || !s.recorded.Less(ev.Revision) {
		return
	}
	s.recorded = ev.Revision
	c.emit(Settle{ID: s.ID, Revision: ev.Revision})
	c.letGo(s)
}

// recordSeen acts on a Sandbox object: deleting one releases the sandbox. One that
// nobody knows, or that was gone, was written late by a leader that was deposed.
func (c *Core) recordSeen(ev RecordSeen) {
	switch s := c.sandboxes[ev.ID]; {
	case s != nil && s.dropped:
		c.emit(ForgetRecord{Pool: ev.Pool, ID: ev.ID})
	case s != nil && ev.Deleting:
		s.deleting = true
		c.startRelease(s, ReasonDeleted)
		c.letGo(s)
	case s != nil && ev.Revision == (Revision{}): // somebody has replaced it
		s.recorded = Revision{}
		c.emit(Record{Sandbox: s.Sandbox})
	case s == nil && ev.Revision != (Revision{}) && ev.Revision.Term < c.cfg.Term:
		c.emit(ForgetRecord{Pool: ev.Pool, ID: ev.ID})
	}
}

// letGo lets go of the object of an ended sandbox that somebody has deleted. The
// write that says that a sandbox has ended does so by itself, but for those with an
// idempotency key.
func (c *Core) letGo(s *sandbox) {
	if s.deleting && s.Phase == Ended && !s.recorded.Less(s.Revision) && s.IdempotencyKey != "" && s.keyElem == nil {
		s.dropped = true
		c.emit(ForgetRecord{Pool: s.Pool, ID: s.ID})
	}
}

// recordGone acts on a Sandbox object that is not there any more, although nobody
// here has deleted it.
func (c *Core) recordGone(id string) {
	s := c.sandboxes[id]
	switch {
	case s == nil:
		return
	case s.Phase == Ended && s.keyElem == nil:
		s.dropped = true
		return
	}
	// What it said, of the key at least, is in nobody's keeping now.
	s.recorded, s.deleting = Revision{}, false
	c.startRelease(s, ReasonDeleted)
	c.emit(Record{Sandbox: s.Sandbox})
}

// passedMost bounds how many records that must stay are passed over at a time.
const passedMost = 1000

// forgetEnded drops the records that are too old or too many. Those whose
// idempotency key holds stay, and those still to be written: that would bring
// them back.
func (c *Core) forgetEnded() {
	passed := 0
	for e := c.ended.Front(); e != nil && passed < passedMost; {
		s := e.Value.(*sandbox)
		e = e.Next()
		if c.ended.Len() <= c.cfg.KeepEnded && c.now.Boot-s.endedAt < c.cfg.KeepEndedFor {
			return
		}
		if s.recorded.Less(s.Revision) || s.keyElem != nil {
			passed++ // those behind it need not wait for it
			continue
		}
		c.ended.Remove(s.elem)
		delete(c.sandboxes, s.ID)
		delete(c.holds, s.Pod)
		c.fences.Forget(s.ID)
		c.emit(ForgetRecord{Pool: s.Pool, ID: s.ID})
	}
}

// revise notes that what is shown of a sandbox has changed by something that
// needs no fact: it is seen again at every recovery.
func (c *Core) revise(s *sandbox) {
	c.counter++
	s.Revision = Revision{c.cfg.Term, c.counter}
	c.emit(Record{Sandbox: s.Sandbox})
}
