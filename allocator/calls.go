package allocator

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/berth-sandbox/berth/allocator/access"
	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/core/step"
	"github.com/berth-sandbox/berth/allocator/core/teams"
	"github.com/berth-sandbox/berth/allocator/events"
	"github.com/berth-sandbox/berth/allocator/pools"
	"github.com/berth-sandbox/berth/allocator/rest"
	"github.com/berth-sandbox/berth/allocator/sandboxobjects"
	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/metric"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/internal/tracing"
)

// Leader implements rest.Allocator.
func (a *Allocator) Leader() rest.Leader {
	a.mu.Lock()
	defer a.mu.Unlock()
	_, err := a.currentTerm()
	l := rest.Leader{Here: err == nil, Address: a.leader.api, Left: a.left, Changed: a.changed}
	if a.leader == a.self() { // this replica has not recovered yet, or has just lost the lease
		l.Address, l.Elected = "", !l.Here && !a.resigned
	}
	return l
}

// ClaimWait implements rest.Allocator.
func (a *Allocator) ClaimWait() time.Duration { return a.o.ClaimWait }

// Claim implements rest.Allocator. When ctx ends first, a sandbox without an idempotency key is
// released.
func (a *Allocator) Claim(ctx context.Context, pool string, ev core.Claim) (core.Sandbox, error) {
	began, end := time.Now(), a.traces.begin(ctx)
	e, err := claim[core.Claimed](ctx, a, pool, ev)
	end(e.Sandbox)
	a.metrics.claims.WithLabelValues(outcome(err)).Inc()
	if err == nil {
		metric.Observe(a.metrics.claimed, time.Since(began).Seconds(), tracing.From(ctx).TraceID())
	}
	return e.Sandbox, err
}

// ClaimBatch implements rest.Allocator. When ctx ends first, sandboxes without an idempotency key are
// released.
func (a *Allocator) ClaimBatch(ctx context.Context, pool string, ev core.Claim) ([]core.Sandbox, []string, error) {
	end := a.traces.begin(ctx)
	e, err := claim[core.BatchClaimed](ctx, a, pool, ev)
	end(e.Sandboxes...)
	a.metrics.batches.WithLabelValues(outcome(err)).Inc()
	return e.Sandboxes, e.Ended, err
}

// claim makes a claim that is answered with a T or refused.
func claim[T core.Effect](ctx context.Context, a *Allocator, pool string, ev core.Claim) (answer T, err error) {
	e, err := call[core.Effect](ctx, a, func(t *term, token uint64) core.Event {
		t.headStart.call()
		ev.Token, ev.Pool = token, a.poolOf(pool)
		return ev
	}, func(t *term, token uint64, late core.Effect) {
		switch e := late.(type) {
		case core.Claimed:
			t.releaseUncollected(e.Sandbox)
		case core.BatchClaimed:
			t.releaseUncollected(e.Sandboxes...)
		default:
			t.Submit(core.ClaimAbandoned{Token: token})
		}
	})
	if err != nil {
		return answer, err
	}
	if refusal, ok := e.(core.ClaimRefused); ok {
		err := refused(pool, ev, refusal)
		switch t, notLeading := a.leadingTerm(); {
		case refusal.Why == core.NoPool:
			err.Message += "; " + named(a.Pools())
		case refusal.Why == core.Overloaded && notLeading == nil && t.noCRD.Load():
			err.Message = fmt.Sprintf("the allocator cannot record new claims: %v; an operator must install it again (see docs/operations.md)", sandboxobjects.ErrNoCRD)
		}
		return answer, err
	}
	if granted, ok := e.(T); ok {
		return granted, nil
	}
	return answer, fmt.Errorf("allocator: unexpected answer %T to a claim", e)
}

// named says which pools there are.
func named(all []*v1alpha1.SandboxPool) string {
	const most = 10
	names := make([]string, 0, len(all))
	for _, p := range all {
		names = append(names, p.Name)
	}
	slices.Sort(names)
	switch n := len(names); {
	case n == 0:
		return "there is no pool yet"
	case n > most:
		return fmt.Sprintf("the pools are %s and %d more", strings.Join(names[:most], ", "), n-most)
	}
	return "the pools are " + strings.Join(names, ", ")
}

