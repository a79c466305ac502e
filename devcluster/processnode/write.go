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

// desired is the status that the API server should show of a pod. With delete the
// object is deleted after the write: the pod has ended and its deletion was
// requested.
type desired struct {
	status corev1.PodStatus
	delete bool
}

// statusWriter writes the latest desired status to the API server. Like a kubelet,
// it skips a status that a later one has replaced before the write.
type statusWriter struct {
	client          kubernetes.Interface
	log             *zap.Logger
	namespace, name string
	uid             types.UID
	poke            chan struct{} // capacity 1

	mu      sync.Mutex
	next    *desired        // nil: nothing to do
	waiting []chan struct{} // of the offers that are not written yet; closed by the writer
}

func newStatusWriter(client kubernetes.Interface, log *zap.Logger, pod *corev1.Pod) *statusWriter {
	return &statusWriter{client: client, log: log, namespace: pod.Namespace, name: pod.Name, uid: pod.UID,
		poke: make(chan struct{}, 1)}
}

// offer never blocks. It returns a channel that is closed when this status, or a
// later one, was written.
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

// run writes until ctx ends. After a write that failed it tries the status that is
// the latest by then.
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

// write follows status_manager.go, syncPod: it reads the pod, patches what differs
// on the condition that the object has the same UID, and then deletes the object
// if d.delete is set. It does nothing if the pod is gone or was replaced.
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
		if _, err = pods.Patch(ctx, s.name, types.StrategicMergePatchType, patch, metav1.PatchOptions{},
			"status"); err != nil && !apierrors.IsNotFound(err) {
			return fmt.Errorf("write the pod's status: %w", err)
		}
	}
	if !d.delete {
		return nil
	}
	options := metav1.DeleteOptions{GracePeriodSeconds: new(int64),
		Preconditions: metav1.NewUIDPreconditions(string(s.uid))}
	if err := pods.Delete(ctx, s.name, options); err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("delete the ended pod: %w", err)
	}
	return nil
}

// statusPatch names the UID, so that a later pod of the same name is never patched.
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

// merge keeps the fields that the node does not own: the conditions of others, the
// QoS class, and the transition times of conditions whose status is unchanged.
func merge(live, want corev1.PodStatus) corev1.PodStatus {
	out := live.DeepCopy()
	out.ObservedGeneration, out.Phase, out.Reason, out.Message = want.ObservedGeneration, want.Phase, want.Reason,
		want.Message
	out.StartTime, out.HostIP, out.HostIPs, out.PodIP, out.PodIPs = want.StartTime, want.HostIP, want.HostIPs,
		want.PodIP, want.PodIPs
	out.ContainerStatuses = want.ContainerStatuses
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
