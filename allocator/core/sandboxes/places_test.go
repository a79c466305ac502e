package sandboxes

import (
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func takeAll(p *places, team string) (n int) {
	for p.take(team) {
		n++
	}
	return n
}

func TestEachGreedyTeamLeavesHalfOfTheRest(t *testing.T) {
	p := places{byTeam: map[string]int{}}
	for i, want := range []int{100, 50, 25, 13, 6, 3, 2, 1, 0} {
		require.Equal(t, want, takeAll(&p, strconv.Itoa(i)), "team %d", i)
	}
	for range 34 { // the first one goes on when it has no more than are free
		p.giveBack("0")
		require.False(t, p.take("0"))
	}
	require.True(t, p.take("late"))
}

// Whatever teams do, one that has no place finds one while any is free, and none takes more than half.
func TestPlacesAreSharedInAnyOrder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p, has := places{byTeam: map[string]int{}}, map[string]int{}
		t.Repeat(map[string]func(*rapid.T){
			"take": func(t *rapid.T) {
				team := rapid.StringOfN(rapid.RuneFrom([]rune("ab")), 0, 2, -1).Draw(t, "team")
				for range rapid.IntRange(1, 60).Draw(t, "n") {
					free := maxPlaces - p.taken
					took := p.take(team)
					if took {
						has[team]++
					}
					if has[team] == 0 && free > 0 || took && has[team] > free || has[team] > maxPlaces/2 {
						t.Fatalf("team %q has %d, and %d were free", team, has[team], free)
					}
				}
			},
			"give back": func(t *rapid.T) {
				team := rapid.StringOfN(rapid.RuneFrom([]rune("ab")), 0, 2, -1).Draw(t, "team")
				if has[team] > 0 {
					has[team]--
					p.giveBack(team)
				}
			},
			"": func(t *rapid.T) {
				sum := 0
				for team, n := range has {
					if sum += n; p.byTeam[team] != n {
						t.Fatalf("team %q has %d, counted %d", team, n, p.byTeam[team])
					}
				}
				if sum != p.taken {
					t.Fatalf("%d are taken, counted %d", sum, p.taken)
				}
			},
		})
	})
}
