package sandboxes

import (
	"slices"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/core/step"
)

// The Sandbox objects.

// ObjectWritten notes what the object of a sandbox shows.
func (t *Table) ObjectWritten(id string, revision fact.Revision) {
	sb := t.byID[id]
	if sb == nil || !sb.objectRevision.Less(revision) {
		return
	}
	sb.objectRevision = revision
	t.Emit(step.Settle{Thing: fact.SandboxID(sb.ID), Revision: revision})
	t.LetGo(sb)
}

// readLog has the log of a released sandbox read. Its pod is deleted no earlier than the connect window after
// this, and the next leader asks again.
func (t *Table) readLog(sb *Sandbox) {
	if slices.Contains(fact.LogReasons, sb.Reason) {
		t.Emit(step.ReadLog{Sandbox: sb.Sandbox})
	}
}

// LogRead has the object show the last lines of a log.
func (t *Table) LogRead(id string, lines []string) {
	if sb := t.byID[id]; sb != nil && !sb.dropped && len(lines) > 0 {
		sb.Revision = t.outbox.Next()
		t.Emit(step.WriteObject{Sandbox: sb.Sandbox, LogLines: lines})
	}
}

// ObjectSeen acts on an observed Sandbox object. The deletion of an object releases its sandbox. A
// deposed leader may write late an object that is unknown or was deleted; such an object is
// deleted. late: it was written by an earlier leader.
func (t *Table) ObjectSeen(pool fact.PoolKey, id string, revision fact.Revision, deleting, late bool) {
	switch sb := t.byID[id]; {
	case sb != nil && sb.dropped:
		t.Emit(step.DeleteObject{Pool: pool, ID: id, Revision: sb.Revision})
	case sb != nil && deleting:
		sb.deleting = true
		t.End(sb, Serving, fact.Because(fact.ReasonObjectDeleted))
		t.LetGo(sb)
	case sb != nil && revision == (fact.Revision{}): // a user has replaced it
		sb.objectRevision = fact.Revision{}
		t.Show(sb)
	case sb == nil && revision != (fact.Revision{}) && late:
		t.Emit(step.DeleteObject{Pool: pool, ID: id, Revision: revision})
	}
}

// LetGo removes the object of an ended sandbox that a user has deleted, when nothing needs it any longer. For a
// sandbox without a key the write of its end does that.
func (t *Table) LetGo(sb *Sandbox) {
	if sb.deleting && sb.Phase == fact.Ended && !sb.objectRevision.Less(sb.Revision) && sb.Keyed() && !t.needsObject(sb) {
		sb.dropped = true
		t.Emit(step.DeleteObject{Pool: sb.Pool, ID: sb.ID, Revision: sb.Revision})
	}
}

// needsObject reports whether the object of an ended sandbox must survive its deletion by a user: its idempotency
// key holds, and its pool can get claims. Otherwise the CRD could not be deleted together with the pools.
func (t *Table) needsObject(sb *Sandbox) bool {
	g := t.pods.Find(sb.Pool)
	return t.keyHolds(sb.ID) && g != nil && !g.Deleting
}

// LetGoOf removes the deleted objects of the sandboxes of a pool that has gone.
func (t *Table) LetGoOf(pool fact.PoolKey) {
	for e := t.ended.Front(); e != nil; e = e.Next() {
		if sb := e.Value.(*Sandbox); sb.Pool == pool {
			t.LetGo(sb)
		}
	}
}

// ObjectGone acts on a Sandbox object that was deleted, and not by this leader.
func (t *Table) ObjectGone(id string) {
	sb := t.byID[id]
	switch {
	case sb == nil:
		return
	case sb.Phase == fact.Ended && (sb.dropped || !t.needsObject(sb)): // a pool of the name may exist again
		sb.dropped = true
		return
	}
	// The journal may have dropped what the object recorded, such as the key. So it is written
	// again.
	sb.objectRevision, sb.deleting = fact.Revision{}, false
	t.End(sb, Serving, fact.Because(fact.ReasonObjectDeleted))
	t.Show(sb)
}

// Show writes the object of a sandbox again, unless it must not exist yet.
func (t *Table) Show(sb *Sandbox) {
	if sb.ungranted == 0 || sb.Phase >= fact.Released {
		t.Emit(step.WriteObject{Sandbox: sb.Sandbox})
	}
}

// revise writes the object of a sandbox after a change that is no fact, because every recovery
// observes it again.
func (t *Table) revise(sb *Sandbox) {
	sb.Revision = t.outbox.Next()
	t.Emit(step.WriteObject{Sandbox: sb.Sandbox})
}

// Touch writes the time at which a running sandbox was last in use to its object, unless that has hardly changed, or
// another change is on its way.
func (t *Table) Touch(id string, active time.Time) {
	sb := t.byID[id]
	if sb.Phase != fact.Running || sb.pendingTimeouts > 0 || sb.pendingRules > 0 || sb.arriving || sb.objectRevision.Less(sb.Revision) || active.Sub(sb.LastActive) < time.Second {
		return
	}
	sb.LastActive = active
	sb.Revision = t.outbox.Next()
	t.Emit(step.WriteObject{Sandbox: sb.Sandbox, Touch: true})
}
