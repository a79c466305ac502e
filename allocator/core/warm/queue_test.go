package warm_test

import (
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/berth-sandbox/berth/allocator/core/warm"
)

func TestBurstIsSpreadOverNodesOldestFirst(t *testing.T) {
	q := warm.NewQueue[string]()
	for i, node := range []string{"a", "a", "a", "b", "c"} {
		q.Put(pod(fmt.Sprint(node, i), node, 10-i))
	}
	var got []string
	for key, ok := q.Next(); ok; key, ok = q.Next() {
		got = append(got, key)
		q.Passed(key)
		q.Remove(key)
	}
	require.Equal(t, []string{"a2", "b3", "c4", "a1", "a0"}, got)
	require.Zero(t, q.Len())
}

func TestPodThatIsPutTwicePanics(t *testing.T) {
	q := warm.NewQueue[string]()
	q.Put(pod("x", "a", 0))
	require.Panics(t, func() { q.Put(pod("x", "b", 0)) })
	q.Remove("x")
	require.Panics(t, func() { q.Remove("x") })
	require.Panics(t, func() { q.Passed("x") })
}

func pod(name, node string, second int) warm.Pod[string] {
	return warm.Pod[string]{Key: name, Name: name, Node: node, CreatedAt: time.Unix(int64(second), 0)}
}

func TestQueueAgreesWithItsModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		q, there, n := warm.NewQueue[string](), map[string]warm.Pod[string]{}, 0
		var served []string // nodes, since one of them came twice or a pod was put
		some := func(t *rapid.T) string {
			if len(there) == 0 {
				t.Skip()
			}
			return rapid.SampledFrom(slices.Sorted(maps.Keys(there))).Draw(t, "pod")
		}
		t.Repeat(map[string]func(*rapid.T){
			"put": func(t *rapid.T) {
				n++
				p := pod(fmt.Sprint("p", n), rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "node"), rapid.IntRange(0, 5).Draw(t, "age"))
				q.Put(p)
				there[p.Key], served = p, nil
			},
			"remove": func(t *rapid.T) {
				key := some(t)
				q.Remove(key)
				delete(there, key)
			},
			"take": func(t *rapid.T) {
				key, ok := q.Next()
				require.Equal(t, len(there) > 0, ok)
				if !ok {
					return
				}
				p := there[key]
				for _, o := range there {
					if o.Node == p.Node && o.CreatedAt.Before(p.CreatedAt) {
						t.Fatalf("%v comes before %v, which is older", p, o)
					}
				}
				if slices.Contains(served, p.Node) {
					for _, o := range there {
						require.Contains(t, served, o.Node, "it has not had its turn")
					}
					served = nil
				}
				served = append(served, p.Node)
				q.Passed(key)
				q.Remove(key)
				delete(there, key)
			},
			"": func(t *rapid.T) {
				require.NoError(t, q.Check())
				require.Equal(t, len(there), q.Len())
				keys := slices.Collect(q.ByAge())
				require.ElementsMatch(t, slices.Collect(maps.Keys(there)), keys)
				require.True(t, slices.IsSortedFunc(keys, func(a, b string) int { return there[a].CreatedAt.Compare(there[b].CreatedAt) }))
			},
		})
	})
}
