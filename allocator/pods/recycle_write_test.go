package pods_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap/zaptest"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/pods"
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

// Invariant: I3
func TestRecycleBeginsTheNextLifeOnce(t *testing.T) {
	const safeToEvict = "cluster-autoscaler.kubernetes.io/safe-to-evict"
	f := setUp(t)
	f.pool.Spec.Reuse = v1alpha1.ReuseRecycle
	create := func(name string) core.PodKey {
		f.sink.take()
		require.NoError(t, f.writer.Create(t.Context(), f.pool, core.CreatePod{Name: name}))
		return f.sink.take()[0].(core.PodSeen).Pod.Key
	}
	runs := func(name string) {
		p := f.get(name)
		for _, c := range p.Spec.InitContainers {
			p.Status.InitContainerStatuses = append(p.Status.InitContainerStatuses, corev1.ContainerStatus{Name: c.Name, ContainerID: "c://" + c.Name})
		}
		p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "sandbox", ContainerID: "c://sandbox"}}
		_, err := f.clients.Kubernetes.CoreV1().Pods("default").UpdateStatus(t.Context(), p, metav1.UpdateOptions{})
		require.NoError(t, err)
	}
	key := create("recycled")
	runs("recycled")
	sandbox := []byte(`{"metadata":{"labels":{"` + v1alpha1.LabelPhase + `":"` + v1alpha1.PhaseReleased + `","` + v1alpha1.LabelSandbox + `":"id0"},"annotations":{"` + safeToEvict + `":"false"}}}`)
	_, err := f.clients.Kubernetes.CoreV1().Pods("default").Patch(t.Context(), "recycled", types.MergePatchType, sandbox, metav1.PatchOptions{})
	require.NoError(t, err)
	f.faults.before = func() { // the kubelet reports something after the pod was read
		f.faults.before = nil
		p := f.get("recycled")
		p.Status.Message = "new"
		_, err := f.clients.Kubernetes.CoreV1().Pods("default").UpdateStatus(t.Context(), p, metav1.UpdateOptions{})
		require.NoError(t, err)
	}
	err = f.writer.Recycle(t.Context(), f.pool, core.RecyclePod{Pod: key})
	require.True(t, apierrors.IsConflict(err), "%v", err)
	require.Equal(t, key, pods.KeyOf(f.get("recycled")))
	f.faults.lose.Store(1)
	require.Error(t, f.writer.Recycle(t.Context(), f.pool, core.RecyclePod{Pod: key}))
	for range 2 { // the second one finds what the first has done
		require.NoError(t, f.writer.Recycle(t.Context(), f.pool, core.RecyclePod{Pod: key}))
		require.Equal(t, 2, pods.KeyOf(f.get("recycled")).Life)
		require.Equal(t, v1alpha1.PhaseWarm, f.get("recycled").Labels[v1alpha1.LabelPhase])
		require.NotContains(t, f.get("recycled").Labels, v1alpha1.LabelSandbox)
		require.NotContains(t, f.get("recycled").Annotations, safeToEvict)
	}
	require.Empty(t, f.sink.take(), "the watch shows lives in their order")
	require.Equal(t, "c://berth-clean,c://berth-recycle,c://sandbox", f.get("recycled").Annotations[v1alpha1.AnnotationEnded])

	t.Run("late writes about the life before change nothing", func(t *testing.T) {
		l, err := pods.NewLabeler(pods.LabelerOptions{
			Client: f.clients.Kubernetes, Yield: func(context.Context) {}, Log: zaptest.NewLogger(t),
		})
		require.NoError(t, err)
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { defer close(done); l.Run(ctx, 1) }()
		defer func() { stop(); <-done }()
		l.Label(core.LabelPod{Pod: key, Pool: "pool", ID: "id1", Released: true})
		require.Eventually(t, func() bool { return l.Waiting() == 0 }, time.Minute, 10*time.Millisecond)
		require.Equal(t, v1alpha1.PhaseWarm, f.get("recycled").Labels[v1alpha1.LabelPhase])
		require.NoError(t, f.writer.Delete(t.Context(), core.DeletePod{Pod: key}))
		require.Nil(t, f.get("recycled").DeletionTimestamp)
		next := key
		next.Life = 2
		l.Label(core.LabelPod{Pod: next, Pool: "pool", ID: "id2"})
		require.Eventually(t, func() bool { return l.Waiting() == 0 }, time.Minute, 10*time.Millisecond)
		require.Equal(t, "id2", f.get("recycled").Labels[v1alpha1.LabelSandbox])
	})

	t.Run("a pod without all statuses is deleted", func(t *testing.T) {
		for name, change := range map[string]func(*corev1.Pod){
			"no-status": func(p *corev1.Pod) { p.Status.InitContainerStatuses, p.Status.ContainerStatuses = nil, nil },
			"one-less":  func(p *corev1.Pod) { p.Status.ContainerStatuses = nil },
			"no-id":     func(p *corev1.Pod) { p.Status.ContainerStatuses[0].ContainerID = "" },
		} {
			key := create(name)
			runs(name)
			p := f.get(name)
			change(p)
			_, err := f.clients.Kubernetes.CoreV1().Pods("default").UpdateStatus(t.Context(), p, metav1.UpdateOptions{})
			require.NoError(t, err)
			require.NoError(t, f.writer.Recycle(t.Context(), f.pool, core.RecyclePod{Pod: key}))
			_, err = f.clients.Kubernetes.CoreV1().Pods("default").Get(t.Context(), name, metav1.GetOptions{})
			require.True(t, apierrors.IsNotFound(err), "%s: %v", name, err)
		}
	})
}
