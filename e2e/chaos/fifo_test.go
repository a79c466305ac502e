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
	"github.com/berth-sandbox/berth/internal/wait"
)

// gate keeps a pod from being bound to a node until it is removed.
const gate = "chaos.test/gate"

// waitLong is how long claims wait that must get a pod in the end, in seconds.
const waitLong = 300

var waitingCount = regexp.MustCompile(`(\d+) claims waiting`)

// waitInOrder has claims wait for pods that come one by one. They are answered in the order in
// which they came.
func (g *ground) waitInOrder() {
	const warm = 8
	callers := times(10, 40)
	p := g.newPool("fifo", warm, func(p *v1alpha1.SandboxPool) {
		p.Spec.Template.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: gate}}
	})
	g.eventually(func() error {
		if n := p.state().Status.Pending; n < warm {
			return fmt.Errorf("%d of %d pods are there", n, warm)
		}
		return nil
	})

	answered := make(chan history.Event, callers)
	var all sync.WaitGroup
	g.Cleanup(all.Wait)
	p.callInTurn(callers, &all, answered)
	p.answerOneByOne(callers, answered)
	// From here on the pool fills.
	ctx, stop := context.WithCancel(g.ctx)
	all.Go(func() { p.openAll(ctx) })
	g.Cleanup(stop)
}

// callInTurn has callers claim. Each one waits before the next one comes. Some callers between
// them hang up. Their claims must get no pod, which would be claimed until its timeout.
func (p *pool) callInTurn(callers int, all *sync.WaitGroup, answered chan<- history.Event) {
	quitting, quit := context.WithCancel(p.ctx)
	defer quit()
	quitters := 0
	for i := range callers {
		c := claimant{name: fmt.Sprintf("fifo-%d", i), key: true, timeout: longTimeout, wait: waitLong, patient: true}
		all.Go(func() { answered <- p.claim(p.Random(c.name), c) })
		p.awaitWaiting(func() int { return i + 1 + quitters })
		p.waits(c.name)
		if i%5 == 0 {
			c := claimant{name: fmt.Sprintf("quitter-%d", i), timeout: longTimeout, wait: waitLong}
			replica := p.Stack.Allocators[quitters%len(p.Stack.Allocators)].API
			all.Go(func() { p.claimAt(quitting, replica, c, 0) })
			quitters++
			p.awaitWaiting(func() int { return i + 1 + quitters })
		}
	}
	quit()
	p.awaitWaiting(func() int { return callers })
}

// answerOneByOne lets one pod come after the other until all claims are answered. Some pods are
// deleted before they come or as they come.
func (p *pool) answerOneByOne(callers int, answered <-chan history.Event) {
	random := p.Random("fifo")
	got, spoiled := 0, 0
	take := func() {
		for {
			select {
			case e := <-answered:
				require.Equal(p, http.StatusCreated, e.Code, e.Error)
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
		one := p.gated(opened)
		opened[one.UID] = true
		switch before := got; random.IntN(5) {
		case 0: // it never comes
			p.deletePod(one)
		case 1, 2: // it is deleted as it comes
			p.gone(one, random.IntN(4) > 0)
			spoiled++
		default:
			p.open(one)
			p.eventually(func() error {
				if take(); got > before {
					return nil
				}
				there, err := p.pods()
				if err == nil && !slices.ContainsFunc(there, func(o corev1.Pod) bool {
					return o.UID == one.UID && o.DeletionTimestamp == nil
				}) {
					late++
					return nil
				}
				return errors.New("a pod has come, and no claim got it")
			})
		}
		if got < callers { // the claim that got the pod is answered before the next pod comes
			p.awaitWaiting(func() int { take(); return callers - got })
		}
	}
	p.Logf("%d pods were deleted as they came, %d had an address of theirs too early", spoiled, late)
	require.LessOrEqual(p, late, spoiled)
}

// openAll opens the gate for every pod until ctx ends.
func (p *pool) openAll(ctx context.Context) {
	for ; ctx.Err() == nil; wait.Sleep(ctx, 50*time.Millisecond) {
		there, _ := p.pods() // the next round opens the gate for a pod that this one does not see
		for _, one := range there {
			if len(one.Spec.SchedulingGates) > 0 {
				p.open(one)
			}
		}
	}
}

// awaitWaiting waits until so many claims wait. The refusal of a claim that does not wait has
// the number. There must be no warm pod.
func (p *pool) awaitWaiting(want func() int) {
	p.Helper()
	p.eventually(func() error {
		n, err := p.waiting()
		if err == nil && n != want() {
			err = fmt.Errorf("%d claims wait, expected %d", n, want())
		}
		return err
	})
}

func (p *pool) waiting() (int, error) {
	a, err := harness.Do(p.ctx, p.HTTP, http.MethodPost, p.leader().API+"/sandboxes", "",
		fmt.Sprintf(`{"templateID":%q,"waitTimeout":0}`, p.name))
	if err != nil {
		return 0, err
	}
	found := waitingCount.FindSubmatch(a.Body)
	if a.Code != http.StatusTooManyRequests || found == nil {
		return 0, fmt.Errorf("%s expected: %d %s", apierror.PoolEmpty, a.Code, a.Body)
	}
	return strconv.Atoi(string(found[1]))
}

// gated waits for a pod behind the gate and returns it.
func (p *pool) gated(opened map[types.UID]bool) (found corev1.Pod) {
	p.Helper()
	p.eventually(func() error {
		there, err := p.pods()
		if err != nil {
			return err
		}
		for _, one := range there {
			if len(one.Spec.SchedulingGates) > 0 && !opened[one.UID] {
				found = one
				return nil
			}
		}
		return errors.New("no pod is made")
	})
	return found
}

// open lets a pod be bound to a node.
func (p *pool) open(one corev1.Pod) {
	_, err := p.Clients.Kubernetes.CoreV1().Pods(harness.Namespace).Patch(p.ctx, one.Name, types.JSONPatchType,
		[]byte(`[{"op":"remove","path":"/spec/schedulingGates"}]`), metav1.PatchOptions{})
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsInvalid(err) && p.ctx.Err() == nil {
		p.Errorf("open the gate for pod %s: %v", one.Name, err)
	}
}

// gone opens the gate for a pod, deletes it at once or when it is ready, and waits until it is
// gone. The watch shows the pod to the test when it shows it to the allocator.
func (p *pool) gone(one corev1.Pod, whenReady bool) {
	p.Helper()
	watcher, err := p.Clients.Kubernetes.CoreV1().Pods(harness.Namespace).Watch(p.ctx, metav1.ListOptions{
		FieldSelector: "metadata.name=" + one.Name, ResourceVersion: one.ResourceVersion,
	})
	require.NoError(p, err)
	defer watcher.Stop()
	p.open(one)
	if !whenReady {
		p.deletePod(one)
	}
	for e := range watcher.ResultChan() {
		now, ok := e.Object.(*corev1.Pod)
		require.True(p, ok, "%+v", e.Object)
		switch {
		case e.Type == watch.Deleted:
			return
		case whenReady && ready(*now):
			p.deletePod(one)
			whenReady = false
		}
	}
	p.Fatalf("the watch of pod %s has ended: %v", one.Name, p.ctx.Err())
}
