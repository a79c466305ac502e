package chaos

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"
)

// Invariant: I5
func TestDeletingHalfThePodsLosesNoOthers(t *testing.T) {
	const callers = 25
	g := newGround(t, options{replicas: 2, lease: quietLease})
	g.newPool(40, nil)
	done := make(chan struct{})
	var churning sync.WaitGroup
	churning.Go(func() { g.churn(done) })
	for i := range times(4, 12) {
		g.burst(fmt.Sprintf("churn-%d", i), callers).end()
	}
	close(done)
	churning.Wait()
	g.judge()
}

// churn deletes half of all pods that there are or will be, warm and claimed ones
// as it meets them, until done is closed, and then what is left of that half.
func (g *ground) churn(done <-chan struct{}) {
	random := g.Random("churn")
	doomed := map[types.UID]bool{} // of every pod that was seen
	deleted := 0
	ticker := time.NewTicker(25 * time.Millisecond)
	defer ticker.Stop()
	for last := false; ; {
		there, err := g.pods()
		if err != nil && g.ctx.Err() == nil {
			g.Errorf("churn: %v", err)
		}
		for _, p := range there {
			if _, seen := doomed[p.UID]; !seen && !last {
				doomed[p.UID] = random.IntN(2) == 0
			}
			// Some as soon as they are there, some when they have been claimed.
			if doomed[p.UID] && (last || random.IntN(8) == 0) {
				doomed[p.UID] = false
				g.deletePod(p)
				deleted++
			}
		}
		if last {
			g.Logf("deleted %d of %d pods", deleted, len(doomed))
			return
		}
		select {
		case <-done:
			last = true
		case <-g.ctx.Done():
			return
		case <-ticker.C:
		}
	}
}
