package allocator

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/berth-sandbox/berth/allocator/controlserver"
	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/core/step"
	"github.com/berth-sandbox/berth/allocator/core/teams"
	"github.com/berth-sandbox/berth/allocator/events"
	"github.com/berth-sandbox/berth/allocator/history"
	"github.com/berth-sandbox/berth/allocator/pools"
	"github.com/berth-sandbox/berth/allocator/rest"
	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/internal/bootclock"
)

// leading is a replica that leads, whose loop the test plays.
func leading(t *testing.T) (*Allocator, *term) {
	a := &Allocator{limits: &teamLimits{}, lock: &timedLock{duration: time.Hour}, watches: &watches{pools: &pools.Pools{}}, changed: make(chan struct{})}
	a.o.Namespace = poolKey.Namespace
	a.lock.renewed.Store(int64(bootclock.Now()))
	a.control = newControl(t)
	var err error
	a.metrics, err = newMetrics(prometheus.NewRegistry(), a)
	require.NoError(t, err)
	a.serving, a.stopServing = context.WithCancel(t.Context())
	t.Cleanup(a.stopServing)
	a.answering, a.stopAnswering = context.WithCancel(t.Context())
	t.Cleanup(a.stopAnswering)
	tm := &term{number: 1, a: a, answers: newAnswers(), loop: newTestLoop(t, nil), events: events.New(1), history: history.New(time.Now())}
	a.setTerm(tm)
	return a, tm
}

func newControl(t *testing.T) *controlserver.Server {
	t.Helper()
	s, err := controlserver.New(controlserver.Options{
		MaxStale: time.Minute, LeaderAddress: func() string { return "" }, Log: zap.NewNop(),
	})
	require.NoError(t, err)
	return s
}

// claiming claims in the background and returns the claim that reached the loop.
func claiming(ctx context.Context, a *Allocator, tm *term) (core.Claim, <-chan error) {
	done := make(chan error, 1)
	go func() {
		_, err := a.Claim(ctx, poolKey.Name, core.Claim{})
		done <- err
	}()
	return (<-tm.loop.in).(core.Claim), done
}

func TestClaimOfACancelledCallerIsAbandoned(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, tm := leading(t)
		ctx, cancel := context.WithCancel(t.Context())
		claim, done := claiming(ctx, a, tm)
		require.Equal(t, poolKey, claim.Pool)
		cancel()
		require.ErrorIs(t, <-done, context.Canceled)
		require.Equal(t, core.ClaimAbandoned{Token: claim.Token}, <-tm.loop.in)
		require.False(t, tm.answers.deliver(claim.Token, core.Claimed{}))
	})
}

// The answer and the caller's end may come together. In either order the sandbox
// gets a caller or is released.
func TestClaimAnsweredDuringCancellationIsReleased(t *testing.T) {
	for range 20 {
		synctest.Test(t, func(t *testing.T) {
			a, tm := leading(t)
			ctx, cancel := context.WithCancel(t.Context())
			claim, done := claiming(ctx, a, tm)
			cancel()
			delivered := tm.answers.deliver(claim.Token, core.Claimed{Token: claim.Token, Sandbox: core.Sandbox{Binding: core.Binding{ID: "k3x9"}}})
			err := <-done
			synctest.Wait()
			switch {
			case err == nil:
				require.True(t, delivered)
				require.Empty(t, tm.loop.in)
			case delivered:
				require.Equal(t, core.Release{Scope: core.Scope{All: true}, ID: "k3x9", Reason: fact.ReasonCanceled}, <-tm.loop.in)
			default: // the loop releases it
				require.Equal(t, core.ClaimAbandoned{Token: claim.Token}, <-tm.loop.in)
			}
		})
	}
}

