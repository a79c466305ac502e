// Package secretwatch watches the Secrets of one type in one namespace.
package secretwatch

import (
	"context"
	"fmt"
	"sync"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	informers "k8s.io/client-go/informers/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
)

// Secrets are the Secrets of one type.
type Secrets struct {
	informer cache.SharedIndexInformer
	synced   func() bool
	noted    chan struct{} // holds one note of a change
}

// New returns Secrets that Run reads.
func New(client kubernetes.Interface, namespace string, of corev1.SecretType) (*Secrets, error) {
	s := &Secrets{noted: make(chan struct{}, 1)}
	s.informer = informers.NewFilteredSecretInformer(client, namespace, 0, nil, func(l *metav1.ListOptions) {
		l.FieldSelector = fields.OneTermEqualSelector("type", string(of)).String()
	})
	events, err := s.informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: func(any) { s.note() }, UpdateFunc: func(_, _ any) { s.note() }, DeleteFunc: func(any) { s.note() },
	})
	if err != nil {
		return nil, fmt.Errorf("watch Secrets of type %s: %w", of, err)
	}
	s.synced = events.HasSynced
	return s, nil
}

func (s *Secrets) note() {
	select {
	case s.noted <- struct{}{}:
	default: // a note is there already, and what it leads to reads everything
	}
}

// Run calls changed once the Secrets have been listed, and after each change, until ctx ends. The calls do not overlap.
func (s *Secrets) Run(ctx context.Context, changed func()) {
	var all sync.WaitGroup
	defer all.Wait()
	all.Go(func() { s.informer.RunWithContext(ctx) })
	if !cache.WaitForCacheSync(ctx.Done(), s.synced) {
		return
	}
	for {
		changed()
		select {
		case <-ctx.Done():
			return
		case <-s.noted:
		}
	}
}

// List returns the Secrets that are there now, in no order, without those that are being deleted: a finalizer may keep the
// object. They must not be changed.
func (s *Secrets) List() (all []*corev1.Secret) {
	for _, o := range s.informer.GetStore().List() {
		if secret := o.(*corev1.Secret); secret.DeletionTimestamp == nil {
			all = append(all, secret)
		}
	}
	return all
}
