package reaping

import (
	"context"
	"fmt"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/devcluster/hollow"
	"github.com/berth-sandbox/berth/devcluster/stack"
	"github.com/berth-sandbox/berth/e2e/harness"
	"github.com/berth-sandbox/berth/e2e/history"
	"github.com/berth-sandbox/berth/internal/bootclock"
	"github.com/berth-sandbox/berth/internal/wait"
)

const (
	poolName = "reaping"
	warm     = 60
	// lease gives a renewal of 3.3 s and retries of 0.5 s, for a machine that is busy.
	lease = 5 * time.Second
	// maxStale is longer than several faults at a time keep a router and the leader apart. A
	// request that is open at an Envoy counts as use no longer than maxStale without a router.
	maxStale = 20 * time.Second
	// offset is by how much the allocators' wall clocks are off, ahead or behind.
	offset = 10 * time.Minute
	// settle is how long the effects of a fault may last: a lease until another allocator
	// leads, then the expiry of silent sessions, then a look.
	settle = 15 * time.Second
	// guard is how long the release of a silent sandbox may take after the last fault.
	guard = time.Minute
)

// ground is a Berth with a pool whose pods are one recorder.
type ground struct {
	*harness.Berth
	wroteState bool

	mu       sync.Mutex
	launches [2]int // of allocators
}

// newGround starts everything.
func newGround(t *testing.T) *ground {
	t.Helper()
	run := harness.NewRun(t, history.Settings{
		Suite: history.Reaping, Seed: *seedFlag, MaxStale: maxStale, Settle: settle, Guard: guard,
		Offsets: []time.Duration{offset, -offset},
	}, *historyFlag)
	pods := newRecorder(run)
	t.Cleanup(pods.close)
	g := &ground{}
	g.Berth = run.Start(harness.Options{
		Hollow: &hollow.Options{Nodes: 4, Handler: pods},
		Stack: stack.Options{
			BinDir: binDir, Allocators: len(g.launches), Gateways: 3, LeaseDuration: lease, MaxStale: maxStale,
			AllocatorLaunchArgs: g.wallClock,
		},
		Relays: true, Connections: *usersFlag,
	})
	t.Cleanup(g.keepState)
	g.CreatePool(poolName, warm, func(p *v1alpha1.SandboxPool) { p.Spec.DefaultPort = int32(g.Nodes.Port()) })
	return g
}

// wallClock puts one allocator ahead and the other behind, and swaps the side of an allocator each
// time it is started.
func (g *ground) wallClock(i int) []string {
	g.mu.Lock()
	defer g.mu.Unlock()
	by := offset
	if (g.launches[i]+i)%2 == 1 {
		by = -by
	}
	g.launches[i]++
	return []string{"--wall-clock-offset=" + by.String()}
}

// state returns the records and one moment on both clocks. live is the number of sandboxes that
// were not released, or were answered and are not on record.
func (g *ground) state(ctx context.Context) (events []history.Event, live int, err error) {
	records, err := g.Records(ctx)
	if err != nil {
		return nil, 0, err
	}
	recorded := map[string]bool{}
	for _, r := range records {
		recorded[r.Sandbox] = true
		if r.Released.IsZero() {
			live++
		}
	}
	for _, e := range g.History.All() {
		if e.Kind == history.Claim && e.Code == http.StatusCreated && !recorded[e.Sandbox] {
			live++
		}
	}
	return append(records,
		history.Event{Kind: history.Clock, Began: bootclock.Now(), Wall: time.Now().Round(0)}), live, nil
}

// writeState waits until every answered sandbox is on record and every sandbox on record was
// released. Then it writes the state to the history.
func (g *ground) writeState() {
	g.Helper()
	ctx, cancel := context.WithTimeout(g.Context(), guard)
	defer cancel()
	var events []history.Event
	err := harness.Wait(ctx, func(ctx context.Context) error {
		now, live, err := g.state(ctx)
		if err != nil {
			return err
		}
		if events = now; live > 0 {
			wait.Sleep(ctx, 500*time.Millisecond)
			return fmt.Errorf("%d sandboxes have not been released", live)
		}
		return nil
	})
	if err != nil {
		g.Errorf("after %v of silence: %v\n%s", guard, err, g.lastActive())
	}
	g.wroteState = true
	for _, e := range events {
		g.History.Add(e)
	}
}

// keepState adds the records to the history of a test that has failed before writeState.
func (g *ground) keepState() {
	if !g.Failed() || g.wroteState {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	events, _, err := g.state(ctx)
	if err != nil {
		g.Log(err)
	}
	for _, e := range events {
		g.History.Add(e)
	}
}

// lastActive returns the leader's page about live sandboxes.
func (g *ground) lastActive() string {
	ctx, cancel := context.WithTimeout(g.Context(), 10*time.Second)
	defer cancel()
	a, err := g.Stack.Leader(ctx)
	if err != nil {
		return err.Error()
	}
	page, err := harness.Do(ctx, g.HTTP, http.MethodGet, a.API+"/v1/last-active?format=text&limit=20", "", "")
	if err != nil {
		return err.Error()
	}
	return fmt.Sprintf("%.8000s", page.Body)
}
