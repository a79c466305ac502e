package core

import (
	"testing"

	"github.com/berth-sandbox/berth/allocator/core/teams"
)

// secrets are values of a claim.
type secrets struct{}

func (*secrets) String() string { return "values" }

func agents(p *Pool) { p.Agent = Agent{Port: 49983} }

// agentSim has a claim of a pool with agents, whose record is durable.
func agentSim(t *testing.T, warm int, c Claim) (*sim, []Configure) {
	s := newSim(t)
	s.recover([]Pool{changed(specA(warm), agents)}, warmPods(warm))
	s.join("r", 1)
	c.Token, c.Pool, c.Wait = 1, poolA, wait
	s.step(c)
	none[Claimed](s)
	none[BatchClaimed](s)
	none[SendRoute](s)
	none[WriteObject](s)
	none[SandboxCreated](s)
	return s, of[Configure](s.effects)
}

// Invariant: P16
func TestClaimIsAnsweredAfterItsAgentIsConfigured(t *testing.T) {
	values := &secrets{}
	s, asked := agentSim(t, 2, Claim{Values: values, Binding: Binding{IdempotencyKey: "k"}})
	if len(asked) != 1 || asked[0].Values != values || asked[0].Ask || asked[0].Sandbox.Agent.Port != 49983 {
		t.Fatalf("configures %+v", asked)
	}
	id := asked[0].Sandbox.ID
	s.step(Claim{Token: 2, Pool: poolA, Wait: wait, Binding: Binding{IdempotencyKey: "k"}})
	none[Claimed](s)
	s.pass(2 * wait) // whatever their wait is
	none[Claimed](s)
	s.step(Resolve{Session: "r", Stream: 1, ID: id})
	if r := one[SendResolved](s); r.Sandbox != nil || r.Gone {
		t.Errorf("resolved %+v", r)
	}
	s.step(Release{Scope: everyTeam, Token: 3, ID: id})
	if r := one[ReleaseAnswered](s); r.Status != CallUnknown {
		t.Errorf("released %+v", r)
	}
	s.step(Configured{ID: id, OK: true})
	if c := of[Claimed](s.effects); len(c) != 2 || c[0].Sandbox.ID != id || c[0].Sandbox.Phase != Running {
		t.Errorf("answers %+v", c)
	}
	one[SendRoute](s)
	one[SandboxCreated](s)
	one[SandboxReady](s)
	if r := one[WriteObject](s); r.Sandbox.Phase != Running {
		t.Errorf("recorded %+v", r)
	}
	s.step(Configured{ID: id})
	none[SandboxReleased](s)
}

func TestClaimTriesThreePodsWhoseAgentsFail(t *testing.T) {
	s, asked := agentSim(t, 4, Claim{Binding: Binding{IdempotencyKey: "k"}})
	used := map[PodKey]bool{}
	for range 3 {
		none[ClaimRefused](s)
		used[asked[0].Sandbox.Pod] = true
		s.step(Configured{ID: asked[0].Sandbox.ID})
		if r := one[SandboxReleased](s); r.Sandbox.Reason != ReasonNotConfigured || r.Sandbox.IdempotencyKey != "" {
			t.Errorf("released %+v", r)
		}
		asked = of[Configure](s.effects)
	}
	if r := one[ClaimRefused](s); r.Why != NotConfigured || len(used) != 3 || len(asked) != 0 {
		t.Errorf("refused %+v, with %v", r, used)
	}
	s.step(Claim{Token: 2, Pool: poolA, Wait: wait, Binding: Binding{IdempotencyKey: "k"}})
	s.step(Configured{ID: one[Configure](s).Sandbox.ID, OK: true})
	one[Claimed](s)
}

func TestBatchWaitsForAllOfItsAgents(t *testing.T) {
	for atLeast, want := range map[int]int{0: 3, 2: 2} {
		s, asked := agentSim(t, 6, Claim{Count: 3, AtLeast: atLeast})
		s.step(Configured{ID: asked[0].Sandbox.ID, OK: true})
		s.step(Configured{ID: asked[1].Sandbox.ID})
		none[SandboxReleased](s)
		s.step(Configured{ID: asked[2].Sandbox.ID, OK: true})
		if atLeast == 0 {
			none[BatchClaimed](s)
			none[SendRoute](s)
			if n := len(of[SandboxReleased](s.effects)); n != 3 {
				t.Errorf("%d were released", n)
			}
			for _, e := range of[Configure](s.effects) {
				s.step(Configured{ID: e.Sandbox.ID, OK: true})
			}
		}
		if b := one[BatchClaimed](s); len(b.Sandboxes) != want {
			t.Errorf("answer %+v", b)
		}
	}
}

func TestPodThatEndsDuringConfigurationIsReplaced(t *testing.T) {
	for name, ev := range map[string]Event{
		ReasonPodGone:     PodGone{key("a-1")},
		ReasonPodFailed:   PodSeen{with(warmPod("a-1"), func(p *Pod) { p.Finished = true })},
		ReasonRestart:     PodSeen{with(warmPod("a-1"), func(p *Pod) { p.Restarts = 1 })},
		ReasonPoolDeleted: PoolSeen{changed(specA(2), func(p *Pool) { p.Deleting = true })},
	} {
		s, asked := agentSim(t, 2, Claim{Binding: Binding{IdempotencyKey: "k"}})
		s.step(ev)
		none[SandboxReleased](s)
		s.step(Configured{ID: asked[0].Sandbox.ID, OK: true})
		if r := one[SandboxReleased](s); r.Sandbox.Reason != name || r.Sandbox.IdempotencyKey != "" {
			t.Errorf("%s: released %+v", name, r)
		}
		if name == ReasonPoolDeleted {
			one[ClaimRefused](s)
			continue
		}
		s.step(Configured{ID: one[Configure](s).Sandbox.ID, OK: true})
		if c := one[Claimed](s); c.Sandbox.Pod != key("a-2") {
			t.Errorf("%s: answer %+v", name, c)
		}
	}
}

