package inspect_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/inspect"
	"github.com/berth-sandbox/berth/allocator/kube"
	"github.com/berth-sandbox/berth/allocator/pods"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/devcluster"
)

// The API server has no kubelet and no metrics.k8s.io here.
func TestReaderShowsAPodItsWarningsAndWhatIsMissing(t *testing.T) {
	cluster := devcluster.Start(t, devcluster.Options{})
	clients, err := kube.NewClients(cluster.RestConfig(), 0, 0)
	require.NoError(t, err)
	api, ctx := clients.Kubernetes.CoreV1(), t.Context()
	made, err := api.Pods("default").Create(ctx, &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "p"}, Spec: corev1.PodSpec{NodeName: "nowhere", Containers: []corev1.Container{{Name: "main", Image: "x"}}},
	}, metav1.CreateOptions{})
	require.NoError(t, err)
	for name, uid := range map[string]string{"mine": string(made.UID), "other": "another-uid"} {
		for _, kind := range []string{corev1.EventTypeWarning, corev1.EventTypeNormal} {
			_, err = api.Events("default").Create(ctx, &corev1.Event{
				ObjectMeta: metav1.ObjectMeta{GenerateName: "e-"}, Type: kind, Reason: name + kind,
				InvolvedObject: corev1.ObjectReference{Kind: "Pod", Namespace: "default", Name: "p", UID: types.UID(uid)},
			}, metav1.CreateOptions{})
			require.NoError(t, err)
		}
	}
	r := inspect.New(clients.Kubernetes)
	key := core.PodKey{Namespace: "default", Name: "p", UID: string(made.UID)}
	p, err := r.Pod(ctx, key)
	require.NoError(t, err)
	require.Equal(t, made.UID, p.Object.UID)
	require.NoError(t, p.WarningsErr)
	require.Len(t, p.Warnings, 1)
	require.Equal(t, "mineWarning", p.Warnings[0].Reason)
	require.Error(t, p.NodeErr)
	require.Nil(t, p.Node)
	for _, gone := range []core.PodKey{{Namespace: "default", Name: "p", UID: "another-uid"}, {Namespace: "default", Name: "q", UID: key.UID}} {
		p, err = r.Pod(ctx, gone)
		require.ErrorIs(t, err, inspect.ErrGone)
		require.Nil(t, p.Object)
	}
	require.Len(t, p.Warnings, 1, "events outlive their pod")
	_, err = r.Logs(ctx, core.PodKey{Namespace: "default", Name: "q"}, inspect.LogOptions{Container: "main"})
	require.ErrorIs(t, err, inspect.ErrGone)
	node, err := api.Nodes().Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "nowhere"}}, metav1.CreateOptions{})
	require.NoError(t, err)
	node.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "127.0.0.1"}}
	_, err = api.Nodes().UpdateStatus(ctx, node, metav1.UpdateOptions{})
	require.NoError(t, err)
	_, err = r.Logs(ctx, key, inspect.LogOptions{Container: "main"}) // nothing listens at the kubelet's port
	require.ErrorIs(t, err, inspect.ErrNoLogs)
	_, err = r.Usage(ctx, "default", []string{"aa1"})
	require.ErrorIs(t, err, inspect.ErrNoMetrics)
}

// Invariant: I3
func TestWarningsOfEarlierLivesAreNotShown(t *testing.T) {
	cluster := devcluster.Start(t, devcluster.Options{})
	clients, err := kube.NewClients(cluster.RestConfig(), 0, 0)
	require.NoError(t, err)
	api, ctx := clients.Kubernetes.CoreV1(), t.Context()
	p := pods.Build(&v1alpha1.SandboxPool{ObjectMeta: metav1.ObjectMeta{Namespace: "default", UID: "pool"}, Spec: v1alpha1.SandboxPoolSpec{
		Reuse: v1alpha1.ReuseRecycle,
		Template: v1alpha1.PodTemplate{Spec: corev1.PodSpec{
			NodeName: "nowhere", Containers: []corev1.Container{{Name: "sandbox", Image: "x"}},
		}},
	}}, "p", pods.Settings{AgentImage: "agent"})
	p.OwnerReferences = nil
	p.Annotations[v1alpha1.AnnotationLife], p.Annotations[v1alpha1.AnnotationEnded] = "1", "c://1,c://2,c://3"
	p, err = api.Pods("default").Create(ctx, p, metav1.CreateOptions{})
	require.NoError(t, err)
	began := metav1.NewTime(time.Now().Add(-time.Minute).Truncate(time.Second))
	for what, at := range map[string]time.Time{"Before": began.Add(-time.Second), "At": began.Time, "After": began.Add(time.Second)} {
		_, err = api.Events("default").Create(ctx, &corev1.Event{
			ObjectMeta: metav1.ObjectMeta{GenerateName: "e-"}, Type: corev1.EventTypeWarning, Reason: what,
			FirstTimestamp: metav1.NewTime(at), LastTimestamp: metav1.NewTime(began.Add(2 * time.Second)),
			InvolvedObject: corev1.ObjectReference{Kind: "Pod", Namespace: "default", Name: "p", UID: p.UID},
		}, metav1.CreateOptions{})
		require.NoError(t, err)
	}
	r, key := inspect.New(clients.Kubernetes), pods.KeyOf(p)
	shown, err := r.Pod(ctx, key)
	require.NoError(t, err)
	require.Empty(t, shown.Warnings, "the life has not begun")
	running := corev1.ContainerState{Running: &corev1.ContainerStateRunning{StartedAt: began}}
	p.Status.InitContainerStatuses = []corev1.ContainerStatus{
		{Name: "berth-clean", ContainerID: "c://4", State: corev1.ContainerState{
			Terminated: &corev1.ContainerStateTerminated{StartedAt: began, FinishedAt: began, ContainerID: "c://4", Message: "1"},
		}},
		{Name: "berth-recycle", ContainerID: "c://5", State: running},
	}
	p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "sandbox", ContainerID: "c://6", State: running, Ready: true}}
	_, err = api.Pods("default").UpdateStatus(ctx, p, metav1.UpdateOptions{})
	require.NoError(t, err)
	shown, err = r.Pod(ctx, key)
	require.NoError(t, err)
	require.Len(t, shown.Warnings, 1)
	require.Equal(t, "After", shown.Warnings[0].Reason)
	before := key
	before.Life = 1
	shown, err = r.Pod(ctx, before)
	require.ErrorIs(t, err, inspect.ErrGone)
	require.Empty(t, shown.Warnings)
	_, err = r.Logs(ctx, before, inspect.LogOptions{Container: "sandbox"})
	require.Error(t, err)
}
