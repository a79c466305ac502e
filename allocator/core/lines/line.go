package lines

import (
	"container/list"
	"fmt"

	"github.com/berth-sandbox/berth/allocator/core/deadline"
)

// Line has the waiting claims of a pool, and whose turn it is. Each team has a queue. Teams take
// turns, and a turn is one pod: this is deficit round robin with a quantum of one pod.
type Line[R any] struct {
	queues  map[string]*queue[R] // by team, those with a claim
	turns   *list.List           // of *queue; the first is next
	callers int
	pods    int                     // that the claims ask for
	late    *deadline.Queue[uint64] // tokens of the callers, by the ends of their waits
}

// queue has the waiting claims of a team, in the order of their arrival.
type queue[R any] struct {
	team    string
	claims  *list.List // of *Claim
	callers int
	turn    *list.Element // in Line.turns
}

// NewLine returns an empty line.
func NewLine[R any]() *Line[R] {
	return &Line[R]{queues: map[string]*queue[R]{}, turns: list.New(), late: deadline.New[uint64]()}
}

// Callers is how many callers wait in a line, CallersOf how many of a team.
func (l *Line[R]) Callers() int { return l.callers }

// CallersOf is how many callers of a team wait in a line.
func (l *Line[R]) CallersOf(team string) int {
	if q := l.queues[team]; q != nil {
		return q.callers
	}
	return 0
}

// Pods is how many pods the claims in a line ask for.
func (l *Line[R]) Pods() int { return l.pods }

// First returns the claim that is next; nil: none waits.
func (l *Line[R]) First() *Claim[R] { return l.Next(func(*Claim[R]) bool { return true }) }

// Next returns the claim that is next among the oldest ones of each team that may take a pod; nil:
// there is none.
func (l *Line[R]) Next(may func(*Claim[R]) bool) *Claim[R] {
	for e := l.turns.Front(); e != nil; e = e.Next() {
		if cl := e.Value.(*queue[R]).claims.Front().Value.(*Claim[R]); may(cl) {
			return cl
		}
	}
	return nil
}

// Crowding returns the claim that gives up one caller, if the team with the most callers has at least two
// callers more than another one; else nil. In a full line the other team takes that place. So each of n teams can
// have 1/n of the line. It is the claim of that team with the most callers, which goes on if it has others, and the
// newest one of those.
func (l *Line[R]) Crowding(team string) (crowding *Claim[R]) {
	var most *queue[R]
	for e := l.turns.Front(); e != nil; e = e.Next() {
		if q := e.Value.(*queue[R]); most == nil || q.callers > most.callers {
			most = q
		}
	}
	if most == nil || most.callers < l.CallersOf(team)+2 {
		return nil
	}
	for e := most.claims.Front(); e != nil; e = e.Next() {
		if cl := e.Value.(*Claim[R]); crowding == nil || cl.Callers() >= crowding.Callers() {
			crowding = cl
		}
	}
	return crowding
}

// Waits reports whether a claim is in its line.
func (cl *Claim[R]) Waits() bool { return cl.elem != nil }

// Pass ends the turn of the team of a claim that waits.
func (cl *Claim[R]) Pass() { cl.line.turns.MoveToBack(cl.queue().turn) }

// Bind takes a claim out of its line, and ends the turn of its team.
func (cl *Claim[R]) Bind() {
	cl.Pass()
	cl.leave()
}

// Return puts a bound claim back to its place in its line. The next turn is that of its team.
func (cl *Claim[R]) Return() {
	cl.enter()
	cl.line.turns.MoveToFront(cl.queue().turn)
}

func (cl *Claim[R]) queue() *queue[R] { return cl.line.queues[cl.team] }

// enter puts a claim into the queue of its team, before those that came later.
func (cl *Claim[R]) enter() {
	q := cl.queue()
	if q == nil {
		q = &queue[R]{team: cl.team, claims: list.New()}
		q.turn = cl.line.turns.PushBack(q)
		cl.line.queues[cl.team] = q
	}
	cl.line.pods += cl.pods
	cl.count(len(cl.callers))
	for _, x := range cl.callers {
		cl.line.late.Set(x.Token, x.Until)
	}
	if last := q.claims.Back(); last == nil || last.Value.(*Claim[R]).number < cl.number {
		cl.elem = q.claims.PushBack(cl)
		return
	}
	at := q.claims.Front() // a claim that returns is older than most
	for at.Value.(*Claim[R]).number < cl.number {
		at = at.Next()
	}
	cl.elem = q.claims.InsertBefore(cl, at)
}

// leave takes a claim out of the queue of its team.
func (cl *Claim[R]) leave() {
	q := cl.queue()
	cl.line.pods -= cl.pods
	cl.count(-len(cl.callers))
	for _, x := range cl.callers {
		cl.line.late.Remove(x.Token)
	}
	q.claims.Remove(cl.elem)
	cl.elem = nil
	if q.claims.Len() == 0 {
		cl.line.turns.Remove(q.turn)
		delete(cl.line.queues, cl.team)
	}
}

// count adds to the number of the callers that wait.
func (cl *Claim[R]) count(callers int) {
	cl.line.callers += callers
	cl.queue().callers += callers
}

// waiting lists the claims of a line, of one team after the other.
func (l *Line[R]) waiting() (all []*Claim[R]) {
	for e := l.turns.Front(); e != nil; e = e.Next() {
		for f := e.Value.(*queue[R]).claims.Front(); f != nil; f = f.Next() {
			all = append(all, f.Value.(*Claim[R]))
		}
	}
	return all
}

func (l *Line[R]) check() error {
	all, pods := 0, 0
	for team, q := range l.queues {
		last, callers := uint64(0), 0
		for e := q.claims.Front(); e != nil; e = e.Next() {
			cl := e.Value.(*Claim[R])
			if cl.elem != e || cl.line != l || cl.team != team || cl.number <= last || len(cl.callers) == 0 {
				return fmt.Errorf("lines: %+v waits after claim %d", *cl, last)
			}
			for _, x := range cl.callers {
				if until, ok := l.late.At(x.Token); !ok || until != x.Until {
					return fmt.Errorf("lines: caller %+v is late at %v: %v", x, until, ok)
				}
			}
			callers += len(cl.callers)
			pods += cl.pods
			last = cl.number
		}
		if q.team != team || last == 0 || callers != q.callers || q.turn.Value.(*queue[R]) != q {
			return fmt.Errorf("lines: team %q is kept as %+v, with %d callers", team, *q, callers)
		}
		all += callers
	}
	if err := l.late.Check(); err != nil || l.late.Len() != all {
		return fmt.Errorf("lines: %d callers wait in a line, %d can be late: %w", all, l.late.Len(), err)
	}
	if pods != l.pods {
		return fmt.Errorf("lines: the claims of a line ask for %d pods, counted are %d", pods, l.pods)
	}
	if all != l.callers || len(l.queues) != l.turns.Len() {
		return fmt.Errorf("lines: %d callers of %d teams wait in a line, counted are %d of %d", all, len(l.queues), l.callers, l.turns.Len())
	}
	return nil
}
