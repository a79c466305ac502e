package chaos

import (
	"fmt"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

func TestNothingIsLostDoubleOrLeakedWhileHalfOfThePodsAreDeleted(t *testing.T) {
	const waves, callers = 12, 25
	g := newGround(t, 2, nil)
	g.newPool(40, nil)
	done := make(chan struct{})
	var churning sync.WaitGroup
	churning.Go(func() { g.churn(done) })
	for i := range waves {
		g.burst(fmt.Sprintf("churn-%d", i), callers).end()
	}
	close(done)
	churning.Wait()
	g.judge()
}

// churn deletes half of all pods that there are or will be, warm and claimed ones
// as it meets them, until done is closed.
func (g *ground) churn(done <-chan struct{}) {
	random := g.random("churn")
	doomed := map[types.UID]bool{} // of every pod that was seen
	deleted := 0
	ticker := time.NewTicker(50 * time.Millisecond)
	defer ticker.Stop()
	for {
		there, err := g.pods()
		if err != nil && g.ctx.Err() == nil {
			g.Errorf("churn: %v", err)
		}
		var now []corev1.Pod
		for _, p := range there {
			if _, seen := doomed[p.UID]; !seen {
				doomed[p.UID] = random.IntN(2) == 0
			}
			// Some as soon as they are there, some when they have been claimed.
			if doomed[p.UID] && random.IntN(10) == 0 {
				now = append(now, p)
			}
		}
		for _, p := range now {
			g.deletePod(p)
			doomed[p.UID] = false
			deleted++
		}
		select {
		case <-done:
			g.Logf("deleted %d of %d pods", deleted, len(doomed))
			return
		case <-g.ctx.Done():
			return
		case <-ticker.C:
		}
	}
}