func refused(pool string, ev core.Claim, e core.ClaimRefused) *apierror.Error {
	switch e.Why {
	case core.NoPool:
		field := "templateID"
		if ev.Count > 0 {
			field = "pool"
		}
		return apierror.New(apierror.PoolNotFound, "%s %q: there is no such SandboxPool in namespace %q, which this API serves", field, pool, ev.Pool.Namespace)
	case core.PoolEmpty:
		return poolEmpty(pool, ev, e)
	case step.TooMany:
		field, least := "atLeast", cmp.Or(ev.AtLeast, ev.Count)
		if least == ev.Count {
			field = "count"
		}
		return apierror.New(apierror.BadRequest, "%s: %d: pool %q has %d pods at most; ask for %d at most, or raise spec.maxPods of the pool", field, least, pool, e.MaxPods, e.MaxPods)
	case core.LineFull:
		return apierror.New(apierror.PoolEmpty, "pool %q has no warm pod, and the claims that wait for one leave no place for another one of this team: %d wait (--claim-queue); try again", pool, e.Counts.Waiting)
	case core.NotAccepted:
		return apierror.New(apierror.PoolNotAccepted, "pool %q has no warm pod, and none can be made from its template: %s", pool, e.Problem)
	case core.OverLimit:
		return overLimit(e.Excess)
	case core.KeyReused:
		return apierror.New(apierror.KeyReused, "Idempotency-Key: it was used for a claim with another body; use a new key for a new claim")
	case core.KeyEnded:
		err := apierror.New(apierror.SandboxGone, "Idempotency-Key: the sandbox that was claimed with it has been released (%s); use a new key for a new claim", e.Sandbox.Reason)
		err.SandboxID = e.Sandbox.ID
		return err
	case core.Overloaded:
		return apierror.New(apierror.Overloaded, "the allocator cannot record new claims fast enough; try again")
	case core.Quarantined:
		err := apierror.New(apierror.Overloaded, "the journal was begun anew, so no pod is handed out until no router of the earlier journal can send requests to its address, in %v at the latest; an operator can end the wait earlier (see docs/backup.md)",
			e.Wait.Round(time.Second))
		err.RetryAfter = int(min(e.Wait, time.Minute)/time.Second) + 1
		return err
	case core.Ending:
		return apierror.New(apierror.NotLeader, "the pool has no warm pod, and this replica is shutting down; try again")
	case core.NotConfigured:
		if e.Sandbox.ID == "" && ev.Configuring > 0 {
			return apierror.New(apierror.SnapshotFailed, "pool %q: no pod that was tried has the files of the snapshot and is configured%s; the log of the allocator and those of the pods say more", pool, inBrackets(e.Problem))
		}
		if e.Sandbox.ID == "" {
			return apierror.New(apierror.StartFailed, "pool %q: no agent of the pods that were tried took the configuration within %v%s, or the pod is of an older template without an agent or, for a claim with network rules, without an egress gateway; the logs of the pods say why, try again", pool, configureWait, inBrackets(e.Problem))
		}
		err := apierror.New(apierror.Timeout, "the leader changed during the claim, and the sandbox is not known to be configured; try again with the same Idempotency-Key")
		err.SandboxID = e.Sandbox.ID
		return err
	case core.StartFailed:
		err := apierror.New(apierror.StartFailed, "the sandbox was released before it was running: %s%s", e.Sandbox.Reason, inBrackets(e.Sandbox.Message))
		err.SandboxID = e.Sandbox.ID
		return err
	}
	return apierror.New(apierror.Internal, "the claim was refused")
}

// inBrackets returns " (text)", or "" for no text.
func inBrackets(text string) string {
	if text == "" {
		return ""
	}
	return " (" + text + ")"
}

