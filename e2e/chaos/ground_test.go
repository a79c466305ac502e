package chaos

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"

	"github.com/berth-sandbox/berth/allocator/rest"
	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/devcluster"
	"github.com/berth-sandbox/berth/devcluster/hollow"
	"github.com/berth-sandbox/berth/devcluster/stack"
	"github.com/berth-sandbox/berth/e2e/harness"
	"github.com/berth-sandbox/berth/e2e/history"
	"github.com/berth-sandbox/berth/internal/bootclock"
)

const (
	// limit ends scenarios in which nothing happens. Berth does not promise it.
	limit = 10 * time.Minute
	// lease gives a renewal of 2 s and retries of 0.3 s. quietLease is for scenarios in which
	// the leader must not change on a slow machine either.
	lease, quietLease = 3 * time.Second, 15 * time.Second
	// maxStale is short, so that the pods of what was released under an earlier
	// leader go before the end of a test.
	maxStale = 2 * time.Second
)

// ground is a Berth with pools of pods without processes. Each scenario has a pool.
type ground struct {
	*harness.Berth
	// ctx ends when the scenarios have taken too long.
	ctx   context.Context
	pools []*pool
}

// pool is one pool of a ground.
type pool struct {
	*ground
	name string
}

// options say what a test needs.
type options struct {
	replicas int
	lease    time.Duration
	proxied  *faults  // the proxy between allocators and API server, if set
	args     []string // further flags of allocators
	bin      string   // the programs, if they are not those under test
}

// newGround starts everything.
func newGround(t *testing.T, o options) *ground {
	t.Helper()
	so := stack.Options{
		BinDir: cmp.Or(o.bin, binDir), Allocators: o.replicas, LeaseDuration: o.lease, MaxStale: maxStale,
		AllocatorArgs: o.args,
	}
	ho := harness.Options{Hollow: &hollow.Options{Nodes: 4}, Stack: so}
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
func (g *ground) newPool(name string, warm int32, change func(*v1alpha1.SandboxPool)) *pool {
	g.Helper()
	g.CreatePool(name, warm, change)
	p := &pool{g, name}
	g.pools = append(g.pools, p)
	if change == nil {
		g.eventually(func() error {
			if s := p.state().Status; s.Warm < warm {
				return fmt.Errorf("%d of %d pods are warm", s.Warm, warm)
			}
			return nil
		})
	}
	return p
}

func (p *pool) state() v1alpha1.SandboxPool {
	p.Helper()
	now, err := p.ReadPool(p.ctx, p.name)
	require.NoError(p, err)
	return now
}

func (p *pool) pods() ([]corev1.Pod, error) { return p.Pods(p.ctx, p.name, "") }

// deletePod deletes a pod by force.
func (g *ground) deletePod(p corev1.Pod) {
	_, _ = g.DeletePod(g.ctx, &p, harness.ByForce) // the history has the error
}

// eventually waits until check returns nil, or the scenarios have taken too long.
func (g *ground) eventually(check func() error) {
	g.Helper()
	if err := g.wait(check); err != nil {
		g.Fatal(err)
	}
}

func (g *ground) wait(check func() error) error {
	return harness.Wait(g.ctx, func(context.Context) error { return check() })
}

// judge waits until nothing moves any more, records what there is, and judges.
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
func (g *ground) listed() (all []openapi.Sandbox, err error) {
	for token, more := "", true; more; more = token != "" {
		a, err := harness.Do(g.ctx, g.HTTP, http.MethodGet, g.leader().API+"/sandboxes?nextToken="+token, "", "")
		if err != nil {
			return nil, err
		}
		if a.Code != http.StatusOK {
			return nil, fmt.Errorf("list: %d %s", a.Code, a.Body)
		}
		var page []openapi.Sandbox
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
	claimed := map[string]int{} // by pool
	for _, s := range listed {
		claimed[s.TemplateID]++
		state = append(state,
			history.Event{Kind: history.Listed, Sandbox: s.SandboxID, Pod: s.PodName, Owner: s.Metadata[harness.ClaimField]})
	}
	var counts history.Counts // of all pools
	var moving error
	for _, p := range g.pools {
		pods, err := p.pods()
		if err != nil {
			return nil, err
		}
		for _, one := range pods {
			state = append(state, history.Event{
				Kind: history.Pod, Pod: one.Name, PodUID: string(one.UID), Ready: ready(one),
				Deleting: one.DeletionTimestamp != nil,
			})
		}
		now := p.state()
		counts.Wanted += int(now.Spec.Warm)
		counts.Warm += int(now.Status.Warm)
		counts.Claimed += int(now.Status.Claimed)
		moving = errors.Join(moving, moves(now, len(pods), claimed[p.name]))
	}
	state = append(state, history.Event{Kind: history.Pool, Wall: at.Round(0), Counts: &counts})
	final, err := g.final()
	if err != nil {
		return state, err
	}
	return append(state, final...), errors.Join(moving, g.movesOn(at, listed))
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

// moves says what is still under way in a pool with so many pods and listed sandboxes.
func moves(p v1alpha1.SandboxPool, pods, listed int) error {
	s := p.Status
	switch {
	case s.Pending+s.Releasing > 0 || s.Warm != p.Spec.Warm || int(s.Claimed) != listed:
		return fmt.Errorf("pool %s asks for %d, has %+v, and %d sandboxes are listed", p.Name, p.Spec.Warm, s, listed)
	case pods != int(s.Warm+s.Claimed):
		return fmt.Errorf("pool %s has %d pods: %+v", p.Name, pods, s)
	}
	return nil
}

// movesOn says what is still under way in all pools.
func (g *ground) movesOn(at time.Time, listed []openapi.Sandbox) error {
	for _, s := range listed {
		if s.EndAt.Before(at.Add(soon)) {
			return fmt.Errorf("sandbox %s ends at %v", s.SandboxID, s.EndAt)
		}
	}
	metrics, err := harness.ReadMetrics(g.ctx, g.HTTP, g.leader().Admin+"/metrics")
	if err == nil && metrics.Unwritten() > 0 {
		err = fmt.Errorf("%v writes wait", metrics.Unwritten())
	}
	return err
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
