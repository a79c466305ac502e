package deadline_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/berth-sandbox/berth/allocator/core/deadline"
)

// The reference keeps the earliest time of each ID in a map.
func TestDueReturnsEachDeadlineOnceInOrder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		q, want, now := deadline.New[string](), map[string]time.Duration{}, time.Duration(0)
		id := rapid.Custom(func(t *rapid.T) string { return fmt.Sprint(rapid.IntRange(0, 9).Draw(t, "id")) })
		t.Repeat(map[string]func(*rapid.T){
			"set": func(t *rapid.T) {
				id, at := id.Draw(t, "id"), now+time.Duration(rapid.IntRange(0, 20).Draw(t, "in"))
				q.Set(id, at)
				if before, ok := want[id]; !ok || at < before {
					want[id] = at
				}
			},
			"remove": func(t *rapid.T) {
				id := id.Draw(t, "id")
				q.Remove(id)
				delete(want, id)
			},
			"due": func(t *rapid.T) {
				now += time.Duration(rapid.IntRange(0, 5).Draw(t, "passed"))
				most := rapid.IntRange(1, 4).Draw(t, "most")
				last := time.Duration(0)
				ids := q.Due(now, most)
				for _, id := range ids {
					at, ok := want[id]
					require.True(t, ok && at <= now && at >= last, "%s at %v after %v", id, at, last)
					delete(want, id)
					last = at
				}
				for id, at := range want {
					require.True(t, at > now || len(ids) == most && at >= last, "%s is due and was left", id)
				}
			},
			"": func(t *rapid.T) {
				require.NoError(t, q.Check())
				require.Equal(t, len(want), q.Len())
				for id, at := range want {
					got, ok := q.At(id)
					require.True(t, ok)
					require.Equal(t, at, got)
				}
			},
		})
	})
}
