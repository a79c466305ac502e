package chaos

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/e2e/harness"
	"github.com/berth-sandbox/berth/e2e/history"
)

// gate keeps a pod from being bound to a node until it is taken off.
const gate = "chaos.test/gate"

// waitLong is how long claims wait that are to wait until they get a pod, in
// seconds.
const waitLong = 300

var waitingCount = regexp.MustCompile(`(\d+) claims waiting`)

// Invariant: P3
func TestWaitingClaimsAreAnsweredInOrderOfArrival(t *testing.T) {
	const warm = 8
	callers := times(10, 40)
	g := newGround(t, options{replicas: 2, lease: quietLease})
	g.newPool(warm, func(p *v1alpha1.SandboxPool) {
		p.Spec.Template.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: gate}}
	})
	g.eventually(func() error {
		if p := g.readPool().Status.Pending; p < warm {
			return fmt.Errorf("%d of %d pods are there", p, warm)
		}
		return nil
	})

	random := g.Random("fifo")
	answered := make(chan history.Event, callers)
	var all sync.WaitGroup
	t.Cleanup(all.Wait)
	// Some callers between them hang up. Their claims must get no pod, which would be
	// claimed until its timeout.
	quitting, quit := context.WithCancel(g.ctx)
	defer quit()
	quitters := 0
	for i := range callers {
		c := claimant{name: fmt.Sprintf("fifo-%d", i), key: true, timeout: longTimeout, wait: waitLong, patient: true}
		all.Go(func() { answered <- g.claim(g.Random(c.name), c) })
		g.awaitWaiting(func() int { return i + 1 + quitters })
		g.waits(c.name)
		if i%5 == 0 {
			c := claimant{name: fmt.Sprintf("quitter-%d", i), timeout: longTimeout, wait: waitLong}
			replica := g.Stack.Allocators[quitters%len(g.Stack.Allocators)].API
			all.Go(func() { g.claimAt(quitting, replica, c, 0) })
			quitters++
			g.awaitWaiting(func() int { return i + 1 + quitters })
		}
	}
	quit()
	g.awaitWaiting(func() int { return callers })

	got, spoiled := 0, 0
	take := func() {
		for {
			select {
			case e := <-answered:
				require.Equal(t, http.StatusCreated, e.Code, e.Error)
				got++
			default:
				return
			}
		}
	}
	opened := map[types.UID]bool{}
	// late are the pods that got the address of a pod that ended at once, before that was
	// fenced. No claim gets them, and the allocator deletes them.
	late := 0
	for got < callers {
		p := g.gated(opened)
		opened[p.UID] = true
		switch before := got; random.IntN(5) {
		case 0: // it never comes
			g.deletePod(p)
		case 1, 2: // it goes as it comes
			g.gone(p, random.IntN(4) > 0)
			spoiled++
		default:
			g.open(p)
			g.eventually(func() error {
				if take(); got > before {
					return nil
				}
				there, err := g.pods()
				if err == nil &&
					!slices.ContainsFunc(there, func(o corev1.Pod) bool { return o.UID == p.UID && o.DeletionTimestamp == nil }) {
					late++
					return nil
				}
				return errors.New("a pod has come, and no claim got it")
			})
		}
		// Before the next one may come: who has a pod has been answered.
		if got < callers {
			g.awaitWaiting(func() int { take(); return callers - got })
		}
	}
	t.Logf("%d pods were deleted as they came, %d had an address of theirs too early", spoiled, late)
	require.LessOrEqual(t, late, spoiled)
	// From here on the pool fills.
	done := make(chan struct{})
	var opening sync.WaitGroup
	opening.Go(func() {
		ticker := time.NewTicker(50 * time.Millisecond)
		defer ticker.Stop()
		for {
			there, _ := g.pods() // what is not seen now is seen the next time
			for _, p := range there {
				if len(p.Spec.SchedulingGates) > 0 {
					g.open(p)
				}
			}
			select {
			case <-done:
				return
			case <-g.ctx.Done():
				return
			case <-ticker.C:
			}
		}
	})
	defer opening.Wait()
	defer close(done)
	g.judge()
}

// awaitWaiting waits until so many claims wait, as the refusal of one that does
// not want to wait says. There must be no warm pod.
func (g *ground) awaitWaiting(want func() int) {
	g.Helper()
	g.eventually(func() error {
		n, err := g.waiting()
		if err == nil && n != want() {
			err = fmt.Errorf("%d claims wait, expected %d", n, want())
		}
		return err
	})
}

func (g *ground) waiting() (int, error) {
	a, err := harness.Do(g.ctx, g.HTTP, http.MethodPost, g.leader().API+"/sandboxes", "",
		fmt.Sprintf(`{"templateID":%q,"waitTimeout":0}`, poolName))
	if err != nil {
		return 0, err
	}
	found := waitingCount.FindSubmatch(a.Body)
	if a.Code != http.StatusTooManyRequests || found == nil {
		return 0, fmt.Errorf("%s expected: %d %s", apierror.PoolEmpty, a.Code, a.Body)
	}
	return strconv.Atoi(string(found[1]))
}

// gated waits for a pod that stands at the gate and returns it.
func (g *ground) gated(opened map[types.UID]bool) (found corev1.Pod) {
	g.Helper()
	g.eventually(func() error {
		there, err := g.pods()
		if err != nil {
			return err
		}
		for _, p := range there {
			if len(p.Spec.SchedulingGates) > 0 && !opened[p.UID] {
				found = p
				return nil
			}
		}
		return errors.New("no pod is made")
	})
	return found
}

// open lets a pod have a node.
func (g *ground) open(p corev1.Pod) {
	_, err := g.Clients.Kubernetes.CoreV1().Pods(harness.Namespace).Patch(g.ctx, p.Name, types.JSONPatchType,
		[]byte(`[{"op":"remove","path":"/spec/schedulingGates"}]`), metav1.PatchOptions{})
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsInvalid(err) && g.ctx.Err() == nil {
		g.Errorf("open the gate for pod %s: %v", p.Name, err)
	}
}

// gone opens the gate for a pod and deletes it, at once or in the moment in which
// it is ready, and waits until it is gone. The watch tells this test of the pod
// when it tells the allocator.
func (g *ground) gone(p corev1.Pod, whenReady bool) {
	g.Helper()
	watcher, err := g.Clients.Kubernetes.CoreV1().Pods(harness.Namespace).Watch(g.ctx, metav1.ListOptions{
		FieldSelector: "metadata.name=" + p.Name, ResourceVersion: p.ResourceVersion,
	})
	require.NoError(g, err)
	defer watcher.Stop()
	g.open(p)
	if !whenReady {
		g.deletePod(p)
	}
	for e := range watcher.ResultChan() {
		now, ok := e.Object.(*corev1.Pod)
		require.True(g, ok, "%+v", e.Object)
		switch {
		case e.Type == watch.Deleted:
			return
		case whenReady && ready(*now):
			g.deletePod(p)
			whenReady = false
		}
	}
	g.Fatalf("the watch of pod %s has ended: %v", p.Name, g.ctx.Err())
}
