package controlclient_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing/synctest"

	"github.com/berth-sandbox/berth/lastactive"
	"github.com/berth-sandbox/berth/routecache"
)

// recorder has the routes of the router, and records the calls of its methods.
type recorder struct {
	*routecache.Cache
	*admissions
	mu    sync.Mutex
	calls []string
	hold  chan struct{} // if not nil, Release blocks until it is closed
}

func (r *recorder) holdReleases() (unhold func()) {
	hold := make(chan struct{})
	r.mu.Lock()
	defer r.mu.Unlock()
	r.hold = hold
	return func() { close(hold) }
}

func (r *recorder) note(format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.calls = append(r.calls, fmt.Sprintf(format, args...))
}

// events returns the calls since the previous events.
func (r *recorder) events() []string {
	synctest.Wait()
	r.mu.Lock()
	defer r.mu.Unlock()
	calls := r.calls
	r.calls = nil
	return calls
}

func (r *recorder) Put(id string, route routecache.Route) {
	r.Cache.Put(id, route)
	r.note("put %s", id)
}

func (r *recorder) Resolve(id string, a routecache.Answer) {
	r.Cache.Resolve(id, a)
	r.note("resolve %s %v", id, a.Status)
}

func (r *recorder) Release(id string, end routecache.End) {
	r.mu.Lock()
	hold := r.hold
	r.mu.Unlock()
	if hold != nil {
		<-hold
	}
	r.Cache.Release(id, end)
	r.note("release %s", id)
}

func (r *recorder) Replace(routes map[string]routecache.Route) {
	r.Cache.Replace(routes)
	r.note("replace with %d", len(routes))
}

func (r *recorder) Quiesce(id string) bool {
	r.note("quiesce %s", id)
	return r.Cache.Quiesce(id)
}

func (r *recorder) Disconnected() {
	r.Cache.Disconnected()
	r.note("disconnected")
}

// tracker returns what the test sets. It records its calls among those of the cache.
type tracker struct {
	r      *recorder
	looked chan struct{}
	// ask and last implement Ask and FinalReport if they are not nil.
	ask  func(context.Context, []string) ([]lastactive.Activity, error)
	last func(context.Context) lastactive.Report

	mu   sync.Mutex
	all  lastactive.Report // the full report
	news []lastactive.Report
}

// look simulates the end of a look with this report.
func (a *tracker) look(r lastactive.Report) {
	a.mu.Lock()
	a.news = append(a.news, r)
	a.mu.Unlock()
	a.looked <- struct{}{}
}

func (a *tracker) LookDone() <-chan struct{} { return a.looked }

func (a *tracker) Report(all bool) lastactive.Report {
	a.mu.Lock()
	defer a.mu.Unlock()
	if all {
		return a.all
	}
	r := a.news[0]
	a.news = a.news[1:]
	return r
}

func (a *tracker) Ask(ctx context.Context, questions []string) ([]lastactive.Activity, error) {
	a.r.note("ask")
	if a.ask == nil {
		return nil, nil
	}
	return a.ask(ctx, questions)
}

func (a *tracker) FinalReport(ctx context.Context) lastactive.Report {
	if a.last == nil {
		return lastactive.Report{Gateway: "envoy-1"}
	}
	return a.last(ctx)
}

// admissions are read when the test calls read.
type admissions struct {
	mu      sync.Mutex
	unread  int
	drained []func()
}

func (a *admissions) give() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.unread++
}

func (a *admissions) read() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.unread = 0
	for _, drained := range a.drained {
		drained()
	}
	a.drained = nil
}

func (a *admissions) Barrier(drained func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.unread > 0 {
		a.drained = append(a.drained, drained)
	} else {
		drained()
	}
}

func (a *admissions) Unread() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.unread
}

// deadRouters lists the routers that the test lets die.
type deadRouters struct {
	mu   sync.Mutex
	dead []string
}

func (n *deadRouters) die(id string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.dead = append(n.dead, id)
}

func (n *deadRouters) Dead() []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Clone(n.dead)
}

func (n *deadRouters) Forget(ids []string) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.dead = slices.DeleteFunc(n.dead, func(id string) bool { return slices.Contains(ids, id) })
	return nil
}
