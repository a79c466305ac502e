package pools_test

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/core/pods"
	"github.com/berth-sandbox/berth/allocator/core/pools"
	"github.com/berth-sandbox/berth/allocator/core/step"
)

// model is the caller of a Table with one pool. It knows which creations it was asked for and which of them failed.
type model struct {
	*rapid.T
	step     *step.Current
	outbox   *fact.Outbox
	pods     *pods.Table
	table    *pools.Table
	spec     step.Pool
	lacking  int
	suffixes int
	creating map[string]bool
	failed   []string // names whose creation failed, and was not asked for again
	pause    time.Duration
	retryAt  time.Duration // 0: no creation has failed
	there    map[fact.PodKey]string
	most     int // pods that there may be: MaxPods, or those that there were when that was lowered
	created  int
}

// adjust adjusts the pool until nothing more is to be done, and judges what it does.
func (m *model) adjust() {
	pool := m.table.Find(m.spec.Key)
	for n := m.pods.Next(); n != nil; n = m.pods.Next() {
		switch n := n.(type) {
		case pods.Failed:
			m.table.PodFailed(n)
		case pods.Warmed:
			m.table.PodWarmed(n.Pod)
		}
	}
	for range 2 { // the second time there is no news
		m.table.Adjust(pool, m.lacking)
		m.judge()
	}
	m.table.Adjust(pool, m.lacking)
	require.Empty(m, m.step.Take(), "the effects of an adjustment without news")
	require.NoError(m, m.pods.Check())
	if m.spec.MaxPods > 0 {
		m.most = max(m.spec.MaxPods, min(m.most, len(m.there)+len(m.creating)))
		require.LessOrEqual(m, len(m.there)+len(m.creating), m.most, "pods")
	}
}

func (m *model) judge() {
	for _, e := range m.step.Take() {
		c, ok := e.(step.CreatePod)
		if !ok {
			continue
		}
		require.False(m, m.creating[c.Name], "%s is created twice", c.Name)
		require.False(m, m.spec.Paused, "a paused pool creates %s", c.Name)
		if m.retryAt != 0 {
			require.GreaterOrEqual(m, m.step.Now.Boot, m.retryAt, "%s is created after a failure", c.Name)
			m.retryAt = 0
		}
		if len(m.failed) > 0 {
			require.Equal(m, m.failed[0], c.Name, "the name that failed first comes first")
			m.failed = m.failed[1:]
		}
		m.creating[c.Name] = true
		m.created++
	}
}

func (m *model) name() string {
	if len(m.creating) == 0 {
		m.Skip()
	}
	return rapid.SampledFrom(slices.Sorted(maps.Keys(m.creating))).Draw(m.T, "name")
}

func (m *model) actions() map[string]func(*rapid.T) {
	act := func(f func()) func(*rapid.T) {
		return func(t *rapid.T) { m.T = t; f(); m.adjust() }
	}
	return map[string]func(*rapid.T){
		"spec": act(func() {
			m.spec.Warm, m.spec.MaxPods = rapid.IntRange(0, 6).Draw(m.T, "warm"), rapid.IntRange(0, 6).Draw(m.T, "max pods")
			m.spec.Paused = rapid.IntRange(0, 4).Draw(m.T, "paused") == 4
			m.spec.Template = rapid.SampledFrom([]string{"t1", "t1", "t2"}).Draw(m.T, "template")
			m.most = len(m.there) + len(m.creating)
			m.table.Observe(m.spec)
		}),
		"demand": act(func() { m.lacking = rapid.IntRange(0, 4).Draw(m.T, "lacking") }),
		"made":   act(m.made), "made2": act(m.made),
		"failed": act(func() {
			name := m.name()
			if delete(m.creating, name); m.retryAt == 0 || m.step.Now.Boot >= m.retryAt {
				m.pause = min(max(2*m.pause, pools.FirstRetry), pools.MaxRetry)
				m.retryAt = m.step.Now.Boot + m.pause
			}
			m.failed = append(m.failed, name)
			m.table.CreateFailed(m.spec.Key, name, false)
		}),
		"gone": act(func() {
			if len(m.there) == 0 {
				m.Skip()
			}
			key := rapid.SampledFrom(slices.SortedFunc(maps.Keys(m.there), fact.ComparePods)).Draw(m.T, "pod")
			delete(m.there, key)
			m.pods.PodGone(key)
		}),
		"time": act(func() {
			m.step.Now.Boot += time.Duration(rapid.IntRange(1, 40).Draw(m.T, "passed")) * time.Second
			m.table.Tick()
			m.table.TickPool(m.table.Find(m.spec.Key), m.lacking)
		}),
	}
}

// made has a pod seen that was asked for.
func (m *model) made() {
	name := m.name()
	delete(m.creating, name)
	m.pause = 0
	seen := step.Pod{
		Key: fact.PodKey{Namespace: "ns", Name: name, UID: "uid-" + name}, Pool: m.spec.Key.Name, Node: "n", Template: m.spec.Template,
		IP: netip.AddrFrom4([4]byte{10, 1, byte(m.created >> 8), byte(m.created)}), Ready: rapid.Bool().Draw(m.T, "ready"),
	}
	for _, p := range m.there {
		if p == seen.IP.String() {
			seen.IP = netip.Addr{}
		}
	}
	pool := m.table.Find(m.spec.Key)
	m.there[seen.Key] = seen.IP.String()
	m.pods.Seen(seen, pods.Origin{Pool: m.spec.Key, AskedAt: pool.AskedAt(name)})
	pool.Made(name)
}

func TestPoolKeepsItsBoundsAndNames(t *testing.T) {
	created := 0
	rapid.Check(t, func(t *rapid.T) {
		m := &model{
			T: t, step: &step.Current{Now: step.Instant{Boot: time.Hour, Wall: time.Unix(1e9, 0)}}, outbox: fact.NewOutbox(1, 0),
			creating: map[string]bool{}, there: map[fact.PodKey]string{}, spec: step.Pool{Key: fact.PoolKey{Namespace: "ns", Name: "a"}, Warm: 3},
		}
		m.pods = pods.New(m.step, m.outbox, func() bool { return false })
		m.table = pools.New(m.step, m.pods, func() string { m.suffixes++; return fmt.Sprint(m.suffixes) })
		m.pods.NodeSeen("n", true, false)
		m.table.Observe(m.spec)
		for range 2 {
			t.Repeat(m.actions())
		}
		created += m.created
	})
	t.Logf("%d pods were created", created)
}