// Without an idempotency key nobody can ask for the sandboxes again.
// Invariant: P3
func TestClaimThatNobodyTakesIsReleased(t *testing.T) {
	both := []core.Sandbox{{Binding: core.Binding{ID: "k3x9"}}, {Binding: core.Binding{ID: "m4y8"}}}
	for name, c := range map[string]struct {
		claim  func(context.Context, *Allocator) error
		answer func(token uint64) core.Effect
		ids    []string
	}{
		"one sandbox": {
			func(ctx context.Context, a *Allocator) error {
				_, err := a.Claim(ctx, poolKey.Name, core.Claim{})
				return err
			},
			func(token uint64) core.Effect { return core.Claimed{Token: token, Sandbox: both[0]} },
			[]string{"k3x9"},
		},
		"a batch": {
			func(ctx context.Context, a *Allocator) error {
				_, _, err := a.ClaimBatch(ctx, poolKey.Name, core.Claim{Count: 2})
				return err
			},
			func(token uint64) core.Effect { return core.BatchClaimed{Token: token, Sandboxes: both} },
			[]string{"k3x9", "m4y8"},
		},
	} {
		released := func(t *testing.T, tm *term) {
			t.Helper()
			for _, id := range c.ids {
				synctest.Wait()
				select {
				case ev := <-tm.loop.in:
					require.Equal(t, core.Release{Scope: core.Scope{All: true}, ID: id, Reason: fact.ReasonCanceled}, ev)
				default:
					require.Fail(t, "it is not released", id)
				}
			}
		}
		t.Run(name+", the caller goes before the answer", func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				_, tm := leading(t)
				tm.other = newWorkers(zap.NewNop())
				ended := make(chan struct{})
				ctx, cancel := context.WithCancel(t.Context())
				go func() { tm.other.run(ctx, 1); close(ended) }()
				defer func() { cancel(); <-ended }()
				tm.do(c.answer(7))
				released(t, tm)
			})
		})
		t.Run(name+", the caller goes with the answer", func(t *testing.T) {
			for lost := false; !lost; { // the runtime chooses which of the two counts
				synctest.Test(t, func(t *testing.T) {
					a, tm := leading(t)
					ctx, cancel := context.WithCancel(t.Context())
					done := make(chan error, 1)
					go func() { done <- c.claim(ctx, a) }()
					token := (<-tm.loop.in).(core.Claim).Token
					cancel()
					delivered := tm.answers.deliver(token, c.answer(token))
					if err := <-done; err != nil && delivered {
						lost = true
						released(t, tm)
					}
				})
			}
		})
	}
}

func TestCallsFailWithNotLeaderWhenTheTermEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, tm := leading(t)
		calls := map[string]func() error{
			"claim":    func() error { _, err := a.Claim(t.Context(), "python", core.Claim{}); return err },
			"release":  func() error { _, _, err := a.Release(t.Context(), "k3x9", fact.ReasonKilled); return err },
			"sandbox":  func() error { _, _, err := a.Sandbox(t.Context(), "k3x9"); return err },
			"list":     func() error { _, err := a.List(t.Context(), rest.Query{Live: true}); return err },
			"fences":   func() error { _, _, err := a.Fences(t.Context(), 1); return err },
			"sessions": func() error { _, _, err := a.Sessions(t.Context(), 1); return err },
			"keep":     func() error { _, err := a.KeepAlive(t.Context(), "k3x9"); return err },
			"timeout":  func() error { _, err := a.SetTimeout(t.Context(), "k3x9", 1); return err },
			"network":  func() error { _, err := a.SetNetwork(t.Context(), "k3x9", core.EgressRules{}); return err },
			"active":   func() error { _, _, err := a.Activities(t.Context(), rest.Filter{}, 1); return err },
			"declare":  func() error { _, err := a.DeclareDead(t.Context(), "r", "ops", "burnt"); return err },
		}
		errs := make(chan error, 2*len(calls))
		for _, call := range calls {
			go func() { errs <- call() }()
		}
		synctest.Wait()
		close(tm.loop.done) // while they wait
		for range calls {
			var e *apierror.Error
			require.ErrorAs(t, <-errs, &e)
			require.Equal(t, apierror.NotLeader, e.Reason)
			require.Equal(t, 503, e.Code)
		}
		for name, call := range calls { // and after that
			var e *apierror.Error
			require.ErrorAs(t, call(), &e, name)
			require.Equal(t, apierror.NotLeader, e.Reason)
		}
		require.Empty(t, tm.answers.waiting, "who waited is still waited for")
	})
}

