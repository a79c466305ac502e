package claims

import (
	"container/list"
	"crypto/sha256"
	"fmt"
	"maps"
	"math"
	"slices"
	"time"
)

// Caller waits for a sandbox.
type Caller struct {
	Token uint64
	// Until is its deadline.
	Until time.Duration
}

// All is the time by which every caller is late.
const All = time.Duration(math.MaxInt64)

// Key is an idempotency key of a team. Without Key.Key it is none.
type Key struct{ Team, Key string }

// Hash is that of the body of a claim.
type Hash = [sha256.Size]byte

// Claim is a claim of one caller, or of several with one idempotency key. R is what its owner
// knows of it.
type Claim[R any] struct {
	Request R
	key     Key
	number  uint64 // in the order of arrival
	callers []Caller
	line    *Line[R]
	elem    *list.Element // in line; nil: it is bound
}

// Waits reports whether a claim is in its line.
func (cl *Claim[R]) Waits() bool { return cl.elem != nil }

// Callers is how many callers wait for a claim.
func (cl *Claim[R]) Callers() int { return len(cl.callers) }

// Bind takes a claim out of its line.
func (cl *Claim[R]) Bind() {
	cl.line.claims.Remove(cl.elem)
	cl.line.callers -= len(cl.callers)
	cl.elem = nil
}

// Return puts a bound claim back to its place in its line.
func (cl *Claim[R]) Return() {
	cl.line.callers += len(cl.callers)
	at := cl.line.claims.Back()
	for at != nil && at.Value.(*Claim[R]).number > cl.number {
		at = at.Prev()
	}
	if at == nil {
		cl.elem = cl.line.claims.PushFront(cl)
	} else {
		cl.elem = cl.line.claims.InsertAfter(cl, at)
	}
}

// Line has the waiting claims of a pool.
type Line[R any] struct {
	claims  *list.List // of *Claim
	callers int
}

// NewLine returns an empty line.
func NewLine[R any]() *Line[R] { return &Line[R]{claims: list.New()} }

// Callers is how many callers wait in a line.
func (l *Line[R]) Callers() int { return l.callers }

// First returns the claim that is next; nil: none waits.
func (l *Line[R]) First() *Claim[R] {
	if e := l.claims.Front(); e != nil {
		return e.Value.(*Claim[R])
	}
	return nil
}

// Holder is what an idempotency key stands for: a claim, or a sandbox.
type Holder[R any] struct {
	Hash    Hash
	Claim   *Claim[R]
	Sandbox string
}

// Ledger has all claims, callers and keys.
type Ledger[R any] struct {
	last     uint64                   // number of the last claim
	claims   map[uint64]*Claim[R]     // by token
	keys     map[Key]*Holder[R]       // that are not free
	starting map[string][]Caller      // by sandbox
	kept     *list.List               // of kept, in the order in which they end
	keptOf   map[string]*list.Element // by sandbox
}

// kept is the key of a sandbox that was released.
type kept struct {
	key     Key
	sandbox string
	since   time.Duration
}

// New returns an empty ledger.
func New[R any]() *Ledger[R] {
	return &Ledger[R]{
		claims: map[uint64]*Claim[R]{}, keys: map[Key]*Holder[R]{}, starting: map[string][]Caller{},
		kept: list.New(), keptOf: map[string]*list.Element{},
	}
}

// Add puts a new claim at the end of a line. Its key is free.
func (l *Ledger[R]) Add(line *Line[R], caller Caller, key Key, hash Hash, request R) {
	l.last++
	cl := &Claim[R]{Request: request, key: key, number: l.last, line: line}
	if key.Key != "" {
		l.keys[key] = &Holder[R]{Hash: hash, Claim: cl}
	}
	cl.Return()
	l.Join(cl, caller)
}

// Join adds a caller to a claim.
func (l *Ledger[R]) Join(cl *Claim[R], caller Caller) {
	cl.callers = append(cl.callers, caller)
	l.claims[caller.Token] = cl
	if cl.Waits() {
		cl.line.callers++
	}
}

// Of returns what a key stands for; nil: it is free, or none.
func (l *Ledger[R]) Of(key Key) *Holder[R] { return l.keys[key] }

// Drop forgets a claim that gets no sandbox, and returns its callers.
func (l *Ledger[R]) Drop(cl *Claim[R]) []Caller {
	if cl.Waits() {
		cl.Bind()
	}
	for _, x := range cl.callers {
		delete(l.claims, x.Token)
	}
	if cl.key.Key != "" {
		delete(l.keys, cl.key)
	}
	return cl.callers
}

// Expire removes the callers in a line that are late, and the claims that have no other callers.
func (l *Ledger[R]) Expire(line *Line[R], now time.Duration) (late []Caller) {
	for e := line.claims.Front(); e != nil; {
		cl := e.Value.(*Claim[R])
		e = e.Next()
		left, over := split(cl.callers, now)
		for _, x := range over {
			delete(l.claims, x.Token)
		}
		cl.callers = left
		line.callers -= len(over)
		late = append(late, over...)
		if len(left) == 0 {
			l.Drop(cl)
		}
	}
	return late
}