// poolEmpty names what the claim has waited for, and what helps. E2B's SDKs show the status as "Rate limit exceeded".
func poolEmpty(pool string, ev core.Claim, e core.ClaimRefused) *apierror.Error {
	n := e.Counts
	what := fmt.Sprintf("pool %q had no warm pod within %v", pool, ev.Wait)
	if least := cmp.Or(ev.AtLeast, ev.Count); least > 1 {
		what = fmt.Sprintf("pool %q had fewer than %d warm pods within %v", pool, least, ev.Wait)
	}
	var why string
	fix := "raise spec.warm of the pool"
	switch counted := fmt.Sprintf("%d claimed, %d being released", n.Claimed, n.Releasing); {
	case e.MaxPods > 0 && n.Pending+n.Warm+n.Claimed+n.Releasing >= e.MaxPods:
		why = fmt.Sprintf("maxPods %d is reached: %d starting, %s", e.MaxPods, n.Pending, counted)
		fix = "release sandboxes or raise spec.maxPods of the pool"
	case e.Paused:
		why, fix = fmt.Sprintf("it is paused: %s", counted), "set spec.paused of the pool to false"
	case e.Warm == 0 && n.Pending == 0:
		why = "warm is 0, and none is starting"
	default:
		why = fmt.Sprintf("%d are starting, %s", n.Pending, counted)
		if n.Pending > 0 {
			fix = "wait longer (waitTimeout, or --claim-wait of the allocators) or " + fix
		}
	}
	if n.Stuck.Pod != "" {
		why += fmt.Sprintf(", pod %s is not ready (%s: %s)", n.Stuck.Pod, n.Stuck.Reason, n.Stuck.Why)
	}
	if n.Trouble.Pod != "" {
		why += fmt.Sprintf(", pods end before they can be used (%s: %s)", n.Trouble.Pod, n.Trouble.Why)
		fix = "mend the pod template"
	}
	return apierror.New(apierror.PoolEmpty, "%s: %s, %d claims waiting; try again, %s", what, why, n.Waiting, fix)
}

// overLimit names the limit that a team has reached.
func overLimit(e teams.Excess) *apierror.Error {
	limit := fmt.Sprintf("team %q: %s %v is reached", e.Team, e.Limit, e.Value)
	switch e.Limit {
	case teams.ClaimsPerSecond:
		err := apierror.New(apierror.RateLimited, "%s; try again in %v", limit, e.Wait.Round(time.Millisecond))
		err.RetryAfter = int((e.Wait + time.Second - 1) / time.Second)
		return err
	case teams.MaxWaiting:
		return apierror.New(apierror.QuotaExceeded, "%s: %d claims wait for a pod", limit, e.Used)
	case teams.MaxSandboxes:
	}
	return apierror.New(apierror.QuotaExceeded, "%s: %d are live, being claimed, or left by claims that have ended; release some, or try again in a minute", limit, e.Used)
}

// Events implements rest.Allocator.
func (a *Allocator) Events() (*events.Ring, error) {
	t, err := a.leadingTerm()
	if err != nil {
		return nil, notLeading(err)
	}
	return t.events, nil
}

// Serving implements rest.Allocator.
func (a *Allocator) Serving() context.Context { return a.serving }

// Answering implements rest.Allocator.
func (a *Allocator) Answering() context.Context { return a.answering }

// closeWait bounds the wait of Close. A commit takes milliseconds, and on a busy API server seconds. The configuration of an
// agent takes configureWait at most. A snapshot and its restore may take longer: those calls are not waited for.
const closeWait = 5 * time.Second

// Close ends the work of this replica for the API, because it is shutting down. Streams end. No call begins in its term
// any more: new ones, and claims that wait for a pod, are held for the next leader and forwarded to it, until limit ends;
// Follow must run for that. Close returns when all others have their answers, or after closeWait. The outcome of those
// that have none then is unknown.
func (a *Allocator) Close(limit context.Context) {
	context.AfterFunc(limit, a.stopAnswering)
	a.stopServing()
	a.mu.Lock()
	t := a.term
	a.resigned = true
	a.tellChanged()
	a.mu.Unlock()
	if t == nil {
		return
	}
	t.Submit(core.Closing{})
	late := time.NewTimer(closeWait)
	defer late.Stop()
	select {
	case <-t.answers.drain():
	case <-t.loop.done:
	case <-late.C:
	}
}

// scopeOf returns what the caller of a call sees.
func scopeOf(ctx context.Context) core.Scope {
	c := access.From(ctx)
	return core.Scope{All: c.Role == access.Admin, Team: c.Team}
}

// Release implements rest.Allocator. When ctx ends first, the release may take effect all
// the same.
func (a *Allocator) Release(ctx context.Context, id, reason string) (core.CallStatus, int, error) {
	e, err := call[core.ReleaseAnswered](ctx, a, func(t *term, token uint64) core.Event {
		t.headStart.call()
		return core.Release{Token: token, Scope: scopeOf(ctx), ID: id, Reason: reason}
	}, nil)
	return e.Status, e.Outstanding, err
}

// KeepAlive implements rest.Allocator.
func (a *Allocator) KeepAlive(ctx context.Context, id string) (core.CallStatus, error) {
	e, err := call[core.SandboxCallAnswered](ctx, a, func(_ *term, token uint64) core.Event {
		return core.KeepAlive{Token: token, Scope: scopeOf(ctx), ID: id}
	}, nil)
	return e.Status, err
}

