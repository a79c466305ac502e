package reaping

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/e2e/history"
	"github.com/berth-sandbox/berth/internal/bootclock"
	"github.com/berth-sandbox/berth/internal/wait"
)

const (
	// quietLasts is for how long nothing is done between two times of faults.
	quietLasts = settle + 30*time.Second
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
		wait.Sleep(t.Context(), quietLasts)
		state, _, err := g.state(t.Context())
		require.NoError(t, err)
		h := history.New(append(g.History.All(), state...))
		c := history.Count(h)
		lacking = tooFew(c)
		lasted := bootclock.Now() - began
		t.Logf("after %v: %d reaps, %d requests near a deadline; lacking: %q", lasted.Round(time.Second),
			c.Total(history.Reaps), c.Total(history.NearDeadline), lacking)
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
func tooFew(v history.Tally) (lacking []string) {
	least := func(what string, count, want int) {
		if count < want {
			lacking = append(lacking, fmt.Sprintf("%s: %d, expected %d at least", what, count, want))
		}
	}
	least("reaps", v.Total(history.Reaps), *reapsFlag)
	least("reaps while something was wrong", v[history.Reaps][history.Troubled], *reapsFlag/5)
	least("reaps while nothing was wrong", v[history.Reaps][history.Quiet], *reapsFlag/5)
	least("requests near a deadline", v.Total(history.NearDeadline), nearLeast())
	least("requests near a deadline that were answered", v[history.NearDeadline][history.Answered], nearLeast()/2)
	least("requests at the moment of a release", v.Total(history.NearReap), *reapsFlag/20)
	least("requests for longer than the idle timeout", v.Total(history.LongUses), *reapsFlag/5)
	least("keep-alives", v.Total(history.KeepAlives), 50)
	for _, what := range kinds() {
		least("received: "+what, v[history.Receipts][what], 20)
	}
	for _, f := range faults() {
		least("faults: "+f.Name, v[history.Faults][f.Name], 1)
	}
	return lacking
}

func kinds() []string { return []string{short, webSocket, sse, longPoll, upload} }

func TestRunInWhichTooLittleHappensFails(t *testing.T) {
	full := func() history.Tally {
		v := history.Tally{
			history.Reaps:        {history.Troubled: *reapsFlag / 2, history.Quiet: *reapsFlag / 2},
			history.NearDeadline: {history.Answered: nearLeast()}, history.NearReap: {"": *reapsFlag / 20},
			history.LongUses: {"": *reapsFlag / 5}, history.KeepAlives: {"": 50}, history.Receipts: {}, history.Faults: {},
		}
		for _, what := range kinds() {
			v[history.Receipts][what] = 20
		}
		for _, f := range faults() {
			v[history.Faults][f.Name] = 1
		}
		return v
	}
	require.Empty(t, tooFew(full()))
	require.Len(t, tooFew(history.Tally{}), 8+len(kinds())+len(faults()))
	for _, less := range []func(history.Tally){
		func(v history.Tally) { v[history.Reaps][history.Quiet]-- },
		func(v history.Tally) { v[history.NearDeadline][history.Answered]-- },
		func(v history.Tally) { v[history.Faults]["router-kill"]-- },
		func(v history.Tally) { v[history.Receipts][upload]-- },
	} {
		v := full()
		less(v)
		require.Len(t, tooFew(v), 1)
	}
}