// Abandon removes a caller. It returns the claim, or the sandbox, that has no caller any more because
// of that.
func (l *Ledger[R]) Abandon(token uint64) (cl *Claim[R], sandbox string) {
	is := func(x Caller) bool { return x.Token == token }
	if cl := l.claims[token]; cl != nil {
		delete(l.claims, token)
		cl.callers = slices.DeleteFunc(cl.callers, is)
		if cl.Waits() {
			cl.line.callers--
		}
		if len(cl.callers) == 0 {
			return cl, ""
		}
		return nil, ""
	}
	for id, callers := range l.starting {
		if !slices.ContainsFunc(callers, is) {
			continue
		}
		if l.setStarting(id, slices.DeleteFunc(callers, is)); l.starting[id] == nil {
			return nil, id
		}
	}
	return nil, ""
}

// Grant notes that a bound claim got a sandbox. Its callers wait for the sandbox from now on, and
// its key stands for it.
func (l *Ledger[R]) Grant(cl *Claim[R], sandbox string) {
	if k := l.keys[cl.key]; k != nil {
		k.Claim, k.Sandbox = nil, sandbox
	}
	for _, x := range cl.callers {
		delete(l.claims, x.Token)
	}
	l.setStarting(sandbox, cl.callers)
}

// Await adds a caller that waits for a sandbox.
func (l *Ledger[R]) Await(sandbox string, caller Caller) {
	l.starting[sandbox] = append(l.starting[sandbox], caller)
}

// Awaited lists the sandboxes that callers wait for, by ID.
func (l *Ledger[R]) Awaited() []string { return slices.Sorted(maps.Keys(l.starting)) }

// CountAwaiting is how many callers wait for a sandbox.
func (l *Ledger[R]) CountAwaiting(sandbox string) int { return len(l.starting[sandbox]) }

// Answer removes and returns the callers that wait for a sandbox and are late.
func (l *Ledger[R]) Answer(sandbox string, now time.Duration) []Caller {
	left, late := split(l.starting[sandbox], now)
	l.setStarting(sandbox, left)
	return late
}

func (l *Ledger[R]) setStarting(sandbox string, callers []Caller) {
	if len(callers) == 0 {
		delete(l.starting, sandbox)
	} else {
		l.starting[sandbox] = callers
	}
}

func split(callers []Caller, now time.Duration) (left, late []Caller) {
	for _, x := range callers {
		if x.Until <= now {
			late = append(late, x)
		} else {
			left = append(left, x)
		}
	}
	return left, late
}

// Recover notes the key of a sandbox of an earlier term, if there is one.
func (l *Ledger[R]) Recover(key Key, hash Hash, sandbox string) {
	if key.Key != "" {
		l.keys[key] = &Holder[R]{Hash: hash, Sandbox: sandbox}
	}
}

// Keep begins the time for which the key of a released sandbox holds longer, if there is one. since
// is not before that of the last call.
func (l *Ledger[R]) Keep(key Key, sandbox string, since time.Duration) {
	if key.Key != "" {
		l.keptOf[sandbox] = l.kept.PushBack(kept{key, sandbox, since})
	}
}

// Keeps reports whether the key of a released sandbox holds.
func (l *Ledger[R]) Keeps(sandbox string) bool { return l.keptOf[sandbox] != nil }

// DropKeys frees the keys that are kept since a time or longer, and returns their sandboxes.
func (l *Ledger[R]) DropKeys(since time.Duration) (sandboxes []string) {
	for e := l.kept.Front(); e != nil && e.Value.(kept).since <= since; e = l.kept.Front() {
		k := l.kept.Remove(e).(kept)
		delete(l.keptOf, k.sandbox)
		if h := l.keys[k.key]; h != nil && h.Sandbox == k.sandbox {
			delete(l.keys, k.key)
		}
		sandboxes = append(sandboxes, k.sandbox)
	}
	return sandboxes
}

// Has reports whether a caller waits. It is for tests.
func (l *Ledger[R]) Has(token uint64) bool {
	for _, callers := range l.starting {
		if slices.ContainsFunc(callers, func(x Caller) bool { return x.Token == token }) {
			return true
		}
	}
	return l.claims[token] != nil
}

// Check returns the first contradiction between the tables. lines are all that exist. It is for
// tests.
func (l *Ledger[R]) Check(lines []*Line[R]) error {
	for _, line := range lines {
		last, callers := uint64(0), 0
		for e := line.claims.Front(); e != nil; e = e.Next() {
			cl := e.Value.(*Claim[R])
			if cl.elem != e || cl.line != line || cl.number <= last || len(cl.callers) == 0 {
				return fmt.Errorf("claims: %+v waits after claim %d", *cl, last)
			}
			callers += len(cl.callers)
			last = cl.number
		}
		if callers != line.callers {
			return fmt.Errorf("claims: %d callers wait in a line, counted are %d", callers, line.callers)
		}
	}
	for token, cl := range l.claims {
		if !slices.ContainsFunc(cl.callers, func(x Caller) bool { return x.Token == token }) {
			return fmt.Errorf("claims: caller %d is not one of %+v", token, *cl)
		}
	}
	for id, callers := range l.starting {
		if len(callers) == 0 {
			return fmt.Errorf("claims: no caller waits for %s, which is listed", id)
		}
	}
	for key, k := range l.keys {
		if key.Key == "" || (k.Claim != nil) == (k.Sandbox != "") || k.Claim != nil && k.Claim.key != key {
			return fmt.Errorf("claims: key %v stands for %+v", key, *k)
		}
	}
	if l.kept.Len() != len(l.keptOf) {
		return fmt.Errorf("claims: %d keys are kept, of %d sandboxes", l.kept.Len(), len(l.keptOf))
	}
	return nil
}
