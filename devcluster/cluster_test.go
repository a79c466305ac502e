package devcluster

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/berth-sandbox/berth/api/crd"
)

func testContext(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testLimit)
	t.Cleanup(cancel)
	return ctx
}

func clientOf(t *testing.T, c *Cluster) kubernetes.Interface {
	t.Helper()
	client, err := kubernetes.NewForConfig(c.RestConfig())
	require.NoError(t, err)
	return client
}

func podOf(name string, command ...string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default"},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "main", Image: "none", Command: command}}},
	}
}

func podNames(t *testing.T, client kubernetes.Interface) (names []string) {
	t.Helper()
	pods, err := client.CoreV1().Pods("default").List(testContext(t), metav1.ListOptions{})
	require.NoError(t, err)
	for _, p := range pods.Items {
		names = append(names, p.Name)
	}
	return names
}

func TestTwoClustersSideBySide(t *testing.T) {
	clusters := make([]*Cluster, 2)
	for i := range clusters {
		clusters[i] = Start(t, Options{})
		_, err := clientOf(t, clusters[i]).CoreV1().Pods("default").Create(testContext(t),
			podOf(fmt.Sprint("pod-", i), "true"), metav1.CreateOptions{})
		require.NoError(t, err)
	}
	for i, c := range clusters {
		require.Equal(t, []string{fmt.Sprint("pod-", i)}, podNames(t, clientOf(t, c)))
	}

	c, client := clusters[0], clientOf(t, clusters[0])
	require.NoError(t, c.APIServer().Kill())
	require.NoError(t, c.APIServer().Kill())
	require.ErrorContains(t, c.APIServer().Pause(), "kube-apiserver is not running")
	_, err := client.CoreV1().Pods("default").List(testContext(t), metav1.ListOptions{})
	require.Error(t, err)
	require.NoError(t, c.APIServer().Start(testContext(t)))
	require.Equal(t, []string{"pod-0"}, podNames(t, client), "the same client finds the same data")

	require.NoError(t, c.APIServer().Pause())
	short, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	_, err = client.CoreV1().Pods("default").List(short, metav1.ListOptions{})
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.NoError(t, c.APIServer().Resume())
	require.Equal(t, []string{"pod-0"}, podNames(t, client))

	for _, c := range clusters {
		pids := []int{c.APIServer().Pid(), c.Etcd().Pid()}
		for _, pid := range pids {
			require.True(t, running(pid))
		}
		require.NoError(t, c.APIServer().Pause(), "Down copes with it")
		began := time.Now()
		require.NoError(t, c.Down(testContext(t)))
		require.Less(t, time.Since(began), apiServerGrace, "nothing had to be killed")
		for _, pid := range pids {
			require.False(t, running(pid))
		}
		require.NoDirExists(t, c.Dir())
	}
}

// What the rest of Berth takes for granted, on one cluster.
func TestClusterServesWhatBerthUses(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "work")
	c := Start(t, Options{Dir: dir, CRDs: crd.All(), Nodes: 2})
	client := clientOf(t, c)

	t.Run("custom resources", func(t *testing.T) {
		dyn, err := dynamic.NewForConfig(c.RestConfig())
		require.NoError(t, err)
		for _, resource := range []string{"sandboxpools", "sandboxes"} {
			gvr := schema.GroupVersionResource{Group: "berth.sh", Version: "v1alpha1", Resource: resource}
			_, err := dyn.Resource(gvr).List(testContext(t), metav1.ListOptions{})
			require.NoError(t, err)
		}
	})
	t.Run("kubeconfig", func(t *testing.T) {
		config, err := clientcmd.BuildConfigFromFlags("", c.Kubeconfig())
		require.NoError(t, err)
		client, err := kubernetes.NewForConfig(config)
		require.NoError(t, err)
		_, err = client.CoreV1().Namespaces().Get(testContext(t), "default", metav1.GetOptions{})
		require.NoError(t, err)
	})
	t.Run("pods run on the nodes", func(t *testing.T) {
		pods := client.CoreV1().Pods("default")
		var nodes []string
		for _, name := range []string{"a", "b"} {
			_, err := pods.Create(testContext(t), podOf(name, "sleep", "1000"), metav1.CreateOptions{})
			require.NoError(t, err)
			require.Eventually(t, func() bool {
				p, err := pods.Get(testContext(t), name, metav1.GetOptions{})
				if err != nil || p.Status.Phase != corev1.PodRunning {
					return false
				}
				nodes = append(nodes, p.Spec.NodeName)
				return true
			}, testLimit, 20*time.Millisecond)
		}
		require.Equal(t, []string{"node-0", "node-1"}, nodes)
	})
	t.Run("eviction", func(t *testing.T) {
		grace := int64(0)
		require.NoError(t, client.CoreV1().Pods("default").EvictV1(testContext(t), &policyv1.Eviction{
			ObjectMeta:    metav1.ObjectMeta{Name: "a", Namespace: "default"},
			DeleteOptions: &metav1.DeleteOptions{GracePeriodSeconds: &grace},
		}))
		require.Eventually(t, func() bool { return len(podNames(t, client)) == 1 }, testLimit, 20*time.Millisecond)
	})

	require.NoError(t, c.Down(testContext(t)))
	require.FileExists(t, filepath.Join(dir, "kube-apiserver.log"), "a directory of the caller's stays")
	_, err := Up(testContext(t), Options{Dir: dir})
	require.ErrorContains(t, err, "is not empty")
}

