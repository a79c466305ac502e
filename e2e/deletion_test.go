package e2e

import (
	"errors"
	"fmt"
	"net/http"
	"testing"
	"time"

	"github.com/coder/websocket"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/devcluster/stack"
	"github.com/berth-sandbox/berth/envoy"
)

// The pod is deleted with its own grace period, as by kubectl delete, a drain or an eviction.
// Invariant: P2
func TestDeletedPodServesUntilItsRoutesAreGone(t *testing.T) {
	e := start(t, 1)
	client := e.client()
	s := e.claim()
	e.reaches(client, s)
	conn, _, err := websocket.Dial(t.Context(), "ws://"+e.host(8080, s.SandboxID)+"/ws",
		&websocket.DialOptions{HTTPClient: client})
	require.NoError(t, err)
	defer conn.CloseNow()
	pods := e.clients.Kubernetes.CoreV1().Pods(e.site.namespace())
	before, err := pods.Get(t.Context(), s.PodName, metav1.GetOptions{})
	require.NoError(t, err)
	sleep := time.Duration(before.Spec.Containers[0].Lifecycle.PreStop.Sleep.Seconds) * time.Second
	require.GreaterOrEqual(t, sleep, envoy.ConnectWindow+time.Second)

	require.NoError(t,
		pods.Delete(t.Context(), s.PodName,
			metav1.DeleteOptions{Preconditions: metav1.NewUIDPreconditions(string(before.UID))}))
	// Every request is answered, by the pod or with its sandbox's end, ...
	e.eventually(func() error {
		a := e.get(client, e.host(8080, s.SandboxID), "/")
		if a.code == http.StatusGone {
			return nil
		}
		require.Equal(t, http.StatusOK, a.code, a.body)
		require.Equal(t, s.PodName, a.identity(t).Pod)
		return errors.New("requests are still sent to the pod")
	})
	// ... and what was admitted goes on, although the node has begun to end the pod.
	e.eventually(func() error {
		pod, err := pods.Get(t.Context(), s.PodName, metav1.GetOptions{})
		require.NoError(t, err, "the pod ended before its routes")
		require.NotNil(t, pod.DeletionTimestamp)
		if pod.Status.ObservedGeneration != pod.Generation {
			return errors.New("the node has not seen the deletion")
		}
		return nil
	})
	for i := range 10 {
		sent := fmt.Sprint("ahoy ", i)
		require.NoError(t, conn.Write(t.Context(), websocket.MessageText, []byte(sent)), "the pod ended before its routes")
		_, got, err := conn.Read(t.Context())
		require.NoError(t, err, "the pod ended before its routes")
		require.Equal(t, sent, string(got))
	}
	e.eventually(func() error {
		record, err := e.record(s.SandboxID)
		if err == nil && record.Status.Phase != v1alpha1.SandboxEnded {
			err = fmt.Errorf("%+v", record.Status)
		}
		if err == nil {
			require.Equal(t, "PodDeleted", record.Status.Reason)
		}
		return err
	})
	e.waitWarm(1)
}

// The leader was killed a moment before. Until another one leads, no router hears of the
// deletion. A pod that got the address would get the sandbox's requests.
//
// It takes more than 20 s because it waits for a new leader after a lease of 8 s, and then for
// the deleted pod, which serves for 15 s.
// Invariant: P2
func TestPodDeletedWithoutLeaderServesOnMeanwhile(t *testing.T) {
	// A pod that served for the connect window and a second only would have ended.
	const lease = 8 * time.Second
	e := startAlone(t, 1, stack.Options{Allocators: 2, LeaseDuration: lease})
	client := e.client()
	s := e.claim()
	e.reaches(client, s)
	pods := e.clients.Kubernetes.CoreV1().Pods(e.site.namespace())
	before, err := pods.Get(t.Context(), s.PodName, metav1.GetOptions{})
	require.NoError(t, err)

	require.NoError(t, e.site.killLeader(t.Context()))
	require.NoError(t,
		pods.Delete(t.Context(), s.PodName,
			metav1.DeleteOptions{Preconditions: metav1.NewUIDPreconditions(string(before.UID))}))
	served := 0
	e.eventually(func() error {
		a := e.get(client, e.host(8080, s.SandboxID), "/")
		switch a.code {
		case http.StatusGone:
			return nil
		case http.StatusServiceUnavailable: // while the release is not durable
			require.Equal(t, apierror.SandboxStarting, a.refusal(t).Reason, "after %d answers", served)
			return errors.New("not released yet")
		}
		require.Equal(t, http.StatusOK, a.code, "after %d answers: %s", served, a.body)
		require.Equal(t, s.PodName, a.identity(t).Pod)
		served++
		return errors.New("requests are still sent to the pod")
	})
	require.Positive(t, served)
	// What was admitted a moment before may still be on its way.
	after, err := pods.Get(t.Context(), s.PodName, metav1.GetOptions{})
	require.NoError(t, err, "the pod ended before its routes")
	require.Equal(t, before.UID, after.UID)
	require.True(t, after.Status.ContainerStatuses[0].State.Running != nil, "%+v", after.Status.ContainerStatuses[0].State)
	e.eventually(func() error {
		record, err := e.record(s.SandboxID)
		if err == nil && record.Status.Phase == v1alpha1.SandboxRunning {
			err = fmt.Errorf("%+v", record.Status)
		}
		if err == nil {
			require.Equal(t, "PodDeleted", record.Status.Reason)
		}
		return err
	})
}

// The preStop hook of these pods sleeps for an hour.
// Invariant: P2
func TestAllocatorDeletesPodsWithoutTheirPreStopSleep(t *testing.T) {
	e := start(t, 0)
	hour := int64(3600)
	pool := e.newPool(e.pool+"-sleeps", 1)
	pool.Spec.Template.Spec.TerminationGracePeriodSeconds = &hour
	pool.Spec.Template.Spec.Containers[0].Lifecycle = &corev1.Lifecycle{
		PreStop: &corev1.LifecycleHandler{Sleep: &corev1.SleepAction{Seconds: hour}},
	}
	e.createPool(pool)
	e.pool = pool.Name
	e.waitWarm(1)
	released := e.claim()
	e.reaches(e.client(), released)
	e.waitWarm(1) // the one that is discarded
	e.patchPool(e.pool, `{"spec":{"warm":0}}`)
	e.release(released.SandboxID)
	e.eventually(func() error {
		for _, p := range e.pods(nil) {
			require.Equal(t, hour, p.Spec.Containers[0].Lifecycle.PreStop.Sleep.Seconds)
			return fmt.Errorf("pod %s is still there", p.Name)
		}
		return nil
	})
}
