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
	live  []*sandbox          // those that are not released, in the order of byClaim
	ended *list.List          // of *sandbox, in the order in which they ended
}

func newSandboxTable() *sandboxTable {
	return &sandboxTable{byID: map[string]*sandbox{}, byPod: map[PodKey]*sandbox{}, ended: list.New()}
}

// add enters a sandbox.
func (t *sandboxTable) add(sb *sandbox) {
	t.byID[sb.ID], t.byPod[sb.Pod] = sb, sb
	if sb.Phase < Released {
		at, _ := slices.BinarySearchFunc(t.live, sb.mark(), byClaim)
		t.live = slices.Insert(t.live, at, sb)
	}
}

// released takes a sandbox from the live ones.
func (t *sandboxTable) released(sb *sandbox) {
	if at, found := slices.BinarySearchFunc(t.live, sb.mark(), byClaim); found {
		t.live = slices.Delete(t.live, at, at+1)
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
		forgotten = append(forgotten, sb)
	}
	return forgotten
}

// page yields the live sandboxes that follow a mark.
func (t *sandboxTable) page(m Mark, order Order) iter.Seq[*sandbox] {
	at, found := slices.BinarySearchFunc(t.live, m, byClaim)
	return func(yield func(*sandbox) bool) {
		if order == NewestFirst {
			if m == (Mark{}) {
				at = len(t.live)
			}
			for _, sb := range slices.Backward(t.live[:at]) {
				if !yield(sb) {
					return
				}
			}
			return
		}
		if found {
			at++
		}
		for _, sb := range t.live[at:] {
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
	all := make([]Sandbox, 0, len(t.live))
	for _, sb := range t.live {
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
