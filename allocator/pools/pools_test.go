package pools_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"go.uber.org/zap/zaptest"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/rest"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/kube"
	"github.com/berth-sandbox/berth/allocator/pods"
	"github.com/berth-sandbox/berth/allocator/pools"
	"github.com/berth-sandbox/berth/api/crd"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/devcluster"
	"github.com/berth-sandbox/berth/devcluster/stack"
)

var shared = devcluster.Shared{Options: devcluster.Options{CRDs: crd.All()}}

func TestMain(m *testing.M) { goleak.VerifyTestMain(shared.Tests(m)) }

// sink is a core that remembers the events it gets and has no pods.
type sink struct {
	mu     sync.Mutex
	events []core.Event
}

func (s *sink) Submit(ev core.Event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.events = append(s.events, ev)
}

// last is the latest event about a pool, nil before the first.
func (s *sink) last(name string) (last core.Event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, ev := range s.events {
		switch e := ev.(type) {
		case core.PoolSeen:
			if e.Pool.Key.Name == name {
				last = ev
			}
		case core.PoolGone:
			if e.Key.Name == name {
				last = ev
			}
		}
	}
	return last
}

func TestPortsReachTheCoreInOrder(t *testing.T) {
	var list v1alpha1.SandboxPoolList
	for _, ports := range [][]int32{{65535, 80, 8080}, nil} {
		pool := stack.DemoPool("default", fmt.Sprintf("opens-%d", len(ports)), 1)
		pool.Spec.Ports = ports
		list.Items = append(list.Items, *pool)
	}
	apiServer := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(list)
	}))
	defer apiServer.Close()
	clients, err := kube.NewClients(&rest.Config{Host: apiServer.URL, Transport: &http.Transport{DisableKeepAlives: true}}, 0, 0)
	require.NoError(t, err)
	p := newPools(t, clients, func(core.Event) {})
	seen, _, err := p.List(t.Context())
	require.NoError(t, err)
	require.Len(t, seen, 2)
	require.Equal(t, []uint16{80, 8080, 65535}, seen[0].Ports)
	require.Empty(t, seen[1].Ports)
	require.EqualValues(t, 8080, seen[1].DefaultPort)
}

// listed returns what the core gets of pools that an API server lists.
func listed(t *testing.T, list v1alpha1.SandboxPoolList) []core.Pool {
	t.Helper()
	apiServer := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(list)
	}))
	t.Cleanup(apiServer.Close)
	clients, err := kube.NewClients(&rest.Config{Host: apiServer.URL, Transport: &http.Transport{DisableKeepAlives: true}}, 0, 0)
	require.NoError(t, err)
	seen, _, err := newPools(t, clients, func(core.Event) {}).List(t.Context())
	require.NoError(t, err)
	return seen
}

func TestPoolWithWrongSnapshotBoundsIsRefused(t *testing.T) {
	small := resource.MustParse("1000")
	wrong := map[string]*v1alpha1.PoolSnapshot{
		"":                             nil,
		"spec.snapshot.paths[0]: ":     {Paths: []string{"home"}},
		"spec.snapshot.paths[1]: ":     {Paths: []string{"/a", "/proc/1"}},
		"spec.snapshot.maxBytes: 1k: ": {MaxBytes: &small},
	}
	var list v1alpha1.SandboxPoolList
	fields := slices.Sorted(maps.Keys(wrong))
	for i, field := range fields {
		pool := stack.DemoPool("default", fmt.Sprintf("keeps-%d", i), 1)
		pool.Spec.Snapshot = wrong[field]
		list.Items = append(list.Items, *pool)
	}
	seen := listed(t, list)
	require.Len(t, seen, len(fields))
	for i, field := range fields {
		require.Contains(t, seen[i].Refused, field)
		require.Equal(t, field != "", strings.Contains(seen[i].Refused, "spec.snapshot"), seen[i].Refused)
	}
}

