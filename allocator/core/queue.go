package core

import (
	"container/list"
	"slices"
	"strings"
)

// queue holds the warm pods of a pool: a shelf for each node, on it the pods by
// age. Pods are taken from one node after the other, the oldest of each, so that
// a burst is spread. Taking one and putting back one that is not older than the
// others costs the same however many there are.
type queue struct {
	shelves map[string]*shelf
	turn    *list.List // of *shelf with pods on it; the first is next
	n       int
}

type shelf struct {
	node string
	pods *list.List    // of *pod, oldest first
	elem *list.Element // in turn
}

func newQueue() queue { return queue{shelves: map[string]*shelf{}, turn: list.New()} }

func (q *queue) put(p *pod) {
	s := q.shelves[p.seen.Node]
	if s == nil {
		s = &shelf{node: p.seen.Node, pods: list.New()}
		s.elem = q.turn.PushBack(s)
		q.shelves[s.node] = s
	}
	at := s.pods.Back()
	for at != nil && byAge(p, at.Value.(*pod)) < 0 {
		at = at.Prev()
	}
	if at == nil {
		p.elem = s.pods.PushFront(p)
	} else {
		p.elem = s.pods.InsertAfter(p, at)
	}
	p.shelf = s
	q.n++
}

// next returns the pod whose turn it is, nil if there is none. It stays.
func (q *queue) next() *pod {
	e := q.turn.Front()
	if e == nil {
		return nil
	}
	return e.Value.(*shelf).pods.Front().Value.(*pod)
}

// passed gives the turn to another node than the pod's.
func (q *queue) passed(p *pod) { q.turn.MoveToBack(p.shelf.elem) }

func (q *queue) remove(p *pod) {
	s := p.shelf
	s.pods.Remove(p.elem)
	if s.pods.Len() == 0 {
		q.turn.Remove(s.elem)
		delete(q.shelves, s.node)
	}
	p.elem, p.shelf = nil, nil
	q.n--
}

// byAge orders pods: the oldest first.
func byAge(a, b *pod) int {
	if order := a.seen.CreatedAt.Compare(b.seen.CreatedAt); order != 0 {
		return order
	}
	return strings.Compare(a.seen.Key.Name, b.seen.Key.Name)
}

// all lists the pods that fit, oldest first.
func (q *queue) all(fits func(*pod) bool) []*pod {
	var found []*pod
	for _, s := range q.shelves {
		for e := s.pods.Front(); e != nil; e = e.Next() {
			if p := e.Value.(*pod); fits(p) {
				found = append(found, p)
			}
		}
	}
	slices.SortFunc(found, byAge)
	return found
}
