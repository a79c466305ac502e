package conformance

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
)

// label is on every pod of a run; its value names the run.
const label = "conformance-run"

// observer keeps every version of every pod of a run, in the watch's order.
type observer struct {
	run string

	mu      sync.Mutex
	byName  map[string][]version
	changed chan struct{} // closed and replaced at each version
}

func observe(t *testing.T, client kubernetes.Interface, namespace, run string) *observer {
	o := &observer{run: run, byName: map[string][]version{}, changed: make(chan struct{})}
	factory := informers.NewSharedInformerFactoryWithOptions(client, 0, informers.WithNamespace(namespace),
		informers.WithTweakListOptions(func(l *metav1.ListOptions) { l.LabelSelector = label + "=" + run }))
	pods := factory.Core().V1().Pods().Informer()
	_, err := pods.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(p any) { o.add(version{p.(*corev1.Pod), false}) },
		UpdateFunc: func(_, p any) { o.add(version{p.(*corev1.Pod), false}) },
		DeleteFunc: func(p any) {
			if unseen, ok := p.(cache.DeletedFinalStateUnknown); ok {
				p = unseen.Obj
			}
			o.add(version{p.(*corev1.Pod), true})
		},
	})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	factory.StartWithContext(ctx)
	t.Cleanup(func() {
		cancel()
		factory.Shutdown()
	})
	require.True(t, cache.WaitForCacheSync(t.Context().Done(), pods.HasSynced),
		"pods of namespace %s cannot be watched", namespace)
	return o
}

func (o *observer) add(v version) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.byName[v.Name] = append(o.byName[v.Name], v)
	close(o.changed)
	o.changed = make(chan struct{})
}

func (o *observer) all(name string) []version {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.byName[name]
}

// await returns the first version from index on that has the property.
func (o *observer) await(
	ctx context.Context, name string, index int, holds property,
) (int, version, bool) {
	for {
		o.mu.Lock()
		seen, changed := o.byName[name], o.changed
		o.mu.Unlock()
		for ; index < len(seen); index++ {
			if holds(seen[index]) {
				return index, seen[index], true
			}
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return 0, version{}, false
		}
	}
}

// history is the evidence of a failed run: the status of each version.
func (o *observer) history(name string) string {
	var b strings.Builder
	for _, v := range o.all(name) {
		status, _ := json.Marshal(v.Status)
		fmt.Fprintf(&b, "gone=%v uid=%s deletion=%v %s\n", v.gone, v.UID, v.DeletionTimestamp, status)
	}
	return b.String()
}
