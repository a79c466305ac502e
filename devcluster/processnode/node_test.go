package processnode_test

import (
	"context"
	"fmt"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/rand"
	"k8s.io/client-go/kubernetes"

	"github.com/berth-sandbox/berth/devcluster"
	"github.com/berth-sandbox/berth/devcluster/nodes"
	"github.com/berth-sandbox/berth/devcluster/processnode"
	"github.com/berth-sandbox/berth/devcluster/stack"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const guard = time.Minute

// world is a real API server and the nodes that a test runs on it.
type world struct {
	t       *testing.T
	cluster *devcluster.Cluster
	client  kubernetes.Interface
}

// TestNode judges the behaviours that a real kubelet cannot be asked for or has in
// another form. Package conformance judges the others.
func TestNode(t *testing.T) {
	if testing.Short() {
		t.Skip("needs a real kube-apiserver and etcd: run without -short")
	}
	bin := t.TempDir()
	require.NoError(t, stack.Build(t.Context(), bin, false, "demo-sandbox"))
	cluster := devcluster.Start(t, devcluster.Options{NodePath: []string{bin}})
	client, err := kubernetes.NewForConfig(cluster.RestConfig())
	require.NoError(t, err)
	for _, test := range []struct {
		name  string
		judge func(w *world)
	}{
		{"EndedPodLosesItsAddress", endedPodLosesItsAddress},
		{"UnsupportedPodFails", unsupportedPodFails},
		{"ForcedDeletionHoldsTheAddress", forcedDeletionHoldsTheAddress},
		{"SchedulerFindsTheNode", schedulerFindsTheNode},
		{"StatusCatchesUpAfterAnOutage", statusCatchesUpAfterAnOutage},
	} {
		t.Run(test.name, func(t *testing.T) {
			test.judge(&world{t: t, cluster: cluster, client: client})
		})
	}
}

// run runs node i until the returned function is called.
func (w *world) run(i int) (stop func()) {
	w.t.Helper()
	o := w.cluster.NodeOptions(i)
	n, err := processnode.New(w.ctx(), o)
	require.NoError(w.t, err)
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() {
		if err := n.Run(ctx); err != nil {
			w.t.Errorf("run node: %v", err)
		}
	})
	var once sync.Once
	stop = func() { once.Do(func() { cancel(); running.Wait() }) }
	w.t.Cleanup(stop)
	return stop
}

func (w *world) ctx() context.Context {
	ctx, cancel := context.WithTimeout(w.t.Context(), guard)
	w.t.Cleanup(cancel)
	return ctx
}

func (w *world) name(i int) string { return w.cluster.NodeOptions(i).Name }

// create makes a pod that runs demo-sandbox with these arguments on node i; i < 0
// leaves the node to a scheduler.
func (w *world) create(name string, i int, args []string, change func(*corev1.PodSpec)) {
	w.t.Helper()
	podIP := &corev1.ObjectFieldSelector{FieldPath: "status.podIP"}
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.PodSpec{Containers: []corev1.Container{{
			Name: "main", Image: "demo-sandbox", Command: []string{"demo-sandbox"}, Args: args,
			Env: []corev1.EnvVar{{Name: "POD_IP", ValueFrom: &corev1.EnvVarSource{FieldRef: podIP}}},
			ReadinessProbe: &corev1.Probe{PeriodSeconds: 1, ProbeHandler: corev1.ProbeHandler{
				HTTPGet: &corev1.HTTPGetAction{Path: "/healthz", Port: intstr.FromInt32(8080)}}},
		}}},
	}
	if i >= 0 {
		pod.Spec.NodeName = w.name(i)
	}
	if change != nil {
		change(&pod.Spec)
	}
	_, err := w.client.CoreV1().Pods("default").Create(w.ctx(), pod, metav1.CreateOptions{})
	require.NoError(w.t, err)
	w.t.Cleanup(func() { // the next test's node has the same name
		ctx, cancel := context.WithTimeout(context.Background(), guard)
		defer cancel()
		// Gone in most cases.
		_ = w.client.CoreV1().Pods("default").Delete(ctx, name, metav1.DeleteOptions{GracePeriodSeconds: new(int64)})
	})
}

