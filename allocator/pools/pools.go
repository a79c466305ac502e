// Package pools watches SandboxPool objects for the core and writes their
// status, conditions and finalizer.
package pools

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	typedv1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/kube"
	"github.com/berth-sandbox/berth/allocator/pods"
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

const resource = "sandboxpools"

// statusEvery is the pause between writes of changed statuses.
const statusEvery = time.Second

// Pools holds the pools of one namespace.
type Pools struct {
	client    rest.Interface
	events    typedv1.EventsGetter
	namespace string
	policy    Policy
	serveOn   time.Duration
	submit    func(core.Event)
	log       *zap.Logger
	informer  cache.SharedIndexInformer

	mu        sync.Mutex
	pools     map[core.PoolKey]seen
	createErr map[core.PoolKey]error // of the last pod creation
}

// New returns Pools that tell submit what they see. submit may block. serveOn is
// what pods.Build needs.
func New(clients *kube.Clients, namespace string, policy Policy, serveOn time.Duration, submit func(core.Event), log *zap.Logger) *Pools {
	client := clients.Berth
	return &Pools{
		client: client, events: clients.Kubernetes.CoreV1(), namespace: namespace, policy: policy, serveOn: serveOn, submit: submit, log: log,
		informer: cache.NewSharedIndexInformer(
			cache.NewListWatchFromClient(client, resource, namespace, fields.Everything()), &v1alpha1.SandboxPool{}, 0, nil),
		pools: map[core.PoolKey]seen{}, createErr: map[core.PoolKey]error{},
	}
}

// seen is a pool as it was last seen.
type seen struct {
	pool    *v1alpha1.SandboxPool
	refused bool // by the policy
}

func keyOf(p *v1alpha1.SandboxPool) core.PoolKey {
	return core.PoolKey{Namespace: p.Namespace, Name: p.Name}
}

// List reads the pools from the API server's store, and returns the resource
// version at which they were so. It tries again until ctx ends.
func (p *Pools) List(ctx context.Context) (all []core.Pool, version string, err error) {
	all, err = kube.List(ctx, func(ctx context.Context, next string) (pools []core.Pool, following string, err error) {
		var page v1alpha1.SandboxPoolList
		if err := p.client.Get().Namespace(p.namespace).Resource(resource).
			Param("limit", strconv.Itoa(kube.PageSize)).Param("continue", next).Do(ctx).Into(&page); err != nil {
			return nil, "", fmt.Errorf("list sandbox pools: %w", err)
		}
		for i := range page.Items {
			pools = append(pools, p.keep(&page.Items[i]))
		}
		version = page.ResourceVersion
		return pools, page.Continue, nil
	}, func(err error) { p.log.Warn("will read again", zap.Error(err)) })
	return all, version, err
}

// Get returns a pool as it was last seen, for pods to be made from it. It is
// false when none can be: its object is gone, or its template is refused. The
// core may not know that yet when it asks for a pod. The caller must not change
// the pool.
func (p *Pools) Get(key core.PoolKey) (*v1alpha1.SandboxPool, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	s, ok := p.pools[key]
	return s.pool, ok && !s.refused
}

// CreateResult notes how the last creation of a pod went, for the condition.
func (p *Pools) CreateResult(key core.PoolKey, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err == nil {
		delete(p.createErr, key)
	} else {
		p.createErr[key] = err
	}
}

