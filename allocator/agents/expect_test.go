package agents_test

import (
	"context"
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/allocator/agents"
	"github.com/berth-sandbox/berth/allocator/core"
)

// counted counts the questions for the key.
func counted(h *atomic.Value) (http.HandlerFunc, *atomic.Int32) {
	var asked atomic.Int32
	return func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet {
			asked.Add(1)
		}
		h.Load().(http.HandlerFunc)(w, r)
	}, &asked
}

// idlePod is the pod of a sandbox before the claim.
func idlePod(s core.Sandbox) *core.Pod {
	return &core.Pod{Key: s.Pod, IP: s.IP, Restarts: s.Restarts, AgentPort: s.Agent.Port, Ready: true}
}

// run runs c until the test ends.
func run(t *testing.T, c *agents.Caller) {
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { c.Run(ctx); close(ended) }()
	t.Cleanup(func() { cancel(); <-ended })
}

// Invariant: P16
func TestKeyOfExpectedAgentIsAskedOnce(t *testing.T) {
	first, configs := agentOf(t)
	var current atomic.Value
	current.Store(first)
	h, asked := counted(&current)
	s, c := pod(t, h), caller(t, always)
	s.Pod.UID = "a"
	run(t, c)
	c.Expect(idlePod(s))
	require.Eventually(t, func() bool { return c.Knows(idlePod(s)) }, 10*time.Second, time.Millisecond)
	require.NoError(t, c.Configure(t.Context(), s, nil))
	<-configs
	require.EqualValues(t, 1, asked.Load())
	require.False(t, c.Knows(idlePod(s)), "a pod is claimed once")

	// The agent starts again after it was asked.
	c.Expect(idlePod(s))
	require.Eventually(t, func() bool { return c.Knows(idlePod(s)) }, 10*time.Second, time.Millisecond)
	again, configs := agentOf(t)
	current.Store(again)
	require.NoError(t, c.Configure(t.Context(), s, nil))
	<-configs
	require.EqualValues(t, 3, asked.Load())

	// A key of an earlier incarnation is not used.
	c.Expect(idlePod(s))
	require.Eventually(t, func() bool { return c.Knows(idlePod(s)) }, 10*time.Second, time.Millisecond)
	s.Restarts++
	require.NoError(t, c.Configure(t.Context(), s, nil))
	<-configs
	require.EqualValues(t, 5, asked.Load())
}

func TestPodsThatCannotBeClaimedAreNotAsked(t *testing.T) {
	h, _ := agentOf(t)
	s, c := pod(t, h), caller(t, always)
	for name, change := range map[string]func(*core.Pod){
		"no agent": func(p *core.Pod) { p.AgentPort = 0 }, "not ready": func(p *core.Pod) { p.Ready = false },
		"used": func(p *core.Pod) { p.Used = true }, "deleted": func(p *core.Pod) { p.Deleting = true },
		"finished": func(p *core.Pod) { p.Finished = true },
	} {
		p := idlePod(s)
		change(p)
		c.Expect(p)
		require.Zero(t, c.Waiting(), name)
	}
	for range 2 * 4096 {
		c.Expect(idlePod(s))
	}
	require.Equal(t, 4096, c.Waiting(), "the queue has a bound, and Expect does not wait")
}

func TestDeposedLeaderAsksForNoKey(t *testing.T) {
	h, _ := agentOf(t)
	var current atomic.Value
	current.Store(h)
	counting, asked := counted(&current)
	s, c := pod(t, counting), caller(t, func() bool { return false })
	run(t, c)
	c.Expect(idlePod(s))
	require.Eventually(t, func() bool { return c.Waiting() == 0 }, 10*time.Second, time.Millisecond)
	require.ErrorIs(t, c.Configure(t.Context(), s, nil), agents.ErrDeposed)
	require.Zero(t, asked.Load())
}
