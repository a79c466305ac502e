package chaos

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"

	"github.com/berth-sandbox/berth/allocator/rest"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/devcluster"
	"github.com/berth-sandbox/berth/devcluster/kwok"
	"github.com/berth-sandbox/berth/devcluster/stack"
	"github.com/berth-sandbox/berth/e2e/harness"
	"github.com/berth-sandbox/berth/e2e/history"
	"github.com/berth-sandbox/berth/internal/bootclock"
)

const (
	poolName = "chaos"
	// limit bounds one scenario. It is a guard and not what is tested.
	limit = 6 * time.Minute
	// lease gives a renewal of 2 s and retries of 0.3 s. quietLease is for tests in
	// which the leader is not to change, however slow the machine.
	lease, quietLease = 3 * time.Second, 15 * time.Second
	// maxStale is short, so that the pods of what was released under an earlier
	// leader go before the end of a test.
	maxStale = 2 * time.Second
)

// ground is a Berth with a pool of KWOK pods.
type ground struct {
	*harness.Berth
	// ctx ends when the scenario has taken too long.
	ctx context.Context
}

// options say what a test needs.
type options struct {
	replicas int
	lease    time.Duration // default lease
	proxied  *faults       // what the allocators reach the API server through, if set
}

// newGround starts everything.
func newGround(t *testing.T, o options) *ground {
	t.Helper()
	so := stack.Options{BinDir: binDir, Allocators: o.replicas, LeaseDuration: cmp.Or(o.lease, lease), MaxStale: maxStale}
	ho := harness.Options{KWOK: &kwok.Options{Nodes: kwok.Names("node", 4)}, Stack: so}
	if o.proxied != nil {
		ho.Kubeconfig = func(c *devcluster.Cluster) string { return o.proxied.start(t, c) }
	}
	run := harness.NewRun(t, history.Settings{Suite: history.Chaos, MaxStale: maxStale}, "")
	g := &ground{Berth: run.Start(ho)}
	var cancel context.CancelFunc
	g.ctx, cancel = context.WithTimeout(t.Context(), limit)
	t.Cleanup(cancel)
	g.KeepAllocators()
	return g
}

// leader waits for an allocator that leads.
func (g *ground) leader() *stack.Allocator {
	g.Helper()
	a, err := g.Stack.Leader(g.ctx)
	require.NoError(g, err)
	return a
}

// newPool makes a pool and, if that is not changed, waits until it has its pods.
func (g *ground) newPool(warm int32, change func(*v1alpha1.SandboxPool)) {
	g.Helper()
	g.CreatePool(poolName, warm, change)
	if change == nil {
		g.eventually(func() error {
			if s := g.readPool().Status; s.Warm < warm {
				return fmt.Errorf("%d of %d pods are warm", s.Warm, warm)
			}
			return nil
		})
	}
}

func (g *ground) readPool() v1alpha1.SandboxPool {
	g.Helper()
	p, err := g.ReadPool(g.ctx, poolName)
	require.NoError(g, err)
	return p
}

func (g *ground) pods() ([]corev1.Pod, error) { return g.Pods(g.ctx, poolName, "") }

// deletePod deletes a pod by force.
func (g *ground) deletePod(p corev1.Pod) {
	_, _ = g.DeletePod(g.ctx, &p, harness.ByForce) // the history has the error
}

// eventually waits until check returns nil, or the scenario has taken too long.
func (g *ground) eventually(check func() error) {
	g.Helper()
	if err := g.wait(check); err != nil {
		g.Fatal(err)
	}
}

func (g *ground) wait(check func() error) error {
	return harness.Wait(g.ctx, func(context.Context) error { return check() })
}

// judge waits until nothing moves any more, writes down what there is, and judges.
func (g *ground) judge() {
	g.Helper()
	var state []history.Event
	err := g.wait(func() (err error) {
		state, err = g.look()
		return err
	})
	if err != nil {
		g.Errorf("things do not come to rest: %v", err)
	}
	for _, e := range state {
		g.History.Add(e)
	}
	g.Judge()
}

// soon is when a sandbox ends that is not given time to see the end of a test.
const soon = time.Minute

