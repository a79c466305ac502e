package allocator

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/api/apierror"
)

// The lease is given back after Close, so the outcome of these calls would be unknown.
// Invariant: P24
func TestCloseWaitsForTheCallsInProgress(t *testing.T) {
	for name, answered := range map[string]bool{"answered": true, "never answered": false} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a, tm := leading(t)
				token, _ := tm.answers.expect()
				began, closed := time.Now(), make(chan struct{})
				go func() {
					defer close(closed)
					a.Close(t.Context())
				}()
				synctest.Wait()
				require.Equal(t, core.Closing{}, <-tm.loop.in)
				require.False(t, a.Leader().Here, "no call begins any more")
				require.Error(t, a.Ready())
				_, _, err := a.Release(t.Context(), "k3x9", "Killed")
				var e *apierror.Error
				require.ErrorAs(t, err, &e)
				require.Equal(t, apierror.NotLeader, e.Reason)
				require.False(t, e.OutcomeUnknown)
				require.Empty(t, tm.loop.in)
				select {
				case <-closed:
					t.Fatal("a call has no answer yet")
				default:
				}
				if answered {
					tm.answers.forget(token)
				}
				<-closed
				require.Equal(t, answered, time.Since(began) < closeWait)
			})
		})
	}
}

// Invariant: P24
func TestOutcomeOfACallThatTheTermHasNotAnsweredIsUnknown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, tm := leading(t)
		done := make(chan error, 1)
		go func() {
			_, _, err := a.Release(t.Context(), "k3x9", "Killed")
			done <- err
		}()
		synctest.Wait()
		close(tm.loop.done)
		var e *apierror.Error
		require.ErrorAs(t, <-done, &e)
		require.Equal(t, apierror.NotLeader, e.Reason)
		require.True(t, e.OutcomeUnknown)
	})
}

// Invariant: P24
func TestReplicaThatHasEndedKnowsTheNextLeader(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		api := newMemoryAPI()
		a := newReplica(t, api)
		_, stop, done := start(t, a)
		limit, over := context.WithTimeout(t.Context(), time.Minute)
		defer over()
		a.Close(limit)
		stop()
		require.NoError(t, <-done)
		l := a.Leader()
		require.False(t, l.Here || l.Elected || l.Address != "", "%+v", l)
		following, end := context.WithCancel(t.Context())
		followed := make(chan struct{})
		go func() {
			defer close(followed)
			a.Follow(following)
		}()
		time.Sleep(aloneAfter / 2)
		l = a.Leader()
		next := "10.0.0.2:9090_10.0.0.2:8081_x7k2"
		api.put(t, "/apis/coordination.k8s.io/v1/namespaces/default/leases/berth-allocator", coordinationv1.Lease{
			TypeMeta:   metav1.TypeMeta{APIVersion: "coordination.k8s.io/v1", Kind: "Lease"},
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "berth-allocator"},
			Spec:       coordinationv1.LeaseSpec{HolderIdentity: &next},
		})
		<-l.Changed
		require.Equal(t, "10.0.0.2:8081", a.Leader().Address)
		time.Sleep(2 * aloneAfter)
		require.NoError(t, a.Answering().Err())
		end()
		<-followed
		<-a.Answering().Done()
	})
}

// Invariant: P24
func TestReplicaWithoutASuccessorRefusesSoon(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newReplica(t, newMemoryAPI())
		_, stop, done := start(t, a)
		a.Close(t.Context())
		stop()
		require.NoError(t, <-done)
		began := time.Now()
		a.Follow(t.Context())
		require.Error(t, a.Answering().Err())
		require.LessOrEqual(t, time.Since(began), aloneAfter+time.Second)
	})
}

// Invariant: P24
func TestLeaderHasLeftSomeTimeAfterAnotherIsElected(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, _ := leading(t)
		one, again, two := "10.0.0.1:9090_10.0.0.1:8081_a", "10.0.0.1:9090_10.0.0.1:8081_b", "10.0.0.2:9090_10.0.0.2:8081_c"
		a.setLeader(one)
		first := a.Leader()
		a.setLeader(one)
		require.NoError(t, context.Cause(first.Left))
		a.setLeader("") // it has given the lease back, and may still answer
		time.Sleep(2 * lateAnswers)
		require.NoError(t, first.Left.Err())
		a.setLeader(again)
		second := a.Leader()
		require.Equal(t, first.Address, second.Address)
		require.NotSame(t, first.Left, second.Left, "a process at the same address")
		require.NoError(t, first.Left.Err())
		<-first.Left.Done()
		a.setLeader(two)
		<-second.Left.Done()
	})
}
