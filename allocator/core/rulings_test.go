package core

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/core/idle"
)

var (
	noRules  = EgressRules{}
	oneHost  = EgressRules{Allow: []string{"a.example"}, Deny: []string{"0.0.0.0/0"}}
	someDeny = EgressRules{Deny: []string{"192.0.2.0/24"}}
)

// rulingSim has a sandbox with rules, and egress routers that have acknowledged all. Router e1 has stream 11 and so on.
func rulingSim(t *testing.T, routers ...string) (*sim, Sandbox) {
	t.Helper()
	s, with, _ := egressSim(t)
	for i, r := range routers {
		s.joinEgress(r, uint64(11+i))
		s.acked(r, uint64(11+i))
	}
	return s, with
}

func (s *sim) setNetwork(token uint64, id string, rules EgressRules) {
	s.t.Helper()
	s.step(SetNetwork{Token: token, Scope: everyTeam, ID: id, Rules: rules})
}

func (s *sim) answered(token uint64, status CallStatus) SandboxCallAnswered {
	s.t.Helper()
	a := one[SandboxCallAnswered](s)
	require.Equal(s.t, token, a.Token)
	require.Equal(s.t, status, a.Status, a.Why)
	return a
}

// Invariant: I3
func TestRulesCountWhenEveryEgressRouterHasThem(t *testing.T) {
	s, sb := rulingSim(t, "e1", "e2")
	s.step(SessionLeft{Session: "e2", Stream: 12})
	s.setNetwork(5, sb.ID, oneHost)
	none[SandboxCallAnswered](s)
	route := one[SendRoute](s)
	require.Equal(t, uint64(11), route.Stream)
	require.Equal(t, oneHost, route.Sandbox.Network)
	s.acked("e1", 11)
	none[SandboxCallAnswered](s)
	snapshot := s.joinEgress("e2", 13)
	require.Equal(t, oneHost, snapshot[0].Network)
	none[SandboxCallAnswered](s)
	s.acked("e2", 13)
	require.Equal(t, oneHost, s.answered(5, CallOK).Sandbox.Network)
	require.Empty(t, s.core.ruling)
}

// A router of an earlier journal may be one of egress.
//
// Invariant: I3
func TestRoutersOfAnEarlierJournalAreWaitedFor(t *testing.T) {
	s, sb := rulingSim(t, "e1")
	s.setNetwork(5, sb.ID, oneHost)
	s.step(EarlierSeen{Journal: "j0"})
	s.acked("e1", 11)
	none[SandboxCallAnswered](s)
	s.pass(rulingWait)
	require.Contains(t, s.answered(5, CallNotReady).Why, ": 1")
	s.setNetwork(6, sb.ID, someDeny)
	s.acked("e1", 11)
	none[SandboxCallAnswered](s)
}

// Invariant: I3
func TestEarlierAcknowledgementIsNotOneOfTheRules(t *testing.T) {
	s, sb := rulingSim(t, "e1")
	before := s.core.routers.members.Get("e1").Sequence
	s.setNetwork(5, sb.ID, oneHost)
	s.ack("e1", 11, before)
	none[SandboxCallAnswered](s)
	s.ack("e1", 11, before+1)
	s.answered(5, CallOK)
}

func TestRulesWithoutEgressRoutersCountWhenDurable(t *testing.T) {
	s, sb := rulingSim(t)
	s.slow = true
	s.setNetwork(5, sb.ID, oneHost)
	none[SandboxCallAnswered](s)
	require.Equal(t, noRules, s.view(sb.ID).Network)
	s.effects = s.stepCore(Written{})
	s.answered(5, CallOK)
	require.Equal(t, oneHost, s.view(sb.ID).Network)
}

