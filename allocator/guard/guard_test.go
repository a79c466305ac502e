package guard_test

import (
	"fmt"
	"net/netip"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/guard"
)

const window = 5 * time.Second

var (
	poolKey  = core.PoolKey{Namespace: "ns", Name: "pool"}
	idOfTest = strings.Repeat("a", 20)
	here     = core.Gateway{1}
)

// term is a guard in the term of a leader that does what the test says.
type term struct {
	*testing.T
	*guard.Guard
	now time.Duration
}

func begin(t *testing.T, st core.State) *term {
	g := &term{T: t, Guard: guard.New(window), now: time.Hour}
	g.Recover(g.now, st)
	return g
}

// does requires that the effects of an event pass.
func (t *term) does(ev core.Event, effects ...core.Effect) {
	t.Helper()
	allowed, violations := t.Step(t.now, ev, effects)
	require.Empty(t, violations)
	require.Equal(t, effects, allowed)
}

// violates requires that one effect violates an assertion, and returns what is carried out instead.
func (t *term) violates(assertion string, ev core.Event, e core.Effect) []core.Effect {
	t.Helper()
	allowed, violations := t.Step(t.now, ev, []core.Effect{e, core.ClaimCanceled{}})
	require.Len(t, violations, 1)
	require.Equal(t, assertion, violations[0].Assertion)
	require.Equal(t, core.ClaimCanceled{}, allowed[len(allowed)-1], "the rest passes")
	return allowed[:len(allowed)-1]
}

func (t *term) writes(all ...fact.Subject) {
	t.Helper()
	var facts []core.Fact
	for _, s := range all {
		facts = append(facts, core.Fact{Subject: s})
	}
	t.does(core.Tick{}, core.Write{Facts: facts})
	t.does(core.Written{})
}

// joins has a router join, and sends it these routes.
func (t *term) joins(id string, stream uint64, routes ...core.Sandbox) {
	t.Helper()
	t.does(core.SessionJoined{Session: id, Stream: stream, Gateway: here})
	t.does(core.Tick{}, core.Write{Facts: []core.Fact{{Subject: &core.SessionFact{ID: id, Gateway: here}}}})
	t.does(core.Written{}, core.SendSnapshot{Stream: stream, Sequence: 1, Routes: routes})
}

func podOf(n int) core.PodKey {
	return core.PodKey{Namespace: "ns", Name: fmt.Sprintf("pool-%d", n), UID: fmt.Sprintf("uid-%d", n)}
}

func sandboxOn(n int) core.Sandbox {
	return core.Sandbox{Binding: core.Binding{ID: idOfTest}, Pool: poolKey, Pod: podOf(n), IP: netip.AddrFrom4([4]byte{10, 0, 0, byte(n)}), Phase: core.Running}
}

func released(s core.Sandbox) *core.SandboxFact {
	s.Phase = core.Released
	return &core.SandboxFact{Sandbox: s}
}

