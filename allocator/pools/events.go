package pools

import (
	"cmp"
	"context"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/berth-sandbox/berth/allocator/kube"
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

// maxEventMessage bounds the message of an Event, in bytes.
const maxEventMessage = 1000

// event is a transition of a pool that operators are informed of.
type event struct{ kind, reason, message string }

// transitions returns the Events for a change of conditions: what keeps a pool from what it asks for and that
// it does no longer, the replacement of its pods, and the beginning of its end.
func transitions(was, is []metav1.Condition) (all []event) {
	before := func(kind string) metav1.Condition {
		if c := meta.FindStatusCondition(was, kind); c != nil {
			return *c
		}
		return metav1.Condition{}
	}
	old, now := before(v1alpha1.PoolDegraded), *meta.FindStatusCondition(is, v1alpha1.PoolDegraded)
	switch {
	case now.Status == metav1.ConditionTrue && (old.Status != metav1.ConditionTrue || old.Reason != now.Reason):
		all = append(all, event{corev1.EventTypeWarning, now.Reason, now.Message})
	case now.Status == metav1.ConditionFalse && old.Status == metav1.ConditionTrue:
		all = append(all, event{corev1.EventTypeNormal, "Recovered", "it was: " + old.Reason})
	}
	old, now = before(v1alpha1.PoolProgressing), *meta.FindStatusCondition(is, v1alpha1.PoolProgressing)
	switch {
	case now.Reason == old.Reason:
	case now.Reason == v1alpha1.PoolRollingOut || now.Reason == v1alpha1.PoolDraining:
		all = append(all, event{corev1.EventTypeNormal, now.Reason, now.Message})
	case old.Reason == v1alpha1.PoolRollingOut && now.Reason == v1alpha1.PoolSettled:
		all = append(all, event{corev1.EventTypeNormal, "RolledOut", "all idle pods are of the current template"})
	}
	return all
}

// emit writes an Event. It makes one attempt, because the condition stays visible. An Event that repeats is
// counted in the first one, and a pool whose conditions change all the time gets few.
func (p *Pools) emit(ctx context.Context, pool *v1alpha1.SandboxPool, e event) {
	call, cancel := context.WithTimeout(ctx, kube.CallTimeout)
	defer cancel()
	now := metav1.Now()
	result, err := p.correlator.EventCorrelate(&corev1.Event{
		ObjectMeta: metav1.ObjectMeta{GenerateName: pool.Name + "-", Namespace: pool.Namespace},
		InvolvedObject: corev1.ObjectReference{
			APIVersion: v1alpha1.GroupVersion().String(), Kind: "SandboxPool", Namespace: pool.Namespace, Name: pool.Name, UID: pool.UID,
		},
		Type: e.kind, Reason: e.reason, Message: kube.Bounded(cmp.Or(e.message, e.reason), maxEventMessage),
		Source: corev1.EventSource{Component: "berth-allocator"}, FirstTimestamp: now, LastTimestamp: now, Count: 1,
	})
	if err == nil && !result.Skip {
		api, written := p.o.Clients.Kubernetes.CoreV1().Events(pool.Namespace), result.Event
		if written.Count > 1 {
			written, err = api.Patch(call, written.Name, types.StrategicMergePatchType, result.Patch, metav1.PatchOptions{})
		} else {
			written, err = api.Create(call, written, metav1.CreateOptions{})
		}
		if err == nil {
			p.correlator.UpdateState(written)
		}
	}
	if err != nil && ctx.Err() == nil {
		p.o.Log.Warn("Event not written", zap.String("pool", pool.Name), zap.String("reason", e.reason), zap.Error(err))
	}
}
