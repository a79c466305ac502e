package allocator

import (
	"context"
	"fmt"
	"sync"
	"time"

	"go.uber.org/zap"
	"k8s.io/apimachinery/pkg/util/rand"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/kube"
	"github.com/berth-sandbox/berth/allocator/pods"
	"github.com/berth-sandbox/berth/allocator/pools"
	"github.com/berth-sandbox/berth/allocator/project"
	"github.com/berth-sandbox/berth/api/sandboxid"
)

// How many writes run side by side. Claims have workers of their own, so that
// filling a pool does not delay them.
const (
	claimWorkers      = 64
	backgroundWorkers = 16
	projectWorkers    = 8
)

// term is what a leader has, from its election to its end.
type term struct {
	number    uint64
	a         *Allocator
	loop      *loop
	answers   *answers
	pools     *pools.Pools
	watcher   *pods.Watcher
	writer    *pods.Writer
	projector *project.Projector
	claims    *workers
	other     *workers
	log       *zap.Logger
}

// lead acts as the leader until ctx ends or something cannot go on.
func (a *Allocator) lead(ctx context.Context) error {
	number := a.lock.term()
	log := a.o.Log.With(zap.Uint64("term", number))
	log.Info("elected; reading what is there")
	t, err := a.newTerm(number, log)
	if err != nil {
		return err
	}
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	if err := t.recover(ctx); err != nil {
		return nil // ctx has ended
	}
	var all sync.WaitGroup
	failed := make(chan error, 2)
	watch := func(what string, run func(context.Context) error) {
		all.Go(func() {
			if err := run(ctx); err != nil {
				failed <- fmt.Errorf("%s: %w", what, err)
			}
		})
	}
	all.Go(func() { t.loop.run(ctx) })
	all.Go(func() { t.claims.run(ctx, claimWorkers) })
	all.Go(func() { t.other.run(ctx, backgroundWorkers) })
	all.Go(func() { t.projector.Run(ctx, projectWorkers) })
	watch("pools", t.pools.Run)
	watch("pods", t.watcher.Run)

	a.setTerm(t)
	a.control.Lead(t)
	log.Info("leading")
	select {
	case <-ctx.Done():
	case err = <-failed:
	}
	a.setTerm(nil)
	stop()
	all.Wait()
	return err
}

func (a *Allocator) newTerm(number uint64, log *zap.Logger) (*term, error) {
	c, err := core.New(core.Config{
		Term: number, MaxStale: a.o.MaxStale, Window: a.o.Window,
		NewID: sandboxid.New, NewSuffix: func() string { return rand.String(6) },
	}, now())
	if err != nil {
		return nil, err
	}
	t := &term{number: number, a: a, answers: newAnswers(), claims: newWorkers(), other: newWorkers(), log: log}
	t.loop = newLoop(c, t.do)
	k := a.o.Clients
	t.pools = &pools.Pools{Client: k.Berth, Namespace: a.o.Namespace, Policy: a.o.Policy, Sink: t, Log: log.Named("pools")}
	t.watcher = &pods.Watcher{Client: k.Kubernetes, Namespace: a.o.Namespace, Sink: t, Log: log.Named("pods")}
	t.writer = &pods.Writer{Client: k.Kubernetes, Submit: t.Submit, Log: log.Named("pods")}
	t.projector = project.New(k.Berth, a.o.Namespace, t.Submit, log.Named("project"))
	return t, nil
}

// recover reads what is there and tells the core. Nothing is answered before.
func (t *term) recover(ctx context.Context) error {
	failed := func(err error) { t.log.Warn("not ready, will read again", zap.Error(err)) }
	return kube.Retry(ctx, func(ctx context.Context) error {
		// Records first: a sandbox that is claimed or released while this reads
		// is then seen on its pod.
		records, err := t.projector.List(ctx)
		if err != nil {
			return err
		}
		specs, err := t.pools.List(ctx)
		if err != nil {
			return err
		}
		seen, err := t.watcher.List(ctx)
		if err != nil {
			return err
		}
		for _, p := range seen {
			t.loop.versions[p.Key] = p.Version
		}
		for _, e := range t.loop.core.Recover(specs, seen, records) {
			t.do(e)
		}
		t.log.Info("recovered", zap.Int("pools", len(specs)), zap.Int("pods", len(seen)), zap.Int("records", len(records)))
		return nil
	}, failed)
}

