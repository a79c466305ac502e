package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"

	"github.com/berth-sandbox/berth/agent/initbox"
	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/api/sandboxaccess"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/internal/wait"
)

// Leaders are killed while agents are being configured: claims are in the journal and not answered. A stopped
// agent takes the leader's connection and does not answer, so a connection to it proves that the kill comes
// after the write and before the delivery.
//
// It takes more than 20 s because it waits for a new leader, a lease of 3 s, for each kill.
// Invariant: P16, I5
func TestKilledLeadersConfigureEveryAnsweredClaim(t *testing.T) {
	e := startHere(t, 0)
	k := &configureKills{env: e, counts: map[string]int{}}
	k.pool = e.otherPool("kills", warmAgents, func(s *v1alpha1.SandboxPoolSpec) {
		s.Agent = &v1alpha1.PoolAgent{Enabled: true, Port: sandboxaccess.AgentPort}
	})
	k.keepAllocators()
	kills, most := 3, 12
	if *longFlag {
		kills, most = 20, 20
	}
	// On a busy machine some kills come too late for the claim that is to be lost.
	for round := 0; round < kills || round < most && k.counts[startedAnew] == 0; round++ {
		k.round(round)
	}
	k.rests()
	t.Logf("claims that were in flight when the leader was killed: %v", k.counts)
	require.Positive(t, k.counts[startedAnew], "no claim was lost between its record and its answer")
}

const (
	// warmAgents is how many pods a round begins with, more than its claims need.
	warmAgents = 6
	// claimants claim one sandbox each in a round, beside a batch.
	claimants, batchSize = 2, 2
)

// What became of a claim that was not answered before the kill.
const (
	startedAnew   = "the repeated claim got other sandboxes"
	configured    = "the next leader answered with sandboxes that were configured"
	beforeTheKill = "answered before the kill"
)

// configureKills are rounds of claims, of which each ends with the leader killed.
type configureKills struct {
	*env
	pool   string
	counts map[string]int
}

// keyed is a claim that is made with a key, again and again until it is answered.
type keyed struct {
	name  string
	batch bool
	first []openapi.Sandbox // what was answered before the kill
}

func (c *keyed) path() string {
	if c.batch {
		return "/v1/claims"
	}
	return "/sandboxes"
}

func (c *keyed) body(pool string) string {
	of := fmt.Sprintf(`"templateID":%q`, pool)
	if c.batch {
		of = fmt.Sprintf(`"pool":%q,"count":%d`, pool, batchSize)
	}
	return fmt.Sprintf(`{%s,"timeout":3600,"waitTimeout":60,"envVars":{"CLAIM":%q}}`, of, c.name)
}

// answered reads the answer to a claim, nil if it is none or a refusal.
func (c *keyed) answered(a answer) []openapi.Sandbox {
	var all openapi.Claims
	switch {
	case a.code != http.StatusCreated:
		return nil
	case !c.batch:
		all.Sandboxes = make([]openapi.Sandbox, 1)
		if json.Unmarshal([]byte(a.body), &all.Sandboxes[0]) != nil {
			return nil
		}
	case json.Unmarshal([]byte(a.body), &all) != nil:
		return nil
	}
	return all.Sandboxes
}

// round claims, kills the leader at one of five moments, and judges what the next leader has made of it.
func (k *configureKills) round(round int) {
	k.t.Helper()
	var agents []*agentProcess
	for _, p := range k.warmPodsOf(k.pool, warmAgents) {
		agents = append(agents, findAgent(k.t, p))
	}
	random := rand.New(rand.NewPCG(uint64(round), 0)) //nolint:gosec // moments of faults
	moment := round % 5
	stopped := agents // whose answers the leader waits for when it is killed
	switch moment {
	case 1: // the others are configured: a part of the batch, perhaps
		stopped = agents[:len(agents)/2]
	case 4: // at any time
		stopped = nil
	}
	for _, a := range stopped {
		a.stop(k.t)
	}
	var claims []*keyed
	var all sync.WaitGroup
	for i := range claimants + 1 {
		c := &keyed{name: fmt.Sprintf("%s-%d-%d", k.pool, round, i), batch: i == 0}
		claims = append(claims, c)
		all.Go(func() {
			a, err := k.callAPI(http.MethodPost, c.path(), c.body(k.pool), k.site.key(), "Idempotency-Key", c.name)
			if err == nil {
				c.first = c.answered(a)
			}
		})
	}
	if len(stopped) > 0 {
		k.eventually(func() error {
			if connected(stopped) == nil {
				return errors.New("the leader has not connected to an agent")
			}
			return nil
		})
	} else {
		k.pass(time.Duration(random.IntN(30)) * time.Millisecond)
	}
	goOn := func() {
		for _, a := range stopped {
			a.goOn()
		}
	}
	if moment == 2 { // the leader has perhaps half a configuration delivered
		goOn()
		k.pass(time.Duration(random.IntN(3000)) * time.Microsecond)
	}
	k.eventually(func() error { return k.site.killLeader(k.t.Context()) })
	all.Wait()
	if moment == 3 { // the next leader asks an agent that does not answer either
		k.eventually(func() error { return k.site.waitLeader(k.t.Context()) })
	}
	goOn()
	k.eventually(func() error { return k.site.waitLeader(k.t.Context()) })
	k.judge(claims)
}

