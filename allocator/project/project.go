// Package project writes committed facts into Sandbox objects, in the
// background and forwards only: an older revision never overwrites a newer one,
// whoever wrote it.
package project

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"sync"

	"go.uber.org/zap"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/kube"
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

const resource = "sandboxes"

// Projector writes Sandbox objects. Only the latest state of a sandbox is
// written: what came in between, while a write was under way, is skipped. So
// what waits is bounded by the number of sandboxes.
type Projector struct {
	Client    rest.Interface
	Namespace string
	Submit    func(core.Event)
	Log       *zap.Logger

	mu      sync.Mutex
	latest  map[string]core.Sandbox
	writing map[string]bool
	queue   []string
	wake    chan struct{} // has room for one: queue has grown
}

// New returns a Projector.
func New(client rest.Interface, namespace string, submit func(core.Event), log *zap.Logger) *Projector {
	return &Projector{
		Client: client, Namespace: namespace, Submit: submit, Log: log,
		latest: map[string]core.Sandbox{}, writing: map[string]bool{}, wake: make(chan struct{}, 1),
	}
}

// Record queues a state to be written.
func (p *Projector) Record(s core.Sandbox) {
	p.mu.Lock()
	_, waits := p.latest[s.ID]
	p.latest[s.ID] = s
	if !waits && !p.writing[s.ID] {
		p.queue = append(p.queue, s.ID)
	}
	p.mu.Unlock()
	p.signal()
}

func (p *Projector) signal() {
	select {
	case p.wake <- struct{}{}:
	default: // a worker has been woken already
	}
}

// Lag is how many sandboxes wait to be written.
func (p *Projector) Lag() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.latest)
}

// Run writes with so many workers until ctx ends.
func (p *Projector) Run(ctx context.Context, workers int) {
	var all sync.WaitGroup
	for range workers {
		all.Go(func() { p.work(ctx) })
	}
	all.Wait()
}

func (p *Projector) work(ctx context.Context) {
	for {
		s, ok := p.next()
		if !ok {
			select {
			case <-ctx.Done():
				return
			case <-p.wake:
				continue
			}
		}
		err := kube.Retry(ctx, func(ctx context.Context) error { return p.write(ctx, s) }, func(err error) {
			p.Log.Warn("will try again: write Sandbox object", zap.Error(err))
		})
		p.done(s.ID)
		if err == nil {
			p.Submit(core.Recorded{ID: s.ID, Revision: s.Revision})
		}
		if ctx.Err() != nil {
			return
		}
	}
}

func (p *Projector) next() (core.Sandbox, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.queue) == 0 {
		return core.Sandbox{}, false
	}
	id := p.queue[0]
	p.queue = p.queue[1:]
	if len(p.queue) > 0 {
		p.signal()
	}
	s := p.latest[id]
	delete(p.latest, id)
	p.writing[id] = true
	return s, true
}

func (p *Projector) done(id string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.writing, id)
	if _, again := p.latest[id]; again {
		p.queue = append(p.queue, id)
		p.signal()
	}
}

// write brings the object to the state of s, unless it shows a newer one.
func (p *Projector) write(ctx context.Context, s core.Sandbox) error {
	var object v1alpha1.Sandbox
	err := p.Client.Get().Namespace(p.Namespace).Resource(resource).Name(s.ID).Do(ctx).Into(&object)
	if apierrors.IsNotFound(err) {
		object = toObject(s, p.Namespace)
		err = p.Client.Post().Namespace(p.Namespace).Resource(resource).Body(&object).Do(ctx).Into(&object)
	}
	if err != nil {
		return fmt.Errorf("sandbox object: %w", err)
	}
	if stored, err := parseRevision(object.Status.Revision); err != nil {
		return err
	} else if !stored.Less(s.Revision) {
		return nil
	}
	raw, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"uid": object.UID, "resourceVersion": object.ResourceVersion},
		"status":   toStatus(s),
	})
	if err != nil {
		return fmt.Errorf("encode patch: %w", err)
	}
	err = p.Client.Patch(types.MergePatchType).Namespace(p.Namespace).Resource(resource).Name(s.ID).
		SubResource("status").Body(raw).Do(ctx).Error()
	if err != nil {
		return fmt.Errorf("sandbox object: status: %w", err)
	}
	return nil
}

// Forget deletes the object of a sandbox that ended long ago.
func (p *Projector) Forget(ctx context.Context, id string) {
	_ = kube.Retry(ctx, func(ctx context.Context) error { // it only fails when ctx has ended
		err := p.Client.Delete().Namespace(p.Namespace).Resource(resource).Name(id).Do(ctx).Error()
		if apierrors.IsNotFound(err) {
			return nil
		}
		return err
	}, func(err error) { p.Log.Warn("will try again: delete Sandbox object", zap.Error(err)) })
}

