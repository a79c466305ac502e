package pods

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/util/workqueue"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/kube"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/internal/options"
)

// Annotations that keep the cluster autoscaler and Karpenter from removing a node under a claimed
// pod. They stay until the pod is gone: a released pod also keeps its address from reuse until no
// router routes to it.
const (
	annotationSafeToEvict  = "cluster-autoscaler.kubernetes.io/safe-to-evict"
	annotationDoNotDisrupt = "karpenter.sh/do-not-disrupt"
)

const (
	// minLabelRetry and maxLabelRetry bound the back-off after a failed write.
	minLabelRetry = 100 * time.Millisecond
	maxLabelRetry = 10 * time.Second
	// labelRestore is the pause before the labels of pool and egress are put back. It bounds the write rate when
	// another controller removes the label each time.
	labelRestore = time.Second
)

// Labeler shows on each pod what it is used for: labels for people and NetworkPolicies, annotations
// for cluster autoscalers. The allocator never reads these back. Only the latest state of a pod is
// written. Its methods may be called concurrently.
type Labeler struct {
	o     LabelerOptions
	queue workqueue.TypedRateLimitingInterface[core.PodKey]

	mu     sync.Mutex
	latest map[core.PodKey]core.LabelPod
}

// LabelerOptions configure a Labeler. All are required.
type LabelerOptions struct {
	Client kubernetes.Interface
	// Yield is called before each write and may wait.
	Yield func(context.Context)
	Log   *zap.Logger
}

// NewLabeler returns a Labeler, or an error that names the missing options.
func NewLabeler(o LabelerOptions) (*Labeler, error) {
	return &Labeler{
		o: o, queue: kube.NewQueue[core.PodKey](minLabelRetry, maxLabelRetry), latest: map[core.PodKey]core.LabelPod{},
	}, options.Require(o, "Client", "Yield", "Log")
}

// Label queues a pod's new labels. It never blocks.
func (l *Labeler) Label(e core.LabelPod) {
	l.mu.Lock()
	l.latest[e.Pod] = e
	l.mu.Unlock()
	if e.Restored {
		l.queue.AddAfter(e.Pod, labelRestore)
		return
	}
	l.queue.Add(e.Pod)
}

// Waiting returns the number of pods with an unwritten label.
func (l *Labeler) Waiting() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.latest)
}

// Run writes with this many workers until ctx ends.
func (l *Labeler) Run(ctx context.Context, workers int) {
	kube.Work(ctx, l.queue, workers, l.next)
}

// next writes the latest labels of a pod.
func (l *Labeler) next(ctx context.Context, key core.PodKey) error {
	l.o.Yield(ctx)
	l.mu.Lock()
	e, waits := l.latest[key]
	l.mu.Unlock()
	if !waits {
		return nil // an earlier write included it
	}
	call, cancel := context.WithTimeout(ctx, kube.CallTimeout)
	defer cancel()
	if err := l.write(call, e); err != nil {
		if ctx.Err() == nil {
			l.o.Log.Warn("pod not labelled, retrying", zap.String("pod", key.Name), zap.Error(err))
		}
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.latest[key] == e {
		delete(l.latest, key)
	}
	return nil
}

// write labels the pod if it still exists.
func (l *Labeler) write(ctx context.Context, e core.LabelPod) error {
	labels := map[string]string{v1alpha1.LabelPool: e.Pool}
	annotations := map[string]string{}
	if e.ID != "" {
		labels[v1alpha1.LabelPhase], labels[v1alpha1.LabelSandbox] = v1alpha1.PhaseClaimed, e.ID
		if e.Released {
			labels[v1alpha1.LabelPhase] = v1alpha1.PhaseReleased
		}
		annotations[annotationSafeToEvict], annotations[annotationDoNotDisrupt] = "false", "true"
	}
	if e.Restored {
		p, err := l.o.Client.CoreV1().Pods(e.Pod.Namespace).Get(ctx, e.Pod.Name, metav1.GetOptions{})
		switch {
		case apierrors.IsNotFound(err):
			return nil
		case err != nil:
			return fmt.Errorf("read pod %s: %w", e.Pod.Name, err)
		}
		if made, _ := egressOf(p); made {
			labels[v1alpha1.LabelEgress] = v1alpha1.EgressByGateway
		}
	}
	kind, patch := types.MergePatchType, any(map[string]any{"metadata": map[string]any{
		"uid": e.Pod.UID, "labels": labels, "annotations": annotations,
	}})
	if e.Pod.Life > 0 {
		kind, patch = types.JSONPatchType, lifePatch(e.Pod, labels, annotations)
	}
	raw, err := json.Marshal(patch)
	if err != nil {
		return fmt.Errorf("encode patch: %w", err)
	}
	_, err = l.o.Client.CoreV1().Pods(e.Pod.Namespace).Patch(ctx, e.Pod.Name, kind, raw, metav1.PatchOptions{})
	// The pod is gone, or another pod has its name: the UID of a pod cannot change, so the API server
	// calls the patch invalid. The same if the pod is in another life.
	if apierrors.IsNotFound(err) || apierrors.IsInvalid(err) {
		return nil
	}
	return err
}

// lifePatch labels one life of a pod.
func lifePatch(key core.PodKey, labels, annotations map[string]string) (patch []map[string]any) {
	op := func(op, path, value string) {
		patch = append(patch, map[string]any{"op": op, "path": path, "value": value})
	}
	escape := strings.NewReplacer("~", "~0", "/", "~1").Replace
	op("test", "/metadata/uid", key.UID)
	op("test", "/metadata/annotations/"+escape(v1alpha1.AnnotationLife), strconv.Itoa(key.Life-1))
	for _, name := range slices.Sorted(maps.Keys(labels)) {
		op("add", "/metadata/labels/"+escape(name), labels[name])
	}
	for _, name := range slices.Sorted(maps.Keys(annotations)) {
		op("add", "/metadata/annotations/"+escape(name), annotations[name])
	}
	return patch
}
