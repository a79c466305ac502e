package reaping

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/berth-sandbox/berth/devcluster/stack"
	"github.com/berth-sandbox/berth/e2e/internal/chance"
	"github.com/berth-sandbox/berth/e2e/internal/network"
	"github.com/berth-sandbox/berth/e2e/reaping/history"
	"github.com/berth-sandbox/berth/internal/bootclock"
)

const (
	// standsMost is for how long processes are stopped at the most: past the lease.
	standsMost = 8 * time.Second
	// awayMost is for how long a router is stopped or cut off at the most. With what is done
	// to allocators at the same time it may be away for longer than the shortest idle
	// timeout, but not past max-stale. What is open at an Envoy whose router has expired
	// counts as in use until then, and no longer: the model test of package core has that.
	awayMost = 6 * time.Second
	// pauseMost is the longest pause between two faults.
	pauseMost = 4 * time.Second
	// startedAgain is no fault but the end of one.
	startedAgain = "allocator-started-again"
)

// fault is one kind of what is done. It occupies what it is done to for as long as it
// lasts, and mends it in the end, also when ctx ends.
type fault struct {
	name  string
	begin func(g *ground, random *rand.Rand) (run func(ctx context.Context) error, process string, end func())
}

func faults() []fault {
	return []fault{
		{"router-kill", onGateway((*gateway).killRouter)},
		{"router-pause", onGateway((*gateway).pauseRouter)},
		{"router-doze", onGateway((*gateway).dozeRouter)},
		{"router-blink", onGateway(func(w *gateway, ctx context.Context, random *rand.Rand) error { return blink(ctx, w.router, random) })},
		{"router-replace", onGateway((*gateway).replaceRouter)},
		{"router-cut", onGateway((*gateway).cutRouter)},
		{"allocator-kill", onAllocator(func(_ context.Context, a *stack.Allocator, _ *rand.Rand) error { return a.Kill() })},
		{"allocator-pause", onAllocator(pauseAllocator)},
		{"allocator-blink", onAllocator(func(ctx context.Context, a *stack.Allocator, random *rand.Rand) error {
			return blink(ctx, a.Process, random)
		})},
		{"allocator-stop", onAllocator(func(ctx context.Context, a *stack.Allocator, _ *rand.Rand) error {
			return a.Stop(context.WithoutCancel(ctx), 10*time.Second)
		})},
		{"all-rolled", rollAll},
	}
}

// disturb does every fault once, in a random order and several at a time, and returns
// when all have ended.
func (g *ground) disturb(ctx context.Context, random *rand.Rand) {
	var all sync.WaitGroup
	defer all.Wait()
	round := faults()
	random.Shuffle(len(round), func(i, k int) { round[i], round[k] = round[k], round[i] })
	for _, f := range round {
		own := rand.New(rand.NewPCG(random.Uint64(), 0)) // what it draws does not move those after it
		wait := pauseMost/4 + chance.Within(random, pauseMost*3/4)
		run, process, end := f.begin(g, own)
		all.Go(func() {
			defer end()
			e := history.Event{Kind: history.Fault, What: f.name, Process: process, Began: bootclock.Now()}
			if err := run(ctx); err != nil {
				e.Error = err.Error()
			}
			e.Ended = bootclock.Now()
			g.log.add(e)
		})
		if chance.Pause(ctx, wait); ctx.Err() != nil {
			return
		}
	}
}

func onGateway(do func(w *gateway, ctx context.Context, random *rand.Rand) error) func(*ground, *rand.Rand) (func(context.Context) error, string, func()) {
	return func(g *ground, random *rand.Rand) (func(context.Context) error, string, func()) {
		var all []*sync.Mutex
		for _, w := range g.gateways {
			all = append(all, &w.busy)
		}
		w := g.gateways[chance.Occupy(random, all)]
		return func(ctx context.Context) error { return do(w, ctx, random) }, w.name, func() {
			w.returns(g.Context())
			w.busy.Unlock()
		}
	}
}

// returns waits until the router is connected again, for a while at the most: two faults
// in a row would keep it away for too long. An allocator may be away just then, which is
// nothing that a router is blamed for.
func (w *gateway) returns(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, settle)
	defer cancel()
	for w.router.Ready(ctx) != nil && ctx.Err() == nil {
		chance.Pause(ctx, 20*time.Millisecond)
	}
}

