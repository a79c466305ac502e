package core

import "slices"

func (c *Core) objectWritten(ev ObjectWritten) {
	sb := c.sandboxes.byID[ev.ID]
	if sb == nil || !sb.objectRevision.Less(ev.Revision) {
		return
	}
	sb.objectRevision = ev.Revision
	c.emit(Settle{SandboxID(sb.ID), ev.Revision})
	c.letGo(sb)
}

// readLog has the log of a released sandbox read. Its pod is deleted no earlier than the connect window after
// this, and the next leader asks again.
func (s *step) readLog(sb *sandbox) {
	if slices.Contains(logReasons, sb.Reason) {
		s.emit(ReadLog{Sandbox: sb.Sandbox})
	}
}

// logRead has the object show the last lines of a log.
func (c *Core) logRead(ev LogRead) {
	if sb := c.sandboxes.byID[ev.ID]; sb != nil && !sb.dropped && len(ev.Lines) > 0 {
		sb.Revision = c.outbox.Next()
		c.emit(WriteObject{Sandbox: sb.Sandbox, LogLines: ev.Lines})
	}
}

// objectSeen acts on an observed Sandbox object. The deletion of an object releases its sandbox. A
// deposed leader may write late an object that is unknown or was deleted; such an object is
// deleted.
func (c *Core) objectSeen(ev ObjectSeen) {
	switch sb := c.sandboxes.byID[ev.ID]; {
	case sb != nil && sb.dropped:
		c.emit(DeleteObject{Pool: ev.Pool, ID: ev.ID, Revision: sb.Revision})
	case sb != nil && ev.Deleting:
		sb.deleting = true
		c.startRelease(sb, because(ReasonObjectDeleted))
		c.letGo(sb)
	case sb != nil && ev.Revision == (Revision{}): // a user has replaced it
		sb.objectRevision = Revision{}
		c.show(sb)
	case sb == nil && ev.Revision != (Revision{}) && ev.Revision.Term < c.cfg.Term:
		c.emit(DeleteObject{Pool: ev.Pool, ID: ev.ID, Revision: ev.Revision})
	}
}

// letGo removes the object of an ended sandbox that a user has deleted, when nothing needs it any longer. For a
// sandbox without a key the write of its end does that.
func (c *Core) letGo(sb *sandbox) {
	if sb.deleting && sb.Phase == Ended && !sb.objectRevision.Less(sb.Revision) && sb.IdempotencyKey != "" && !c.needsObject(sb) {
		sb.dropped = true
		c.emit(DeleteObject{Pool: sb.Pool, ID: sb.ID, Revision: sb.Revision})
	}
}

// needsObject reports whether the object of an ended sandbox must survive its deletion by a user: its idempotency
// key holds, and its pool can get claims. Otherwise the CRD could not be deleted together with the pools.
func (c *Core) needsObject(sb *sandbox) bool {
	pool := c.pools.byKey[sb.Pool]
	return c.claims.Keeps(sb.ID) && pool != nil && !pool.Deleting
}

// letGoOf removes the deleted objects of the sandboxes of a pool that has gone.
func (c *Core) letGoOf(pool PoolKey) {
	for e := c.sandboxes.ended.Front(); e != nil; e = e.Next() {
		if sb := e.Value.(*sandbox); sb.Pool == pool {
			c.letGo(sb)
		}
	}
}

// objectGone acts on a Sandbox object that was deleted, and not by this leader.
func (c *Core) objectGone(id string) {
	sb := c.sandboxes.byID[id]
	switch {
	case sb == nil:
		return
	case sb.Phase == Ended && !c.needsObject(sb):
		sb.dropped = true
		return
	}
	// The journal may have dropped what the object recorded, such as the key. So it is written
	// again.
	sb.objectRevision, sb.deleting = Revision{}, false
	c.startRelease(sb, because(ReasonObjectDeleted))
	c.show(sb)
}

// show writes the object of a sandbox again, unless it must not exist yet.
func (s *step) show(sb *sandbox) {
	if sb.ungranted == 0 || sb.Phase >= Released {
		s.emit(WriteObject{Sandbox: sb.Sandbox})
	}
}

// forgetEnded drops the records that are too old or too many. It keeps those whose idempotency key
// holds, and those with a pending write, which would bring the object back.
func (c *Core) forgetEnded() {
	for _, sb := range c.sandboxes.forget(c.cfg.KeepEnded, c.now.Boot-c.cfg.KeepEndedFor, func(sb *sandbox) bool {
		return sb.objectRevision.Less(sb.Revision) || c.claims.Keeps(sb.ID)
	}) {
		c.fences.Forget(sb.ID)
		c.emit(DeleteObject{Pool: sb.Pool, ID: sb.ID, Revision: sb.Revision})
	}
}

// revise writes the object of a sandbox after a change that is no fact, because every recovery
// observes it again.
func (c *Core) revise(sb *sandbox) {
	sb.Revision = c.outbox.Next()
	c.emit(WriteObject{Sandbox: sb.Sandbox})
}