func TestPoolThatCannotSleepIsRefusedOnlyIfItAsks(t *testing.T) {
	probe := &corev1.Probe{ProbeHandler: corev1.ProbeHandler{TCPSocket: &corev1.TCPSocketAction{Port: intstr.FromInt32(80)}}}
	var list v1alpha1.SandboxPoolList
	after := &metav1.Duration{Duration: 10 * time.Minute}
	asks := []v1alpha1.SandboxPoolSpec{
		{}, {OnIdle: v1alpha1.OnEndSleep}, {OnTimeout: v1alpha1.OnEndSleep}, {StopAfter: after}, {MaxAsleep: new(int32(7))},
		{OnIdle: v1alpha1.OnEndSleep, StopAfter: after, MaxAsleep: new(int32(7))},
	}
	fit := len(asks) - 1
	for i, ask := range asks {
		pool := stack.DemoPool("default", fmt.Sprintf("sleeps-%d", i), 1)
		pool.Spec.Agent = &v1alpha1.PoolAgent{Enabled: true, Port: 49983}
		pool.Spec.OnIdle, pool.Spec.OnTimeout, pool.Spec.StopAfter, pool.Spec.MaxAsleep = ask.OnIdle, ask.OnTimeout, ask.StopAfter, ask.MaxAsleep
		if i != fit {
			pool.Spec.Template.Spec.Containers[0].LivenessProbe = probe
		}
		list.Items = append(list.Items, *pool)
	}
	seen := listed(t, list)
	require.Len(t, seen, len(asks))
	for i, field := range []string{
		"", "spec.onIdle: Sleep: ", "spec.onTimeout: Sleep: ", "spec.stopAfter: sandboxes of this pool cannot sleep",
		"spec.maxAsleep: sandboxes of this pool cannot sleep", "",
	} {
		const at = "spec.template.spec.containers[0].livenessProbe: "
		if field == "" {
			require.NotContains(t, seen[i].Refused, "Sleep", "pool %d", i)
		} else {
			require.Contains(t, seen[i].Refused, field)
			require.Contains(t, seen[i].Refused, at)
		}
		if i != fit {
			require.Contains(t, seen[i].CannotSleep, at)
		} else {
			require.Empty(t, seen[i].CannotSleep)
			require.Equal(t, after.Duration, seen[i].Sleep.StopAfter)
			require.Equal(t, 7, seen[i].MaxAsleep)
		}
	}
}

func TestPoolThatStopsSandboxesNeedsAStore(t *testing.T) {
	clients, err := kube.NewClients(&rest.Config{}, 0, 0)
	require.NoError(t, err)
	pool := stack.DemoPool("default", "stops", 1)
	pool.Spec.Agent = &v1alpha1.PoolAgent{Enabled: true, Port: 49983}
	for _, c := range []struct {
		field string
		store bool
	}{{"spec.stopAfter", true}, {"spec.stopAfter", false}, {"spec.maxAsleep", true}, {"spec.maxAsleep", false}} {
		if pool.Spec.StopAfter, pool.Spec.MaxAsleep = nil, new(int32(7)); c.field == "spec.stopAfter" {
			pool.Spec.StopAfter, pool.Spec.MaxAsleep = &metav1.Duration{Duration: time.Minute}, nil
		}
		p, err := pools.New(pools.Options{
			Options: kube.Options{Clients: clients, Namespace: "default", Submit: func(core.Event) {}, Log: zaptest.NewLogger(t)},
			Policy:  policy(t, pools.PolicyBaseline), Settings: pods.Settings{ServeOn: time.Second, AgentImage: "agent", AgentKey: "key"}, Stops: c.store,
		})
		require.NoError(t, err)
		status := p.Status(pool, core.Counts{})
		require.Equal(t, !c.store, status.TemplateRefused())
		require.Equal(t, !c.store, degraded(v1alpha1.PoolStopRefused)(status), "%+v", status.Conditions)
		if !c.store {
			require.Contains(t, meta.FindStatusCondition(status.Conditions, v1alpha1.PoolDegraded).Message, c.field+": the allocators have no object store")
		}
	}
}

func TestPoolBehindAGatewayNeedsOneAndAnAgent(t *testing.T) {
	clients, err := kube.NewClients(&rest.Config{}, 0, 0)
	require.NoError(t, err)
	const noGateway, noAgent = "start them with --egress-proxy", "set spec.agent.enabled"
	for _, c := range []struct {
		gateway, agent bool
		deny, want     string
	}{
		{true, true, "", ""}, {false, true, "", noGateway}, {true, false, "", noAgent}, {true, true, "10", `spec.egress.deny[0]`},
	} {
		pool := stack.DemoPool("default", "behind", 1)
		pool.Spec.Egress = &v1alpha1.PoolEgress{Mode: v1alpha1.EgressGateway}
		pool.Spec.Agent = &v1alpha1.PoolAgent{Enabled: c.agent, Port: 49983}
		if c.deny != "" {
			pool.Spec.Egress.Deny = []string{c.deny}
		}
		p, err := pools.New(pools.Options{
			Options: kube.Options{Clients: clients, Namespace: "default", Submit: func(core.Event) {}, Log: zaptest.NewLogger(t)},
			Policy:  policy(t, pools.PolicyBaseline), Egress: c.gateway,
			Settings: pods.Settings{ServeOn: time.Second, AgentImage: "agent", AgentKey: "key"},
		})
		require.NoError(t, err)
		status := p.Status(pool, core.Counts{})
		require.Equal(t, c.want != "", status.TemplateRefused())
		require.Equal(t, c.want != "", degraded(v1alpha1.PoolEgressRefused)(status), "%+v", status.Conditions)
		require.Contains(t, meta.FindStatusCondition(status.Conditions, v1alpha1.PoolDegraded).Message, c.want)
		pool.Spec.Egress.Mode = v1alpha1.EgressNone
		status = p.Status(pool, core.Counts{})
		require.False(t, status.TemplateRefused())
	}
}