func TestDeclareDeadIsAnsweredByTheLoop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, tm := leading(t)
		answers, errs := make(chan core.DeadDeclared, 1), make(chan error, 1)
		declare := func(ctx context.Context) core.DeclareDead {
			go func() {
				answer, err := a.DeclareDead(ctx, "r", "ops", "its node burnt")
				answers <- answer
				errs <- err
			}()
			return (<-tm.loop.in).(core.DeclareDead)
		}
		ev := declare(t.Context())
		require.Equal(t, core.DeclareDead{Token: ev.Token, Session: "r", By: "ops", Reason: "its node burnt"}, ev)
		want := core.DeadDeclared{Token: ev.Token, Status: core.DeclareOK, Fences: 3}
		tm.do(want)
		require.Equal(t, want, <-answers)
		require.NoError(t, <-errs)

		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		declare(ctx)
		<-answers
		require.ErrorIs(t, <-errs, context.DeadlineExceeded)
		require.Empty(t, tm.answers.waiting)
	})
}

func TestDeclareDeadIsLoggedAsErrorAndCounted(t *testing.T) {
	a, tm := leading(t)
	var err error
	a.metrics, err = newMetrics(prometheus.NewRegistry(), a)
	require.NoError(t, err)
	seen, logs := observer.New(zap.WarnLevel)
	tm.log = zap.New(seen)
	tm.do(core.SessionDeclaredDead{Session: "r", From: "10.1.0.1", Declaration: core.Declaration{By: "ops", Reason: "its node burnt"}, Fences: 3})
	require.InDelta(t, 1, testutil.ToFloat64(a.metrics.declaredDead), 0)
	require.Equal(t, 1, logs.Len())
	require.Equal(t, zap.ErrorLevel, logs.All()[0].Level)
	require.Equal(t, map[string]any{"router": "r", "address": "10.1.0.1", "by": "ops", "reason": "its node burnt", "fences": int64(3)}, logs.All()[0].ContextMap())
}

func TestReplicaWithAnUncertainLeaseDoesNotLead(t *testing.T) {
	a, _ := leading(t)
	require.True(t, a.Leader().Here)
	a.lock.renewed.Store(int64(bootclock.Now() - time.Hour))
	require.False(t, a.Leader().Here)
	require.Error(t, a.Ready())
	require.Error(t, a.Leads())
	_, err := a.Claim(t.Context(), "python", core.Claim{})
	var e *apierror.Error
	require.ErrorAs(t, err, &e)
	require.Equal(t, apierror.NotLeader, e.Reason)
}

func TestReplicaIsReadyWhenALeaderCanAnswer(t *testing.T) {
	self, other := replica{"10.0.0.1:9090", "10.0.0.1:8081"}, replica{"10.0.0.2:9090", "10.0.0.2:8081"}
	for name, c := range map[string]struct {
		holder       replica // of the lease
		term         bool    // this one leads and has recovered
		ready, leads bool
		elected      bool
		passOnTo     string
	}{
		"no replica leads":      {},
		"another one leads":     {holder: other, ready: true, passOnTo: "10.0.0.2:8081"},
		"leads":                 {holder: self, term: true, ready: true, leads: true},
		"has not yet recovered": {holder: self, elected: true},
		"another one leads that does not say where its API is": {holder: replicaOf("10.0.0.2:9090_x7k2")},
	} {
		t.Run(name, func(t *testing.T) {
			a, tm := leading(t)
			a.o.ControlAddress, a.o.APIAddress = self.control, self.api
			a.leader = c.holder
			if !c.term {
				tm = nil
			}
			a.setTerm(tm)
			l := a.Leader()
			require.Equal(t, c.leads, l.Here)
			require.Equal(t, c.elected, l.Elected)
			require.Equal(t, c.passOnTo, l.Address, "a replica must not pass calls on to itself")
			require.Equal(t, c.ready, a.Ready() == nil, "%v", a.Ready())
			require.Equal(t, c.leads, a.Leads() == nil, "%v", a.Leads())
		})
	}
}

