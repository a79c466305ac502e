package allocator

import (
	"context"
	"errors"
	"sync"

	"golang.org/x/sync/errgroup"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/kube"
	"github.com/berth-sandbox/berth/allocator/nodes"
	"github.com/berth-sandbox/berth/allocator/pods"
	"github.com/berth-sandbox/berth/allocator/pools"
	"github.com/berth-sandbox/berth/allocator/sandboxobjects"
)

// watches run in every replica, so that a new leader need not wait for their first list.
// They submit events to the attached term; without one they drop them.
type watches struct {
	pods    *pods.Watcher
	pools   *pools.Pools
	nodes   *nodes.Watcher
	records *sandboxobjects.Watcher

	mu   sync.Mutex
	term *term
}

func newWatches(o *Options) (*watches, error) {
	w := &watches{}
	named := func(name string) kube.Options {
		return kube.Options{Clients: o.Clients, Namespace: o.Namespace, Submit: w.submit, Log: o.Log.Named(name)}
	}
	var errs [4]error
	w.pods, errs[0] = pods.NewWatcher(named("pods"))
	w.pools, errs[1] = pools.New(pools.Options{Options: named("pools"), Policy: o.Policy, Settings: o.podSettings(), Stops: o.Snapshots != nil, Egress: o.EgressProxy != ""})
	w.nodes, errs[2] = nodes.NewWatcher(named("nodes"))
	w.records, errs[3] = sandboxobjects.NewWatcher(named("objects"))
	return w, errors.Join(errs[:]...)
}

// run watches until ctx ends. It returns an error if a watch cannot start.
func (w *watches) run(ctx context.Context) error {
	all, ctx := errgroup.WithContext(ctx)
	for _, run := range []func(context.Context) error{w.pods.Run, w.pools.Run, w.nodes.Run, w.records.Run} {
		all.Go(func() error { return run(ctx) })
	}
	return all.Wait()
}

// attach makes t the receiver of all later events. With nil they are dropped.
func (w *watches) attach(t *term) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.term = t
}

func (w *watches) submit(ev core.Event) {
	w.mu.Lock()
	t := w.term
	w.mu.Unlock()
	if t == nil {
		return
	}
	t.Submit(ev)
	if seen, ok := ev.(core.PodSeen); ok {
		t.expect(&seen.Pod)
	}
}
