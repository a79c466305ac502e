package nodes_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/kube"
	"github.com/berth-sandbox/berth/allocator/nodes"
	"github.com/berth-sandbox/berth/devcluster"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestReadyUncordonedNodesAreReportedAsUsable(t *testing.T) {
	cluster := devcluster.Start(t, devcluster.Options{})
	clients, err := kube.NewClients(cluster.RestConfig(), 0, 0)
	require.NoError(t, err)
	api := clients.Kubernetes.CoreV1().Nodes()
	events := make(chan core.Event, 100)
	w, err := nodes.NewWatcher(kube.Options{
		Clients: clients, Namespace: "default", Submit: func(ev core.Event) { events <- ev }, Log: zap.NewNop(),
	})
	require.NoError(t, err)
	ctx, stop := context.WithCancel(t.Context())
	var watching sync.WaitGroup
	watching.Go(func() {
		if err := w.Run(ctx); err != nil {
			t.Error(err)
		}
	})
	defer watching.Wait()
	defer stop()

	receives := func(want core.Event) {
		t.Helper()
		select {
		case got := <-events:
			require.Equal(t, want, got)
		case <-time.After(time.Minute):
			t.Fatalf("not received within a minute: %+v", want)
		}
	}
	listed := func(want ...string) {
		t.Helper()
		usable, cordoned, err := w.List(t.Context())
		require.NoError(t, err)
		for _, name := range cordoned {
			usable = append(usable, name+" cordoned")
		}
		require.ElementsMatch(t, want, usable)
	}
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1"}}
	change := func(f func()) {
		t.Helper()
		node, err = api.Get(t.Context(), "n1", metav1.GetOptions{})
		require.NoError(t, err)
		f()
		node, err = api.Update(t.Context(), node, metav1.UpdateOptions{})
		require.NoError(t, err)
	}
	ready := func(status corev1.ConditionStatus) {
		t.Helper()
		node, err = api.Get(t.Context(), "n1", metav1.GetOptions{})
		require.NoError(t, err)
		node.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeMemoryPressure, Status: corev1.ConditionTrue}, {Type: corev1.NodeReady, Status: status}}
		node, err = api.UpdateStatus(t.Context(), node, metav1.UpdateOptions{})
		require.NoError(t, err)
	}

	_, err = api.Create(t.Context(), node, metav1.CreateOptions{})
	require.NoError(t, err)
	receives(core.NodeSeen{Name: "n1"}) // nothing is known of it yet
	listed()
	ready(corev1.ConditionTrue)
	receives(core.NodeSeen{Name: "n1", Usable: true})
	listed("n1")
	change(func() { node.Labels = map[string]string{"a": "b"} }) // says nothing
	change(func() { node.Spec.Unschedulable = true })
	receives(core.NodeSeen{Name: "n1", Cordoned: true})
	listed("n1 cordoned")
	change(func() { node.Spec.Unschedulable = false })
	receives(core.NodeSeen{Name: "n1", Usable: true})
	ready(corev1.ConditionUnknown)
	receives(core.NodeSeen{Name: "n1"})
	ready(corev1.ConditionTrue)
	receives(core.NodeSeen{Name: "n1", Usable: true})
	require.NoError(t, api.Delete(t.Context(), "n1", metav1.DeleteOptions{}))
	receives(core.NodeGone{Name: "n1"})
	listed()
}
