package pools

import (
	"errors"
	"fmt"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/kube"
	"github.com/berth-sandbox/berth/allocator/pods"
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

// maxMessage bounds the message of a condition, in bytes. A message that names every container of a
// template could exceed the API server's limit, and then no status would be written at all.
const maxMessage = 4 << 10

// paused is the message of a pool that is paused.
const paused = "spec.paused is set: no idle pod is created or deleted"

// known is what the conditions of a pool follow from.
type known struct {
	pool   *v1alpha1.SandboxPool
	counts core.Counts
	// refused is why no pod may be made from the template. createErr is how the last creation failed, and syncErr
	// how the last change of the labels and annotations of a pod did.
	refused, createErr, syncErr error
	// withheld is what the leader withholds, because it would violate an assertion; empty: nothing.
	withheld string
}

// conditions returns the conditions that the pool should have. Those that do not change keep their times.
func (k known) conditions() []metav1.Condition {
	all := append([]metav1.Condition(nil), k.pool.Status.Conditions...)
	degraded := k.degraded()
	for _, c := range []metav1.Condition{k.ready(degraded), k.progressing(degraded), degraded} {
		c.ObservedGeneration, c.Message = k.pool.Generation, kube.Bounded(c.Message, maxMessage)
		meta.SetStatusCondition(&all, c)
	}
	return all
}

// lacks reports whether the pool has fewer warm pods than there is room for.
func (k known) lacks() bool { return k.counts.Warm < k.counts.Wanted }

// short reports whether it lacks warm pods, or pods for claims that wait. A pool of which none are to be warm has
// only the latter.
func (k known) short() bool { return k.lacks() || k.counts.Waiting > 0 }

// full reports whether maxPods keeps the pool from what it asks for, and none of its pods is starting.
func (k known) full() bool { return !k.lacks() || k.counts.Full && k.counts.Pending == 0 }

func (k known) fullMessage() string {
	return fmt.Sprintf("maxPods is reached: %d claimed, %d being released", k.counts.Claimed, k.counts.Releasing)
}

// degraded returns the condition Degraded: the first cause in this order that keeps the pool from what it asks
// for.
func (k known) degraded() metav1.Condition {
	c := metav1.Condition{Type: v1alpha1.PoolDegraded, Status: metav1.ConditionTrue}
	n := k.counts
	switch {
	case k.withheld != "":
		c.Reason, c.Message = v1alpha1.PoolWithheld, k.withheld+"; the leader withholds this and serves everything else"
	case k.refused != nil:
		c.Message, c.Reason = k.refused.Error(), v1alpha1.PoolPodSecurity
		switch {
		case errors.Is(k.refused, pods.ErrAgent):
			c.Reason = v1alpha1.PoolAgentRefused
		case errors.Is(k.refused, pods.ErrRecycle):
			c.Reason = v1alpha1.PoolRecycleRefused
		case errors.Is(k.refused, pods.ErrPreStop):
			c.Reason = v1alpha1.PoolPreStop
		case errors.Is(k.refused, ErrSleep):
			c.Reason = v1alpha1.PoolSleepRefused
		case errors.Is(k.refused, ErrStop):
			c.Reason = v1alpha1.PoolStopRefused
		case errors.Is(k.refused, ErrEgress):
			c.Reason = v1alpha1.PoolEgressRefused
		}
	case !n.Quarantine.IsZero() && k.short():
		c.Reason = v1alpha1.PoolQuarantine
		c.Message = fmt.Sprintf("the journal was begun anew: pods that routers of the earlier journal may reach are kept back until %s, or until an operator ends that (docs/backup.md)",
			n.Quarantine.UTC().Format(time.RFC3339))
	case n.Full && n.Fenced > 0 && k.short():
		c.Reason = v1alpha1.PoolFenced
		c.Message = fmt.Sprintf("maxPods is reached, and %d released pods wait for routers that are not connected, such as %s: see berth fence ls", n.Fenced, n.FencedBy)
	case k.createErr != nil && k.short():
		c.Message, c.Reason = k.createErr.Error(), v1alpha1.PoolCreateFailed
		// The API server has no reason of its own for a quota (plugin/pkg/admission/resourcequota).
		if apierrors.IsForbidden(k.createErr) && strings.Contains(c.Message, "exceeded quota") {
			c.Reason = v1alpha1.PoolQuotaExceeded
		}
	case n.Trouble != (core.Trouble{}) && (n.Target > 0 || n.Waiting > 0): // else none is tried
		next := "a replacement is being tried"
		if !n.Trouble.Retry.IsZero() {
			next = "the next attempt is at " + n.Trouble.Retry.UTC().Format(time.RFC3339)
		}
		c.Reason = reasonOf(n.Trouble.Reason, n.Trouble.Why)
		c.Message = fmt.Sprintf("pod %s ended before it could be used: %s; %s", n.Trouble.Pod, n.Trouble.Why, next)
	case n.Stuck.Pods > 0 && k.short():
		c.Reason = reasonOf(n.Stuck.Reason, n.Stuck.Why)
		c.Message = fmt.Sprintf("pod %s is not ready: %s", n.Stuck.Pod, n.Stuck.Why)
		if n.Stuck.Pods > 1 {
			c.Message = fmt.Sprintf("%d pods are not ready, such as pod %s: %s", n.Stuck.Pods, n.Stuck.Pod, n.Stuck.Why)
		}
	case n.Stranded > 0 && k.short():
		c.Reason, c.Message = v1alpha1.PoolNodesUnusable, fmt.Sprintf("%d pods are on nodes that are cordoned or not ready", n.Stranded)
	case k.syncErr != nil:
		c.Reason, c.Message = v1alpha1.PoolSyncFailed, k.syncErr.Error()
	default:
		c.Status, c.Reason = metav1.ConditionFalse, v1alpha1.PoolHealthy
	}
	return c
}

// reasonOf is the reason of a pod that is not ready.
func reasonOf(reason, why string) string {
	if pods.EgressUnproven(why) {
		return v1alpha1.PoolEgressNotEnforced
	}
	return reason
}

// ready returns the condition Ready. A claim takes a warm pod and the pool makes another one, so the counts
// alone would turn the condition with every claim.
func (k known) ready(degraded metav1.Condition) metav1.Condition {
	c := metav1.Condition{Type: v1alpha1.PoolReady, Status: metav1.ConditionTrue, Reason: v1alpha1.PoolWarm}
	n := k.counts
	if n.Warm >= n.Target {
		return c
	}
	c.Reason, c.Message = v1alpha1.PoolFilling, fmt.Sprintf("%d of %d pods are warm", n.Warm, n.Target)
	switch {
	case k.pool.Spec.Paused:
		c.Reason, c.Message = v1alpha1.PoolPaused, c.Message+"; "+paused
	case degraded.Status == metav1.ConditionTrue:
		c.Reason, c.Message = degraded.Reason, c.Message+"; "+degraded.Message
	case k.full():
		c.Reason, c.Message = v1alpha1.PoolMaxPods, c.Message+"; "+k.fullMessage()
	}
	was := meta.FindStatusCondition(k.pool.Status.Conditions, v1alpha1.PoolReady)
	if was == nil || was.Status != metav1.ConditionTrue || was.ObservedGeneration != k.pool.Generation || n.Warm == 0 {
		c.Status = metav1.ConditionFalse
	}
	return c
}

// progressing returns the condition Progressing.
func (k known) progressing(degraded metav1.Condition) metav1.Condition {
	c := metav1.Condition{Type: v1alpha1.PoolProgressing, Status: metav1.ConditionTrue}
	n := k.counts
	switch {
	case k.pool.DeletionTimestamp != nil:
		c.Reason = v1alpha1.PoolDraining
		c.Message = fmt.Sprintf("%d sandboxes run, %d pods end", n.Claimed, n.Releasing)
	case k.pool.Spec.Paused:
		c.Status, c.Reason, c.Message = metav1.ConditionFalse, v1alpha1.PoolPaused, paused
	case degraded.Status == metav1.ConditionTrue && (k.short() || k.refused != nil):
		c.Status, c.Reason, c.Message = metav1.ConditionFalse, degraded.Reason, degraded.Message
	case n.Outdated > 0:
		c.Reason, c.Message = v1alpha1.PoolRollingOut, fmt.Sprintf("%d idle pods are of an older template", n.Outdated)
	case k.lacks() && k.full():
		c.Status, c.Reason, c.Message = metav1.ConditionFalse, v1alpha1.PoolMaxPods, k.fullMessage()
	case k.lacks():
		c.Reason, c.Message = v1alpha1.PoolFilling, fmt.Sprintf("%d of %d pods are warm", n.Warm, n.Wanted)
	case n.Retiring > 0:
		c.Reason, c.Message = v1alpha1.PoolShrinking, fmt.Sprintf("%d idle pods are being deleted", n.Retiring)
	case n.Warm > n.Wanted:
		c.Status, c.Reason = metav1.ConditionFalse, v1alpha1.PoolSettled
		c.Message = fmt.Sprintf("%d pods are warm, %d are wanted: the others are kept for a minute at most, for callers that try again", n.Warm, n.Wanted)
	default:
		c.Status, c.Reason = metav1.ConditionFalse, v1alpha1.PoolSettled
	}
	return c
}