func TestKeyedClaimSurvivesItsCancelledCaller(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, tm := leading(t)
		tm.releaseUncollected(core.Sandbox{Binding: core.Binding{ID: "k3x9", IdempotencyKey: "k"}})
		require.Empty(t, tm.loop.in)
		for _, key := range []string{"", fact.InternalKeys + "k"} {
			tm.releaseUncollected(core.Sandbox{Binding: core.Binding{ID: "k3x9", IdempotencyKey: key}})
			require.Equal(t, core.Release{Scope: core.Scope{All: true}, ID: "k3x9", Reason: fact.ReasonCanceled}, <-tm.loop.in)
		}
	})
}

func TestCloseAnswersWaitingClaims(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, tm := leading(t)
		var err error
		a.metrics, err = newMetrics(prometheus.NewRegistry(), a)
		require.NoError(t, err)
		tm.loop.do = func(e core.Effect) {
			if _, ok := e.(core.ClaimRefused); ok { // what else is done needs an API server
				tm.do(e)
			}
		}
		stop := tm.loop.running(t)
		defer stop()
		// A pool whose pod takes long, so that claims wait.
		tm.Submit(core.PoolSeen{Pool: core.Pool{Key: poolKey, Warm: 1, DefaultPort: 80, Template: "t"}})
		done := make(chan error, 1)
		go func() {
			_, err := a.Claim(t.Context(), poolKey.Name, core.Claim{Wait: time.Hour})
			done <- err
		}()
		synctest.Wait()
		select {
		case err := <-done:
			t.Fatalf("it does not wait: %v", err)
		default:
		}
		a.Close(t.Context())
		synctest.Wait()
		select {
		case err := <-done:
			var e *apierror.Error
			require.ErrorAs(t, err, &e)
			require.Equal(t, apierror.NotLeader, e.Reason)
			require.Contains(t, e.Message, "shutting down")
		default:
			t.Error("the claim waits on")
		}
	})
}