// A list of the audit is read from the store, and takes a while. The watch goes on meanwhile.
func TestListKeepsWhatTheWatchHasSeenSince(t *testing.T) {
	object := func(version string) *v1alpha1.SandboxPool {
		pool := stack.DemoPool("default", "python", 3)
		pool.TypeMeta = metav1.TypeMeta{APIVersion: v1alpha1.GroupVersion().String(), Kind: "SandboxPool"}
		pool.Finalizers, pool.ResourceVersion, pool.UID = []string{v1alpha1.PoolFinalizer}, version, "u"
		return pool
	}
	var list atomic.Pointer[v1alpha1.SandboxPoolList]
	listed := func(version string, items ...v1alpha1.SandboxPool) {
		list.Store(&v1alpha1.SandboxPoolList{
			TypeMeta: metav1.TypeMeta{APIVersion: v1alpha1.GroupVersion().String(), Kind: "SandboxPoolList"},
			ListMeta: metav1.ListMeta{ResourceVersion: version}, Items: items,
		})
	}
	listed("9", *object("9"))
	apiServer := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		switch {
		case r.URL.Query().Get("sendInitialEvents") != "":
			http.Error(w, "list, then watch", http.StatusBadRequest)
		case r.URL.Query().Get("watch") != "":
			_ = json.NewEncoder(w).Encode(map[string]any{"type": "MODIFIED", "object": object("12")})
			w.(http.Flusher).Flush()
			<-r.Context().Done()
		default:
			_ = json.NewEncoder(w).Encode(list.Load())
		}
	}))
	defer apiServer.Close()
	clients, err := kube.NewClients(&rest.Config{Host: apiServer.URL, Transport: &http.Transport{DisableKeepAlives: true}}, 0, 0)
	require.NoError(t, err)
	p := newPools(t, clients, (&sink{}).Submit)
	key := core.PoolKey{Namespace: "default", Name: "python"}
	version := func() string {
		if pool, ok := p.Seen(key); ok {
			return pool.ResourceVersion
		}
		return ""
	}
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var running errgroup.Group
	running.Go(func() error { return p.Run(ctx) })
	require.Eventually(t, func() bool { return version() == "12" }, time.Minute, time.Millisecond)
	for _, c := range []struct {
		why, version string
		items        []v1alpha1.SandboxPool
		want         string
	}{
		{"an older state", "9", []v1alpha1.SandboxPool{*object("9")}, "12"},
		{"before the pool was made", "8", nil, "12"},
		{"after its deletion", "13", nil, ""},
		{"before its deletion", "12", []v1alpha1.SandboxPool{*object("12")}, "12"},
		{"after its deletion, again", "13", nil, ""},
	} {
		listed(c.version, c.items...)
		_, _, err = p.List(t.Context())
		require.NoError(t, err)
		require.Equal(t, c.want, version(), c.why)
	}
	stop()
	require.NoError(t, running.Wait())
}

// A leader that is slow for some seconds must not say that all pods are gone.
// Invariant: I6
func TestUnknownCountsChangeNoStatus(t *testing.T) {
	pool := stack.DemoPool("default", "python", 3)
	pool.Finalizers, pool.ResourceVersion, pool.UID = []string{v1alpha1.PoolFinalizer}, "1", "u"
	pool.Status.Warm = 3
	patched := make(chan string, 10)
	apiServer := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		switch {
		case r.Method == http.MethodPatch:
			body, _ := io.ReadAll(r.Body)
			patched <- string(body)
			_ = json.NewEncoder(w).Encode(pool)
		case r.URL.Query().Get("sendInitialEvents") != "":
			http.Error(w, "list, then watch", http.StatusBadRequest)
		case r.URL.Query().Get("watch") != "":
			w.(http.Flusher).Flush()
			<-r.Context().Done()
		default:
			_ = json.NewEncoder(w).Encode(v1alpha1.SandboxPoolList{
				TypeMeta: metav1.TypeMeta{APIVersion: v1alpha1.GroupVersion().String(), Kind: "SandboxPoolList"}, ListMeta: metav1.ListMeta{ResourceVersion: "1"}, Items: []v1alpha1.SandboxPool{*pool},
			})
		}
	}))
	defer apiServer.Close()
	clients, err := kube.NewClients(&rest.Config{Host: apiServer.URL, Transport: &http.Transport{DisableKeepAlives: true}}, 0, 0)
	require.NoError(t, err)
	p := newPools(t, clients, (&sink{}).Submit)
	ctx, stop := context.WithCancel(t.Context())
	var running errgroup.Group
	running.Go(func() error { return p.Run(ctx) })
	asked := 0
	running.Go(func() error {
		p.Maintain(ctx, func(context.Context, core.PoolKey) (core.Counts, bool) {
			if asked++; asked <= 2 {
				return core.Counts{}, false
			}
			return core.Counts{Warm: 2}, true
		})
		return nil
	})
	var first string
	select {
	case first = <-patched:
	case <-time.After(time.Minute):
	}
	stop()
	require.NoError(t, running.Wait())
	require.Contains(t, first, `"warm":2`, "only what is known is shown")
	require.GreaterOrEqual(t, asked, 3, "what is not known is asked for again")
}

// watched is an API server with the pools of its namespace default being watched.
type watched struct {
	*testing.T
	clients *kube.Clients
	pools   *pools.Pools
	sink    *sink
	said    *said
}

