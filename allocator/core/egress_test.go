package core

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/core/idle"
)

// egressStale is the max-stale of egress routers, shorter than that of the allocators.
const egressStale = 30 * time.Second

// egressSim has a sandbox with egress rules, one without, and an ingress router.
func egressSim(t *testing.T) (s *sim, with, without Sandbox) {
	t.Helper()
	s = newSim(t)
	pool := changed(idlePool(1), func(p *Pool) { p.Agent.Port, p.Sleep = 49983, fact.SleepPolicy{} })
	open := changed(specA(1), func(p *Pool) { p.Key.Name = "open" })
	s.recover([]Pool{pool, open}, []Pod{
		egressPod("a-1"), warmPodOf("open", "o-2"),
	})
	s.joinAndReport("r", 1)
	s.step(Claim{Token: 1, Pool: poolA})
	s.step(Configured{ID: one[Configure](s).Sandbox.ID, OK: true})
	with = one[Claimed](s).Sandbox
	s.step(Claim{Token: 2, Pool: open.Key})
	without = one[Claimed](s).Sandbox
	require.True(t, with.Agent.Egress)
	require.False(t, without.Agent.Egress)
	s.acked("r", 1)
	return s, with, without
}

func egressPod(name string) Pod {
	return with(warmPod(name), func(p *Pod) { p.AgentPort, p.Egress = 49983, true })
}

func warmPodOf(pool, name string) Pod {
	return with(warmPod(name), func(p *Pod) { p.Pool = pool })
}

func (s *sim) joinEgress(session string, stream uint64) []Sandbox {
	s.t.Helper()
	s.step(SessionJoined{Session: session, Stream: stream, MaxStale: egressStale, Egress: true})
	return one[SendSnapshot](s).Routes
}

// Invariant: I3
func TestReleaseWaitsForEgressRoutersWithItsRules(t *testing.T) {
	s, with, without := egressSim(t)
	s.joinEgress("e", 2)
	s.acked("e", 2)
	for _, c := range []struct {
		sb    Sandbox
		waits bool
	}{{without, false}, {with, true}} {
		s.release(c.sb.ID)
		sent := of[SendRelease](s.effects)
		s.acked("r", 1)
		require.Equal(t, c.waits, s.deletedAfter(c.sb.Pod, 3*window) > 2*window)
		require.Len(t, sent, map[bool]int{false: 1, true: 2}[c.waits])
	}
	s.acked("e", 2)
	require.LessOrEqual(t, s.deletedAfter(with.Pod, never), window)
}

func TestEgressRoutersGetOnlySandboxesWithRules(t *testing.T) {
	s, with, without := egressSim(t)
	require.Equal(t, []Sandbox{with}, s.joinEgress("e", 2))
	for id, known := range map[string]bool{with.ID: true, without.ID: false} {
		s.step(Resolve{Session: "e", Stream: 2, ID: id})
		answer := one[SendResolved](s)
		require.Equal(t, known, answer.Sandbox != nil)
		require.False(t, answer.Gone || answer.Starting)
	}
	s.step(PoolSeen{changed(specA(1), func(p *Pool) { p.Key.Name, p.Ports = "open", []uint16{80} })})
	require.Len(t, of[SendRoute](s.effects), 1, "its ports have changed")
}

// Invariant: I4
func TestEgressRoutersAreNotAskedWhatIsIdle(t *testing.T) {
	s, with, _ := egressSim(t)
	s.joinEgress("e", 2)
	s.step(Report{Stream: 2, Gateway: "x", Blind: "it has never looked"})
	s.pass(idleFor)
	q := s.asks(1)
	s.step(Quiesced{Stream: 2, Number: q.Number, Activities: []Activity{{ID: with.ID}}})
	s.step(Quiesced{Stream: 1, Number: q.Number})
	require.Equal(t, fact.ReasonIdleTimeout, s.view(with.ID).Reason)
	require.Empty(t, of[SendResume](s.effects))
}

func TestSilentEgressRouterExpiresByItsMaxStale(t *testing.T) {
	s, with, _ := egressSim(t)
	s.joinEgress("e", 2)
	s.release(with.ID)
	s.acked("r", 1)
	s.step(SessionLeft{Session: "e", Stream: 2})
	took := s.deletedAfter(with.Pod, never)
	require.Greater(t, took, egressStale)
	require.Less(t, took, egressStale+egressStale/100+egressEnds+window+time.Second)
}