// Invariant: I3
func TestReleasedPodIsDeletedOnlyAfterItsFence(t *testing.T) {
	sb := sandboxOn(1)
	const safe, unsafe = true, false
	pass := func(t *term) { t.now += window }
	for name, c := range map[string]struct {
		safe bool
		do   func(t *term) // after the release was sent in message 3
	}{
		"nothing was acknowledged": {unsafe, pass},
		"an earlier message was":   {unsafe, func(t *term) { t.does(core.SessionAck{Stream: 1, Sequence: 2}); pass(t) }},
		"it was acknowledged":      {safe, func(t *term) { t.does(core.SessionAck{Stream: 1, Sequence: 3}); pass(t) }},
		"a later close of another sandbox was": {safe, func(t *term) {
			t.does(core.Tick{}, core.SendClose{Stream: 1, Sequence: 4, ID: "another"})
			t.does(core.SessionAck{Stream: 1, Sequence: 4})
			pass(t)
		}},
		"within the window": {unsafe, func(t *term) {
			t.does(core.SessionAck{Stream: 1, Sequence: 3})
			t.now += window - 1
		}},
		"a message that was not sent is acknowledged": {unsafe, func(t *term) { t.does(core.SessionAck{Stream: 1, Sequence: 4}); pass(t) }},
		"another stream acknowledges":                 {unsafe, func(t *term) { t.does(core.SessionAck{Stream: 2, Sequence: 3}); pass(t) }},
		"Goodbye":                                     {safe, func(t *term) { t.does(core.SessionGoodbye{Session: "r", Stream: 1, Gateway: here}); pass(t) }},
		"Goodbye of another gateway": {unsafe, func(t *term) {
			t.does(core.SessionGoodbye{Session: "r", Stream: 1, Gateway: core.Gateway{2}})
			pass(t)
		}},
		"reported dead while it is connected": {unsafe, func(t *term) {
			t.does(core.SessionDead{Session: "r", By: "q", Gateway: here}, core.CloseStream{Stream: 1})
			pass(t)
		}},
		"reported dead, and its stream ends": {safe, func(t *term) {
			t.does(core.SessionDead{Session: "r", By: "q", Gateway: here})
			t.does(core.SessionLeft{Session: "r", Stream: 1})
			pass(t)
		}},
		"its stream ends, and it is reported dead": {safe, func(t *term) {
			t.does(core.SessionLeft{Session: "r", Stream: 1})
			t.does(core.SessionDead{Session: "r", By: "q", Gateway: here})
			pass(t)
		}},
		"reported dead, and it joins again": {unsafe, func(t *term) {
			t.does(core.SessionDead{Session: "r", By: "q", Gateway: here})
			t.does(core.SessionJoined{Session: "r", Stream: 2, Gateway: here})
			t.does(core.SessionLeft{Session: "r", Stream: 2})
			pass(t)
		}},
		"reported dead by another gateway": {unsafe, func(t *term) {
			t.does(core.SessionLeft{Session: "r", Stream: 1})
			t.does(core.SessionDead{Session: "r", By: "q", Gateway: core.Gateway{2}})
			pass(t)
		}},
		"its end is not durable": {unsafe, func(t *term) {
			t.does(core.Tick{}, core.Write{Facts: []core.Fact{{Subject: &core.SessionFact{ID: "r", Left: true}}}})
			pass(t)
		}},
		"its end is durable": {safe, func(t *term) { t.writes(&core.SessionFact{ID: "r", Left: true}); pass(t) }},
		"it joins again":     {unsafe, func(t *term) { t.joins("r", 2); pass(t) }},
		"it joins again, and acknowledges the snapshot": {safe, func(t *term) {
			t.joins("r", 2)
			t.does(core.SessionAck{Stream: 2, Sequence: 1})
			pass(t)
		}},
		"it joins again, and gets the route": {unsafe, func(t *term) {
			t.joins("r", 2, sb)
			t.does(core.SessionAck{Stream: 2, Sequence: 1})
			pass(t)
		}},
		"it gets the route when all have acknowledged": {unsafe, func(t *term) {
			t.does(core.SessionAck{Stream: 1, Sequence: 3})
			pass(t)
			t.does(core.Tick{}, core.SendResolved{Stream: 1, ID: sb.ID, Sandbox: &sb})
			pass(t)
		}},
		"a router of an earlier journal appears": {unsafe, func(t *term) {
			t.writes(&core.SessionFact{ID: "earlier-journal-x", Earlier: true})
			t.does(core.SessionAck{Stream: 1, Sequence: 3})
			pass(t)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			g := begin(t, core.State{})
			g.joins("r", 1)
			g.writes(&core.SandboxFact{Sandbox: sb})
			g.does(core.Tick{}, core.SendRoute{Stream: 1, Sequence: 2, Sandbox: sb})
			g.violates(guard.PodFenced, core.Tick{}, core.DeletePod{Pod: sb.Pod})
			g.writes(released(sb))
			g.does(core.Tick{}, core.SendRelease{Stream: 1, Sequence: 3, IDs: []string{sb.ID}})
			c.do(g)
			if !c.safe {
				require.Empty(t, g.violates(guard.PodFenced, core.Tick{}, core.DeletePod{Pod: sb.Pod}))
				require.Empty(t, g.violates(guard.PodFenced, core.Tick{}, core.RecyclePod{Pod: sb.Pod}))
				return
			}
			g.does(core.Tick{}, core.DeletePod{Pod: sb.Pod}, core.RecyclePod{Pod: sb.Pod})
		})
	}
}

