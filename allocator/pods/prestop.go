package pods

import (
	"fmt"
	"iter"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/berth-sandbox/berth/api/v1alpha1"
)

// releaseLag is the time, while there is a leader, from a pod's deletion timestamp until no router
// admits requests for it: one watch event, one journal write and the routers' acknowledgements.
const releaseLag = time.Second

// ServeOn returns how long a pod serves on after another client has deleted it. failover bounds the
// time until a new leader acts, in case the old one was killed at the same moment. After the
// release an admitted request still has connectWindow to reach the pod.
func ServeOn(failover, connectWindow time.Duration) time.Duration {
	return failover + releaseLag + connectWindow
}

// preStopSeconds rounds serveOn up to whole seconds.
func preStopSeconds(serveOn time.Duration) int64 {
	return int64((serveOn + time.Second - 1) / time.Second)
}

// addStopDelay makes every serving container sleep for this many seconds before SIGTERM, or for as
// long as its own preStop sleep if that is longer. Kubernetes counts the sleep as part of the grace
// period and refuses a longer sleep. The grace period therefore grows by as much as the sleep does,
// and each container keeps the time after SIGTERM that its template gave it.
func addStopDelay(spec *corev1.PodSpec, seconds int64) {
	grace := int64(corev1.DefaultTerminationGracePeriodSeconds)
	if own := spec.TerminationGracePeriodSeconds; own != nil {
		grace = max(*own, 0) // Kubernetes treats a negative period as almost none
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

// listeners are the containers that may have requests to answer when the pod is deleted, each with
// its place in the spec. Any container may listen, because a container need not declare its ports.
// Init containers other than sidecars have ended by then, and Kubernetes allows them no hooks.
func listeners(spec *corev1.PodSpec) iter.Seq2[string, *corev1.Container] {
	return func(yield func(string, *corev1.Container) bool) {
		for i := range spec.InitContainers {
			c := &spec.InitContainers[i]
			sidecar := c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways
			if sidecar && !yield(fmt.Sprintf("initContainers[%d]", i), c) {
				return
			}
		}
		for i := range spec.Containers {
			if !yield(fmt.Sprintf("containers[%d]", i), &spec.Containers[i]) {
				return
			}
		}
	}
}

// actionBesideSleep names a handler's action if it is not a sleep, else it returns "".
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

// CheckPreStop returns nil, or an error that wraps ErrPreStop and names the template's preStop
// handlers that leave no room for the sleep which Build adds: a container has one handler, and a
// handler has one action.
func CheckPreStop(pool *v1alpha1.SandboxPool) error {
	var refused []string
	for place, c := range listeners(&pool.Spec.Template.Spec) {
		if c.Lifecycle == nil || c.Lifecycle.PreStop == nil {
			continue
		}
		if action := actionBesideSleep(c.Lifecycle.PreStop); action != "" {
			refused = append(refused, fmt.Sprintf("spec.template.spec.%s.lifecycle.preStop.%s", place, action))
		}
	}
	if len(refused) == 0 {
		return nil
	}
	return fmt.Errorf("%s: %w", strings.Join(refused, ", "), ErrPreStop)
}
