package core

import (
	"cmp"
	"container/heap"
	"container/list"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/berth-sandbox/berth/api/activity"
)

// Config is fixed for a term. All fields are required unless they say otherwise.
type Config struct {
	// Term is the leader's term, 1 or more.
	Term uint64
	// MaxStale is how long a router serves what it knew at its last answered ping.
	MaxStale time.Duration
	// Window is what an admitted request may still need to open its last
	// connection: see envoy.Settings.Window. No idle timeout is shorter.
	Window time.Duration
	// Lease is for how long an earlier leader may have answered routers' pings after
	// this term began, by the clocks of both. Required.
	Lease time.Duration
	// DeclareAfter is how long a router must have been silent before an operator is
	// believed that it has ended, and before a Release does not wait for it any more.
	// Routers come back within seconds. Default 10 s.
	DeclareAfter time.Duration
	// AckWait bounds how long a Release waits for routers that are connected, or were
	// heard less than DeclareAfter ago, before it is answered. Default 1 s.
	AckWait time.Duration
	// KeepEnded and KeepEndedFor bound the records of ended sandboxes.
	// Defaults 10,000 and 24 h.
	KeepEnded    int
	KeepEndedFor time.Duration
	// KeepKeys is how long after the end of its sandbox an idempotency key holds.
	// Default 10 min.
	KeepKeys time.Duration
	// MaxWaiting bounds the callers of claims that wait for a pod, by pool, and those that
	// wait with one idempotency key for one sandbox. Default 1,000.
	MaxWaiting int
	// Linger is how long facts that nobody waits for are kept back for others to
	// be written with them. Default 25 ms.
	Linger time.Duration
	// DryRun: sandboxes that are idle are not released. WouldReap says which would be.
	DryRun bool
	// NewID makes a sandbox ID, never the same twice. NewSuffix makes the end
	// of a pod's name.
	NewID, NewSuffix func() string
}

// Core is the state machine. See the package comment.
type Core struct {
	cfg     Config
	now     Instant
	started Instant
	counter uint64 // of revisions in this term
	out     []Effect
	// releasing are the sessions whose releases point into out.
	releasing []*session
	// recovering: not everything that is there has been told yet, so nothing is
	// decided about pools.
	recovering bool
	pressure   bool
	closing    bool

	pools       map[PoolKey]*pool
	pods        map[PodKey]*pod
	nodes       map[string]*node
	places      map[netip.Addr]*place
	sandboxes   map[string]*sandbox
	live        []*sandbox          // of sandboxes, those that are not released, in the order of byClaim
	holds       map[PodKey]*sandbox // of sandboxes, by the pod that is or was theirs
	discards    map[PodKey]*discard // of idle pods that are there or wait for a fence, or whose fact is not durable yet
	strays      []*pod              // pods marked as used and on no record, to be deleted
	sessions    map[string]*session
	byID        []*session // the same, ordered by their IDs: what is told them is told in that order
	earlier     int        // how many of them stand for the routers of an earlier journal
	streams     map[uint64]*session
	bans        map[string]ban    // by the ID of the session
	claims      map[uint64]*claim // by token
	keys        map[claimKey]*keyed
	keysEnded   *list.List            // of *sandbox with a key, in the order they were released
	starting    map[*sandbox]struct{} // those with callers
	deadlines   deadlineHeap
	ended       *list.List // of *sandbox, in the order they ended
	fences      *list.List // of *sandbox, those that are under way, in the order they began
	outbox      outbox
	claimNumber uint64
	reaper
}

