package core

import (
	"cmp"
	"errors"
	"fmt"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/claims"
	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/core/fence"
	"github.com/berth-sandbox/berth/allocator/core/idle"
	"github.com/berth-sandbox/berth/allocator/core/member"
	"github.com/berth-sandbox/berth/allocator/core/pods"
	"github.com/berth-sandbox/berth/allocator/core/pools"
	"github.com/berth-sandbox/berth/allocator/core/sandboxes"
	"github.com/berth-sandbox/berth/allocator/core/step"
)

// Config is fixed for a term. All fields are required unless they say otherwise.
type Config struct {
	// Term is the leader's term, 1 or more.
	Term uint64
	// MaxStale is how long a router serves what it knew at its last answered ping, at least. Some
	// routers may serve it for longer: see SessionJoined.
	MaxStale time.Duration
	// ConnectWindow is what an admitted request may still need to open its last
	// connection: see envoy.ConnectWindow. No idle timeout is shorter.
	ConnectWindow time.Duration
	// Lease is how long an earlier leader may have answered pings of routers after this term
	// began, by the clocks of both.
	Lease time.Duration
	// DeclareAfter is how long a router must have been silent before an operator may declare it
	// dead, and before the answer to a Release does not wait for it. Routers that lost their
	// connection come back within seconds. Default 10 s.
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
	// MaxWaiting bounds the callers whose claims wait for a pod of one pool, and the callers that
	// wait for one sandbox with one idempotency key. Each of n teams that wait for a pod of one
	// pool can have 1/n of them. Default 1,000.
	MaxWaiting int
	// Linger is how long facts without a waiting caller are held back, so that they are written
	// together with others. Default 25 ms.
	Linger time.Duration
	// DryRun: idle sandboxes are not released. WouldReap reports them.
	DryRun bool
	// NewID returns a sandbox ID that was never used. NewSuffix returns the end of a pod's name.
	NewID, NewSuffix func() string
}

// Core is the state machine. See the package comment.
type Core struct {
	*step.Current
	cfg     Config
	started Instant

	outbox *fact.Outbox
	// Three things wait until routers have acknowledged a message, each in a ledger of its own: the release of a
	// sandbox, its closing before it sleeps, and its new rules, which routers.rulings has.
	fences, closings *fence.Ledger
	ruling           map[string]*ruling // the calls that wait for new rules, by their names in routers.rulings
	idle             *idle.Ledger       // of the running sandboxes and of those that were running until their release
	pods             *pods.Table
	sandboxes        *sandboxes.Table
	routers          *routers
	pools            *pools.Table
	claims           *claims.Table
}

