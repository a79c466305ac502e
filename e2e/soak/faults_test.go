package soak

import (
	"context"
	"math/rand/v2"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/devcluster/stack"
	"github.com/berth-sandbox/berth/e2e/harness"
	"github.com/berth-sandbox/berth/e2e/history"
	"github.com/berth-sandbox/berth/internal/bootclock"
	"github.com/berth-sandbox/berth/internal/wait"
)

const (
	// routerStands and leaderStands are the longest pauses, well beyond max-stale and the lease.
	routerStands, leaderStands = 8 * time.Second, 8 * time.Second
	// cutLasts is the longest cut of connections.
	cutLasts = 7 * time.Second
	// envoyStands is the longest pause of an Envoy. It leaves most of the stall budget to a slow machine.
	envoyStands = time.Second
	// faultEvery is the longest pause between two faults.
	faultEvery = 2 * time.Second
	// deleteEvery is the longest pause between two deletions of a pod.
	deleteEvery = 2 * time.Second
	// podDeleted begins the name of a deletion as a fault.
	podDeleted = "pod-deleted "
)

func faults() []harness.Fault {
	return []harness.Fault{
		{Name: "router-kill", Share: 3, Begin: harness.OnRouter(harness.KillRouter)},
		{Name: "router-pause", Share: 4, Begin: harness.OnRouter(pauseRouter)},
		{Name: "router-replace", Share: 3, Begin: harness.OnRouter(replaceRouter)},
		{Name: "router-pause-and-replace", Share: 3, Begin: harness.OnRouter(replacePausedRouter)},
		{Name: history.EnvoyPaused, Share: 2, Begin: harness.OnRouter(pauseEnvoy)},
		{Name: history.EnvoyPaused + "-and-router-kill", Share: 3, Begin: harness.OnRouter(killRouterBehindEnvoy)},
		{Name: "router-cut", Share: 6, Begin: harness.OnLink(cutRouter)},
		{Name: "allocator-kill", Share: 1, Begin: harness.OnAllocator(3, harness.KillAllocator)},
		{Name: "allocator-pause", Share: 1,
			Begin: harness.OnAllocator(3, harness.PauseAllocator(200*time.Millisecond, leaderStands))},
		{Name: "allocator-cut", Share: 1, Begin: harness.OnAllocator(3, cutAllocator)},
	}
}

func pauseRouter(ctx context.Context, g *harness.Gateway, random *rand.Rand) error {
	return harness.PauseFor(ctx, g.Serving(), 50*time.Millisecond+harness.Within(random, routerStands))
}

// replaceRouter has two routers serve one Envoy for a while, as a rollout does.
func replaceRouter(ctx context.Context, g *harness.Gateway, random *rand.Rand) error {
	old, err := g.Succeed()
	if err != nil {
		return err
	}
	wait.Sleep(ctx, harness.Within(random, 3*time.Second))
	if random.IntN(2) == 0 {
		return old.Kill()
	}
	return old.Stop(context.WithoutCancel(ctx), 3*time.Second)
}

// replacePausedRouter starts a second router while the first one is paused. The first one then
// runs for a moment, with old messages to read and to send, before it is killed.
func replacePausedRouter(ctx context.Context, g *harness.Gateway, random *rand.Rand) error {
	old := g.Serving()
	if err := old.Pause(); err != nil {
		return err
	}
	wait.Sleep(ctx, harness.Within(random, 3*time.Second))
	if _, err := g.Succeed(); err != nil {
		return err
	}
	wait.Sleep(ctx, harness.Within(random, routerStands-3*time.Second))
	if err := old.Resume(); err != nil {
		return err
	}
	wait.Sleep(ctx, harness.Within(random, time.Second))
	return old.Kill()
}

func pauseEnvoy(_ context.Context, g *harness.Gateway, random *rand.Rand) error {
	return harness.PauseFor(context.Background(), g.Envoy, harness.Within(random, envoyStands))
}

// killRouterBehindEnvoy leaves answers that Envoy reads only after the router was found dead.
func killRouterBehindEnvoy(_ context.Context, g *harness.Gateway, random *rand.Rand) error {
	if err := g.Envoy.Pause(); err != nil {
		return err
	}
	wait.Sleep(context.Background(), harness.Within(random, envoyStands/4))
	err := harness.KillRouter(context.Background(), g, random)
	wait.Sleep(context.Background(), harness.Within(random, envoyStands*3/4))
	if resumed := g.Envoy.Resume(); resumed != nil {
		return resumed
	}
	return err
}

// cutRouter cuts a router off from all allocators. In many cases pods that hold sandboxes are
// deleted meanwhile. The router does not hear of that and serves the routes that it knows.
func cutRouter(ctx context.Context, g *harness.Gateway, random *rand.Rand) error {
	g.Berth.CutOff(ctx, random, g.Name, cutLasts, func() {
		deletePods(ctx, g.Berth, random, random.IntN(4), harness.ByForce)
	})
	return nil
}

// cutAllocator cuts an allocator off from the API server.
func cutAllocator(ctx context.Context, b *harness.Berth, a *stack.Allocator, random *rand.Rand) error {
	b.CutOff(ctx, random, a.Name, cutLasts, func() {})
	return nil
}

// churn deletes pods that hold sandboxes, until ctx ends.
func (g *ground) churn(ctx context.Context) {
	random := g.Random("deletions")
	for {
		if !wait.Sleep(ctx, harness.Within(random, deleteEvery)) {
			return
		}
		how := harness.ByForce
		if random.IntN(3) == 0 {
			how = harness.Plainly
		}
		deletePods(ctx, g.Berth, random, 1, how)
	}
}

// deletePods deletes up to n pods that hold sandboxes. Each is a fault too.
func deletePods(ctx context.Context, b *harness.Berth, random *rand.Rand, n int, how string) {
	call, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	all, err := b.Pods(call, poolName, v1alpha1.LabelPhase+"="+v1alpha1.PhaseClaimed)
	if err != nil && ctx.Err() == nil {
		b.Error(err)
	}
	all = slices.DeleteFunc(all, func(p corev1.Pod) bool { return p.DeletionTimestamp != nil })
	random.Shuffle(len(all), func(i, k int) { all[i], all[k] = all[k], all[i] })
	for _, p := range all[:min(n, len(all))] {
		began := bootclock.Now()
		switch ok, err := b.DeletePod(ctx, &p, how); {
		case ok:
			b.History.Add(history.Event{Kind: history.Fault, What: podDeleted + how, Process: p.Name, Began: began,
				Ended: bootclock.Now()})
		case err != nil && ctx.Err() == nil:
			b.Errorf("delete pod: %v", err)
		}
	}
}
