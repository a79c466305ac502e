package rest

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/inspect"
	"github.com/berth-sandbox/berth/api/openapi"
)

// maxDiagnosed bounds the pods of a pool's diagnostics: each takes three calls of the API server.
const maxDiagnosed = 10

// diagnose answers with the pod of a sandbox.
func (a *api) diagnose(w *reply, r *http.Request) error {
	s, err := a.known(r)
	if err != nil {
		return err
	}
	shown := openapi.SandboxDiagnostics{Sandbox: a.toRecord(s)}
	if !s.ReleasedAt.IsZero() {
		if shown.LogLines, err = a.Allocator.LogLines(r.Context(), s); err != nil {
			return err
		}
	}
	if s.Agent.Egress && s.Phase != core.Stopped && s.ReleasedAt.IsZero() {
		if shown.Egress, err = a.usageOf(r.Context(), &s); err != nil {
			return err
		}
	}
	if s.Phase == core.Stopped {
		shown.PodProblem = "the sandbox is stopped, and has no pod"
		return writeJSON(w, http.StatusOK, shown)
	}
	switch p, err := a.Allocator.Pod(r.Context(), s.Pod); {
	case errors.Is(err, inspect.ErrGone):
		shown.PodProblem = "the pod does not exist any more"
		shown.Warnings, shown.WarningsProblem = toWarnings(p)
	case err != nil:
		return err
	default:
		pod := toDiagnostics(p)
		shown.Pod = &pod
	}
	return writeJSON(w, http.StatusOK, shown)
}

// usageOf returns what a sandbox may reach, and what it has reached.
func (a *api) usageOf(ctx context.Context, s *core.Sandbox) (*openapi.SandboxEgress, error) {
	shown, err := a.Allocator.EgressUsage(ctx, s.ID)
	if err != nil {
		return nil, err
	}
	shown.Claim, shown.Ports = toRules(s.Network), []int{}
	if pool := s.PoolEgress; pool != nil {
		shown.Pool = toRules(pool.EgressRules)
		for _, port := range pool.Ports {
			shown.Ports = append(shown.Ports, int(port))
		}
	}
	return &shown, nil
}

func toRules(r core.EgressRules) *openapi.EgressRules {
	return &openapi.EgressRules{Allow: append([]string{}, r.Allow...), Deny: append([]string{}, r.Deny...)}
}

// diagnosePool answers with a pool, its pods that are not ready, and the latest that have failed.
func (a *api) diagnosePool(w *reply, r *http.Request) error {
	name := r.PathValue("pool")
	pool, ok := a.Allocator.Pool(name)
	if !ok {
		return noPool(name)
	}
	counts, err := a.Allocator.Counts(r.Context())
	if err != nil {
		return err
	}
	keys, others, err := a.Allocator.PendingPods(r.Context(), name, maxDiagnosed)
	if err != nil {
		return err
	}
	failures, err := a.Allocator.PodFailures(r.Context(), name)
	if err != nil {
		return err
	}
	shown := openapi.PoolDiagnostics{
		Pool: a.toPool(pool, counts), Pods: []openapi.PodDiagnostics{}, PodsOthers: others, Failures: []openapi.PodFailure{},
	}
	for _, f := range failures {
		shown.Failures = append(shown.Failures, openapi.PodFailure{PodName: f.Pod, Reason: f.Reason, Message: f.Why, At: f.At.UTC()})
	}
	for _, key := range keys {
		p, err := a.Allocator.Pod(r.Context(), key)
		if errors.Is(err, inspect.ErrGone) {
			continue
		}
		if err != nil {
			return err
		}
		shown.Pods = append(shown.Pods, toDiagnostics(p))
	}
	return writeJSON(w, http.StatusOK, shown)
}

