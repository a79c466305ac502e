package soak

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/berth-sandbox/berth/devcluster/stack"
	"github.com/berth-sandbox/berth/e2e/internal/chance"
	"github.com/berth-sandbox/berth/e2e/internal/network"
	"github.com/berth-sandbox/berth/e2e/soak/history"
	"github.com/berth-sandbox/berth/internal/bootclock"
)

const (
	// routerStands and leaderStands are for how long they are stopped at the most: well
	// past max-stale, and past the lease.
	routerStands, leaderStands = 8 * time.Second, 8 * time.Second
	// cutLasts is for how long connections are held up at the most.
	cutLasts = 7 * time.Second
	// envoyStands leaves most of the stall budget to a machine that is slow.
	envoyStands = time.Second
	// faultEvery is the longest pause between two faults.
	faultEvery = 2 * time.Second
	// deleteEvery is the longest pause between two deletions of a pod.
	deleteEvery = 2 * time.Second
)

// fault is one kind of what is done. A fault occupies what it is done to for as long as
// it lasts, and mends it in the end, also when ctx ends.
type fault struct {
	name  string
	share int // how often it is in a round
	begin func(g *ground, random *rand.Rand) (run func(ctx context.Context) error, process string, end func())
}

func faults() []fault {
	return []fault{
		{"router-kill", 3, onGateway((*gateway).killRouter)},
		{"router-pause", 4, onGateway((*gateway).pauseRouter)},
		{"router-replace", 3, onGateway((*gateway).replaceRouter)},
		{"router-pause-and-replace", 3, onGateway((*gateway).replacePausedRouter)},
		{history.EnvoyPaused, 2, onGateway((*gateway).pauseEnvoy)},
		{history.EnvoyPaused + "-and-router-kill", 3, onGateway((*gateway).killRouterBehindEnvoy)},
		{"router-cut", 6, cutRouter},
		{"allocator-kill", 1, onAllocator(killAllocator)},
		{"allocator-pause", 1, onAllocator(pauseAllocator)},
		{"allocator-cut", 1, cutAllocator},
	}
}

// round is every fault, as often as its share says, in a random order: so each kind
// happens as soon as a round is over.
func round(random *rand.Rand) []fault {
	var all []fault
	for _, f := range faults() {
		for range f.share {
			all = append(all, f)
		}
	}
	random.Shuffle(len(all), func(i, k int) { all[i], all[k] = all[k], all[i] })
	return all
}

// disturb does one fault after the other, and several at a time, until ctx ends.
func (g *ground) disturb(ctx context.Context, all *sync.WaitGroup) {
	random := g.random("faults")
	for ctx.Err() == nil {
		for _, f := range round(random) {
			own := rand.New(rand.NewPCG(random.Uint64(), 0)) // what it draws does not move those after it
			wait := faultEvery/4 + chance.Within(random, faultEvery*3/4)
			run, process, end := f.begin(g, own)
			all.Go(func() {
				defer end()
				e := history.Event{Kind: history.Fault, What: f.name, Process: process, Began: bootclock.Now()}
				if err := run(ctx); err != nil {
					e.Error = err.Error()
				}
				e.Ended = bootclock.Now()
				g.Add(e)
			})
			if chance.Pause(ctx, wait); ctx.Err() != nil {
				return
			}
		}
	}
}

// churn deletes pods that hold sandboxes, until ctx ends.
func (g *ground) churn(ctx context.Context) {
	random := g.random("deletions")
	for chance.Pause(ctx, chance.Within(random, deleteEvery)); ctx.Err() == nil; chance.Pause(ctx, chance.Within(random, deleteEvery)) {
		g.deletePods(ctx, random, 1, random.IntN(3) > 0)
	}
}