func TestRefusedClaimsNameTheReason(t *testing.T) {
	gone := core.Sandbox{Binding: core.Binding{ID: "k3x9"}, Cause: core.Cause{Reason: fact.ReasonEndTime}}
	failed := core.Sandbox{Binding: core.Binding{ID: "k3x9"}, Cause: core.Cause{Reason: fact.ReasonStartFailed, Message: "it answered 500"}}
	for _, c := range []struct {
		refused core.ClaimRefused
		code    int
		reason  apierror.Reason
		says    string
		sandbox string
		retry   int
	}{
		{core.ClaimRefused{Why: core.NoPool}, 404, apierror.PoolNotFound, `"python"`, "", 0},
		{core.ClaimRefused{Why: core.PoolEmpty, Counts: core.Counts{Pending: 2, Claimed: 3, Releasing: 4, Waiting: 5}, Warm: 6}, 429, apierror.PoolEmpty, "within 7s: 2 are starting, 3 claimed, 4 being released, 5 claims waiting; try again, wait longer (waitTimeout, or --claim-wait of the allocators) or raise spec.warm of the pool", "", 1},
		{core.ClaimRefused{Why: core.PoolEmpty, Counts: core.Counts{Claimed: 6}, Warm: 2, MaxPods: 6}, 429, apierror.PoolEmpty, "maxPods 6 is reached: 0 starting, 6 claimed, 0 being released, 0 claims waiting; try again, release sandboxes or raise spec.maxPods of the pool", "", 1},
		{
			core.ClaimRefused{Why: core.PoolEmpty, Counts: core.Counts{Trouble: core.Trouble{Pod: "a-1", Why: "exit code 1"}}, Warm: 2},
			429, apierror.PoolEmpty, "0 are starting, 0 claimed, 0 being released, pods end before they can be used (a-1: exit code 1), 0 claims waiting; try again, mend the pod template", "", 1,
		},
		{
			core.ClaimRefused{Why: core.PoolEmpty, Counts: core.Counts{Pending: 2, Stuck: core.Stuck{Reason: core.PodImagePull, Pod: "a-1", Why: "not found", Pods: 1}}, Warm: 2},
			429, apierror.PoolEmpty, "2 are starting, 0 claimed, 0 being released, pod a-1 is not ready (ImagePullFailed: not found), 0 claims waiting", "", 1,
		},
		{core.ClaimRefused{Why: core.PoolEmpty}, 429, apierror.PoolEmpty, "warm is 0, and none is starting, 0 claims waiting; try again, raise spec.warm of the pool", "", 1},
		{core.ClaimRefused{Why: core.PoolEmpty, Counts: core.Counts{Pending: 1}}, 429, apierror.PoolEmpty, "within 7s: 1 are starting", "", 1}, // for the claims that wait
		{core.ClaimRefused{Why: core.PoolEmpty, Warm: 2, Paused: true}, 429, apierror.PoolEmpty, "it is paused: 0 claimed, 0 being released, 0 claims waiting; try again, set spec.paused of the pool to false", "", 1},
		{core.ClaimRefused{Why: core.LineFull, Counts: core.Counts{Waiting: 5}}, 429, apierror.PoolEmpty, "5 wait (--claim-queue)", "", 1},
		{core.ClaimRefused{Why: core.NotAccepted, Problem: "hostNetwork is set"}, 409, apierror.PoolNotAccepted, "hostNetwork is set", "", 0},
		{
			core.ClaimRefused{Why: core.OverLimit, Excess: teams.Excess{Team: "ann", Limit: teams.MaxSandboxes, Value: 10, Used: 9}},
			429, apierror.QuotaExceeded, `team "ann": maxSandboxes 10 is reached: 9 are live`, "", 1,
		},
		{
			core.ClaimRefused{Why: core.OverLimit, Excess: teams.Excess{Team: "ann", Limit: teams.MaxWaiting, Value: 2, Used: 2}},
			429, apierror.QuotaExceeded, `team "ann": maxWaiting 2 is reached: 2 claims wait`, "", 1,
		},
		{
			core.ClaimRefused{Why: core.OverLimit, Excess: teams.Excess{Team: "ann", Limit: teams.ClaimsPerSecond, Value: 0.5, Wait: 1200 * time.Millisecond}},
			429, apierror.RateLimited, `team "ann": claimsPerSecond 0.5 is reached; try again in 1.2s`, "", 2,
		},
		{core.ClaimRefused{Why: core.KeyReused}, 409, apierror.KeyReused, "Idempotency-Key", "", 0},
		{core.ClaimRefused{Why: core.KeyEnded, Sandbox: gone}, 410, apierror.SandboxGone, "EndTime", "k3x9", 0},
		{core.ClaimRefused{Why: core.Overloaded}, 503, apierror.Overloaded, "try again", "", 1},
		{core.ClaimRefused{Why: core.Ending}, 503, apierror.NotLeader, "shutting down", "", 1},
		{core.ClaimRefused{Why: core.StartFailed, Sandbox: gone}, 502, apierror.StartFailed, "EndTime", "k3x9", 0},
		{core.ClaimRefused{Why: core.StartFailed, Sandbox: failed}, 502, apierror.StartFailed, "StartFailed (it answered 500)", "k3x9", 0},
		{core.ClaimRefused{Why: core.NotConfigured, Problem: "it answered 500"}, 502, apierror.StartFailed, "within 1s (it answered 500), or", "", 0},
	} {
		e := refused("python", core.Claim{Wait: 7 * time.Second}, c.refused)
		require.Equal(t, c.code, e.Code)
		require.Equal(t, c.reason, e.Reason)
		require.Equal(t, c.sandbox, e.SandboxID)
		require.Equal(t, c.retry, e.RetryAfter)
		require.Contains(t, e.Message, c.says)
	}
}