// said is what the core says of every pool.
type said struct {
	mu     sync.Mutex
	counts core.Counts
}

// counted says what the core counts from now on.
func (w *watched) counted(c core.Counts) {
	w.said.mu.Lock()
	defer w.said.mu.Unlock()
	w.said.counts = c
}

func watch(t *testing.T) *watched {
	cluster := shared.Start(t)
	clients, err := kube.NewClients(cluster.RestConfig(), 0, 0)
	require.NoError(t, err)
	w := &watched{T: t, clients: clients, sink: &sink{}, said: &said{}}
	w.pools = newPools(t, clients, w.sink.Submit)
	_, _, err = w.pools.List(t.Context())
	require.NoError(t, err)
	ctx, stop := context.WithCancel(t.Context())
	var running errgroup.Group
	running.Go(func() error { return w.pools.Run(ctx) })
	running.Go(func() error {
		w.pools.Maintain(ctx, func(context.Context, core.PoolKey) (core.Counts, bool) {
			w.said.mu.Lock()
			defer w.said.mu.Unlock()
			return w.said.counts, true
		})
		return nil
	})
	t.Cleanup(func() { stop(); require.NoError(t, running.Wait()) })
	return w
}

// in is the same for a subtest.
func (w *watched) in(t *testing.T) *watched {
	return &watched{T: t, clients: w.clients, pools: w.pools, sink: w.sink, said: w.said}
}

func (w *watched) create(pool *v1alpha1.SandboxPool) {
	w.Helper()
	require.NoError(w, w.clients.Berth.Post().Namespace("default").Resource("sandboxpools").Body(pool).Do(w.Context()).Error())
}

// change replaces a part of the template's spec.
func (w *watched) change(name string, spec map[string]any) {
	w.Helper()
	w.patch(name, map[string]any{"template": map[string]any{"spec": spec}})
}

// patch replaces a part of the spec.
func (w *watched) patch(name string, spec map[string]any) {
	w.Helper()
	require.NoError(w, w.tryPatch(name, spec))
}

func (w *watched) tryPatch(name string, spec map[string]any) error {
	w.Helper()
	raw, err := json.Marshal(map[string]any{"spec": spec})
	require.NoError(w, err)
	return w.clients.Berth.Patch(types.MergePatchType).Namespace("default").Resource("sandboxpools").Name(name).Body(raw).Do(w.Context()).Error()
}

// bounds are those of the lives of a pool's sandboxes.
type bounds struct {
	idle, lifetime, startup time.Duration
	minBytes                uint64
	busy                    core.BusyProbe
}

func boundsOf(p core.Pool) bounds {
	return bounds{p.IdleTimeout, p.MaxLifetime, p.StartupTimeout, p.MinBytes, p.BusyProbe}
}

// until waits for a status, which is written once a second.
func (w *watched) until(name, what string, is func(v1alpha1.SandboxPoolStatus) bool) v1alpha1.SandboxPoolStatus {
	w.Helper()
	var pool v1alpha1.SandboxPool
	require.Eventually(w, func() bool {
		err := w.clients.Berth.Get().Namespace("default").Resource("sandboxpools").Name(name).Do(w.Context()).Into(&pool)
		return err == nil && pool.Status.ObservedGeneration == pool.Generation && is(pool.Status)
	}, time.Minute, 20*time.Millisecond, what)
	return pool.Status
}

// events waits for n Events of a pool, which are written after the status, and returns all of them in
// the order of their texts.
func (w *watched) events(name string, n int, but ...string) (all []string) {
	w.Helper()
	require.Eventually(w, func() bool {
		list, err := w.clients.Kubernetes.CoreV1().Events("default").List(w.Context(), metav1.ListOptions{
			FieldSelector: "involvedObject.kind=SandboxPool,involvedObject.name=" + name,
		})
		if err != nil {
			return false
		}
		all = nil
		for _, e := range list.Items {
			if said := e.Type + " " + e.Reason + ": " + e.Message; !slices.Contains(but, said) {
				all = append(all, said)
			}
		}
		return len(all) >= n
	}, time.Minute, 20*time.Millisecond)
	slices.Sort(all)
	return all
}

// known waits until the core knows whether the pool is refused.
func (w *watched) known(name string, refused bool) core.Pool {
	w.Helper()
	var pool core.Pool
	require.Eventually(w, func() bool {
		seen, ok := w.sink.last(name).(core.PoolSeen)
		pool = seen.Pool
		return ok && (pool.Refused != "") == refused
	}, time.Minute, 10*time.Millisecond)
	return pool
}

// degraded is the condition Degraded with that reason.
func degraded(reason string) func(v1alpha1.SandboxPoolStatus) bool {
	return func(s v1alpha1.SandboxPoolStatus) bool {
		c := meta.FindStatusCondition(s.Conditions, v1alpha1.PoolDegraded)
		return c != nil && c.Reason == reason && (c.Status == metav1.ConditionFalse) == (reason == v1alpha1.PoolHealthy)
	}
}

