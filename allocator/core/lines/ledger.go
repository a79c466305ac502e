package lines

import (
	"container/list"
	"crypto/sha256"
	"fmt"
	"maps"
	"math"
	"slices"
	"time"
)

// Caller waits for a sandbox, or for several.
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
	team    string
	pods    int    // that it asks for
	number  uint64 // in the order of arrival
	callers []Caller
	line    *Line[R]
	elem    *list.Element // in the queue of its team; nil: it is bound
}

// Callers is how many callers wait for a claim.
func (cl *Claim[R]) Callers() int { return len(cl.callers) }

// Newest is the token of the caller that came last.
func (cl *Claim[R]) Newest() uint64 { return cl.callers[len(cl.callers)-1].Token }

// Late reports whether the deadline of one of its callers has come.
func (cl *Claim[R]) Late(now time.Duration) bool {
	return slices.ContainsFunc(cl.callers, func(x Caller) bool { return x.Until <= now })
}

// Holder is what an idempotency key stands for: a claim, or what was granted to it.
type Holder[R any] struct {
	Hash  Hash
	Claim *Claim[R]
	Grant string
	// holds is how many sandboxes of the grant are live, or keep the key.
	holds int
}

// Ledger has all claims, callers and keys.
type Ledger[R any] struct {
	last     uint64                   // number of the last claim
	claims   map[uint64]*Claim[R]     // by token
	asked    map[string]int           // pods that claims without a grant ask for, by team
	keys     map[Key]*Holder[R]       // that are not free
	starting map[string][]Caller      // by grant
	kept     *list.List               // of kept, in the order in which they end
	keptOf   map[string]*list.Element // by sandbox
}

// kept is the key of a sandbox that was released.
type kept struct {
	key            Key
	grant, sandbox string
	since          time.Duration
}

// New returns an empty ledger.
func New[R any]() *Ledger[R] {
	return &Ledger[R]{
		claims: map[uint64]*Claim[R]{}, asked: map[string]int{}, keys: map[Key]*Holder[R]{},
		starting: map[string][]Caller{}, kept: list.New(), keptOf: map[string]*list.Element{},
	}
}

// Add puts a new claim of so many pods at the end of the queue of its team. Its key is free.
func (l *Ledger[R]) Add(line *Line[R], caller Caller, key Key, hash Hash, pods int, request R) *Claim[R] {
	l.last++
	cl := &Claim[R]{Request: request, key: key, team: key.Team, pods: pods, number: l.last, line: line}
	if key.Key != "" {
		l.keys[key] = &Holder[R]{Hash: hash, Claim: cl}
	}
	l.ask(cl, pods)
	cl.enter()
	l.AddCaller(cl, caller)
	return cl
}

// ask adds to the number of pods that a team asks for.
func (l *Ledger[R]) ask(cl *Claim[R], pods int) {
	if l.asked[cl.team] += pods; l.asked[cl.team] == 0 {
		delete(l.asked, cl.team)
	}
}

// Asked is how many pods the claims of a team ask for that are waiting or bound.
func (l *Ledger[R]) Asked(team string) int { return l.asked[team] }

// AddCaller adds a caller to a claim.
func (l *Ledger[R]) AddCaller(cl *Claim[R], caller Caller) {
	cl.callers = append(cl.callers, caller)
	l.claims[caller.Token] = cl
	if cl.Waits() {
		cl.count(1)
		cl.line.late.Set(caller.Token, caller.Until)
	}
}

// Of returns what a key stands for; nil: it is free, or none.
func (l *Ledger[R]) Of(key Key) *Holder[R] { return l.keys[key] }

// Drop forgets a claim that gets no sandbox, and returns its callers.
func (l *Ledger[R]) Drop(cl *Claim[R]) []Caller {
	if cl.Waits() {
		cl.leave()
	}
	l.ask(cl, -cl.pods)
	for _, x := range cl.callers {
		delete(l.claims, x.Token)
	}
	if cl.key.Key != "" {
		delete(l.keys, cl.key)
	}
	return cl.callers
}

// Expire removes and returns the callers in a line that are late, and the claims that have no other callers. It
// looks at no other claim.
func (l *Ledger[R]) Expire(line *Line[R], now time.Duration) (late []Caller, dropped []*Claim[R]) {
	for _, token := range line.late.Due(now, line.callers) {
		cl := l.claims[token]
		if cl == nil { // removed with another caller of its claim
			continue
		}
		over := l.ExpireBound(cl, now)
		cl.count(-len(over))
		late = append(late, over...)
		if cl.Callers() == 0 {
			l.Drop(cl)
			dropped = append(dropped, cl)
		}
	}
	return late, dropped
}

// ExpireBound removes and returns the callers of a bound claim that are late. The claim stays without callers.
func (l *Ledger[R]) ExpireBound(cl *Claim[R], now time.Duration) (late []Caller) {
	cl.callers, late = split(cl.callers, now)
	for _, x := range late {
		delete(l.claims, x.Token)
	}
	return late
}

