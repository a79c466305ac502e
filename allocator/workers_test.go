package allocator

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

func TestWorkersRunSoManyJobsSideBySideAndNoMore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const n, jobs = 3, 10
		w := newWorkers()
		ctx, cancel := context.WithCancel(t.Context())
		var running, most, done atomic.Int32
		for range jobs {
			w.add(func(context.Context) {
				most.Store(max(most.Load(), running.Add(1)))
				time.Sleep(time.Second)
				running.Add(-1)
				done.Add(1)
			})
		}
		require.Equal(t, jobs, w.waiting())
		ended := make(chan struct{})
		go func() { w.run(ctx, n); close(ended) }()
		synctest.Wait()
		require.EqualValues(t, n, running.Load())
		require.Equal(t, jobs-n, w.waiting())
		time.Sleep(jobs * time.Second)
		require.EqualValues(t, jobs, done.Load())
		require.EqualValues(t, n, most.Load())
		cancel()
		<-ended
	})
}

func TestWorkersStartInTheOrderOfTheJobs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorkers()
		ctx, cancel := context.WithCancel(t.Context())
		var order []int
		for i := range 5 {
			w.add(func(context.Context) {
				order = append(order, i)
				if i < 3 { // a job may add another, also when every worker is busy
					w.add(func(context.Context) { order = append(order, 10+i) })
				}
			})
		}
		ended := make(chan struct{})
		go func() { w.run(ctx, 1); close(ended) }()
		synctest.Wait()
		cancel()
		<-ended
		require.Equal(t, []int{0, 1, 2, 3, 4, 10, 11, 12}, order)
	})
}

func TestWorkersEndWaitsForWhatIsUnderWayAndDropsTheRest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorkers()
		ctx, cancel := context.WithCancel(t.Context())
		finish := make(chan struct{})
		var told error
		w.add(func(ctx context.Context) {
			<-ctx.Done() // it is told of the end
			told = ctx.Err()
			w.add(func(context.Context) { t.Error("a job was added after the end and ran") })
			<-finish
		})
		w.add(func(context.Context) { t.Error("a job ran after the end") })
		ended := make(chan struct{})
		go func() { w.run(ctx, 1); close(ended) }()
		synctest.Wait()
		cancel()
		synctest.Wait()
		select {
		case <-ended:
			t.Fatal("did not wait for the job under way")
		default:
		}
		close(finish)
		<-ended
		require.ErrorIs(t, told, context.Canceled)
		w.add(func(context.Context) { t.Error("a job ran after the end") })
		require.Zero(t, w.waiting(), "jobs nobody will run are kept")
	})
}

func TestWorkersThatBeginAfterTheEndDoNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		w := newWorkers()
		w.run(ctx, 2)
		w.add(func(context.Context) { t.Error("ran") })
		require.Zero(t, w.waiting())
	})
}
