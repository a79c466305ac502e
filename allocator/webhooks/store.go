package webhooks

import (
	"context"
	"strconv"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"

	"github.com/berth-sandbox/berth/allocator/kube"
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

// Objects is the Store of a namespace.
type Objects struct {
	// Client serves the API group berth.sh.
	Client    rest.Interface
	Namespace string
}

const resourceName = "eventwebhooks"

// List implements Store. There are maxHooks at most, unless others make some; the rest is left out.
func (s *Objects) List(ctx context.Context) ([]v1alpha1.EventWebhook, error) {
	var list v1alpha1.EventWebhookList
	err := s.do(ctx, s.Client.Get().Param("limit", strconv.Itoa(maxHooks)), "", nil, &list)
	return list.Items, err
}

// Get implements Store.
func (s *Objects) Get(ctx context.Context, id string) (*v1alpha1.EventWebhook, error) {
	var found v1alpha1.EventWebhook
	return &found, s.do(ctx, s.Client.Get(), id, nil, &found)
}

// Create implements Store.
func (s *Objects) Create(ctx context.Context, o *v1alpha1.EventWebhook) (*v1alpha1.EventWebhook, error) {
	var made v1alpha1.EventWebhook
	return &made, s.do(ctx, s.Client.Post(), "", s.typed(o), &made)
}

// Update implements Store.
func (s *Objects) Update(ctx context.Context, o *v1alpha1.EventWebhook) (*v1alpha1.EventWebhook, error) {
	var changed v1alpha1.EventWebhook
	return &changed, s.do(ctx, s.Client.Put(), o.Name, s.typed(o), &changed)
}

// Delete implements Store.
func (s *Objects) Delete(ctx context.Context, id string) error {
	ctx, cancel := context.WithTimeout(ctx, kube.CallTimeout)
	defer cancel()
	return s.Client.Delete().Namespace(s.Namespace).Resource(resourceName).Name(id).Do(ctx).Error()
}

func (s *Objects) typed(o *v1alpha1.EventWebhook) *v1alpha1.EventWebhook {
	o = o.DeepCopy()
	o.TypeMeta = metav1.TypeMeta{APIVersion: v1alpha1.GroupVersion().String(), Kind: "EventWebhook"}
	o.Namespace = s.Namespace
	return o
}

func (s *Objects) do(ctx context.Context, r *rest.Request, name string, body *v1alpha1.EventWebhook, into runtime.Object) error {
	ctx, cancel := context.WithTimeout(ctx, kube.CallTimeout)
	defer cancel()
	r = r.Namespace(s.Namespace).Resource(resourceName)
	if name != "" {
		r = r.Name(name)
	}
	if body != nil {
		r = r.Body(body)
	}
	return r.Do(ctx).Into(into)
}