func TestRouterKeepsTheKindOfItsSession(t *testing.T) {
	s, _, _ := egressSim(t)
	s.joinEgress("e", 2)
	for _, join := range []SessionJoined{{Session: "r", Stream: 3, Egress: true}, {Session: "e", Stream: 4, MaxStale: egressStale}} {
		s.step(join)
		require.Equal(t, []Effect{CloseStream{Stream: join.Stream}}, s.effects)
	}
}

// Invariant: P27
func TestCloseWaitsForEgressRoutersWithItsRules(t *testing.T) {
	s, with, _ := egressSim(t)
	s.joinEgress("e", 2)
	s.acked("e", 2)
	s.step(Sleep{Token: 7, Scope: everyTeam, ID: with.ID})
	require.Len(t, of[SendClose](s.effects), 2)
	require.Len(t, of[SendResume](s.effects), 1)
	s.acked("r", 1)
	s.pass(window)
	none[Freeze](s)
	s.acked("e", 2)
	s.pass(window)
	one[Freeze](s)
}

// A verdict says what ingress routers have admitted. An egress router may have admitted something until it acknowledges.
//
// Invariant: P27
func TestIdleSandboxWithRulesSleepsAfterTheWindow(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{changed(idlePool(1), func(p *Pool) {
		p.Agent.Port, p.Sleep = 49983, fact.SleepPolicy{WhenIdle: true}
	})}, []Pod{egressPod("a-1")})
	s.joinAndReport("r", 1)
	s.joinEgress("e", 2)
	s.step(Claim{Token: 1, Pool: poolA})
	s.step(Configured{ID: one[Configure](s).Sandbox.ID, OK: true})
	s.acked("r", 1)
	s.acked("e", 2)
	s.step(SessionLeft{Session: "e", Stream: 2})
	s.pass(idleFor)
	s.says(s.asks(1), 1)
	none[SendClose](s) // a router that is away cannot be asked to forget it
	one[SendResume](s)
	s.joinEgress("e", 2)
	s.pass(idle.AskAgain)
	s.says(s.asks(1), 1)
	require.Len(t, of[SendClose](s.effects), 2)
	s.acked("r", 1)
	s.acked("e", 2)
	none[Freeze](s)
	s.pass(window)
	one[Freeze](s)
}

// An allocator of an earlier version writes facts without it, and prunes it from objects.
// Invariant: I3
func TestNextLeaderFindsTheRulesInRecordOrObject(t *testing.T) {
	for name, inObject := range map[string]bool{"the object has it": true, "the record has it": false} {
		t.Run(name, func(t *testing.T) {
			s := newSim(t)
			f := on("a-1", "x")
			record := f.Subject.(*SandboxFact)
			shown := record.Sandbox
			shown.Agent = Agent{Port: 49983, Egress: inObject}
			record.Agent = Agent{Port: 49983, Egress: !inObject}
			s.recoverState(State{
				Pools: []Pool{specA(1)}, Nodes: []string{"n1"}, Pods: []Pod{egressPod("a-1")}, Objects: []Sandbox{shown},
				Facts: []Fact{f, {Revision: Revision{Term: 1, Counter: 9}, Subject: &SessionFact{ID: "e", MaxStale: egressStale, Egress: true}}},
			})
			require.True(t, s.view("x").Agent.Egress)
			s.release("x")
			require.Greater(t, s.deletedAfter(key("a-1"), never), egressStale, "it waits for the router of the earlier term")
		})
	}
}

// Invariant: P38
func TestEachSandboxOfAClaimHasItsOwnSealedHeaders(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{changed(specA(2), func(p *Pool) { p.Agent.Port = 49983 })}, []Pod{egressPod("a-1"), egressPod("a-2")})
	s.joinAndReport("r", 1)
	s.joinEgress("e", 2)
	s.acked("e", 2)
	s.step(Claim{Token: 9, Pool: poolA, Count: 2, SealHeaders: func(id string) []byte { return []byte("for " + id) }})
	claimed := map[string]bool{}
	for _, e := range of[Configure](s.effects) {
		s.step(Configured{ID: e.Sandbox.ID, OK: true})
		for _, e := range of[SendRoute](s.effects) {
			if e.Stream == 2 {
				require.Equal(t, EgressRules{Headers: []byte("for " + e.Sandbox.ID)}, e.Sandbox.Network)
				claimed[e.Sandbox.ID] = true
			}
		}
	}
	require.Len(t, claimed, 2)
}

