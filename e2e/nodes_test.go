package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/devcluster/processnode"
	"github.com/berth-sandbox/berth/devcluster/stack"
)

// node starts another node of the cluster. The function that it returns ends the node, without a word to the API
// server.
func (e *env) node(i int) (name string, end func()) {
	o := e.cluster.NodeOptions(i)
	n, err := processnode.New(e.t.Context(), o)
	require.NoError(e.t, err)
	ctx, cancel := context.WithCancel(context.WithoutCancel(e.t.Context()))
	ended := make(chan error, 1)
	go func() { ended <- n.Run(ctx) }()
	end = func() {
		cancel()
		if err := <-ended; err != nil {
			e.t.Errorf("node %s: %v", o.Name, err)
		}
		ended <- nil // for the next call
	}
	e.t.Cleanup(end)
	return o.Name, end
}

func (e *env) cordon(node string, cordoned bool) {
	_, err := e.clients.Kubernetes.CoreV1().Nodes().Patch(e.t.Context(), node, types.MergePatchType,
		fmt.Appendf(nil, `{"spec":{"unschedulable":%t}}`, cordoned), metav1.PatchOptions{})
	require.NoError(e.t, err)
}

// lose does what the controllers of a cluster do about a node that does not answer. The scheduler of a devcluster goes
// by cordons instead of taints.
func (e *env) lose(name string) {
	e.cordon(name, true)
	nodes := e.clients.Kubernetes.CoreV1().Nodes()
	n, err := nodes.Get(e.t.Context(), name, metav1.GetOptions{})
	require.NoError(e.t, err)
	for i := range n.Status.Conditions {
		n.Status.Conditions[i].Status = corev1.ConditionUnknown
	}
	_, err = nodes.UpdateStatus(e.t.Context(), n, metav1.UpdateOptions{})
	require.NoError(e.t, err)
}

// on waits until the pool has so many warm pods, all of them on one node and ready.
func (e *env) on(node string, warm int) {
	e.t.Helper()
	e.eventually(func() error {
		all := e.pods(map[string]string{v1alpha1.LabelPhase: v1alpha1.PhaseWarm})
		for _, p := range all {
			if p.Spec.NodeName != node && p.DeletionTimestamp == nil {
				return fmt.Errorf("pod %s is on node %s", p.Name, p.Spec.NodeName)
			}
		}
		if s := e.readPool(e.pool).Status; int(s.Warm) != warm {
			return fmt.Errorf("status: %+v", s)
		}
		return nil
	})
}

// The warm pods leave a drained node before its sandboxes, and a lost node is replaced. Claims go on.
func TestPoolLeavesDrainedAndLostNodes(t *testing.T) {
	e := startDamaging(t, owners, 2, stack.Options{})
	first := "node-0"
	client := e.client()
	stays := e.claim()
	e.waitWarm(2)
	second, end := e.node(1)

	e.cordon(first, true)
	e.reaches(client, e.claim()) // the allocator may not have seen the cordon yet
	e.on(second, 2)
	moved := e.claim()
	e.reaches(client, stays)
	e.reaches(client, moved)
	require.NoError(t, e.clients.Kubernetes.PolicyV1().Evictions(e.site.namespace()).Evict(t.Context(),
		&policyv1.Eviction{ObjectMeta: metav1.ObjectMeta{Name: stays.PodName, Namespace: e.site.namespace()}}))
	e.endsBecause(stays.SandboxID, fact.ReasonEvicted)

	// There is no other node than the cordoned one.
	end()
	e.lose(second)
	e.eventually(func() error {
		c := meta.FindStatusCondition(e.readPool(e.pool).Status.Conditions, v1alpha1.PoolDegraded)
		if c.Reason != core.PodUnschedulable {
			return fmt.Errorf("condition: %+v", c)
		}
		return nil
	})
	e.cordon(first, false)
	e.on(first, 2)
	e.eventually(func() error {
		s := e.readPool(e.pool).Status
		if f := s.LastFailure; f == nil || f.Reason != core.PodNodeLost || s.Claimed != 2 ||
			!meta.IsStatusConditionFalse(s.Conditions, v1alpha1.PoolDegraded) {
			return fmt.Errorf("status: %+v", s)
		}
		return nil
	})
	var diagnosed openapi.PoolDiagnostics
	a := e.api(http.MethodGet, "/v1/pools/"+e.pool+"/diagnostics", "")
	require.NoError(t, json.Unmarshal([]byte(a.body), &diagnosed), a.body)
	require.NotEmpty(t, diagnosed.Failures, a.body)
	require.Equal(t, core.PodNodeLost, diagnosed.Failures[0].Reason, a.body)
	require.Contains(t, diagnosed.Failures[0].Message, second)
	e.reaches(client, e.claim())

	// As the garbage collector of pods does when the node is gone.
	require.NoError(t, e.clients.Kubernetes.CoreV1().Nodes().Delete(t.Context(), second, metav1.DeleteOptions{}))
	pods := e.clients.Kubernetes.CoreV1().Pods(e.site.namespace())
	for _, p := range e.pods(nil) {
		if p.Spec.NodeName != second {
			continue
		}
		p.Status.Conditions = append(p.Status.Conditions, corev1.PodCondition{
			Type: corev1.DisruptionTarget, Status: corev1.ConditionTrue, Reason: "DeletionByPodGC",
			Message: "PodGC: node no longer exists",
		})
		_, err := pods.UpdateStatus(t.Context(), &p, metav1.UpdateOptions{})
		require.NoError(t, err)
		require.NoError(t, pods.Delete(t.Context(), p.Name, metav1.DeleteOptions{GracePeriodSeconds: new(int64)}))
	}
	e.endsBecause(moved.SandboxID, fact.ReasonNodeLost)
}

// endsBecause waits until a sandbox has ended for a reason.
func (e *env) endsBecause(id, reason string) {
	e.t.Helper()
	e.eventually(func() error {
		r, err := e.record(id)
		if err != nil {
			return err
		}
		if r.Status.Phase != v1alpha1.SandboxEnded {
			return errors.New("it is " + string(r.Status.Phase))
		}
		require.Equal(e.t, reason, r.Status.Reason)
		return nil
	})
}
