package pools_test

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/core/pods"
	"github.com/berth-sandbox/berth/allocator/core/pools"
	"github.com/berth-sandbox/berth/allocator/core/step"
)

func TestPoolRemembersItsLatestFailuresOnly(t *testing.T) {
	current := &step.Current{Now: step.Instant{Boot: time.Hour, Wall: time.Unix(1e9, 0)}}
	all := pods.New(current, fact.NewOutbox(1, 0), func() bool { return false })
	table := pools.New(current, all, func() string { return "x" })
	spec := step.Pool{Key: fact.PoolKey{Namespace: "ns", Name: "a"}, Warm: 1}
	table.Observe(spec)
	all.NodeSeen("n", true, false)
	pool := table.Find(spec.Key)
	require.Empty(t, pool.Failures())

	var expected []step.PodFailure
	for i := range byte(2 * pools.MaxFailures) {
		current.Now.Boot, current.Now.Wall = current.Now.Boot+time.Minute, current.Now.Wall.Add(time.Minute)
		p := step.Pod{
			Key: fact.PodKey{Namespace: "ns", Name: fmt.Sprint("a-", i), UID: fmt.Sprint(i)}, Pool: "a", Node: "n",
			IP: netip.AddrFrom4([4]byte{10, 0, 0, i}), Ready: true,
		}
		all.Seen(p, pods.Origin{Pool: spec.Key})
		p.Ready, p.Finished, p.Reason, p.Why = false, true, step.PodOOMKilled, fmt.Sprint("exit code 137, pod ", i)
		all.Seen(p, pods.Origin{Pool: spec.Key})
		before := pool.Failures()
		for n := all.Next(); n != nil; n = all.Next() {
			if f, ok := n.(pods.Failed); ok {
				table.PodFailed(f)
			}
		}
		require.Equal(t, expected, before, "an answer does not change later")
		expected = append([]step.PodFailure{{Pod: p.Key.Name, Reason: p.Reason, Why: p.Why, At: current.Now.Wall}}, expected...)
		expected = expected[:min(len(expected), pools.MaxFailures)]
		require.Equal(t, expected, pool.Failures())
		require.Equal(t, expected[0], pool.Status().Failed)
	}
}