// Invariant: I3
func TestNextLeaderWaitsForSessionsOfTheJournal(t *testing.T) {
	sb := sandboxOn(1)
	sb.Revision = core.Revision{Term: 1, Counter: 1}
	shown := sb // an earlier state than the journal has
	gone := released(sb)
	gone.Revision.Counter = 2
	session := core.Fact{Subject: &core.SessionFact{ID: "r", Gateway: here}}
	st := core.State{Objects: []core.Sandbox{shown}, Facts: []core.Fact{session, {Revision: gone.Revision, Subject: gone}}}
	g := begin(t, st)
	g.now += window
	g.violates(guard.PodFenced, core.Tick{}, core.DeletePod{Pod: sb.Pod})
	g.writes(&core.SessionFact{ID: "r", Left: true})
	g.now += window
	g.does(core.Tick{}, core.DeletePod{Pod: sb.Pod})

	st.Objects[0].Phase, st.Objects[0].Revision.Counter = core.Ended, 3
	begin(t, st).does(nil, core.DeletePod{Pod: sb.Pod})
}

// Invariant: I5
func TestIdlePodIsDeletedOnlyWhenIntentIsDurable(t *testing.T) {
	g := begin(t, core.State{Facts: []core.Fact{{Subject: &core.RetirementFact{Pod: podOf(7)}}}})
	g.does(nil, core.DeletePod{Pod: podOf(7)})
	g.does(core.Tick{}, core.Write{Facts: []core.Fact{{Subject: &core.RetirementFact{Pod: podOf(1)}}}})
	g.violates(guard.PodFenced, core.Tick{}, core.DeletePod{Pod: podOf(1)})
	g.does(core.Written{}, core.DeletePod{Pod: podOf(1)})
	g.violates(guard.PodFenced, core.Tick{}, core.DeletePod{Pod: core.PodKey{Name: "pool-1", UID: "uid-1", Life: 1}})

	sb := sandboxOn(2) // conflicting records named pod 3 too
	g.writes(&core.SandboxFact{Sandbox: sb}, &core.RetirementFact{Pod: podOf(3), After: sb.ID})
	g.violates(guard.PodFenced, core.Tick{}, core.DeletePod{Pod: podOf(3)})
	g.writes(released(sb))
	g.now += window
	g.does(core.Tick{}, core.DeletePod{Pod: podOf(3)})
}

// Invariant: I3
func TestRoutesAreSentOnlyToDurableSessions(t *testing.T) {
	sb := sandboxOn(1)
	for name, e := range map[string]core.Effect{
		"snapshot": core.SendSnapshot{Stream: 1, Sequence: 1}, "route": core.SendRoute{Stream: 1, Sequence: 2, Sandbox: sb},
		"answer": core.SendResolved{Stream: 1, ID: sb.ID, Sandbox: &sb},
	} {
		t.Run(name, func(t *testing.T) {
			instead := []core.Effect{core.CloseStream{Stream: 1}}
			g := begin(t, core.State{})
			g.writes(&core.SandboxFact{Sandbox: sb})
			require.Equal(t, instead, g.violates(guard.SessionDurable, core.Tick{}, e), "no router has joined")
			g.does(core.SessionJoined{Session: "r", Stream: 1, MaxStale: time.Hour, Gateway: here})
			g.does(core.Tick{}, core.Write{Facts: []core.Fact{{Subject: &core.SessionFact{ID: "r", MaxStale: time.Hour, Assumed: true, Gateway: here}}}})
			require.Equal(t, instead, g.violates(guard.SessionDurable, core.Tick{}, e), "not durable")
			require.Equal(t, instead, g.violates(guard.SessionDurable, core.Written{}, e), "max-stale was assumed")
			g.writes(&core.SessionFact{ID: "r", MaxStale: time.Hour})
			require.Equal(t, instead, g.violates(guard.SessionDurable, core.Tick{}, e), "another gateway")
			g.writes(&core.SessionFact{ID: "r", MaxStale: time.Hour, Gateway: here})
			g.does(core.Tick{}, e)
			g.writes(&core.SessionFact{ID: "r", MaxStale: time.Hour, Left: true})
			require.Equal(t, instead, g.violates(guard.SessionDurable, core.Tick{}, e), "it has ended")
		})
	}
}

