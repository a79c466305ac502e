package processnode

import (
	"fmt"
	"slices"
	"syscall"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// The two containers of Berth in a pod that is recycled, as allocator/pods makes them. They do not run. The node
// does what the kubelet does when the sidecar sees its file change and exits: it kills and removes all
// containers at once, and starts all of them again.
const (
	lifeAnnotation = "berth.sh/life"
	awaitsFile     = "/berth-life/life"
)

// cleans and awaits report whether an init container is one of these.
func cleans(c *corev1.Container) bool {
	return slices.Equal(c.Command, []string{agentName, "clean", "/berth-clean", awaitsFile}) && len(c.Args) == 0
}

func awaits(c *corev1.Container) bool {
	return slices.Equal(c.Command, []string{agentName, "await", awaitsFile}) && len(c.Args) == 0
}

// initRun is a start of an init container.
type initRun struct {
	id string
	at time.Time
}

// startInits starts the init containers, unless they have run since the last restart of all containers.
func (w *worker) startInits() {
	if w.inits != nil || len(w.pod.Spec.InitContainers) == 0 {
		return
	}
	for range w.pod.Spec.InitContainers {
		w.inits = append(w.inits, initRun{newContainerID(), time.Now()})
	}
	w.life = w.pod.Annotations[lifeAnnotation]
}

// recycled reports whether the sidecar would exit now.
func (w *worker) recycled() bool {
	sidecar := func(c corev1.Container) bool { return awaits(&c) }
	return w.inits != nil && slices.ContainsFunc(w.pod.Spec.InitContainers, sidecar) &&
		w.pod.Annotations[lifeAnnotation] != w.life
}

// restartAll kills the container without a grace period, if it runs, and forgets all containers
// (kuberuntime_manager.go, ContainersToReset).
func (w *worker) restartAll() {
	w.restarting = true
	w.publish()
	r := w.current
	if r == nil {
		w.removeAll()
		return
	}
	r.stopping = true
	w.children.Go(func() {
		_ = r.proc.Signal(syscall.SIGKILL) // fails when it has ended already
		<-r.proc.Done()
		w.post(func() { r.stopped = true })
	})
}

// removeAll forgets the containers, when they have ended.
func (w *worker) removeAll() {
	w.restarting, w.hasRestarted = false, true
	w.inits, w.exited, w.earlier, w.waiting = nil, nil, nil, nil
	w.initRestarts++
	w.restarts++
	w.backOff.Reset("")
}

// initStatuses are the statuses of the init containers.
func (w *worker) initStatuses() (all []corev1.ContainerStatus) {
	for i := range w.pod.Spec.InitContainers {
		c := &w.pod.Spec.InitContainers[i]
		sidecar := c.RestartPolicy != nil
		started := sidecar && w.inits != nil && !w.finished
		s := corev1.ContainerStatus{Name: c.Name, Image: c.Image, RestartCount: w.initRestarts, Started: &started}
		switch {
		case w.inits == nil:
			s.State.Waiting = &corev1.ContainerStateWaiting{Reason: "PodInitializing"}
		case started && !w.restarting:
			s.State.Running = &corev1.ContainerStateRunning{StartedAt: metav1.NewTime(w.inits[i].at)}
			s.Ready = true
		default:
			at := metav1.NewTime(w.inits[i].at)
			s.State.Terminated = &corev1.ContainerStateTerminated{Reason: "Completed", StartedAt: at, FinishedAt: at}
			if cleans(c) {
				s.State.Terminated.Message = w.life
			}
			s.Ready = !sidecar
		}
		if w.inits != nil {
			s.ContainerID, s.ImageID = w.inits[i].id, "process-node/"+c.Image
			if t := s.State.Terminated; t != nil {
				t.ContainerID = s.ContainerID
			}
		}
		all = append(all, s)
	}
	return all
}

// restartingCondition is the condition of a pod whose containers all restart, or have done so.
func (w *worker) restartingCondition() (all []corev1.PodCondition) {
	switch {
	case w.restarting:
		all = append(all, corev1.PodCondition{Type: corev1.AllContainersRestarting, Status: corev1.ConditionTrue,
			Reason: "RestartAllContainersStarted", Message: "container exited with restart policy rule"})
	case w.hasRestarted:
		all = append(all, corev1.PodCondition{Type: corev1.AllContainersRestarting, Status: corev1.ConditionFalse})
	}
	return all
}

// refuseInit refuses an init container that is none of Berth's.
func refuseInit(i int, c *corev1.Container, refuse func(is bool, format string, args ...any)) {
	at := fmt.Sprintf("spec.initContainers[%d]", i)
	refuse(!installsAgent(c) && !cleans(c) && !awaits(c), "%s (only those of Berth)", at)
	refuse(c.RestartPolicy != nil && !awaits(c), "%s.restartPolicy", at)
	refuse(awaits(c) && !restartsAll(c), "%s.restartPolicyRules (only RestartAllContainers after exit code 88)", at)
}

func restartsAll(c *corev1.Container) bool {
	if len(c.RestartPolicyRules) != 1 || c.RestartPolicyRules[0].ExitCodes == nil {
		return false
	}
	rule := c.RestartPolicyRules[0]
	return rule.Action == corev1.ContainerRestartRuleActionRestartAllContainers &&
		rule.ExitCodes.Operator == corev1.ContainerRestartRuleOnExitCodesOpIn &&
		slices.Equal(rule.ExitCodes.Values, []int32{88})
}