// New returns a Core that knows nothing. Tell it what is there by Recover.
func New(cfg Config, now Instant) (*Core, error) {
	var errs []error
	if cfg.Term == 0 {
		errs = append(errs, errors.New("core: Config.Term must be at least 1"))
	}
	if cfg.MaxStale <= 0 || cfg.Window <= 0 || cfg.Lease <= 0 {
		errs = append(errs, errors.New("core: Config.MaxStale, Config.Window and Config.Lease must be positive"))
	}
	if cfg.NewID == nil || cfg.NewSuffix == nil {
		errs = append(errs, errors.New("core: Config.NewID and Config.NewSuffix are required"))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	if cfg.DeclareAfter == 0 {
		cfg.DeclareAfter = 10 * time.Second
	}
	if cfg.AckWait == 0 {
		cfg.AckWait = time.Second
	}
	if cfg.KeepEnded == 0 {
		cfg.KeepEnded = 10_000
	}
	if cfg.KeepEndedFor == 0 {
		cfg.KeepEndedFor = 24 * time.Hour
	}
	if cfg.KeepKeys == 0 {
		cfg.KeepKeys = 10 * time.Minute
	}
	if cfg.MaxWaiting == 0 {
		cfg.MaxWaiting = 1000
	}
	if cfg.Linger == 0 {
		cfg.Linger = 25 * time.Millisecond
	}
	return &Core{
		cfg: cfg, now: now, started: now,
		pools: map[PoolKey]*pool{}, pods: map[PodKey]*pod{}, nodes: map[string]*node{}, places: map[netip.Addr]*place{},
		sandboxes: map[string]*sandbox{}, holds: map[PodKey]*sandbox{}, discards: map[PodKey]*discard{},
		sessions: map[string]*session{}, streams: map[uint64]*session{}, bans: map[string]ban{},
		claims: map[uint64]*claim{}, keys: map[claimKey]*keyed{}, keysEnded: list.New(), starting: map[*sandbox]struct{}{},
		ended: list.New(), fences: list.New(), outbox: outbox{ready: true},
	}, nil
}

// Step takes one event and returns what is to be done about it. now never goes
// back on the boot clock.
func (c *Core) Step(now Instant, ev Event) []Effect {
	c.now = now
	switch ev := ev.(type) {
	case PoolSeen:
		c.poolSeen(ev.Pool)
	case PoolGone:
		c.poolGone(ev.Key)
	case PodSeen:
		c.podSeen(ev.Pod)
	case PodGone:
		c.podGone(ev.Key)
	case NodeSeen:
		c.nodeSeen(ev.Name, ev.Usable)
	case NodeGone:
		c.nodeSeen(ev.Name, false)
	case CreateFailed:
		c.createFailed(ev.Pool, ev.Name)
	case Claim:
		c.claim(ev)
	case ClaimAbandoned:
		c.claimAbandoned(ev.Token)
	case IdleAvailable:
		if p := c.pools[ev.Pool]; p != nil {
			c.serve(p)
		}
	case Started:
		c.startDone(ev)
	case Pressure:
		c.pressure = ev.On
	case Closing:
		c.close()
	case Written:
		c.written(ev.At)
	case WriterReady:
		c.outbox.ready = true
	case Release:
		c.release(ev)
	case Recorded:
		c.recorded(ev)
	case RecordSeen:
		c.recordSeen(ev)
	case RecordGone:
		c.recordGone(ev.ID)
	case SessionJoined:
		c.sessionJoined(ev)
	case EarlierSeen:
		c.earlierLives(ev.Journal)
	case SessionLeft:
		c.sessionLeft(ev)
	case SessionGoodbye:
		c.goodbye(ev)
	case SessionDead:
		c.sessionDead(ev.Session, c.sessions[ev.By])
	case DeclareDead:
		c.declareDead(ev)
	case SessionPing:
		c.sessionPing(ev)
	case SessionAck:
		c.sessionAck(ev)
	case Resolve:
		c.resolve(ev)
	case Report:
		c.report(ev)
	case Quiesced:
		c.quiesced(ev)
	case Probed:
		c.probed(ev)
	case KeepAlive:
		c.keepAlive(ev)
	case SetTimeout:
		c.setTimeout(ev)
	case Tick:
		c.tick()
	default:
		panic(fmt.Sprintf("core: unknown event %T", ev))
	}
	return c.take()
}

func (c *Core) emit(e Effect) { c.out = append(c.out, e) }

func (c *Core) take() []Effect {
	c.flush()
	for _, s := range c.releasing {
		s.releases = 0
	}
	c.releasing = c.releasing[:0]
	out := c.out
	c.out = nil
	return out
}

// dueMost bounds the sandboxes that one tick looks at: after a change of leaders all
// may be due at once.
const dueMost = 10_000

// tick acts on what is due.
func (c *Core) tick() {
	c.probes = 0
	for n := 0; n < dueMost && len(c.deadlines) > 0 && c.deadlines[0].dueAt <= c.now.Boot; n++ {
		c.comes(heap.Pop(&c.deadlines).(*sandbox))
	}
	c.expireRound()
	c.ask()
	c.showSome()
	c.expireSessions()
	c.expireLeftovers()
	c.settleEnds()
	c.liftBans()
	c.eachFence(func(s *sandbox) {
		c.answerReleases(s)
		c.advanceFence(s)
	})
	for _, p := range c.sortedPools() {
		c.expireWaiting(p)
		if p.retryAt != 0 && c.now.Boot >= p.retryAt {
			p.retryAt = 0
			c.reconcile(p)
		}
		c.retry(p)
	}
	c.discardStrays()
	c.answerStarting()
	c.forgetKeys()
	c.forgetEnded()
}

// add makes a sandbox known.
func (c *Core) add(s *sandbox) {
	c.sandboxes[s.ID] = s
	c.holds[s.Pod] = s
	if s.Phase != Ended {
		c.expose(s)
		if s.Phase != Released {
			c.enlist(s)
		}
	}
}

// enlist puts a sandbox into the list of live ones, delist takes it out.
func (c *Core) enlist(s *sandbox) {
	if c.recovering { // sorted once, when all are there
		c.live = append(c.live, s)
		return
	}
	at, _ := slices.BinarySearchFunc(c.live, s.mark(), byClaim)
	c.live = slices.Insert(c.live, at, s)
}

func (c *Core) delist(s *sandbox) {
	if at, found := slices.BinarySearchFunc(c.live, s.mark(), byClaim); found {
		c.live = slices.Delete(c.live, at, at+1)
	}
}

// mark is the place of s in the list of live sandboxes. It does not change.
func (s *sandbox) mark() Mark { return Mark{s.ClaimedAt, s.ID} }

// byClaim orders sandboxes by Mark. Microseconds count: it is what the journal and the
// objects keep, so the next leader has the same order.
func byClaim(s *sandbox, m Mark) int {
	return cmp.Or(cmp.Compare(s.ClaimedAt.UnixMicro(), m.ClaimedAt.UnixMicro()), strings.Compare(s.ID, m.ID))
}

// passedMost bounds how many records that must stay are passed over at a time.
const passedMost = 1000

// forgetEnded drops the records that are too old or too many. Those whose
// idempotency key holds stay, and those still to be written: that would bring
// them back.
func (c *Core) forgetEnded() {
	passed := 0
	for e := c.ended.Front(); e != nil && passed < passedMost; {
		s := e.Value.(*sandbox)
		e = e.Next()
		if c.ended.Len() <= c.cfg.KeepEnded && c.now.Boot-s.endedAt < c.cfg.KeepEndedFor {
			return
		}
		if s.recorded.Less(s.Revision) || s.keyElem != nil {
			passed++ // those behind it need not wait for it
			continue
		}
		c.ended.Remove(s.elem)
		delete(c.sandboxes, s.ID)
		delete(c.holds, s.Pod)
		c.emit(ForgetRecord{Pool: s.Pool, ID: s.ID})
	}
}

// State is what is there when a term begins, read after the log was taken over:
// first the journal, then the rest.
type State struct {
	// Facts are the latest of the journal, of each thing.
	Facts []Fact
	// Records are the Sandbox objects.
	Records []Sandbox
	Pools   []Pool
	// Nodes are those that are usable.
	Nodes []string
	Pods  []Pod
}

// Recover tells a new Core what is there. It is called once, first. An error
// means that what is on record contradicts itself, and nothing can be done
// before somebody has looked at it.
func (c *Core) Recover(st State) ([]Effect, error) {
	c.recovering = true
	if err := c.recoverSandboxes(st); err != nil {
		return nil, err
	}
	for _, n := range st.Nodes {
		c.nodeSeen(n, true)
	}
	for _, p := range st.Pools {
		c.poolSeen(p)
	}
	for _, p := range st.Pods {
		c.podSeen(p)
	}
	for _, s := range c.sorted() {
		if s.recorded.Less(s.Revision) {
			c.emit(Record{Sandbox: s.Sandbox})
		}
		switch gone := c.pods[s.Pod] == nil; {
		case s.Phase == Ended:
		case s.Phase == Released && gone:
			c.startFence(s)
		case s.Phase != Released && len(s.doubles) > 0:
			c.lost(s, ReasonDuplicate)
		case gone:
			c.lost(s, ReasonPodGone)
		case s.Phase == Starting:
			c.emit(StartSandbox{s.Sandbox})
		}
	}
	for _, key := range slices.SortedFunc(maps.Keys(c.discards), comparePods) {
		if c.pods[key] == nil {
			c.advanceDiscard(key)
		}
	}
	c.recovering = false
	for _, p := range c.sortedPools() {
		if !p.known { // its object is gone, only its pods are left
			p.Deleting = true
		}
		c.reconcile(p)
	}
	return c.take(), nil
}

// recoverSandboxes folds the journal and the objects: of each sandbox the higher
// revision counts.
func (c *Core) recoverSandboxes(st State) error {
	for _, r := range st.Records {
		c.sandboxes[r.ID] = &sandbox{Sandbox: r, recorded: r.Revision}
	}
	there := make(map[PodKey]bool, len(st.Pods))
	for _, p := range st.Pods {
		there[p.Key] = true
	}
	var doubles []Fact
	for _, f := range st.Facts {
		switch {
		case f.Session != "": // below
			continue
		case f.Sandbox == nil:
			c.discards[f.Discard] = &discard{revision: f.Revision, durable: true}
			if f.After != "" {
				doubles = append(doubles, f)
			}
			continue
		}
		s := c.sandboxes[f.Sandbox.ID]
		if s == nil && f.Sandbox.Phase == Released && !there[f.Sandbox.Pod] && c.now.Wall.Sub(f.Sandbox.EndedAt) > c.cfg.KeepEndedFor {
			// It was forgotten, and nothing has overwritten its slot since.
			c.emit(Settle{ID: f.Sandbox.ID, Revision: f.Revision})
			continue
		}
		if s == nil {
			s = &sandbox{}
			c.sandboxes[f.Sandbox.ID] = s
		} else if s.Pod != f.Sandbox.Pod || s.IP != f.Sandbox.IP {
			// A claim is never changed, so one of the two is not of our making.
			other := *f.Sandbox
			if s.Revision.Less(f.Revision) {
				other = s.Sandbox
			}
			s.double(other.Pod, other.IP)
			c.emit(Repaired{Pod: other.Pod, What: "the journal and a Sandbox object name different pods, or addresses, for one sandbox: none of them is used any more"})
		}
		if s.Revision.Less(f.Revision) {
			shown := s.LastActive // which the journal does not say
			s.Sandbox = *f.Sandbox
			s.LastActive = shown
		} else {
			c.emit(Settle{ID: s.ID, Revision: f.Revision})
		}
	}
	for _, f := range doubles { // an earlier leader has found them; discardDoubles renews the intents
		if s := c.sandboxes[f.After]; s != nil {
			for _, at := range f.At {
				s.double(f.Discard, at)
			}
		}
	}
	for _, s := range c.sorted() {
		if other := c.holds[s.Pod]; other != nil {
			return contradiction(other, s, s.Pod)
		}
		c.add(s)
		if s.IdempotencyKey != "" {
			c.keys[s.claimKey()] = &keyed{hash: s.RequestHash, sandbox: s}
		}
		switch s.Phase {
		case Released, Ended:
			s.endedAt = c.now.Boot - c.now.Wall.Sub(s.EndedAt)
			c.keyEnds(s)
			if s.Phase == Ended {
				s.elem = c.ended.PushBack(s)
			}
		case Starting, Running, Releasing:
			s.Phase = max(s.Phase, Starting)
			c.times(s)
			s.at, s.kind = c.now.Boot, activity.Claim
			if s.Phase == Running {
				c.recoverActivity(s)
			}
			c.schedule(s)
		}
	}
	slices.SortFunc(c.live, func(a, b *sandbox) int { return byClaim(a, b.mark()) })
	for _, f := range st.Facts {
		if f.Session != "" {
			c.recoverSession(f)
		}
	}
	for _, s := range c.sorted() {
		for _, d := range s.doubles {
			if other := c.holds[d.pod]; other != nil && other != s {
				return contradiction(other, s, d.pod)
			}
		}
		c.discardDoubles(s)
	}
	return nil
}

func contradiction(one, other *sandbox, pod PodKey) error {
	return fmt.Errorf("core: sandboxes %s and %s are both on record with pod %s (UID %s): this is not of our making; delete the Sandbox object that is wrong", one.ID, other.ID, pod.Name, pod.UID)
}

// sorted lists the sandboxes in the order they ended, those that have not last.
func (c *Core) sorted() []*sandbox {
	all := make([]*sandbox, 0, len(c.sandboxes))
	for _, s := range c.sandboxes {
		all = append(all, s)
	}
	slices.SortFunc(all, func(a, b *sandbox) int {
		if a.EndedAt.IsZero() != b.EndedAt.IsZero() {
			if b.EndedAt.IsZero() {
				return -1
			}
			return 1
		}
		if order := a.EndedAt.Compare(b.EndedAt); order != 0 {
			return order
		}
		return strings.Compare(a.ID, b.ID)
	})
	return all
}

// Counts returns the pods of a pool by state.
func (c *Core) Counts(key PoolKey) (Counts, bool) {
	p := c.pools[key]
	if p == nil {
		return Counts{}, false
	}
	counts := p.counts()
	counts.Stuck, counts.Trouble = p.stuck(), p.backOff.trouble
	return counts, true
}

// Sandbox returns what is known of a sandbox, live or ended.
func (c *Core) Sandbox(id string) (Sandbox, bool) {
	s := c.sandboxes[id]
	if s == nil {
		return Sandbox{}, false
	}
	return s.Sandbox, true
}

// PodKeys lists all pods that are known.
func (c *Core) PodKeys() []PodKey {
	keys := make([]PodKey, 0, len(c.pods))
	for key := range c.pods {
		keys = append(keys, key)
	}
	return keys
}

// UsableNodes lists the nodes whose pods can be handed out, in no order.
func (c *Core) UsableNodes() []string {
	var names []string
	for name, n := range c.nodes {
		if n.usable {
			names = append(names, name)
		}
	}
	return names
}

// Recorded lists the sandboxes whose objects show their latest revision, in no order.
func (c *Core) Recorded() []string {
	ids := make([]string, 0, len(c.sandboxes))
	for id, s := range c.sandboxes {
		if !s.recorded.Less(s.Revision) && !s.dropped {
			ids = append(ids, id)
		}
	}
	return ids
}

// Mark is a place in the list of live sandboxes: behind a sandbox of this ID that was
// claimed then, whether there is one or not. The zero Mark is the beginning.
type Mark struct {
	ClaimedAt time.Time
	ID        string
}

// Live returns sandboxes that are starting or running, the oldest first, at most so many
// from a mark on, and whether there are more. Whoever goes on with the mark of the last
// one sees each sandbox once that is live all the while, whatever comes and goes.
func (c *Core) Live(after Mark, most int) (list []Sandbox, more bool) {
	at := 0
	if after != (Mark{}) {
		var found bool
		if at, found = slices.BinarySearchFunc(c.live, after, byClaim); found {
			at++
		}
	}
	for _, s := range c.live[at:] {
		if !s.live() {
			continue
		}
		if len(list) == most {
			return list, true
		}
		list = append(list, s.Sandbox)
	}
	return list, false
}

// CountLive is how many Live would return.
func (c *Core) CountLive() (n int) {
	for _, s := range c.live {
		if s.live() {
			n++
		}
	}
	return n
}

func (s *sandbox) live() bool { return s.routable() || s.Phase == Starting && !s.lost }

// Running returns all sandboxes that routers may be told of, in no order.
func (c *Core) Running() []Sandbox {
	all := make([]Sandbox, 0, len(c.sandboxes))
	for _, s := range c.sandboxes {
		if s.routable() {
			all = append(all, s.Sandbox)
		}
	}
	return all
}
