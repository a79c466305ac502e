package conformance

import (
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

const (
	mainName = "main"
	mainPort = 8080
	// Ports of one behaviour each: the next pod at an address answers elsewhere.
	childPort       = 8099
	forcedChildPort = 8100
	ownPort         = 8101
)

// podSpec is what differs between the pods of the behaviours.
type podSpec struct {
	args    string // of demo-sandbox, separated by blanks
	command string // instead of demo-sandbox
	never   bool   // restart policy Never
	grace   int64  // seconds; 0: 30
	preStop int64  // seconds of sleep; 0: no hook
	// probe is the path of a readiness probe once a second; empty: none. failures is
	// its threshold, 0: 3. successes and delay are the others, if not 0.
	probe                      string
	failures, successes, delay int32
	finalizer                  string // empty: none
}

func (p podSpec) build(s *subject) *corev1.Pod {
	field := func(name, path string) corev1.EnvVar {
		return corev1.EnvVar{Name: name,
			ValueFrom: &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: path}}}
	}
	c := corev1.Container{
		Name: mainName, Image: s.o.Image, ImagePullPolicy: corev1.PullIfNotPresent,
		Command: []string{"demo-sandbox"}, Args: strings.Fields(p.args),
		Env: []corev1.EnvVar{
			field("POD_IP", "status.podIP"), field("POD_NAME", "metadata.name"), field("POD_UID", "metadata.uid"),
		},
	}
	if p.command != "" {
		c.Command = []string{p.command}
	}
	if p.probe != "" {
		c.ReadinessProbe = &corev1.Probe{
			ProbeHandler: corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Path: p.probe,
				Port: intstr.FromInt32(mainPort)}},
			PeriodSeconds: 1, TimeoutSeconds: 5, FailureThreshold: p.failures, SuccessThreshold: p.successes,
			InitialDelaySeconds: p.delay,
		}
	}
	if p.preStop != 0 {
		c.Lifecycle = &corev1.Lifecycle{PreStop: &corev1.LifecycleHandler{Sleep: &corev1.SleepAction{Seconds: p.preStop}}}
	}
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: s.name, Labels: map[string]string{label: s.seen.run}},
		Spec:       corev1.PodSpec{AutomountServiceAccountToken: new(bool), Containers: []corev1.Container{c}},
	}
	if p.grace != 0 {
		pod.Spec.TerminationGracePeriodSeconds = &p.grace
	}
	if p.never {
		pod.Spec.RestartPolicy = corev1.RestartPolicyNever
	}
	if p.finalizer != "" {
		pod.Finalizers = []string{p.finalizer}
	}
	return pod
}

// version is one version of a pod, as a watch showed it.
type version struct {
	*corev1.Pod
	gone bool // the object was deleted; Pod is its last version
}

// main is the container's status.
func (v version) main() corev1.ContainerStatus {
	if len(v.Status.ContainerStatuses) == 0 {
		return corev1.ContainerStatus{}
	}
	return v.Status.ContainerStatuses[0]
}

func (v version) condition(t corev1.PodConditionType) corev1.PodCondition {
	for _, c := range v.Status.Conditions {
		if c.Type == t {
			return c
		}
	}
	return corev1.PodCondition{Status: corev1.ConditionUnknown}
}

// asked is the time of the deletion request.
func (v version) asked() time.Time {
	return v.DeletionTimestamp.Add(-time.Duration(*v.DeletionGracePeriodSeconds) * time.Second)
}

// property is one that a version may have.
type property = func(version) bool

func ready(v version) bool    { return v.condition(corev1.PodReady).Status == corev1.ConditionTrue }
func notReady(v version) bool { return !ready(v) }
func gone(v version) bool     { return v.gone }
func deleting(v version) bool { return v.DeletionTimestamp != nil }

// stopping reports whether the node has begun to end the pod.
func stopping(v version) bool   { return deleting(v) && v.Status.ObservedGeneration == v.Generation }
func running(v version) bool    { return v.main().State.Running != nil }
func terminated(v version) bool { return v.main().State.Terminated != nil }
func restarted(v version) bool  { return running(v) && v.main().RestartCount > 0 }

func inPhase(p corev1.PodPhase) property {
	return func(v version) bool { return v.Status.Phase == p }
}

func backingOff(v version) bool {
	w := v.main().State.Waiting
	return w != nil && w.Reason == "CrashLoopBackOff"
}
