package chaos

import (
	"context"
	"fmt"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/types"

	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/devcluster/proc"
	"github.com/berth-sandbox/berth/devcluster/stack"
	"github.com/berth-sandbox/berth/e2e/history"
	"github.com/berth-sandbox/berth/internal/bootclock"
	"github.com/berth-sandbox/berth/internal/wait"
)

// Leaders end in order and are killed while callers claim, read and release at the other replica, half of them without
// keys, and while claims wait for pods. Every call succeeds.
// Invariant: I5, P24
func TestChangesOfLeadersRefuseNoCall(t *testing.T) {
	// Those of the flags, so that the times that it logs are those of docs/design/recovery.md.
	defaults := []string{"--lease-duration=4s", "--lease-renew=3s", "--lease-retry=300ms"}
	g := newGround(t, options{replicas: 2, args: defaults})
	served := g.newPool("served", 30, nil)
	for i := range times(1, 10) {
		g.changeLeaders(fmt.Sprintf("planned-%d", i), served, true)
		g.changeLeaders(fmt.Sprintf("killed-%d", i), served, false)
	}
	for _, p := range g.pools { // more than they keep for a while because claims have waited
		p.set(types.MergePatchType, `{"spec":{"warm":60}}`)
	}
	g.judge()
}

// stopLimit bounds the end of a leader in order.
const stopLimit = time.Minute

// changeLeaders ends the leader under load. Callers that wait at the leader itself get their answers through it.
func (g *ground) changeLeaders(name string, served *pool, planned bool) {
	const streams, waiting = 4, 4
	old := g.leader()
	next := g.Stack.Allocators[0]
	if next == old {
		next = g.Stack.Allocators[1]
	}
	g.eventually(func() error { return proc.GetOK(g.ctx, http.DefaultClient, next.Admin+"/readyz") })

	awaited := g.newPool("awaited-"+name, 0, func(p *v1alpha1.SandboxPool) { p.Spec.Paused = true })
	awaited.awaitWaiting(func() int { return 0 }) // the leader knows the pool
	var waits sync.WaitGroup
	answers := make(chan history.Event, 2*waiting)
	at := []*stack.Allocator{next}
	if planned {
		at = append(at, old)
	}
	for _, replica := range at {
		for i := range waiting {
			c := claimant{
				name: fmt.Sprintf("%s-%s-%d", name, replica.Name, i), key: i%2 == 0, timeout: longTimeout, wait: waitLong,
			}
			waits.Go(func() { answers <- awaited.claimAt(g.ctx, replica.API, c, 0) })
		}
	}
	awaited.awaitWaiting(func() int { return len(at) * waiting })

	ctx, stop := context.WithCancel(g.ctx)
	defer stop()
	var streaming sync.WaitGroup
	longest := make([]time.Duration, streams)
	for i := range streams {
		streaming.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				took := served.use(next.API, fmt.Sprintf("%s-stream-%d-%d", name, i, n), n%2 == 0)
				longest[i] = max(longest[i], took)
				wait.Sleep(ctx, 200*time.Millisecond)
			}
		})
	}
	time.Sleep(200 * time.Millisecond)
	began := bootclock.Now()
	if planned {
		g.Did(old.Name, "stop")
		waits.Go(func() {
			if err := old.Stop(g.ctx, stopLimit); err != nil {
				g.Errorf("stop %s: %v", old.Name, err)
			}
		})
	} else {
		g.Did(old.Name, "kill")
		require.NoError(g, old.Kill())
	}
	g.eventually(func() error {
		if l := g.leader(); l != next {
			return fmt.Errorf("%s leads", l.Name)
		}
		return nil
	})
	led := bootclock.Now() - began
	awaited.set(types.MergePatchType, `{"spec":{"paused":false}}`)
	waits.Wait()
	stop()
	streaming.Wait()
	close(answers)
	for e := range answers {
		require.Equal(g, http.StatusCreated, e.Code, "%s at %s: %s %s", e.Claim, e.Process, e.Reason, e.Error)
		awaited.releaseAt(next.API, e.Sandbox)
	}
	var most time.Duration
	for _, d := range longest {
		most = max(most, d)
	}
	g.Logf("%s: another replica led after %v, the longest call took %v", name, led, most)
}

// use claims a sandbox at a replica, reads it and releases it. Each call succeeds the first time. It returns
// how long the longest one took.
func (p *pool) use(replica, name string, key bool) (longest time.Duration) {
	c := claimant{name: name, key: key, timeout: longTimeout, wait: waitLong}
	got := p.claimAt(p.ctx, replica, c, 0)
	if got.Code != http.StatusCreated {
		p.Errorf("claim %s: %d %s %s", name, got.Code, got.Reason, got.Error)
		return 0
	}
	read := p.readAt(p.ctx, replica, got.Sandbox)
	if read.Code != http.StatusOK {
		p.Errorf("read %s: %d %s %s", name, read.Code, read.Reason, read.Error)
	}
	released := p.releaseAt(replica, got.Sandbox)
	for _, e := range []history.Event{got, read, released} {
		longest = max(longest, e.Ended-e.Began)
	}
	return longest
}

func (p *pool) releaseAt(replica, id string) history.Event {
	e := p.Call(p.ctx, replica, history.Event{Kind: history.Release, Sandbox: id}, http.MethodDelete, "/sandboxes/"+id, "")
	if e.Code != http.StatusNoContent {
		p.Errorf("release: %d %s %s", e.Code, e.Reason, e.Error)
	}
	return e
}
