package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/e2e/history"
	"github.com/berth-sandbox/berth/internal/bootclock"
)

// claiming claims until ctx ends or the pool is deleted, and returns the sandboxes. Every claim is granted, or refused
// because the pool is empty or is deleted.
func (e *env) claiming(ctx context.Context) (got []openapi.Sandbox) {
	for ctx.Err() == nil {
		body := fmt.Sprintf(`{"templateID":%q,"waitTimeout":1}`, e.pool)
		a, err := e.callAPI(http.MethodPost, "/sandboxes", body, e.site.key())
		if err != nil {
			e.t.Errorf("claim: %v", err)
			return got
		}
		switch a.code {
		case http.StatusCreated:
			got = append(got, sandboxOf(e.t, a))
		case http.StatusTooManyRequests:
			require.Equal(e.t, apierror.PoolEmpty, a.refusal(e.t).Reason)
		case http.StatusNotFound:
			require.Equal(e.t, apierror.PoolNotFound, a.refusal(e.t).Reason)
			return got
		default:
			e.t.Errorf("claim: %d %s", a.code, a.body)
		}
	}
	return got
}

// The CRD can be deleted then, after an uninstall too.
func TestRecordsOfADeletedPoolCanBeDeletedAtOnce(t *testing.T) {
	e := start(t, 1)
	var sb openapi.Sandbox
	e.eventually(func() error {
		a, err := e.callAPI(http.MethodPost, "/sandboxes", fmt.Sprintf(`{"templateID":%q,"waitTimeout":10}`, e.pool),
			e.site.key(), "Idempotency-Key", "k-"+e.pool)
		if err == nil && a.code == http.StatusCreated {
			sb = sandboxOf(t, a)
			return nil
		}
		return errors.Join(err, fmt.Errorf("%d %s", a.code, a.body))
	})
	e.release(sb.SandboxID)
	gone := func(resource, name string) {
		t.Helper()
		require.NoError(t,
			e.clients.Berth.Delete().Namespace(e.site.namespace()).Resource(resource).Name(name).Do(t.Context()).Error())
		e.eventually(func() error {
			err := e.clients.Berth.Get().Namespace(e.site.namespace()).Resource(resource).Name(name).Do(t.Context()).Error()
			if apierrors.IsNotFound(err) {
				return nil
			}
			return fmt.Errorf("%s %s is still there: %w", resource, name, err)
		})
	}
	gone("sandboxpools", e.pool)
	gone("sandboxes", sb.SandboxID) // its key holds for 10 minutes
}

// Each request is answered by the pod of its sandbox or with the end of its sandbox.
func TestPoolDeletedUnderTrafficEndsInOrder(t *testing.T) {
	const senders, claimers = 2, 2
	e := start(t, 4)
	e.patchPool(e.pool, `{"spec":{"maxPods":10}}`)
	client := e.client()
	var known []openapi.Sandbox
	for range 4 {
		known = append(known, e.claim())
	}
	for _, s := range known {
		e.reachable(client, s)
	}
	run := newHistory(t, known)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var all sync.WaitGroup
	var sent atomic.Int64
	for range senders {
		all.Go(func() {
			for ctx.Err() == nil {
				e.send(t.Context(), client, run, known)
				sent.Add(1)
			}
		})
	}
	claimed := make([][]openapi.Sandbox, claimers)
	for i := range claimed {
		all.Go(func() { claimed[i] = e.claiming(ctx) })
	}
	e.eventually(func() error {
		if sent.Load() < 100 || e.readPool(e.pool).Status.Claimed < int32(len(known))+2 {
			return errors.New("there is no traffic yet")
		}
		return nil
	})
	released := bootclock.Now()
	require.NoError(t, e.deletePool(t.Context(), e.pool))
	e.eventually(func() error {
		get := e.clients.Berth.Get().Namespace(e.site.namespace()).Resource("sandboxpools").Name(e.pool)
		err := get.Do(t.Context()).Error()
		if apierrors.IsNotFound(err) {
			return nil
		}
		return fmt.Errorf("the pool is still there: %w", err)
	})
	require.Empty(t, e.pods(nil), "the finalizer went before the pods")
	for _, s := range known {
		run.History.Add(history.Event{
			Kind: history.Release, Sandbox: s.SandboxID, Code: http.StatusNoContent, Began: released, Ended: bootclock.Now(),
		})
	}
	stop()
	all.Wait()

	served, refused := 0, 0
	for _, r := range run.Judge().Events {
		if r.Kind != history.Request {
			continue
		}
		require.Empty(t, r.Error)
		switch r.Code {
		case http.StatusOK:
			served++
		case http.StatusGone:
			require.EqualValues(t, apierror.SandboxGone, r.Reason)
			refused++
		default:
			t.Errorf("%d %s", r.Code, r.Reason)
		}
	}
	require.Positive(t, served)
	require.Positive(t, refused)
	for _, more := range claimed {
		known = append(known, more...)
	}
	for _, s := range known {
		e.endsBecause(s.SandboxID, fact.ReasonPoolDeleted)
	}
	t.Logf("%d sandboxes, %d requests served and %d refused", len(known), served, refused)
}
