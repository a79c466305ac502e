package core

import (
	"cmp"
	"container/list"
	"iter"
	"maps"
	"slices"
	"strings"
	"time"
)

// sandboxTable has the sandboxes, in the orders in which they are asked for.
type sandboxTable struct {
	byID  map[string]*sandbox
	byPod map[PodKey]*sandbox // by the pod that is or was theirs
	// live has those that are not released, in the order of byClaim: for each selection that a call
	// can make, so that a call passes over no others.
	live    map[Selection][]*sandbox
	ended   *list.List        // of *sandbox, in the order in which they ended
	batches map[string]*batch // those with a sandbox on record, by ID
}

func newSandboxTable() *sandboxTable {
	return &sandboxTable{
		byID: map[string]*sandbox{}, byPod: map[PodKey]*sandbox{}, live: map[Selection][]*sandbox{}, ended: list.New(),
		batches: map[string]*batch{},
	}
}

// everything selects all live sandboxes.
func everything() Selection { return Selection{Scope: Scope{All: true}} }

// selections are those that a sandbox belongs to.
func (sb *sandbox) selections() [4]Selection {
	all, team := Scope{All: true}, Scope{Team: sb.Team}
	return [...]Selection{{all, PoolKey{}}, {all, sb.Pool}, {team, PoolKey{}}, {team, sb.Pool}}
}

// of returns the live sandboxes of a selection.
func (t *sandboxTable) of(sel Selection) []*sandbox {
	if sel.All {
		sel.Team = ""
	}
	return t.live[sel]
}

// seen returns a sandbox that exists within a scope, else nil.
func (t *sandboxTable) seen(id string, scope Scope) *sandbox {
	if sb := t.byID[id]; sb != nil && scope.Sees(sb.Team) {
		return sb
	}
	return nil
}

// add enters a sandbox.
func (t *sandboxTable) add(sb *sandbox) {
	t.byID[sb.ID], t.byPod[sb.Pod] = sb, sb
	if sb.Phase >= Released {
		return
	}
	for _, sel := range sb.selections() {
		at, _ := slices.BinarySearchFunc(t.live[sel], sb.mark(), byClaim)
		t.live[sel] = slices.Insert(t.live[sel], at, sb)
	}
}

// join enters a sandbox into its batch, if it has one.
func (t *sandboxTable) join(sb *sandbox) {
	if sb.Batch == "" {
		return
	}
	b := t.batches[sb.Batch]
	if b == nil {
		b = &batch{}
		t.batches[sb.Batch] = b
	}
	b.members = append(b.members, sb)
}

// granted returns the sandboxes of a grant.
func (t *sandboxTable) granted(grant string) []*sandbox {
	if b := t.batches[grant]; b != nil {
		return b.members
	}
	return []*sandbox{t.byID[grant]}
}

// released takes a sandbox from the live ones.
func (t *sandboxTable) released(sb *sandbox) {
	for _, sel := range sb.selections() {
		at, found := slices.BinarySearchFunc(t.live[sel], sb.mark(), byClaim)
		switch {
		case !found:
		case len(t.live[sel]) == 1:
			delete(t.live, sel)
		default:
			t.live[sel] = slices.Delete(t.live[sel], at, at+1)
		}
	}
}

// end notes that a sandbox has ended. revive takes that back.
func (t *sandboxTable) end(sb *sandbox) { sb.elem = t.ended.PushBack(sb) }

func (t *sandboxTable) revive(sb *sandbox) {
	t.ended.Remove(sb.elem)
	sb.elem = nil
}

// maxPassed bounds how many records that must stay one call of forget passes over.
const maxPassed = 1000

// forget drops and returns the ended sandboxes that are more than most, or that ended before a
// time on the boot clock. It keeps those that keep returns true for.
func (t *sandboxTable) forget(most int, before time.Duration, keep func(*sandbox) bool) (forgotten []*sandbox) {
	passed := 0
	for e := t.ended.Front(); e != nil && passed < maxPassed; {
		sb := e.Value.(*sandbox)
		e = e.Next()
		if t.ended.Len() <= most && sb.endedAt > before {
			break
		}
		if keep(sb) {
			passed++ // later records need not wait for it
			continue
		}
		t.ended.Remove(sb.elem)
		delete(t.byID, sb.ID)
		delete(t.byPod, sb.Pod)
		if b := t.batches[sb.Batch]; b != nil {
			if b.members = slices.DeleteFunc(b.members, func(x *sandbox) bool { return x == sb }); len(b.members) == 0 {
				delete(t.batches, sb.Batch)
			}
		}
		forgotten = append(forgotten, sb)
	}
	return forgotten
}

// page yields the live sandboxes of a selection that follow a mark.
func (t *sandboxTable) page(sel Selection, m Mark, order Order) iter.Seq[*sandbox] {
	live := t.of(sel)
	at, found := slices.BinarySearchFunc(live, m, byClaim)
	return func(yield func(*sandbox) bool) {
		if order == NewestFirst {
			if m == (Mark{}) {
				at = len(live)
			}
			for _, sb := range slices.Backward(live[:at]) {
				if !yield(sb) {
					return
				}
			}
			return
		}
		if found {
			at++
		}
		for _, sb := range live[at:] {
			if !yield(sb) {
				return
			}
		}
	}
}

// byEnd lists the sandboxes in the order in which they ended; those that have not ended come last.
func (t *sandboxTable) byEnd() []*sandbox {
	return slices.SortedFunc(maps.Values(t.byID), func(a, b *sandbox) int {
		if a.EndedAt.IsZero() != b.EndedAt.IsZero() {
			if b.EndedAt.IsZero() {
				return -1
			}
			return 1
		}
		return cmp.Or(a.EndedAt.Compare(b.EndedAt), byClaim(a, b.mark()))
	})
}

// routable returns the sandboxes whose routes routers may receive, in no order.
func (t *sandboxTable) routable() []Sandbox {
	live := t.of(everything())
	all := make([]Sandbox, 0, len(live))
	for _, sb := range live {
		if sb.routable() {
			all = append(all, sb.Sandbox)
		}
	}
	return all
}

// mark is the position of a sandbox among the live ones. It does not change.
func (sb *sandbox) mark() Mark { return Mark{sb.ClaimedAt, sb.ID} }

// byClaim orders sandboxes by Mark, in microseconds. The journal and the objects keep microseconds,
// so the next leader has the same order.
func byClaim(sb *sandbox, m Mark) int {
	return cmp.Or(cmp.Compare(sb.ClaimedAt.UnixMicro(), m.ClaimedAt.UnixMicro()), strings.Compare(sb.ID, m.ID))
}
