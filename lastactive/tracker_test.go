package lastactive_test

import (
	"fmt"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/lastactive"
)

// clock is a time that the test moves.
type clock struct{ at time.Time }

func (c *clock) now() time.Time { return c.at }

func (c *clock) tick() time.Time {
	c.at = c.at.Add(time.Second)
	return c.at
}

func newTracker(t *testing.T, size int) (*lastactive.Tracker, *clock) {
	c := &clock{at: time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)}
	tracker, err := lastactive.New(lastactive.Options{Size: size, Now: c.now})
	require.NoError(t, err)
	return tracker, c
}

func ids(activity []lastactive.Activity) []string {
	all := []string{}
	for _, a := range activity {
		all = append(all, a.ID)
	}
	return all
}

func TestLastActiveIsTheNewestTouch(t *testing.T) {
	tracker, clock := newTracker(t, 0)
	tracker.Touch("a")
	tracker.Touch("b")
	second := clock.tick()
	tracker.Touch("a")
	third := clock.tick()
	tracker.TouchKnown("b")
	require.Equal(t, []lastactive.Activity{{ID: "a", LastActive: second}, {ID: "b", LastActive: third}}, tracker.Dump(nil))
}

func TestTouchKnownNeverBringsAnIDBack(t *testing.T) {
	tracker, _ := newTracker(t, 0)
	tracker.TouchKnown("never seen")
	tracker.Touch("released")
	tracker.Forget("released")
	tracker.TouchKnown("released")
	require.Empty(t, tracker.Dump(nil))
	require.Zero(t, tracker.Len())
}

func TestForgetOfAnUnknownIDChangesNothing(t *testing.T) {
	tracker, _ := newTracker(t, 0)
	tracker.Touch("a")
	tracker.Forget("b")
	require.Equal(t, []string{"a"}, ids(tracker.Dump(nil)))
}

func TestRetainDropsAllOthersAndKeepsTheirTimes(t *testing.T) {
	tracker, clock := newTracker(t, 0)
	first := clock.now()
	for _, id := range []string{"a", "b", "c"} {
		tracker.Touch(id)
	}
	clock.tick()
	tracker.Retain(func(id string) bool { return id == "b" })
	require.Equal(t, []lastactive.Activity{{ID: "b", LastActive: first}}, tracker.Dump(nil))
}

func TestSilentLongestGoesFirst(t *testing.T) {
	for name, c := range map[string]struct {
		again func(*lastactive.Tracker)
		left  []string
	}{
		"none spoke again":       {func(*lastactive.Tracker) {}, []string{"b", "c", "d"}},
		"oldest was touched":     {func(t *lastactive.Tracker) { t.Touch("a") }, []string{"a", "c", "d"}},
		"oldest is still open":   {func(t *lastactive.Tracker) { t.TouchKnown("a") }, []string{"a", "c", "d"}},
		"reading is no activity": {func(t *lastactive.Tracker) { t.Dump(nil) }, []string{"b", "c", "d"}},
	} {
		t.Run(name, func(t *testing.T) {
			tracker, clock := newTracker(t, 3)
			for _, id := range []string{"a", "b", "c"} {
				tracker.Touch(id)
				clock.tick()
			}
			c.again(tracker)
			require.Zero(t, tracker.Evicted())
			tracker.Touch("d")
			require.Equal(t, c.left, ids(tracker.Dump(nil)))
			require.Equal(t, 3, tracker.Len())
			require.EqualValues(t, 1, tracker.Evicted())
		})
	}
}

func TestDumpIsSortedAndFiltered(t *testing.T) {
	tracker, _ := newTracker(t, 0)
	for _, id := range []string{"c", "a", "b"} {
		tracker.Touch(id)
	}
	require.Equal(t, []string{"a", "b", "c"}, ids(tracker.Dump(nil)))
	require.Equal(t, []string{"a", "c"}, ids(tracker.Dump(func(id string) bool { return id != "b" })))
}

func TestTimesNeverGoBackUnderConcurrentTouches(t *testing.T) {
	c := struct {
		sync.Mutex
		clock
	}{}
	tracker, err := lastactive.New(lastactive.Options{Now: func() time.Time {
		c.Lock()
		at := c.tick()
		c.Unlock()
		runtime.Gosched() // somebody else may read the clock before this is noted
		return at
	}})
	require.NoError(t, err)
	tracker.Touch("a")
	var touching sync.WaitGroup
	for i := range 4 {
		touching.Go(func() {
			for range 2000 {
				before := tracker.Dump(nil)[0].LastActive
				if i%2 == 0 {
					tracker.Touch("a")
				} else {
					tracker.TouchKnown("a")
				}
				if after := tracker.Dump(nil)[0].LastActive; !after.After(before) {
					t.Errorf("%v, and after a touch %v", before, after)
					return
				}
			}
		})
	}
	touching.Wait()
}

func TestOptionsAreChecked(t *testing.T) {
	_, err := lastactive.New(lastactive.Options{})
	require.ErrorContains(t, err, "Options.Now")
	_, err = lastactive.New(lastactive.Options{Now: time.Now, Size: -1})
	require.ErrorContains(t, err, "Options.Size")
}

func example() *lastactive.Tracker {
	noon := time.Date(2030, 1, 1, 12, 0, 0, 0, time.UTC)
	tracker, err := lastactive.New(lastactive.Options{Now: func() time.Time { return noon }})
	if err != nil {
		panic(err)
	}
	return tracker
}

func Example() {
	tracker := example()
	tracker.Touch("k3x9")      // a request was admitted
	tracker.TouchKnown("k3x9") // it is still open
	tracker.TouchKnown("gone") // a report that comes after the release
	for _, a := range tracker.Dump(nil) {
		fmt.Println(a.ID, a.LastActive.Format(time.Kitchen))
	}
	tracker.Forget("k3x9")
	fmt.Println(tracker.Len())
	// Output:
	// k3x9 12:00PM
	// 0
}

func ExampleTracker_Retain() {
	tracker := example()
	tracker.Touch("a")
	tracker.Touch("b")
	tracker.Retain(func(id string) bool { return id == "a" })
	fmt.Println(tracker.Len())
	// Output: 1
}

func ExampleTracker_Dump() {
	tracker := example()
	tracker.Touch("b")
	tracker.Touch("a")
	for _, a := range tracker.Dump(func(id string) bool { return id != "b" }) {
		fmt.Println(a.ID)
	}
	// Output: a
}

func ExampleTracker_Evicted() {
	tracker, _ := lastactive.New(lastactive.Options{Size: 1, Now: time.Now})
	tracker.Touch("a")
	tracker.Touch("b")
	fmt.Println(tracker.Evicted())
	// Output: 1
}
