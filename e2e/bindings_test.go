package e2e

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/devcluster/stack"
)

// others are the ready pods without that of a sandbox, two at least. It does not ask labels or
// the pool's status, which follow in the background.
func (e *env) others(s openapi.Sandbox) (warm []corev1.Pod) {
	e.t.Helper()
	e.eventually(func() error {
		warm = slices.DeleteFunc(e.pods(nil), func(p corev1.Pod) bool {
			ready := slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
				return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
			})
			return p.Name == s.PodName || !ready
		})
		if len(warm) < 2 {
			return fmt.Errorf("%d other pods are ready", len(warm))
		}
		return nil
	})
	return warm
}

// An operator restores the object of a sandbox from elsewhere while no allocator runs. Then the
// journal names one pod for its ID, and the object another one.
// Invariant: I7
func TestTwoRecordedPodsOfOneSandboxAreRefused(t *testing.T) {
	e := startAlone(t, 3, stack.Options{})
	client := e.client()
	s := e.claim()
	e.reaches(client, s)
	var written v1alpha1.Sandbox
	e.eventually(func() (err error) {
		if written, err = e.record(s.SandboxID); err == nil && written.Status.Phase != v1alpha1.SandboxRunning {
			err = fmt.Errorf("%+v", written.Status)
		}
		return err
	})
	e.waitWarm(3)
	other := e.others(s)[0]

	allocator := e.stack.Allocators[0]
	require.NoError(t, allocator.Kill())
	objects := e.clients.Berth
	require.NoError(t,
		objects.Patch(types.MergePatchType).Namespace(e.site.namespace()).Resource("sandboxes").Name(s.SandboxID).
			Body([]byte(`{"metadata":{"finalizers":null}}`)).Do(t.Context()).Error())
	require.NoError(t, objects.Delete().Namespace(e.site.namespace()).Resource("sandboxes").Name(s.SandboxID).
		Body(metav1.NewPreconditionDeleteOptions(string(written.UID))).Do(t.Context()).Error())
	restored := v1alpha1.Sandbox{
		TypeMeta: metav1.TypeMeta{APIVersion: v1alpha1.GroupVersion().String(), Kind: "Sandbox"},
		ObjectMeta: metav1.ObjectMeta{Name: s.SandboxID, Namespace: e.site.namespace(), Labels: written.Labels,
			Finalizers: written.Finalizers},
		Spec: written.Spec, Status: written.Status,
	}
	restored.Spec.PodName, restored.Spec.PodUID, restored.Spec.PodIP = other.Name, string(other.UID), other.Status.PodIP
	term, _, _ := strings.Cut(written.Status.Revision, ".")
	restored.Status.Revision = term + ".999999" // it seems to be the later one
	require.NoError(t,
		objects.Post().Namespace(e.site.namespace()).Resource("sandboxes").Body(&restored).Do(t.Context()).Error())

	require.NoError(t, allocator.Start(t.Context()))
	_, err := e.stack.Leader(t.Context())
	require.NoError(t, err)
	e.eventually(func() error {
		a := e.get(client, e.host(8080, s.SandboxID), "/")
		if a.code != http.StatusGone {
			return fmt.Errorf("%d %s", a.code, a.body)
		}
		return nil
	})
	e.eventually(func() error {
		for _, p := range e.pods(nil) {
			if p.UID == other.UID || p.Name == s.PodName {
				return fmt.Errorf("pod %s is still there", p.Name)
			}
		}
		return nil
	})
	e.eventually(func() error {
		r, err := e.record(s.SandboxID)
		if err == nil && (r.Status.Phase != v1alpha1.SandboxEnded || r.Status.Reason != fact.ReasonDuplicate) {
			err = fmt.Errorf("%+v", r.Status)
		}
		return err
	})
	require.Positive(t, e.metric(allocator.Admin, "berth_allocator_repairs_total"), "it is reported")
	e.gone(client, s)
	e.reaches(client, e.claim())
}

// Neither labels nor an object that no allocator has made bind a pod.
// Invariant: I7
func TestBindingWithoutRecordIsIgnoredAndReported(t *testing.T) {
	e := startDamaging(t, owners, 3, stack.Options{MaxStale: 5 * time.Second})
	client := e.client()
	s := e.claim()
	e.reaches(client, s)
	e.waitWarm(3)
	others := e.others(s)
	marked, named := others[0], others[1]
	admin := e.stack.Allocators[0].Admin
	require.Zero(t, e.metric(admin, "berth_allocator_repairs_total"))

	_, err := e.clients.Kubernetes.CoreV1().Pods(e.site.namespace()).Patch(t.Context(), marked.Name, types.MergePatchType,
		fmt.Appendf(nil, `{"metadata":{"uid":%q,"labels":{%q:%q,%q:%q}}}`, marked.UID, v1alpha1.LabelPhase,
			v1alpha1.PhaseClaimed, v1alpha1.LabelSandbox, s.SandboxID),
		metav1.PatchOptions{})
	require.NoError(t, err)
	const madeUp = "cccccccccccccccccccc"
	object := v1alpha1.Sandbox{
		TypeMeta:   metav1.TypeMeta{APIVersion: v1alpha1.GroupVersion().String(), Kind: "Sandbox"},
		ObjectMeta: metav1.ObjectMeta{Name: madeUp, Namespace: e.site.namespace()},
		Spec: v1alpha1.SandboxSpec{Pool: e.pool, PodName: named.Name, PodUID: string(named.UID),
			PodIP: named.Status.PodIP, ClaimedAt: metav1.NowMicro()},
	}
	require.NoError(t,
		e.clients.Berth.Post().Namespace(e.site.namespace()).Resource("sandboxes").Body(&object).Do(t.Context()).Error())
	e.eventually(func() error {
		if e.metric(admin, "berth_allocator_repairs_total") == 0 {
			return fmt.Errorf("pod %s is not reported", marked.Name)
		}
		return nil
	})
	for range 2 { // this leader, and the next one
		for range 20 { // not by turns either
			e.reaches(client, s)
			var a answer
			e.eventually(func() error { // the router may have no session yet
				if a = e.get(client, e.host(8080, madeUp), "/"); a.code == http.StatusServiceUnavailable {
					return fmt.Errorf("%d %s", a.code, a.body)
				}
				return nil
			})
			require.Equal(t, http.StatusNotFound, a.code, a.body)
		}
		another := e.claim()
		require.NotEqual(t, marked.Name, another.PodName)
		require.NoError(t, e.stack.Allocators[0].Kill())
		require.NoError(t, e.stack.Allocators[0].Start(t.Context()))
		_, err := e.stack.Leader(t.Context())
		require.NoError(t, err)
		e.reaches(client, s)
	}
	e.eventually(func() error { // after max-stale it is replaced
		for _, p := range e.pods(nil) {
			if p.UID == marked.UID {
				return fmt.Errorf("pod %s is still there", p.Name)
			}
		}
		return nil
	})
}