// Invariant: I3
func TestRouterThatIsAwayEndsTheWait(t *testing.T) {
	for name, c := range map[string]struct {
		away   time.Duration
		status CallStatus
		waits  time.Duration
	}{
		"by its expiry":           {egressStale - 5*time.Second, CallOK, 5*time.Second + egressStale/100 + egressEnds},
		"by the time of the call": {time.Second, CallNotReady, rulingWait},
	} {
		t.Run(name, func(t *testing.T) {
			s, sb := rulingSim(t, "e1", "e2")
			s.step(SessionLeft{Session: "e2", Stream: 12})
			s.ping("e1", 11)
			s.pass(c.away)
			s.ping("e1", 11)
			s.setNetwork(5, sb.ID, oneHost)
			s.acked("e1", 11)
			s.pass(c.waits - time.Second)
			none[SandboxCallAnswered](s)
			s.pass(2 * time.Second)
			a := s.answered(5, c.status)
			require.Equal(t, oneHost, a.Sandbox.Network, "they hold in any case")
			if c.status == CallNotReady {
				require.Equal(t, "egress gateways that have not acknowledged them within 10s: 1", a.Why)
			}
			s.pass(egressStale)
			none[SandboxCallAnswered](s)
		})
	}
}

func TestDeclarationOfDeathEndsTheWaitForRules(t *testing.T) {
	s, sb := rulingSim(t, "e1")
	s.step(SessionLeft{Session: "e1", Stream: 11})
	s.pass(5 * time.Second)
	s.setNetwork(5, sb.ID, oneHost)
	none[SandboxCallAnswered](s)
	s.step(SessionGoodbye{Session: "e1", Stream: 14, Egress: true})
	s.answered(5, CallOK)
}

func TestCallsAtOnceAreAnsweredInTheirOrder(t *testing.T) {
	s, sb := rulingSim(t, "e1")
	sequence := s.core.routers.members.Get("e1").Sequence
	s.slow = true
	s.setNetwork(5, sb.ID, oneHost)
	s.step(SetTimeout{Token: 6, Scope: everyTeam, ID: sb.ID, Lifetime: time.Hour})
	s.setNetwork(7, sb.ID, someDeny)
	s.setNetwork(8, sb.ID, noRules)
	s.written()
	s.slow = false
	s.writeAll()
	for i, f := range s.facts(sb.ID) {
		require.Equal(t, []EgressRules{oneHost, someDeny, noRules}[i], f.Network, "no other change takes rules back")
	}
	require.Equal(t, uint64(6), one[SandboxCallAnswered](s).Token)
	for i, token := range []uint64{5, 7, 8} {
		s.ack("e1", 11, sequence+uint64(i)+1)
		s.answered(token, CallOK)
	}
	require.Equal(t, noRules, s.view(sb.ID).Network)
}

// Such an object would have a higher revision than the record, and the next leader would take its rules.
//
// Invariant: I5
func TestObjectIsNotTouchedWhileRulesAreOnTheirWay(t *testing.T) {
	s, sb := rulingSim(t)
	shown := func() { s.step(ObjectWritten{ID: sb.ID, Revision: s.view(sb.ID).Revision}) }
	shown()
	s.slow = true
	touched := func() (touched bool) {
		for range 2 * idle.PersistEvery / time.Second {
			s.step(KeepAlive{Token: 4, Scope: everyTeam, ID: sb.ID})
			s.pass(time.Second)
			for _, w := range of[WriteObject](s.effects) {
				touched = touched || w.Sandbox.ID == sb.ID
			}
			s.ping("r", 1)
		}
		return touched
	}
	s.setNetwork(5, sb.ID, oneHost)
	require.False(t, touched())
	s.written()
	written := one[WriteObject](s)
	require.Equal(t, oneHost, written.Sandbox.Network)
	shown()
	require.True(t, touched())
}

