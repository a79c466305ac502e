package kube

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"go.uber.org/zap"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/internal/options"
)

// ListTimeout bounds one page of a list. It is the API server's own limit of a request.
const ListTimeout = time.Minute

// PageSize is the number of objects in one page of a list.
const PageSize = 1000

// Options configure what watches or writes one kind of objects. All are required.
type Options struct {
	Clients   *Clients
	Namespace string
	// Submit takes the events. It may block.
	Submit func(core.Event)
	Log    *zap.Logger
}

// Check returns an error that names the missing options.
func (o Options) Check() error {
	return options.Require(o, "Clients", "Namespace", "Submit", "Log")
}

// Resource is a kind of objects of the API server.
type Resource struct {
	Client rest.Interface
	// Name is the plural in URLs. Namespace is empty for objects outside of namespaces.
	Name, Namespace string
}

// list is a pointer to a list type L.
type list[L any] interface {
	*L
	runtime.Object
	metav1.ListInterface
}

// List reads all objects from the API server's store, page by page, and returns what items
// makes of the pages, and the resource version of the list. It retries a failed page after
// a growing pause and with twice the timeout, from CallTimeout up to ListTimeout. It starts
// again when the API server no longer has the snapshot that the list was read from. It
// returns an error only when ctx has ended.
func List[L, T any, P list[L]](
	ctx context.Context, r Resource, log *zap.Logger, items func(P) []T,
) (all []T, version string, err error) {
	const first, most = 50 * time.Millisecond, 5 * time.Second
	pause, timeout := first, CallTimeout
	for next := ""; ; {
		call, cancel := context.WithTimeout(ctx, timeout)
		page := P(new(L))
		err := r.Page(call, next, page)
		cancel()
		switch {
		case err == nil:
			all, next, pause = append(all, items(page)...), page.GetContinue(), first
			if next == "" {
				return all, page.GetResourceVersion(), nil
			}
			continue
		case ctx.Err() != nil:
			return nil, "", err
		case apierrors.IsResourceExpired(err):
			all, next = nil, ""
		}
		log.Warn("list failed, retrying", zap.Error(err))
		select {
		case <-ctx.Done():
			return nil, "", err
		case <-time.After(pause):
		}
		pause, timeout = min(2*pause, most), min(2*timeout, ListTimeout)
	}
}

// Page reads one page of a list. next is the continue token of the page before, "" for the
// first page.
func (r Resource) Page(ctx context.Context, next string, into runtime.Object) error {
	if err := r.Client.Get().Namespace(r.Namespace).Resource(r.Name).
		Param("limit", strconv.Itoa(PageSize)).Param("continue", next).Do(ctx).Into(into); err != nil {
		return fmt.Errorf("list %s: %w", r.Name, err)
	}
	return nil
}

// Older reports whether one resource version is certainly older than another.
func Older(version, than string) bool {
	order, err := resourceversion.CompareResourceVersion(version, than)
	return err == nil && order < 0
}

// Watch watches all objects of the type of object until ctx ends. It calls seen for each new
// and changed object, with the zero T as the former state of a new one, and gone for each
// deleted object, with its last known state. slim, if not nil, returns a copy with only the
// fields that the caller reads, so that the cache stays small.
func Watch[T runtime.Object](
	ctx context.Context, r Resource, object T, slim func(T) T, seen func(was, is T), gone func(T),
) error {
	i := cache.NewSharedIndexInformer(
		cache.NewListWatchFromClient(r.Client, r.Name, r.Namespace, fields.Everything()), object, 0, nil)
	errSlim := i.SetTransform(func(o any) (any, error) {
		if full, ok := o.(T); ok && slim != nil {
			return slim(full), nil
		}
		return o, nil // cache.DeletedFinalStateUnknown
	})
	_, err := i.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: func(o any) {
			var none T
			seen(none, o.(T))
		},
		UpdateFunc: func(was, is any) { seen(was.(T), is.(T)) },
		DeleteFunc: func(o any) {
			if unknown, ok := o.(cache.DeletedFinalStateUnknown); ok {
				o = unknown.Obj // the deletion was missed; the key is enough
			}
			if last, ok := o.(T); ok {
				gone(last)
			}
		},
	})
	if err := errors.Join(errSlim, err); err != nil {
		return fmt.Errorf("watch %s: %w", r.Name, err)
	}
	i.RunWithContext(ctx)
	return nil
}
