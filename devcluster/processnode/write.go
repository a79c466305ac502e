package processnode

import (
	"context"
	"encoding/json"
	"fmt"
	"sync"
	"time"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/strategicpatch"
	"k8s.io/client-go/kubernetes"
)

// callTimeout bounds each request to the API server.
const callTimeout = 10 * time.Second

// desired is what the API server should show of a pod. delete: nothing of the
// pod is left and its deletion was asked for, so the object goes after the write.
type desired struct {
	status corev1.PodStatus
	delete bool
}

// statusWriter brings the latest desired status to the API server. A status that
// was overtaken before it could be written is never seen, as with a kubelet.
type statusWriter struct {
	client          kubernetes.Interface
	log             *zap.Logger
	namespace, name string
	uid             types.UID
	poke            chan struct{} // capacity 1

	mu      sync.Mutex
	next    *desired        // nil: nothing to do
	waiting []chan struct{} // of what was offered and not written; closed by the writer
}

func newStatusWriter(client kubernetes.Interface, log *zap.Logger, pod *corev1.Pod) *statusWriter {
	return &statusWriter{client: client, log: log, namespace: pod.Namespace, name: pod.Name, uid: pod.UID, poke: make(chan struct{}, 1)}
}

// offer never blocks. What it returns is closed when this, or what overtook it,
// was written.
func (s *statusWriter) offer(d desired) <-chan struct{} {
	written := make(chan struct{})
	s.mu.Lock()
	s.next = &d
	s.waiting = append(s.waiting, written)
	s.mu.Unlock()
	select {
	case s.poke <- struct{}{}:
	default:
	}
	return written
}

// run writes until ctx ends. What cannot be written now is tried again, in the
// version that is the latest by then.
func (s *statusWriter) run(ctx context.Context) {
	const first, last = 50 * time.Millisecond, 5 * time.Second
	pause := first
	for {
		select {
		case <-s.poke:
		case <-ctx.Done():
			return
		}
		s.mu.Lock()
		d, waiting := s.next, s.waiting
		s.next, s.waiting = nil, nil
		s.mu.Unlock()
		if d == nil {
			continue
		}
		err := s.write(ctx, *d)
		if err == nil || ctx.Err() != nil {
			for _, w := range waiting {
				close(w)
			}
			pause = first
			continue
		}
		s.log.Info("pod status will be written again", zap.Error(err))
		s.mu.Lock()
		if s.next == nil {
			s.next = d
		}
		s.waiting = append(waiting, s.waiting...)
		s.mu.Unlock()
		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
		case <-ctx.Done():
		}
		timer.Stop()
		pause = min(2*pause, last)
		select {
		case s.poke <- struct{}{}:
		default:
		}
	}
}

// write follows status_manager.go, syncPod: read, patch only what differs, under
// the condition that the object is still this pod; then delete it if asked to.
// A pod that is gone or was replaced needs nothing.
func (s *statusWriter) write(ctx context.Context, d desired) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	pods := s.client.CoreV1().Pods(s.namespace)
	live, err := pods.Get(ctx, s.name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err) || (err == nil && live.UID != s.uid):
		return nil
	case err != nil:
		return fmt.Errorf("read the pod: %w", err)
	}
	status := merge(live.Status, d.status)
	if !apiequality.Semantic.DeepEqual(status, live.Status) {
		patch, err := statusPatch(s.uid, live.Status, status)
		if err != nil {
			return err
		}
		if _, err = pods.Patch(ctx, s.name, types.StrategicMergePatchType, patch, metav1.PatchOptions{}, "status"); err != nil && !apierrors.IsNotFound(err) {
			return fmt.Errorf("write the pod's status: %w", err)
		}
	}
	if !d.delete {
		return nil
	}
	options := metav1.DeleteOptions{GracePeriodSeconds: new(int64), Preconditions: metav1.NewUIDPreconditions(string(s.uid))}
	if err := pods.Delete(ctx, s.name, options); err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("delete the ended pod: %w", err)
	}
	return nil
}

// statusPatch carries the UID, so that a pod of the same name is never patched.
func statusPatch(uid types.UID, from, to corev1.PodStatus) ([]byte, error) {
	before, err := json.Marshal(corev1.Pod{Status: from})
	if err != nil {
		return nil, fmt.Errorf("marshal the old status: %w", err)
	}
	after, err := json.Marshal(corev1.Pod{ObjectMeta: metav1.ObjectMeta{UID: uid}, Status: to})
	if err != nil {
		return nil, fmt.Errorf("marshal the new status: %w", err)
	}
	patch, err := strategicpatch.CreateTwoWayMergePatch(before, after, corev1.Pod{})
	if err != nil {
		return nil, fmt.Errorf("compare the pod's status: %w", err)
	}
	return patch, nil
}

// merge keeps what is not the node's to say: conditions of others, the QoS
// class, and the time at which a condition that still holds began to.
func merge(live, want corev1.PodStatus) corev1.PodStatus {
	out := live.DeepCopy()
	out.ObservedGeneration, out.Phase, out.Reason, out.Message = want.ObservedGeneration, want.Phase, want.Reason, want.Message
	out.StartTime, out.HostIP, out.HostIPs, out.PodIP, out.PodIPs = want.StartTime, want.HostIP, want.HostIPs, want.PodIP, want.PodIPs
	out.InitContainerStatuses, out.ContainerStatuses = want.InitContainerStatuses, want.ContainerStatuses
	for _, c := range want.Conditions {
		c.LastTransitionTime = metav1.Now().Rfc3339Copy()
		found := false
		for i, old := range out.Conditions {
			if old.Type != c.Type {
				continue
			}
			found = true
			if old.Status == c.Status {
				c.LastTransitionTime = old.LastTransitionTime
			}
			out.Conditions[i] = c
		}
		if !found {
			out.Conditions = append(out.Conditions, c)
		}
	}
	return *out
}