// New returns a Core without state. Recover gives it the state that exists.
func New(cfg Config, now Instant) (*Core, error) {
	var errs []error
	if cfg.Term == 0 {
		errs = append(errs, errors.New("core: Config.Term must be at least 1"))
	}
	if cfg.MaxStale <= 0 || cfg.ConnectWindow <= 0 || cfg.Lease <= 0 {
		errs = append(errs, errors.New("core: Config.MaxStale, Config.ConnectWindow and Config.Lease must be positive"))
	}
	if cfg.NewID == nil || cfg.NewSuffix == nil {
		errs = append(errs, errors.New("core: Config.NewID and Config.NewSuffix are required"))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	cfg.DeclareAfter = cmp.Or(cfg.DeclareAfter, 10*time.Second)
	cfg.AckWait = cmp.Or(cfg.AckWait, time.Second)
	cfg.KeepEnded = cmp.Or(cfg.KeepEnded, 10_000)
	cfg.KeepEndedFor = cmp.Or(cfg.KeepEndedFor, 24*time.Hour)
	cfg.KeepKeys = cmp.Or(cfg.KeepKeys, 10*time.Minute)
	cfg.MaxWaiting = cmp.Or(cfg.MaxWaiting, 1000)
	cfg.Linger = cmp.Or(cfg.Linger, 25*time.Millisecond)
	st := &step.Current{Now: now}
	c := &Core{
		Current: st, cfg: cfg, started: now, outbox: fact.NewOutbox(cfg.Term, cfg.Linger), ruling: map[string]*ruling{},
		fences: fence.New(cfg.ConnectWindow), closings: fence.New(cfg.ConnectWindow), idle: idle.New(cfg.ConnectWindow, cfg.DryRun),
	}
	members := member.New(member.Config{Expiry: cfg.expiry, ConnectWindow: cfg.ConnectWindow, ReturnWithin: cfg.DeclareAfter})
	ledger := claims.NewLedger()
	c.pods = pods.New(st, c.outbox, members.HasEarlier)
	c.sandboxes = sandboxes.New(st, c.outbox, c.pods, c.fences, c.idle, ledger.Keeps)
	c.pools = pools.New(st, c.pods, cfg.NewSuffix)
	c.claims = claims.New(st, claims.Config{MaxWaiting: cfg.MaxWaiting, NewID: cfg.NewID, Quarantine: members.Quarantine}, c.outbox, ledger, c.pods, c.sandboxes, c.pools)
	c.routers = &routers{
		Current: st, cfg: &c.cfg, outbox: c.outbox, sandboxes: c.sandboxes, fences: c.fences, closings: c.closings, idle: c.idle, members: members,
		earlierEnds: c.retireQuarantined, rulings: fence.New(0),
	}
	return c, nil
}

// Step takes one event and returns its effects. now must not go back on the boot clock.
func (c *Core) Step(now Instant, ev Event) []Effect {
	c.Now = now
	switch ev := ev.(type) {
	case PoolSeen:
		c.pools.Observe(ev.Pool)
	case PoolGone:
		c.pools.Gone(ev.Key)
	case PodSeen:
		c.podSeen(ev.Pod)
	case PodGone:
		c.pods.PodGone(ev.Key)
	case NodeSeen:
		c.pods.NodeSeen(ev.Name, ev.Usable, ev.Cordoned)
		if ev.Cordoned {
			c.sandboxes.Cordoned(ev.Name)
		}
	case NodeGone:
		c.pods.NodeSeen(ev.Name, false, false)
	case CreateFailed:
		c.pools.CreateFailed(ev.Pool, ev.Name, ev.Taken)
	case Claim:
		c.claims.Claim(claims.Ask(ev))
	case ClaimAbandoned:
		c.claims.Abandoned(ev.Token)
	case Started:
		c.sandboxes.HookDone(ev.ID, ev.Incarnation, ev.OK, ev.Why)
	case Configured:
		c.claims.Configured(ev.ID, ev.OK, ev.Why, ev.Hopeless)
	case Frozen:
		c.sandboxes.Frozen(ev.ID, ev.Revision, ev.OK, ev.Why)
	case Thawed:
		c.sandboxes.Thawed(ev.ID, ev.Revision, ev.OK, ev.Why)
	case Sleep:
		c.fallAsleep(ev)
	case Archive:
		c.archive(ev)
	case ArchiveWritten:
		c.sandboxes.ArchiveWritten(ev.ID, ev.Token, ev.Order, ev.Err, ev.Archive)
	case Pressure:
		c.claims.Pressure(ev.On)
	case TeamLimits:
		c.claims.Limit(ev.Settings)
	case Closing:
		c.claims.Close()
	case Written:
		c.outbox.Written(cmp.Or(ev.At, now.Boot))
	case WriterReady:
		c.outbox.Ready()
	case Release:
		c.sandboxes.Release(ev.Token, ev.Scope, ev.ID, ev.Reason)
	case ObjectWritten:
		c.sandboxes.ObjectWritten(ev.ID, ev.Revision)
	case LogRead:
		c.sandboxes.LogRead(ev.ID, ev.Lines)
	case ObjectSeen:
		c.sandboxes.ObjectSeen(ev.Pool, ev.ID, ev.Revision, ev.Deleting, ev.Revision.Term < c.cfg.Term)
	case ObjectGone:
		c.sandboxes.ObjectGone(ev.ID)
	case KeepAlive:
		c.sandboxes.KeepAlive(ev.Token, ev.Scope, ev.ID)
	case SetNetwork:
		c.sandboxes.SetNetwork(ev.Token, ev.Scope, ev.ID, ev.Rules)
	case SetTimeout:
		c.sandboxes.SetTimeout(ev.Token, ev.Scope, ev.ID, ev.Lifetime, ev.Extend, ev.Wake)
	case Tick:
		c.tick()
	default:
		c.routerSaid(ev)
	}
	c.heed()
	return c.endStep()
}

// routerSaid acts on the events of sessions.
func (c *Core) routerSaid(ev Event) {
	switch ev := ev.(type) {
	case SessionJoined:
		c.routers.join(ev)
	case EarlierSeen:
		c.earlierLives(ev)
	case SessionLeft:
		c.routers.left(ev)
	case SessionGoodbye:
		c.routers.goodbye(ev)
	case SessionDead:
		c.routers.dead(ev)
	case DeclareDead:
		c.routers.declareDead(ev)
	case SessionPing:
		c.routers.ping(ev)
	case SessionAck:
		c.routers.acknowledge(ev)
	case Resolve:
		c.resolve(ev)
	case Report:
		c.routers.report(ev)
	case Quiesced:
		if s := c.routers.members.OfStream(ev.Stream); s != nil && !s.Egress {
			c.decide(c.idle.Answer(s.ID, ev.Number, ev.Activities, ev.Blind, c.Now.Boot))
		}
	case Probed:
		c.routers.probed(ev)
	default:
		panic(fmt.Sprintf("core: unknown event %T", ev))
	}
}

// heed acts on what the rooms have listed: see pods.Notice and sandboxes.Notice. Acting on a notice may list others, so
// heed goes on until none is left. Those of pods come first, because sandboxes follow their pods. Callers are answered
// last, when the routers have the routes of their sandboxes.
func (c *Core) heed() {
	for {
		if n := c.pods.Next(); n != nil {
			c.heedPods(n)
		} else if n := c.sandboxes.Next(); n != nil {
			c.heedSandboxes(n)
		} else if !c.claims.AnswerDecided() {
			return
		}
	}
}

func (c *Core) heedPods(n pods.Notice) {
	switch n := n.(type) {
	case pods.Disturbed: // a pod in use belongs to a claim until its fact is durable, and to a sandbox from then on
		if cl := c.claims.HasPod(n.Pod.Key()); cl != nil {
			c.claims.PodChanged(cl, n.Pod)
		} else if sb := c.sandboxes.Of(n.Pod.Key()); sb != nil {
			c.sandboxes.PodChanged(sb, n.Pod)
		}
	case pods.Failed:
		c.pools.PodFailed(n)
	case pods.Warmed:
		c.pools.PodWarmed(n.Pod)
	case pods.Unblocked:
		c.sandboxes.TryEnd(n.Sandbox)
	}
}

func (c *Core) heedSandboxes(n sandboxes.Notice) {
	switch n := n.(type) {
	case sandboxes.Started:
		c.routers.sendRoute(n.Sandbox)
		c.Emit(SandboxReady{Sandbox: n.Sandbox.Sandbox})
		c.claims.Started(n.Sandbox)
	case sandboxes.Closed:
		c.startClosing(n.Sandbox)
	case sandboxes.Ruled:
		c.sendRules(n.Sandbox, n.Token)
	case sandboxes.Tired:
		c.tired(n.Sandbox)
	case sandboxes.Routed:
		if !n.Sandbox.Sleeps() { // else its ports have changed while it closes
			c.closings.Drop(n.Sandbox.ID)
		}
		c.routers.sendRoute(n.Sandbox)
	case sandboxes.Turned:
		c.resize(c.pods.Get(n.Sandbox.Pod), n.Sandbox)
	case sandboxes.Rising:
		c.claims.Revive(n.Sandbox)
	case sandboxes.Doomed:
		c.claims.Doomed(n.Sandbox)
	case sandboxes.Released:
		c.closings.Drop(n.Sandbox.ID)
		c.claims.Released(n.Sandbox)
		c.startFence(n.Sandbox)
	}
}

// adjustPools gives pods to the claims that wait, and brings the number of warm pods to what
// each pool asks for.
func (c *Core) adjustPools() {
	for groups := c.pods.Touched(); len(groups) > 0; groups = c.pods.Touched() {
		for _, group := range groups {
			if pool := c.pools.Find(group.Key); pool != nil {
				c.claims.Serve(pool)
				c.sandboxes.EndOf(group)
				if gone := c.pools.Adjust(pool, c.claims.Lacking(pool.Key)); gone {
					c.claims.DropLine(pool.Key)
					c.sandboxes.LetGoOf(pool.Key)
				}
			}
			group.Untouch() // what the adjustment has changed needs no other one
			c.heed()
		}
	}
}

// podSeen acts on an observation of a pod. One that is on record, for a sandbox or as one to be deleted, is ours even
// if its owner reference was removed.
func (c *Core) podSeen(seen Pod) {
	from := pods.Origin{Pool: PoolKey{Namespace: seen.Key.Namespace, Name: seen.Pool}}
	sb := c.sandboxes.Of(seen.Key)
	if sb != nil {
		from.Sandbox, from.Released = sb.ID, sb.Over() || !sb.HasPod()
		if seen.Pool == "" {
			from.Pool = sb.Pool
		}
	}
	if pool := c.pools.Find(from.Pool); pool != nil {
		from.AskedAt = pool.AskedAt(seen.Key.Name)
	}
	p, isNew := c.pods.Seen(seen, from)
	c.resize(p, sb)
	if !isNew {
		return
	}
	c.pools.Of(from.Pool).Made(seen.Key.Name)
	if sb == nil {
		return
	}
	switch c.sandboxes.Found(sb, p); {
	case sb.Over():
		c.startFence(sb)
	case sb.HasPod():
		c.routers.sendRoute(sb)
	}
}

// endStep ends a step, and returns its effects. The order matters: what is marked goes on first, because it changes
// pods and sandboxes. Pools follow, because they count those. Releases and closes are sent when all of the step are
// known, in one message to each router. The facts of all this go into one Write.
func (c *Core) endStep() []Effect {
	c.advanceFences()
	c.advanceClosings()
	c.advanceRulings()
	c.heed()
	c.adjustPools()
	c.routers.sendReleases()
	c.routers.sendCloses()
	if facts := c.outbox.Flush(c.Now.Boot); facts != nil {
		c.Emit(Write{Facts: facts})
	}
	return c.Take()
}

// relieve has sandboxes stopped in pools where too many are asleep.
func (c *Core) relieve() {
	var groups []*pods.Group
	for pool := range c.pools.All() {
		groups = append(groups, pool.Group)
	}
	c.sandboxes.Relieve(groups)
}

// tick acts on what is due.
func (c *Core) tick() {
	c.pools.Tick()
	c.sandboxes.ExpireEnds()
	c.reapIdle()
	c.persistActivity()
	c.routers.tick()
	c.tickClosings()
	c.tickRulings()
	c.advanceFences()
	if c.sandboxes.RelieveDue() {
		c.relieve()
	}
	for _, pool := range c.pools.Sorted() {
		c.claims.TickPool(pool)
		c.pools.TickPool(pool, c.claims.Lacking(pool.Key))
	}
	// No router of an earlier term can have a route to an orphan any more.
	if c.Now.Boot >= c.started.Boot+c.cfg.Lease+c.cfg.expiry(c.routers.longest, false)+c.cfg.ConnectWindow {
		c.pods.RetireOrphans()
	}
	c.pods.Tick()
	c.claims.Tick(c.cfg.KeepKeys)
	c.sandboxes.Forget(c.cfg.KeepEnded, c.Now.Boot-c.cfg.KeepEndedFor)
}
