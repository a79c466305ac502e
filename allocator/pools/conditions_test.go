package pools

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/pods"
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

func TestConditionsQuoteWhatKeepsAPoolEmpty(t *testing.T) {
	quota := apierrors.NewForbidden(schema.GroupResource{Resource: "pods"}, "demo-x", errors.New("exceeded quota: small, requested: pods=1, used: pods=5, limited: pods=5"))
	missing := core.Counts{Target: 3, Wanted: 3, Warm: 1, Pending: 2}
	with := func(change func(*core.Counts)) core.Counts {
		n := missing
		change(&n)
		return n
	}
	full := core.Counts{Target: 3, Wanted: 3, Warm: 3}
	for name, c := range map[string]struct {
		counts                       core.Counts
		refused, createErr, syncErr  error
		withheld                     string
		deleted                      bool
		ready, progressing, degraded string // status, reason and message
	}{
		"full": {counts: full, ready: "True Warm ", progressing: "False Settled ", degraded: "False Healthy "},
		"filling": {counts: missing, ready: "False Filling 1 of 3 pods are warm", progressing: "True Filling 1 of 3 pods are warm",
			degraded: "False Healthy "},
		"template refused, old pods warm": {counts: full, refused: errors.New("hostPID=true"), ready: "True Warm ",
			progressing: "False PodSecurity hostPID=true", degraded: "True PodSecurity hostPID=true"},
		"an effect is withheld": {counts: full, withheld: "pod demo-x: why", ready: "True Warm ", progressing: "False Settled ",
			degraded: "True Withheld pod demo-x: why; the leader withholds this and serves everything else"},
		"preStop": {counts: full, refused: fmt.Errorf("containers[0]: %w", pods.ErrPreStop), ready: "True Warm ",
			progressing: "False PreStop containers[0]: " + pods.ErrPreStop.Error(), degraded: "True PreStop containers[0]: " + pods.ErrPreStop.Error()},
		"sleep": {counts: full, refused: fmt.Errorf("spec.onIdle: %w: probe", ErrSleep), ready: "True Warm ",
			progressing: "False Sleep spec.onIdle: " + ErrSleep.Error() + ": probe", degraded: "True Sleep spec.onIdle: " + ErrSleep.Error() + ": probe"},
		"quota": {counts: missing, createErr: fmt.Errorf("create pod demo-x: %w", quota),
			ready:       "False QuotaExceeded 1 of 3 pods are warm; create pod demo-x: " + quota.Error(),
			progressing: "False QuotaExceeded create pod demo-x: " + quota.Error(), degraded: "True QuotaExceeded create pod demo-x: " + quota.Error()},
		"another error of the API server": {counts: missing, createErr: errors.New("no"), ready: "False CreateFailed 1 of 3 pods are warm; no",
			progressing: "False CreateFailed no", degraded: "True CreateFailed no"},
		"quota, and only claims wait": {counts: core.Counts{Waiting: 1}, createErr: fmt.Errorf("create pod demo-x: %w", quota), ready: "True Warm ",
			progressing: "False QuotaExceeded create pod demo-x: " + quota.Error(), degraded: "True QuotaExceeded create pod demo-x: " + quota.Error()},
		"an error that no pod waits for": {counts: full, createErr: errors.New("no"), ready: "True Warm ", progressing: "False Settled ",
			degraded: "False Healthy "},
		"unschedulable": {
			counts: with(func(n *core.Counts) {
				n.Stuck = core.Stuck{Reason: core.PodUnschedulable, Pod: "demo-x", Pods: 1, Why: "0/3 nodes are available: 3 Insufficient cpu."}
			}),
			ready:       "False Unschedulable 1 of 3 pods are warm; pod demo-x is not ready: 0/3 nodes are available: 3 Insufficient cpu.",
			progressing: "False Unschedulable pod demo-x is not ready: 0/3 nodes are available: 3 Insufficient cpu.",
			degraded:    "True Unschedulable pod demo-x is not ready: 0/3 nodes are available: 3 Insufficient cpu.",
		},
		"the network of the pods is open": {
			counts: with(func(n *core.Counts) {
				n.Stuck = core.Stuck{Reason: core.PodNotStarted, Pod: "demo-x", Pods: 1, Why: "egress check failed: x"}
			}),
			ready:       "False EgressNotEnforced 1 of 3 pods are warm; pod demo-x is not ready: egress check failed: x",
			progressing: "False EgressNotEnforced pod demo-x is not ready: egress check failed: x",
			degraded:    "True EgressNotEnforced pod demo-x is not ready: egress check failed: x",
		},
		"pods end": {
			counts: with(func(n *core.Counts) {
				n.Trouble = core.Trouble{Pod: "demo-x", Reason: core.PodOOMKilled, Why: "exit code 137"}
			}),
			ready:       "False OOMKilled 1 of 3 pods are warm; pod demo-x ended before it could be used: exit code 137; a replacement is being tried",
			progressing: "False OOMKilled pod demo-x ended before it could be used: exit code 137; a replacement is being tried",
			degraded:    "True OOMKilled pod demo-x ended before it could be used: exit code 137; a replacement is being tried",
		},
		"pods ended, and none is wanted now": {counts: core.Counts{Trouble: core.Trouble{Pod: "demo-x", Reason: core.PodOOMKilled, Why: "exit code 137"}},
			ready: "True Warm ", progressing: "False Settled ", degraded: "False Healthy "},
		"nodes": {counts: with(func(n *core.Counts) { n.Stranded = 2 }),
			ready:       "False NodesUnusable 1 of 3 pods are warm; 2 pods are on nodes that are cordoned or not ready",
			progressing: "False NodesUnusable 2 pods are on nodes that are cordoned or not ready",
			degraded:    "True NodesUnusable 2 pods are on nodes that are cordoned or not ready"},
		"maxPods": {counts: with(func(n *core.Counts) { n.Wanted, n.Claimed = 1, 9 }),
			ready:       "False MaxPods 1 of 3 pods are warm; maxPods is reached: 9 claimed, 0 being released",
			progressing: "False Settled ", degraded: "False Healthy "},
		"rollout": {counts: core.Counts{Target: 3, Wanted: 3, Warm: 3, Outdated: 2}, ready: "True Warm ",
			progressing: "True RollingOut 2 idle pods are of an older template", degraded: "False Healthy "},
		"labels that are not valid": {counts: full, syncErr: errors.New("must be no more than 63 bytes"), ready: "True Warm ",
			progressing: "False Settled ", degraded: "True SyncFailed must be no more than 63 bytes"},
		"maxPods, and released pods": {counts: core.Counts{Target: 3, Wanted: 3, Releasing: 9, Full: true},
			ready:       "False MaxPods 0 of 3 pods are warm; maxPods is reached: 0 claimed, 9 being released",
			progressing: "False MaxPods maxPods is reached: 0 claimed, 9 being released", degraded: "False Healthy "},
		"a router that has gone holds all pods": {counts: core.Counts{Target: 3, Wanted: 3, Releasing: 9, Full: true, Fenced: 8, FencedBy: "router-x"},
			ready:       "False Fenced 0 of 3 pods are warm; maxPods is reached, and 8 released pods wait for routers that are not connected, such as router-x: see berth fence ls",
			progressing: "False Fenced maxPods is reached, and 8 released pods wait for routers that are not connected, such as router-x: see berth fence ls",
			degraded:    "True Fenced maxPods is reached, and 8 released pods wait for routers that are not connected, such as router-x: see berth fence ls"},
		"the quarantine": {counts: with(func(n *core.Counts) { n.Quarantine = time.Unix(0, 0) }),
			ready:       "False Quarantine 1 of 3 pods are warm; the journal was begun anew: pods that routers of the earlier journal may reach are kept back until 1970-01-01T00:00:00Z, or until an operator ends that (docs/backup.md)",
			progressing: "False Quarantine the journal was begun anew: pods that routers of the earlier journal may reach are kept back until 1970-01-01T00:00:00Z, or until an operator ends that (docs/backup.md)",
			degraded:    "True Quarantine the journal was begun anew: pods that routers of the earlier journal may reach are kept back until 1970-01-01T00:00:00Z, or until an operator ends that (docs/backup.md)"},
		"too many": {counts: core.Counts{Target: 1, Wanted: 1, Warm: 1, Retiring: 2}, ready: "True Warm ",
			progressing: "True Shrinking 2 idle pods are being deleted", degraded: "False Healthy "},
		"kept for callers that try again": {counts: core.Counts{Target: 1, Wanted: 1, Warm: 3}, ready: "True Warm ",
			progressing: "False Settled 3 pods are warm, 1 are wanted: the others are kept for a minute at most, for callers that try again", degraded: "False Healthy "},
		"deleted": {counts: core.Counts{Claimed: 2, Releasing: 1}, deleted: true, ready: "True Warm ",
			progressing: "True Draining 2 sandboxes run, 1 pods end", degraded: "False Healthy "},
	} {
		t.Run(name, func(t *testing.T) {
			pool := &v1alpha1.SandboxPool{ObjectMeta: metav1.ObjectMeta{Name: "demo", Generation: 7}}
			if c.deleted {
				pool.DeletionTimestamp = &metav1.Time{Time: time.Unix(1, 0)}
			}
			all := known{pool: pool, counts: c.counts, refused: c.refused, createErr: c.createErr, syncErr: c.syncErr, withheld: c.withheld}.conditions()
			require.Len(t, all, 3)
			for kind, want := range map[string]string{v1alpha1.PoolReady: c.ready, v1alpha1.PoolProgressing: c.progressing, v1alpha1.PoolDegraded: c.degraded} {
				got := meta.FindStatusCondition(all, kind)
				require.Equal(t, want, fmt.Sprintf("%s %s %s", got.Status, got.Reason, got.Message), kind)
				require.EqualValues(t, 7, got.ObservedGeneration)
			}
		})
	}
}

