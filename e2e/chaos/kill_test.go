package chaos

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
)

// Invariant: I5, I9
func TestKilledLeadersLoseAndDoubleNoSandbox(t *testing.T) {
	const callers = 30
	g := newGround(t, options{replicas: 3})
	g.newPool(40, nil)
	random := g.Random("kills")
	for i := range times(5, 20) {
		leader := g.leader()
		b := g.burst(fmt.Sprintf("kill-%d", i), callers)
		b.after(random.IntN(callers * 2 / 3)) // none: as the first ones arrive
		g.Did(leader.Name, "kill")
		require.NoError(t, leader.Kill())
		b.end()
	}
	g.judge()
}
