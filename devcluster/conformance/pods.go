package conformance

import (
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

const (
	mainName   = "main"
	besideName = "beside" // sorts before main
	mainPort   = 8080
	// Ports of one behaviour each: the next pod at an address answers elsewhere.
	childPort       = 8099
	forcedChildPort = 8100
	ownPort         = 8101
)

// podSpec is what differs between the pods of the behaviours.
type podSpec struct {
	args      []string // of demo-sandbox in the main container
	command   []string // instead of demo-sandbox
	beside    []string // arguments of a second container on port 8081; nil: none
	restart   corev1.RestartPolicy
	grace     int64 // seconds; 0: 30
	readiness *corev1.Probe
	preStop   *corev1.LifecycleHandler
	finalizer string // empty: none
}

func (p podSpec) build(s *subject) *corev1.Pod {
	container := func(name string, command, args []string) corev1.Container {
		field := func(path string) *corev1.EnvVarSource {
			return &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: path}}
		}
		return corev1.Container{
			Name: name, Image: s.o.Image, ImagePullPolicy: corev1.PullIfNotPresent, Command: command, Args: args,
			Env: []corev1.EnvVar{
				{Name: "POD_IP", ValueFrom: field("status.podIP")},
				{Name: "POD_NAME", ValueFrom: field("metadata.name")},
				{Name: "POD_UID", ValueFrom: field("metadata.uid")},
				{Name: "GREETING", Value: "$(POD_NAME)!"},
				{Name: "POD_NAMESPACE", Value: "$(GREETING)$$(POD_NAME)$(NOBODY)"}, // shown in the answer: proves the expansion
			},
		}
	}
	sandbox := []string{"demo-sandbox"}
	first := container(mainName, sandbox, p.args)
	if p.command != nil {
		first.Command = p.command
	}
	first.ReadinessProbe = p.readiness
	if p.preStop != nil {
		first.Lifecycle = &corev1.Lifecycle{PreStop: p.preStop}
	}
	grace := p.grace
	if grace == 0 {
		grace = 30
	}
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: s.name, Labels: map[string]string{label: s.seen.run}},
		Spec: corev1.PodSpec{
			NodeName: s.o.NodeName, RestartPolicy: p.restart, TerminationGracePeriodSeconds: &grace,
			AutomountServiceAccountToken: new(bool), Containers: []corev1.Container{first},
		},
	}
	if p.finalizer != "" {
		pod.Finalizers = []string{p.finalizer}
	}
	if p.beside != nil {
		pod.Spec.Containers = append(pod.Spec.Containers,
			container(besideName, sandbox, append([]string{"--ports", "8081"}, p.beside...)))
	}
	return pod
}

// get is a probe of the main container, once a second.
func get(path string, failures int32) *corev1.Probe {
	return &corev1.Probe{
		ProbeHandler:  corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Path: path, Port: intstr.FromInt32(mainPort)}},
		PeriodSeconds: 1, TimeoutSeconds: 5, FailureThreshold: failures,
	}
}

func sleepHook(seconds int64) *corev1.LifecycleHandler {
	return &corev1.LifecycleHandler{Sleep: &corev1.SleepAction{Seconds: seconds}}
}

// The properties of a version that a behaviour can wait for.

func mainOf(o observation) corev1.ContainerStatus   { return containerOf(o, mainName) }
func besideOf(o observation) corev1.ContainerStatus { return containerOf(o, besideName) }

func containerOf(o observation, name string) corev1.ContainerStatus {
	for _, c := range o.pod.Status.ContainerStatuses {
		if c.Name == name {
			return c
		}
	}
	return corev1.ContainerStatus{}
}

func condition(pod *corev1.Pod, t corev1.PodConditionType) corev1.PodCondition {
	for _, c := range pod.Status.Conditions {
		if c.Type == t {
			return c
		}
	}
	return corev1.PodCondition{Status: corev1.ConditionUnknown}
}

func ready(o observation) bool {
	return condition(o.pod, corev1.PodReady).Status == corev1.ConditionTrue
}
func notReady(o observation) bool { return !ready(o) }
func gone(o observation) bool     { return o.gone }
func deleting(o observation) bool { return o.pod.DeletionTimestamp != nil }

// stopping reports whether the node has begun to end the pod.
func stopping(o observation) bool {
	return deleting(o) && o.pod.Status.ObservedGeneration == o.pod.Generation
}
func running(o observation) bool    { return mainOf(o).State.Running != nil }
func terminated(o observation) bool { return mainOf(o).State.Terminated != nil }
func restarted(o observation) bool  { return running(o) && mainOf(o).RestartCount > 0 }

func inPhase(p corev1.PodPhase) func(observation) bool {
	return func(o observation) bool { return o.pod.Status.Phase == p }
}

func backingOff() func(observation) bool {
	return func(o observation) bool {
		w := mainOf(o).State.Waiting
		return w != nil && w.Reason == "CrashLoopBackOff"
	}
}

func both(a, b func(observation) bool) func(observation) bool {
	return func(o observation) bool { return a(o) && b(o) }
}

// asked is the time of the deletion request.
func asked(pod *corev1.Pod) time.Time {
	return pod.DeletionTimestamp.Add(-time.Duration(*pod.DeletionGracePeriodSeconds) * time.Second)
}

// startOf is the start of the current run, else of the latest one.
func startOf(c corev1.ContainerStatus) time.Time {
	if c.State.Running != nil {
		return c.State.Running.StartedAt.Time
	}
	return c.State.Terminated.StartedAt.Time
}