// keepAllocators starts allocators that have ended again, until the test is over. On a busy machine a leader
// loses its lease too, and ends.
func (k *configureKills) keepAllocators() {
	ctx, stop := context.WithCancel(context.Background())
	var all sync.WaitGroup
	for _, a := range k.stack.Allocators {
		all.Go(func() {
			for ; ctx.Err() == nil; wait.Sleep(ctx, 25*time.Millisecond) {
				if !a.Running() {
					_ = a.Launch() // tried again
				}
			}
		})
	}
	k.t.Cleanup(func() {
		stop()
		all.Wait()
	})
}

// judge repeats the claims. Each sandbox that is answered has its configuration, no other one lives, and no
// warm pod's agent has been configured.
func (k *configureKills) judge(claims []*keyed) {
	k.t.Helper()
	answered := map[string]string{} // sandbox to claim
	for _, c := range claims {
		before := k.liveIDs()
		got := k.repeat(c)
		ids := idsOf(got)
		switch {
		case c.first != nil:
			require.ElementsMatch(k.t, idsOf(c.first), ids, "%s: what was answered", c.name)
			k.counts[beforeTheKill]++
		case slices.Contains(before, ids[0]):
			k.counts[configured]++
		default:
			k.counts[startedAnew]++
		}
		for _, s := range got {
			answered[s.SandboxID] = c.name
			k.requireConfigured(s, c.name)
		}
		require.Len(k.t, got, map[bool]int{true: batchSize, false: 1}[c.batch])
	}
	k.eventually(func() error {
		for _, id := range k.liveIDs() {
			if answered[id] == "" {
				return fmt.Errorf("sandbox %s lives, and no claim was answered with it", id)
			}
		}
		return nil
	})
	require.Len(k.t, k.liveIDs(), len(answered))
	for id := range answered {
		a := k.as(k.site.key(), http.MethodDelete, "/sandboxes/"+id, "")
		require.Contains(k.t, []int{http.StatusNoContent, http.StatusNotFound}, a.code, a.body) // 404: the call was repeated
	}
	k.eventually(func() error { return k.unconfigured() })
}

// rests waits until the pool has warm pods and no others.
func (k *configureKills) rests() {
	k.t.Helper()
	k.eventually(func() error {
		s, pods := k.readPool(k.pool).Status, len(k.podsIn(k.pool, ""))
		if s.Warm != warmAgents || s.Pending+s.Releasing+s.Claimed != 0 || pods != warmAgents {
			return fmt.Errorf("%d pods: %+v", pods, s)
		}
		return nil
	})
}

// unconfigured returns an error if the agent of a warm pod is configured. The labels of pods change a moment
// after their phase.
func (k *configureKills) unconfigured() error {
	for _, p := range k.podsIn(k.pool, v1alpha1.PhaseWarm) {
		if p.Status.PodIP == "" {
			return fmt.Errorf("pod %s has no address", p.Name)
		}
		at := netip.AddrPortFrom(netip.MustParseAddr(p.Status.PodIP), sandboxaccess.AgentPort)
		a, err := do(k.t.Context(), http.DefaultClient, http.MethodGet, "http://"+at.String()+initbox.Path, "", "")
		if err != nil {
			return err
		}
		var hello initbox.Hello
		require.NoError(k.t, json.Unmarshal([]byte(a.body), &hello), a.body)
		if hello.Sandbox != "" {
			return fmt.Errorf("the agent of the warm pod %s is configured", p.Name)
		}
	}
	return nil
}

// repeat makes a claim again, with its key, until it is answered.
func (k *configureKills) repeat(c *keyed) (got []openapi.Sandbox) {
	k.t.Helper()
	k.eventually(func() error {
		a, err := k.callAPI(http.MethodPost, c.path(), c.body(k.pool), k.site.key(), "Idempotency-Key", c.name)
		if err != nil {
			return err
		}
		if got = c.answered(a); got == nil {
			require.Equal(k.t, http.StatusServiceUnavailable, a.code, a.body)
			return fmt.Errorf("%d %s", a.code, a.body)
		}
		return nil
	})
	return got
}

