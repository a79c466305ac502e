package admission

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestBarrierWaitsOnlyForEarlierAnswers(t *testing.T) {
	a := NewAnswers()
	var passed []string
	barrier := func(name string) { a.Barrier(func() { passed = append(passed, name) }) }
	barrier("nothing is open")
	require.Equal(t, []string{"nothing is open"}, passed)
	first, second := a.Begin(), a.Begin()
	barrier("one")
	later := a.Begin()
	barrier("two")
	barrier("three")
	require.Equal(t, 3, a.Unread())
	a.Done(second)
	a.Done(later)
	require.Len(t, passed, 1, "the first answer is not read")
	last := a.Begin()
	a.Done(first)
	require.Equal(t, []string{"nothing is open", "three"}, passed, "of the barriers for the same answers only the newest is called")
	barrier("four")
	require.Len(t, passed, 2)
	a.Done(last)
	require.Equal(t, []string{"nothing is open", "three", "four"}, passed)
	require.Zero(t, a.Unread())
	require.Equal(t, 1, epochs(a), "epochs that are over are kept")
}

// epochs counts the epochs that are kept.
func epochs(a *Answers) (n int) {
	for e := a.first; e != nil; e = e.later {
		n++
	}
	return n
}

// Many releases arrive while Envoy is paused, with requests before and between them.
func TestBarriersAreBoundedByUnreadAnswers(t *testing.T) {
	a := NewAnswers()
	stuck := a.Begin()
	passed := 0
	for i := range 10_000 {
		e := a.Begin()
		a.Barrier(func() { t.Errorf("barrier %d was drained although a later one covers it", i) })
		a.Done(e)
		require.LessOrEqual(t, epochs(a), 3)
	}
	a.Barrier(func() { passed++ })
	a.Done(stuck)
	require.Equal(t, 1, passed)
	require.Equal(t, 1, epochs(a))
}

func TestBarriersDrainInOrderInAnyHistory(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a := NewAnswers()
		type answer struct {
			epoch *Epoch
			began int
		}
		var open []answer
		var waiting []int // number of answers begun before each barrier that waits
		began := 0
		t.Repeat(map[string]func(*rapid.T){
			"begin": func(*rapid.T) {
				began++
				open = append(open, answer{a.Begin(), began})
			},
			"end": func(t *rapid.T) {
				if len(open) > 0 {
					i := rapid.IntRange(0, len(open)-1).Draw(t, "answer")
					e := open[i].epoch
					open = append(open[:i], open[i+1:]...)
					a.Done(e)
				}
			},
			"barrier": func(t *rapid.T) {
				mine := began
				waiting = append(waiting, mine)
				a.Barrier(func() {
					// A barrier covers all earlier ones.
					i := slices.Index(waiting, mine)
					if i < 0 {
						t.Fatalf("the barrier behind %d answers was drained twice, or after a later one", mine)
					}
					for i < len(waiting) && waiting[i] == mine {
						i++
					}
					for _, o := range open {
						if o.began <= mine {
							t.Fatalf("the barrier behind %d answers was drained while number %d is unread", mine, o.began)
						}
					}
					waiting = waiting[i:]
				})
			},
			"": func(t *rapid.T) {
				oldest := began + 1
				for _, o := range open {
					oldest = min(oldest, o.began)
				}
				for _, before := range waiting {
					if before < oldest {
						t.Fatalf("a barrier behind %d answers was not drained, the oldest unread answer is %d", before, oldest)
					}
				}
				if n := epochs(a); n > len(open)+1 {
					t.Fatalf("%d epochs are kept, %d answers are open", n, len(open))
				}
				if a.Unread() != len(open) {
					t.Fatalf("%d answers are unread, Unread returns %d", len(open), a.Unread())
				}
			},
		})
	})
}
