package allocator

import (
	"context"
	"sync"

	"golang.org/x/sync/errgroup"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/nodes"
	"github.com/berth-sandbox/berth/allocator/pods"
	"github.com/berth-sandbox/berth/allocator/pools"
	"github.com/berth-sandbox/berth/allocator/sandboxobjects"
)

// watches run in every replica, so that a new leader need not wait for them. What
// they see goes to the term of this replica, if it has one.
type watches struct {
	pods    *pods.Watcher
	pools   *pools.Pools
	nodes   *nodes.Watcher
	records *sandboxobjects.Watcher

	mu   sync.Mutex
	term *term
}

func newWatches(o *Options) *watches {
	w := &watches{}
	k := o.Clients
	w.pods = pods.NewWatcher(k.Kubernetes, o.Namespace, w.submit, o.Log.Named("pods"))
	w.pools = pools.New(k, o.Namespace, o.Policy, o.serveOn(), w.submit, o.Log.Named("pools"))
	w.nodes = &nodes.Watcher{Client: k.Kubernetes, Submit: w.submit, Log: o.Log.Named("nodes")}
	w.records = &sandboxobjects.Watcher{Client: k.Berth, Namespace: o.Namespace, Submit: w.submit, Log: o.Log.Named("objects")}
	return w
}

// run watches until ctx ends.
func (w *watches) run(ctx context.Context) error {
	all, ctx := errgroup.WithContext(ctx)
	for _, run := range []func(context.Context) error{w.pods.Run, w.pools.Run, w.nodes.Run, w.records.Run} {
		all.Go(func() error { return run(ctx) })
	}
	return all.Wait()
}

// attach hands everything that is seen from now on to t; nil: to nobody.
func (w *watches) attach(t *term) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.term = t
}

func (w *watches) submit(ev core.Event) {
	w.mu.Lock()
	t := w.term
	w.mu.Unlock()
	if t != nil {
		t.Submit(ev)
	}
}
