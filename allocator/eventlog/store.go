package eventlog

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/berth-sandbox/berth/allocator/kube"
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

// Store keeps segments. Errors are those of the API server. Create, Update and Delete are conditional: on that there is no object of the
// name, or on its resource version.
type Store interface {
	// List passes every segment to f, in no order.
	List(ctx context.Context, f func(*v1alpha1.EventSegment)) error
	Get(ctx context.Context, name string) (*v1alpha1.EventSegment, error)
	// Create and Update return the metadata of what was written.
	Create(ctx context.Context, s *v1alpha1.EventSegment) (metav1.ObjectMeta, error)
	Update(ctx context.Context, s *v1alpha1.EventSegment) (metav1.ObjectMeta, error)
	Delete(ctx context.Context, name, version string) error
}

// Objects is the Store of a namespace.
type Objects struct {
	// Client serves the API group berth.sh.
	Client    rest.Interface
	Namespace string
}

const (
	resourceName = "eventsegments"
	// listPage bounds the segments of a page, which is in memory several times while it is decoded.
	listPage = 16
	// metadataOnly requests only the metadata of the written object.
	metadataOnly = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1,application/json"
)

// List implements Store. All pages show the same snapshot of the API server's store.
func (o *Objects) List(ctx context.Context, f func(*v1alpha1.EventSegment)) error {
	for next := ""; ; {
		var page v1alpha1.EventSegmentList
		r := o.Client.Get().Namespace(o.Namespace).Resource(resourceName).Param("limit", strconv.Itoa(listPage))
		if next != "" {
			r = r.Param("continue", next)
		}
		call, cancel := context.WithTimeout(ctx, kube.CallTimeout)
		err := r.Do(call).Into(&page)
		cancel()
		if err != nil {
			return err
		}
		for i := range page.Items {
			f(&page.Items[i])
		}
		if next = page.Continue; next == "" {
			return nil
		}
	}
}

// Get implements Store.
func (o *Objects) Get(ctx context.Context, name string) (*v1alpha1.EventSegment, error) {
	ctx, cancel := context.WithTimeout(ctx, kube.CallTimeout)
	defer cancel()
	var s v1alpha1.EventSegment
	return &s, o.Client.Get().Namespace(o.Namespace).Resource(resourceName).Name(name).Do(ctx).Into(&s)
}

// Create implements Store.
func (o *Objects) Create(ctx context.Context, s *v1alpha1.EventSegment) (metav1.ObjectMeta, error) {
	return o.write(ctx, o.Client.Post(), s)
}

// Update implements Store.
func (o *Objects) Update(ctx context.Context, s *v1alpha1.EventSegment) (metav1.ObjectMeta, error) {
	return o.write(ctx, o.Client.Put().Name(s.Name), s)
}

func (o *Objects) write(ctx context.Context, r *rest.Request, s *v1alpha1.EventSegment) (metav1.ObjectMeta, error) {
	ctx, cancel := context.WithTimeout(ctx, kube.CallTimeout)
	defer cancel()
	s.TypeMeta = metav1.TypeMeta{APIVersion: v1alpha1.GroupVersion().String(), Kind: "EventSegment"}
	s.Namespace = o.Namespace
	raw, err := r.Namespace(o.Namespace).Resource(resourceName).SetHeader("Accept", metadataOnly).Body(s).Do(ctx).Raw()
	if err != nil {
		return metav1.ObjectMeta{}, err
	}
	var written metav1.PartialObjectMetadata
	if err := json.Unmarshal(raw, &written); err != nil {
		return metav1.ObjectMeta{}, fmt.Errorf("answer: %w", err)
	}
	return written.ObjectMeta, nil
}

// Delete implements Store.
func (o *Objects) Delete(ctx context.Context, name, version string) error {
	ctx, cancel := context.WithTimeout(ctx, kube.CallTimeout)
	defer cancel()
	raw, err := json.Marshal(metav1.DeleteOptions{Preconditions: &metav1.Preconditions{ResourceVersion: &version}})
	if err != nil {
		return fmt.Errorf("encode precondition: %w", err)
	}
	return o.Client.Delete().Namespace(o.Namespace).Resource(resourceName).Name(name).
		SetHeader("Content-Type", "application/json").Body(raw).Do(ctx).Error()
}