// Invariant: I9
func TestNothingIsDoneBeforeTheClaimIsDurable(t *testing.T) {
	sb := sandboxOn(1)
	starting, moved := sb, sb
	starting.Phase, moved.IP = core.Starting, netip.MustParseAddr("10.9.9.9")
	refused := []core.Effect{core.ClaimRefused{Token: 1}}
	for name, c := range map[string]struct {
		of      func(core.Sandbox) core.Effect
		started bool // it needs the start
		instead []core.Effect
	}{
		"answer":           {func(s core.Sandbox) core.Effect { return core.Claimed{Token: 1, Sandbox: s} }, true, refused},
		"answer to many":   {func(s core.Sandbox) core.Effect { return core.BatchClaimed{Token: 1, Sandboxes: []core.Sandbox{s}} }, true, refused},
		"configuration":    {func(s core.Sandbox) core.Effect { return core.Configure{Sandbox: s} }, false, nil},
		"hook":             {func(s core.Sandbox) core.Effect { return core.StartSandbox{Sandbox: s} }, false, nil},
		"object":           {func(s core.Sandbox) core.Effect { return core.WriteObject{Sandbox: s} }, false, nil},
		"route":            {func(s core.Sandbox) core.Effect { return core.SendRoute{Stream: 1, Sequence: 2, Sandbox: s} }, true, []core.Effect{core.SendRelease{Stream: 1, Sequence: 2}}},
		"answer to Router": {func(s core.Sandbox) core.Effect { return core.SendResolved{Stream: 1, ID: s.ID, Sandbox: &s} }, true, nil},
		"snapshot": {func(s core.Sandbox) core.Effect {
			return core.SendSnapshot{Stream: 1, Sequence: 1, Routes: []core.Sandbox{s}}
		}, true,
			[]core.Effect{core.SendSnapshot{Stream: 1, Sequence: 1, Routes: []core.Sandbox{}}}},
	} {
		t.Run(name, func(t *testing.T) {
			g := begin(t, core.State{})
			g.joins("r", 1)
			violates := func(ev core.Event, s core.Sandbox) {
				t.Helper()
				require.Equal(t, fmt.Sprint(c.instead), fmt.Sprint(g.violates(guard.ClaimDurable, ev, c.of(s))))
			}
			violates(core.Tick{}, sb)
			g.does(core.Tick{}, core.Write{Facts: []core.Fact{{Subject: &core.SandboxFact{Sandbox: starting}}}})
			violates(core.Tick{}, sb)
			g.does(core.Written{})
			if c.started {
				violates(core.Tick{}, sb)
			} else {
				g.does(core.Tick{}, c.of(sb))
			}
			g.writes(&core.SandboxFact{Sandbox: sb})
			g.does(core.Tick{}, c.of(sb))
			violates(core.Tick{}, moved)
		})
	}
}

// Invariant: I5
func TestNoIDAndNoPodIsBoundTwice(t *testing.T) {
	sb := sandboxOn(1)
	other, again, third := sandboxOn(1), sandboxOn(2), sandboxOn(3)
	other.ID, third.ID = strings.Repeat("b", 20), strings.Repeat("c", 20)
	bind := func(s core.Sandbox) core.Fact { return core.Fact{Subject: &core.SandboxFact{Sandbox: s}} }
	joined := func(f core.Fact) core.Fact { f.Joined = true; return f }
	g := begin(t, core.State{})
	g.writes(bind(sb).Subject)
	g.writes(bind(sb).Subject) // its end was moved
	for what, f := range map[string]core.Fact{"the ID, to another pod": bind(again), "the pod": bind(other)} {
		g.does(core.Tick{}) // nothing is kept of what was withheld
		instead := g.violates(guard.OneBinding, core.Tick{}, core.Write{Facts: []core.Fact{joined(bind(third)), joined(f)}})
		require.Empty(t, instead[0].(core.Write).Facts, what)
		g.does(core.Written{})
		g.violates(guard.ClaimDurable, core.Tick{}, core.Claimed{Sandbox: f.Subject.(*core.SandboxFact).Sandbox})
	}
	session := core.Fact{Subject: &core.SessionFact{ID: "r"}}
	instead := g.violates(guard.OneBinding, core.Tick{}, core.Write{Facts: []core.Fact{session, bind(again), session}})
	require.Equal(t, []core.Effect{core.Write{Facts: []core.Fact{session, session}}}, instead)
	g.does(core.Written{})

	g.writes(released(sb))
	g.violates(guard.OneBinding, core.Tick{}, core.Write{Facts: []core.Fact{bind(sb)}})
	g.writes(&core.RetirementFact{Pod: podOf(9)})
	retired := sandboxOn(9)
	retired.ID = strings.Repeat("d", 20)
	g.violates(guard.OneBinding, core.Tick{}, core.Write{Facts: []core.Fact{bind(retired)}})
}

