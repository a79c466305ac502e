package warm

import (
	"cmp"
	"container/heap"
	"container/list"
	"fmt"
	"iter"
	"time"
)

// Pod is a warm pod.
type Pod[K comparable] struct {
	Key       K
	Node      string
	CreatedAt time.Time
	Name      string
}

// Queue has the warm pods of a pool by node and age. K names a pod.
type Queue[K comparable] struct {
	pods  map[K]*list.Element // in the list of its node
	nodes map[string]*node[K]
	turn  *list.List // of *node; the first is next
}

type node[K comparable] struct {
	name string
	pods *list.List    // of Pod, oldest first
	elem *list.Element // in Queue.turn
}

// NewQueue returns an empty queue.
func NewQueue[K comparable]() *Queue[K] {
	return &Queue[K]{pods: map[K]*list.Element{}, nodes: map[string]*node[K]{}, turn: list.New()}
}

// Put adds a pod.
func (q *Queue[K]) Put(p Pod[K]) {
	if q.Has(p.Key) {
		panic(fmt.Sprintf("warm: pod %v is put twice", p.Key))
	}
	n := q.nodes[p.Node]
	if n == nil {
		n = &node[K]{name: p.Node, pods: list.New()}
		n.elem = q.turn.PushBack(n)
		q.nodes[n.name] = n
	}
	at := n.pods.Back()
	for at != nil && byAge(p, at.Value.(Pod[K])) < 0 {
		at = at.Prev()
	}
	if at == nil {
		q.pods[p.Key] = n.pods.PushFront(p)
	} else {
		q.pods[p.Key] = n.pods.InsertAfter(p, at)
	}
}

// Next returns the pod whose turn it is. It stays in the queue. ok is false if there is none.
func (q *Queue[K]) Next() (key K, ok bool) {
	e := q.turn.Front()
	if e == nil {
		return key, false
	}
	return e.Value.(*node[K]).pods.Front().Value.(Pod[K]).Key, true
}

// Passed gives the turn to another node than that of a pod.
func (q *Queue[K]) Passed(key K) { q.turn.MoveToBack(q.nodeOf(key).elem) }

// Remove takes a pod out.
func (q *Queue[K]) Remove(key K) {
	n := q.nodeOf(key)
	n.pods.Remove(q.pods[key])
	delete(q.pods, key)
	if n.pods.Len() == 0 {
		q.turn.Remove(n.elem)
		delete(q.nodes, n.name)
	}
}

func (q *Queue[K]) nodeOf(key K) *node[K] {
	e := q.pods[key]
	if e == nil {
		panic(fmt.Sprintf("warm: pod %v is not in the queue", key))
	}
	return q.nodes[e.Value.(Pod[K]).Node]
}

// Has reports whether a pod is in the queue.
func (q *Queue[K]) Has(key K) bool { return q.pods[key] != nil }

// Len is the number of pods.
func (q *Queue[K]) Len() int { return len(q.pods) }

// ByAge returns the pods, oldest first. The queue must not change meanwhile. It costs what sorting the nodes
// does, and for each pod as much as the logarithm of their number.
func (q *Queue[K]) ByAge() iter.Seq[K] {
	return func(yield func(K) bool) {
		var next heads[K]
		for _, n := range q.nodes {
			next = append(next, n.pods.Front())
		}
		heap.Init(&next)
		for len(next) > 0 {
			e := next[0]
			if !yield(e.Value.(Pod[K]).Key) {
				return
			}
			if next[0] = e.Next(); next[0] == nil {
				heap.Pop(&next)
			} else {
				heap.Fix(&next, 0)
			}
		}
	}
}

// heads has the next pod of each node; the oldest is the first.
type heads[K comparable] []*list.Element

func (h heads[K]) Len() int { return len(h) }
func (h heads[K]) Less(i, j int) bool {
	if h[i] == nil || h[j] == nil { // a node that has no more: heap.Pop moves it to the end
		return h[j] == nil && h[i] != nil
	}
	return byAge(h[i].Value.(Pod[K]), h[j].Value.(Pod[K])) < 0
}
func (h heads[K]) Swap(i, j int) { h[i], h[j] = h[j], h[i] }
func (h *heads[K]) Push(e any)   { *h = append(*h, e.(*list.Element)) }
func (h *heads[K]) Pop() any {
	last := len(*h) - 1
	e := (*h)[last]
	*h = (*h)[:last]
	return e
}

// byAge orders pods: the oldest first.
func byAge[K comparable](a, b Pod[K]) int {
	return cmp.Or(a.CreatedAt.Compare(b.CreatedAt), cmp.Compare(a.Name, b.Name))
}

// Check returns the first contradiction between the tables. It is for tests.
func (q *Queue[K]) Check() error {
	n := 0
	for name, x := range q.nodes {
		if x.name != name || x.pods.Len() == 0 {
			return fmt.Errorf("warm: node %q is kept as %q, with %d pods", x.name, name, x.pods.Len())
		}
		n += x.pods.Len()
		for e := x.pods.Front(); e != nil; e = e.Next() {
			p := e.Value.(Pod[K])
			if q.pods[p.Key] != e || p.Node != name {
				return fmt.Errorf("warm: pod %v is not kept with its node", p.Key)
			}
			if next := e.Next(); next != nil && byAge(p, next.Value.(Pod[K])) > 0 {
				return fmt.Errorf("warm: the pods of node %q are not in order", name)
			}
		}
	}
	if n != len(q.pods) || len(q.nodes) != q.turn.Len() {
		return fmt.Errorf("warm: %d pods on nodes, %d known; %d nodes, %d have their turn", n, len(q.pods), len(q.nodes), q.turn.Len())
	}
	return nil
}
