package pods

import (
	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"

	"github.com/berth-sandbox/berth/allocator/core"
)

// Observe is how the watch observes a pod.
func Observe(p *corev1.Pod) core.Pod { return observe(slim(p), zap.NewNop()) }
