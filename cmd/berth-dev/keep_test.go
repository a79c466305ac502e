package main

import (
	"context"
	"errors"
	"os"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"github.com/berth-sandbox/berth/devcluster"
)

// fakeRun is a process of a fake part.
type fakeRun struct {
	pid   int
	ended chan struct{} // closed when it ends
}

func (r *fakeRun) Pid() int              { return r.pid }
func (r *fakeRun) Done() <-chan struct{} { return r.ended }

func (r *fakeRun) State() *os.ProcessState {
	select {
	case <-r.ended:
		return &os.ProcessState{}
	default:
		return nil
	}
}

// fakePart is a part whose runs last as long as a test says.
type fakePart struct {
	runs    []*fakeRun
	started []time.Time // when it was started, or that was tried
	// next says how long the next run lasts, 0 for ever, or why there is none.
	next func() (time.Duration, error)
}

func (f *fakePart) begin(lasts time.Duration) {
	r := &fakeRun{pid: 100 + len(f.runs), ended: make(chan struct{})}
	f.runs = append(f.runs, r)
	if lasts > 0 {
		time.AfterFunc(lasts, func() { close(r.ended) })
	}
}

func (f *fakePart) start(context.Context) error {
	f.started = append(f.started, time.Now())
	lasts, err := f.next()
	if err == nil {
		f.begin(lasts)
	}
	return err
}

func (f *fakePart) part(name string) *part {
	return &part{name: name, last: func() process { return f.runs[len(f.runs)-1] }, start: f.start}
}

// pauses are the times between the starts, less those of the runs between them.
func (f *fakePart) pauses(since time.Time, lasted ...time.Duration) []time.Duration {
	var pauses []time.Duration
	for i, at := range f.started {
		pauses = append(pauses, at.Sub(since)-lasted[i])
		since = at
	}
	return pauses
}

// keepFor runs keep for so long, and returns the states of the parts after it.
func keepFor(t *testing.T, d time.Duration, parts ...*part) []devcluster.Part {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	defer cancel()
	keep(ctx, parts, zap.NewNop())
	return states(parts)
}

func TestPauseBeforeRestartGrowsUntilPartSettles(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		// Seven runs of a second, one that is long enough, and two of a second again.
		lasts := slices.Concat(slices.Repeat([]time.Duration{time.Second}, 7), []time.Duration{settled},
			slices.Repeat([]time.Duration{time.Second}, 2))
		f := &fakePart{}
		f.next = func() (time.Duration, error) {
			if len(f.runs) == len(lasts) {
				return 0, nil
			}
			return lasts[len(f.runs)], nil
		}
		began := time.Now()
		f.begin(lasts[0])
		router := f.part("router-0")
		require.Equal(t, devcluster.Part{Name: "router-0", PID: 100, Running: true}, router.state())
		last := keepFor(t, 10*time.Minute, router)
		ms := time.Millisecond
		require.Equal(t, []time.Duration{500 * ms, 1000 * ms, 2000 * ms, 4000 * ms, 8000 * ms, maxPause, maxPause,
			500 * ms, 1000 * ms, 2000 * ms},
			f.pauses(began, lasts...))
		require.Equal(t, []devcluster.Part{
			{Name: "router-0", PID: 100 + len(lasts), Running: true, Restarts: len(lasts)},
		}, last)
	})
}

func TestStartThatFailsIsTriedAgainLater(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakePart{}
		f.next = func() (time.Duration, error) {
			if len(f.started) < 3 {
				return 0, errors.New("no such program")
			}
			return 0, nil
		}
		began := time.Now()
		f.begin(time.Second)
		last := keepFor(t, time.Minute, f.part("router-0"))
		require.Equal(t, []time.Duration{firstPause, 2 * firstPause, 4 * firstPause}, f.pauses(began, time.Second, 0, 0))
		require.Equal(t, []devcluster.Part{{Name: "router-0", PID: 101, Running: true, Restarts: 1}}, last,
			"a start that failed is no restart")
	})
}

func TestEndOfOnePartStartsNoOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		forever := func() (time.Duration, error) { return 0, nil }
		one, other := &fakePart{next: forever}, &fakePart{next: forever}
		one.begin(time.Second)
		other.begin(0)
		last := keepFor(t, time.Minute, one.part("envoy-0"), other.part("router-0"))
		require.Len(t, one.started, 1)
		require.Empty(t, other.started)
		require.Equal(t, []devcluster.Part{
			{Name: "envoy-0", PID: 101, Running: true, Restarts: 1}, {Name: "router-0", PID: 100, Running: true},
		}, last)
	})
}

// The owner's end is an orderly one: what it stops stays down.
func TestNothingIsStartedAfterTheOwnersEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakePart{next: func() (time.Duration, error) { return 0, nil }}
		f.begin(time.Second)
		began := time.Now()
		last := keepFor(t, time.Second+firstPause/2, f.part("router-0"))
		require.Equal(t, []devcluster.Part{{Name: "router-0", PID: 100}}, last)
		require.Equal(t, time.Second+firstPause/2, time.Since(began), "it waited for the start")
		time.Sleep(time.Hour) // of the bubble
		require.Empty(t, f.started)
	})
}

func TestStatusFailsAndNamesPartsThatAreDown(t *testing.T) {
	t.Setenv("BERTH_CACHE", t.TempDir())
	r, err := devcluster.Acquire("dev", func() {})
	require.NoError(t, err)
	defer r.Close()
	var running atomic.Bool
	r.Serve(func() devcluster.State {
		return devcluster.State{Parts: []devcluster.Part{
			{Name: "allocator-0", PID: 7, Running: true}, {Name: "router-0", PID: 8, Running: running.Load(), Restarts: 3},
		}}
	})
	stdout, err := berthDev(t, "status")
	require.ErrorContains(t, err, "dev: router-0 is down")
	require.NotContains(t, err.Error(), "allocator-0")
	require.Regexp(t, `allocator-0 +running, process 7\n`, stdout)
	require.Regexp(t, `router-0 +down, restarts 3\n`, stdout)

	running.Store(true)
	stdout, err = berthDev(t, "status")
	require.NoError(t, err)
	require.Regexp(t, `router-0 +running, process 8, restarts 3\n`, stdout)
}
