package pods_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/pods"
	"github.com/berth-sandbox/berth/envoy"
)

// server is a container that says how it ends; nil: nothing.
func server(name string, lifecycle *corev1.Lifecycle) corev1.Container {
	return corev1.Container{Name: name, Image: "none", Lifecycle: lifecycle}
}

func sidecar(name string, lifecycle *corev1.Lifecycle) corev1.Container {
	always := corev1.ContainerRestartPolicyAlways
	c := server(name, lifecycle)
	c.RestartPolicy = &always
	return c
}

// preStop is a lifecycle with that action.
func preStop(h corev1.LifecycleHandler) *corev1.Lifecycle { return &corev1.Lifecycle{PreStop: &h} }

// endings are templates, and the sleeps and the grace period of the pods that are
// made from them.
func endings() map[string]struct {
	spec   corev1.PodSpec
	grace  int64
	sleeps map[string]int64 // by container; 0: no hook
} {
	type spec = corev1.PodSpec
	type containers = []corev1.Container
	seconds := func(s int64) *int64 { return &s }
	postStart := &corev1.Lifecycle{PostStart: &corev1.LifecycleHandler{Exec: &corev1.ExecAction{Command: []string{"true"}}}}
	return map[string]struct {
		spec   corev1.PodSpec
		grace  int64
		sleeps map[string]int64
	}{
		"nothing is said":             {spec{Containers: containers{server("a", nil)}}, 36, map[string]int64{"a": 6}},
		"a grace period":              {spec{TerminationGracePeriodSeconds: seconds(2), Containers: containers{server("a", nil)}}, 8, map[string]int64{"a": 6}},
		"no grace period":             {spec{TerminationGracePeriodSeconds: seconds(0), Containers: containers{server("a", nil)}}, 6, map[string]int64{"a": 6}},
		"a negative grace period":     {spec{TerminationGracePeriodSeconds: seconds(-7), Containers: containers{server("a", nil)}}, 6, map[string]int64{"a": 6}},
		"another hook":                {spec{Containers: containers{server("a", postStart)}}, 36, map[string]int64{"a": 6}},
		"a shorter sleep":             {spec{TerminationGracePeriodSeconds: seconds(10), Containers: containers{server("a", sleeps(4))}}, 12, map[string]int64{"a": 6}},
		"a sleep of no time":          {spec{Containers: containers{server("a", sleeps(0))}}, 36, map[string]int64{"a": 6}},
		"a longer sleep":              {spec{TerminationGracePeriodSeconds: seconds(60), Containers: containers{server("a", sleeps(60))}}, 60, map[string]int64{"a": 60}},
		"a longer sleep and another":  {spec{Containers: containers{server("a", sleeps(20)), server("b", nil)}}, 36, map[string]int64{"a": 20, "b": 6}},
		"a sidecar and an init":       {spec{InitContainers: containers{server("init", nil), sidecar("side", nil)}, Containers: containers{server("a", sleeps(20))}}, 36, map[string]int64{"init": 0, "side": 6, "a": 20}},
		"several containers, one new": {spec{Containers: containers{server("a", sleeps(6)), server("b", sleeps(5))}}, 31, map[string]int64{"a": 6, "b": 6}},
	}
}

// Invariant: P2
func TestEveryListeningContainerServesOnAfterADeletion(t *testing.T) {
	for name, c := range endings() {
		t.Run(name, func(t *testing.T) {
			pool := poolOf(corev1.PodSpec{})
			pool.Spec.Template.Spec = c.spec
			before := pool.DeepCopy()
			require.NoError(t, pods.CheckPreStop(pool))
			made := pods.Build(pool, "pool-1", pods.Settings{ServeOn: serveOn}).Spec
			require.Equal(t, before, pool, "the pool was changed")
			require.Equal(t, c.grace, *made.TerminationGracePeriodSeconds)
			for i, container := range append(made.InitContainers, made.Containers...) {
				want := c.sleeps[container.Name]
				if want == 0 {
					require.Nil(t, container.Lifecycle)
					continue
				}
				require.Equal(t, sleeps(want).PreStop, container.Lifecycle.PreStop)
				require.GreaterOrEqual(t, time.Duration(want)*time.Second, serveOn)
				if said := append(before.Spec.Template.Spec.InitContainers, before.Spec.Template.Spec.Containers...)[i].Lifecycle; said != nil {
					require.Equal(t, said.PostStart, container.Lifecycle.PostStart)
				}
			}
		})
	}
}

