package harness

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/berth-sandbox/berth/devcluster/stack"
	"github.com/berth-sandbox/berth/e2e/harness/network"
	"github.com/berth-sandbox/berth/e2e/history"
	"github.com/berth-sandbox/berth/internal/bootclock"
	"github.com/berth-sandbox/berth/internal/wait"
)

// Fault is one kind of fault.
type Fault struct {
	Name string
	// Share is how often the fault is in a round.
	Share int
	Begin Begin
}

// Begin waits until a process is free for a fault and occupies it.
type Begin func(b *Berth, random *rand.Rand) Action

type (
	// RouterFault does a fault and undoes it, also when ctx ends.
	RouterFault func(ctx context.Context, g *Gateway, random *rand.Rand) error
	// AllocatorFault is the same for allocators.
	AllocatorFault func(ctx context.Context, b *Berth, a *stack.Allocator, random *rand.Rand) error
)

// Action is a fault that is to be done to a process.
type Action struct {
	Process string
	// Gateway is the one that is occupied; nil for faults of allocators.
	Gateway *Gateway
	// Run does the fault and undoes it, also when ctx ends.
	Run func(context.Context) error
	// End frees the process.
	End func()
}

// Round is every fault, as often as its share says, in a random order.
func Round(random *rand.Rand, faults []Fault) (all []Fault) {
	for _, f := range faults {
		for range f.Share {
			all = append(all, f)
		}
	}
	random.Shuffle(len(all), func(i, k int) { all[i], all[k] = all[k], all[i] })
	return all
}

// Disturb does one round of faults, several at a time, until ctx ends, and records each. A
// fault begins a quarter of most to most after the one before it. all waits for the faults
// that are still going on when Disturb returns.
func (b *Berth) Disturb(
	ctx context.Context, all *sync.WaitGroup, random *rand.Rand, faults []Fault, most time.Duration,
) {
	for _, f := range Round(random, faults) {
		own := rand.New(rand.NewPCG(random.Uint64(), 0)) // what the fault draws does not change those after it
		pause := most/4 + Within(random, most*3/4)
		action := f.Begin(b, own)
		all.Go(func() {
			defer action.End()
			e := history.Event{Kind: history.Fault, What: f.Name, Process: action.Process, Began: bootclock.Now()}
			if err := action.Run(ctx); err != nil {
				e.Error = err.Error()
			}
			e.Ended = bootclock.Now()
			b.History.Add(e)
		})
		if !wait.Sleep(ctx, pause) {
			return
		}
	}
}

// OnRouter is a fault of any gateway that has no other fault of its processes meanwhile.
func OnRouter(do RouterFault) Begin {
	return onGateway(func(g *Gateway) *sync.Mutex { return &g.parts }, do)
}

// OnLink is a fault of the connections of any gateway's router. The gateway may have a fault
// of its processes meanwhile.
func OnLink(do RouterFault) Begin {
	return onGateway(func(g *Gateway) *sync.Mutex { return &g.link }, do)
}

func onGateway(lock func(*Gateway) *sync.Mutex, do RouterFault) Begin {
	return func(b *Berth, random *rand.Rand) Action {
		var all []*sync.Mutex
		for _, g := range b.Gateways {
			all = append(all, lock(g))
		}
		g := b.Gateways[occupy(random, all)]
		return Action{
			Process: g.Name, Gateway: g,
			Run: func(ctx context.Context) error { return do(ctx, g, random) }, End: lock(g).Unlock,
		}
	}
}

// OnAllocator is a fault of an allocator: of the leader, if there is one, in all but one of
// so many cases. One allocator has a fault at a time.
func OnAllocator(cases int, do AllocatorFault) Begin {
	return func(b *Berth, random *rand.Rand) Action {
		b.allocators.Lock()
		return Action{Process: "allocator", End: b.allocators.Unlock, Run: func(ctx context.Context) error {
			a := b.Stack.Allocators[random.IntN(len(b.Stack.Allocators))]
			if random.IntN(cases) > 0 {
				a = b.leaderOr(ctx, a)
			}
			if err := do(ctx, b, a, random); err != nil {
				return fmt.Errorf("%s: %w", a.Name, err)
			}
			return nil
		}}
	}
}

