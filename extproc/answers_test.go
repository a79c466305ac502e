package extproc

import (
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestBarrierWaitsForWhatBeganBeforeItAndForNothingElse(t *testing.T) {
	a := NewAnswers()
	var passed []string
	barrier := func(name string) { a.Barrier(func() { passed = append(passed, name) }) }
	barrier("nothing is open")
	require.Equal(t, []string{"nothing is open"}, passed)
	first, second := a.begin(), a.begin()
	barrier("one")
	later := a.begin()
	barrier("two")
	barrier("three")
	require.Equal(t, 3, a.Unread())
	a.End(second)
	a.End(later)
	require.Len(t, passed, 1, "the first answer is not read")
	last := a.begin()
	a.End(first)
	require.Equal(t, []string{"nothing is open", "one", "two", "three"}, passed)
	barrier("four")
	require.Len(t, passed, 4)
	a.End(last)
	require.Len(t, passed, 5)
	require.Zero(t, a.Unread())
	require.Len(t, a.epochs, 1, "epochs that are over are kept")
}

func TestBarriersPassInOrderInAnyHistory(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a := NewAnswers()
		type answer struct {
			epoch *Epoch
			began int
		}
		var open []answer
		var waiting []int // what had begun at each barrier that has not passed
		began := 0
		t.Repeat(map[string]func(*rapid.T){
			"begin": func(*rapid.T) {
				began++
				open = append(open, answer{a.begin(), began})
			},
			"end": func(t *rapid.T) {
				if len(open) > 0 {
					i := rapid.IntRange(0, len(open)-1).Draw(t, "answer")
					e := open[i].epoch
					open = append(open[:i], open[i+1:]...)
					a.End(e)
				}
			},
			"barrier": func(t *rapid.T) {
				mine := began
				waiting = append(waiting, mine)
				a.Barrier(func() {
					if waiting[0] != mine {
						t.Fatalf("the barrier behind %d answers passed before that behind %d", mine, waiting[0])
					}
					waiting = waiting[1:]
				})
			},
			"": func(t *rapid.T) {
				oldest := began + 1
				for _, o := range open {
					oldest = min(oldest, o.began)
				}
				for _, before := range waiting {
					if before < oldest {
						t.Fatalf("a barrier behind %d answers has not passed, the oldest that is open is %d", before, oldest)
					}
				}
				if a.Unread() != len(open) {
					t.Fatalf("%d are unread, said are %d", len(open), a.Unread())
				}
			},
		})
	})
}