func (w *gateway) killRouter(context.Context, *rand.Rand) error {
	if err := w.router.Kill(); err != nil {
		return err
	}
	return w.router.Launch()
}

func (w *gateway) pauseRouter(ctx context.Context, random *rand.Rand) error {
	if err := w.router.Pause(); err != nil {
		return err
	}
	chance.Pause(ctx, time.Second+chance.Within(random, awayMost-time.Second))
	return w.router.Resume()
}

// dozeRouter stops a router for nearly as long as its session lasts, three times: what
// begins and ends meanwhile, no look shows.
func (w *gateway) dozeRouter(ctx context.Context, random *rand.Rand) error {
	for range 3 {
		if err := w.router.Pause(); err != nil {
			return err
		}
		chance.Pause(ctx, 3200*time.Millisecond+chance.Within(random, 700*time.Millisecond))
		if err := w.router.Resume(); err != nil {
			return err
		}
		chance.Pause(ctx, 2*time.Second)
	}
	return nil
}

// blink stops a process again and again, for about as long as a question of the leader
// waits: between a question and its answer, or between a verdict and the release.
func blink(ctx context.Context, p *stack.Process, random *rand.Rand) error {
	for range 10 {
		if err := p.Pause(); err != nil {
			return err
		}
		chance.Pause(ctx, 50*time.Millisecond+chance.Within(random, 800*time.Millisecond))
		if err := p.Resume(); err != nil {
			return err
		}
		chance.Pause(ctx, chance.Within(random, 400*time.Millisecond))
	}
	return nil
}

// replaceRouter has two routers serve one Envoy for a while, as a rollout does.
func (w *gateway) replaceRouter(ctx context.Context, random *rand.Rand) error {
	old := w.router
	if err := w.another.Launch(); err != nil {
		return err
	}
	w.router, w.another = w.another, old
	chance.Pause(ctx, chance.Within(random, 3*time.Second))
	return old.Stop(context.WithoutCancel(ctx), 5*time.Second)
}

// cutRouter cuts a router off from all allocators. In the end what was held back
// arrives, or the connections break.
func (w *gateway) cutRouter(ctx context.Context, random *rand.Rand) error {
	w.network.Cut(w.name, []network.Cut{{From: true}, {To: true}, {From: true, To: true}}[random.IntN(3)])
	chance.Pause(ctx, 300*time.Millisecond+chance.Within(random, awayMost-300*time.Millisecond))
	if random.IntN(2) == 0 {
		w.network.Reset(w.name)
	}
	w.network.Cut(w.name, network.Cut{})
	return nil
}

// leader is the allocator that leads, or any if none does. g.allocators is held.
func (g *ground) leader(ctx context.Context, random *rand.Rand) *stack.Allocator {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	if a, err := g.berth.Leader(ctx); err == nil {
		return a
	}
	return g.berth.Allocators[random.IntN(len(g.berth.Allocators))]
}

// onAllocator takes the leader three times out of four.
func onAllocator(do func(ctx context.Context, a *stack.Allocator, random *rand.Rand) error) func(*ground, *rand.Rand) (func(context.Context) error, string, func()) {
	return func(g *ground, random *rand.Rand) (func(context.Context) error, string, func()) {
		g.allocators.Lock()
		return func(ctx context.Context) error {
			a := g.berth.Allocators[random.IntN(len(g.berth.Allocators))]
			if random.IntN(4) > 0 {
				a = g.leader(ctx, random)
			}
			return do(ctx, a, random)
		}, "allocator", g.allocators.Unlock
	}
}

func pauseAllocator(ctx context.Context, a *stack.Allocator, random *rand.Rand) error {
	if err := a.Pause(); err != nil {
		return err
	}
	chance.Pause(ctx, time.Second+chance.Within(random, standsMost-time.Second))
	return a.Resume()
}

// rollAll kills a router and has the leader end in order at once: what the dead router
// knew, and the end of it, are known to nobody but the leader that goes.
func rollAll(g *ground, random *rand.Rand) (func(context.Context) error, string, func()) {
	g.allocators.Lock()
	kill, process, end := onGateway((*gateway).killRouter)(g, random)
	return func(ctx context.Context) error {
			if err := kill(ctx); err != nil {
				return err
			}
			chance.Pause(ctx, chance.Within(random, 1500*time.Millisecond))
			return g.leader(ctx, random).Stop(context.WithoutCancel(ctx), 10*time.Second)
		}, process, func() {
			end()
			g.allocators.Unlock()
		}
}