// KillRouterAndStopLeader is a fault of a router and the leader at once: the router is
// killed, and within pause the leader ends in order.
func KillRouterAndStopLeader(pause time.Duration) Begin {
	kill := OnRouter(KillRouter)
	return func(b *Berth, random *rand.Rand) Action {
		b.allocators.Lock()
		action := kill(b, random)
		run, end := action.Run, action.End
		action.Run = func(ctx context.Context) error {
			if err := run(ctx); err != nil {
				return err
			}
			wait.Sleep(ctx, Within(random, pause))
			a := b.leaderOr(ctx, b.Stack.Allocators[random.IntN(len(b.Stack.Allocators))])
			return StopAllocator(ctx, b, a, random)
		}
		action.End = func() {
			end()
			b.allocators.Unlock()
		}
		return action
	}
}

// leaderWait bounds how long a fault waits for a leader.
const leaderWait = 2 * time.Second

func (b *Berth) leaderOr(ctx context.Context, other *stack.Allocator) *stack.Allocator {
	ctx, cancel := context.WithTimeout(ctx, leaderWait)
	defer cancel()
	if leader, err := b.Stack.Leader(ctx); err == nil {
		return leader
	}
	return other
}

// KillAllocator kills an allocator. KeepAllocators starts it again.
func KillAllocator(_ context.Context, _ *Berth, a *stack.Allocator, _ *rand.Rand) error {
	return a.Kill()
}

// allocatorGrace is how long an allocator may take to end in order.
const allocatorGrace = 10 * time.Second

// StopAllocator has an allocator end in order.
func StopAllocator(ctx context.Context, _ *Berth, a *stack.Allocator, _ *rand.Rand) error {
	return a.Stop(context.WithoutCancel(ctx), allocatorGrace)
}

// PauseAllocator stops an allocator as it is for least to most.
func PauseAllocator(least, most time.Duration) AllocatorFault {
	return func(ctx context.Context, _ *Berth, a *stack.Allocator, random *rand.Rand) error {
		return PauseFor(ctx, a.Server, least+Within(random, most-least))
	}
}

// CutOff cuts a process off for 300 ms to most, in one direction or both, and calls during
// meanwhile. At the end the bytes that were held back arrive, or the connections break.
func (b *Berth) CutOff(ctx context.Context, random *rand.Rand, process string, most time.Duration, during func()) {
	const least = 300 * time.Millisecond
	b.Network.Cut(process, []network.Cut{{From: true}, {To: true}, {From: true, To: true}}[random.IntN(3)])
	during()
	wait.Sleep(ctx, least+Within(random, most-least))
	if random.IntN(2) == 0 {
		b.Network.Reset(process)
	}
	b.Network.Cut(process, network.Cut{})
}

func allocatorName(i int) string { return fmt.Sprintf("allocator-%d", i) }

// StartedAgain is what the history says where KeepAllocators starts an allocator. It is no
// fault but the end of one.
const StartedAgain = "allocator-started-again"

// KeepAllocators starts allocators that have ended again, as the kubelet would, until the
// test is over: until all that is cleaned up that was registered later.
func (b *Berth) KeepAllocators() {
	ctx, stop := context.WithCancel(context.WithoutCancel(b.Context()))
	var all sync.WaitGroup
	for _, a := range b.Stack.Allocators {
		all.Go(func() {
			for ; ctx.Err() == nil; wait.Sleep(ctx, 25*time.Millisecond) {
				if a.Running() || b.isHeld(a) {
					continue
				}
				e := history.Event{Kind: history.Fault, What: StartedAgain, Process: a.Name, Began: bootclock.Now()}
				if err := a.Launch(); err != nil {
					e.Error = err.Error()
				}
				e.Ended = bootclock.Now()
				b.History.Add(e)
			}
		})
	}
	b.Cleanup(func() {
		stop()
		all.Wait()
	})
}

// Hold has KeepAllocators leave an allocator ended, or not any more.
func (b *Berth) Hold(a *stack.Allocator, held bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.held[a] = held
}

func (b *Berth) isHeld(a *stack.Allocator) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.held[a]
}
