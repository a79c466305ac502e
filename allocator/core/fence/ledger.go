package fence

import (
	"cmp"
	"container/list"
	"fmt"
	"iter"
	"slices"
	"time"
)

// Ledger has the fences of all released sandboxes.
type Ledger struct {
	connectWindow time.Duration
	fences        map[string]*fence // by sandbox, or by what else the owner of the ledger fences
	underWay      *list.List        // of *fence: those that are not complete
	owed          map[string][]owed // by router, in the order of sequences
	unsent        []*fence          // those that have begun since AllSent
}

type fence struct {
	sandbox string
	// waiting has the routers that are waited for, each with the sequence of the message whose
	// acknowledgement ends the wait; 0: no such message was sent yet.
	waiting   map[string]uint64
	routers   int // that it began with
	began     time.Duration
	cleared   bool
	clearedAt time.Duration
	elem      *list.Element // in Ledger.underWay; nil: complete
}

// owed is an acknowledgement that a connected router owes.
type owed struct {
	sequence uint64
	fence    *fence
}

// New returns an empty ledger. connectWindow is how long a request that was admitted may need
// to open its connection.
func New(connectWindow time.Duration) *Ledger {
	return &Ledger{
		connectWindow: connectWindow, fences: map[string]*fence{}, underWay: list.New(), owed: map[string][]owed{},
	}
}

// Begin begins the fence of a sandbox that has none. It waits for these routers.
func (l *Ledger) Begin(sandbox string, routers []string, now time.Duration) {
	f := &fence{sandbox: sandbox, waiting: make(map[string]uint64, len(routers)), routers: len(routers), began: now}
	for _, r := range routers {
		f.waiting[r] = 0
	}
	f.elem = l.underWay.PushBack(f)
	l.fences[sandbox] = f
	l.unsent = append(l.unsent, f)
}

// Began reports whether the sandbox has a fence, when it began, and for how many routers it
// waited then.
func (l *Ledger) Began(sandbox string) (at time.Duration, routers int, ok bool) {
	if f := l.fences[sandbox]; f != nil {
		return f.began, f.routers, true
	}
	return 0, 0, false
}

// Reopen has a complete fence under way again, because the pod of its sandbox was found after
// all. Advance completes it again.
func (l *Ledger) Reopen(sandbox string) {
	if f := l.fences[sandbox]; f.elem == nil {
		f.elem = l.underWay.PushBack(f)
	}
}

// Forget drops a complete fence. It keeps one that is under way.
func (l *Ledger) Forget(sandbox string) {
	if l.Complete(sandbox) {
		delete(l.fences, sandbox)
	}
}

// Drop ends a fence, whatever it waits for.
func (l *Ledger) Drop(sandbox string) {
	f := l.fences[sandbox]
	if f == nil {
		return
	}
	if f.elem != nil {
		l.underWay.Remove(f.elem)
	}
	delete(l.fences, sandbox)
	l.unsent = slices.DeleteFunc(l.unsent, func(x *fence) bool { return x == f })
	for router, all := range l.owed {
		l.owed[router] = slices.DeleteFunc(all, func(o owed) bool { return o.fence == f })
	}
}

// Complete reports whether the fence of a sandbox is complete. It is not if there is none.
func (l *Ledger) Complete(sandbox string) bool {
	f := l.fences[sandbox]
	return f != nil && f.elem == nil
}

// Await has every fence that is under way wait for one more router. The connect window of a
// fence that was cleared before does not begin again: the caller keeps the router for that long.
func (l *Ledger) Await(router string) {
	for f := range l.all() {
		f.waiting[router] = 0
	}
}

// HasUnsent reports whether fences have begun since AllSent.
func (l *Ledger) HasUnsent() bool { return len(l.unsent) > 0 }

// Unsent lists the sandboxes whose fences have begun since AllSent and wait for a router that was
// not sent their release. A snapshot that was sent since stands for the release.
func (l *Ledger) Unsent(router string) (sandboxes []string) {
	for _, f := range l.unsent {
		if sequence, waits := f.waiting[router]; waits && sequence == 0 {
			sandboxes = append(sandboxes, f.sandbox)
		}
	}
	return sandboxes
}

// AllSent notes that each connected router was sent the releases of all fences. Other routers
// receive a snapshot when they connect.
func (l *Ledger) AllSent() { l.unsent = nil }

// Sent notes the message that carried these releases to a connected router. Its sequence is above
// all that were sent to it since its last snapshot.
func (l *Ledger) Sent(router string, sequence uint64, sandboxes []string) {
	for _, id := range sandboxes {
		f := l.fences[id]
		f.waiting[router] = sequence
		l.owed[router] = append(l.owed[router], owed{sequence, f})
	}
}

// SentSnapshot notes the first message of a stream. Its acknowledgement counts for every fence
// that is under way, because a snapshot has no released sandbox.
func (l *Ledger) SentSnapshot(router string, sequence uint64) {
	l.Disconnected(router)
	for f := range l.all() {
		if _, waits := f.waiting[router]; waits {
			f.waiting[router] = sequence
			l.owed[router] = append(l.owed[router], owed{sequence, f})
		}
	}
}

