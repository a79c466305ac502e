package allocator

import (
	"context"
	"sync"
)

// workers run jobs side by side, so many at a time. What waits is bounded by what
// the jobs are about: so many for a pod or a sandbox.
type workers struct {
	mu    sync.Mutex
	ready sync.Cond
	jobs  []func(context.Context)
	ended bool
}

func newWorkers() *workers {
	w := &workers{}
	w.ready.L = &w.mu
	return w
}

// add queues a job. It never blocks. After the end it is dropped.
func (w *workers) add(job func(context.Context)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.ended {
		w.jobs = append(w.jobs, job)
		w.ready.Signal()
	}
}

// waiting is the number of jobs that no worker has taken yet.
func (w *workers) waiting() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.jobs)
}

// run works with n workers until ctx ends, and waits for the jobs under way:
// they are given ctx.
func (w *workers) run(ctx context.Context, n int) {
	stop := context.AfterFunc(ctx, func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.ended, w.jobs = true, nil
		w.ready.Broadcast()
	})
	defer stop()
	var all sync.WaitGroup
	for range n {
		all.Go(func() {
			for {
				w.mu.Lock()
				for len(w.jobs) == 0 && !w.ended {
					w.ready.Wait()
				}
				if w.ended {
					w.mu.Unlock()
					return
				}
				job := w.jobs[0]
				w.jobs[0] = nil // the array lives on; what the job holds must not
				w.jobs = w.jobs[1:]
				w.mu.Unlock()
				job(ctx)
			}
		})
	}
	all.Wait()
}
