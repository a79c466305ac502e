package allocator

import (
	"context"
	"errors"
	"math"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/sandboxobjects"
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

// Invariant: I6
func TestAuditRepairsOnlyWhatTheWatchesMissed(t *testing.T) {
	now := time.Now()
	seen := func(version string, age time.Duration) core.Pod {
		return core.Pod{Key: podKey, Pool: poolKey.Name, Version: version, CreatedAt: now.Add(-age)}
	}
	foreign := seen("7", time.Hour)
	foreign.Pool = ""
	pods := func(version string) picture { return picture{pods: map[core.PodKey]string{podKey: version}} }
	pools := func(version string) picture {
		return picture{pools: map[core.PoolKey]string{poolKey: version}}
	}
	nodes := func(names ...string) picture {
		p := picture{nodes: map[string]bool{}}
		for _, name := range names {
			p.nodes[name] = true
		}
		return p
	}
	recorded := picture{records: map[string]bool{"x": true}}
	pool := func(version string) core.Pool { return core.Pool{Key: poolKey, Version: version} }
	for name, c := range map[string]struct {
		before, after picture
		listed        listing
		want          core.Event
	}{
		"nothing":                        {},
		"a pod as it is":                 {before: pods("7"), after: pods("7"), listed: listing{pods: []core.Pod{seen("7", time.Hour)}}},
		"a pod that no watch reported":   {listed: listing{pods: []core.Pod{seen("7", time.Hour)}}, want: core.PodSeen{Pod: seen("7", time.Hour)}},
		"a pod of no pool":               {listed: listing{pods: []core.Pod{foreign}}},
		"a pod that is just being made":  {listed: listing{pods: []core.Pod{seen("7", time.Second)}}},
		"a pod that was reported since":  {after: pods("7"), listed: listing{pods: []core.Pod{seen("7", time.Hour)}}},
		"a pod that went since":          {before: pods("7"), listed: listing{pods: []core.Pod{seen("7", time.Hour)}}},
		"a pod that has changed":         {before: pods("7"), after: pods("7"), listed: listing{pods: []core.Pod{seen("8", time.Hour)}}, want: core.PodSeen{Pod: seen("8", time.Hour)}},
		"a pod that changed since":       {before: pods("7"), after: pods("9"), listed: listing{pods: []core.Pod{seen("8", time.Hour)}}},
		"a pod that is gone":             {before: pods("7"), after: pods("7"), want: core.PodGone{Key: podKey}},
		"a pod that came after the list": {after: pods("7")},
		"a pod that is reported as gone": {before: pods("7")},
		"another pod of its name":        {before: pods("7"), after: pods("7"), listed: listing{pods: []core.Pod{seen("7", time.Hour), {Key: core.PodKey{Namespace: podKey.Namespace, Name: podKey.Name, UID: "another"}, CreatedAt: now}}}},
		"a pool as it is":                {before: pools("7"), after: pools("7"), listed: listing{pools: []core.Pool{pool("7")}, version: "9"}},
		"a pool that no watch reported":  {listed: listing{pools: []core.Pool{pool("7")}}, want: core.PoolSeen{Pool: pool("7")}},
		"a pool that has changed":        {before: pools("7"), after: pools("7"), listed: listing{pools: []core.Pool{pool("8")}}, want: core.PoolSeen{Pool: pool("8")}},
		"a pool that changed since":      {before: pools("7"), after: pools("9"), listed: listing{pools: []core.Pool{pool("8")}}},
		"a pool that is gone":            {before: pools("7"), after: pools("7"), listed: listing{version: "9"}, want: core.PoolGone{Key: poolKey, Version: "9"}},
		"a pool that was made since":     {after: pools("10"), listed: listing{version: "9"}},
		"a node as it is":                {before: nodes("n"), after: nodes("n"), listed: listing{nodes: []string{"n"}}},
		"a node that can be used again":  {before: nodes(), after: nodes(), listed: listing{nodes: []string{"n"}}, want: core.NodeSeen{Name: "n", Usable: true}},
		"a node that cannot be used":     {before: nodes("n"), after: nodes("n"), want: core.NodeSeen{Name: "n"}},
		"a node that was reported since": {before: nodes("n"), after: nodes()},
		"an object as it is":             {before: recorded, after: recorded, listed: listing{records: sandboxobjects.Listed{Sandboxes: []core.Sandbox{{Binding: core.Binding{ID: "x"}}}}}},
		"an object that cannot be read":  {before: recorded, after: recorded, listed: listing{records: sandboxobjects.Listed{Unreadable: map[string]error{"x": errors.New("")}}}},
		"an object that is gone":         {before: recorded, after: recorded, want: core.ObjectGone{ID: "x"}},
		"an object that was made since":  {after: recorded},
		"an object reported as gone":     {before: recorded},
	} {
		t.Run(name, func(t *testing.T) {
			var events []core.Event
			for _, r := range repairs(c.before, c.after, c.listed, now) {
				require.NotEmpty(t, r.what)
				events = append(events, r.ev)
			}
			if c.want == nil {
				require.Empty(t, events)
			} else {
				require.Equal(t, []core.Event{c.want}, events)
			}
		})
	}
}

func TestAuditsRepeatAndCountTheirRepairs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var lists atomic.Int32
		clients := fakeAPI(func(r *http.Request) (int, any) {
			switch path := r.URL.Path; {
			case strings.HasSuffix(path, "/sandboxes"):
				return 200, v1alpha1.SandboxList{}
			case strings.HasSuffix(path, "/sandboxpools"):
				return 200, v1alpha1.SandboxPoolList{ListMeta: metav1.ListMeta{ResourceVersion: "20"}}
			case strings.HasSuffix(path, "/nodes"):
				return 200, corev1.NodeList{ListMeta: metav1.ListMeta{ResourceVersion: "20"}}
			}
			if lists.Add(1)%2 == 0 {
				return 500, nil
			}
			return 200, corev1.PodList{ListMeta: metav1.ListMeta{ResourceVersion: "20"}}
		}).clients(t)
		a, err := New(Options{
			Clients: clients, Namespace: "default", ControlAddress: "127.0.0.1:1", APIAddress: "127.0.0.1:2",
			MaxStale: time.Minute, ConnectWindow: time.Second, Policy: baseline(t), Metrics: prometheus.NewRegistry(), Log: zap.NewNop(), PublicScheme: "http", PublicHost: "x",
		})
		require.NoError(t, err)
		a.lock.renewed.Store(math.MaxInt64) // the lease is renewed all the time
		tm := &term{a: a, loop: newTestLoop(t, nil), log: zap.NewNop(), found: newWorkers(zap.NewNop())}
		tm.loop.step(core.PodSeen{Pod: pod("10")}) // which is not there
		ctx, stop := context.WithCancel(t.Context())
		running, auditing, reporting := make(chan struct{}), make(chan struct{}), make(chan struct{})
		go func() { tm.found.run(ctx, 1); close(reporting) }()
		go func() { tm.loop.run(ctx); close(running) }()
		go func() { tm.audit(ctx); close(auditing) }()
		known := func() int {
			p, err := tm.picture(t.Context())
			require.NoError(t, err)
			return len(p.pods) + len(p.nodes)
		}
		require.Equal(t, 2, known(), "the pod and its node")
		time.Sleep(auditEvery + auditWait - time.Second)
		require.Equal(t, 2, known())
		time.Sleep(2 * time.Second)
		require.Zero(t, known())
		require.InDelta(t, 2, testutil.ToFloat64(a.metrics.repairs), 0)
		time.Sleep(10 * auditEvery)
		require.Greater(t, lists.Load(), int32(10))
		require.InDelta(t, 2, testutil.ToFloat64(a.metrics.repairs), 0, "what is as it should be is repaired")
		stop()
		<-running
		<-auditing
		<-reporting
	})
}