// Disconnected notes that a router acknowledges nothing more on its stream.
func (l *Ledger) Disconnected(router string) { delete(l.owed, router) }

// Acknowledge notes that every message up to a sequence has taken effect at a router. It
// returns the sandboxes whose fences waited for that.
func (l *Ledger) Acknowledge(router string, upTo uint64) (sandboxes []string) {
	all := l.owed[router]
	n := 0
	for ; n < len(all) && all[n].sequence <= upTo; n++ {
		delete(all[n].fence.waiting, router)
		sandboxes = append(sandboxes, all[n].fence.sandbox)
	}
	if l.owed[router] = all[n:]; n == len(all) {
		delete(l.owed, router)
	}
	return sandboxes
}

// Remove ends the wait for a router that can route to nothing any more. It returns the
// sandboxes whose fences waited for it.
func (l *Ledger) Remove(router string) (sandboxes []string) {
	delete(l.owed, router)
	for f := range l.all() {
		if _, waits := f.waiting[router]; waits {
			delete(f.waiting, router)
			sandboxes = append(sandboxes, f.sandbox)
		}
	}
	return sandboxes
}

// Advance moves a fence on. cleared and complete are set by the call that finds it so.
func (l *Ledger) Advance(sandbox string, now time.Duration) (cleared, complete bool) {
	f := l.fences[sandbox]
	if f == nil || f.elem == nil || len(f.waiting) > 0 {
		return false, false
	}
	if !f.cleared {
		f.cleared, f.clearedAt, cleared = true, now, true
	}
	if now < f.clearedAt+l.connectWindow {
		return cleared, false
	}
	l.underWay.Remove(f.elem)
	f.elem, f.waiting = nil, map[string]uint64{} // an emptied map keeps its size
	return cleared, true
}

// Len is the number of fences that are under way.
func (l *Ledger) Len() int { return l.underWay.Len() }

// UnderWay lists the sandboxes whose fences are under way, in the order in which they began.
// Fences may be completed meanwhile.
func (l *Ledger) UnderWay() iter.Seq[string] {
	return func(yield func(string) bool) {
		for f := range l.all() {
			if !yield(f.sandbox) {
				return
			}
		}
	}
}

func (l *Ledger) all() iter.Seq[*fence] {
	return func(yield func(*fence) bool) {
		for e := l.underWay.Front(); e != nil; {
			f := e.Value.(*fence)
			e = e.Next()
			if !yield(f) {
				return
			}
		}
	}
}

// Waiting lists the routers that a fence waits for, in no order, each with the sequence of the
// message whose acknowledgement ends the wait, as it was sent last; 0: none was.
func (l *Ledger) Waiting(sandbox string) iter.Seq2[string, uint64] {
	return func(yield func(string, uint64) bool) {
		if f := l.fences[sandbox]; f != nil {
			for router, sequence := range f.waiting {
				if !yield(router, sequence) {
					return
				}
			}
		}
	}
}

// CountWaiting is how many routers a fence waits for.
func (l *Ledger) CountWaiting(sandbox string) int {
	if f := l.fences[sandbox]; f != nil {
		return len(f.waiting)
	}
	return 0
}

// WindowLeft is what is left of the connect window of a fence. It is 0 while routers are
// waited for.
func (l *Ledger) WindowLeft(sandbox string, now time.Duration) time.Duration {
	if f := l.fences[sandbox]; f != nil && f.cleared && len(f.waiting) == 0 {
		return max(0, f.clearedAt+l.connectWindow-now)
	}
	return 0
}

// CountByRouter is how many fences wait for each router.
func (l *Ledger) CountByRouter() map[string]int {
	n := map[string]int{}
	for f := range l.all() {
		for router := range f.waiting {
			n[router]++
		}
	}
	return n
}

// Check returns the first contradiction between the tables. It is for tests.
func (l *Ledger) Check() error {
	for e := l.underWay.Front(); e != nil; e = e.Next() {
		if f := e.Value.(*fence); f.elem != e || l.fences[f.sandbox] != f {
			return fmt.Errorf("fence: %s is under way and not known, or listed twice", f.sandbox)
		}
	}
	listed := 0
	for id, f := range l.fences {
		if f.sandbox != id {
			return fmt.Errorf("fence: %s is kept as %s", f.sandbox, id)
		}
		if f.elem != nil {
			listed++
		}
		if f.elem == nil && len(f.waiting) > 0 {
			return fmt.Errorf("fence: %s is complete and waits for %v", id, f.waiting)
		}
	}
	if listed != l.underWay.Len() {
		return fmt.Errorf("fence: %d fences are under way, %d are listed", listed, l.underWay.Len())
	}
	for router, all := range l.owed {
		if len(all) == 0 || !slices.IsSortedFunc(all, func(a, b owed) int { return cmp.Compare(a.sequence, b.sequence) }) {
			return fmt.Errorf("fence: what %s owes is empty or not in order: %v", router, all)
		}
		for _, o := range all {
			if o.fence.waiting[router] != o.sequence {
				return fmt.Errorf("fence: %s owes message %d for %s, which waits for %v", router, o.sequence, o.fence.sandbox, o.fence.waiting)
			}
		}
	}
	return nil
}