// Invariant: P38
func TestReleasedSandboxKeepsNoHeaders(t *testing.T) {
	s, sb := rulingSim(t, "e1")
	rules := EgressRules{Allow: []string{"a.example"}, Deny: []string{"0.0.0.0/0"}, Headers: []byte("sealed")}
	s.setNetwork(5, sb.ID, rules)
	require.Equal(t, rules, s.view(sb.ID).Network)
	s.release(sb.ID)
	rules.Headers = nil
	for _, w := range of[Write](s.effects) {
		for _, f := range w.Facts {
			require.Equal(t, rules, f.Subject.(*SandboxFact).Network)
		}
	}
	require.Equal(t, rules, s.view(sb.ID).Network)
}

func TestClaimWithHeadersGetsNoPodWithoutAGateway(t *testing.T) {
	s, _, _ := egressSim(t)
	s.step(PodSeen{Pod: with(warmPod("a-5"), func(p *Pod) { p.AgentPort = 49983 })})
	s.step(Claim{Token: 9, Pool: poolA, SealHeaders: func(string) []byte { return []byte("sealed") }})
	require.Equal(t, NotConfigured, one[ClaimRefused](s).Why)
}

// Invariant: P38
func TestEgressRoutersGetEachChangeOfPoolCredentials(t *testing.T) {
	s, sb, _ := egressSim(t)
	s.joinEgress("e", 2)
	s.acked("e", 2)
	pool := changed(idlePool(1), func(p *Pool) { p.Agent.Port, p.Sleep = 49983, fact.SleepPolicy{} })
	for i, value := range []string{"a/1", "a/2"} {
		pool.Version = fmt.Sprint(i + 5)
		pool.Egress = &PoolEgress{Credentials: []EgressCredential{{Host: "a.example", Port: 443, Header: "authorization", Value: value}}}
		s.step(PoolSeen{Pool: pool})
		var sent []EgressCredential
		for _, e := range of[SendRoute](s.effects) {
			if e.Stream == 2 && e.Sandbox.ID == sb.ID {
				sent = e.Sandbox.PoolEgress.Credentials
			}
		}
		require.Equal(t, pool.Egress.Credentials, sent)
	}
}

func TestEgressRoutersWakeNothing(t *testing.T) {
	s, with, _ := egressSim(t)
	s.joinEgress("e", 2)
	s.acked("e", 2)
	s.step(Sleep{Token: 7, Scope: everyTeam, ID: with.ID})
	s.acked("r", 1)
	s.acked("e", 2)
	s.pass(window)
	s.step(Frozen{ID: with.ID, Revision: one[Freeze](s).Sandbox.Revision, OK: true})
	s.step(Resolve{Session: "e", Stream: 2, ID: with.ID, Wake: true})
	none[Thaw](s)
	none[Write](s)
}

func TestGoodbyeOfTheOtherKindEndsNoSession(t *testing.T) {
	s, _, _ := egressSim(t)
	s.joinEgress("e", 2)
	s.step(SessionGoodbye{Session: "e", Stream: 9})
	s.step(SessionGoodbye{Session: "r", Stream: 9, Egress: true})
	require.Len(t, s.core.routers.members.All(), 2)
}

func TestRouteListsTheRoutersOfItsSandboxOnly(t *testing.T) {
	s, with, without := egressSim(t)
	s.joinEgress("e", 2)
	s.acked("e", 2)
	for id, kinds := range map[string][]bool{with.ID: {true, false}, without.ID: {false}} {
		st, ok := s.core.View().Route(id, everyTeam)
		require.True(t, ok)
		var egress []bool
		for _, r := range st.Routers {
			egress = append(egress, r.Egress)
		}
		require.Equal(t, kinds, egress)
	}
}