// A condition that repeats, or whose message alone changes, makes no Event.
func TestOnlyTransitionsMakeEvents(t *testing.T) {
	conditions := func(degraded, progressing string) []metav1.Condition {
		status := metav1.ConditionTrue
		if degraded == v1alpha1.PoolHealthy {
			status = metav1.ConditionFalse
		}
		return []metav1.Condition{
			{Type: v1alpha1.PoolDegraded, Status: status, Reason: degraded, Message: "m"}, {Type: v1alpha1.PoolProgressing, Reason: progressing, Message: "p"},
		}
	}
	settled := conditions(v1alpha1.PoolHealthy, v1alpha1.PoolSettled)
	pull := conditions(core.PodImagePull, core.PodImagePull)
	rolling := conditions(v1alpha1.PoolHealthy, v1alpha1.PoolRollingOut)
	for name, c := range map[string]struct {
		was, is []metav1.Condition
		want    []event
	}{
		"the first":     {nil, settled, nil},
		"nothing new":   {pull, pull, nil},
		"filling":       {settled, conditions(v1alpha1.PoolHealthy, v1alpha1.PoolFilling), nil},
		"trouble":       {settled, pull, []event{{corev1.EventTypeWarning, core.PodImagePull, "m"}}},
		"other trouble": {pull, conditions(core.PodOOMKilled, core.PodOOMKilled), []event{{corev1.EventTypeWarning, core.PodOOMKilled, "m"}}},
		"recovery":      {pull, settled, []event{{corev1.EventTypeNormal, "Recovered", "it was: ImagePullFailed"}}},
		"rollout":       {settled, rolling, []event{{corev1.EventTypeNormal, v1alpha1.PoolRollingOut, "p"}}},
		"rolled out":    {rolling, settled, []event{{corev1.EventTypeNormal, "RolledOut", "all idle pods are of the current template"}}},
		"deletion":      {settled, conditions(v1alpha1.PoolHealthy, v1alpha1.PoolDraining), []event{{corev1.EventTypeNormal, v1alpha1.PoolDraining, "p"}}},
	} {
		t.Run(name, func(t *testing.T) { require.Equal(t, c.want, transitions(c.was, c.is)) })
	}
}