// listed reads all pages of the list.
func (g *ground) listed() (all []rest.Sandbox, err error) {
	for token, more := "", true; more; more = token != "" {
		a, err := harness.Do(g.ctx, g.HTTP, http.MethodGet, g.leader().API+"/sandboxes?nextToken="+token, "", "")
		if err != nil {
			return nil, err
		}
		if a.Code != http.StatusOK {
			return nil, fmt.Errorf("list: %d %s", a.Code, a.Body)
		}
		var page []rest.Sandbox
		if err := json.Unmarshal(a.Body, &page); err != nil {
			return nil, err
		}
		all, token = append(all, page...), a.Header.Get(rest.NextTokenHeader)
	}
	return all, nil
}

// look reads everything there is. The error says that it still moves.
func (g *ground) look() (state []history.Event, err error) {
	at := time.Now()
	listed, err := g.listed()
	if err != nil {
		return nil, err
	}
	if state, err = g.Records(g.ctx); err != nil {
		return nil, err
	}
	pods, err := g.pods()
	if err != nil {
		return nil, err
	}
	pool := g.readPool()
	for _, s := range listed {
		state = append(state,
			history.Event{Kind: history.Listed, Sandbox: s.SandboxID, Pod: s.PodName, Owner: s.Metadata[harness.ClaimField]})
	}
	for _, p := range pods {
		state = append(state, history.Event{
			Kind: history.Pod, Pod: p.Name, PodUID: string(p.UID), Ready: ready(p), Deleting: p.DeletionTimestamp != nil,
		})
	}
	state = append(state, history.Event{Kind: history.Pool, Wall: at.Round(0), Counts: &history.Counts{
		Wanted: int(pool.Spec.Warm), Warm: int(pool.Status.Warm), Claimed: int(pool.Status.Claimed),
	}})
	final, err := g.final()
	if err != nil {
		return state, err
	}
	return append(state, final...), g.moves(at, listed, len(pods), pool)
}

// final reads each sandbox that was answered.
func (g *ground) final() (all []history.Event, err error) {
	read := map[string]bool{}
	for _, e := range g.History.All() {
		if e.Kind != history.Claim || e.Code != http.StatusCreated || read[e.Sandbox] {
			continue
		}
		read[e.Sandbox] = true
		a, err := harness.Do(g.ctx, g.HTTP, http.MethodGet, g.leader().API+"/sandboxes/"+e.Sandbox, "", "")
		if err != nil {
			return nil, err
		}
		if a.Code == http.StatusServiceUnavailable {
			return nil, fmt.Errorf("read: %s", a.Body)
		}
		all = append(all, history.Event{Kind: history.Final, Sandbox: e.Sandbox, Code: a.Code})
	}
	return all, nil
}

// moves says what is still under way.
func (g *ground) moves(at time.Time, listed []rest.Sandbox, pods int, pool v1alpha1.SandboxPool) error {
	for _, s := range listed {
		if s.EndAt.Before(at.Add(soon)) {
			return fmt.Errorf("sandbox %s ends at %v", s.SandboxID, s.EndAt)
		}
	}
	metrics, err := harness.ReadMetrics(g.ctx, g.HTTP, g.leader().Admin+"/metrics")
	if err != nil {
		return err
	}
	status := pool.Status
	switch {
	case metrics.Unwritten() > 0:
		return fmt.Errorf("%v writes wait", metrics.Unwritten())
	case status.Pending+status.Releasing > 0 || status.Warm != pool.Spec.Warm || int(status.Claimed) != len(listed):
		return fmt.Errorf("the pool asks for %d, has %+v, and %d sandboxes are listed", pool.Spec.Warm, status, len(listed))
	case pods != int(status.Warm+status.Claimed):
		return fmt.Errorf("%d pods are there: %+v", pods, status)
	}
	return nil
}

func ready(p corev1.Pod) bool {
	return slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})
}

// waits records that a claim waits now.
func (g *ground) waits(claim string) {
	g.History.Add(history.Event{Kind: history.Waiting, Claim: claim, Began: bootclock.Now()})
}
