package sandboxobjects

import (
	"context"
	"fmt"
	"strconv"

	"go.uber.org/zap"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/kube"
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

// Watcher reads Sandbox objects.
type Watcher struct {
	Client    rest.Interface
	Namespace string
	Submit    func(core.Event)
	Log       *zap.Logger
}

// Listed is what the Sandbox objects say.
type Listed struct {
	Sandboxes []core.Sandbox
	// Deleting are those that somebody has deleted.
	Deleting []core.RecordSeen
	// Unreadable are objects of sandboxes that have not ended and that cannot be
	// understood, by ID, with the reason. Only the journal can say what they were.
	Unreadable map[string]error
}

// List reads the objects from the API server's store. It tries again until ctx ends.
// Those that no allocator has made mean nothing and are left out, and so are those
// that cannot be understood if they say that their sandbox has ended.
func (w *Watcher) List(ctx context.Context) (Listed, error) {
	objects, err := kube.List(ctx, func(ctx context.Context, next string) ([]v1alpha1.Sandbox, string, error) {
		var page v1alpha1.SandboxList
		if err := w.Client.Get().Namespace(w.Namespace).Resource(resource).
			Param("limit", strconv.Itoa(kube.PageSize)).Param("continue", next).Do(ctx).Into(&page); err != nil {
			return nil, "", fmt.Errorf("list sandboxes: %w", err)
		}
		return page.Items, page.Continue, nil
	}, func(err error) { w.Log.Warn("will read again", zap.Error(err)) })
	listed := Listed{Unreadable: map[string]error{}}
	for i := range objects {
		o := &objects[i]
		if o.Status.Revision == "" {
			w.Log.Warn("ignored: a Sandbox object that no allocator has made; delete it", zap.String("name", o.Name))
			continue
		}
		s, err := fromObject(o)
		switch {
		case err != nil && o.Status.Phase == v1alpha1.SandboxEnded:
			w.Log.Warn("ignored: the object of a sandbox that has ended; delete it", zap.Error(err))
			continue
		case err != nil:
			listed.Unreadable[o.Name] = err
			continue
		}
		listed.Sandboxes = append(listed.Sandboxes, s)
		if o.DeletionTimestamp != nil {
			listed.Deleting = append(listed.Deleting, core.RecordSeen{ID: s.ID, Pool: s.Pool, Revision: s.Revision, Deleting: true})
		}
	}
	return listed, err
}

// Run tells of objects that are deleted, or written by somebody else, until ctx
// ends.
func (w *Watcher) Run(ctx context.Context) error {
	informer := cache.NewSharedIndexInformer(
		cache.NewListWatchFromClient(w.Client, resource, w.Namespace, fields.Everything()), &v1alpha1.Sandbox{}, 0, nil)
	if err := informer.SetTransform(slim); err != nil {
		return fmt.Errorf("watch sandboxes: %w", err)
	}
	if _, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    w.seen,
		UpdateFunc: func(_, o any) { w.seen(o) },
		DeleteFunc: func(o any) {
			if unknown, ok := o.(cache.DeletedFinalStateUnknown); ok {
				o = unknown.Obj
			}
			if s, ok := o.(*v1alpha1.Sandbox); ok {
				w.Submit(core.RecordGone{ID: s.Name})
			}
		},
	}); err != nil {
		return fmt.Errorf("watch sandboxes: %w", err)
	}
	informer.RunWithContext(ctx)
	return nil
}

func (w *Watcher) seen(o any) {
	s := o.(*v1alpha1.Sandbox)
	revision, err := ParseRevision(s.Status.Revision)
	if err != nil {
		w.Log.Warn("sandbox object not understood", zap.Error(err))
		return
	}
	w.Submit(core.RecordSeen{
		ID: s.Name, Pool: core.PoolKey{Namespace: s.Namespace, Name: s.Spec.Pool}, Revision: revision, Deleting: s.DeletionTimestamp != nil,
	})
}

// slim keeps what seen reads, to keep the cache small.
func slim(o any) (any, error) {
	s, ok := o.(*v1alpha1.Sandbox)
	if !ok {
		return o, nil
	}
	return &v1alpha1.Sandbox{
		ObjectMeta: metav1.ObjectMeta{
			Name: s.Name, Namespace: s.Namespace, UID: s.UID, ResourceVersion: s.ResourceVersion, DeletionTimestamp: s.DeletionTimestamp,
		},
		Spec:   v1alpha1.SandboxSpec{Pool: s.Spec.Pool},
		Status: v1alpha1.SandboxStatus{Revision: s.Status.Revision},
	}, nil
}