func TestPools(t *testing.T) {
	w := watch(t)

	t.Run("a refused template reaches the core and the status of the pool, and so does its mend", func(t *testing.T) {
		w := w.in(t)
		w.counted(core.Counts{Target: 2, Wanted: 2})
		pool := stack.DemoPool("default", "refused", 2)
		pool.Spec.Template.Spec.HostPID = true
		w.create(pool)
		key := core.PoolKey{Namespace: "default", Name: "refused"}
		refused := w.known("refused", true)
		require.Equal(t, key, refused.Key)
		require.Equal(t, 2, refused.Warm)
		status := w.until("refused", "the status does not say it", degraded(v1alpha1.PoolPodSecurity))
		accepted := meta.FindStatusCondition(status.Conditions, v1alpha1.PoolDegraded)
		require.Equal(t, "PodSecurity", accepted.Reason)
		require.Contains(t, accepted.Message, "hostPID=true")
		require.Contains(t, accepted.Message, "--pod-security")
		require.Equal(t, "PodSecurity", meta.FindStatusCondition(status.Conditions, v1alpha1.PoolReady).Reason)
		require.Equal(t, []string{"Warning PodSecurity: " + accepted.Message}, w.events("refused", 1))
		_, ok := w.pools.Get(key)
		require.False(t, ok, "a pod can be made from it")
		listed, _, err := w.pools.List(t.Context()) // as the next leader does
		require.NoError(t, err)
		require.Len(t, listed, 1)
		require.Contains(t, listed[0].Refused, "hostPID=true")

		w.change("refused", map[string]any{"hostPID": nil})
		require.NotEqual(t, refused.Template, w.known("refused", false).Template)
		status = w.until("refused", "the mend is not seen", degraded(v1alpha1.PoolHealthy))
		accepted = meta.FindStatusCondition(status.Conditions, v1alpha1.PoolDegraded)
		require.Empty(t, accepted.Message)
		got, ok := w.pools.Get(key)
		require.True(t, ok)
		require.False(t, got.Spec.Template.Spec.HostPID)

		w.change("refused", map[string]any{"containers": []any{map[string]any{
			"name": "sandbox", "image": "none", "lifecycle": map[string]any{"preStop": map[string]any{"exec": map[string]any{"command": []any{"true"}}}},
		}}})
		w.known("refused", true)
		status = w.until("refused", "the status does not name the handler", degraded(v1alpha1.PoolPreStop))
		accepted = meta.FindStatusCondition(status.Conditions, v1alpha1.PoolDegraded)
		require.Equal(t, "PreStop", accepted.Reason)
		require.Contains(t, accepted.Message, "containers[0].lifecycle.preStop.exec")

		w.change("refused", map[string]any{"containers": []any{map[string]any{"name": "sandbox", "image": "none"}}})
		w.known("refused", false)
		w.change("refused", map[string]any{"automountServiceAccountToken": true})
		w.known("refused", true)
		w.until("refused", "the status does not say it again", degraded(v1alpha1.PoolPodSecurity))
		_, ok = w.pools.Get(key)
		require.False(t, ok, "a pod can be made from it")
	})

	t.Run("bounds of a life reach the core", func(t *testing.T) {
		w := w.in(t)
		w.create(stack.DemoPool("default", "bounds", 1))
		seen := w.known("bounds", false)
		require.Equal(t, bounds{idle: time.Hour, startup: 2 * time.Minute}, boundsOf(seen), "the defaults")
		w.patch("bounds", map[string]any{
			"idleTimeoutSeconds": 0, "activity": "Bytes", "maxLifetimeSeconds": 86400, "startupTimeoutSeconds": 5, "busyProbe": map[string]any{"port": 9000},
		})
		require.Eventually(t, func() bool {
			return boundsOf(w.known("bounds", false)) == (bounds{minBytes: 1024, lifetime: 24 * time.Hour, startup: 5 * time.Second, busy: core.BusyProbe{Port: 9000, Path: "/"}})
		}, time.Minute, 10*time.Millisecond)
		w.patch("bounds", map[string]any{"minBytesPerMinute": 2048, "busyProbe": map[string]any{"port": 9001, "path": "/busy"}})
		require.Eventually(t, func() bool {
			return boundsOf(w.known("bounds", false)) == (bounds{minBytes: 2048, lifetime: 24 * time.Hour, startup: 5 * time.Second, busy: core.BusyProbe{Port: 9001, Path: "/busy"}})
		}, time.Minute, 10*time.Millisecond)
		w.patch("bounds", map[string]any{"idleTimeoutSeconds": 60, "activity": "Requests", "maxLifetimeSeconds": nil, "startupTimeoutSeconds": nil, "busyProbe": nil})
		require.Eventually(t, func() bool {
			return boundsOf(w.known("bounds", false)) == (bounds{idle: time.Minute, startup: 2 * time.Minute})
		}, time.Minute, 10*time.Millisecond)
	})

	t.Run("what is out of bounds is refused by its name", func(t *testing.T) {
		w := w.in(t)
		w.create(stack.DemoPool("default", "strict", 1))
		for _, c := range []struct {
			field string
			value any
			says  string // "": it is taken
		}{
			{"idleTimeoutSeconds", 0, ""}, {"idleTimeoutSeconds", 5, ""}, {"idleTimeoutSeconds", 31536000, ""}, {"idleTimeoutSeconds", nil, ""},
			{"idleTimeoutSeconds", 1, "spec.idleTimeoutSeconds: must be 0, for no idle timeout, or at least 5"},
			{"idleTimeoutSeconds", 4, "spec.idleTimeoutSeconds: must be 0, for no idle timeout, or at least 5"},
			{"idleTimeoutSeconds", -1, "spec.idleTimeoutSeconds"}, {"idleTimeoutSeconds", 31536001, "spec.idleTimeoutSeconds"},
			{"idleTimeoutSeconds", "60", "spec.idleTimeoutSeconds"}, {"idleTimeoutSeconds", 7.5, "spec.idleTimeoutSeconds"},
			{"readyWithinSeconds", 0, ""}, {"readyWithinSeconds", 10, ""}, {"readyWithinSeconds", 86400, ""}, {"readyWithinSeconds", nil, ""},
			{"readyWithinSeconds", 1, "spec.readyWithinSeconds: must be 0, for no bound, or at least 10"},
			{"readyWithinSeconds", 9, "spec.readyWithinSeconds: must be 0, for no bound, or at least 10"},
			{"readyWithinSeconds", -1, "spec.readyWithinSeconds"}, {"readyWithinSeconds", 86401, "spec.readyWithinSeconds"},
			{"activity", "Requests", ""}, {"activity", "Bytes", ""}, {"activity", nil, ""},
			{"activity", "Ignored", "spec.activity"}, {"activity", "", "spec.activity"}, {"activity", true, "spec.activity"},
			{"minBytesPerMinute", 1, ""}, {"minBytesPerMinute", 1 << 30, ""}, {"minBytesPerMinute", nil, ""},
			{"minBytesPerMinute", 0, "spec.minBytesPerMinute"}, {"minBytesPerMinute", 1<<30 + 1, "spec.minBytesPerMinute"}, {"minBytesPerMinute", "1k", "spec.minBytesPerMinute"},
			{"busyProbe", map[string]any{"port": 9000}, "spec.busyProbe: needs spec.maxLifetimeSeconds"},
			{"maxLifetimeSeconds", 1, ""}, {"maxLifetimeSeconds", 31536000, ""},
			{"busyProbe", map[string]any{"port": 9000, "path": "/busy?x=1"}, ""}, {"maxLifetimeSeconds", nil, "spec.busyProbe: needs spec.maxLifetimeSeconds"},
			{"busyProbe", map[string]any{"port": nil}, "spec.busyProbe.port"}, {"busyProbe", map[string]any{"port": 0}, "spec.busyProbe.port"}, {"busyProbe", map[string]any{"port": 65536}, "spec.busyProbe.port"},
			{"busyProbe", map[string]any{"path": "busy"}, "spec.busyProbe.path"}, {"busyProbe", map[string]any{"path": ""}, "spec.busyProbe.path"}, {"busyProbe", map[string]any{"path": "/a b"}, "spec.busyProbe.path"},
			{"busyProbe", nil, ""}, {"maxLifetimeSeconds", nil, ""},
			{"maxLifetimeSeconds", 0, "spec.maxLifetimeSeconds"}, {"maxLifetimeSeconds", 31536001, "spec.maxLifetimeSeconds"}, {"maxLifetimeSeconds", "1h", "spec.maxLifetimeSeconds"},
			{"stopAfter", "10m", "spec.stopAfter: needs spec.agent"}, {"agent", map[string]any{"enabled": true}, ""},
			{"stopAfter", "1s", ""}, {"stopAfter", "1h30m", ""}, {"stopAfter", "8760h", ""}, {"agent", nil, "spec.stopAfter: needs spec.agent"},
			{"stopAfter", "999ms", "spec.stopAfter: must be 1s to 8760h"}, {"stopAfter", "8761h", "spec.stopAfter: must be 1s to 8760h"},
			{"stopAfter", "-1s", "spec.stopAfter: must be 1s"}, {"stopAfter", "0", "spec.stopAfter: must be 1s"},
			{"stopAfter", "10 minutes", "spec.stopAfter"}, {"stopAfter", "", "spec.stopAfter"}, {"stopAfter", 600, "spec.stopAfter"},
			{"stopAfter", nil, ""}, {"maxAsleep", 1, ""}, {"agent", nil, "spec.maxAsleep: needs spec.agent"},
			{"maxAsleep", 100000, ""}, {"maxAsleep", 0, "spec.maxAsleep"}, {"maxAsleep", 100001, "spec.maxAsleep"}, {"maxAsleep", "7", "spec.maxAsleep"},
			{"maxAsleep", nil, ""}, {"agent", nil, ""}, {"maxAsleep", 1, "spec.maxAsleep: needs spec.agent"},
			{"startupTimeoutSeconds", 1, ""}, {"startupTimeoutSeconds", 3600, ""}, {"startupTimeoutSeconds", nil, ""},
			{"startupTimeoutSeconds", 0, "spec.startupTimeoutSeconds"}, {"startupTimeoutSeconds", 3601, "spec.startupTimeoutSeconds"},
		} {
			err := w.tryPatch("strict", map[string]any{c.field: c.value})
			if c.says == "" {
				require.NoError(t, err, "%s: %v", c.field, c.value)
			} else {
				require.ErrorContains(t, err, c.says, "%s: %v", c.field, c.value)
			}
		}
	})

	t.Run("whatever there is to say, the status is written", func(t *testing.T) {
		w := w.in(t)
		pool := stack.DemoPool("default", "verbose", 1)
		for i := range 530 {
			pool.Spec.Template.Spec.Containers = append(pool.Spec.Template.Spec.Containers, container(
				fmt.Sprintf("%s-%d", strings.Repeat("c", 58), i), corev1.Container{SecurityContext: privileged()}))
		}
		w.create(pool)
		w.until("verbose", "no status is written", degraded(v1alpha1.PoolPodSecurity))
		w.change("verbose", map[string]any{"containers": []any{map[string]any{"name": "sandbox", "image": "none"}}})
		w.counted(core.Counts{Target: 1, Wanted: 1})
		w.pools.CreateResult(core.PoolKey{Namespace: "default", Name: "verbose"}, fmt.Errorf("%s", strings.Repeat("\u00e9", 40<<10)))
		w.until("verbose", "no status is written", degraded(v1alpha1.PoolCreateFailed))
		events := w.events("verbose", 2, "Normal Recovered: it was: PodSecurity") // if a status is written in between
		require.Len(t, events, 2)
		require.Regexp(t, "^Warning CreateFailed: ", events[0])
		require.Regexp(t, "^Warning PodSecurity: ", events[1])
	})

	t.Run("nothing is kept of a pool that is gone", func(t *testing.T) {
		w := w.in(t)
		key := core.PoolKey{Namespace: "default", Name: "again"}
		w.create(stack.DemoPool("default", "again", 1))
		w.until("again", "no status is written", degraded(v1alpha1.PoolHealthy))
		w.counted(core.Counts{Target: 1, Wanted: 1})
		w.pools.CreateResult(key, apierrors.NewBadRequest("of the first one"))
		w.until("again", "the status does not show the error", degraded(v1alpha1.PoolCreateFailed))
		require.NoError(t, w.clients.Berth.Delete().Namespace("default").Resource("sandboxpools").Name("again").Do(t.Context()).Error())
		_, ok := w.pools.Get(key)
		require.True(t, ok, "it is there until it is drained")
		require.NoError(t, w.pools.Drained(t.Context(), key))
		require.Eventually(t, func() bool { gone, ok := w.sink.last("again").(core.PoolGone); return ok && gone.Key == key }, time.Minute, 10*time.Millisecond)
		_, ok = w.pools.Get(key)
		require.False(t, ok, "a pod can be made from it")

		w.create(stack.DemoPool("default", "again", 1))
		status := w.until("again", "no status is written", degraded(v1alpha1.PoolHealthy))
		require.False(t, degraded(v1alpha1.PoolCreateFailed)(status), "the error of another pool of that name: %+v", status.Conditions)
	})
}

