package allocator

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/rest"
	"github.com/berth-sandbox/berth/api/apierror"
)

// Leading implements rest.Allocator.
func (a *Allocator) Leading() (bool, string) {
	_, err := a.leadingTerm()
	leader := a.leading()
	if leader == a.self() {
		leader = replica{} // it has not recovered yet, or has just lost the lease
	}
	return err == nil, leader.api
}

// ClaimWait implements rest.Allocator.
func (a *Allocator) ClaimWait() time.Duration { return a.o.ClaimWait }

// Claim implements rest.Allocator: it takes a sandbox from a pool. When ctx ends
// first, the sandbox, if there is one and it has no idempotency key, is released.
func (a *Allocator) Claim(ctx context.Context, pool string, ev core.Claim) (core.Sandbox, error) {
	began := time.Now()
	s, err := a.claim(ctx, pool, ev)
	a.metrics.claims.WithLabelValues(outcome(err)).Inc()
	if err == nil {
		a.metrics.claimed.Observe(time.Since(began).Seconds())
	}
	return s, err
}

func (a *Allocator) claim(ctx context.Context, pool string, ev core.Claim) (core.Sandbox, error) {
	t, err := a.leadingTerm()
	if err != nil {
		return core.Sandbox{}, notLeading(err)
	}
	t.headStart.call()
	token, answer := t.answers.expect()
	ev.Token, ev.Pool = token, core.PoolKey{Namespace: a.o.Namespace, Name: pool}
	if !t.loop.put(ev) {
		t.answers.forget(token)
		return core.Sandbox{}, notLeading(errStepDown)
	}
	select {
	case e := <-answer:
		t.answers.forget(token)
		return claimed(pool, e)
	case <-t.loop.done:
		t.answers.forget(token)
		// It may be written all the same; the next leader finds it in the journal.
		return core.Sandbox{}, notLeading(errStepDown)
	case <-ctx.Done():
		if e, ok := t.answers.forget(token).(core.Claimed); ok {
			t.abandoned(e.Sandbox)
		} else {
			t.Submit(core.ClaimAbandoned{Token: token})
		}
		return core.Sandbox{}, ctx.Err()
	}
}

func claimed(pool string, e core.Effect) (core.Sandbox, error) {
	switch e := e.(type) {
	case core.Claimed:
		return e.Sandbox, nil
	case core.ClaimRefused:
		return core.Sandbox{}, refused(pool, e)
	}
	return core.Sandbox{}, fmt.Errorf("allocator: unexpected answer %T to a claim", e)
}

func refused(pool string, e core.ClaimRefused) *apierror.Error {
	switch e.Why {
	case core.NoPool:
		return apierror.New(apierror.PoolNotFound, "templateID %q: there is no such SandboxPool", pool)
	case core.PoolEmpty:
		return apierror.New(apierror.PoolEmpty, "pool %q has no warm pod: %d starting, %d claimed, %d being released, %d claims waiting; try again",
			pool, e.Counts.Pending, e.Counts.Claimed, e.Counts.Releasing, e.Counts.Waiting)
	case core.KeyReused:
		return apierror.New(apierror.KeyReused, "Idempotency-Key: it was used for a claim with another body; use a new key for a new claim")
	case core.KeyEnded:
		err := apierror.New(apierror.SandboxGone, "Idempotency-Key: the sandbox that was claimed with it has been released (%s); use a new key for a new claim", e.Sandbox.Reason)
		err.SandboxID = e.Sandbox.ID
		return err
	case core.Overloaded:
		return apierror.New(apierror.Overloaded, "the allocator does not keep up with what it has to record; try again")
	case core.Quarantined:
		err := apierror.New(apierror.Overloaded, "the journal was begun anew, so no pod is handed out until no router of the earlier one can send requests to its address, which is in %v at the latest; an operator can end that earlier (see docs/backup.md)",
			e.Wait.Round(time.Second))
		err.RetryAfter = int(min(e.Wait, time.Minute)/time.Second) + 1
		return err
	case core.Ending:
		return apierror.New(apierror.NotLeader, "the pool has no warm pod, and this replica is about to end; try again")
	case core.StartFailed:
		err := apierror.New(apierror.StartFailed, "the sandbox was released before it was running: %s", e.Sandbox.Reason)
		err.SandboxID = e.Sandbox.ID
		return err
	}
	return apierror.New(apierror.Internal, "the claim was refused")
}

// Close lets no claim wait any longer: this replica is about to end, and whoever
// comes next can serve them. Calls in progress go on.
func (a *Allocator) Close() {
	if t, err := a.leadingTerm(); err == nil {
		t.Submit(core.Closing{})
	}
}

// NotifyIdleAvailable wakes the claims that wait for a pod of the pool. The
// allocator does so by itself when it sees that a pod has become warm.
func (a *Allocator) NotifyIdleAvailable(namespace, pool string) {
	if t, err := a.leadingTerm(); err == nil {
		t.Submit(core.IdleAvailable{Pool: core.PoolKey{Namespace: namespace, Name: pool}})
	}
}

// Release implements rest.Allocator: it ends a sandbox.
func (a *Allocator) Release(ctx context.Context, id, reason string) (core.ReleaseStatus, int, error) {
	t, err := a.leadingTerm()
	if err != nil {
		return 0, 0, notLeading(err)
	}
	t.headStart.call()
	token, answer := t.answers.expect()
	defer t.answers.forget(token)
	if !t.loop.put(core.Release{Token: token, ID: id, Reason: reason}) {
		return 0, 0, notLeading(errStepDown)
	}
	select {
	case e := <-answer:
		if r, ok := e.(core.ReleaseAnswered); ok {
			return r.Status, r.Outstanding, nil
		}
		return 0, 0, fmt.Errorf("allocator: unexpected answer %T to a release", e)
	case <-t.loop.done:
		return 0, 0, notLeading(errStepDown)
	case <-ctx.Done():
		return 0, 0, ctx.Err()
	}
}

