package core

import (
	"slices"
	"testing"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/claims"
	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/core/teams"
)

// secrets are values of a claim.
type secrets struct{}

func (*secrets) String() string { return "values" }

func agents(p *Pool) { p.Agent = Agent{Port: 49983} }

// agentPods are warm pods with agents, agentPod is one.
func agentPods(n int) []Pod {
	all := warmPods(n)
	for i := range all {
		all[i].AgentPort = 49983
	}
	return all
}

func agentPod(name string) Pod { return with(warmPod(name), func(p *Pod) { p.AgentPort = 49983 }) }

// agentSim has a claim of a pool with agents, whose record is durable.
func agentSim(t *testing.T, warm int, c Claim) (*sim, []Configure) {
	s := newSim(t)
	s.recover([]Pool{changed(specA(warm), agents)}, agentPods(warm))
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

func TestHopelessClaimTriesOnePodOnly(t *testing.T) {
	s, asked := agentSim(t, 4, Claim{Binding: Binding{IdempotencyKey: "k"}})
	s.step(Configured{ID: asked[0].Sandbox.ID, Why: "the archive is gone", Hopeless: true})
	one[SandboxReleased](s)
	none[Configure](s)
	if r := one[ClaimRefused](s); r.Why != NotConfigured || r.Problem != "the archive is gone" {
		t.Errorf("refused %+v", r)
	}
	s.step(Claim{Token: 2, Pool: poolA, Wait: wait, Binding: Binding{IdempotencyKey: "k"}})
	s.step(Configured{ID: one[Configure](s).Sandbox.ID, OK: true})
	one[Claimed](s)
}

func TestClaimTriesThreePodsWhoseAgentsFail(t *testing.T) {
	s, asked := agentSim(t, 4, Claim{Binding: Binding{IdempotencyKey: "k"}})
	used := map[PodKey]bool{}
	for range 3 {
		none[ClaimRefused](s)
		used[asked[0].Sandbox.Pod] = true
		s.step(Configured{ID: asked[0].Sandbox.ID, Why: "it answered 500"})
		want := Cause{Reason: fact.ReasonConfigurationFailed, Message: "it answered 500"}
		if r := one[SandboxReleased](s); r.Sandbox.Cause != want || r.Sandbox.IdempotencyKey != "" {
			t.Errorf("released %+v", r)
		}
		asked = of[Configure](s.effects)
	}
	if r := one[ClaimRefused](s); r.Why != NotConfigured || r.Problem != "it answered 500" || len(used) != 3 || len(asked) != 0 {
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
		fact.ReasonPodDeleted:        PodGone{key("a-1")},
		fact.ReasonFailed:            PodSeen{with(agentPod("a-1"), func(p *Pod) { p.Finished = true })},
		fact.ReasonUnexpectedRestart: PodSeen{with(agentPod("a-1"), func(p *Pod) { p.Restarts = 1 })},
		fact.ReasonPoolDeleted:       PoolSeen{changed(specA(2), func(p *Pool) { p.Deleting = true })},
	} {
		s, asked := agentSim(t, 2, Claim{Binding: Binding{IdempotencyKey: "k"}})
		s.step(ev)
		none[SandboxReleased](s)
		s.step(Configured{ID: asked[0].Sandbox.ID, OK: true})
		if r := one[SandboxReleased](s); r.Sandbox.Reason != name || r.Sandbox.IdempotencyKey != "" {
			t.Errorf("%s: released %+v", name, r)
		}
		if name == fact.ReasonPoolDeleted {
			one[ClaimRefused](s)
			continue
		}
		s.step(Configured{ID: one[Configure](s).Sandbox.ID, OK: true})
		if c := one[Claimed](s); c.Sandbox.Pod != key("a-2") {
			t.Errorf("%s: answer %+v", name, c)
		}
	}
}

// A pod of a batch moves to the address of another one before the record is durable. The core knows that
// its sandbox is lost while it reads the record, before its agent is asked.
func TestPodThatMovesBeforeConfigurationIsReplaced(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{changed(specA(3), agents)}, agentPods(3))
	s.slow = true
	s.step(Claim{Token: 1, Pool: poolA, Wait: wait, Count: 2, Binding: Binding{IdempotencyKey: "k"}})
	s.step(PodSeen{with(agentPod("a-1"), func(p *Pod) { p.IP = agentPod("a-2").IP })})
	s.written()
	asked := of[Configure](s.effects)
	s.written() // what the leader wrote of the lost one, if it did
	none[SandboxReleased](s)
	s.slow = false
	for _, c := range asked {
		s.step(Configured{ID: c.Sandbox.ID, OK: true})
	}
	for _, r := range of[SandboxReleased](s.effects) {
		if r.Sandbox.IdempotencyKey != "" || r.Sandbox.Batch != "" {
			t.Errorf("released %+v", r)
		}
	}
	none[BatchClaimed](s) // one pod is left, and two were asked for
}