// SetTimeout implements rest.Allocator. When ctx ends first, the end may move all the same; the
// call can be repeated.
func (a *Allocator) SetTimeout(ctx context.Context, id string, lifetime time.Duration) (core.CallStatus, error) {
	e, err := a.moveEnd(ctx, core.SetTimeout{Scope: scopeOf(ctx), ID: id, Lifetime: lifetime})
	return e.Status, err
}

// Extend implements rest.Allocator. When ctx ends first, the end may move all the same; the call
// can be repeated.
func (a *Allocator) Extend(ctx context.Context, id string, lifetime time.Duration, wake bool) (core.SandboxCallAnswered, error) {
	return a.moveEnd(ctx, core.SetTimeout{Scope: scopeOf(ctx), ID: id, Lifetime: lifetime, Extend: true, Wake: wake})
}

func (a *Allocator) moveEnd(ctx context.Context, ev core.SetTimeout) (core.SandboxCallAnswered, error) {
	return call[core.SandboxCallAnswered](ctx, a, func(t *term, token uint64) core.Event {
		t.headStart.call() // its answer waits for the journal
		ev.Token = token
		return ev
	}, nil)
}

// Sleep implements rest.Allocator. When ctx ends first, the sandbox may fall asleep, and be stopped, all the same.
func (a *Allocator) Sleep(ctx context.Context, id string, stop bool) (core.SandboxCallAnswered, error) {
	return call[core.SandboxCallAnswered](ctx, a, func(t *term, token uint64) core.Event {
		t.headStart.call()
		return core.Sleep{Token: token, Scope: scopeOf(ctx), ID: id, Stop: stop}
	}, nil)
}

// SetNetwork implements rest.Allocator. When ctx ends first, the rules may hold all the same; the call can be repeated.
func (a *Allocator) SetNetwork(
	ctx context.Context, id string, rules core.EgressRules,
) (core.SandboxCallAnswered, error) {
	return call[core.SandboxCallAnswered](ctx, a, func(t *term, token uint64) core.Event {
		t.headStart.call()
		return core.SetNetwork{Token: token, Scope: scopeOf(ctx), ID: id, Rules: rules}
	}, nil)
}

// scanned is how many sandboxes one read of a list passes over.
const scanned = 500

// Activities implements rest.Allocator.
func (a *Allocator) Activities(ctx context.Context, filter rest.Filter, most int) ([]core.ActivityStatus, int, error) {
	scope := scopeOf(ctx)
	ids := filter.IDs
	if filter.ID != "" {
		ids = []string{filter.ID}
	}
	if len(ids) > 0 {
		found, _, err := read(ctx, a, func(c core.View) (found []core.ActivityStatus, _ bool) {
			for _, id := range ids {
				if one, ok := c.Activity(id, scope); ok && filter.Matches(&one.Sandbox) {
					found = append(found, one)
				}
			}
			return found, true
		})
		n := min(len(found), most)
		return found[:n], len(found) - n, err
	}
	sel := core.Selection{Scope: scope}
	if filter.Pool != "" {
		sel.Pool = core.PoolKey{Namespace: a.o.Namespace, Name: filter.Pool}
	}
	var all core.Activities // a part at a time, so that a long list holds up no other call
	for !all.Done {
		part, _, err := read(ctx, a, func(c core.View) (core.Activities, bool) {
			return c.Activities(sel, all.Next, filter.Matches, most-len(all.List), scanned), true
		})
		if err != nil {
			return nil, 0, err
		}
		all.List, all.Others = append(all.List, part.List...), all.Others+part.Others
		all.Next, all.Done = part.Next, part.Done
	}
	return all.List, all.Others, nil
}

// Sandbox implements rest.Allocator.
func (a *Allocator) Sandbox(ctx context.Context, id string) (core.Sandbox, bool, error) {
	scope := scopeOf(ctx)
	return read(ctx, a, func(c core.View) (core.Sandbox, bool) {
		if s, ok := c.Sandbox(id); ok && scope.Sees(s.Team) {
			return s, true
		}
		return core.Sandbox{}, false
	})
}

