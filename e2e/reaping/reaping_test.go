package reaping

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/e2e/harness"
	"github.com/berth-sandbox/berth/e2e/history"
	"github.com/berth-sandbox/berth/internal/bootclock"
)

const (
	// quietLasts is for how long nothing is done between two times of faults.
	quietLasts = settle + 12*time.Second
	// limit is in which time enough must have happened, beyond what was asked for.
	limit = 8 * time.Minute
)

// Invariant: I4
func TestOnlySilentSandboxesAreReapedUnderFaults(t *testing.T) {
	g := newGround(t)
	// Allocators are kept running to the end of the test. Faults stop first, then use.
	g.KeepAllocators()
	using, stopUsing := context.WithCancel(t.Context())
	var used sync.WaitGroup
	t.Cleanup(func() {
		stopUsing()
		used.Wait()
	})
	u := &users{ground: g}
	for i := range *usersFlag {
		used.Go(func() { u.user(using, fmt.Sprintf("user-%d", i)) })
	}
	random := g.Random("faults")
	began := bootclock.Now()
	for lacking := []string{""}; len(lacking) > 0; {
		var disturbed sync.WaitGroup
		g.Disturb(t.Context(), &disturbed, random, faults(), pauseMost)
		disturbed.Wait()
		harness.Pause(t.Context(), quietLasts)
		state, _, err := g.state(t.Context())
		require.NoError(t, err)
		h := history.New(append(g.History.All(), state...))
		c := history.CountReaps(h)
		lacking = tooFew(c)
		lasted := bootclock.Now() - began
		t.Logf("after %v: %d reaps, %d requests near a deadline; lacking: %q", lasted.Round(time.Second), c.Reaps,
			history.Total(c.Near), lacking)
		switch {
		case len(history.FalseReap(h))+len(history.AfterReap(h)) > 0:
			lacking = nil // what comes later cannot undo it
		case lasted < *durationFlag:
			lacking = []string{"time"}
		case lasted > *durationFlag+limit:
			t.Errorf("nothing is proven: %q", lacking)
			lacking = nil
		}
	}
	stopUsing()
	used.Wait()
	g.writeState()
	g.Judge()
}

// nearLeast is how many requests there must have been near a deadline.
func nearLeast() int { return 10 * (*reapsFlag) }

// tooFew says what has not happened often enough for the verdict to mean anything.
func tooFew(v history.Reaps) (lacking []string) {
	least := func(what string, count, want int) {
		if count < want {
			lacking = append(lacking, fmt.Sprintf("%s: %d, expected %d at least", what, count, want))
		}
	}
	least("reaps", v.Reaps, *reapsFlag)
	least("reaps while something was wrong", v.Troubled, *reapsFlag/5)
	least("reaps while nothing was wrong", len(v.Late), *reapsFlag/5)
	least("requests near a deadline", history.Total(v.Near), nearLeast())
	least("requests near a deadline that were answered", v.Near["answered"], nearLeast()/2)
	least("requests at the moment of a release", history.Total(v.Verge), *reapsFlag/10)
	least("requests for longer than the idle timeout", v.Long, *reapsFlag/5)
	least("keep-alives", v.KeepAlives, 50)
	for _, what := range []string{short, webSocket, sse, longPoll, upload} {
		least("received: "+what, v.Received[what], 20)
	}
	for _, f := range faults() {
		least("faults: "+f.Name, v.Faults[f.Name]-v.Failed[f.Name], 1)
	}
	return lacking
}

func TestRunInWhichTooLittleHappensFails(t *testing.T) {
	full := func() history.Reaps {
		v := history.Reaps{
			Reaps: *reapsFlag, Troubled: 50, Late: make([]time.Duration,
				50), Near: map[string]int{"answered": nearLeast()}, Verge: map[string]int{"answered": 50},
			Long: 100, KeepAlives: 50, Received: map[string]int{short: 20, webSocket: 20, sse: 20, longPoll: 20,
				upload: 20}, Faults: map[string]int{}, Failed: map[string]int{},
		}
		for _, f := range faults() {
			v.Faults[f.Name] = 1
		}
		return v
	}
	require.Empty(t, tooFew(full()))
	require.Len(t, tooFew(history.Reaps{}), 8+5+len(faults()))
	for _, less := range []func(*history.Reaps){
		func(v *history.Reaps) { v.Reaps-- },
		func(v *history.Reaps) { v.Near["answered"]-- },
		func(v *history.Reaps) { v.Failed["router-kill"]++ },
		func(v *history.Reaps) { v.Received[upload]-- },
	} {
		v := full()
		less(&v)
		require.Len(t, tooFew(v), 1)
	}
}