func TestBatchLargerThanItsPoolIsABadRequest(t *testing.T) {
	for _, c := range []struct {
		count, atLeast int
		field          string
	}{{9, 5, "atLeast: 5: "}, {9, 9, "count: 9: "}, {9, 0, "count: 9: "}} {
		e := refused("python", core.Claim{Count: c.count, AtLeast: c.atLeast}, core.ClaimRefused{Why: step.TooMany, MaxPods: 4})
		require.Equal(t, apierror.BadRequest, e.Reason)
		require.Zero(t, e.RetryAfter, "a repetition would be refused too")
		require.Equal(t, c.field+`pool "python" has 4 pods at most; ask for 4 at most, or raise spec.maxPods of the pool`, e.Message)
	}
}

func TestMissingPoolIsAnsweredWithThoseThatExist(t *testing.T) {
	var all []*v1alpha1.SandboxPool
	require.Equal(t, "there is no pool yet", named(all))
	for i := range 12 {
		p := &v1alpha1.SandboxPool{}
		p.Name = fmt.Sprintf("p%02d", 11-i)
		if all = append(all, p); i == 1 {
			require.Equal(t, "the pools are p10, p11", named(all))
		}
	}
	require.Equal(t, "the pools are p00, p01, p02, p03, p04, p05, p06, p07, p08, p09 and 2 more", named(all))
}

func TestRefusedChangeSaysOnlyWhatIsWrong(t *testing.T) {
	cause := func(field, message string) *apierrors.StatusError {
		e := apierrors.NewInvalid(schema.GroupKind{Group: "berth.sh", Kind: "SandboxPool"}, "demo", nil)
		e.ErrStatus.Details.Causes = []metav1.StatusCause{{Field: field, Message: message}}
		return e
	}
	require.Equal(t, "spec.maxWarm: must be at least spec.warm",
		problemOf(fmt.Errorf("patch pool demo: %w", cause("spec", "Invalid value: spec.maxWarm: must be at least spec.warm"))))
	require.Equal(t, "spec.warm: -1 is too small", problemOf(cause("spec.warm", "Invalid value: -1 is too small")))
	require.Equal(t, "broken", problemOf(errors.New("broken")))
}

func TestKeepAliveIsAnsweredByTheLoop(t *testing.T) {
	for name, c := range map[string]struct {
		call  func(context.Context, *Allocator) (core.CallStatus, error)
		event func(token uint64) core.Event
	}{
		"keep-alive": {
			func(ctx context.Context, a *Allocator) (core.CallStatus, error) { return a.KeepAlive(ctx, "k3x9") },
			func(token uint64) core.Event { return core.KeepAlive{Token: token, ID: "k3x9"} },
		},
		"set timeout": {
			func(ctx context.Context, a *Allocator) (core.CallStatus, error) {
				return a.SetTimeout(ctx, "k3x9", time.Minute)
			},
			func(token uint64) core.Event { return core.SetTimeout{Token: token, ID: "k3x9", Lifetime: time.Minute} },
		},
		"set network": {
			func(ctx context.Context, a *Allocator) (core.CallStatus, error) {
				e, err := a.SetNetwork(ctx, "k3x9", core.EgressRules{Deny: []string{"0.0.0.0/0"}})
				return e.Status, err
			},
			func(token uint64) core.Event {
				return core.SetNetwork{Token: token, ID: "k3x9", Rules: core.EgressRules{Deny: []string{"0.0.0.0/0"}}}
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a, tm := leading(t)
				type result struct {
					status core.CallStatus
					err    error
				}
				done := make(chan result, 1)
				call := func(ctx context.Context) uint64 {
					go func() {
						status, err := c.call(ctx, a)
						done <- result{status, err}
					}()
					ev := (<-tm.loop.in).(core.Event)
					var token uint64
					switch ev := ev.(type) {
					case core.KeepAlive:
						token = ev.Token
					case core.SetTimeout:
						token = ev.Token
					case core.SetNetwork:
						token = ev.Token
					}
					require.NotZero(t, token, "no call could be answered")
					require.Equal(t, c.event(token), ev)
					return token
				}
				tm.do(core.SandboxCallAnswered{Token: call(t.Context()), Status: core.CallGone})
				require.Equal(t, result{core.CallGone, nil}, <-done)

				ctx, cancel := context.WithCancel(t.Context())
				call(ctx)
				cancel()
				require.ErrorIs(t, (<-done).err, context.Canceled)
				tm.do(core.ReleaseAnswered{Token: call(t.Context())})
				require.ErrorContains(t, (<-done).err, "unexpected answer")
				require.Empty(t, tm.answers.waiting)
			})
		})
	}
}

