package chaos

import (
	"fmt"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
)

// deleteHalf deletes half of a pool's pods while callers use them. No other sandbox is lost.
func (g *ground) deleteHalf() {
	const callers = 25
	p := g.newPool("churn", 40, nil)
	done := make(chan struct{})
	var churning sync.WaitGroup
	churning.Go(func() { p.churn(done) })
	for i := range times(2, 12) {
		p.burst(fmt.Sprintf("churn-%d", i), callers).end()
	}
	close(done)
	churning.Wait()
}

// churn deletes half of all pods, warm and claimed, as it finds them. When done is closed it
// deletes the rest of that half and returns.
func (p *pool) churn(done <-chan struct{}) {
	random := p.Random("churn")
	doomed := map[types.UID]bool{} // of every pod that was seen
	deleted := 0
	ticker := time.NewTicker(25 * time.Millisecond)
	defer ticker.Stop()
	for last := false; ; {
		there, err := p.pods()
		if err != nil && p.ctx.Err() == nil {
			p.Errorf("churn: %v", err)
		}
		for _, one := range there {
			if _, seen := doomed[one.UID]; !seen && !last {
				doomed[one.UID] = random.IntN(2) == 0
			}
			// Some as soon as they are there, some when they have been claimed.
			if doomed[one.UID] && (last || random.IntN(8) == 0) {
				doomed[one.UID] = false
				p.deletePod(one)
				deleted++
			}
		}
		if last {
			p.Logf("deleted %d of %d pods", deleted, len(doomed))
			return
		}
		select {
		case <-done:
			last = true
		case <-p.ctx.Done():
			return
		case <-ticker.C:
		}
	}
}