// do carries out an effect. It is called from the loop and never blocks.
func (t *term) do(e core.Effect) {
	if t.a.control.Deliver(t.number, e) {
		return
	}
	switch e := e.(type) {
	case core.BindPod:
		t.claims.add(func(ctx context.Context) { t.writer.Bind(ctx, e) })
	case core.MarkReleased:
		t.claims.add(func(ctx context.Context) { t.writer.MarkReleased(ctx, e) })
	case core.DeletePod:
		t.other.add(func(ctx context.Context) { t.writer.Delete(ctx, e) })
	case core.CreatePod:
		t.other.add(func(ctx context.Context) { t.create(ctx, e) })
	case core.PoolDrained:
		t.other.add(func(ctx context.Context) { t.pools.Drained(ctx, e.Key) })
	case core.ForgetRecord:
		t.other.add(func(ctx context.Context) { t.projector.Forget(ctx, e.ID) })
	case core.Record:
		t.projector.Record(e.Sandbox)
	case core.Claimed:
		t.a.metrics.claims.WithLabelValues("claimed").Inc()
		if !t.answers.deliver(e.Token, e) {
			// The caller has gone in this very moment.
			t.other.add(func(context.Context) { t.Submit(core.Release{ID: e.Sandbox.ID, Reason: core.ReasonAbandoned}) })
		}
	case core.ClaimRefused:
		t.a.metrics.claims.WithLabelValues("refused").Inc()
		t.answers.deliver(e.Token, e)
	case core.ReleaseAnswered:
		t.answers.deliver(e.Token, e)
	case core.SandboxReleased:
		t.a.metrics.releases.WithLabelValues(e.Sandbox.Reason).Inc()
		t.log.Info("sandbox released", zap.String("sandbox", sandboxid.Short(e.Sandbox.ID)),
			zap.String("pod", e.Sandbox.Pod.Name), zap.String("reason", e.Sandbox.Reason))
		if hook := t.a.o.OnSandboxReleased; hook != nil {
			t.other.add(func(ctx context.Context) { hook(ctx, e.Sandbox.ID) })
		}
	default:
		panic(fmt.Sprintf("allocator: unknown effect %T", e))
	}
}

func (t *term) create(ctx context.Context, e core.CreatePod) {
	pool, ok := t.pools.Get(e.Pool)
	if !ok { // its object went meanwhile, or its template is refused now
		t.Submit(core.CreateFailed(e))
		return
	}
	err := t.writer.Create(ctx, pool, e)
	t.pools.CreateResult(e.Pool, err)
	if err != nil && ctx.Err() == nil {
		t.log.Warn("pod not created", zap.String("pool", e.Pool.Name), zap.Error(err))
	}
}

// Submit implements the sinks of the watches and of the control server.
func (t *term) Submit(ev core.Event) { t.loop.Submit(ev) }

// Valid implements control.Leader.
func (t *term) Valid() bool { return t.a.lock.valid() }

// Term implements control.Leader.
func (t *term) Term() uint64 { return t.number }

// lookWait bounds the questions that have no caller's context.
const lookWait = 5 * time.Second

// PodKeys implements pods.Sink.
func (t *term) PodKeys() []core.PodKey {
	ctx, cancel := context.WithTimeout(context.Background(), lookWait)
	defer cancel()
	found := make(chan []core.PodKey, 1)
	if t.loop.look(ctx, func(c *core.Core) { found <- c.PodKeys() }) != nil {
		return nil
	}
	return <-found
}

// Counts implements pools.Sink.
func (t *term) Counts(key core.PoolKey) (core.Counts, bool) {
	ctx, cancel := context.WithTimeout(context.Background(), lookWait)
	defer cancel()
	type result struct {
		counts core.Counts
		ok     bool
	}
	found := make(chan result, 1)
	if t.loop.look(ctx, func(c *core.Core) {
		counts, ok := c.Counts(key)
		found <- result{counts, ok}
	}) != nil {
		return core.Counts{}, false
	}
	r := <-found
	return r.counts, r.ok
}