// until waits until the pod is as wanted; nil is a pod that does not exist.
func (w *world) until(name, what string, holds func(*corev1.Pod) bool) *corev1.Pod {
	w.t.Helper()
	var pod *corev1.Pod
	require.Eventually(w.t, func() bool {
		ctx, cancel := context.WithTimeout(w.t.Context(), 5*time.Second)
		defer cancel()
		var err error
		pod, err = w.client.CoreV1().Pods("default").Get(ctx, name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			pod = nil
			return holds(nil)
		}
		return err == nil && holds(pod)
	}, guard, 20*time.Millisecond, "pod %s: expected in vain: %s", name, what)
	return pod
}

func (w *world) ready(name string) *corev1.Pod {
	w.t.Helper()
	return w.until(name, "ready", func(p *corev1.Pod) bool { return p != nil && has(p, corev1.PodReady) })
}

func (w *world) delete(name string, grace int64) {
	w.t.Helper()
	require.NoError(w.t, w.client.CoreV1().Pods("default").Delete(w.ctx(), name,
		metav1.DeleteOptions{GracePeriodSeconds: &grace}))
}

func (w *world) gone(name string) {
	w.t.Helper()
	w.until(name, "gone", func(p *corev1.Pod) bool { return p == nil })
}

func has(p *corev1.Pod, t corev1.PodConditionType) bool {
	for _, c := range p.Status.Conditions {
		if c.Type == t {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}

func endedPodLosesItsAddress(w *world) {
	w.run(0)
	w.create("ended", 0, []string{"--exit-after", "1ms"}, func(s *corev1.PodSpec) {
		s.RestartPolicy = corev1.RestartPolicyNever
	})
	ended := w.until("ended", "succeeded", func(p *corev1.Pod) bool { return p.Status.Phase == corev1.PodSucceeded })
	require.NotEmpty(w.t, ended.Status.PodIP)
	w.create("next", 0, nil, nil)
	require.Equal(w.t, ended.Status.PodIP, w.ready("next").Status.PodIP)
}

func unsupportedPodFails(w *world) {
	w.run(0)
	w.create("unsupported", 0, nil, func(s *corev1.PodSpec) {
		s.InitContainers = []corev1.Container{{Name: "init", Image: "none", Command: []string{"true"}}}
	})
	pod := w.until("unsupported", "failed", func(p *corev1.Pod) bool { return p.Status.Phase == corev1.PodFailed })
	require.Equal(w.t, "ProcessNodeUnsupported", pod.Status.Reason)
	require.Equal(w.t, "Pod was rejected: a process node does not support spec.initContainers[0] "+
		"(only those of Berth)", pod.Status.Message)
	require.Empty(w.t, pod.Status.PodIP)
	w.delete("unsupported", 30)
	w.gone("unsupported")
}

func forcedDeletionHoldsTheAddress(w *world) {
	w.run(0)
	w.create("forced", 0, []string{"--ignore-sigterm"}, nil)
	address := w.ready("forced").Status.PodIP
	w.delete("forced", 0)
	w.gone("forced")
	w.create("other", 0, nil, nil)
	other := w.until("other", "an address", func(p *corev1.Pod) bool { return p.Status.PodIP != "" })
	require.NotEqual(w.t, address, other.Status.PodIP, "the old process still listens there")
	require.Eventually(w.t, func() bool {
		c, err := net.DialTimeout("tcp", net.JoinHostPort(address, "8080"), time.Second)
		if err == nil {
			c.Close()
		}
		return err != nil
	}, guard, 20*time.Millisecond, "the process must end")
	// The node frees the address a moment after the end of the process, and then
	// gives it to the next pod.
	for i, got := 0, ""; got != address; i++ {
		require.Less(w.t, i, 10, "the address stays taken")
		heir := fmt.Sprintf("heir-of-forced-%d", i)
		w.create(heir, 0, nil, nil)
		got = w.ready(heir).Status.PodIP
	}
}

func schedulerFindsTheNode(w *world) {
	w.run(0)
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() {
		scheduler := nodes.Scheduler{Client: w.client, Kind: processnode.Kind, Log: zap.NewNop()}
		if err := scheduler.Run(ctx); err != nil {
			w.t.Errorf("scheduler: %v", err)
		}
	})
	defer func() { cancel(); running.Wait() }()
	cordon := func(value bool) {
		patch := fmt.Sprintf(`{"spec":{"unschedulable":%v}}`, value)
		_, err := w.client.CoreV1().Nodes().Patch(w.ctx(), w.name(0), types.MergePatchType, []byte(patch),
			metav1.PatchOptions{})
		require.NoError(w.t, err)
	}
	unschedulable := func(p *corev1.Pod) bool {
		for _, c := range p.Status.Conditions {
			if c.Type == corev1.PodScheduled {
				return c.Status == corev1.ConditionFalse && c.Reason == corev1.PodReasonUnschedulable
			}
		}
		return false
	}
	here := func(s *corev1.PodSpec) { s.NodeSelector = map[string]string{corev1.LabelHostname: w.name(0)} }
	require.Eventually(w.t, func() bool {
		_, err := w.client.CoreV1().Nodes().Get(w.ctx(), w.name(0), metav1.GetOptions{})
		return err == nil
	}, guard, 20*time.Millisecond)
	// closeNode cordons the node and returns when the scheduler, which sees nodes and
	// pods by two watches, has seen that.
	closeNode := func() {
		cordon(true)
		for i, placed := 0, true; placed; i++ {
			name := fmt.Sprintf("probe-%d-%s", i, rand.String(5))
			w.create(name, -1, nil, here)
			placed = w.until(name, "placed or not", func(p *corev1.Pod) bool {
				return p != nil &&
					(p.Spec.NodeName != "" || unschedulable(p))
			}).Spec.NodeName != ""
			w.delete(name, 0)
			w.gone(name)
		}
	}
	closeNode()
	w.create("scheduled", -1, nil, here)
	w.create("nowhere", -1, nil, func(s *corev1.PodSpec) { s.NodeSelector = map[string]string{"no": "such"} })
	w.until("scheduled", "unschedulable while the node is cordoned", unschedulable)
	w.until("nowhere", "unschedulable", unschedulable)
	cordon(false)
	require.Equal(w.t, w.name(0), w.ready("scheduled").Spec.NodeName)

	closeNode()
	w.run(1)
	w.create("second", -1, nil, nil)
	require.Equal(w.t, w.name(1), w.ready("second").Spec.NodeName)
	cordon(false)
	w.create("first-again", -1, nil, here)
	w.ready("first-again") // so the scheduler knows that both nodes take pods
	w.create("fewest", -1, nil, nil)
	require.Equal(w.t, w.name(1), w.ready("fewest").Spec.NodeName, "two pods there, one here")
	nowhere := w.until("nowhere", "there", func(p *corev1.Pod) bool { return p != nil })
	require.Equal(w.t, corev1.PodPending, nowhere.Status.Phase)
	require.Empty(w.t, nowhere.Spec.NodeName)
}

func statusCatchesUpAfterAnOutage(w *world) {
	w.run(0)
	w.create("mortal", 0, []string{"--exit-after", "2s", "--exit-code", "7"},
		func(s *corev1.PodSpec) { s.RestartPolicy = corev1.RestartPolicyNever })
	address := w.ready("mortal").Status.PodIP
	require.NoError(w.t, w.cluster.APIServer().Kill())
	require.Eventually(w.t, func() bool {
		c, err := net.DialTimeout("tcp", net.JoinHostPort(address, "8080"), time.Second)
		if err == nil {
			c.Close()
		}
		return err != nil
	}, guard, 20*time.Millisecond, "it ends while no API server runs")
	require.NoError(w.t, w.cluster.APIServer().Start(w.ctx()))
	pod := w.until("mortal", "failed", func(p *corev1.Pod) bool { return p.Status.Phase == corev1.PodFailed })
	require.EqualValues(w.t, 7, pod.Status.ContainerStatuses[0].State.Terminated.ExitCode)
}
