package core

import (
	"cmp"
	"container/list"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/deadline"
)

// sandboxTable has the sandboxes, in the orders in which they are asked for.
type sandboxTable struct {
	byID    map[string]*sandbox
	byPod   map[PodKey]*sandbox // by the pod that is or was theirs
	live    lists               // those that are not released
	gone    lists               // those that are
	ended   *list.List          // of *sandbox, in the order in which they ended
	batches map[string]*batch   // those with a sandbox on record, by ID
	// deadlines has the sandboxes that may have an end.
	deadlines *deadline.Queue[string]
}

func newSandboxTable() *sandboxTable {
	return &sandboxTable{
		byID: map[string]*sandbox{}, byPod: map[PodKey]*sandbox{}, live: lists{}, gone: lists{}, ended: list.New(),
		batches: map[string]*batch{}, deadlines: deadline.New[string](),
	}
}

// schedule has expireEnds look at a sandbox when its earliest end has come.
func (t *sandboxTable) schedule(s *sandbox) {
	if at, reason := s.ends(); reason != "" && (s.Phase == Starting || s.Phase == Running) {
		t.deadlines.Set(s.ID, at)
	}
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
	if sb.Phase < Released {
		t.live.add(sb)
	} else {
		t.gone.add(sb)
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

// released moves a sandbox from the live ones to those that are gone.
func (t *sandboxTable) released(sb *sandbox) {
	t.live.remove(sb)
	t.gone.add(sb)
}

// lists has sandboxes in the order of byClaim: for each selection that a call can make, so that a
// call passes over no others.
type lists map[Selection][]*sandbox

// everything selects all sandboxes.
func everything() Selection { return Selection{Scope: Scope{All: true}} }

// selections are those that a sandbox belongs to.
func (sb *sandbox) selections() [4]Selection {
	all, team := Scope{All: true}, Scope{Team: sb.Team}
	return [...]Selection{{all, PoolKey{}}, {all, sb.Pool}, {team, PoolKey{}}, {team, sb.Pool}}
}

// of returns the sandboxes of a selection.
func (l lists) of(sel Selection) []*sandbox {
	if sel.All {
		sel.Team = ""
	}
	return l[sel]
}

func (l lists) add(sb *sandbox) {
	for _, sel := range sb.selections() {
		at, _ := slices.BinarySearchFunc(l[sel], sb.mark(), byClaim)
		l[sel] = slices.Insert(l[sel], at, sb)
	}
}

func (l lists) remove(sb *sandbox) {
	for _, sel := range sb.selections() {
		at, found := slices.BinarySearchFunc(l[sel], sb.mark(), byClaim)
		switch {
		case !found:
		case len(l[sel]) == 1:
			delete(l, sel)
		default:
			l[sel] = slices.Delete(l[sel], at, at+1)
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
		if t.ended.Len() <= most && sb.releasedAt > before {
			break
		}
		if keep(sb) {
			passed++ // later records need not wait for it
			continue
		}
		t.ended.Remove(sb.elem)
		t.gone.remove(sb)
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

// after returns the sandboxes of a selection that follow a mark in an order, and were claimed since a time.
// They are in the order of byClaim.
func (l lists) after(sel Selection, since time.Time, m Mark, order Order) []*sandbox {
	list := l.of(sel)
	if at, found := slices.BinarySearchFunc(list, m, byClaim); order == NewestFirst && m != (Mark{}) {
		list = list[:at]
	} else if order == OldestFirst {
		if found {
			at++
		}
		list = list[at:]
	}
	at, _ := slices.BinarySearchFunc(list, Mark{ClaimedAt: since}, byClaim)
	return list[at:]
}

// byEnd lists the sandboxes in the order in which they ended; those that have not ended come last.
func (t *sandboxTable) byEnd() []*sandbox {
	return slices.SortedFunc(maps.Values(t.byID), func(a, b *sandbox) int {
		if a.ReleasedAt.IsZero() != b.ReleasedAt.IsZero() {
			if b.ReleasedAt.IsZero() {
				return -1
			}
			return 1
		}
		return cmp.Or(a.ReleasedAt.Compare(b.ReleasedAt), byClaim(a, b.mark()))
	})
}

// routable returns the sandboxes whose routes routers may receive, in no order.
func (t *sandboxTable) routable() []Sandbox {
	live := t.live.of(everything())
	all := make([]Sandbox, 0, len(live))
	for _, sb := range live {
		if sb.routable() {
			all = append(all, sb.Sandbox)
		}
	}
	return all
}

// mark is the position of a sandbox in lists. It does not change.
func (sb *sandbox) mark() Mark { return Mark{sb.ClaimedAt, sb.ID} }

// byClaim orders sandboxes by Mark.
func byClaim(sb *sandbox, m Mark) int { return byMark(sb.mark(), m) }

// byMark compares in microseconds. The journal and the objects keep microseconds, so the next
// leader has the same order.
func byMark(a, b Mark) int {
	return cmp.Or(cmp.Compare(a.ClaimedAt.UnixMicro(), b.ClaimedAt.UnixMicro()), strings.Compare(a.ID, b.ID))
}