func TestPreStopSleepIsRoundedUpToSeconds(t *testing.T) {
	for serve, want := range map[time.Duration]int64{
		6 * time.Second: 6, 6001 * time.Millisecond: 7, 6999 * time.Millisecond: 7, 7 * time.Second: 7, time.Minute: 60, time.Millisecond: 1,
	} {
		made := pods.Build(poolOf(corev1.PodSpec{}), "pool-1", pods.Settings{ServeOn: serve}).Spec
		require.Equal(t, want, made.Containers[0].Lifecycle.PreStop.Sleep.Seconds, serve)
		require.Equal(t, 30+want, *made.TerminationGracePeriodSeconds, serve)
	}
}

// Invariant: P2
func TestServeOnCoversFailoverReleaseAndConnectWindow(t *testing.T) {
	require.Equal(t, 9*time.Second+time.Second+envoy.ConnectWindow, pods.ServeOn(9*time.Second, envoy.ConnectWindow))
}

func TestConflictingPreStopHandlerIsNamed(t *testing.T) {
	exec := preStop(corev1.LifecycleHandler{Exec: &corev1.ExecAction{Command: []string{"true"}}})
	get := preStop(corev1.LifecycleHandler{HTTPGet: &corev1.HTTPGetAction{Path: "/"}})
	dial := preStop(corev1.LifecycleHandler{TCPSocket: &corev1.TCPSocketAction{}})
	pool := poolOf(corev1.PodSpec{})
	pool.Spec.Template.Spec.InitContainers = []corev1.Container{sidecar("side", get)}
	pool.Spec.Template.Spec.Containers = []corev1.Container{server("a", nil), server("b", exec), server("c", sleeps(1)), server("d", dial)}
	err := pods.CheckPreStop(pool)
	require.ErrorIs(t, err, pods.ErrPreStop)
	require.ErrorContains(t, err, "spec.template.spec.initContainers[0].lifecycle.preStop.httpGet, "+
		"spec.template.spec.containers[1].lifecycle.preStop.exec, spec.template.spec.containers[3].lifecycle.preStop.tcpSocket: ")
	require.ErrorContains(t, err, "SIGTERM", "what to do about it")
}

// A pod that the allocator deletes serves no requests any more. A pod that another client
// deletes keeps its own grace period. The API server takes every pod that is made.
// Invariant: P2
func TestAPIServerAcceptsBuiltPodsAndShortDeletions(t *testing.T) {
	f := setUp(t)
	_, err := f.clients.Kubernetes.CoreV1().Nodes().Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node"}}, metav1.CreateOptions{})
	require.NoError(t, err)
	for name, c := range endings() {
		t.Run(name, func(t *testing.T) {
			pool := f.pool.DeepCopy()
			pool.Spec.Template.Spec = c.spec
			pool.Spec.Template.Spec.NodeName = "node" // else it goes at once
			key := core.PoolKey{Namespace: "default", Name: "pool"}
			for _, pod := range []string{"ours", "theirs"} {
				require.NoError(t, f.writer.Create(t.Context(), pool, core.CreatePod{Pool: key, Name: pod}))
			}
			uid := string(f.get("ours").UID)
			f.sink.take()
			require.NoError(t, f.writer.Delete(t.Context(), core.DeletePod{Pod: core.PodKey{Namespace: "default", Name: "ours", UID: uid}}))
			require.EqualValues(t, 1, *f.get("ours").DeletionGracePeriodSeconds)
			require.NoError(t, f.clients.Kubernetes.CoreV1().Pods("default").Delete(t.Context(), "theirs", metav1.DeleteOptions{}))
			require.Equal(t, c.grace, *f.get("theirs").DeletionGracePeriodSeconds)
			f.remove("ours")
			f.remove("theirs")
		})
	}
}
