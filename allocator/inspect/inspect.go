// Package inspect reads from the API server what people ask about single pods: their objects, their
// Warning events, their logs and what they use.
//
// # Guarantees
//
//   - A pod is named by its UID. A later pod of the same name is not shown in its place.
//   - Each call has a deadline and a bound of what it reads.
//
// # What breaks them
//
// Labels of pods that someone else changes: Usage selects pods by the label of the sandbox, and drops
// pods that it was not asked for.
package inspect

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/kubernetes"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/kube"
	"github.com/berth-sandbox/berth/allocator/pods"
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

// MaxWarnings bounds the Warning events of a Pod.
const MaxWarnings = 20

// Errors of a cluster that lacks what a call needs.
var (
	// ErrNoLogs means that the API server cannot read logs from the pod's node.
	ErrNoLogs = errors.New("the API server cannot read logs from this node")
	// ErrNoMetrics means that the cluster does not serve metrics.k8s.io.
	ErrNoMetrics = errors.New("the cluster does not serve metrics.k8s.io")
	// ErrGone means that the pod does not exist any more.
	ErrGone = errors.New("the pod is gone")
)

// Reader reads from the API server. Its methods may be called concurrently.
type Reader struct{ client kubernetes.Interface }

// New returns a Reader.
func New(client kubernetes.Interface) *Reader { return &Reader{client} }

// Pod is what the API server has about a pod.
type Pod struct {
	Object *corev1.Pod
	// Warnings are its latest Warning events, the latest first. WarningsErr is why they are not known.
	Warnings    []corev1.Event
	WarningsErr error
	// Node is its node, nil before it is scheduled. NodeErr is why it is not known.
	Node    *corev1.Node
	NodeErr error
}

// Pod reads a pod, its Warning events and its node. The error is ErrGone, with the events that are left of
// the pod, or the API server's.
func (r *Reader) Pod(ctx context.Context, key core.PodKey) (p Pod, err error) {
	ctx, cancel := context.WithTimeout(ctx, kube.CallTimeout)
	defer cancel()
	p.Object, err = r.client.CoreV1().Pods(key.Namespace).Get(ctx, key.Name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err) || err == nil && pods.KeyOf(p.Object) != key:
		p.Object = nil
		if key.Life == 0 { // else some may be about another sandbox
			r.warnings(ctx, key, &p)
		}
		return p, ErrGone
	case err != nil:
		return Pod{}, fmt.Errorf("read pod %s: %w", key.Name, err)
	}
	r.warnings(ctx, key, &p)
	if name := p.Object.Spec.NodeName; name != "" {
		if p.Node, p.NodeErr = r.client.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{}); p.NodeErr != nil {
			p.Node = nil
		}
	}
	return p, nil
}

// warnings reads the Warning events of a pod. They outlive it, by an hour by default. Events from before the
// life of the pod began are about another sandbox.
func (r *Reader) warnings(ctx context.Context, key core.PodKey, p *Pod) {
	selector := fields.Set{"involvedObject.kind": "Pod", "involvedObject.uid": key.UID, "type": corev1.EventTypeWarning}
	list, err := r.client.CoreV1().Events(key.Namespace).List(ctx, metav1.ListOptions{FieldSelector: selector.String(), Limit: 10 * MaxWarnings})
	if p.WarningsErr = err; err == nil {
		p.Warnings = list.Items
		if p.Object != nil {
			began := pods.LifeBegan(p.Object)
			p.Warnings = slices.DeleteFunc(p.Warnings, func(e corev1.Event) bool { return !firstSeen(&e).After(began) })
		}
		slices.SortStableFunc(p.Warnings, func(a, b corev1.Event) int { return LastSeen(&b).Compare(LastSeen(&a)) })
		p.Warnings = p.Warnings[:min(len(p.Warnings), MaxWarnings)]
	}
}

// firstSeen is when an event happened first.
func firstSeen(e *corev1.Event) time.Time {
	switch {
	case !e.FirstTimestamp.IsZero():
		return e.FirstTimestamp.Time
	case !e.EventTime.IsZero():
		return e.EventTime.Time
	}
	return e.CreationTimestamp.Time
}

// LastSeen is when an event happened last.
func LastSeen(e *corev1.Event) time.Time {
	switch {
	case e.Series != nil:
		return e.Series.LastObservedTime.Time
	case !e.LastTimestamp.IsZero():
		return e.LastTimestamp.Time
	case !e.EventTime.IsZero():
		return e.EventTime.Time
	}
	return e.CreationTimestamp.Time
}