// actCluster runs a cluster with a pod in it until it is killed.
func actCluster() error {
	ctx, cancel := context.WithTimeout(context.Background(), testLimit)
	defer cancel()
	c, err := Up(ctx, Options{Nodes: 1})
	if err != nil {
		return err
	}
	client, err := kubernetes.NewForConfig(c.RestConfig())
	if err != nil {
		return err
	}
	pidFile := filepath.Join(c.Dir(), "pod.pid")
	// A child of the shell prints the shell's PID, because a process node refuses $$.
	if _, err := client.CoreV1().Pods("default").Create(ctx,
		podOf("pod", "sh", "-c", "sh -c 'echo $PPID' >"+pidFile+".next; mv "+pidFile+".next "+pidFile+"; sleep 1000; true"),
		metav1.CreateOptions{}); err != nil {
		return err
	}
	fmt.Println(c.Dir(), c.APIServer().Pid(), c.Etcd().Pid())
	if err := announce(ctx, pidFile); err != nil {
		return err
	}
	<-make(chan struct{})
	return nil
}

func TestNothingOutlivesTheClustersKilledOwner(t *testing.T) {
	if testing.Short() {
		t.Skip("needs a real kube-apiserver and etcd: run without -short")
	}
	_, _, err := ControlPlaneBinaries(t.Context(), os.Stderr) // not within the act's limit
	require.NoError(t, err)
	a := startActor(t, "cluster")
	var dir string
	pids := make([]int, 3)
	_, err = fmt.Sscan(a.line(t), &dir, &pids[0], &pids[1])
	require.NoError(t, err)
	_, err = fmt.Sscan(a.line(t), &pids[2])
	require.NoError(t, err)
	for _, pid := range pids {
		require.True(t, running(pid))
	}
	require.NoError(t, syscall.Kill(-a.cmd.Process.Pid, syscall.SIGKILL))
	for _, pid := range pids {
		require.Eventually(t, func() bool { return !running(pid) }, testLimit, 5*time.Millisecond)
	}
	require.Eventually(t, func() bool { _, err := os.Stat(dir); return os.IsNotExist(err) }, testLimit, 5*time.Millisecond)
	a.awaitEnd(t)
}

func TestFailedStartNamesCauseAndLeavesNothing(t *testing.T) {
	assets, dir := t.TempDir(), filepath.Join(t.TempDir(), "work")
	program(t, assets, "kube-apiserver", "")
	program(t, assets, "etcd", "the disk is full")
	t.Setenv("KUBEBUILDER_ASSETS", assets)
	_, err := Up(testContext(t), Options{Dir: dir})
	require.ErrorContains(t, err, "start etcd: it ended (exit status 0)")
	require.ErrorContains(t, err, "the disk is full")
}

func TestCachedProgramsPrintNoProgress(t *testing.T) {
	if testing.Short() {
		t.Skip("needs a real kube-apiserver, etcd and Envoy: run without -short")
	}
	_, _, err := ControlPlaneBinaries(t.Context(), os.Stderr)
	require.NoError(t, err)
	bin, err := EnvoyBinary(t.Context(), os.Stderr)
	require.NoError(t, err)
	require.NoError(t, checkEnvoy(t.Context(), bin))
	var progress bytes.Buffer
	_, _, err = ControlPlaneBinaries(t.Context(), &progress)
	require.NoError(t, err)
	_, err = EnvoyBinary(t.Context(), &progress)
	require.NoError(t, err)
	require.Empty(t, progress.String())
}
