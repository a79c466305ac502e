package allocator

import (
	"context"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	"k8s.io/client-go/util/workqueue"

	"github.com/berth-sandbox/berth/allocator/kube"
)

// minJobRetry and maxJobRetry bound the back-off of a failed job.
const (
	minJobRetry = 50 * time.Millisecond
	maxJobRetry = 30 * time.Second
)

// workers run jobs concurrently, at most as many as run's n, in the order in which they were added.
// A failed job is retried later and occupies no worker meanwhile. The queue has no bound of its
// own: each pod or sandbox adds a bounded number of jobs.
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
	limiter := workqueue.NewTypedItemExponentialFailureRateLimiter[*job](minJobRetry, maxJobRetry)
	return &workers{queue: workqueue.NewTypedRateLimitingQueue(limiter), log: log}
}

// add queues a job; what names it in the log. It never blocks. After the end the job is dropped.
func (w *workers) add(what string, do func(context.Context) error) {
	if w.queue.ShuttingDown() {
		return
	}
	w.left.Add(1)
	w.queue.Add(&job{what, do})
}

// waiting returns the number of unfinished jobs.
func (w *workers) waiting() int { return int(w.left.Load()) }

// run executes jobs with n workers until ctx ends, and waits for the running jobs, whose context is
// ctx.
func (w *workers) run(ctx context.Context, n int) {
	kube.Work(ctx, w.queue, n, w.next)
}

// finish is like run, but also executes the queued jobs before it returns.
func (w *workers) finish(ctx context.Context, n int) {
	kube.Work(ctx, w.queue, n, func(ctx context.Context) bool { return w.next(context.WithoutCancel(ctx)) })
}

// next executes the next job. It returns false after the end.
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
		w.log.Warn("failed, retrying: "+j.what, zap.Error(err))
		w.queue.AddRateLimited(j)
		return true
	}
	w.queue.Forget(j)
	w.left.Add(-1)
	return true
}