func TestActivitiesMatchTheFilter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, tm := leading(t)
		ids := []string{"aa1", "aa2", "ab1"}
		c, err := core.New(core.Config{
			Term: 1, MaxStale: time.Minute, ConnectWindow: time.Second, Lease: time.Second, Linger: -1,
			NewID: func() (id string) { id, ids = ids[0], ids[1:]; return id }, NewSuffix: func() string { return "x" },
		}, now(time.Now))
		require.NoError(t, err)
		st := core.State{Nodes: []string{"n"}}
		for i, pool := range []string{"python", "python", "node"} {
			key := core.PoolKey{Namespace: poolKey.Namespace, Name: pool}
			if i != 1 {
				st.Pools = append(st.Pools, core.Pool{Key: key, Warm: 2, DefaultPort: 80, Template: "t"})
			}
			name := fmt.Sprintf("%s-%d", pool, i)
			st.Pods = append(st.Pods, core.Pod{
				Key: core.PodKey{Namespace: poolKey.Namespace, Name: name, UID: name}, Pool: pool, Node: "n",
				IP: netip.AddrFrom4([4]byte{10, 0, 0, byte(i + 1)}), Template: "t", Ready: true,
			})
		}
		_, err = c.Recover(st)
		require.NoError(t, err)
		for i, pool := range []string{"python", "python", "node"} {
			c.Step(now(time.Now), core.Claim{Token: uint64(i + 1), Pool: core.PoolKey{Namespace: poolKey.Namespace, Name: pool}})
			c.Step(now(time.Now), core.Written{})
			c.Step(now(time.Now), core.WriterReady{})
		}
		tm.loop.core = c
		ctx, stop := context.WithCancel(t.Context())
		go tm.loop.run(ctx)
		defer func() { stop(); <-tm.loop.done }()
		for _, c := range []struct {
			which rest.Filter
			want  []string
		}{
			{rest.Filter{}, []string{"aa1", "aa2", "ab1"}},
			{rest.Filter{ID: "aa2"}, []string{"aa2"}},
			{rest.Filter{IDs: []string{"ab1", "zz", "aa1"}}, []string{"ab1", "aa1"}},
			{rest.Filter{IDs: []string{"ab1", "aa1"}, Pool: "node"}, []string{"ab1"}},
			{rest.Filter{Prefix: "aa"}, []string{"aa1", "aa2"}},
			{rest.Filter{Pool: "node"}, []string{"ab1"}},
			{rest.Filter{Pool: "python", Prefix: "ab"}, nil},
			{rest.Filter{Pool: "ruby"}, nil},
		} {
			list, others, err := a.Activities(t.Context(), c.which, 10)
			require.NoError(t, err)
			require.Zero(t, others)
			var got []string
			for _, s := range list {
				got = append(got, s.Sandbox.ID)
			}
			require.Equal(t, c.want, got, "%+v", c.which)
		}
		list, others, err := a.Activities(t.Context(), rest.Filter{}, 2)
		require.NoError(t, err)
		require.Len(t, list, 2)
		require.Equal(t, 1, others)
	})
}
