// Package deadline keeps the next deadline of each of many things, by ID. It is a pure queue: it
// does no I/O and owns no clock. One goroutine uses it.
//
// A deadline in the queue says when to look at a thing, not that the thing is due. A thing whose
// deadline moves to a later time stays where it is: the caller finds the later time when it looks,
// and sets it then. So an activity that moves a deadline every second costs nothing.
package deadline

import (
	"container/heap"
	"fmt"
	"time"
)

// Queue has at most one deadline of each ID.
type Queue[K comparable] struct{ heap entries[K] }

type entry[K comparable] struct {
	id K
	at time.Duration
}

// New returns an empty queue.
func New[K comparable]() *Queue[K] { return &Queue[K]{entries[K]{index: map[K]int{}}} }

// Set has Due return the ID at that time, or at the earlier time that is set already.
func (q *Queue[K]) Set(id K, at time.Duration) {
	switch i, ok := q.heap.index[id]; {
	case !ok:
		heap.Push(&q.heap, entry[K]{id, at})
	case at < q.heap.list[i].at:
		q.heap.list[i].at = at
		heap.Fix(&q.heap, i)
	}
}

// Remove drops an ID, if it is there.
func (q *Queue[K]) Remove(id K) {
	if i, ok := q.heap.index[id]; ok {
		heap.Remove(&q.heap, i)
	}
}

// At returns the deadline that is set for an ID.
func (q *Queue[K]) At(id K) (at time.Duration, ok bool) {
	i, ok := q.heap.index[id]
	if ok {
		at = q.heap.list[i].at
	}
	return at, ok
}

// Len is the number of IDs.
func (q *Queue[K]) Len() int { return len(q.heap.list) }

// Due removes the IDs whose deadlines have come, the earliest first and at most so many.
func (q *Queue[K]) Due(now time.Duration, most int) (ids []K) {
	for len(ids) < most && len(q.heap.list) > 0 && q.heap.list[0].at <= now {
		ids = append(ids, heap.Pop(&q.heap).(entry[K]).id)
	}
	return ids
}

// Check returns the first contradiction between the tables. It is for tests.
func (q *Queue[K]) Check() error {
	for i, e := range q.heap.list {
		if at, ok := q.heap.index[e.id]; !ok || at != i || e.at < q.heap.list[max(0, (i-1)/2)].at {
			return fmt.Errorf("deadline: %v is not at its place", e.id)
		}
	}
	if len(q.heap.index) != len(q.heap.list) {
		return fmt.Errorf("deadline: %d IDs, %d deadlines", len(q.heap.index), len(q.heap.list))
	}
	return nil
}

// entries is a heap.Interface.
type entries[K comparable] struct {
	list  []entry[K]
	index map[K]int // by ID
}

func (h *entries[K]) Len() int           { return len(h.list) }
func (h *entries[K]) Less(i, j int) bool { return h.list[i].at < h.list[j].at }
func (h *entries[K]) Swap(i, j int) {
	h.list[i], h.list[j] = h.list[j], h.list[i]
	h.index[h.list[i].id], h.index[h.list[j].id] = i, j
}

func (h *entries[K]) Push(x any) {
	e := x.(entry[K])
	h.index[e.id] = len(h.list)
	h.list = append(h.list, e)
}

func (h *entries[K]) Pop() any {
	last := h.list[len(h.list)-1]
	h.list[len(h.list)-1] = entry[K]{}
	h.list = h.list[:len(h.list)-1]
	delete(h.index, last.id)
	return last
}
