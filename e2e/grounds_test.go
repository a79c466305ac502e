package e2e

import (
	"context"
	"errors"
	"reflect"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/util/rand"

	"github.com/berth-sandbox/berth/allocator/kube"
	"github.com/berth-sandbox/berth/devcluster/stack"
	"github.com/berth-sandbox/berth/e2e/harness"
)

// How many tests run at one time on devclusters. Most of their time is waiting, but a Berth with
// a cluster of its own keeps the machine busy. With more tests at one time two cores do not end sooner:
// the tests then run into the bounds on their waits. The time in which a test waits for its slot is part of
// the time that go test prints.
var (
	guests = make(chan struct{}, 4) // tests on the Berth that tests share
	owners = make(chan struct{}, 2) // tests with a Berth to themselves
	long   = make(chan struct{}, 1) // those of more than half a minute, so that none of them begins last
)

// turn waits for a slot, and lets the test run beside others.
func turn(t *testing.T, slots chan struct{}) {
	t.Helper()
	t.Parallel()
	slots <- struct{}{}
	t.Cleanup(func() { <-slots })
}

// start makes a pool on the Berth that tests share: two allocators and two gateways. It is for
// a test that does nothing that others would notice.
func start(t *testing.T, warm int32) *env {
	t.Helper()
	skipShort(t)
	turn(t, guests)
	return startGuest(t, warm)
}

// startIdle is start for a test that does nearly nothing for a minute or more.
func startIdle(t *testing.T, warm int32) *env {
	t.Helper()
	skipShort(t)
	t.Parallel()
	return startGuest(t, warm)
}

// startDisturbing is start for tests that others would notice: they end parts of Berth, keep it
// busy, or measure all of it. On a real cluster they run before the others, one after another.
func startDisturbing(t *testing.T, warm int32) *env {
	t.Helper()
	skipShort(t)
	if shared == nil {
		return startAlone(t, warm, stack.Options{Allocators: releaseReplicas, Gateways: releaseReplicas})
	}
	return startShared(t, warm)
}

// startHere is startDisturbing for tests of what does not depend on the cluster. They run on
// devclusters only, because a real cluster takes long to replace what they end.
func startHere(t *testing.T, warm int32) *env {
	t.Helper()
	onThisMachine(t, "does not depend on the cluster")
	return startDisturbing(t, warm)
}

func startGuest(t *testing.T, warm int32) *env {
	t.Helper()
	if shared != nil {
		return startShared(t, warm)
	}
	p, err := grounds.common()
	require.NoError(t, err)
	t.Cleanup(func() {
		if t.Failed() {
			p.logs(t)
		}
	})
	return startOn(t, p, warm)
}

func startShared(t *testing.T, warm int32) *env {
	t.Helper()
	require.NoError(t, shared.waitComplete(t.Context())) // a test may have ended parts of it
	t.Cleanup(func() {
		if t.Failed() {
			shared.logs(t)
		}
	})
	return startOn(t, shared, warm)
}

// startAlone is for tests that end and pause single processes. They have a Berth to themselves, which later
// tests use again if many have its options. On a real cluster they are skipped.
func startAlone(t *testing.T, warm int32, o stack.Options) *env {
	t.Helper()
	return startOwner(t, owners, warm, o)
}

// startLongAlone is startAlone for tests of more than half a minute.
func startLongAlone(t *testing.T, warm int32, o stack.Options) *env {
	t.Helper()
	return startOwner(t, long, warm, o)
}

// startDamaging is startAlone for tests that leave something behind. Their Berth ends with them.
func startDamaging(t *testing.T, slots chan struct{}, warm int32, o stack.Options) *env {
	t.Helper()
	onThisMachine(t, "leaves something behind")
	turn(t, slots)
	p, err := upProcesses(context.Background(), o)
	grounds.endAfter(t, p, nil)
	require.NoError(t, err)
	return startOn(t, p, warm)
}

func startOwner(t *testing.T, slots chan struct{}, warm int32, o stack.Options) *env {
	t.Helper()
	onThisMachine(t, "ends or pauses single processes, of Berth or of the control plane")
	turn(t, slots)
	return startOn(t, grounds.take(t, o), warm)
}

// onThisMachine skips a test on a real cluster.
func onThisMachine(t *testing.T, why string) {
	t.Helper()
	skipShort(t)
	if shared != nil {
		t.Skipf("%s: only on the provider %s", why, onDevcluster)
	}
}