// keep remembers a pool and returns what the core needs of it.
func (p *Pools) keep(pool *v1alpha1.SandboxPool) core.Pool {
	spec := core.Pool{
		Key: keyOf(pool), Warm: int(pool.Spec.Warm), DefaultPort: uint16(pool.Spec.DefaultPort),
		Template: pods.TemplateHash(pool, p.serveOn), PostStart: pool.Spec.PostStart != nil, KeepOnRestart: pool.Spec.OnRestart == v1alpha1.KeepOnRestart, Version: pool.ResourceVersion,
		Refused: p.policy.Check(pool) != nil, Deleting: pool.DeletionTimestamp != nil,
	}
	for _, port := range pool.Spec.Ports {
		spec.Ports = append(spec.Ports, uint16(port))
	}
	slices.Sort(spec.Ports)
	spec.Hold = secondsOf(pool.Spec.HoldSeconds)
	spec.MaxLifetime, spec.StartupTimeout = secondsOf(pool.Spec.MaxLifetimeSeconds), secondsOf(pool.Spec.StartupTimeoutSeconds)
	spec.IdleTimeout = secondsOf(pool.Spec.IdleTimeoutSeconds)
	if least := pool.Spec.MinBytesPerMinute; pool.Spec.Activity == v1alpha1.ActivityBytes && least != nil {
		spec.MinBytes = uint64(*least)
	}
	if probe := pool.Spec.BusyProbe; probe != nil {
		spec.BusyProbe = core.BusyProbe{Port: uint16(probe.Port), Path: probe.Path}
	}
	if pool.Spec.MaxPods != nil {
		spec.MaxPods = int(*pool.Spec.MaxPods)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.pools[spec.Key] = seen{pool, spec.Refused}
	return spec
}

// secondsOf is 0 for a field that is not set.
func secondsOf(field *int32) time.Duration {
	if field == nil {
		return 0
	}
	return time.Duration(*field) * time.Second
}

// forget drops a pool whose object is gone.
func (p *Pools) forget(pool *v1alpha1.SandboxPool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	key := keyOf(pool)
	if s, ok := p.pools[key]; ok && s.pool.UID == pool.UID { // not another of its name
		delete(p.pools, key)
		delete(p.createErr, key)
	}
}

// Run watches until ctx ends. It is called once.
func (p *Pools) Run(ctx context.Context) error {
	changed := func(o any) { p.submit(core.PoolSeen{Pool: p.keep(o.(*v1alpha1.SandboxPool))}) }
	_, err := p.informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    changed,
		UpdateFunc: func(_, o any) { changed(o) },
		DeleteFunc: func(o any) {
			if unknown, ok := o.(cache.DeletedFinalStateUnknown); ok {
				o = unknown.Obj
			}
			if pool, ok := o.(*v1alpha1.SandboxPool); ok {
				p.forget(pool)
				p.submit(core.PoolGone{Key: keyOf(pool), Version: pool.ResourceVersion})
			}
		},
	})
	if err != nil {
		return fmt.Errorf("watch sandbox pools: %w", err)
	}
	p.informer.RunWithContext(ctx)
	return nil
}

