package sandboxobjects

import (
	"context"
	"fmt"

	"go.uber.org/zap"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/kube"
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

// Watcher watches the Sandbox objects of one namespace.
type Watcher struct {
	o        kube.Options
	resource kube.Resource
}

// NewWatcher returns a Watcher, or an error that names the missing options.
func NewWatcher(o kube.Options) (*Watcher, error) {
	if err := o.Check(); err != nil {
		return nil, err
	}
	return &Watcher{o, kube.Resource{Client: o.Clients.Berth, Name: resource, Namespace: o.Namespace}}, nil
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
	objects, _, err := kube.List(ctx, w.resource, w.o.Log, func(page *v1alpha1.SandboxList) []v1alpha1.Sandbox {
		for i := range page.Items {
			page.Items[i].Status.LogLines = nil // LogLines reads them, and they may be megabytes together
		}
		return page.Items
	})
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

// LogLines returns the last lines of the log that the object of a sandbox has.
func (w *Watcher) LogLines(ctx context.Context, id string) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, kube.CallTimeout)
	defer cancel()
	var object v1alpha1.Sandbox
	err := w.o.Clients.Berth.Get().Namespace(w.o.Namespace).Resource(resource).Name(id).Do(ctx).Into(&object)
	switch {
	case apierrors.IsNotFound(err):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("read sandbox object: %w", err)
	}
	return object.Status.LogLines, nil
}

// Run submits deletions and changed revisions of objects until ctx ends.
func (w *Watcher) Run(ctx context.Context) error {
	return kube.Watch(ctx, w.resource, &v1alpha1.Sandbox{}, slim, func(_, s *v1alpha1.Sandbox) {
		revision, err := ParseRevision(s.Status.Revision)
		if err != nil {
			w.o.Log.Warn("Sandbox object cannot be read", zap.Error(err))
			return
		}
		w.o.Submit(core.ObjectSeen{
			ID: s.Name, Pool: core.PoolKey{Namespace: s.Namespace, Name: s.Spec.Pool},
			Revision: revision, Deleting: s.DeletionTimestamp != nil,
		})
	}, func(s *v1alpha1.Sandbox) { w.o.Submit(core.ObjectGone{ID: s.Name}) })
}

// slim keeps only the fields that Run reads, so that the cache stays small.
func slim(s *v1alpha1.Sandbox) *v1alpha1.Sandbox {
	return &v1alpha1.Sandbox{
		ObjectMeta: metav1.ObjectMeta{
			Name: s.Name, Namespace: s.Namespace, UID: s.UID, ResourceVersion: s.ResourceVersion, DeletionTimestamp: s.DeletionTimestamp,
		},
		Spec:   v1alpha1.SandboxSpec{Pool: s.Spec.Pool},
		Status: v1alpha1.SandboxStatus{Revision: s.Status.Revision},
	}
}
