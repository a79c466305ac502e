package processnode

import (
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/util/flowcontrol"
)

// forgiven is the time since the last restart after which a container's crashes
// are forgotten (pkg/kubelet/kubelet.go, crashLoopBackOff.HasExpiredFunc).
const forgiven = 10 * time.Minute

// crashBackOff is the kubelet's own back-off, driven as the kubelet drives it
// (kuberuntime_manager.go, doBackOff): the first restart is at once and arms the
// wait, which counts from the end of the run and doubles at each restart.
type crashBackOff struct {
	b *flowcontrol.Backoff
}

func newCrashBackOff(r RestartBackOff) crashBackOff {
	b := flowcontrol.NewBackOff(r.Initial, r.Max)
	b.HasExpiredFunc = func(event, last time.Time, _ time.Duration) bool { return event.Sub(last) > forgiven }
	return crashBackOff{b: b}
}

// restart asks whether a container whose run ended at the given time may be
// started now. If so, the next wait is armed. If not, it says when to ask again.
func (c crashBackOff) restart(container string, ended time.Time) (wait time.Duration, ok bool) {
	if c.b.IsInBackOffSince(container, ended) {
		return c.b.Get(container) - c.b.Clock.Since(ended), false
	}
	c.b.Next(container, ended)
	return 0, true
}

func (c crashBackOff) waiting(pod *corev1.Pod, container string) *corev1.ContainerStateWaiting {
	return &corev1.ContainerStateWaiting{
		Reason: "CrashLoopBackOff",
		Message: fmt.Sprintf("back-off %s restarting failed container=%s pod=%s_%s(%s)",
			c.b.Get(container), container, pod.Name, pod.Namespace, pod.UID),
	}
}