// LogOptions select lines of a log.
type LogOptions struct {
	// Container is the container's name.
	Container string
	// Since drops lines of earlier seconds. Tail, if not 0, drops all but so many lines.
	Since time.Time
	Tail  int64
}

// Logs opens the log of a container, each line with its time in front. The caller closes it. The
// error is ErrNoLogs, ErrGone or the API server's.
func (r *Reader) Logs(ctx context.Context, key core.PodKey, o LogOptions) (io.ReadCloser, error) {
	options := &corev1.PodLogOptions{Container: o.Container, Timestamps: true}
	if o.Tail > 0 {
		options.TailLines = &o.Tail
	}
	if !o.Since.IsZero() {
		since := metav1.NewTime(o.Since.Truncate(time.Second))
		options.SinceTime = &since
	}
	log, err := r.client.CoreV1().Pods(key.Namespace).GetLogs(key.Name, options).Stream(ctx)
	switch {
	case err == nil:
		if err := r.inLife(ctx, key); err != nil {
			log.Close()
			return nil, err
		}
		return log, nil
	case apierrors.IsNotFound(err):
		return nil, fmt.Errorf("%w: %w", ErrGone, err)
	case apierrors.IsForbidden(err), apierrors.IsMethodNotSupported(err), apierrors.IsInternalError(err), apierrors.IsServiceUnavailable(err),
		apierrors.IsBadRequest(err), apierrors.IsTimeout(err), apierrors.IsServerTimeout(err):
		// The API server answers so when it cannot connect to the kubelet, or the container has no log yet.
		return nil, fmt.Errorf("%w: %w", ErrNoLogs, err)
	}
	return nil, fmt.Errorf("read the log of pod %s: %w", key.Name, err)
}

// inLife returns nil if a pod that can be recycled is in the life that a key names. A log that was opened
// before is of that life then, and not of another sandbox.
func (r *Reader) inLife(ctx context.Context, key core.PodKey) error {
	if key.Life == 0 {
		return nil
	}
	p, err := r.client.CoreV1().Pods(key.Namespace).Get(ctx, key.Name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err) || err == nil && pods.KeyOf(p) != key:
		return ErrGone
	case err != nil:
		return fmt.Errorf("read pod %s: %w", key.Name, err)
	}
	return nil
}

// Usage is what a pod uses.
type Usage struct {
	At time.Time
	// CPU is in cores, Memory in bytes.
	CPU    float64
	Memory int64
	// What only an agent measures, in bytes; 0 if there is none. CPUs and the totals are what the sandbox may
	// use.
	CPUs                                int
	MemoryTotal, Cache, Disk, DiskTotal int64
}

// podMetrics is the part of a PodMetricsList that Usage reads.
type podMetrics struct {
	Items []struct {
		Metadata   metav1.ObjectMeta `json:"metadata"`
		Timestamp  metav1.Time       `json:"timestamp"`
		Containers []struct {
			Usage map[corev1.ResourceName]resource.Quantity `json:"usage"`
		} `json:"containers"`
	} `json:"items"`
}

// Usage returns what the pods of sandboxes use, by the name of the pod. A pod that was not measured
// yet is absent. The error is ErrNoMetrics or the API server's.
func (r *Reader) Usage(ctx context.Context, namespace string, sandboxes []string) (map[string]Usage, error) {
	ctx, cancel := context.WithTimeout(ctx, kube.CallTimeout)
	defer cancel()
	raw, err := r.client.Discovery().RESTClient().Get().
		AbsPath("/apis/metrics.k8s.io/v1beta1/namespaces", namespace, "pods").
		SetHeader("Accept", "application/json").
		Param("labelSelector", v1alpha1.LabelSandbox+" in ("+strings.Join(sandboxes, ",")+")").Do(ctx).Raw()
	switch {
	case apierrors.IsNotFound(err), apierrors.IsForbidden(err):
		return nil, fmt.Errorf("%w: %w", ErrNoMetrics, err)
	case err != nil:
		return nil, fmt.Errorf("read metrics: %w", err)
	}
	var list podMetrics
	if err := json.Unmarshal(raw, &list); err != nil {
		return nil, fmt.Errorf("read metrics: %w", err)
	}
	all := make(map[string]Usage, len(list.Items))
	for _, item := range list.Items {
		u := Usage{At: item.Timestamp.Time}
		for _, c := range item.Containers {
			cpu, memory := c.Usage[corev1.ResourceCPU], c.Usage[corev1.ResourceMemory]
			u.CPU += cpu.AsApproximateFloat64()
			u.Memory += memory.Value()
		}
		all[item.Metadata.Name] = u
	}
	return all, nil
}
