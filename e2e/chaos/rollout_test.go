package chaos

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/e2e/harness"
)

// cacheLag is by how much the allocator's watch of pods lags behind the API server.
const cacheLag = 2 * time.Second

// The allocator creates as many pods as a pool asks for, and deletes no claimed one, although it sees pods late.
//
// It takes more than 20 s because each pod is seen only after the lag, and because sandboxes without a key end by
// their timeouts.
// Invariant: I5
func TestLaggingWatchCostsNoPodAndNoSandbox(t *testing.T) {
	g := newGround(t, options{replicas: 1, lease: quietLease, proxied: &faults{lag: cacheLag}})
	g.leader()
	g.fillAndEmpty(times(80, 5000))
	g.scaleAndRollOut(times(50, 2000))
	g.judge()
}

// fillAndEmpty has a pool create so many pods, and delete them. It creates no pod more.
func (g *ground) fillAndEmpty(pods int) {
	ctx, cancel := context.WithCancel(g.ctx)
	defer cancel()
	var created, deleted atomic.Int64
	var watching sync.WaitGroup
	defer watching.Wait()
	defer cancel()
	client, err := kubernetes.NewForConfig(g.Cluster.RestConfig()) // g.Clients bound the time of a call
	require.NoError(g, err)
	// An informer, because the API server ends a watch that is not read fast enough.
	_, informer := cache.NewInformerWithOptions(cache.InformerOptions{
		ListerWatcher: cache.NewFilteredListWatchFromClient(client.CoreV1().RESTClient(), "pods", harness.Namespace,
			func(o *metav1.ListOptions) { o.LabelSelector = v1alpha1.LabelPool + "=filled" }),
		ObjectType: &corev1.Pod{},
		Handler: cache.ResourceEventHandlerFuncs{
			AddFunc: func(any) { created.Add(1) }, DeleteFunc: func(any) { deleted.Add(1) },
		},
	})
	watching.Go(func() { informer.RunWithContext(ctx) })
	began := time.Now()
	p := g.newPool("filled", int32(pods), nil)
	filled := time.Since(began)
	g.eventually(func() error {
		if n := created.Load(); int(n) < pods {
			return fmt.Errorf("%d of %d pods are seen", n, pods)
		}
		return nil
	})
	time.Sleep(2 * cacheLag) // a pod more would be seen by now
	require.EqualValues(g, pods, created.Load(), "created")
	require.Zero(g, deleted.Load(), "deleted")
	began = time.Now()
	p.set(types.MergePatchType, `{"spec":{"warm":0}}`)
	g.eventually(func() error {
		if n := deleted.Load(); int(n) < pods {
			return fmt.Errorf("%d of %d pods are deleted", n, pods)
		}
		return nil
	})
	g.Logf("%d pods: created in %.1f s, deleted in %.1f s", pods, filled.Seconds(), time.Since(began).Seconds())
	require.EqualValues(g, pods, created.Load(), "created")
}

// set changes the pool.
func (p *pool) set(kind types.PatchType, patch string) {
	require.NoError(p, p.Clients.Berth.Patch(kind).Namespace(harness.Namespace).Resource("sandboxpools").Name(p.name).
		Body([]byte(patch)).Do(p.ctx).Error())
}

// scaleAndRollOut changes the size and the template of a pool all the time while so many callers live. The judges say
// whether a claimed pod was lost.
func (g *ground) scaleAndRollOut(callers int) {
	atOnce := times(10, 40)
	p := g.newPool("rolled", 10, nil)
	done := make(chan struct{})
	var changing sync.WaitGroup
	changes := 0
	changing.Go(func() {
		random := p.Random("changes")
		for ; ; changes++ {
			select {
			case <-done:
				return
			case <-g.ctx.Done():
				return
			case <-time.After(harness.Within(random, 400*time.Millisecond)):
			}
			if changes%20 == 0 { // slower than the watch, or no pod would become warm
				p.set(types.JSONPatchType, fmt.Sprintf(
					`[{"op":"add","path":"/spec/template/spec/containers/0/env","value":[{"name":"CHANGE","value":"%d"}]}]`, changes))
			} else {
				p.set(types.MergePatchType, fmt.Sprintf(`{"spec":{"warm":%d}}`, 5+random.IntN(25)))
			}
		}
	})
	var living sync.WaitGroup
	next := make(chan int)
	for range atOnce {
		living.Go(func() {
			for i := range next {
				p.life(fmt.Sprintf("rolled-%d", i), i%4 == 0, func() {})
			}
		})
	}
	for i := range callers {
		next <- i
	}
	close(next)
	living.Wait()
	close(done)
	changing.Wait()
	g.Logf("%d callers, %d changes of the pool", callers, changes)
	// More than it keeps for a while because claims have waited.
	p.set(types.MergePatchType, `{"spec":{"warm":40}}`)
}
