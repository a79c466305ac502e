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
	"github.com/berth-sandbox/berth/internal/options"
)

// WatcherOptions configure a Watcher. All are required.
type WatcherOptions struct {
	// Client serves the API group berth.sh.
	Client    rest.Interface
	Namespace string
	// Submit takes the events. It may block.
	Submit func(core.Event)
	Log    *zap.Logger
}

// Watcher watches the Sandbox objects of one namespace.
type Watcher struct{ o WatcherOptions }

// NewWatcher returns a Watcher, or an error that names the missing options.
func NewWatcher(o WatcherOptions) (*Watcher, error) {
	if err := options.Require(o, "Client", "Namespace", "Submit", "Log"); err != nil {
		return nil, err
	}
	return &Watcher{o}, nil
}

// Listed is the content of a list of Sandbox objects.
type Listed struct {
	Sandboxes []core.Sandbox
	// Deleting are objects with a deletion timestamp.
	Deleting []core.ObjectSeen
	// Unreadable are the errors of the objects that cannot be read, by sandbox ID, for sandboxes
	// that have not ended. Only the journal can recover these.
	Unreadable map[string]error
}

// List returns the objects, read from the API server's store. It retries until ctx ends. It leaves
// out objects that no allocator has written, and unreadable objects of sandboxes that have ended.
func (w *Watcher) List(ctx context.Context) (Listed, error) {
	objects, err := kube.List(ctx, func(ctx context.Context, next string) ([]v1alpha1.Sandbox, string, error) {
		var page v1alpha1.SandboxList
		if err := w.o.Client.Get().Namespace(w.o.Namespace).Resource(resource).
			Param("limit", strconv.Itoa(kube.PageSize)).Param("continue", next).Do(ctx).Into(&page); err != nil {
			return nil, "", fmt.Errorf("list sandboxes: %w", err)
		}
		return page.Items, page.Continue, nil
	}, func(err error) { w.o.Log.Warn("list failed, retrying", zap.Error(err)) })
	listed := Listed{Unreadable: map[string]error{}}
	for i := range objects {
		o := &objects[i]
		if o.Status.Revision == "" {
			w.o.Log.Warn("Sandbox object ignored because no allocator wrote it; delete it", zap.String("name", o.Name))
			continue
		}
		s, err := fromObject(o)
		switch {
		case err != nil && o.Status.Phase == v1alpha1.SandboxEnded:
			w.o.Log.Warn("unreadable Sandbox object of an ended sandbox ignored; delete it", zap.Error(err))
			continue
		case err != nil:
			listed.Unreadable[o.Name] = err
			continue
		}
		listed.Sandboxes = append(listed.Sandboxes, s)
		if o.DeletionTimestamp != nil {
			listed.Deleting = append(listed.Deleting, core.ObjectSeen{ID: s.ID, Pool: s.Pool, Revision: s.Revision, Deleting: true})
		}
	}
	return listed, err
}

// Run submits deletions and changed revisions of objects until ctx ends.
func (w *Watcher) Run(ctx context.Context) error {
	informer := cache.NewSharedIndexInformer(
		cache.NewListWatchFromClient(w.o.Client, resource, w.o.Namespace, fields.Everything()), &v1alpha1.Sandbox{}, 0, nil)
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
				w.o.Submit(core.ObjectGone{ID: s.Name})
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
		w.o.Log.Warn("Sandbox object cannot be read", zap.Error(err))
		return
	}
	w.o.Submit(core.ObjectSeen{
		ID: s.Name, Pool: core.PoolKey{Namespace: s.Namespace, Name: s.Spec.Pool}, Revision: revision, Deleting: s.DeletionTimestamp != nil,
	})
}

// slim keeps only the fields that seen reads, so that the cache stays small.
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