// List reads the recorded sandboxes from the API server's store.
func (p *Projector) List(ctx context.Context) ([]core.Sandbox, error) {
	var all []core.Sandbox
	o := metav1.ListOptions{Limit: 1000}
	for {
		var page v1alpha1.SandboxList
		r := p.Client.Get().Namespace(p.Namespace).Resource(resource).Param("limit", strconv.FormatInt(o.Limit, 10))
		if o.Continue != "" {
			r = r.Param("continue", o.Continue)
		}
		if err := r.Do(ctx).Into(&page); err != nil {
			return nil, fmt.Errorf("list sandboxes: %w", err)
		}
		for i := range page.Items {
			s, err := fromObject(&page.Items[i])
			if err != nil {
				return nil, err
			}
			all = append(all, s)
		}
		if o.Continue = page.Continue; o.Continue == "" {
			return all, nil
		}
	}
}

func toObject(s core.Sandbox, namespace string) v1alpha1.Sandbox {
	o := v1alpha1.Sandbox{
		TypeMeta:   metav1.TypeMeta{APIVersion: v1alpha1.GroupVersion().String(), Kind: "Sandbox"},
		ObjectMeta: metav1.ObjectMeta{Name: s.ID, Namespace: namespace, Labels: map[string]string{v1alpha1.LabelPool: s.Pool.Name}},
		Spec: v1alpha1.SandboxSpec{
			Pool: s.Pool.Name, PodName: s.Pod.Name, PodUID: s.Pod.UID,
			ClaimedAt: metav1.NewMicroTime(s.ClaimedAt), Metadata: s.Metadata,
		},
	}
	if s.IP.IsValid() {
		o.Spec.PodIP = s.IP.String()
	}
	if !s.EndAt.IsZero() {
		at := metav1.NewMicroTime(s.EndAt)
		o.Spec.EndAt = &at
	}
	return o
}

func toStatus(s core.Sandbox) v1alpha1.SandboxStatus {
	status := v1alpha1.SandboxStatus{
		Reason:   s.Reason,
		Revision: fmt.Sprintf("%d.%d", s.Revision.Term, s.Revision.Counter),
	}
	switch s.Phase {
	case core.Running, core.Releasing:
		status.Phase, status.Reason = v1alpha1.SandboxRunning, ""
	case core.Released:
		status.Phase = v1alpha1.SandboxStopping
	case core.Ended:
		status.Phase = v1alpha1.SandboxEnded
	}
	if !s.EndedAt.IsZero() {
		at := metav1.NewMicroTime(s.EndedAt)
		status.EndedAt = &at
	}
	return status
}

func fromObject(o *v1alpha1.Sandbox) (core.Sandbox, error) {
	revision, err := parseRevision(o.Status.Revision)
	if err != nil {
		return core.Sandbox{}, fmt.Errorf("sandbox object %.5s...: %w", o.Name, err)
	}
	s := core.Sandbox{
		Binding:  core.Binding{ID: o.Name, ClaimedAt: o.Spec.ClaimedAt.Time, Metadata: o.Spec.Metadata},
		Pool:     core.PoolKey{Namespace: o.Namespace, Name: o.Spec.Pool},
		Pod:      core.PodKey{Namespace: o.Namespace, Name: o.Spec.PodName, UID: o.Spec.PodUID},
		Reason:   o.Status.Reason,
		Revision: revision,
	}
	if o.Spec.PodIP != "" {
		if s.IP, err = netip.ParseAddr(o.Spec.PodIP); err != nil {
			return core.Sandbox{}, fmt.Errorf("sandbox object %.5s...: spec.podIP: %w", o.Name, err)
		}
	}
	if o.Spec.EndAt != nil {
		s.EndAt = o.Spec.EndAt.Time
	}
	if o.Status.EndedAt != nil {
		s.EndedAt = o.Status.EndedAt.Time
	}
	switch o.Status.Phase {
	case v1alpha1.SandboxRunning, "":
		s.Phase = core.Running
	case v1alpha1.SandboxStopping:
		s.Phase = core.Released
	case v1alpha1.SandboxEnded:
		s.Phase = core.Ended
	}
	return s, nil
}

func parseRevision(text string) (core.Revision, error) {
	if text == "" {
		return core.Revision{}, nil
	}
	term, counter, _ := strings.Cut(text, ".")
	t, err1 := strconv.ParseUint(term, 10, 64)
	c, err2 := strconv.ParseUint(counter, 10, 64)
	if err1 != nil || err2 != nil {
		return core.Revision{}, fmt.Errorf("status.revision %q is not <term>.<counter>", text)
	}
	return core.Revision{Term: t, Counter: c}, nil
}
