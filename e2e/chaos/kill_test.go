package chaos

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
)

// Leaders are killed, paused for longer than their lease, and fail to write. Three replicas
// reach the API server through a proxy that fails writes.
//
// It takes more than 20 s because it waits for a new leader, a lease of 3 s, six times.
// Invariant: I5, I9
func TestFailingLeadersLoseAndDoubleNoSandbox(t *testing.T) {
	f := &faults{share: 0.3}
	g := newGround(t, options{replicas: 3, lease: lease, proxied: f})
	g.killLeaders()
	g.pauseLeaders()
	g.failWrites(f)
	g.judge()
}

// A pool's pods are deleted, and claims wait for the pods of another pool, under one leader.
//
// It takes more than 20 s because each pod of the second pool comes only after the claim for the
// pod before it was answered.
// Invariant: I5, P3
func TestDeletedPodsAndWaitingClaimsKeepTheirOrder(t *testing.T) {
	g := newGround(t, options{replicas: 2, lease: quietLease})
	g.deleteHalf()
	g.waitInOrder()
	g.judge()
}

// killLeaders kills leaders while they answer bursts of claims.
func (g *ground) killLeaders() {
	const callers = 30
	p := g.newPool("kill", 40, nil)
	random := g.Random("kills")
	for i := range times(3, 20) {
		leader := g.leader()
		b := p.burst(fmt.Sprintf("kill-%d", i), callers)
		b.after(random.IntN(callers * 2 / 3)) // 0: as the first ones arrive
		g.Did(leader.Name, "kill")
		require.NoError(g, leader.Kill())
		b.end()
	}
}