func TestSandboxBeingConfiguredCountsOnceForItsTeam(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{changed(specA(3), agents)}, agentPods(3))
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
	s.recover([]Pool{changed(changed(specA(1), agents), func(p *Pool) { p.PostStart = true })}, agentPods(1))
	s.step(Claim{Token: 1, Pool: poolA, Wait: wait})
	none[StartSandbox](s)
	s.step(Configured{ID: one[Configure](s).Sandbox.ID, OK: true})
	none[Claimed](s)
	s.step(Started{ID: one[StartSandbox](s).Sandbox.ID, OK: true})
	one[Claimed](s)
}

// agentOn is the first fact of a sandbox of an earlier term, whose claim needs so many sandboxes.
func agentOn(name, id, key, batch string, needs int) Fact {
	f := on(name, id)
	sandboxOf(f).Agent, sandboxOf(f).IdempotencyKey, sandboxOf(f).Batch = Agent{Port: 49983}, key, batch
	f.Subject.(*SandboxFact).Ungranted = needs
	return f
}

// Invariant: P16
func TestNewLeaderAsksAgentsWithoutAnObject(t *testing.T) {
	for _, ok := range []bool{true, false} {
		s := newSimAt(t, 2, start)
		shown, unshown := agentOn("a-1", "x", "", "", 1), agentOn("a-2", "y", "k", "", 1)
		s.recoverState(State{
			Pools: []Pool{changed(specA(1), agents)}, Pods: agentPods(3), Nodes: []string{"n1"}, Facts: []Fact{shown, unshown}, Objects: []Sandbox{*sandboxOf(shown)},
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
		want := Cause{Reason: fact.ReasonConfigurationFailed, Message: claims.NeverConfigured}
		if r := one[ClaimRefused](s); r.Why != NotConfigured || one[SandboxReleased](s).Sandbox.Cause != want {
			t.Errorf("refused %+v", r)
		}
		again.Token = 4
		s.step(again)
		s.step(Configured{ID: one[Configure](s).Sandbox.ID, OK: true})
		one[Claimed](s)
	}
}

// earlier has a batch of an earlier term, of sandboxes x and y, which needs so many. Those that are shown
// have an object.
func earlier(t *testing.T, needs int, shown ...string) *sim {
	s := newSimAt(t, 2, start)
	st := State{
		Pools: []Pool{changed(specA(0), agents)}, Pods: agentPods(2), Nodes: []string{"n1"},
		Facts: []Fact{agentOn("a-1", "x", "k", "b", needs), agentOn("a-2", "y", "k", "b", needs)},
	}
	for _, f := range st.Facts {
		if slices.Contains(shown, sandboxOf(f).ID) {
			st.Objects = append(st.Objects, *sandboxOf(f))
		}
	}
	s.recoverState(st)
	s.join("r", 1)
	return s
}

var repeated = Claim{Token: 1, Pool: poolA, Count: 2, Wait: wait, Binding: Binding{IdempotencyKey: "k"}}

func TestEarlierBatchIsAnsweredWithEnoughOrNone(t *testing.T) {
	for needs, want := range map[int]int{1: 1, 2: 0} {
		for _, before := range []bool{true, false} { // the claim is repeated before or after the answers
			s := earlier(t, needs)
			s.step(Configured{ID: "x", OK: true})
			one[SendRoute](s)
			none[WriteObject](s) // the next leader would think that the batch was granted
			if before {
				s.step(repeated)
				none[BatchClaimed](s)
			}
			effects := s.step(Configured{ID: "y"})
			if n := len(of[SandboxReleased](effects)); n != 2-want {
				t.Errorf("needs %d: %d were released", needs, n)
			}
			if n := len(of[Write](effects)); n != 1 {
				t.Errorf("needs %d: released in %d writes", needs, n)
			}
			if !before {
				s.step(repeated)
			}
			switch {
			case want > 0:
				if b := one[BatchClaimed](s); len(b.Sandboxes) != want || b.Sandboxes[0].ID != "x" {
					t.Errorf("answer %+v", b)
				}
			case before:
				if r := one[ClaimRefused](s); r.Why != NotConfigured {
					t.Errorf("refused %+v", r)
				}
			default: // its key was free
				none[ClaimRefused](s)
				s.step(ClaimAbandoned{1})
			}
		}
	}
}

func TestAnsweredBatchOutlivesOneOfItsSandboxes(t *testing.T) {
	for name, ev := range map[string]Event{
		fact.ReasonPodDeleted:          PodGone{key("a-2")},
		fact.ReasonKilled:              Release{Scope: everyTeam, Token: 9, ID: "y", Reason: fact.ReasonKilled},
		fact.ReasonConfigurationFailed: Configured{ID: "y"},
	} {
		s := earlier(t, 2, "x")
		s.step(repeated)
		s.pass(2 * wait) // the caller is refused, because one is not known to be configured
		one[ClaimRefused](s)
		s.step(ev)
		if r := one[SandboxReleased](s); r.Sandbox.ID != "y" || r.Sandbox.Reason != name {
			t.Errorf("released %+v", r)
		}
		s.step(repeated)
		if b := one[BatchClaimed](s); len(b.Sandboxes) != 1 || b.Sandboxes[0].ID != "x" {
			t.Errorf("%s: answer %+v", name, b)
		}
	}
}

func TestEarlierBatchIsShownWhenItsLastAgentIsKnown(t *testing.T) {
	for _, ev := range []Event{Configured{ID: "y", OK: true}, PodGone{key("a-2")}} {
		s := earlier(t, 2)
		s.step(Configured{ID: "x", OK: true})
		s.step(ev)
		shown := map[string]Phase{}
		for _, w := range of[WriteObject](s.effects) {
			shown[w.Sandbox.ID] = w.Sandbox.Phase
		}
		if len(shown) != 2 || shown["x"] != Running {
			t.Errorf("%T: written are %+v", ev, shown)
		}
	}
}

func TestClaimGivesUpOnPodsThatCrashWhileConfigured(t *testing.T) {
	crash := func(s *sim, e Configure) []Configure {
		s.step(PodSeen{with(agentPod(e.Sandbox.Pod.Name), func(p *Pod) { p.Restarts = 1 })})
		s.step(Configured{ID: e.Sandbox.ID})
		return of[Configure](s.effects)
	}
	s, asked := agentSim(t, 8, Claim{})
	for range claims.MaxFailures {
		none[ClaimRefused](s)
		asked = crash(s, asked[0])
	}
	if r := one[ClaimRefused](s); r.Why != NotConfigured || len(asked) > 0 {
		t.Errorf("refused %+v, then configured %v", r, asked)
	}
	s, asked = agentSim(t, 8, Claim{})
	s.pass(2 * wait)
	asked = crash(s, asked[0])
	if r := one[ClaimRefused](s); r.Why != NotConfigured || len(asked) > 0 {
		t.Errorf("late: refused %+v, then configured %v", r, asked)
	}
}

func TestRestartedAgentEndsItsSandboxInAnyPool(t *testing.T) {
	keep := func(p *Pool) { p.KeepOnRestart = true }
	restarted := with(agentPod("a-1"), func(p *Pod) { p.Restarts = 1 })

	s := newSim(t)
	s.recover([]Pool{changed(changed(specA(2), agents), keep)}, agentPods(2))
	s.step(Claim{Token: 1, Pool: poolA, Count: 2, Wait: wait})
	asked := of[Configure](s.effects)
	s.step(Configured{ID: asked[0].Sandbox.ID, OK: true})
	s.step(PodSeen{with(agentPod(asked[0].Sandbox.Pod.Name), func(p *Pod) { p.Restarts = 1 })})
	s.step(Configured{ID: asked[1].Sandbox.ID, OK: true})
	none[BatchClaimed](s)

	// A new leader cannot know whether the claim was answered, so its key holds.
	s = newSimAt(t, 2, start)
	s.recover([]Pool{changed(changed(specA(1), agents), keep)}, []Pod{restarted, agentPod("a-2")}, agentOn("a-1", "x", "k", "", 1))
	s.step(Configured{ID: "x"})
	s.step(Claim{Token: 3, Pool: poolA, Wait: wait, Binding: Binding{IdempotencyKey: "k"}})
	if r := one[ClaimRefused](s); r.Why != KeyEnded || r.Sandbox.Reason != fact.ReasonUnexpectedRestart {
		t.Errorf("refused %+v", r)
	}
}

func TestSandboxThatIsGrantedIsNotAskedAgain(t *testing.T) {
	s := newSimAt(t, 2, start)
	s.recover([]Pool{changed(specA(0), agents)}, agentPods(1), agentOn("a-1", "x", "k", "", 0))
	none[Configure](s)
	s.join("r", 1)
	if r := one[SendSnapshot](s); len(r.Routes) != 1 {
		t.Errorf("routes %+v", r.Routes)
	}
}

func TestTimeoutDoesNotGrantAClaim(t *testing.T) {
	s := newSimAt(t, 2, start)
	s.recover([]Pool{changed(specA(0), agents)}, agentPods(1), agentOn("a-1", "x", "k", "", 1))
	for _, granted := range []bool{false, true} {
		if granted {
			s.step(Configured{ID: "x", OK: true})
		}
		effects := s.step(SetTimeout{Scope: everyTeam, Token: 1, ID: "x", Lifetime: time.Hour})
		if f := of[Write](effects)[0].Facts[0]; (f.Subject.(*SandboxFact).Ungranted == 0) != granted {
			t.Errorf("granted %v: journaled %+v", granted, f)
		}
		if n := len(of[WriteObject](s.effects)); (n > 0) != granted {
			t.Errorf("granted %v: %d objects written", granted, n)
		}
	}
}

func TestIdleTimeBeginsWhenTheAgentHasAnswered(t *testing.T) {
	s := newSimAt(t, 2, start)
	f := agentOn("a-1", "x", "k", "", 1)
	sandboxOf(f).IdleTimeout, sandboxOf(f).ClaimedAt = time.Minute, start.Wall.Add(-time.Second)
	s.recover([]Pool{changed(specA(0), agents)}, agentPods(1), f)
	for range 40 {
		s.pass(time.Minute)
		none[SandboxReleased](s)
	}
	s.step(Configured{ID: "x", OK: true})
	s.pass(59 * time.Second)
	none[SandboxReleased](s)
	s.pass(time.Minute)
	if r := one[SandboxReleased](s); r.Sandbox.Reason != fact.ReasonIdleTimeout {
		t.Errorf("released %+v", r)
	}
}

func TestPodOfEarlierJournalIsNotGranted(t *testing.T) {
	s, asked := agentSim(t, 1, Claim{})
	s.step(EarlierSeen{Journal: "old"})
	s.step(Configured{ID: asked[0].Sandbox.ID, OK: true})
	none[Claimed](s)
	none[SendRoute](s)
}

func TestPodHasTheAgentOfItsOwnTemplate(t *testing.T) {
	newer := func(p *Pool) { p.Template = "t2" }
	s := newSim(t)
	s.recover([]Pool{specA(1)}, warmPods(1))
	s.step(PoolSeen{changed(changed(specA(1), agents), newer)})
	s.step(Claim{Token: 1, Pool: poolA, Wait: wait, Values: &secrets{}})
	if r := one[ClaimRefused](s); r.Why != NotConfigured {
		t.Errorf("refused %+v", r)
	}
	s.step(Claim{Token: 2, Pool: poolA, Wait: wait})
	if c := one[Claimed](s); c.Sandbox.Agent.Port != 0 {
		t.Errorf("answer %+v", c)
	}

	s = newSim(t)
	s.recover([]Pool{changed(specA(1), agents)}, agentPods(1))
	s.step(PoolSeen{changed(specA(1), newer)})
	s.step(Claim{Token: 1, Pool: poolA, Wait: wait})
	one[Configure](s)

	// A batch of both kinds waits for the agents that there are.
	s = newSim(t)
	s.recover([]Pool{changed(specA(2), agents)}, []Pod{agentPod("a-1"), warmPod("a-2")})
	s.step(Claim{Token: 1, Pool: poolA, Count: 2, Wait: wait})
	s.step(Configured{ID: one[Configure](s).Sandbox.ID, OK: true})
	if b := one[BatchClaimed](s); len(b.Sandboxes) != 2 {
		t.Errorf("answer %+v", b)
	}
}

func TestObjectOfSandboxReleasedWhileAskedIsWrittenAgain(t *testing.T) {
	s := newSimAt(t, 2, start)
	s.recover([]Pool{changed(specA(0), agents)}, agentPods(1), agentOn("a-1", "x", "k", "", 1))
	s.step(Release{Scope: everyTeam, Token: 9, ID: "x", Reason: fact.ReasonKilled})
	s.step(ObjectWritten{ID: "x", Revision: one[WriteObject](s).Sandbox.Revision})
	s.step(ObjectGone{ID: "x"})
	one[WriteObject](s)
}

func TestFailedAttemptCountsOnceForItsTeam(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{changed(specA(4), agents)}, agentPods(4))
	s.step(TeamLimits{teams.Settings{Default: teams.Limits{MaxSandboxes: 2}}})
	s.step(Claim{Token: 1, Pool: poolA, Wait: wait})
	id := one[Configure](s).Sandbox.ID
	s.slow = true
	s.step(Configured{ID: id})
	s.step(Claim{Token: 2, Pool: poolA, Wait: wait})
	none[ClaimRefused](s)
}

func TestClosingLeaderTriesNoOtherAgents(t *testing.T) {
	s, asked := agentSim(t, 2, Claim{})
	s.step(Closing{})
	none[ClaimRefused](s)
	s.step(Configured{ID: asked[0].Sandbox.ID})
	if r := one[ClaimRefused](s); r.Why != Ending {
		t.Errorf("refused %+v", r)
	}
}