// The status is written in the very moment in which the last pod goes.
func TestFinalizerIsRemovedFromAChangedPool(t *testing.T) {
	var patches atomic.Int32
	now := metav1.Now()
	apiServer := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		if r.Method == http.MethodPatch && patches.Add(1) == 1 { // a status was written since it was read
			w.WriteHeader(http.StatusConflict)
			_ = json.NewEncoder(w).Encode(metav1.Status{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}, Status: "Failure", Code: 409, Reason: metav1.StatusReasonConflict})
			return
		}
		pool := stack.DemoPool("default", "python", 1)
		pool.DeletionTimestamp, pool.Finalizers, pool.ResourceVersion = &now, []string{v1alpha1.PoolFinalizer}, "7"
		_ = json.NewEncoder(w).Encode(pool)
	}))
	defer apiServer.Close()
	clients, err := kube.NewClients(&rest.Config{Host: apiServer.URL, Transport: &http.Transport{DisableKeepAlives: true}}, 0, 0)
	require.NoError(t, err)
	p := newPools(t, clients, func(core.Event) {})
	key := core.PoolKey{Namespace: "default", Name: "python"}
	require.True(t, apierrors.IsConflict(p.Drained(t.Context(), key)), "it is asked for again")
	require.NoError(t, p.Drained(t.Context(), key))
	require.EqualValues(t, 2, patches.Load(), "the finalizer is still there")
}

