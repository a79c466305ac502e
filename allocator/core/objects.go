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

// recordSeen acts on an observed Sandbox object. The deletion of an object releases its sandbox. A
// deposed leader may write late an object that is unknown or was deleted; such an object is
// deleted.
func (c *Core) recordSeen(ev RecordSeen) {
	switch s := c.sandboxes[ev.ID]; {
	case s != nil && s.dropped:
		c.emit(ForgetRecord{Pool: ev.Pool, ID: ev.ID})
	case s != nil && ev.Deleting:
		s.deleting = true
		c.startRelease(s, ReasonDeleted)
		c.letGo(s)
	case s != nil && ev.Revision == (Revision{}): // a user has replaced it
		s.recorded = Revision{}
		c.emit(Record{Sandbox: s.Sandbox})
	case s == nil && ev.Revision != (Revision{}) && ev.Revision.Term < c.cfg.Term:
		c.emit(ForgetRecord{Pool: ev.Pool, ID: ev.ID})
	}
}

// letGo removes the object of an ended sandbox that a user has deleted, when its idempotency key
// holds no longer. For a sandbox without a key the write of its end does that.
func (c *Core) letGo(s *sandbox) {
	if s.deleting && s.Phase == Ended && !s.recorded.Less(s.Revision) && s.IdempotencyKey != "" && s.keyElem == nil {
		s.dropped = true
		c.emit(ForgetRecord{Pool: s.Pool, ID: s.ID})
	}
}

// recordGone acts on a Sandbox object that was deleted, and not by this leader.
func (c *Core) recordGone(id string) {
	s := c.sandboxes[id]
	switch {
	case s == nil:
		return
	case s.Phase == Ended && s.keyElem == nil:
		s.dropped = true
		return
	}
	// The journal may have dropped what the object recorded, such as the key. So it is written
	// again.
	s.recorded, s.deleting = Revision{}, false
	c.startRelease(s, ReasonDeleted)
	c.emit(Record{Sandbox: s.Sandbox})
}

// passedMost bounds how many records that must stay one call passes over.
const passedMost = 1000

// forgetEnded drops the records that are too old or too many. It keeps those whose idempotency key
// holds, and those with a pending write, which would bring the object back.
func (c *Core) forgetEnded() {
	passed := 0
	for e := c.ended.Front(); e != nil && passed < passedMost; {
		s := e.Value.(*sandbox)
		e = e.Next()
		if c.ended.Len() <= c.cfg.KeepEnded && c.now.Boot-s.endedAt < c.cfg.KeepEndedFor {
			return
		}
		if s.recorded.Less(s.Revision) || s.keyElem != nil {
			passed++ // later records need not wait for it
			continue
		}
		c.ended.Remove(s.elem)
		delete(c.sandboxes, s.ID)
		delete(c.holds, s.Pod)
		c.fences.Forget(s.ID)
		c.emit(ForgetRecord{Pool: s.Pool, ID: s.ID})
	}
}

// revise writes the object of a sandbox after a change that is no fact, because every recovery
// observes it again.
func (c *Core) revise(s *sandbox) {
	c.counter++
	s.Revision = Revision{c.cfg.Term, c.counter}
	c.emit(Record{Sandbox: s.Sandbox})
}
