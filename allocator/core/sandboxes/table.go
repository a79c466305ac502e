package sandboxes

import (
	"cmp"
	"container/list"
	"maps"
	"slices"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/deadline"
	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/core/fence"
	"github.com/berth-sandbox/berth/allocator/core/idle"
	"github.com/berth-sandbox/berth/allocator/core/pods"
	"github.com/berth-sandbox/berth/allocator/core/step"
)

// Table has all sandboxes, in the orders in which they are asked for.
type Table struct {
	*step.Current
	outbox *fact.Outbox
	pods   *pods.Table
	fences *fence.Ledger
	idle   *idle.Ledger
	// keyHolds says whether the idempotency key of an ended sandbox holds.
	keyHolds func(id string) bool

	byID    map[string]*Sandbox
	byPod   map[fact.PodKey]*Sandbox // by the pod that is or was theirs
	live    Lists                    // those that are not released
	gone    Lists                    // those that are
	ended   *list.List               // of *Sandbox, in the order in which they ended
	batches map[string][]*Sandbox    // that one claim got together, by the ID of the batch
	// deadlines has the sandboxes that may have an end.
	deadlines *deadline.Queue[string]
	places    places        // of the sandboxes that requests have wake
	relieveAt time.Duration // when pools are looked at for too many that are asleep, on the boot clock
	step.Notices[Notice]
}

// New returns an empty table. keyHolds says whether the idempotency key of an ended sandbox holds.
func New(current *step.Current, outbox *fact.Outbox, pods *pods.Table, fences *fence.Ledger, idle *idle.Ledger, keyHolds func(id string) bool) *Table {
	return &Table{
		Current: current, outbox: outbox, pods: pods, fences: fences, idle: idle, keyHolds: keyHolds,
		byID: map[string]*Sandbox{}, byPod: map[fact.PodKey]*Sandbox{}, live: Lists{}, gone: Lists{}, ended: list.New(),
		batches: map[string][]*Sandbox{}, deadlines: deadline.New[string](), places: places{byTeam: map[string]int{}},
	}
}

// Get returns a sandbox; nil: it is not on record.
func (t *Table) Get(id string) *Sandbox { return t.byID[id] }

// Len is how many sandboxes are on record.
func (t *Table) Len() int { return len(t.byID) }

// Of returns the sandbox whose pod that is or was, bound ones too; nil: there is none.
func (t *Table) Of(pod fact.PodKey) *Sandbox { return t.byPod[pod] }

// Seen returns a sandbox that exists within a scope, else nil.
func (t *Table) Seen(id string, scope step.Scope) *Sandbox {
	if sb := t.byID[id]; sb != nil && scope.Sees(sb.Team) {
		return sb
	}
	return nil
}

// Live has the sandboxes that are not released, Gone those that are.
func (t *Table) Live() Lists { return t.live }

// Gone has the sandboxes that are released.
func (t *Table) Gone() Lists { return t.gone }

// All has the sandboxes on record, in no order.
func (t *Table) All() func(func(*Sandbox) bool) { return maps.Values(t.byID) }

// Batch returns the sandboxes of a grant that is a batch; nil: it was for one sandbox.
func (t *Table) Batch(grant string) []*Sandbox { return t.batches[grant] }

// Granted returns the sandboxes of a grant.
func (t *Table) Granted(grant string) []*Sandbox {
	if batch := t.batches[grant]; batch != nil {
		return batch
	}
	return []*Sandbox{t.byID[grant]}
}

// Routable returns the sandboxes whose routes routers may receive, in no order.
func (t *Table) Routable() []fact.Sandbox {
	live := t.live.Of(Everything())
	all := make([]fact.Sandbox, 0, len(live))
	for _, sb := range live {
		if sb.Routable() {
			all = append(all, sb.Sandbox)
		}
	}
	return all
}

// ByEnd lists the sandboxes in the order in which they ended; those that have not ended come last.
func (t *Table) ByEnd() []*Sandbox {
	return slices.SortedFunc(maps.Values(t.byID), func(a, b *Sandbox) int {
		if a.ReleasedAt.IsZero() != b.ReleasedAt.IsZero() {
			if b.ReleasedAt.IsZero() {
				return -1
			}
			return 1
		}
		return cmp.Or(a.ReleasedAt.Compare(b.ReleasedAt), a.Mark().Compare(b.Mark()))
	})
}

// add enters a sandbox.
func (t *Table) add(sb *Sandbox) {
	t.byID[sb.ID], t.byPod[sb.Pod] = sb, sb
	if sb.Batch != "" {
		t.batches[sb.Batch] = append(t.batches[sb.Batch], sb)
	}
	if sb.Phase < fact.Released {
		t.live.add(sb)
	} else {
		t.gone.add(sb)
	}
}

// schedule has ExpireEnds look at a sandbox when its earliest end has come.
func (t *Table) schedule(sb *Sandbox) {
	if at, reason := sb.Ends(); reason != "" && sb.Lives() {
		t.deadlines.Set(sb.ID, at)
	}
}

// maxPassed bounds how many records that must stay one call of Forget passes over.
const maxPassed = 1000

// Forget drops the ended sandboxes that are more than most, or that ended before a time on the boot clock. It keeps
// those whose idempotency key holds, and those with a pending write, which would bring the object back.
func (t *Table) Forget(most int, before time.Duration) {
	passed := 0
	for e := t.ended.Front(); e != nil && passed < maxPassed; {
		sb := e.Value.(*Sandbox)
		e = e.Next()
		if t.ended.Len() <= most && sb.releasedAt > before {
			break
		}
		if sb.objectRevision.Less(sb.Revision) || t.keyHolds(sb.ID) {
			passed++ // later records need not wait for it
			continue
		}
		t.ended.Remove(sb.elem)
		t.gone.remove(sb)
		delete(t.byID, sb.ID)
		delete(t.byPod, sb.Pod)
		batch := slices.DeleteFunc(t.batches[sb.Batch], func(x *Sandbox) bool { return x == sb })
		if t.batches[sb.Batch] = batch; len(batch) == 0 {
			delete(t.batches, sb.Batch)
		}
		t.fences.Forget(sb.ID)
		t.Emit(step.DeleteObject{Pool: sb.Pool, ID: sb.ID, Revision: sb.Revision})
	}
}
