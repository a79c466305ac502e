package chaos

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"

	"github.com/stretchr/testify/require"
)

// pauseLeaders pauses leaders for longer than their lease. Each wakes up with answers half given,
// writes half done, and calls that were sent to it meanwhile, and must end.
func (g *ground) pauseLeaders() {
	const callers, asked = 30, 8
	p := g.newPool("pause", 40, nil)
	random := g.Random("pauses")
	for round := range times(1, 4) {
		name := fmt.Sprintf("pause-%d", round)
		var known []string // claimed before the pause
		for i := range asked {
			e := p.claim(random,
				claimant{name: fmt.Sprintf("%s-before-%d", name, i), key: true, timeout: longTimeout, wait: claimWait})
			require.Equal(g, http.StatusCreated, e.Code, e.Error)
			known = append(known, e.Sandbox)
		}

		old := g.leader()
		g.Hold(old, true)
		earlier := p.burst(name+"-earlier", callers)
		earlier.after(random.IntN(callers * 2 / 3))
		g.Did(old.Name, "pause")
		require.NoError(g, old.Pause())
		g.eventually(func() error {
			if g.leader() == old { // it stops when the kernel gets to it
				return errors.New("the allocator that was paused still leads")
			}
			return nil
		})

		// The paused leader does not hear of this.
		for _, id := range known[:asked/2] {
			e := p.release(random, id)
			require.Contains(g, []int{http.StatusNoContent, http.StatusNotFound}, e.Code, e.Error)
		}
		var direct sync.WaitGroup
		for i, id := range known {
			c := claimant{name: fmt.Sprintf("%s-direct-%d", name, i), key: i%2 == 0, timeout: shortTimeout, wait: claimWait}
			onceSent(g.ctx, &direct, func(ctx context.Context) { p.readAt(ctx, old.API, id) })
			onceSent(g.ctx, &direct, func(ctx context.Context) { p.claimAt(ctx, old.API, c, 0) })
		}

		later := p.burst(name+"-later", callers)
		later.after(random.IntN(callers / 2))
		g.Did(old.Name, "resume")
		require.NoError(g, old.Resume())
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
}