// Maintain keeps the finalizers and statuses of all pools up to date until ctx
// ends. counts returns a pool's pods by state, or false if they are not known at the
// moment: what is shown of such a pool stays as it is until the next turn.
func (p *Pools) Maintain(ctx context.Context, counts func(context.Context, core.PoolKey) (core.Counts, bool)) {
	if !cache.WaitForCacheSync(ctx.Done(), p.informer.HasSynced) {
		return // ctx has ended
	}
	ticker := time.NewTicker(statusEvery)
	defer ticker.Stop()
	for {
		for _, o := range p.informer.GetStore().List() {
			pool := o.(*v1alpha1.SandboxPool)
			counted, known := counts(ctx, keyOf(pool))
			p.maintain(ctx, pool, counted, known)
		}
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

// maintain adds the finalizer to a new pool and brings its status up to date, if its
// counts are known. What fails is tried again at the next turn.
func (p *Pools) maintain(ctx context.Context, pool *v1alpha1.SandboxPool, counts core.Counts, known bool) {
	var err error
	if pool.DeletionTimestamp == nil && !slices.Contains(pool.Finalizers, v1alpha1.PoolFinalizer) {
		err = p.setFinalizers(ctx, pool, append(slices.Clone(pool.Finalizers), v1alpha1.PoolFinalizer))
	} else if known { // zero would be a guess
		if status := p.status(pool, counts); !sameStatus(status, pool.Status) {
			err = p.patch(ctx, pool, map[string]any{"status": status}, "status")
			if c := meta.FindStatusCondition(status.Conditions, v1alpha1.PoolPodsStable); err == nil && c.Status == metav1.ConditionFalse &&
				!meta.IsStatusConditionFalse(pool.Status.Conditions, v1alpha1.PoolPodsStable) {
				// The write had a condition, so this is the only one that has turned it.
				p.warn(ctx, pool, c)
			}
		}
	}
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		return // it has changed; the watch brings it, and the next turn looks again
	}
	if err != nil && ctx.Err() == nil {
		p.log.Warn("will try again: update pool", zap.String("pool", pool.Name), zap.Error(err))
	}
}

// warn makes an Event of a condition. There is one attempt: the condition stays.
func (p *Pools) warn(ctx context.Context, pool *v1alpha1.SandboxPool, c *metav1.Condition) {
	call, cancel := context.WithTimeout(ctx, kube.CallTimeout)
	defer cancel()
	now := metav1.Now()
	_, err := p.events.Events(pool.Namespace).Create(call, &corev1.Event{
		ObjectMeta: metav1.ObjectMeta{GenerateName: pool.Name + "-", Namespace: pool.Namespace},
		InvolvedObject: corev1.ObjectReference{
			APIVersion: v1alpha1.GroupVersion().String(), Kind: "SandboxPool", Namespace: pool.Namespace, Name: pool.Name, UID: pool.UID,
		},
		Type: corev1.EventTypeWarning, Reason: c.Reason, Message: bounded(c.Message, eventMost), Source: corev1.EventSource{Component: "berth-allocator"},
		FirstTimestamp: now, LastTimestamp: now, Count: 1,
	}, metav1.CreateOptions{})
	if err != nil && ctx.Err() == nil {
		p.log.Warn("no Event was made", zap.String("pool", pool.Name), zap.String("reason", c.Reason), zap.Error(err))
	}
}

// Drained removes the finalizer of a pool whose pods are gone. It returns an error
// until that is done, and is then to be called again.
func (p *Pools) Drained(ctx context.Context, key core.PoolKey) error {
	call, cancel := context.WithTimeout(ctx, kube.CallTimeout)
	defer cancel()
	var pool v1alpha1.SandboxPool
	err := p.client.Get().Namespace(key.Namespace).Resource(resource).Name(key.Name).Do(call).Into(&pool)
	switch {
	case apierrors.IsNotFound(err):
		return nil
	case err != nil:
		return fmt.Errorf("read pool %s: %w", key.Name, err)
	case pool.DeletionTimestamp == nil || !slices.Contains(pool.Finalizers, v1alpha1.PoolFinalizer):
		return nil // another object of that name, or done already
	}
	if err := p.setFinalizers(ctx, &pool, slices.DeleteFunc(pool.Finalizers, func(f string) bool { return f == v1alpha1.PoolFinalizer })); err != nil {
		return fmt.Errorf("remove finalizer of pool %s: %w", key.Name, err)
	}
	return nil
}

func (p *Pools) setFinalizers(ctx context.Context, pool *v1alpha1.SandboxPool, finalizers []string) error {
	return p.patch(ctx, pool, map[string]any{"metadata": map[string]any{"finalizers": finalizers}})
}

// patch writes on condition that the pool has not changed since it was read.
func (p *Pools) patch(ctx context.Context, pool *v1alpha1.SandboxPool, patch map[string]any, subresource ...string) error {
	m, _ := patch["metadata"].(map[string]any)
	if m == nil {
		m = map[string]any{}
	}
	m["uid"], m["resourceVersion"] = pool.UID, pool.ResourceVersion
	patch["metadata"] = m
	raw, err := json.Marshal(patch)
	if err != nil {
		return fmt.Errorf("encode patch: %w", err)
	}
	call, cancel := context.WithTimeout(ctx, kube.CallTimeout)
	defer cancel()
	return p.client.Patch(types.MergePatchType).Namespace(pool.Namespace).Resource(resource).Name(pool.Name).
		SubResource(subresource...).Body(raw).Do(call).Error()
}

// status is what the pool's status should be.
func (p *Pools) status(pool *v1alpha1.SandboxPool, counts core.Counts) v1alpha1.SandboxPoolStatus {
	s := v1alpha1.SandboxPoolStatus{
		ObservedGeneration: pool.Generation,
		Warm:               int32(counts.Warm), Pending: int32(counts.Pending),
		Claimed: int32(counts.Claimed), Releasing: int32(counts.Releasing),
		Conditions: slices.Clone(pool.Status.Conditions),
	}
	ready := metav1.Condition{Type: v1alpha1.PoolReady, Status: metav1.ConditionTrue, Reason: "Warm", ObservedGeneration: pool.Generation}
	if counts.Warm < int(pool.Spec.Warm) {
		ready.Status, ready.Reason = metav1.ConditionFalse, "Filling"
		ready.Message = fmt.Sprintf("%d of %d pods are warm", counts.Warm, pool.Spec.Warm)
		if counts.Trouble != (core.Trouble{}) {
			ready.Reason = "BackOff"
		}
		if counts.Stuck != "" {
			ready.Message += "; " + counts.Stuck
		}
	}
	meta.SetStatusCondition(&s.Conditions, ready)
	meta.SetStatusCondition(&s.Conditions, stable(pool, counts.Trouble))
	accepted := metav1.Condition{Type: v1alpha1.PoolAccepted, Status: metav1.ConditionTrue, Reason: "Accepted", ObservedGeneration: pool.Generation}
	if err := p.policy.Check(pool); err != nil {
		accepted.Status, accepted.Reason, accepted.Message = metav1.ConditionFalse, "PodSecurity", message(err)
		if errors.Is(err, pods.ErrPreStop) {
			accepted.Reason = "PreStop"
		}
	}
	meta.SetStatusCondition(&s.Conditions, accepted)
	p.mu.Lock()
	createErr := p.createErr[keyOf(pool)]
	p.mu.Unlock()
	creatable := metav1.Condition{Type: v1alpha1.PoolPodsCreatable, Status: metav1.ConditionTrue, Reason: "Accepted", ObservedGeneration: pool.Generation}
	if createErr != nil {
		creatable.Status, creatable.Reason, creatable.Message = metav1.ConditionFalse, "Refused", message(createErr)
	}
	meta.SetStatusCondition(&s.Conditions, creatable)
	return s
}

// stable is the condition of that name.
func stable(pool *v1alpha1.SandboxPool, t core.Trouble) metav1.Condition {
	c := metav1.Condition{Type: v1alpha1.PoolPodsStable, Status: metav1.ConditionTrue, Reason: "Stable", ObservedGeneration: pool.Generation}
	if t == (core.Trouble{}) {
		return c
	}
	next := "another one is being tried"
	if !t.Retry.IsZero() {
		next = "the next one is made at " + t.Retry.UTC().Format(time.RFC3339)
	}
	c.Status, c.Reason = metav1.ConditionFalse, "BackOff"
	c.Message = fmt.Sprintf("pod %s ended before it could be used: %s; %s", t.Pod, t.Why, next)
	return c
}

// messageMost is the length of a condition's message, in bytes. What names every
// container of a template may be longer than the API server takes, and no status
// would be written at all.
const messageMost = 4 << 10

// eventMost is the same for the message of an Event.
const eventMost = 1000

func message(err error) string { return bounded(err.Error(), messageMost) }

func bounded(m string, most int) string {
	if len(m) <= most {
		return m
	}
	return strings.ToValidUTF8(m[:most], "") + "..."
}

func sameStatus(a, b v1alpha1.SandboxPoolStatus) bool {
	return a.ObservedGeneration == b.ObservedGeneration && a.Warm == b.Warm && a.Pending == b.Pending &&
		a.Claimed == b.Claimed && a.Releasing == b.Releasing &&
		slices.EqualFunc(a.Conditions, b.Conditions, func(x, y metav1.Condition) bool {
			return x.Type == y.Type && x.Status == y.Status && x.Reason == y.Reason && x.Message == y.Message &&
				x.ObservedGeneration == y.ObservedGeneration
		})
}