func toDiagnostics(p inspect.Pod) openapi.PodDiagnostics {
	o := p.Object
	shown := openapi.PodDiagnostics{
		Name: o.Name, UID: string(o.UID), Phase: string(o.Status.Phase), Reason: o.Status.Reason, Message: o.Status.Message,
		PodIP: o.Status.PodIP, CreatedAt: o.CreationTimestamp.UTC(), Deleting: o.DeletionTimestamp != nil,
		Conditions: []openapi.Condition{}, Containers: []openapi.ContainerDiagnostics{}, Node: o.Spec.NodeName, NodeProblem: nodeProblem(p),
	}
	shown.Warnings, shown.WarningsProblem = toWarnings(p)
	for _, c := range o.Status.Conditions {
		shown.Conditions = append(shown.Conditions, openapi.Condition{
			Type: string(c.Type), Status: string(c.Status), Reason: c.Reason, Message: c.Message, Since: optional(c.LastTransitionTime.UTC()),
		})
	}
	for i := range o.Status.InitContainerStatuses {
		shown.Containers = append(shown.Containers, toContainer(&o.Status.InitContainerStatuses[i], true))
	}
	for i := range o.Status.ContainerStatuses {
		shown.Containers = append(shown.Containers, toContainer(&o.Status.ContainerStatuses[i], false))
	}
	return shown
}

// toWarnings returns the Warning events of a pod, or why they are not known.
func toWarnings(p inspect.Pod) (all []openapi.PodWarning, problem string) {
	all = []openapi.PodWarning{}
	for i := range p.Warnings {
		e := &p.Warnings[i]
		all = append(all, openapi.PodWarning{
			Reason: e.Reason, Message: e.Message, Count: max(1, int(e.Count)), LastSeen: inspect.LastSeen(e).UTC(),
		})
	}
	if p.WarningsErr != nil {
		problem = p.WarningsErr.Error()
	}
	return all, problem
}

func toContainer(c *corev1.ContainerStatus, init bool) openapi.ContainerDiagnostics {
	shown := openapi.ContainerDiagnostics{
		Name: c.Name, Image: c.Image, Init: init, Ready: c.Ready, Restarts: int(c.RestartCount), State: openapi.ContainerDiagnosticsStateUnknown,
	}
	switch s := c.State; {
	case s.Waiting != nil:
		shown.State, shown.Reason, shown.Message = openapi.ContainerDiagnosticsStateWaiting, s.Waiting.Reason, s.Waiting.Message
	case s.Running != nil:
		shown.State = openapi.ContainerDiagnosticsStateRunning
	case s.Terminated != nil:
		code := int(s.Terminated.ExitCode)
		shown.State, shown.Reason, shown.Message, shown.ExitCode = openapi.ContainerDiagnosticsStateTerminated, s.Terminated.Reason, s.Terminated.Message, &code
	}
	if end := c.LastTerminationState.Terminated; end != nil {
		shown.LastEnd = fmt.Sprintf("exit code %d (%s) at %s", end.ExitCode, end.Reason, end.FinishedAt.UTC().Format(time.RFC3339))
		if end.Message != "" {
			shown.LastEnd += ": " + end.Message
		}
	}
	return shown
}

// nodeProblem says what is wrong with the node of a pod, "" for nothing.
func nodeProblem(p inspect.Pod) string {
	switch {
	case p.NodeErr != nil:
		return "the node cannot be read: " + p.NodeErr.Error()
	case p.Node == nil:
		return ""
	}
	for _, c := range p.Node.Status.Conditions {
		if c.Type == corev1.NodeReady && c.Status != corev1.ConditionTrue {
			return fmt.Sprintf("the node is not ready: %s: %s", c.Reason, c.Message)
		}
	}
	if p.Node.Spec.Unschedulable {
		return "the node is cordoned"
	}
	return ""
}

// live returns a live sandbox, or the error for another one.
func (a *api) live(r *http.Request) (core.Sandbox, error) {
	s, err := a.known(r)
	if err == nil && (s.Phase == core.Released || s.Phase == core.Ended) {
		err = notFound(r.PathValue("sandboxID"), s, true)
	}
	return s, err
}

// known returns the sandbox of a call, live or ended.
func (a *api) known(r *http.Request) (core.Sandbox, error) {
	id := r.PathValue("sandboxID")
	s, known, err := a.Allocator.Sandbox(r.Context(), id)
	if err == nil && !known {
		err = notFound(id, s, known)
	}
	return s, err
}
