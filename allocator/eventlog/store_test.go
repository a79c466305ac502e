package eventlog

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"sync"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/berth-sandbox/berth/api/v1alpha1"
)

var segmentsResource = schema.GroupResource{Group: v1alpha1.Group, Resource: resourceName}

var errLost = errors.New("the answer is lost")

// memory is a Store with conditional writes.
type memory struct {
	mu      sync.Mutex
	objects map[string]v1alpha1.EventSegment
	version int
	// fault is asked before each write: whether it takes place, and whether its answer is lost.
	fault func() (applied, lost bool)
	// off: the resource is not served.
	off    bool
	writes int
}

func newMemory() *memory { return &memory{objects: map[string]v1alpha1.EventSegment{}} }

func (m *memory) List(_ context.Context, f func(*v1alpha1.EventSegment)) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.off {
		return apierrors.NewNotFound(segmentsResource, "")
	}
	for _, name := range slices.Sorted(maps.Keys(m.objects)) {
		o := m.objects[name]
		f(&o)
	}
	return nil
}

func (m *memory) Get(_ context.Context, name string) (*v1alpha1.EventSegment, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	o, ok := m.objects[name]
	if !ok {
		return nil, apierrors.NewNotFound(segmentsResource, name)
	}
	return &o, nil
}

func (m *memory) Create(_ context.Context, s *v1alpha1.EventSegment) (metav1.ObjectMeta, error) {
	return m.write(s, func(_ v1alpha1.EventSegment, found bool) error {
		if found {
			return apierrors.NewAlreadyExists(segmentsResource, s.Name)
		}
		return nil
	})
}

func (m *memory) Update(_ context.Context, s *v1alpha1.EventSegment) (metav1.ObjectMeta, error) {
	return m.write(s, func(there v1alpha1.EventSegment, found bool) error {
		switch {
		case !found:
			return apierrors.NewNotFound(segmentsResource, s.Name)
		case there.ResourceVersion != s.ResourceVersion:
			return apierrors.NewConflict(segmentsResource, s.Name, errors.New("another version"))
		}
		return nil
	})
}

func (m *memory) write(s *v1alpha1.EventSegment, check func(there v1alpha1.EventSegment, found bool) error) (metav1.ObjectMeta, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	applied, lost := true, false
	if m.fault != nil {
		applied, lost = m.fault()
	}
	if there, found := m.objects[s.Name]; applied {
		if err := check(there, found); err != nil {
			return metav1.ObjectMeta{}, err
		}
		m.version++
		m.writes++
		s.ResourceVersion = strconv.Itoa(m.version)
		m.objects[s.Name] = *s
	}
	if lost || !applied {
		return metav1.ObjectMeta{}, errLost
	}
	return s.ObjectMeta, nil
}

func (m *memory) Delete(_ context.Context, name, version string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if there := m.objects[name]; there.ResourceVersion != version {
		return fmt.Errorf("delete %s: %w", name, errLost)
	}
	delete(m.objects, name)
	return nil
}
