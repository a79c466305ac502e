package pods_test

import (
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/core/pods"
	"github.com/berth-sandbox/berth/allocator/core/step"
)

func TestShortLifeHasAllItsTimeToEnd(t *testing.T) {
	now := &step.Current{Now: step.Instant{Boot: time.Hour}}
	table := pods.New(now, fact.NewOutbox(1, 0), func() bool { return false })
	table.NodeSeen("n", true, false)
	seen := step.Pod{Key: fact.PodKey{UID: "u", Life: 2}, Pool: "a", Node: "n", IP: netip.MustParseAddr("10.0.0.1"), Recyclable: true, Recycling: true}
	p, _ := table.Seen(seen, pods.Origin{Pool: fact.PoolKey{Name: "a"}})
	seen.Recycling, seen.Ready = false, true
	table.Seen(seen, pods.Origin{})
	now.Now.Boot += pods.ProofWithin / 2
	table.Take(p)
	table.Bind(p, "s")
	table.Grant(p)
	table.Release(p)
	table.Finish(p, true)
	now.Now.Boot += pods.ProofWithin / 2
	table.Tick()
	require.Equal(t, pods.Recycling, p.State(), "its life began ProofWithin ago, and it is to end for half of that")
	now.Now.Boot += pods.ProofWithin / 2
	table.Tick()
	require.Equal(t, pods.Going, p.State())
	require.Contains(t, now.Take(), step.DeletePod{Pod: seen.Key})
}