func TestTroubleOfAPoolMakesFewEvents(t *testing.T) {
	w := watch(t)
	w.create(stack.DemoPool("default", "ends", 3))
	n := core.Counts{Target: 3, Wanted: 3}
	expect := func(c core.Counts, kind, reason, text string) v1alpha1.SandboxPoolStatus {
		t.Helper()
		w.counted(c)
		return w.until("ends", text, func(s v1alpha1.SandboxPoolStatus) bool {
			c := meta.FindStatusCondition(s.Conditions, kind)
			return c != nil && c.Reason == reason && strings.Contains(c.Message, text)
		})
	}
	expect(n, v1alpha1.PoolReady, v1alpha1.PoolFilling, "0 of 3 pods are warm")
	stuck := n
	stuck.Stuck = core.Stuck{Reason: core.PodImagePull, Pod: "ends-x", Pods: 2, Why: "container sandbox: ImagePullBackOff: not found"}
	const pull = "2 pods are not ready, such as pod ends-x: container sandbox: ImagePullBackOff: not found"
	for range 2 {
		expect(stuck, v1alpha1.PoolReady, core.PodImagePull, "0 of 3 pods are warm; "+pull)
	}
	failing := n
	failing.Trouble = core.Trouble{
		Pod: "ends-1", Reason: core.PodFailed, Why: "container sandbox: exit code 1 Error", Retry: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC),
	}
	const first = "pod ends-1 ended before it could be used: container sandbox: exit code 1 Error; the next attempt is at 2026-01-02T03:04:05Z"
	expect(failing, v1alpha1.PoolDegraded, core.PodFailed, first)
	failing.Trouble.Pod, failing.Trouble.Retry = "ends-2", time.Time{}
	expect(failing, v1alpha1.PoolDegraded, core.PodFailed, "a replacement is being tried")
	n.Warm = 3
	status := expect(n, v1alpha1.PoolDegraded, v1alpha1.PoolHealthy, "")
	require.True(t, meta.IsStatusConditionTrue(status.Conditions, v1alpha1.PoolReady))
	want := []string{"Normal Recovered: it was: Failed", "Warning Failed: " + first, "Warning ImagePullFailed: " + pull}
	require.Equal(t, want, w.events("ends", 3))
	expect(stuck, v1alpha1.PoolDegraded, core.PodImagePull, pull) // the same again counts in the first Event
	expect(n, v1alpha1.PoolDegraded, v1alpha1.PoolHealthy, "")
	n.Outdated = 3
	expect(n, v1alpha1.PoolProgressing, v1alpha1.PoolRollingOut, "3 idle pods are of an older template")
	n.Outdated = 0
	expect(n, v1alpha1.PoolProgressing, v1alpha1.PoolSettled, "")
	want = append([]string{want[0], "Normal Recovered: it was: ImagePullFailed", "Normal RolledOut: all idle pods are of the current template", "Normal RollingOut: 3 idle pods are of an older template"}, want[1:]...)
	require.Equal(t, want, w.events("ends", len(want)))
}