func TestSandboxBeingConfiguredCountsOnceForItsTeam(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{changed(specA(3), agents)}, warmPods(3))
	s.step(TeamLimits{teams.Settings{Default: teams.Limits{MaxSandboxes: 2}}})
	s.step(Claim{Token: 1, Pool: poolA, Wait: wait})
	s.step(Claim{Token: 2, Pool: poolA, Wait: wait})
	one[Configure](s)
	s.step(Claim{Token: 3, Pool: poolA, Wait: wait})
	if r := one[ClaimRefused](s); r.Why != OverLimit || r.Excess.Used != 2 {
		t.Errorf("refused %+v", r)
	}
}

func TestHookIsCalledAfterTheAgentIsConfigured(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{changed(changed(specA(1), agents), func(p *Pool) { p.PostStart = true })}, warmPods(1))
	s.step(Claim{Token: 1, Pool: poolA, Wait: wait})
	none[StartSandbox](s)
	s.step(Configured{ID: one[Configure](s).Sandbox.ID, OK: true})
	none[Claimed](s)
	s.step(Started{ID: one[StartSandbox](s).Sandbox.ID, OK: true})
	one[Claimed](s)
}

// agentOn is a fact of an earlier term about a pod with an agent.
func agentOn(name, id, key, batch string) Fact {
	f := on(name, id)
	f.Sandbox.Agent, f.Sandbox.IdempotencyKey, f.Sandbox.Batch = Agent{Port: 49983}, key, batch
	return f
}

// Invariant: P16
func TestNewLeaderAsksAgentsWithoutAnObject(t *testing.T) {
	for _, ok := range []bool{true, false} {
		s := newSimAt(t, 2, start)
		shown, unshown := agentOn("a-1", "x", "", ""), agentOn("a-2", "y", "k", "")
		s.recoverState(State{
			Pools: []Pool{changed(specA(1), agents)}, Pods: warmPods(3), Nodes: []string{"n1"}, Facts: []Fact{shown, unshown}, Objects: []Sandbox{*shown.Sandbox},
		})
		if e := one[Configure](s); e.Sandbox.ID != "y" || !e.Ask || e.Values != nil {
			t.Errorf("asks %+v", e)
		}
		none[WriteObject](s)
		s.join("r", 1)
		if r := one[SendSnapshot](s); len(r.Routes) != 1 || r.Routes[0].ID != "x" {
			t.Errorf("routes %+v", r.Routes)
		}
		s.step(Resolve{Session: "r", Stream: 1, ID: "y"})
		if r := one[SendResolved](s); !r.Starting {
			t.Errorf("resolved %+v", r)
		}
		again := Claim{Token: 2, Pool: poolA, Wait: wait, Binding: Binding{IdempotencyKey: "k"}}
		s.step(again)
		s.pass(wait)
		if r := one[ClaimRefused](s); r.Why != NotConfigured {
			t.Errorf("refused %+v", r)
		}
		again.Token = 3
		s.step(again)
		s.step(Configured{ID: "y", OK: ok})
		if ok {
			one[SendRoute](s)
			none[SandboxReady](s) // the earlier leader may have said so
			if c := one[Claimed](s); c.Sandbox.ID != "y" || one[WriteObject](s).Sandbox.Phase != Running {
				t.Errorf("answer %+v", c)
			}
			continue
		}
		none[SendRoute](s)
		if r := one[ClaimRefused](s); r.Why != NotConfigured || one[SandboxReleased](s).Sandbox.Reason != ReasonNotConfigured {
			t.Errorf("refused %+v", r)
		}
		again.Token = 4
		s.step(again)
		s.step(Configured{ID: one[Configure](s).Sandbox.ID, OK: true})
		one[Claimed](s)
	}
}

func TestEarlierBatchIsAnsweredWithEnoughOrNone(t *testing.T) {
	for atLeast, want := range map[int]int{1: 1, 2: 0} {
		s := newSimAt(t, 2, start)
		s.recover([]Pool{changed(specA(0), agents)}, warmPods(2), agentOn("a-1", "x", "k", "b"), agentOn("a-2", "y", "k", "b"))
		s.step(Configured{ID: "x", OK: true})
		s.step(Claim{Token: 1, Pool: poolA, Count: 2, AtLeast: atLeast, Wait: wait, Binding: Binding{IdempotencyKey: "k"}})
		none[BatchClaimed](s)
		s.step(Configured{ID: "y"})
		if want == 0 {
			one[ClaimRefused](s)
			if n := len(of[SandboxReleased](s.effects)); n != 2 {
				t.Errorf("%d were released", n)
			}
		} else if b := one[BatchClaimed](s); len(b.Sandboxes) != want || b.Sandboxes[0].ID != "x" {
			t.Errorf("answer %+v", b)
		}
	}
}
