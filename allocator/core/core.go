package core

import (
	"container/heap"
	"container/list"
	"errors"
	"fmt"
	"slices"
	"time"
)

// Config is fixed for a term. All fields are required unless they say otherwise.
type Config struct {
	// Term is the leader's term, 1 or more.
	Term uint64
	// MaxStale is how long a router serves what it knew at its last answered ping.
	MaxStale time.Duration
	// Window is what an admitted request may still need to open its last
	// connection: see envoy.Settings.Window.
	Window time.Duration
	// AckWait bounds how long a Release waits for connected routers before it
	// is answered. Default 1 s.
	AckWait time.Duration
	// KeepEnded and KeepEndedFor bound the records of ended sandboxes.
	// Defaults 10,000 and 24 h.
	KeepEnded    int
	KeepEndedFor time.Duration
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
	// recovering: not everything that is there has been told yet, so nothing is
	// decided about pools.
	recovering bool

	pools     map[PoolKey]*pool
	pods      map[PodKey]*pod
	sandboxes map[string]*sandbox
	holds     map[PodKey]*sandbox // of sandboxes, by the pod that is or was theirs
	sessions  map[string]*session
	streams   map[uint64]*session
	claims    map[uint64]*pod // token -> the pod its claim is being written to
	deadlines deadlineHeap
	ended     *list.List // of *sandbox, in the order they ended
	fences    map[*sandbox]struct{}
}

// New returns a Core that knows nothing. Tell it what is there by Recover.
func New(cfg Config, now Instant) (*Core, error) {
	var errs []error
	if cfg.Term == 0 {
		errs = append(errs, errors.New("core: Config.Term must be at least 1"))
	}
	if cfg.MaxStale <= 0 || cfg.Window <= 0 {
		errs = append(errs, errors.New("core: Config.MaxStale and Config.Window must be positive"))
	}
	if cfg.NewID == nil || cfg.NewSuffix == nil {
		errs = append(errs, errors.New("core: Config.NewID and Config.NewSuffix are required"))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
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
	return &Core{
		cfg: cfg, now: now, started: now,
		pools: map[PoolKey]*pool{}, pods: map[PodKey]*pod{}, sandboxes: map[string]*sandbox{}, holds: map[PodKey]*sandbox{},
		sessions: map[string]*session{}, streams: map[uint64]*session{}, claims: map[uint64]*pod{},
		ended: list.New(), fences: map[*sandbox]struct{}{},
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
	case CreateFailed:
		c.createFailed(ev.Pool, ev.Name)
	case DeleteFailed:
		c.deleteFailed(ev.Key)
	case Claim:
		c.claim(ev)
	case ClaimAbandoned:
		c.claimAbandoned(ev.Token)
	case BindDone:
		c.bindDone(ev)
	case Release:
		c.release(ev)
	case ReleaseDone:
		if s := c.sandboxes[ev.ID]; s != nil && s.Phase == Releasing {
			c.released(s)
		}
	case Recorded:
		c.recorded(ev)
	case SessionJoined:
		c.sessionJoined(ev)
	case SessionLeft:
		c.sessionLeft(ev)
	case SessionGoodbye:
		c.sessionGoodbye(ev.Session)
	case SessionPing:
		c.sessionPing(ev)
	case SessionAck:
		c.sessionAck(ev)
	case Resolve:
		c.resolve(ev)
	case Tick:
		c.tick()
	default:
		panic(fmt.Sprintf("core: unknown event %T", ev))
	}
	return c.take()
}

func (c *Core) emit(e Effect) { c.out = append(c.out, e) }

func (c *Core) take() []Effect {
	out := c.out
	c.out = nil
	return out
}

func (c *Core) revise(s *sandbox) {
	c.counter++
	s.Revision = Revision{c.cfg.Term, c.counter}
	c.emit(Record{s.Sandbox})
}

// tick acts on what is due.
func (c *Core) tick() {
	for len(c.deadlines) > 0 && !c.deadlines[0].EndAt.After(c.now.Wall) {
		s := heap.Pop(&c.deadlines).(*sandbox)
		c.startRelease(s, ReasonTimeout)
	}
	c.expireSessions()
	for s := range c.fences {
		c.answerReleases(s)
		c.advanceFence(s)
	}
	for _, p := range c.pools {
		if p.retryAt != 0 && c.now.Boot >= p.retryAt {
			p.retryAt = 0
			c.reconcile(p)
		}
	}
	c.forgetEnded()
}

// add makes a sandbox known.
func (c *Core) add(s *sandbox) {
	c.sandboxes[s.ID] = s
	c.holds[s.Pod] = s
}

// forgetEnded drops the records that are too old or too many. Those whose fence
// is under way stay, and those still to be written: that would bring them back.
func (c *Core) forgetEnded() {
	for c.ended.Len() > 0 {
		s := c.ended.Front().Value.(*sandbox)
		if c.ended.Len() <= c.cfg.KeepEnded && c.now.Wall.Sub(s.EndedAt) < c.cfg.KeepEndedFor {
			return
		}
		if s.recorded.Less(s.Revision) || s.fence != nil && !s.fence.done {
			return
		}
		c.ended.Remove(c.ended.Front())
		delete(c.sandboxes, s.ID)
		delete(c.holds, s.Pod)
		c.emit(ForgetRecord{Pool: s.Pool, ID: s.ID})
	}
}

// Recover tells a new Core what is there, read after its term began: the pools,
// the pods, and the sandboxes recorded so far. It is called once, first.
func (c *Core) Recover(pools []Pool, pods []Pod, records []Sandbox) []Effect {
	c.recovering = true
	records = slices.SortedFunc(slices.Values(records), func(a, b Sandbox) int { return a.EndedAt.Compare(b.EndedAt) })
	for _, r := range records {
		s := &sandbox{Sandbox: r, inherited: true, recorded: r.Revision}
		c.add(s)
		if s.Phase == Ended {
			s.elem = c.ended.PushBack(s)
		}
	}
	for _, p := range pools {
		c.poolSeen(p)
	}
	for _, p := range pods {
		c.podSeen(p)
	}
	for _, r := range records {
		if s := c.sandboxes[r.ID]; s.Phase != Ended && c.pods[s.Pod] == nil {
			c.lost(s, ReasonPodGone)
		}
	}
	c.recovering = false
	for _, p := range c.pools {
		if !p.known { // its object is gone, only its pods are left
			p.Deleting = true
		}
		c.reconcile(p)
	}
	return c.take()
}

// Counts returns the pods of a pool by state.
func (c *Core) Counts(key PoolKey) (Counts, bool) {
	p := c.pools[key]
	if p == nil {
		return Counts{}, false
	}
	return p.counts(), true
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

// Running returns all running sandboxes, in no order.
func (c *Core) Running() []Sandbox {
	all := make([]Sandbox, 0, len(c.sandboxes))
	for _, s := range c.sandboxes {
		if s.routable() {
			all = append(all, s.Sandbox)
		}
	}
	return all
}