func TestSandboxesThatTakeNoRulesSaySo(t *testing.T) {
	s, with, without := egressSim(t)
	s.joinEgress("e", 2)
	s.acked("e", 2)
	s.setNetwork(5, without.ID, oneHost)
	s.answered(5, CallUnfit)
	s.setNetwork(6, "unknown", oneHost)
	s.answered(6, CallUnknown)
	s.step(SetNetwork{Token: 7, Scope: Scope{Team: "other"}, ID: with.ID, Rules: oneHost})
	s.answered(7, CallUnknown)
	s.step(Sleep{Token: 8, Scope: everyTeam, ID: with.ID})
	s.setNetwork(9, with.ID, oneHost)
	s.answered(9, CallAsleep)
	s.release(with.ID)
	s.setNetwork(10, with.ID, oneHost)
	s.answered(10, CallGone)
	require.Equal(t, noRules, s.view(with.ID).Network)
}

// Invariant: I3
func TestRulesOfClosingSandboxWaitForItsClose(t *testing.T) {
	s, sb := rulingSim(t, "e1")
	s.slow = true
	s.setNetwork(5, sb.ID, oneHost)
	s.step(Sleep{Token: 6, Scope: everyTeam, ID: sb.ID})
	require.Len(t, of[SendClose](s.effects), 2)
	s.written()
	none[SandboxCallAnswered](s)
	none[SendRoute](s)
	s.acked("e1", 11)
	require.Equal(t, oneHost, s.answered(5, CallOK).Sandbox.Network)
}

func TestReleaseDuringTheWaitIsAnswered(t *testing.T) {
	s, sb := rulingSim(t, "e1")
	s.setNetwork(5, sb.ID, oneHost)
	s.step(Release{Token: 6, Scope: everyTeam, ID: sb.ID, Reason: fact.ReasonKilled})
	s.acked("e1", 11)
	s.answered(5, CallGone)
}

// Of the record and the object that which is newer counts, and the record if they are of one revision. An earlier
// version writes no rules.
//
// Invariant: I3
func TestNextLeaderHasTheLatestRules(t *testing.T) {
	agent := Agent{Port: 49983, Egress: true}
	earlier := Agent{Port: 49983}
	for name, c := range map[string]struct {
		shown, record       uint64 // the counters
		shownBy, recordedBy Agent
		want                EgressRules
	}{
		"the record is newer":                       {1, 2, agent, agent, oneHost},
		"the object was edited":                     {2, 2, agent, agent, oneHost},
		"the object is newer":                       {3, 2, agent, agent, someDeny},
		"an earlier version made the record":        {1, 2, agent, earlier, someDeny},
		"an earlier version made the shown record":  {2, 2, agent, earlier, someDeny},
		"an earlier version has written the object": {3, 2, earlier, agent, oneHost},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSim(t)
			f := on("a-1", "x")
			record := f.Subject.(*SandboxFact)
			shown := record.Sandbox
			shown.Agent, shown.Network, shown.Revision.Counter = c.shownBy, someDeny, c.shown
			record.Agent, record.Network, record.Revision.Counter = c.recordedBy, oneHost, c.record
			f.Revision = record.Revision
			s.recoverState(State{
				Pools: []Pool{specA(1)}, Nodes: []string{"n1"}, Pods: []Pod{egressPod("a-1")},
				Objects: []Sandbox{shown}, Facts: []Fact{f},
			})
			require.Equal(t, c.want, s.view("x").Network)
			require.True(t, s.view("x").Agent.Egress)
			require.Equal(t, c.want, s.joinEgress("e", 2)[0].Network)
			s.acked("e", 2)
			s.step(SetTimeout{Token: 4, Scope: everyTeam, ID: "x", Lifetime: time.Hour})
			require.Equal(t, c.want, s.facts("x")[0].Network)
		})
	}
}

