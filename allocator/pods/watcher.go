package pods

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/kube"
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

// Watcher watches all pods of the namespace, whether a pool owns them or not. A watch
// filtered by label would report a pod as deleted when its label is removed, and would
// then never report it again. A foreign pod costs one small object in the cache; the core
// ignores it.
type Watcher struct {
	o        kube.Options
	resource kube.Resource
}

// NewWatcher returns a Watcher, or an error that names the missing options.
func NewWatcher(o kube.Options) (*Watcher, error) {
	if err := o.Check(); err != nil {
		return nil, err
	}
	client := o.Clients.Kubernetes.CoreV1().RESTClient()
	return &Watcher{o, kube.Resource{Client: client, Name: "pods", Namespace: o.Namespace}}, nil
}

// List returns all pods of the namespace and the resource version of that list, read from the API
// server's store. It retries until ctx ends.
func (w *Watcher) List(ctx context.Context) (all []core.Pod, version string, err error) {
	return kube.List(ctx, w.resource, w.o.Log, func(page *corev1.PodList) (pods []core.Pod) {
		for i := range page.Items {
			pods = append(pods, observe(&page.Items[i], w.o.Log))
		}
		return pods
	})
}

// Run watches until ctx ends. It must be called once.
func (w *Watcher) Run(ctx context.Context) error {
	return kube.Watch(ctx, w.resource, &corev1.Pod{}, slim, func(was, is *corev1.Pod) {
		if was != nil && was.UID != is.UID { // deleted and created again between two events
			w.o.Submit(core.PodGone{Key: KeyOf(was).Whole()})
		}
		w.o.Submit(core.PodSeen{Pod: observe(is, w.o.Log)})
	}, func(p *corev1.Pod) { w.o.Submit(core.PodGone{Key: KeyOf(p).Whole()}) })
}

// slim keeps only the fields that this package reads, so that the cache stays small.
func slim(p *corev1.Pod) *corev1.Pod {
	slim := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Name: p.Name, Namespace: p.Namespace, UID: p.UID, ResourceVersion: p.ResourceVersion,
			CreationTimestamp: p.CreationTimestamp, DeletionTimestamp: p.DeletionTimestamp,
			Labels: map[string]string{},
		},
		Spec: corev1.PodSpec{NodeName: p.Spec.NodeName, HostNetwork: p.Spec.HostNetwork, Resources: p.Spec.Resources},
		Status: corev1.PodStatus{
			Phase: p.Status.Phase, PodIP: p.Status.PodIP, Reason: p.Status.Reason, Message: kube.Bounded(p.Status.Message, maxWhy),
			InitContainerStatuses: slimStatuses(p.Status.InitContainerStatuses), ContainerStatuses: slimStatuses(p.Status.ContainerStatuses),
		},
	}
	for i := range p.Spec.Containers {
		c := &p.Spec.Containers[i]
		slim.Spec.Containers = append(slim.Spec.Containers, corev1.Container{Image: c.Image, Resources: c.Resources})
	}
	if agentPort(p) != 0 {
		slim.Spec.Containers[0].Command = p.Spec.Containers[0].Command
	}
	if made, _ := egressOf(p); made {
		slim.Spec.Containers[0].Env = []corev1.EnvVar{{Name: egressEnv}}
	}
	for _, name := range []string{v1alpha1.LabelPool, v1alpha1.LabelTemplate, v1alpha1.LabelPhase, v1alpha1.LabelEgress} {
		if value, ok := p.Labels[name]; ok {
			slim.Labels[name] = value
		}
	}
	for _, name := range []string{v1alpha1.AnnotationMetadata, v1alpha1.AnnotationLife, v1alpha1.AnnotationEnded, v1alpha1.AnnotationCPURequest} {
		if value, ok := p.Annotations[name]; ok {
			metav1.SetMetaDataAnnotation(&slim.ObjectMeta, name, value)
		}
	}
	if owner := metav1.GetControllerOf(p); owner != nil {
		slim.OwnerReferences = []metav1.OwnerReference{*owner}
	}
	for _, c := range p.Status.Conditions {
		switch c.Type {
		case corev1.PodReady, corev1.PodResizePending:
			slim.Status.Conditions = append(slim.Status.Conditions, corev1.PodCondition{Type: c.Type, Status: c.Status})
		case corev1.PodScheduled, corev1.DisruptionTarget:
			slim.Status.Conditions = append(slim.Status.Conditions, corev1.PodCondition{
				Type: c.Type, Status: c.Status, Reason: c.Reason, Message: kube.Bounded(c.Message, maxWhy),
			})
		}
	}
	if canRecycle(p) {
		slimRecycling(slim, p)
	}
	return slim
}

// slimStatuses keeps how containers wait and have ended. Most containers run and have never ended.
func slimStatuses(all []corev1.ContainerStatus) (kept []corev1.ContainerStatus) {
	for i := range all {
		c := &all[i]
		if c.RestartCount == 0 && c.State.Waiting == nil && c.State.Terminated == nil && c.LastTerminationState.Terminated == nil {
			continue
		}
		kept = append(kept, corev1.ContainerStatus{
			Name: c.Name, RestartCount: c.RestartCount, State: slimState(c.State), LastTerminationState: slimState(c.LastTerminationState),
		})
	}
	return kept
}

func slimState(s corev1.ContainerState) (kept corev1.ContainerState) {
	if w := s.Waiting; w != nil {
		kept.Waiting = &corev1.ContainerStateWaiting{Reason: w.Reason, Message: kube.Bounded(w.Message, maxWhy)}
	}
	if t := s.Terminated; t != nil {
		kept.Terminated = &corev1.ContainerStateTerminated{
			ExitCode: t.ExitCode, Reason: t.Reason, Message: kube.Bounded(t.Message, maxWhy), FinishedAt: t.FinishedAt,
		}
	}
	return kept
}

// slimRecycling keeps what the proof of a restart needs.
func slimRecycling(slim, p *corev1.Pod) {
	slim.Generation = p.Generation
	slim.Spec.InitContainers = []corev1.Container{{Name: awaitName, RestartPolicyRules: []corev1.ContainerRestartRule{{}}}}
	slim.Spec.EphemeralContainers = p.Spec.EphemeralContainers
	slim.Status.InitContainerStatuses = slimProof(p.Status.InitContainerStatuses)
	slim.Status.ContainerStatuses = slimProof(p.Status.ContainerStatuses)
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.AllContainersRestarting {
			slim.Status.Conditions = append(slim.Status.Conditions, corev1.PodCondition{Type: c.Type, Status: c.Status})
		}
	}
}

// slimProof keeps of each container what restarted reads, beside what slimStatuses keeps.
func slimProof(all []corev1.ContainerStatus) (kept []corev1.ContainerStatus) {
	for i := range all {
		c := &all[i]
		state := slimState(c.State)
		if c.State.Running != nil {
			state.Running = &corev1.ContainerStateRunning{StartedAt: c.State.Running.StartedAt}
		}
		kept = append(kept, corev1.ContainerStatus{
			Name: c.Name, ContainerID: c.ContainerID, Ready: c.Ready, RestartCount: c.RestartCount,
			State: state, LastTerminationState: slimState(c.LastTerminationState),
		})
	}
	return kept
}