// KeepAlive implements rest.Allocator.
func (a *Allocator) KeepAlive(ctx context.Context, id string) (core.ReleaseStatus, error) {
	return a.keep(ctx, func(_ *term, token uint64) core.Event { return core.KeepAlive{Token: token, ID: id} })
}

// SetTimeout implements rest.Allocator. When ctx ends first, the end may be moved all
// the same; it can be moved again.
func (a *Allocator) SetTimeout(ctx context.Context, id string, lifetime time.Duration) (core.ReleaseStatus, error) {
	return a.keep(ctx, func(t *term, token uint64) core.Event {
		t.headStart.call() // it is answered when it is journaled
		return core.SetTimeout{Token: token, ID: id, Lifetime: lifetime}
	})
}

// keep makes a call that is answered by core.Kept.
func (a *Allocator) keep(ctx context.Context, event func(t *term, token uint64) core.Event) (core.ReleaseStatus, error) {
	t, err := a.leadingTerm()
	if err != nil {
		return 0, notLeading(err)
	}
	token, answer := t.answers.expect()
	defer t.answers.forget(token)
	if !t.loop.put(event(t, token)) {
		return 0, notLeading(errStepDown)
	}
	select {
	case e := <-answer:
		if k, ok := e.(core.Kept); ok {
			return k.Status, nil
		}
		return 0, fmt.Errorf("allocator: unexpected answer %T to a call that keeps a sandbox", e)
	case <-t.loop.done:
		return 0, notLeading(errStepDown)
	case <-ctx.Done():
		return 0, ctx.Err()
	}
}

// Activities implements rest.Allocator.
func (a *Allocator) Activities(ctx context.Context, which rest.Which, most int) ([]core.ActivityStatus, int, error) {
	return listed(ctx, a, func(c *core.Core) ([]core.ActivityStatus, int) {
		return c.Activities(which.Takes, most)
	})
}

// Sandbox implements rest.Allocator.
func (a *Allocator) Sandbox(ctx context.Context, id string) (core.Sandbox, bool, error) {
	type result struct {
		sandbox core.Sandbox
		known   bool
	}
	r, err := look(ctx, a, func(c *core.Core) (r result) {
		r.sandbox, r.known = c.Sandbox(id)
		return r
	})
	return r.sandbox, r.known, err
}

// Live implements rest.Allocator.
func (a *Allocator) Live(ctx context.Context, after core.Mark, most int) ([]core.Sandbox, bool, error) {
	type result struct {
		list []core.Sandbox
		more bool
	}
	r, err := look(ctx, a, func(c *core.Core) (r result) {
		r.list, r.more = c.Live(after, most)
		return r
	})
	return r.list, r.more, err
}

// Fences implements rest.Allocator.
func (a *Allocator) Fences(ctx context.Context, most int) ([]core.FenceStatus, int, error) {
	return listed(ctx, a, func(c *core.Core) ([]core.FenceStatus, int) { return c.Fences(most) })
}

// Sessions implements rest.Allocator.
func (a *Allocator) Sessions(ctx context.Context, most int) ([]core.SessionStatus, int, error) {
	return listed(ctx, a, func(c *core.Core) ([]core.SessionStatus, int) { return c.Sessions(most) })
}

// listed reads a list from the core, and how much of it was left out.
func listed[T any](ctx context.Context, a *Allocator, f func(*core.Core) ([]T, int)) ([]T, int, error) {
	type result struct {
		list   []T
		others int
	}
	r, err := look(ctx, a, func(c *core.Core) (r result) {
		r.list, r.others = f(c)
		return r
	})
	return r.list, r.others, err
}

// DeclareDead implements rest.Allocator: it waits no longer for a router. When ctx
// ends first, the declaration may take effect all the same; it can be repeated.
func (a *Allocator) DeclareDead(ctx context.Context, session, by, reason string) (core.DeadDeclared, error) {
	t, err := a.leadingTerm()
	if err != nil {
		return core.DeadDeclared{}, notLeading(err)
	}
	token, answer := t.answers.expect()
	defer t.answers.forget(token)
	if !t.loop.put(core.DeclareDead{Token: token, Session: session, By: by, Reason: reason}) {
		return core.DeadDeclared{}, notLeading(errStepDown)
	}
	select {
	case e := <-answer:
		if d, ok := e.(core.DeadDeclared); ok {
			return d, nil
		}
		return core.DeadDeclared{}, fmt.Errorf("allocator: unexpected answer %T to a declaration", e)
	case <-t.loop.done:
		return core.DeadDeclared{}, notLeading(errStepDown)
	case <-ctx.Done():
		return core.DeadDeclared{}, ctx.Err()
	}
}

// look reads something from the core of the present term.
func look[T any](ctx context.Context, a *Allocator, f func(*core.Core) T) (T, error) {
	var none T
	t, err := a.leadingTerm()
	if err != nil {
		return none, notLeading(err)
	}
	found := make(chan T, 1)
	switch err := t.loop.look(ctx, func(c *core.Core) { found <- f(c) }); {
	case errors.Is(err, errStepDown):
		return none, notLeading(err)
	case err != nil:
		return none, err
	}
	return <-found, nil
}

func notLeading(err error) error {
	return apierror.New(apierror.NotLeader, "%v; try again", err)
}