// List implements rest.Allocator.
func (a *Allocator) List(ctx context.Context, q rest.Query) (all []core.Sandbox, err error) {
	scope := scopeOf(ctx)
	if q.Team != "" {
		if !scope.Sees(q.Team) {
			return nil, nil
		}
		scope = core.Scope{Team: q.Team}
	}
	query := core.Query{
		Selection: core.Selection{Scope: scope}, Live: q.Live, Gone: q.Gone, After: q.After, Order: q.Order, Since: q.Since,
		Keep: q.Keep, Most: q.Most, Scan: scanned,
	}
	if q.Pool != "" {
		query.Pool = core.PoolKey{Namespace: a.o.Namespace, Name: q.Pool}
	}
	for { // a part at a time, so that a filter that selects few of many holds up no other call
		page, _, err := read(ctx, a, func(c core.View) (core.Page, bool) { return c.List(query), true })
		if err != nil {
			return nil, err
		}
		if all = append(all, page.List...); !page.More || len(all) == q.Most {
			return all, nil
		}
		query.After, query.Most = page.Next, q.Most-len(all)
	}
}

// Pool implements rest.Allocator.
func (a *Allocator) Pool(name string) (*v1alpha1.SandboxPool, bool) {
	return a.watches.pools.Seen(a.poolOf(name))
}

// poolOf returns the pool that a caller means with "name" or "namespace/name". The allocators serve one
// namespace, so a name is never ambiguous. No pool has the name of another namespace, because it has a slash.
func (a *Allocator) poolOf(name string) core.PoolKey {
	return core.PoolKey{Namespace: a.o.Namespace, Name: strings.TrimPrefix(name, a.o.Namespace+"/")}
}

// Pools implements rest.Allocator.
func (a *Allocator) Pools() []*v1alpha1.SandboxPool { return a.watches.pools.All() }

// Route implements rest.Allocator.
func (a *Allocator) Route(ctx context.Context, id string) (core.RouteStatus, bool, error) {
	scope := scopeOf(ctx)
	return read(ctx, a, func(c core.View) (core.RouteStatus, bool) { return c.Route(id, scope) })
}

// Counts implements rest.Allocator.
func (a *Allocator) Counts(ctx context.Context) (map[string]core.Counts, error) {
	all, _, err := read(ctx, a, func(c core.View) (map[core.PoolKey]core.Counts, bool) { return c.AllCounts(), true })
	counts := make(map[string]core.Counts, len(all))
	for key, n := range all {
		counts[key.Name] = n
	}
	return counts, err
}

// Conditions implements rest.Allocator.
func (a *Allocator) Conditions(p *v1alpha1.SandboxPool, counts core.Counts) []metav1.Condition {
	return a.watches.pools.Status(p, counts).Conditions
}

// ScalePool implements rest.Allocator.
func (a *Allocator) ScalePool(ctx context.Context, name string, s rest.PoolScale) (*v1alpha1.SandboxPool, error) {
	pool, err := a.watches.pools.Scale(ctx, core.PoolKey{Namespace: a.o.Namespace, Name: name}, pools.Scale(s))
	switch {
	case err == nil:
		return pool, nil
	case apierrors.IsNotFound(err):
		return nil, apierror.New(apierror.PoolNotFound, "there is no pool %q", name)
	case errors.Is(err, pools.ErrChanged), apierrors.IsConflict(err):
		return nil, apierror.New(apierror.PoolChanged, "pool %q: %v; read it again", name, err)
	case apierrors.IsInvalid(err), apierrors.IsBadRequest(err):
		return nil, apierror.New(apierror.BadRequest, "pool %q: %s", name, problemOf(err))
	case apierrors.IsForbidden(err):
		return nil, apierror.New(apierror.NotImplemented, "the allocator may not change SandboxPools here: %v; use kubectl", err)
	}
	return nil, unanswered(err)
}

// problemOf is what the API server says is wrong with an object, without the words around it.
func problemOf(err error) string {
	var status apierrors.APIStatus
	if !errors.As(err, &status) || status.Status().Details == nil || len(status.Status().Details.Causes) == 0 {
		return err.Error()
	}
	var all []string
	for _, cause := range status.Status().Details.Causes {
		text := strings.TrimPrefix(cause.Message, "Invalid value: ")
		if !strings.HasPrefix(text, cause.Field) { // a rule of the object names its field itself
			text = cause.Field + ": " + text
		}
		all = append(all, text)
	}
	return strings.Join(all, "; ")
}

// Fences implements rest.Allocator.
func (a *Allocator) Fences(ctx context.Context, most int) ([]core.FenceStatus, int, error) {
	return read(ctx, a, func(c core.View) ([]core.FenceStatus, int) { return c.Fences(most) })
}

// Sessions implements rest.Allocator.
func (a *Allocator) Sessions(ctx context.Context, most int) ([]core.SessionStatus, int, error) {
	return read(ctx, a, func(c core.View) ([]core.SessionStatus, int) { return c.Sessions(most) })
}

