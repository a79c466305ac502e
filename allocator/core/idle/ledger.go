package idle

import (
	"container/list"
	"net/netip"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/deadline"
	"github.com/berth-sandbox/berth/api/activity"
)

const (
	// MaxRound bounds the sandboxes of one round.
	MaxRound = 1000
	// MaxProbes bounds the probes of one call of Due.
	MaxProbes = 64
	// AskAgain is the pause before the next attempt to ask about a sandbox.
	AskAgain = 500 * time.Millisecond
	// AnswerWait is how long routers may take to look twice and to answer. Requests are
	// held meanwhile, for 2 s.
	AnswerWait = 1500 * time.Millisecond
	// The pause between two rounds is the duration of pauseLooks looks, so that the two looks of
	// a round are 5 % of the time of Envoy's main thread.
	pauseLooks = 40
	// MaxPause bounds the pause between two rounds.
	MaxPause = 10 * time.Second
	// ProbeWait is the pause before a probe without an answer is repeated. A router tries three
	// times, 200 ms each and a second apart.
	ProbeWait = 6 * time.Second
	// PersistEvery is how often the activity of one sandbox may be written to its object.
	PersistEvery = time.Minute
	// minBytesTimeout is the shortest idle timeout of a sandbox whose bytes count.
	minBytesTimeout = time.Minute
	// maxDue bounds the sandboxes that one call of Due looks at: after a change of leaders all
	// may be due at once.
	maxDue = 10_000
)

// Ledger has the activity of all running sandboxes. Its methods take the time on the boot clock.
type Ledger struct {
	connectWindow time.Duration
	dryRun        bool

	sandboxes    map[string]*sandbox
	byAddr       map[netip.Addr]*sandbox
	lastRouteSeq uint64
	due          *deadline.Queue // of sandboxes that are not due
	unpersisted  *list.List      // of *sandbox with an idle timeout, in the order of their turns
	persistAt    time.Duration   // the next turn

	routers   []*router // by ID
	leftovers []*leftover

	waiting   []*sandbox // for a round
	asked     []*sandbox // in the round that is under way; nil: none is
	round     uint64     // number of the last one
	answersBy time.Duration
	nextRound time.Duration
}

// Sandbox is what the ledger must know of a sandbox. It does not change.
type Sandbox struct {
	ID   string
	Addr netip.Addr
	// Timeout is after how long without use it is idle. 0: never.
	Timeout time.Duration
	// MinBytes is how many bytes a minute must move over an open connection for it to count as use.
	// 0: an open connection always counts.
	MinBytes uint64
}

// Use is the newest known use of a sandbox.
type Use struct {
	At   time.Duration
	Kind activity.Kind
	// Router has reported it; empty: none has. Open is how many requests it has seen open.
	Router string
	Open   int
}

type sandbox struct {
	Sandbox
	Use
	// routeSeq numbers the sandboxes in the order in which routers could learn their routes.
	routeSeq uint64
	state    state
	// notBefore is the earliest time of the next question about it.
	notBefore time.Duration
	// prober is the router that probes its pod until notBefore; empty: none.
	prober string
	// quietUntil is how long the answer that its pod is not busy holds; 0: it was not probed.
	quietUntil time.Duration
	// turn is its place in Ledger.unpersisted, turnAt the time of its last turn.
	turn   *list.Element
	turnAt time.Duration
}

type state int

const (
	notDue state = iota // or probed
	due                 // waiting, or asked
	decided
)

// New returns an empty ledger. connectWindow is how long a request that was admitted may need to
// open its connection. dryRun: idle sandboxes stay and are asked about again.
func New(connectWindow time.Duration, dryRun bool) *Ledger {
	return &Ledger{
		connectWindow: connectWindow, dryRun: dryRun, sandboxes: map[string]*sandbox{},
		byAddr: map[netip.Addr]*sandbox{}, due: deadline.New(), unpersisted: list.New(),
	}
}

// Add adds a sandbox that was in use at that time. Routers may learn its route from now on.
func (l *Ledger) Add(added Sandbox, at time.Duration, kind activity.Kind, now time.Duration) {
	l.lastRouteSeq++
	s := &sandbox{Sandbox: added, Use: Use{At: at, Kind: kind}, routeSeq: l.lastRouteSeq, turnAt: now}
	l.sandboxes[s.ID], l.byAddr[s.Addr] = s, s
	if s.Timeout > 0 {
		s.turn = l.unpersisted.PushBack(s)
	}
	l.schedule(s)
}

// Remove drops a sandbox that was released. Its release ends a question about it.
func (l *Ledger) Remove(id string) {
	s := l.sandboxes[id]
	if s == nil {
		return
	}
	delete(l.sandboxes, id)
	if l.byAddr[s.Addr] == s {
		delete(l.byAddr, s.Addr)
	}
	l.due.Remove(id)
	if s.turn != nil {
		l.unpersisted.Remove(s.turn)
	}
}

// Note records a use that goes on at this time.
func (l *Ledger) Note(id string, kind activity.Kind, now time.Duration) {
	if s := l.sandboxes[id]; s != nil {
		s.note(Use{At: now, Kind: kind})
	}
}

// Use returns the newest known use of a sandbox.
func (l *Ledger) Use(id string) (Use, bool) {
	if s := l.sandboxes[id]; s != nil {
		return s.Use, true
	}
	return Use{}, false
}

// idleAt is when the idle timeout of a sandbox ends.
func (l *Ledger) idleAt(s *sandbox) time.Duration {
	least := l.connectWindow
	if s.MinBytes > 0 {
		least = max(least, minBytesTimeout)
	}
	return s.At + max(s.Timeout, least)
}

// note records a use unless a newer one is known.
func (s *sandbox) note(u Use) {
	if u.At >= s.At {
		s.Use = u
	}
}

// schedule has Due look at a sandbox when it may be due.
func (l *Ledger) schedule(s *sandbox) {
	if s.Timeout > 0 && s.state == notDue {
		l.due.Set(s.ID, max(l.idleAt(s), s.notBefore))
	}
}

// ToPersist returns the sandboxes whose activity may be written to their objects now. Each sandbox
// with an idle timeout has its turn once in PersistEvery. The turns are spread over that time, so
// the rate of writes is bounded. Turns that were not taken in time come later at the same rate.
func (l *Ledger) ToPersist(now time.Duration) (ids []string) {
	l.persistAt = max(l.persistAt, now-100*time.Millisecond)
	for l.unpersisted.Len() > 0 && l.persistAt <= now {
		first := l.unpersisted.Front()
		s := first.Value.(*sandbox)
		if now < s.turnAt+PersistEvery {
			break
		}
		l.persistAt += PersistEvery / time.Duration(l.unpersisted.Len())
		s.turnAt = now
		l.unpersisted.MoveToBack(first)
		ids = append(ids, s.ID)
	}
	return ids
}
