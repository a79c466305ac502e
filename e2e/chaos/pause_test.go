package chaos

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

// A leader that was paused for longer than its lease wakes up with answers half given,
// writes half done, and calls that were sent to it meanwhile.
// Invariant: I9
func TestDeposedLeaderEndsWithoutContradiction(t *testing.T) {
	const callers, asked = 30, 8
	g := newGround(t, options{replicas: 3})
	g.newPool(40, nil)
	random := g.Random("pauses")
	for round := range times(2, 4) {
		name := fmt.Sprintf("pause-%d", round)
		var known []string // claimed before the pause
		for i := range asked {
			e := g.claim(random,
				claimant{name: fmt.Sprintf("%s-before-%d", name, i), key: true, timeout: longTimeout, wait: claimWait})
			require.Equal(t, http.StatusCreated, e.Code, e.Error)
			known = append(known, e.Sandbox)
		}

		old := g.leader()
		g.Hold(old, true)
		earlier := g.burst(name+"-earlier", callers)
		earlier.after(random.IntN(callers * 2 / 3))
		g.Did(old.Name, "pause")
		require.NoError(t, old.Pause())
		g.eventually(func() error {
			if g.leader() == old { // it stops when the kernel gets to it
				return errors.New("the allocator that was paused still leads")
			}
			return nil
		})

		// The paused leader does not hear of this.
		for _, id := range known[:asked/2] {
			e := g.release(random, id)
			require.Contains(t, []int{http.StatusNoContent, http.StatusNotFound}, e.Code, e.Error)
		}
		var direct sync.WaitGroup
		for i, id := range known {
			c := claimant{name: fmt.Sprintf("%s-direct-%d", name, i), key: i%2 == 0, timeout: shortTimeout, wait: claimWait}
			onceSent(g.ctx, &direct, func(ctx context.Context) { g.readAt(ctx, old.API, id) })
			onceSent(g.ctx, &direct, func(ctx context.Context) { g.claimAt(ctx, old.API, c, 0) })
		}

		later := g.burst(name+"-later", callers)
		later.after(random.IntN(callers / 2))
		g.Did(old.Name, "resume")
		require.NoError(t, old.Resume())
		g.eventually(func() error {
			if old.Running() {
				return errors.New("the allocator that was deposed still runs")
			}
			return nil
		})
		g.Did(old.Name, "has ended")
		g.Hold(old, false)
		direct.Wait()
		earlier.end()
		later.end()
	}
	g.judge()
}
