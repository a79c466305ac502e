package allocator

import (
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/guard"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/devcluster/stack"
)

// decides has the loop of a term carry out effects, as if its core had decided them.
func decides(t *testing.T, tm *term, effects ...core.Effect) {
	t.Helper()
	_, _, err := look(t.Context(), tm.loop, func(core.View) (any, any) {
		tm.loop.carryOut(now(time.Now), core.Tick{}, effects)
		return nil, nil
	})
	if err != nil {
		require.ErrorIs(t, err, errStepDown)
	}
}

var violating = core.DeletePod{Pod: core.PodKey{Namespace: "default", Name: "python-1", UID: "uid-1"}}

// Invariant: I3, I9
func TestViolatingEffectIsNeverCarriedOutAndEndsTheTerm(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		api := newMemoryAPI()
		pool := stack.DemoPool("default", "python", 0)
		pool.Finalizers = []string{v1alpha1.PoolFinalizer}
		api.put(t, "/apis/berth.sh/v1alpha1/namespaces/default/sandboxpools/python", pool)
		var ended time.Time
		for n := range violatedTerms {
			seen, logs := observer.New(zap.ErrorLevel)
			tm, _, done := start(t, newReplica(t, api, func(o *Options) { o.Log = zap.New(seen) }))
			require.False(t, tm.withholds)
			require.EqualValues(t, n, testutil.ToFloat64(tm.a.metrics.violatedTerms))
			decides(t, tm, violating, core.RecycleEnded{Outcome: core.Recycled})
			require.ErrorIs(t, <-done, errViolated)
			ended = time.Now()
			require.Zero(t, tm.deletes.waiting())
			require.Zero(t, testutil.ToFloat64(tm.a.metrics.recycles.WithLabelValues(core.Recycled)), "nothing of that step is carried out")
			lines := logs.FilterField(zap.String("assertion", guard.PodFenced)).All()
			require.Len(t, lines, 1)
			require.Equal(t, "pod python-1", lines[0].ContextMap()["subject"])
			require.Contains(t, lines[0].ContextMap()["dump"], "step.DeletePod")
		}

		var written atomic.Value
		seen, logs := observer.New(zap.ErrorLevel)
		tm, stop, done := start(t, newReplica(t, api, func(o *Options) {
			o.Log = zap.New(seen)
			o.Clients = fakeAPI(func(r *http.Request) (int, any) {
				if r.Method == http.MethodPatch {
					status, err := io.ReadAll(r.Body)
					require.NoError(t, err)
					written.Store(string(status))
					return 200, pool
				}
				return api.answer(r)
			}).clients(t)
		}))
		require.EqualValues(t, violatedTerms, testutil.ToFloat64(tm.a.metrics.violatedTerms))
		unknown := core.Sandbox{Binding: core.Binding{ID: "abcdefghijklmnopqrst"}, Pool: core.PoolKey{Namespace: "default", Name: "python"}}
		for range 2 {
			decides(t, tm, violating, core.WriteObject{Sandbox: unknown}, core.RecycleEnded{Outcome: core.Recycled})
		}
		require.Zero(t, tm.deletes.waiting())
		require.Zero(t, tm.objects.Backlog().Objects)
		require.EqualValues(t, 2, testutil.ToFloat64(tm.a.metrics.recycles.WithLabelValues(core.Recycled)), "everything else is carried out")
		require.EqualValues(t, 1, testutil.ToFloat64(tm.a.metrics.withheld.WithLabelValues(guard.PodFenced)))
		require.EqualValues(t, 1, testutil.ToFloat64(tm.a.metrics.withheld.WithLabelValues(guard.ClaimDurable)))
		require.Len(t, logs.FilterField(zap.String("assertion", guard.PodFenced)).All(), 1, "it is logged once")
		time.Sleep(2 * time.Second) // statuses are written every second
		require.Contains(t, written.Load(), `"reason":"Withheld"`)
		require.Contains(t, written.Load(), `"message":"sandbox abcde...: `)
		stop()
		require.NoError(t, <-done)

		time.Sleep(time.Until(ended.Add(violatedWithin)))
		tm, stop, done = start(t, newReplica(t, api))
		require.False(t, tm.withholds, "the ends are long ago")
		require.Zero(t, tm.journal.log.Stats().UnsettledBytes)
		stop()
		require.NoError(t, <-done)
	})
}

// Invariant: P11
func TestViolationEndsTheTermWithoutTheJournal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		api := newMemoryAPI()
		var refuses atomic.Bool
		a := newReplica(t, api, func(o *Options) {
			o.Clients = fakeAPI(func(r *http.Request) (int, any) {
				if refuses.Load() && r.Method == http.MethodPut && strings.Contains(r.URL.Path, "/journalslots/") {
					return 403, nil
				}
				return api.answer(r)
			}).clients(t)
		})
		tm, _, done := start(t, a)
		refuses.Store(true)
		began := time.Now()
		decides(t, tm, violating)
		require.ErrorIs(t, <-done, errViolated)
		require.Equal(t, endWait, time.Since(began).Round(time.Second), "the journal was refused for so long")
	})
}