// Ready is what "kubectl wait" and health checks look at.
func TestReadyLastsWhilePodsAreClaimed(t *testing.T) {
	w := watch(t)
	w.create(stack.DemoPool("default", "ready", 3))
	target := 3
	expect := func(counts core.Counts, status metav1.ConditionStatus, reason, message string) metav1.Condition {
		t.Helper()
		counts.Target = target
		counts.Wanted = target
		w.counted(counts)
		got := w.until("ready", message, func(s v1alpha1.SandboxPoolStatus) bool {
			c := meta.FindStatusCondition(s.Conditions, v1alpha1.PoolReady)
			return c != nil && c.Message == message && int(s.Warm) == counts.Warm
		})
		c := meta.FindStatusCondition(got.Conditions, v1alpha1.PoolReady)
		require.Equal(t, []any{status, reason}, []any{c.Status, c.Reason}, message)
		return *c
	}
	expect(core.Counts{Warm: 2}, metav1.ConditionFalse, "Filling", "2 of 3 pods are warm")
	full := expect(core.Counts{Warm: 3}, metav1.ConditionTrue, "Warm", "")
	after := expect(core.Counts{Warm: 1}, metav1.ConditionTrue, "Filling", "1 of 3 pods are warm")
	require.Equal(t, full.LastTransitionTime, after.LastTransitionTime)
	expect(core.Counts{}, metav1.ConditionFalse, "Filling", "0 of 3 pods are warm")
	expect(core.Counts{Warm: 1}, metav1.ConditionFalse, "Filling", "1 of 3 pods are warm")
	expect(core.Counts{Warm: 3}, metav1.ConditionTrue, "Warm", "")
	target = 4
	w.patch("ready", map[string]any{"warm": 4}) // kubectl wait after a change waits for the new number
	expect(core.Counts{Warm: 3}, metav1.ConditionFalse, "Filling", "3 of 4 pods are warm")
	require.Empty(t, w.events("ready", 0))
}

func newPools(t *testing.T, clients *kube.Clients, submit func(core.Event)) *pools.Pools {
	t.Helper()
	p, err := pools.New(pools.Options{
		Options: kube.Options{Clients: clients, Namespace: "default", Submit: submit, Log: zaptest.NewLogger(t)},
		Policy:  policy(t, pools.PolicyBaseline), Settings: pods.Settings{ServeOn: time.Second}, Stops: true,
	})
	require.NoError(t, err)
	return p
}