// onACluster skips a test that needs a real cluster.
func onACluster(t *testing.T, why string) {
	t.Helper()
	skipShort(t)
	if shared == nil {
		t.Skipf("%s: only on the providers %s and %s", why, onKubeconfig, onKind)
	}
}

func skipShort(t *testing.T) {
	t.Helper()
	if testing.Short() {
		t.Skip("needs a cluster and Envoy; not under -short")
	}
}

func startOn(t *testing.T, s site, warm int32) *env {
	t.Helper()
	clients, err := kube.NewClients(s.restConfig(), 0, 0)
	require.NoError(t, err)
	e := &env{t: t, site: s, clients: clients, pool: "pool-" + rand.String(5)}
	e.processes, _ = s.(*processes)
	e.createPool(e.newPool(e.pool, warm))
	e.waitWarm(warm)
	return e
}

// groundList are the devclusters with Berth.
type groundList struct {
	// common returns the one that guests share. The first call starts it.
	common func() (*processes, error)

	mu   sync.Mutex
	free [len(common)][]*processes // by their options; those that a later test may use
	ends []*processes              // ended when no test runs any more, like those that are free
}

var grounds = newGrounds()

func newGrounds() *groundList {
	g := &groundList{}
	g.common = sync.OnceValues(func() (*processes, error) {
		p, err := upProcesses(context.Background(), stack.Options{Allocators: releaseReplicas, Gateways: releaseReplicas})
		if p != nil {
			g.mu.Lock()
			defer g.mu.Unlock()
			g.ends = append(g.ends, p)
		}
		return p, err
	})
	return g
}

// restoreLimit is how long a Berth may take until the next test can use it. Then it is ended.
const restoreLimit = time.Minute

// common are the options of many tests.
var common = [...]stack.Options{{}, {Allocators: releaseReplicas, Gateways: releaseReplicas}}

// take returns a Berth that no other test uses before this one is over. With common options it may be one that an
// earlier test has left. Others are not kept, because what nothing uses still keeps the machine busy.
func (g *groundList) take(t *testing.T, o stack.Options) *processes {
	t.Helper()
	kind := slices.IndexFunc(common[:], func(c stack.Options) bool { return reflect.DeepEqual(c, o) })
	if kind < 0 {
		p, err := upProcesses(context.Background(), o)
		g.endAfter(t, p, nil)
		require.NoError(t, err)
		return p
	}
	p := g.pop(kind)
	var err error
	if p == nil {
		p, err = upProcesses(context.Background(), o)
	}
	g.endAfter(t, p, func() { g.put(kind, p) })
	require.NoError(t, err)
	return p
}

// endAfter ends p when the test is over. If keep is set and the test has not failed, it restores
// p and calls keep instead.
func (g *groundList) endAfter(t *testing.T, p *processes, keep func()) {
	if p == nil {
		return
	}
	t.Cleanup(func() {
		if err := harness.CheckLogs(p.cluster.Dir()); err != nil {
			t.Error(err)
		}
		if t.Failed() {
			p.logs(t)
		} else if keep != nil {
			ctx, cancel := context.WithTimeout(context.Background(), restoreLimit)
			defer cancel()
			err := p.restore(ctx)
			if err == nil {
				keep()
				return
			}
			t.Logf("no later test uses this Berth: %v", err)
		}
		if err := p.down(); err != nil {
			t.Error(err)
		}
	})
}

func (g *groundList) pop(kind int) (p *processes) {
	g.mu.Lock()
	defer g.mu.Unlock()
	free := &g.free[kind]
	if last := len(*free) - 1; last >= 0 {
		p, *free = (*free)[last], (*free)[:last]
	}
	return p
}

func (g *groundList) put(kind int, p *processes) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.free[kind] = append(g.free[kind], p)
}

// end ends all that run, when no test runs any more.
func (g *groundList) end() error {
	var all sync.WaitGroup
	var mu sync.Mutex
	var errs []error
	for _, p := range slices.Concat(slices.Concat(g.free[:]...), g.ends) {
		all.Go(func() {
			err := p.down()
			mu.Lock()
			defer mu.Unlock()
			errs = append(errs, err)
		})
	}
	all.Wait()
	return errors.Join(errs...)
}