// Teams implements rest.Allocator.
func (a *Allocator) Teams(ctx context.Context, also []string, most int) ([]core.TeamStatus, int, error) {
	return read(ctx, a, func(c core.View) ([]core.TeamStatus, int) { return c.Teams(also, most) })
}

// DeclareDead implements rest.Allocator. When ctx ends first, the declaration may take
// effect all the same. The call can be repeated.
func (a *Allocator) DeclareDead(ctx context.Context, session, by, reason string) (core.DeadDeclared, error) {
	return call[core.DeadDeclared](ctx, a, func(_ *term, token uint64) core.Event {
		return core.DeclareDead{Token: token, Session: session, By: by, Reason: reason}
	}, nil)
}

// read returns f's view of the core of the current term. It returns an apierror.NotLeader
// if this replica does not lead.
func read[T, U any](ctx context.Context, a *Allocator, f func(core.View) (T, U)) (first T, second U, err error) {
	t, err := a.leadingTerm()
	if err != nil {
		return first, second, notLeading(err)
	}
	if first, second, err = look(ctx, t.loop, f); errors.Is(err, errStepDown) {
		err = notLeading(err)
	}
	return first, second, err
}

// call submits an event that the core answers once, and returns the answer, which must be
// a T. It returns an apierror.NotLeader if this replica does not lead or stops leading. If its outcome is unknown, the
// event may take effect all the same, and the next leader then finds that in the journal.
// When ctx ends first, call calls cancelled, if not nil, with the answer if that has just
// come, and returns ctx's error.
func call[T core.Effect](ctx context.Context, a *Allocator, event func(t *term, token uint64) core.Event,
	cancelled func(t *term, token uint64, late core.Effect)) (T, error) {
	var none T
	t, err := a.leadingTerm()
	if err != nil {
		return none, notLeading(err)
	}
	token, answer := t.answers.expect()
	if answer == nil {
		return none, notLeading(errResigned)
	}
	ev := event(t, token)
	if !t.loop.put(ev) {
		t.answers.forget(token)
		return none, notLeading(errStepDown)
	}
	var e core.Effect
	select {
	case e = <-answer:
		t.answers.forget(token)
	case <-t.loop.done:
		if e = t.answers.forget(token); e == nil {
			err := notLeading(errStepDown)
			err.OutcomeUnknown = true
			return none, err
		}
	case <-ctx.Done():
		late := t.answers.forget(token)
		if cancelled != nil {
			cancelled(t, token, late)
		}
		return none, ctx.Err()
	}
	if got, ok := e.(T); ok {
		return got, nil
	}
	return none, fmt.Errorf("allocator: unexpected answer %T to %T", e, ev)
}

func notLeading(err error) *apierror.Error {
	return apierror.New(apierror.NotLeader, "%v; try again", err)
}

// answers matches the core's answers with the calls that wait for them, by token. Its
// methods may be called concurrently.
type answers struct {
	mu      sync.Mutex
	last    uint64
	waiting map[uint64]chan core.Effect // each holds its one answer
	drained chan struct{}               // closed when none waits any more; nil before drain
}

func newAnswers() *answers { return &answers{waiting: map[uint64]chan core.Effect{}} }

// expect returns a new token and the channel of its answer, nil after drain.
func (a *answers) expect() (uint64, <-chan core.Effect) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.drained != nil {
		return 0, nil
	}
	a.last++
	ch := make(chan core.Effect, 1)
	a.waiting[a.last] = ch
	return a.last, ch
}

// drain lets no further call wait. It returns a channel that is closed when none waits any more. It may be called once.
func (a *answers) drain() <-chan struct{} {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.drained = make(chan struct{})
	if len(a.waiting) == 0 {
		close(a.drained)
	}
	return a.drained
}

// forget drops a token. It returns the answer if that was delivered and not yet received.
func (a *answers) forget(token uint64) core.Effect {
	a.mu.Lock()
	defer a.mu.Unlock()
	ch := a.waiting[token]
	if delete(a.waiting, token); len(a.waiting) == 0 && a.drained != nil {
		close(a.drained)
	}
	select {
	case e := <-ch:
		return e
	default:
		return nil
	}
}

// deliver passes an answer on. It returns false if no call waits for it.
func (a *answers) deliver(token uint64, e core.Effect) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	ch, ok := a.waiting[token]
	if ok {
		ch <- e
	}
	return ok
}
