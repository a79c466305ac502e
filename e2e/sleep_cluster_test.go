package e2e

import (
	"fmt"
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/berth-sandbox/berth/api/openapi"
)

// freeCPU is how much of the only node's CPU no pod requests.
func (e *env) freeCPU() resource.Quantity {
	e.t.Helper()
	nodes, err := e.clients.Kubernetes.CoreV1().Nodes().List(e.t.Context(), metav1.ListOptions{})
	require.NoError(e.t, err)
	require.Len(e.t, nodes.Items, 1)
	free := *nodes.Items[0].Status.Allocatable.Cpu()
	pods, err := e.clients.Kubernetes.CoreV1().Pods("").List(e.t.Context(), metav1.ListOptions{})
	require.NoError(e.t, err)
	for _, p := range pods.Items {
		for _, c := range p.Spec.Containers {
			if p.Status.Phase == corev1.PodRunning || p.Status.Phase == corev1.PodPending {
				free.Sub(*c.Resources.Requests.Cpu())
			}
		}
	}
	return free
}

// The node has room for two of these sandboxes while they are awake.
// Invariant: P29
func TestSleepingSandboxesMakeRoomOnTheirNode(t *testing.T) {
	onACluster(t, "a node of this machine does not share out its CPU")
	if !*longFlag {
		t.Skip("takes four minutes: only with -e2e.long")
	}
	const sandboxes = 6
	e := start(t, 0)
	free := e.freeCPU()
	each := resource.NewMilliQuantity(free.MilliValue()*45/100, resource.DecimalSI)
	pool := e.newPool(e.pool+"-room", 0)
	agentPool(&pool.Spec)
	pool.Spec.Template.Spec.Containers[0].Resources.Requests = corev1.ResourceList{corev1.ResourceCPU: *each}
	e.createPool(pool)

	all := make([]*sleeper, sandboxes)
	for i := range all {
		s, _ := e.claimOf(pool.Name, `"timeout":3600,"waitTimeout":60`)
		all[i] = &sleeper{env: e, Sandbox: s}
		a := e.api(http.MethodPost, "/sandboxes/"+s.SandboxID+"/pause", "{}")
		require.Equal(t, http.StatusNoContent, a.code, a.body)
		all[i].requests("20m")
	}
	left := e.freeCPU()
	t.Logf("%d sandboxes of %s sleep on a node that had %s free, and now has %s", sandboxes, each, &free, &left)

	client := e.client()
	for _, b := range all {
		a := e.api(http.MethodPost, "/sandboxes/"+b.SandboxID+"/connect", `{"timeout":3600}`)
		require.Equal(t, http.StatusCreated, a.code, a.body)
		e.reaches(client, b.Sandbox)
		b.requests(each.String())
	}
	deferred := func() (n int) {
		for _, b := range all {
			p, err := e.clients.Kubernetes.CoreV1().Pods(e.site.namespace()).Get(t.Context(), b.PodName, metav1.GetOptions{})
			require.NoError(t, err)
			require.Zero(t, p.Status.ContainerStatuses[0].RestartCount)
			for _, c := range p.Status.Conditions {
				if c.Type == corev1.PodResizePending && c.Status == corev1.ConditionTrue {
					n++
				}
			}
		}
		return n
	}
	e.eventually(func() error { // all run, and the node has room for the requests of two
		if n := deferred(); n != sandboxes-2 {
			return fmt.Errorf("the resizes of %d pods are deferred", n)
		}
		return nil
	})
	for _, b := range all[:2] {
		require.Equal(t, openapi.SandboxStateRunning, b.state().State)
		e.release(b.SandboxID)
	}
	e.eventually(func() error { // their room is given to others, when the kubelet tries again
		n := 0
		for _, b := range all[2:] {
			p, err := e.clients.Kubernetes.CoreV1().Pods(e.site.namespace()).Get(t.Context(), b.PodName, metav1.GetOptions{})
			require.NoError(t, err)
			if p.Status.ContainerStatuses[0].AllocatedResources.Cpu().Cmp(*each) == 0 {
				n++
			}
		}
		if n == 0 {
			return fmt.Errorf("the requests of %d pods are met", n)
		}
		return nil
	})
	for _, b := range all[2:] {
		e.release(b.SandboxID)
	}
}
