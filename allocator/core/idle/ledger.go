package idle

import (
	"time"

	"github.com/berth-sandbox/berth/allocator/core/deadline"
	"github.com/berth-sandbox/berth/api/activity"
)

const (
	// MaxRound bounds the sandboxes of one round.
	MaxRound = 1000
	// MaxProbes bounds the probes of one call of Ask.
	MaxProbes = 500
	// AskAgain is the pause before the next attempt to ask about a sandbox.
	AskAgain = 500 * time.Millisecond
	// AnswerWait is how long routers may take to look twice and to answer. Routers hold requests
	// for 2 s meanwhile, and answer within 1.6 s.
	AnswerWait = 1800 * time.Millisecond
	// MaxLook is how long a look of a router may take. Two longer ones could be too late.
	MaxLook = 700 * time.Millisecond
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
	// maxDue bounds the sandboxes that one call of Ask looks at: after a change of leaders all
	// may be due at once.
	maxDue = 10_000
)

// Ledger has the activity of all running sandboxes. Its methods take the time on the boot clock.
type Ledger struct {
	connectWindow time.Duration
	dryRun        bool

	sandboxes    map[string]*sandbox
	expected     map[string]uint64 // the numbers of sandboxes that were expected, see Expect
	lastRouteSeq uint64
	due          *deadline.Queue[string] // of sandboxes that are neither asked about nor decided
	turns        *deadline.Queue[string] // of sandboxes with an idle timeout: their next turns
	persistAt    time.Duration           // the earliest next turn

	routers   []*router // by ID
	leftovers []*leftover

	asked     []*sandbox // in the round that is under way; nil: none is
	round     uint64     // number of the last one
	answersBy time.Duration
	nextRound time.Duration
	probe     uint64 // number of the last one
}

// Sandbox is what the ledger must know of a sandbox. It does not change.
type Sandbox struct {
	ID string
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
	// notBefore is the earliest time of the next question about it.
	notBefore time.Duration
	// probe is the number of the probe that is under way until notBefore; 0: none.
	probe uint64
	// quietUntil is how long the answer that its pod is not busy holds; 0: it was not probed.
	quietUntil time.Duration
}

// New returns an empty ledger. connectWindow is how long a request that was admitted may need to
// open its connection. dryRun: idle sandboxes stay and are asked about again.
func New(connectWindow time.Duration, dryRun bool) *Ledger {
	return &Ledger{
		connectWindow: connectWindow, dryRun: dryRun, sandboxes: map[string]*sandbox{}, expected: map[string]uint64{},
		due: deadline.New[string](), turns: deadline.New[string](),
	}
}

// Expect notes that routers may have learned the route of a sandbox that is added later, if at all.
func (l *Ledger) Expect(id string) {
	l.lastRouteSeq++
	l.expected[id] = l.lastRouteSeq
}

// Add adds a sandbox that was in use at that time. Routers may learn its route from now on, unless it was expected.
func (l *Ledger) Add(added Sandbox, at time.Duration, kind activity.Kind, now time.Duration) {
	seq, expected := l.expected[added.ID]
	if delete(l.expected, added.ID); !expected {
		l.lastRouteSeq++
		seq = l.lastRouteSeq
	}
	s := &sandbox{Sandbox: added, Use: Use{At: at, Kind: kind}, routeSeq: seq}
	l.sandboxes[s.ID] = s
	if s.Timeout > 0 {
		l.turns.Set(s.ID, now+PersistEvery)
	}
	l.schedule(s)
}

// Remove drops a sandbox that was released. Its release ends a question about it.
func (l *Ledger) Remove(id string) {
	delete(l.sandboxes, id)
	delete(l.expected, id)
	l.due.Remove(id)
	l.turns.Remove(id)
}

// Suspend drops a sandbox that is added again later. What may know its route or leave it in use still does then.
func (l *Ledger) Suspend(id string) {
	if s := l.sandboxes[id]; s != nil {
		l.Remove(id)
		l.expected[id] = s.routeSeq
	}
}

// Postpone has a sandbox of a verdict asked about again.
func (l *Ledger) Postpone(id string, now time.Duration) {
	s := l.sandboxes[id]
	s.notBefore = now + AskAgain
	l.schedule(s)
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

// IdleAt is when the idle timeout of a sandbox ends, if it is not used.
func (l *Ledger) IdleAt(id string) time.Duration { return l.idleAt(l.sandboxes[id]) }

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

// schedule has Ask look at a sandbox when it may be due.
func (l *Ledger) schedule(s *sandbox) {
	if s.Timeout > 0 {
		l.due.Set(s.ID, max(l.idleAt(s), s.notBefore))
	}
}

// ToPersist returns the sandboxes whose activity may be written to their objects now. Each sandbox
// with an idle timeout has its turn once in PersistEvery. The turns are spread over that time, so
// the rate of writes is bounded. Turns that were not taken in time come later at the same rate.
func (l *Ledger) ToPersist(now time.Duration) (ids []string) {
	l.persistAt = max(l.persistAt, now-100*time.Millisecond)
	for all := time.Duration(l.turns.Len()); l.persistAt <= now; l.persistAt += PersistEvery / all {
		turn := l.turns.Due(now, 1)
		if len(turn) == 0 {
			break
		}
		l.turns.Set(turn[0], now+PersistEvery)
		ids = append(ids, turn[0])
	}
	return ids
}
