package allocator

import (
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/rest"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/kube"
	"github.com/berth-sandbox/berth/allocator/pods"
	"github.com/berth-sandbox/berth/allocator/pools"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/devcluster/stack"
)

func baseline(t testing.TB) pools.Policy {
	t.Helper()
	p, err := pools.NewPolicy(pools.PolicyBaseline)
	require.NoError(t, err)
	return p
}

func TestMissingOptionsAreAllNamed(t *testing.T) {
	_, err := New(Options{})
	for _, name := range []string{"Clients", "Namespace", "ControlAddress", "APIAddress", "MaxStale", "ConnectWindow", "Policy", "Metrics", "Log"} {
		require.ErrorContains(t, err, "Options."+name+" is required")
	}
	require.NotContains(t, err.Error(), "Keys", "on loopback there need not be any")

	_, err = New(Options{
		Clients: &kube.Clients{}, Namespace: "default", ControlAddress: "127.0.0.1:1", APIAddress: "127.0.0.1:2",
		MaxStale: time.Minute, ConnectWindow: time.Second, Metrics: prometheus.NewRegistry(), Log: zap.NewNop(),
	})
	require.EqualError(t, err, "allocator.Options.Policy is required", "a forgotten policy is not the one that allows everything")
}

// The shell may see a pool's new template before the core does, which still asks
// for pods.
func TestNoPodIsCreatedFromARefusedTemplate(t *testing.T) {
	pool := stack.DemoPool(poolKey.Namespace, poolKey.Name, 1)
	made := make(chan string, 10)
	apiServer := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		switch {
		case r.Method == http.MethodPost:
			made <- r.URL.Path
			w.Header().Set("Content-Type", r.Header.Get("Content-Type"))
			_, _ = io.Copy(w, r.Body)
		case strings.HasSuffix(r.URL.Path, "/sandboxpools"):
			_ = json.NewEncoder(w).Encode(v1alpha1.SandboxPoolList{Items: []v1alpha1.SandboxPool{*pool}})
		}
	}))
	defer apiServer.Close()
	clients, err := kube.NewClients(&rest.Config{Host: apiServer.URL, Transport: &http.Transport{DisableKeepAlives: true}}, 0, 0)
	require.NoError(t, err)
	a := &Allocator{limits: &teamLimits{}, watches: &watches{}}
	tm := &term{a: a, loop: newTestLoop(t, nil), log: zap.NewNop()}
	a.watches.pools = newPools(t, clients, tm.Submit)
	tm.writer = newPodWriter(t, clients, tm)
	asked := core.CreatePod{Pool: poolKey, Name: "python-1"}

	_, _, err = a.watches.pools.List(t.Context())
	require.NoError(t, err)
	tm.create(t.Context(), asked)
	require.Equal(t, "/api/v1/namespaces/default/pods", <-made)
	require.IsType(t, core.PodSeen{}, <-tm.loop.in)

	pool.Spec.Template.Spec.Containers[0].SecurityContext = &corev1.SecurityContext{Privileged: new(bool)}
	*pool.Spec.Template.Spec.Containers[0].SecurityContext.Privileged = true
	_, _, err = a.watches.pools.List(t.Context())
	require.NoError(t, err)
	tm.create(t.Context(), asked)
	require.Equal(t, core.CreateFailed{Pool: asked.Pool, Name: asked.Name}, <-tm.loop.in)
	require.Empty(t, made)
}

func newPodWriter(t *testing.T, clients *kube.Clients, tm *term) *pods.Writer {
	t.Helper()
	w, err := pods.NewWriter(pods.WriterOptions{Settings: pods.Settings{ServeOn: time.Second}, Options: kube.Options{
		Clients: clients, Namespace: poolKey.Namespace, Submit: tm.Submit, Log: zap.NewNop(),
	}})
	require.NoError(t, err)
	return w
}

func newPools(t *testing.T, clients *kube.Clients, submit func(core.Event)) *pools.Pools {
	t.Helper()
	p, err := pools.New(pools.Options{
		Options: kube.Options{Clients: clients, Namespace: poolKey.Namespace, Submit: submit, Log: zap.NewNop()},
		Policy:  baseline(t), Settings: pods.Settings{ServeOn: time.Second},
	})
	require.NoError(t, err)
	return p
}

func newTestWatches(t *testing.T, a *Allocator) *watches {
	t.Helper()
	a.o.Policy, a.o.LeaseDuration = baseline(t), 4*time.Second
	w, err := newWatches(&a.o)
	require.NoError(t, err)
	return w
}
