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
	return &workers{queue: kube.NewQueue[*job](minJobRetry, maxJobRetry), log: log}
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
	kube.Work(ctx, w.queue, n, w.do)
}

// finish is like run, but also executes the queued jobs before it returns.
func (w *workers) finish(ctx context.Context, n int) {
	kube.Work(ctx, w.queue, n, func(ctx context.Context, j *job) error { return w.do(context.WithoutCancel(ctx), j) })
}

// do executes a job, unless ctx has ended. The error says that it is to be tried again.
func (w *workers) do(ctx context.Context, j *job) error {
	if ctx.Err() == nil {
		if err := j.do(ctx); err != nil && ctx.Err() == nil {
			w.log.Warn("failed, retrying: "+j.what, zap.Error(err))
			return err
		}
	}
	w.left.Add(-1)
	return nil
}