// Abandon removes a caller. It returns the claim, or the grant, that has no caller any more because
// of that.
func (l *Ledger[R]) Abandon(token uint64) (cl *Claim[R], grant string) {
	is := func(x Caller) bool { return x.Token == token }
	if cl := l.claims[token]; cl != nil {
		delete(l.claims, token)
		cl.callers = slices.DeleteFunc(cl.callers, is)
		if cl.Waits() {
			cl.count(-1)
			cl.line.late.Remove(token)
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

// Grant notes that a bound claim got so many sandboxes. Its callers wait for them from now on, and
// its key stands for them. The ID of a grant is never used twice.
func (l *Ledger[R]) Grant(cl *Claim[R], grant string, sandboxes int) {
	if k := l.keys[cl.key]; k != nil {
		k.Claim, k.Grant, k.holds = nil, grant, sandboxes
	}
	l.ask(cl, -cl.pods)
	for _, x := range cl.callers {
		delete(l.claims, x.Token)
	}
	l.setStarting(grant, cl.callers)
}

// Await adds a caller that waits for a grant.
func (l *Ledger[R]) Await(grant string, caller Caller) {
	l.starting[grant] = append(l.starting[grant], caller)
}

// Awaited lists the grants that callers wait for, by ID.
func (l *Ledger[R]) Awaited() []string { return slices.Sorted(maps.Keys(l.starting)) }

// CountAwaiting is how many callers wait for a grant.
func (l *Ledger[R]) CountAwaiting(grant string) int { return len(l.starting[grant]) }

// Answer removes and returns the callers that wait for a grant and are late.
func (l *Ledger[R]) Answer(grant string, now time.Duration) []Caller {
	left, late := split(l.starting[grant], now)
	l.setStarting(grant, left)
	return late
}

func (l *Ledger[R]) setStarting(grant string, callers []Caller) {
	if len(callers) == 0 {
		delete(l.starting, grant)
	} else {
		l.starting[grant] = callers
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

// Recover notes the key of a sandbox of an earlier term, if there is one. Sandboxes of one grant come
// after those of all earlier grants of the key.
func (l *Ledger[R]) Recover(key Key, hash Hash, grant string) {
	if key.Key == "" {
		return
	}
	if k := l.keys[key]; k == nil || k.Grant != grant {
		l.keys[key] = &Holder[R]{Hash: hash, Grant: grant}
	}
	l.keys[key].holds++
}

// Free ends the holding of the key for one sandbox of a grant that no caller was given.
func (l *Ledger[R]) Free(key Key, grant string) {
	if h := l.keys[key]; h != nil && h.Grant == grant {
		if h.holds--; h.holds == 0 {
			delete(l.keys, key)
		}
	}
}

// Keep begins the time for which the key of a released sandbox holds longer, if there is one. since
// is not before that of the last call.
func (l *Ledger[R]) Keep(key Key, grant, sandbox string, since time.Duration) {
	if key.Key != "" {
		l.keptOf[sandbox] = l.kept.PushBack(kept{key, grant, sandbox, since})
	}
}

// Keeps reports whether the key of a released sandbox holds.
func (l *Ledger[R]) Keeps(sandbox string) bool { return l.keptOf[sandbox] != nil }

// DropKeys ends the keeping that began at a time or before, and returns the sandboxes. A key is free
// when no sandbox of its grant is live or keeps it.
func (l *Ledger[R]) DropKeys(since time.Duration) (sandboxes []string) {
	for e := l.kept.Front(); e != nil && e.Value.(kept).since <= since; e = l.kept.Front() {
		k := l.kept.Remove(e).(kept)
		delete(l.keptOf, k.sandbox)
		l.Free(k.key, k.grant)
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

// CheckAsked compares what teams ask for with the claims: those in all lines and all bound ones. It
// is for tests.
func (l *Ledger[R]) CheckAsked(lines []*Line[R], bound []*Claim[R]) error {
	asked := map[string]int{}
	for _, line := range lines {
		bound = slices.Concat(bound, line.waiting())
	}
	for _, cl := range bound {
		asked[cl.team] += cl.pods
	}
	if !maps.Equal(asked, l.asked) {
		return fmt.Errorf("lines: teams ask for %v pods, counted are %v", asked, l.asked)
	}
	return nil
}

// Check returns the first contradiction between the tables. lines are all that exist. It is for
// tests.
func (l *Ledger[R]) Check(lines []*Line[R]) error {
	for _, line := range lines {
		if err := line.check(); err != nil {
			return err
		}
	}
	for token, cl := range l.claims {
		if !slices.ContainsFunc(cl.callers, func(x Caller) bool { return x.Token == token }) {
			return fmt.Errorf("lines: caller %d is not one of %+v", token, *cl)
		}
	}
	for id, callers := range l.starting {
		if len(callers) == 0 {
			return fmt.Errorf("lines: no caller waits for %s, which is listed", id)
		}
	}
	for key, k := range l.keys {
		if key.Key == "" || (k.Claim != nil) == (k.Grant != "") || k.Claim != nil && k.Claim.key != key || (k.Grant != "") != (k.holds > 0) {
			return fmt.Errorf("lines: key %v stands for %+v", key, *k)
		}
	}
	if l.kept.Len() != len(l.keptOf) {
		return fmt.Errorf("lines: %d keys are kept, of %d sandboxes", l.kept.Len(), len(l.keptOf))
	}
	return nil
}
