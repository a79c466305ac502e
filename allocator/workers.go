package allocator

import (
	"context"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	"k8s.io/client-go/util/workqueue"

	"github.com/berth-sandbox/berth/allocator/kube"
)

// Pauses before a job that has failed is done again.
const (
	jobRetryFirst = 50 * time.Millisecond
	jobRetryMost  = 30 * time.Second
)

// workers do jobs side by side, so many at a time, in the order in which they came.
// One that fails is done again later: meanwhile it takes no worker from the others.
// What waits is bounded by what the jobs are about: so many for a pod or a sandbox.
type workers struct {
	queue workqueue.TypedRateLimitingInterface[*job]
	left  atomic.Int64
	log   *zap.Logger
}

type job struct {
	what string
	do   func(context.Context) error
}

func newWorkers(log *zap.Logger) *workers {
	limiter := workqueue.NewTypedItemExponentialFailureRateLimiter[*job](jobRetryFirst, jobRetryMost)
	return &workers{queue: workqueue.NewTypedRateLimitingQueue(limiter), log: log}
}

// add queues a job; what says in the log what has failed. It never blocks. After
// the end it is dropped.
func (w *workers) add(what string, do func(context.Context) error) {
	if w.queue.ShuttingDown() {
		return
	}
	w.left.Add(1)
	w.queue.Add(&job{what, do})
}

// waiting is the number of jobs that are not done.
func (w *workers) waiting() int { return int(w.left.Load()) }

// run works with n workers until ctx ends, and waits for the jobs under way: they
// are given ctx.
func (w *workers) run(ctx context.Context, n int) {
	kube.Work(ctx, w.queue, n, w.next)
}

// finish is like run, but does what waits, too, before it returns.
func (w *workers) finish(ctx context.Context, n int) {
	kube.Work(ctx, w.queue, n, func(ctx context.Context) bool { return w.next(context.WithoutCancel(ctx)) })
}

// next does the job that is next. It is false after the end.
func (w *workers) next(ctx context.Context) bool {
	j, ended := w.queue.Get()
	if ended {
		return false
	}
	defer w.queue.Done(j)
	if ctx.Err() != nil {
		w.left.Add(-1)
		return true
	}
	if err := j.do(ctx); err != nil && ctx.Err() == nil {
		w.log.Warn("will try again: "+j.what, zap.Error(err))
		w.queue.AddRateLimited(j)
		return true
	}
	w.queue.Forget(j)
	w.left.Add(-1)
	return true
}
