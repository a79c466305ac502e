package sandboxobjects

import (
	"encoding/hex"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/api/sandboxid"
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

func toObject(s core.Sandbox, namespace string, lines []string) *v1alpha1.Sandbox {
	o := &v1alpha1.Sandbox{
		TypeMeta: metav1.TypeMeta{APIVersion: v1alpha1.GroupVersion().String(), Kind: "Sandbox"},
		ObjectMeta: metav1.ObjectMeta{
			Name: s.ID, Namespace: namespace, Labels: map[string]string{v1alpha1.LabelPool: s.Pool.Name},
		},
		Spec: v1alpha1.SandboxSpec{
			Pool: s.Pool.Name, PodName: s.Pod.Name, PodUID: s.Pod.ID(), PodIP: s.IP.String(), DefaultPort: int32(s.DefaultPort), Restarts: int32(s.Restarts),
			ClaimedAt: metav1.NewMicroTime(s.ClaimedAt), EndAt: timeToObject(s.EndAt), LifetimeEnd: timeToObject(s.LifetimeEnd), StartBy: timeToObject(s.StartBy),
			IdleTimeoutSeconds: wholeSeconds(s.IdleTimeout), Metadata: s.Metadata, Workload: workloadToObject(s.Workload),
			Team: s.Team, User: s.User, IdempotencyKey: s.IdempotencyKey, Batch: s.Batch,
			Access: v1alpha1.Access(s.Access.String()), MaskHost: s.MaskHost, AgentPort: int32(s.Agent.Port), AgentPublic: s.Agent.Public, AgentEgress: s.Agent.Egress,
			NetworkAllow: s.Network.Allow, NetworkDeny: s.Network.Deny, NetworkHeaders: s.Network.Headers,
		},
		Status: toStatus(s, lines),
	}
	if needsFinalizer(s) {
		o.Finalizers = []string{v1alpha1.SandboxFinalizer}
	}
	for _, port := range s.Ports {
		o.Spec.Ports = append(o.Spec.Ports, int32(port))
	}
	for _, port := range s.HTTPSPorts {
		o.Spec.HTTPSPorts = append(o.Spec.HTTPSPorts, int32(port))
	}
	if s.IdempotencyKey != "" {
		o.Spec.RequestHash = hex.EncodeToString(s.RequestHash[:])
	}
	o.Spec.MinBytesPerMinute = int64(s.MinBytes)
	o.Spec.LifetimeSeconds, o.Spec.WakeOnTraffic = wholeSeconds(s.Lifetime), s.Sleep.WakeOnTraffic
	o.Spec.StopAfterSeconds = wholeSeconds(s.Sleep.StopAfter)
	if s.Sleep.WhenIdle {
		o.Spec.OnIdle = v1alpha1.OnEndSleep
	}
	if s.Sleep.AtEnd {
		o.Spec.OnTimeout = v1alpha1.OnEndSleep
	}
	return o
}

// wholeSeconds rounds d up.
func wholeSeconds(d time.Duration) int32 { return int32((d + time.Second - 1) / time.Second) }

// timeToObject returns nil for the zero time. timeFromObject is its inverse.
func timeToObject(t time.Time) *metav1.MicroTime {
	if t.IsZero() {
		return nil
	}
	at := metav1.NewMicroTime(t)
	return &at
}

func timeFromObject(at *metav1.MicroTime) time.Time {
	if at == nil {
		return time.Time{}
	}
	return at.UTC()
}

func workloadToObject(w *core.Workload) *v1alpha1.Workload {
	if w == nil {
		return nil
	}
	return &v1alpha1.Workload{
		Images: w.Images, Requests: v1alpha1.WorkloadResources(w.Requests), Limits: v1alpha1.WorkloadResources(w.Limits),
	}
}

func workloadFromObject(w *v1alpha1.Workload) *core.Workload {
	if w == nil {
		return nil
	}
	return &core.Workload{Images: w.Images, Requests: core.Resources(w.Requests), Limits: core.Resources(w.Limits)}
}

func toStatus(s core.Sandbox, lines []string) v1alpha1.SandboxStatus {
	status := v1alpha1.SandboxStatus{
		Reason:      s.Reason,
		Message:     s.Message,
		ExitCode:    s.ExitCode,
		LogLines:    lines,
		StartedAt:   timeToObject(s.StartedAt),
		ReleasedAt:  timeToObject(s.ReleasedAt),
		LastActive:  timeToObject(s.LastActive),
		AsleepAt:    timeToObject(s.AsleepAt),
		Wakeable:    s.Wakeable,
		Incarnation: int32(s.Incarnation),
		Archive:     s.Archive,
		Revision:    fmt.Sprintf("%d.%d", s.Revision.Term, s.Revision.Counter),
	}
	switch s.Phase {
	case core.Starting:
		status.Phase = v1alpha1.SandboxStarting
	case core.Running, core.Releasing:
		status.Phase = v1alpha1.SandboxRunning
	case core.FallingAsleep:
		status.Phase = v1alpha1.SandboxFallingAsleep
	case core.Asleep:
		status.Phase = v1alpha1.SandboxAsleep
	case core.Waking:
		status.Phase = v1alpha1.SandboxWaking
	case core.Stopped:
		status.Phase = v1alpha1.SandboxStopped
	case core.Released:
		status.Phase = v1alpha1.SandboxReleased
	case core.Ended:
		status.Phase = v1alpha1.SandboxEnded
	}
	return status
}

// fromObject reads an object that an allocator wrote. The CRD's schema rejects every object that
// fromObject cannot read, so an error here means a changed schema.
func fromObject(o *v1alpha1.Sandbox) (core.Sandbox, error) {
	failed := func(err error) (core.Sandbox, error) {
		return core.Sandbox{}, fmt.Errorf("sandbox object %s: %w", sandboxid.Short(o.Name), err)
	}
	revision, err := ParseRevision(o.Status.Revision)
	if err != nil {
		return failed(err)
	}
	s := core.Sandbox{
		Binding: core.Binding{
			ID: o.Name, ClaimedAt: o.Spec.ClaimedAt.UTC(), Metadata: o.Spec.Metadata,
			EndAt: timeFromObject(o.Spec.EndAt), LifetimeEnd: timeFromObject(o.Spec.LifetimeEnd), StartBy: timeFromObject(o.Spec.StartBy),
			IdleTimeout: time.Duration(o.Spec.IdleTimeoutSeconds) * time.Second, MinBytes: uint64(o.Spec.MinBytesPerMinute),
			Team: o.Spec.Team, User: o.Spec.User, IdempotencyKey: o.Spec.IdempotencyKey, Batch: o.Spec.Batch,
			Lifetime: time.Duration(o.Spec.LifetimeSeconds) * time.Second,
			Sleep: core.SleepPolicy{
				WhenIdle: o.Spec.OnIdle == v1alpha1.OnEndSleep, AtEnd: o.Spec.OnTimeout == v1alpha1.OnEndSleep, WakeOnTraffic: o.Spec.WakeOnTraffic,
				StopAfter: time.Duration(o.Spec.StopAfterSeconds) * time.Second,
			},
			MaskHost: o.Spec.MaskHost, Agent: core.Agent{Port: uint16(o.Spec.AgentPort), Public: o.Spec.AgentPublic, Egress: o.Spec.AgentEgress},
			Network: core.EgressRules{Allow: o.Spec.NetworkAllow, Deny: o.Spec.NetworkDeny, Headers: o.Spec.NetworkHeaders},
		},
		Pool:        core.PoolKey{Namespace: o.Namespace, Name: o.Spec.Pool},
		Pod:         fact.PodKeyOf(o.Namespace, o.Spec.PodName, o.Spec.PodUID),
		DefaultPort: uint16(o.Spec.DefaultPort),
		Restarts:    int(o.Spec.Restarts),
		Workload:    workloadFromObject(o.Spec.Workload),
		Cause:       core.Cause{Reason: o.Status.Reason, Message: o.Status.Message, ExitCode: o.Status.ExitCode},
		StartedAt:   timeFromObject(o.Status.StartedAt),
		ReleasedAt:  timeFromObject(o.Status.ReleasedAt),
		LastActive:  timeFromObject(o.Status.LastActive),
		AsleepAt:    timeFromObject(o.Status.AsleepAt),
		Wakeable:    o.Status.Wakeable,
		Incarnation: int(o.Status.Incarnation),
		Archive:     o.Status.Archive,
		Revision:    revision,
	}
	if s.IP, err = netip.ParseAddr(o.Spec.PodIP); err != nil {
		return failed(fmt.Errorf("spec.podIP: %w", err))
	}
	for _, port := range o.Spec.Ports {
		s.Ports = append(s.Ports, uint16(port))
	}
	for _, port := range o.Spec.HTTPSPorts {
		s.HTTPSPorts = append(s.HTTPSPorts, uint16(port))
	}
	var known bool
	if s.Access, known = fact.AccessOf(string(o.Spec.Access)); !known {
		return failed(fmt.Errorf("spec.access: unknown access %q", o.Spec.Access))
	}
	hash, err := hex.DecodeString(o.Spec.RequestHash)
	if err != nil || len(hash) != 0 && len(hash) != len(s.RequestHash) {
		return failed(fmt.Errorf("spec.requestHash: not a SHA-256 in hexadecimal"))
	}
	copy(s.RequestHash[:], hash)
	switch o.Status.Phase {
	case v1alpha1.SandboxStarting:
		s.Phase = core.Starting
	case v1alpha1.SandboxRunning:
		s.Phase = core.Running
	case v1alpha1.SandboxFallingAsleep:
		s.Phase = core.FallingAsleep
	case v1alpha1.SandboxAsleep:
		s.Phase = core.Asleep
	case v1alpha1.SandboxWaking:
		s.Phase = core.Waking
	case v1alpha1.SandboxStopped:
		s.Phase = core.Stopped
	case v1alpha1.SandboxReleased:
		s.Phase = core.Released
	case v1alpha1.SandboxEnded:
		s.Phase = core.Ended
	default:
		return failed(fmt.Errorf("status.phase: unknown phase %q", o.Status.Phase))
	}
	return s, nil
}

// ParseRevision reads status.revision. An empty text is the zero revision: no allocator has written
// the object.
func ParseRevision(text string) (core.Revision, error) {
	if text == "" {
		return core.Revision{}, nil
	}
	term, counter, _ := strings.Cut(text, ".")
	t, err1 := strconv.ParseUint(term, 10, 64)
	c, err2 := strconv.ParseUint(counter, 10, 64)
	if err1 != nil || err2 != nil {
		return core.Revision{}, fmt.Errorf("status.revision %q is not <term>.<counter>", text)
	}
	if t > core.MaxTerm {
		return core.Revision{}, fmt.Errorf("status.revision %q: the term must be %d at most", text, uint64(core.MaxTerm))
	}
	return core.Revision{Term: t, Counter: c}, nil
}