// Invariant: P33
func TestStoppedSandboxIsBoundToAnotherPod(t *testing.T) {
	of := func(n, incarnation int, phase core.Phase) *core.SandboxFact {
		sb := sandboxOn(n)
		sb.Phase, sb.Incarnation, sb.Revision = phase, incarnation, core.Revision{Term: 1, Counter: uint64(7 + n)}
		return &core.SandboxFact{Sandbox: sb}
	}
	write := func(f *core.SandboxFact) core.Write { return core.Write{Facts: []core.Fact{{Subject: f}}} }
	g := begin(t, core.State{})
	g.writes(of(1, 0, core.Running))
	g.joins("r", 1, of(1, 0, core.Running).Sandbox)
	g.violates(guard.OneBinding, core.Tick{}, write(of(1, 0, core.Stopped))) // its route was sent since
	g.does(core.Written{})
	g.writes(of(1, 0, core.Asleep))
	g.violates(guard.OneBinding, core.Tick{}, write(of(2, 1, core.Starting)))
	g.does(core.Written{})
	g.violates(guard.PodFenced, core.Tick{}, core.DeletePod{Pod: podOf(1)})

	g.writes(of(1, 0, core.Stopped))
	g.does(core.Tick{}, core.DeletePod{Pod: podOf(1)})
	g.violates(guard.RouteAwake, core.Tick{}, core.SendRoute{Stream: 1, Sequence: 2, Sandbox: of(1, 0, core.Running).Sandbox})
	g.violates(guard.OneBinding, core.Tick{}, write(of(2, 0, core.Starting)))
	g.does(core.Written{})
	g.writes(of(2, 1, core.Starting))
	g.violates(guard.PodFenced, core.Tick{}, core.DeletePod{Pod: podOf(2)})
	g.writes(of(2, 1, core.Running))
	g.does(core.Tick{}, core.SendRoute{Stream: 1, Sequence: 3, Sandbox: of(2, 1, core.Running).Sandbox})
	other := of(2, 0, core.Running)
	other.ID = strings.Repeat("c", 20)
	g.violates(guard.OneBinding, core.Tick{}, write(other))

	next := begin(t, core.State{Objects: []core.Sandbox{of(1, 0, core.Stopped).Sandbox}})
	next.does(nil, core.DeletePod{Pod: podOf(1)})
	next.writes(of(2, 1, core.Starting))
}

// An ID is forgotten with the record of its sandbox, so the tables are bounded by what is alive.
func TestForgottenRecordsAndEndedSessionsLeaveNothing(t *testing.T) {
	sb := sandboxOn(1)
	g := begin(t, core.State{})
	for n := range uint64(3) {
		g.joins("r", n+1)
		g.writes(&core.SandboxFact{Sandbox: sb}, &core.RetirementFact{Pod: podOf(2)}, released(sb))
		g.does(core.SessionGoodbye{Session: "r", Stream: n + 1, Gateway: here})
		g.writes(&core.SessionFact{ID: "r", Left: true})
		g.does(core.SessionLeft{Session: "r", Stream: n + 1})
		g.now += window
		g.does(core.Tick{}, core.DeletePod{Pod: sb.Pod}, core.DeletePod{Pod: podOf(2)}, core.Settle{Thing: podOf(2)})
		g.does(core.Tick{}, core.DeleteObject{ID: sb.ID})
		require.Equal(t, guard.Sizes{}, g.Sizes())
	}
}

const canary = "CANARY"