// requireConfigured requires that the agent of a sandbox has the variables of its claim.
func (k *configureKills) requireConfigured(s openapi.Sandbox, claim string) {
	k.t.Helper()
	require.NotNil(k.t, s.EnvdAccessToken)
	client, host := k.client(), k.host(sandboxaccess.AgentPort, s.SandboxID)
	k.eventually(func() error {
		a, err := do(k.t.Context(), client, http.MethodGet, "http://gateway/envs", host, "",
			sandboxaccess.AgentHeader, *s.EnvdAccessToken)
		require.NoError(k.t, err)
		if a.code == http.StatusServiceUnavailable && a.header.Get("Retry-After") != "" { // the router has no session
			return fmt.Errorf("%d %s", a.code, a.body)
		}
		require.Equal(k.t, http.StatusOK, a.code, a.body)
		require.JSONEq(k.t, fmt.Sprintf(`{"CLAIM":%q}`, claim), a.body)
		return nil
	})
}

// liveIDs are the live sandboxes of the pool, under any leader.
func (k *configureKills) liveIDs() (ids []string) {
	k.t.Helper()
	a := k.as(k.site.key(), http.MethodGet, "/v2/sandboxes?limit=100", "")
	require.Equal(k.t, http.StatusOK, a.code, a.body)
	var all []openapi.Sandbox
	require.NoError(k.t, json.Unmarshal([]byte(a.body), &all))
	for _, s := range all {
		if s.TemplateID == k.pool {
			ids = append(ids, s.SandboxID)
		}
	}
	return ids
}

func idsOf(all []openapi.Sandbox) (ids []string) {
	for _, s := range all {
		ids = append(ids, s.SandboxID)
	}
	return ids
}

// podsIn lists the pods of a pool, those of a phase if it is set.
func (e *env) podsIn(pool, phase string) []corev1.Pod {
	own, also := *e, map[string]string{}
	own.pool = pool
	if phase != "" {
		also[v1alpha1.LabelPhase] = phase
	}
	return own.pods(also)
}

// warmPodsOf waits until a pool has n warm pods.
func (e *env) warmPodsOf(pool string, n int) (warm []corev1.Pod) {
	e.t.Helper()
	e.eventually(func() error {
		warm = e.podsIn(pool, v1alpha1.PhaseWarm)
		if s := e.readPool(pool).Status; len(warm) != n || int(s.Warm) != n {
			return fmt.Errorf("%d pods have the label: %+v", len(warm), s)
		}
		for _, p := range warm {
			if p.Status.PodIP == "" || len(p.Status.ContainerStatuses) != 1 || !p.Status.ContainerStatuses[0].Ready {
				return fmt.Errorf("pod %s is not ready: %+v", p.Name, p.Status)
			}
		}
		return nil
	})
	return warm
}

// agentProcess is the process of the agent in a pod of a devcluster.
type agentProcess struct {
	pid    int
	listen netip.AddrPort
}

// findAgent finds the agent of a pod by the address that it listens on.
func findAgent(t *testing.T, p corev1.Pod) *agentProcess {
	t.Helper()
	a := &agentProcess{listen: netip.AddrPortFrom(netip.MustParseAddr(p.Status.PodIP), sandboxaccess.AgentPort)}
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	require.NoError(t, err)
	for _, file := range files {
		raw, _ := os.ReadFile(file) // it may have ended
		if slices.Contains(strings.Split(string(raw), "\x00"), "--listen="+a.listen.String()) {
			a.pid, err = strconv.Atoi(strings.Split(file, "/")[2])
			require.NoError(t, err)
			return a
		}
	}
	require.FailNow(t, "no agent", "pod %s has none at %s", p.Name, a.listen)
	return nil
}

// stop stops the agent until goOn, or the end of the test.
func (a *agentProcess) stop(t *testing.T) {
	t.Helper()
	require.NoError(t, syscall.Kill(a.pid, syscall.SIGSTOP))
	t.Cleanup(a.goOn)
}

func (a *agentProcess) goOn() { _ = syscall.Kill(a.pid, syscall.SIGCONT) } // it may have ended

// connected returns one of the agents that has a connection, nil if none has.
func connected(all []*agentProcess) *agentProcess {
	raw, _ := os.ReadFile("/proc/net/tcp") // never fails
	const established = "01"
	for line := range strings.Lines(string(raw)) {
		fields := strings.Fields(line) // number, local address, peer, state
		for _, a := range all {
			if len(fields) > 3 && fields[1] == inProc(a.listen) && fields[3] == established {
				return a
			}
		}
	}
	return nil
}

// inProc is an address as /proc/net/tcp has it on a little-endian machine.
func inProc(a netip.AddrPort) string {
	b := a.Addr().As4()
	return fmt.Sprintf("%02X%02X%02X%02X:%04X", b[3], b[2], b[1], b[0], a.Port())
}
