package processnode

import (
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/util/flowcontrol"
)

// forgiven is the time since the last restart after which the back-off of a
// container is reset (pkg/kubelet/kubelet.go, crashLoopBackOff.HasExpiredFunc).
const forgiven = 10 * time.Minute

// crashBackOff is the kubelet's back-off, used as the kubelet uses it
// (kuberuntime_manager.go, doBackOff). The first restart is immediate. Each restart
// sets the wait before the next one, which doubles and counts from the end of the
// run.
type crashBackOff struct {
	b *flowcontrol.Backoff
}

func newCrashBackOff(r RestartBackOff) crashBackOff {
	b := flowcontrol.NewBackOff(r.Initial, r.Max)
	b.HasExpiredFunc = func(event, last time.Time, _ time.Duration) bool { return event.Sub(last) > forgiven }
	return crashBackOff{b: b}
}

// restart reports whether a container whose run ended at the given time may be
// started now. If so, it sets the next wait. If not, it returns the time left.
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