// Invariant: P16
func TestViolationShowsNoTextOfTheClaim(t *testing.T) {
	named := map[string]bool{"ID": true, "Name": true, "UID": true, "Namespace": true}
	var fill func(v reflect.Value)
	fill = func(v reflect.Value) {
		switch v.Kind() {
		case reflect.String:
			v.SetString(canary)
		case reflect.Struct:
			for i := range v.NumField() {
				if f := v.Type().Field(i); f.IsExported() && !named[f.Name] {
					fill(v.Field(i))
				}
			}
		case reflect.Map:
			v.Set(reflect.ValueOf(map[string]string{canary: canary}))
		case reflect.Pointer:
			v.Set(reflect.New(v.Type().Elem()))
			fill(v.Elem())
		case reflect.Slice:
			v.Set(reflect.MakeSlice(v.Type(), 1, 1))
			fill(v.Index(0))
		default:
		}
	}
	sb := sandboxOn(1)
	fill(reflect.ValueOf(&sb).Elem())
	require.Equal(t, canary, sb.IdempotencyKey)
	require.Equal(t, canary, sb.Metadata[canary])
	require.Equal(t, canary, sb.Workload.Images[0])
	sb.Phase = core.Running
	again := sb
	again.Pod = podOf(2)
	session := &core.SessionFact{ID: "r", From: canary, Declared: &core.Declaration{By: canary, Reason: canary}}
	g := begin(t, core.State{Facts: []core.Fact{{Subject: session}}})
	claim := core.Claim{Binding: sb.Binding, Values: secret(canary)}
	for n, step := range []struct {
		assertion string
		ev        core.Event
		effect    core.Effect
	}{
		{guard.ClaimDurable, claim, core.Claimed{Sandbox: sb}},
		{guard.ClaimDurable, claim, core.Configure{Sandbox: sb, Values: secret(canary)}},
		{"", claim, core.Write{Facts: []core.Fact{{Subject: &core.SandboxFact{Sandbox: sb}}, {Subject: released(sb)}}}},
		{guard.OneBinding, claim, core.Write{Facts: []core.Fact{{Subject: &core.SandboxFact{Sandbox: again}}}}},
		{guard.PodFenced, core.Written{}, core.DeletePod{Pod: sb.Pod}},
		{guard.SessionDurable, core.SessionJoined{Session: "s", Stream: 1, From: canary}, core.SendRoute{Stream: 1, Sandbox: sb}},
	} {
		_, violations := g.Step(g.now, step.ev, []core.Effect{step.effect})
		if step.assertion == "" {
			require.Empty(t, violations)
			continue
		}
		require.Len(t, violations, 1, n)
		require.Equal(t, step.assertion, violations[0].Assertion)
		require.NotContains(t, violations[0].String(), canary)
		require.NotContains(t, violations[0].String(), idOfTest, "the whole ID opens a public sandbox")
		require.NotContains(t, violations[0].String(), "\n")
	}
}

type secret string

func (s secret) String() string { return string(s) }

// Invariant: P27
func TestRouteOfASandboxThatMayBeFrozenIsWithheld(t *testing.T) {
	for _, phase := range []core.Phase{core.FallingAsleep, core.Asleep, core.Waking} {
		g := begin(t, core.State{})
		sb := sandboxOn(1)
		g.writes(&core.SandboxFact{Sandbox: sb})
		g.joins("r", 1, sb)
		sb.Phase, sb.Revision = phase, core.Revision{Term: 1, Counter: 7}
		g.writes(&core.SandboxFact{Sandbox: sb})
		route := core.SendRoute{Stream: 1, Sequence: 2, Sandbox: sb}
		g.violates(guard.RouteAwake, core.Tick{}, route)
		instead := g.violates(guard.RouteAwake, core.Tick{}, core.SendSnapshot{Stream: 1, Sequence: 1, Routes: []core.Sandbox{sb}})
		require.Empty(t, instead[0].(core.SendSnapshot).Routes)
		g.violates(guard.RouteAwake, core.Thawed{ID: sb.ID, Revision: core.Revision{Term: 1, Counter: 6}, OK: true}, route)
		g.violates(guard.RouteAwake, core.Thawed{ID: sb.ID, Revision: sb.Revision}, route)
		g.does(core.Thawed{ID: sb.ID, Revision: sb.Revision, OK: true}, core.SendRoute{Stream: 1, Sequence: 2, Sandbox: sb})
	}
}
