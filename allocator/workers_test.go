package allocator

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
)

func TestWorkersRunExactlyNJobsConcurrently(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const n, jobs = 3, 10
		w := newWorkers(zap.NewNop())
		ctx, cancel := context.WithCancel(t.Context())
		var running, most, done atomic.Int32
		for range jobs {
			w.add("job", func(context.Context) error {
				most.Store(max(most.Load(), running.Add(1)))
				time.Sleep(time.Second)
				running.Add(-1)
				done.Add(1)
				return nil
			})
		}
		require.Equal(t, jobs, w.waiting())
		ended := make(chan struct{})
		go func() { w.run(ctx, n); close(ended) }()
		synctest.Wait()
		require.EqualValues(t, n, running.Load())
		require.Equal(t, jobs, w.waiting(), "none of them is done")
		time.Sleep(jobs * time.Second)
		require.EqualValues(t, jobs, done.Load())
		require.Zero(t, w.waiting())
		require.EqualValues(t, n, most.Load())
		cancel()
		<-ended
	})
}

func TestWorkersStartJobsInOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorkers(zap.NewNop())
		ctx, cancel := context.WithCancel(t.Context())
		var order []int
		for i := range 5 {
			w.add("job", func(context.Context) error {
				order = append(order, i)
				if i < 3 { // a job may add another, also when every worker is busy
					w.add("job", func(context.Context) error { order = append(order, 10+i); return nil })
				}
				return nil
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

func TestFailedJobIsRetriedWithoutBlockingOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorkers(zap.NewNop())
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() { w.run(ctx, 1); close(ended) }()
		var failed, done int
		for range 3 {
			w.add("what always fails", func(context.Context) error { failed++; return errors.New("no") })
		}
		attempts := 0
		w.add("what fails twice", func(context.Context) error {
			if attempts++; attempts <= 2 {
				return errors.New("not yet")
			}
			return nil
		})
		for range 100 {
			w.add("what does not", func(context.Context) error { done++; return nil })
		}
		synctest.Wait()
		require.Equal(t, 100, done)
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		require.Equal(t, 3, attempts, "it was done and is done again")
		require.Equal(t, 3, w.waiting())
		most := int(10*time.Minute/maxJobRetry) + 20
		require.Greater(t, failed, 3*10)
		require.LessOrEqual(t, failed, 3*most, "without pauses")
		cancel()
		<-ended
	})
}

func TestWorkersEndAfterRunningJobsAndDropQueuedOnes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorkers(zap.NewNop())
		ctx, cancel := context.WithCancel(t.Context())
		finish := make(chan struct{})
		var canceled error
		unwanted := func(context.Context) error { t.Error("a job ran after the end"); return nil }
		w.add("job", func(ctx context.Context) error {
			<-ctx.Done() // its context ends
			canceled = ctx.Err()
			time.Sleep(time.Second) // until the worker has seen the end
			w.add("job", unwanted)
			<-finish
			return nil
		})
		w.add("job", unwanted)
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
		require.ErrorIs(t, canceled, context.Canceled)
		w.add("job", unwanted)
		require.Zero(t, w.waiting(), "jobs that no worker will run are kept")
	})
}

func TestFinishingWorkersRunQueuedJobs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const n, jobs = 2, 10
		w := newWorkers(zap.NewNop())
		ctx, cancel := context.WithCancel(t.Context())
		begin := make(chan struct{})
		var done atomic.Int32
		for range jobs {
			w.add("job", func(ctx context.Context) error {
				<-begin
				if err := ctx.Err(); err != nil {
					t.Errorf("a job is to be done and was given a context that has ended: %v", err)
				}
				done.Add(1)
				return nil
			})
		}
		ended := make(chan struct{})
		go func() { w.finish(ctx, n); close(ended) }()
		synctest.Wait()
		cancel()
		synctest.Wait()
		require.Equal(t, jobs, w.waiting(), "dropped")
		close(begin) // those who wait for a worker begin after the end
		<-ended
		require.EqualValues(t, jobs, done.Load(), "it returned before all was done")
		require.Zero(t, w.waiting())
		w.add("job", func(context.Context) error { t.Error("a job ran after the end"); return nil })
		require.Zero(t, w.waiting())
	})
}

func TestWorkersStartedAfterTheEndDoNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		w := newWorkers(zap.NewNop())
		w.run(ctx, 2)
		w.add("job", func(context.Context) error { t.Error("ran"); return nil })
		require.Zero(t, w.waiting())
	})
}
