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
	"github.com/berth-sandbox/berth/allocator/core/taint"
	"github.com/berth-sandbox/berth/allocator/core/teams"
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
	*step
	cfg     Config
	started Instant
	// ticked is the boot clock at the last Tick. The demand goes by it, so that what a pool asks for changes with
	// events only.
	ticked time.Duration
	// recovering: Recover has not read everything yet, so nothing is decided about pools.
	recovering bool
	pressure   bool
	closing    bool

	outbox      *fact.Outbox
	pools       poolTable
	pods        map[PodKey]*pod
	lives       map[PodKey]PodKey // of pods: the whole pod -> its present life
	nodes       nodeTable
	lostNodes   []lostNode             // those that became unusable within bindingLag, in that order
	retirements map[PodKey]*retirement // of idle pods that are there or wait for a fence, or whose fact is not durable yet
	orphans     []*pod                 // pods marked as used and on no record, to be deleted
	unproven    []unproven             // lives that began with a restart, in the order in which they were seen
	taints      *taint.Ledger[PodKey]
	sandboxes   *sandboxTable
	configuring map[string]*sandbox // durable and not granted, by ID: their agents are being configured
	fences      *fence.Ledger
	idle        *idle.Ledger // of the running sandboxes and of those that were running until their release
	routers     *routers
	claims      *desk
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
	st := &step{now: now}
	c := &Core{
		step: st, cfg: cfg, started: now, ticked: now.Boot, outbox: fact.NewOutbox(cfg.Term, cfg.Linger),
		pools: poolTable{byKey: map[PoolKey]*pool{}, window: minWindow, surge: firstSurge}, pods: map[PodKey]*pod{}, lives: map[PodKey]PodKey{}, nodes: nodeTable{},
		retirements: map[PodKey]*retirement{}, taints: taint.New[PodKey](), sandboxes: newSandboxTable(),
		configuring: map[string]*sandbox{}, fences: fence.New(cfg.ConnectWindow), idle: idle.New(cfg.ConnectWindow, cfg.DryRun),
	}
	c.claims = &desk{step: st, Ledger: claims.New[claimState](), sandboxes: c.sandboxes, limits: teams.New()}
	c.routers = &routers{
		step: st, cfg: &c.cfg, outbox: c.outbox, sandboxes: c.sandboxes, fences: c.fences, idle: c.idle,
		members:     member.New(member.Config{Expiry: cfg.expiry, ConnectWindow: cfg.ConnectWindow, ReturnWithin: cfg.DeclareAfter}),
		earlierEnds: c.retireQuarantined,
	}
	return c, nil
}

// Step takes one event and returns its effects. now must not go back on the boot clock.
func (c *Core) Step(now Instant, ev Event) []Effect {
	c.now = now
	switch ev := ev.(type) {
	case PoolSeen:
		c.poolSeen(ev.Pool)
	case PoolGone:
		c.pools.gone(ev.Key)
	case PodSeen:
		c.podSeen(ev.Pod)
	case PodGone:
		c.podGone(ev.Key)
	case NodeSeen:
		c.nodeSeen(ev)
	case NodeGone:
		c.nodeSeen(NodeSeen{Name: ev.Name})
	case CreateFailed:
		if pool := c.pools.byKey[ev.Pool]; pool != nil {
			pool.createFailed(ev, c.now.Boot)
		}
	case Claim:
		c.claim(ev)
	case ClaimAbandoned:
		c.claimAbandoned(ev.Token)
	case Started:
		c.startDone(ev)
	case Configured:
		c.configured(ev)
	case Pressure:
		c.pressure = ev.On
	case TeamLimits:
		c.claims.limits.Set(ev.Settings, now.Boot)
	case Closing: // all waits end
		c.closing = true
		for _, pool := range c.pools.byKey {
			pool.touch()
		}
		c.answer(c.claims.Awaited()...)
	case Written:
		c.outbox.Written(cmp.Or(ev.At, now.Boot))
	case WriterReady:
		c.outbox.Ready()
	case Release:
		c.release(ev)
	case ObjectWritten:
		c.objectWritten(ev)
	case LogRead:
		c.logRead(ev)
	case ObjectSeen:
		c.objectSeen(ev)
	case ObjectGone:
		c.objectGone(ev.ID)
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
		if s := c.routers.members.OfStream(ev.Stream); s != nil {
			c.decide(c.idle.Answer(s.ID, ev.Number, ev.Activities, ev.Blind, c.now.Boot))
		}
	case Probed:
		c.routers.probed(ev)
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

// step has what all parts of Core share: the time, and the effects so far.
type step struct {
	now Instant
	out []Effect
}

func (s *step) emit(e Effect) { s.out = append(s.out, e) }

func (c *Core) take() []Effect {
	c.advanceFences()
	c.settlePools()
	c.routers.sendReleases()
	if facts := c.outbox.Flush(c.now.Boot); facts != nil {
		c.emit(Write{facts})
	}
	out := c.out
	c.out = nil
	return out
}

// tick acts on what is due.
func (c *Core) tick() {
	c.ticked = c.now.Boot
	c.expireEnds()
	c.reapIdle()
	c.persistActivity()
	c.routers.tick()
	c.advanceFences()
	for _, pool := range c.pools.sorted() {
		filling := pool.filling
		if filling != nil && filling.Late(c.now.Boot) && len(filling.Request.pods) >= filling.Request.atLeast {
			filling.Request.ends = true
			c.serve(pool)
		}
		for _, x := range c.claims.Expire(pool.line, c.now.Boot) {
			c.emit(pool.refusal(x.Token, PoolEmpty))
		}
		if filling != nil && !filling.Waits() && len(filling.Request.facts) == 0 { // it has expired
			c.free(filling.Request.callOff())
		}
		pool.retry(c.now.Boot)
		c.replaceLate(pool)
		if pool.known {
			pool.aim(c.ticked)
		}
	}
	c.retireOrphans()
	c.forgetLost()
	c.retireUnproven()
	c.answer(c.claims.Awaited()...)
	for _, id := range c.claims.DropKeys(c.now.Boot - c.cfg.KeepKeys) {
		c.letGo(c.sandboxes.byID[id])
	}
	c.forgetEnded()
}