// A wake after a stop may give a sandbox a pod without gateway.
//
// Invariant: I3
func TestNextLeaderTakesTheGatewayOfTheNewestPod(t *testing.T) {
	for name, recorded := range map[string]bool{"the record is newer": true, "the object is newer": false} {
		t.Run(name, func(t *testing.T) {
			s := newSim(t)
			f := on("a-1", "x")
			record := f.Subject.(*SandboxFact)
			shown := record.Sandbox
			before, now := &shown, &record.Sandbox
			if !recorded {
				before, now = now, before
			}
			before.Pod, before.Agent = key("a-0"), Agent{Port: 49983, Egress: true}
			now.Incarnation, now.Agent, now.Revision.Counter = 1, Agent{Port: 49983}, 6
			f.Revision = record.Revision
			s.recoverState(State{
				Pools: []Pool{specA(1)}, Nodes: []string{"n1"}, Pods: []Pod{with(warmPod("a-1"), func(p *Pod) { p.AgentPort = 49983 })},
				Objects: []Sandbox{shown}, Facts: []Fact{f},
			})
			require.False(t, s.view("x").Agent.Egress)
			require.Empty(t, s.joinEgress("e", 2))
		})
	}
}

// Its rules would have no effect.
//
// Invariant: I3
func TestClaimWithRulesGetsNoPodWithoutGateway(t *testing.T) {
	s := newSim(t)
	pool := changed(idlePool(1), func(p *Pool) { p.Agent.Port = 49983 })
	s.recover([]Pool{pool}, []Pod{with(warmPod("a-1"), func(p *Pod) { p.AgentPort = 49983 })})
	s.step(Claim{Token: 1, Pool: poolA, Binding: Binding{Network: oneHost}})
	refused := one[ClaimRefused](s)
	require.Equal(t, NotConfigured, refused.Why)
	require.Contains(t, refused.Problem, "spec.egress.mode Gateway")
	s.step(Claim{Token: 2, Pool: poolA})
	one[Configure](s)
}

func TestStoppedSandboxWithRulesSaysWhatItNeeds(t *testing.T) {
	s := newSim(t)
	f := on("a-0", "x")
	record := f.Subject.(*SandboxFact)
	record.Phase, record.Archive, record.Agent, record.Network = Stopped, "x", Agent{Port: 49983, Egress: true}, oneHost
	s.recoverState(State{
		Pools: []Pool{changed(idlePool(1), func(p *Pool) { p.Agent.Port = 49983 })}, Nodes: []string{"n1"},
		Pods: []Pod{with(warmPod("a-1"), func(p *Pod) { p.AgentPort = 49983 })}, Facts: []Fact{f},
	})
	s.step(SetTimeout{Token: 20, Scope: everyTeam, ID: "x", Lifetime: time.Minute, Wake: true})
	a := one[SandboxCallAnswered](s)
	require.Equal(t, CallRefused, a.Status)
	require.Contains(t, a.Why, "need a pod that was made while its pool had spec.egress.mode Gateway")
	require.Equal(t, Stopped, s.view("x").Phase)
}

// Invariant: P37
func TestPodsOfTheModeBeforeAreNotHandedOut(t *testing.T) {
	s := newSim(t)
	pool := changed(idlePool(1), func(p *Pool) { p.Agent.Port = 49983 })
	s.recover([]Pool{pool}, []Pod{with(warmPod("a-1"), func(p *Pod) { p.AgentPort = 49983 })})
	s.step(PoolSeen{changed(pool, func(p *Pool) { p.Agent.Egress, p.Template = true, "t2" })})
	s.step(Claim{Token: 1, Pool: poolA, Wait: time.Minute})
	none[Configure](s)
	none[ClaimRefused](s)
	s.step(PodSeen{with(egressPod("a-2"), func(p *Pod) { p.Template = "t2" })})
	require.Equal(t, "a-2", one[Configure](s).Sandbox.Pod.Name)
}

// facts are those about a sandbox in the writes among the effects.
func (s *sim) facts(id string) (all []*SandboxFact) {
	for _, w := range of[Write](s.effects) {
		for _, f := range w.Facts {
			if sb, ok := f.Subject.(*SandboxFact); ok && sb.ID == id {
				all = append(all, sb)
			}
		}
	}
	return all
}
