package pods

import (
	"errors"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/berth-sandbox/berth/api/v1alpha1"
)

// noticeTime is what may pass, while there is a leader, between a pod's deletion timestamp
// and the moment from which no router admits a request for it: a watch event, a write to the
// journal, the routers' acknowledgements.
const noticeTime = time.Second

// ServeOn is for how long a pod goes on serving after somebody else has deleted it. The
// leader may have been killed in that moment: failover bounds the time until another
// one leads. By the end of the sleep an admitted request has had the window to reach
// the pod.
func ServeOn(failover, window time.Duration) time.Duration { return failover + noticeTime + window }

// preStopSeconds is serveOn in whole seconds, not less.
func preStopSeconds(serveOn time.Duration) int64 {
	return int64((serveOn + time.Second - 1) / time.Second)
}

// delayStop has every container of the pod sleep for that long, or for as long as
// its own preStop sleep says if that is more, before it gets SIGTERM. Kubernetes
// counts the sleep as part of the grace period, and refuses a longer one; so the
// grace period becomes longer by as much as the sleep does, and each container has
// as much time after SIGTERM as the template gave it.
func delayStop(spec *corev1.PodSpec, seconds int64) {
	grace := int64(corev1.DefaultTerminationGracePeriodSeconds)
	if own := spec.TerminationGracePeriodSeconds; own != nil {
		grace = max(*own, 0) // Kubernetes takes a negative one for almost none
	}
	var longer int64
	for _, c := range listeners(spec) {
		var own int64
		if c.Lifecycle == nil {
			c.Lifecycle = &corev1.Lifecycle{}
		}
		if h := c.Lifecycle.PreStop; h != nil {
			if actionBesideSleep(h) != "" {
				continue // refused by CheckPreStop
			}
			if h.Sleep != nil {
				own = max(h.Sleep.Seconds, 0)
			}
		}
		c.Lifecycle.PreStop = &corev1.LifecycleHandler{Sleep: &corev1.SleepAction{Seconds: max(own, seconds)}}
		longer = max(longer, seconds-own)
	}
	grace += longer
	spec.TerminationGracePeriodSeconds = &grace
}

// listeners are the containers that may have requests to answer when the pod is to
// end: which of them listens, nobody says. An init container that is no sidecar has
// ended by then, and Kubernetes allows it no hooks.
func listeners(spec *corev1.PodSpec) []*corev1.Container {
	var all []*corev1.Container
	for i := range spec.InitContainers {
		if c := &spec.InitContainers[i]; sidecar(c) {
			all = append(all, c)
		}
	}
	for i := range spec.Containers {
		all = append(all, &spec.Containers[i])
	}
	return all
}

func sidecar(c *corev1.Container) bool {
	return c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways
}

// actionBesideSleep names a handler's action, if it is not a sleep.
func actionBesideSleep(h *corev1.LifecycleHandler) string {
	switch {
	case h.Exec != nil:
		return "exec"
	case h.HTTPGet != nil:
		return "httpGet"
	case h.TCPSocket != nil:
		return "tcpSocket"
	}
	return ""
}

// ErrPreStop is in the error of CheckPreStop.
var ErrPreStop = errors.New("a container of a sandbox can have no preStop action but sleep: it has to go on serving after the pod was deleted, until no request can be on its way to it any more; have it clean up on SIGTERM, which comes after that")

// CheckPreStop returns nil, or names the preStop handlers of the pool's template
// that leave no room for the sleep which Build adds: a container has one handler,
// and a handler one action.
func CheckPreStop(pool *v1alpha1.SandboxPool) error {
	var refused []string
	look := func(list string, i int, c *corev1.Container) {
		if c.Lifecycle == nil || c.Lifecycle.PreStop == nil {
			return
		}
		if action := actionBesideSleep(c.Lifecycle.PreStop); action != "" {
			refused = append(refused, fmt.Sprintf("spec.template.spec.%s[%d].lifecycle.preStop.%s", list, i, action))
		}
	}
	spec := &pool.Spec.Template.Spec
	for i := range spec.InitContainers {
		if c := &spec.InitContainers[i]; sidecar(c) {
			look("initContainers", i, c)
		}
	}
	for i := range spec.Containers {
		look("containers", i, &spec.Containers[i])
	}
	if len(refused) == 0 {
		return nil
	}
	return fmt.Errorf("%s: %w", strings.Join(refused, ", "), ErrPreStop)
}
