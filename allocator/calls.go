package allocator

import (
	"context"
	"errors"
	"fmt"

	"github.com/berth-sandbox/berth/allocator/core"
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

// Claim implements rest.Allocator: it takes a sandbox from a pool. When ctx ends
// first, the sandbox, if there is one, is released.
func (a *Allocator) Claim(ctx context.Context, pool string, b core.Binding) (core.Sandbox, error) {
	t, err := a.leadingTerm()
	if err != nil {
		return core.Sandbox{}, notLeading(err)
	}
	token, answer := t.answers.expect()
	if !t.loop.put(core.Claim{Token: token, Pool: core.PoolKey{Namespace: a.o.Namespace, Name: pool}, Binding: b}) {
		t.answers.forget(token)
		return core.Sandbox{}, notLeading(errStepDown)
	}
	select {
	case e := <-answer:
		t.answers.forget(token)
		return claimed(pool, e)
	case <-t.loop.done:
		t.answers.forget(token)
		// It may be written all the same; the next leader finds it on the pod.
		return core.Sandbox{}, notLeading(errStepDown)
	case <-ctx.Done():
		if e, ok := t.answers.forget(token).(core.Claimed); ok {
			t.Submit(core.Release{ID: e.Sandbox.ID, Reason: core.ReasonAbandoned})
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
		if e.NoPool {
			return core.Sandbox{}, apierror.New(apierror.PoolNotFound, "templateID %q: there is no such SandboxPool", pool)
		}
		return core.Sandbox{}, apierror.New(apierror.PoolEmpty,
			"pool %q has no warm pod: %d starting, %d claimed, %d being released; try again", pool, e.Counts.Pending, e.Counts.Claimed, e.Counts.Releasing)
	}
	return core.Sandbox{}, fmt.Errorf("allocator: unexpected answer %T to a claim", e)
}

// Release implements rest.Allocator: it ends a sandbox.
func (a *Allocator) Release(ctx context.Context, id, reason string) (core.ReleaseStatus, int, error) {
	t, err := a.leadingTerm()
	if err != nil {
		return 0, 0, notLeading(err)
	}
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

// Running implements rest.Allocator.
func (a *Allocator) Running(ctx context.Context) ([]core.Sandbox, error) {
	return look(ctx, a, (*core.Core).Running)
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