func onGateway(do func(w *gateway, ctx context.Context, random *rand.Rand) error) func(*ground, *rand.Rand) (func(context.Context) error, string, func()) {
	return func(g *ground, random *rand.Rand) (func(context.Context) error, string, func()) {
		var all []*sync.Mutex
		for _, w := range g.gateways {
			all = append(all, &w.parts)
		}
		w := g.gateways[chance.Occupy(random, all)]
		return func(ctx context.Context) error { return do(w, ctx, random) }, w.name, w.parts.Unlock
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
	chance.Pause(ctx, 50*time.Millisecond+chance.Within(random, routerStands))
	return w.router.Resume()
}

// replaceRouter has two routers serve one Envoy for a while, as a rollout does.
func (w *gateway) replaceRouter(ctx context.Context, random *rand.Rand) error {
	old := w.router
	if err := w.another.Launch(); err != nil {
		return err
	}
	w.router, w.another = w.another, old
	chance.Pause(ctx, chance.Within(random, 3*time.Second))
	if random.IntN(2) == 0 {
		return old.Kill()
	}
	return old.Stop(context.WithoutCancel(ctx), 3*time.Second)
}

// replacePausedRouter starts a second router while the first stands still. That one
// goes on for a moment, with what it has not read and not sent, before it is killed.
func (w *gateway) replacePausedRouter(ctx context.Context, random *rand.Rand) error {
	old := w.router
	if err := old.Pause(); err != nil {
		return err
	}
	chance.Pause(ctx, chance.Within(random, 3*time.Second))
	if err := w.another.Launch(); err != nil {
		return err
	}
	w.router, w.another = w.another, old
	chance.Pause(ctx, chance.Within(random, routerStands-3*time.Second))
	if err := old.Resume(); err != nil {
		return err
	}
	chance.Pause(ctx, chance.Within(random, time.Second))
	return old.Kill()
}

func (w *gateway) pauseEnvoy(_ context.Context, random *rand.Rand) error {
	if err := w.Envoy.Pause(); err != nil {
		return err
	}
	chance.Pause(context.Background(), chance.Within(random, envoyStands))
	return w.Envoy.Resume()
}

// killRouterBehindEnvoy leaves answers that nobody reads until their router has been
// found dead.
func (w *gateway) killRouterBehindEnvoy(_ context.Context, random *rand.Rand) error {
	if err := w.Envoy.Pause(); err != nil {
		return err
	}
	chance.Pause(context.Background(), chance.Within(random, envoyStands/4))
	err := w.killRouter(context.Background(), random)
	chance.Pause(context.Background(), chance.Within(random, envoyStands*3/4))
	if resumed := w.Envoy.Resume(); resumed != nil {
		return resumed
	}
	return err
}

// randomCut cuts one direction or both.
func randomCut(random *rand.Rand) network.Cut {
	return []network.Cut{{From: true}, {To: true}, {From: true, To: true}}[random.IntN(3)]
}

// hold cuts somebody off for a while. In the end what was held back arrives, or the
// connections break.
func (g *ground) hold(ctx context.Context, random *rand.Rand, who string, during func()) {
	g.network.Cut(who, randomCut(random))
	during()
	chance.Pause(ctx, 300*time.Millisecond+chance.Within(random, cutLasts))
	if random.IntN(2) == 0 {
		g.network.Reset(who)
	}
	g.network.Cut(who, network.Cut{})
}

// cutRouter cuts a router off from all allocators. In many cases pods that hold
// sandboxes go just then: it is not told, and serves what it knows.
func cutRouter(g *ground, random *rand.Rand) (func(context.Context) error, string, func()) {
	var all []*sync.Mutex
	for _, w := range g.gateways {
		all = append(all, &w.link)
	}
	w := g.gateways[chance.Occupy(random, all)]
	return func(ctx context.Context) error {
		g.hold(ctx, random, w.name, func() { g.deletePods(ctx, random, random.IntN(4), true) })
		return nil
	}, w.name, w.link.Unlock
}

// anAllocator is the leader in two of three cases, if there is one.
func (g *ground) anAllocator(ctx context.Context, random *rand.Rand) (*stack.Allocator, string) {
	i := random.IntN(len(g.berth.Allocators))
	if random.IntN(3) > 0 {
		ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
		defer cancel()
		if leader, err := g.berth.Leader(ctx); err == nil {
			for k, a := range g.berth.Allocators {
				if a == leader {
					i = k
				}
			}
		}
	}
	return g.berth.Allocators[i], allocatorName(i)
}

func onAllocator(do func(ctx context.Context, a *stack.Allocator, random *rand.Rand) error) func(*ground, *rand.Rand) (func(context.Context) error, string, func()) {
	return func(g *ground, random *rand.Rand) (func(context.Context) error, string, func()) {
		g.allocators.Lock()
		return func(ctx context.Context) error {
			a, name := g.anAllocator(ctx, random)
			if err := do(ctx, a, random); err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
			return nil
		}, "allocator", g.allocators.Unlock
	}
}

// killAllocator leaves it to keep to start another one.
func killAllocator(_ context.Context, a *stack.Allocator, _ *rand.Rand) error { return a.Kill() }

func pauseAllocator(ctx context.Context, a *stack.Allocator, random *rand.Rand) error {
	if err := a.Pause(); err != nil {
		return err
	}
	chance.Pause(ctx, 200*time.Millisecond+chance.Within(random, leaderStands))
	return a.Resume()
}

// cutAllocator cuts an allocator off from the API server.
func cutAllocator(g *ground, random *rand.Rand) (func(context.Context) error, string, func()) {
	g.allocators.Lock()
	return func(ctx context.Context) error {
		_, name := g.anAllocator(ctx, random)
		g.hold(ctx, random, name, func() {})
		return nil
	}, "allocator", g.allocators.Unlock
}
