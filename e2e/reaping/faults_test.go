package reaping

import (
	"context"
	"math/rand/v2"
	"time"

	"github.com/berth-sandbox/berth/devcluster/proc"
	"github.com/berth-sandbox/berth/devcluster/stack"
	"github.com/berth-sandbox/berth/e2e/harness"
	"github.com/berth-sandbox/berth/internal/wait"
)

const (
	// standsMost is the longest pause of an allocator, longer than the lease.
	standsMost = 8 * time.Second
	// awayMost is how long a router is paused or cut off at most. With a fault of an allocator
	// at the same time it may be away for longer than the shortest idle timeout, but not
	// longer than max-stale. The model test of package core has routers that expire.
	awayMost = 6 * time.Second
	// pauseMost is the longest pause between two faults.
	pauseMost = 4 * time.Second
)

func faults() []harness.Fault {
	return []harness.Fault{
		{Name: "router-kill", Share: 1, Begin: onRouter(harness.KillRouter)},
		{Name: "router-pause", Share: 1, Begin: onRouter(pauseRouter)},
		{Name: "router-doze", Share: 1, Begin: onRouter(dozeRouter)},
		{Name: "router-blink", Share: 1, Begin: onRouter(blinkRouter)},
		{Name: "router-replace", Share: 1, Begin: onRouter(replaceRouter)},
		{Name: "router-cut", Share: 1, Begin: onRouter(cutRouter)},
		{Name: "allocator-kill", Share: 1, Begin: harness.OnAllocator(4, harness.KillAllocator)},
		{Name: "allocator-pause", Share: 1, Begin: harness.OnAllocator(4, harness.PauseAllocator(time.Second, standsMost))},
		{Name: "allocator-blink", Share: 1, Begin: harness.OnAllocator(4, blinkAllocator)},
		{Name: "allocator-stop", Share: 1, Begin: harness.OnAllocator(4, harness.StopAllocator)},
		// Only the leader that ends knows of the router's end.
		{Name: "all-rolled", Share: 1, Begin: returning(harness.KillRouterAndStopLeader(1500 * time.Millisecond))},
	}
}

func onRouter(do harness.RouterFault) harness.Begin { return returning(harness.OnRouter(do)) }

// returning keeps the gateway of a fault occupied until its router is connected again, but no
// longer than settle, because two faults in a row would keep the router away for too long.
func returning(begin harness.Begin) harness.Begin {
	return func(b *harness.Berth, random *rand.Rand) harness.Action {
		action := begin(b, random)
		end := action.End
		action.End = func() {
			defer end()
			ctx, cancel := context.WithTimeout(b.Context(), settle)
			defer cancel()
			_ = harness.Wait(ctx, action.Gateway.Serving().Check)
		}
		return action
	}
}

func pauseRouter(ctx context.Context, g *harness.Gateway, random *rand.Rand) error {
	return harness.PauseFor(ctx, g.Serving(), time.Second+harness.Within(random, awayMost-time.Second))
}

// dozeRouter pauses a router three times for nearly as long as its session lasts. No look shows a
// request that begins and ends meanwhile.
func dozeRouter(ctx context.Context, g *harness.Gateway, random *rand.Rand) error {
	for range 3 {
		if err := harness.PauseFor(ctx, g.Serving(),
			3200*time.Millisecond+harness.Within(random, 700*time.Millisecond)); err != nil {
			return err
		}
		wait.Sleep(ctx, 2*time.Second)
	}
	return nil
}

func blinkRouter(ctx context.Context, g *harness.Gateway, random *rand.Rand) error {
	return blink(ctx, g.Serving(), random)
}

func blinkAllocator(ctx context.Context, _ *harness.Berth, a *stack.Allocator, random *rand.Rand) error {
	return blink(ctx, a.Server, random)
}

// blink pauses a process ten times for about as long as a question of the leader waits, so that
// pauses come between question and answer, or between verdict and release.
func blink(ctx context.Context, p *proc.Server, random *rand.Rand) error {
	for range 10 {
		if err := harness.PauseFor(ctx, p, 50*time.Millisecond+harness.Within(random, 800*time.Millisecond)); err != nil {
			return err
		}
		wait.Sleep(ctx, harness.Within(random, 400*time.Millisecond))
	}
	return nil
}

// replaceRouter has two routers serve one Envoy for a while, as a rollout does.
func replaceRouter(ctx context.Context, g *harness.Gateway, random *rand.Rand) error {
	old, err := g.Succeed()
	if err != nil {
		return err
	}
	wait.Sleep(ctx, harness.Within(random, 3*time.Second))
	return old.Stop(context.WithoutCancel(ctx), 5*time.Second)
}

// cutRouter cuts a router off from all allocators.
func cutRouter(ctx context.Context, g *harness.Gateway, random *rand.Rand) error {
	g.Berth.CutOff(ctx, random, g.Name, awayMost, func() {})
	return nil
}
