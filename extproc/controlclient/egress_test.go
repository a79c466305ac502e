package controlclient_test

import (
	"context"
	"fmt"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	controlv1 "github.com/berth-sandbox/berth/api/control/v1"
	"github.com/berth-sandbox/berth/extproc/controlclient"
)

// gateway is what an egress router knows. It records the calls.
type gateway struct {
	*recorder
	waiting []func() // barriers that were not drained
	open    int
}

func (g *gateway) Set(r *controlv1.Route) error {
	g.note("set %s", r.GetSandboxId())
	if r.GetPodIp() == "" {
		return fmt.Errorf("route: pod_ip")
	}
	return nil
}
func (g *gateway) Forget(id string)   { g.note("forget %s", id) }
func (g *gateway) Answered(id string) { g.note("answered %s", id) }
func (g *gateway) SetCredentials(values map[string]string) {
	g.note("credentials %v %v", values != nil, len(values))
}
func (g *gateway) Usage(id string) *controlv1.EgressUsage {
	return &controlv1.EgressUsage{Known: id == "one", Admitted: 3}
}
func (g *gateway) Replace(all []*controlv1.Route) error {
	g.note("replace with %d", len(all))
	return nil
}
func (g *gateway) Barrier(drained func()) { g.waiting = append(g.waiting, drained) }
func (g *gateway) Unread() int            { return g.open }
func (g *gateway) Disconnected()          { g.note("disconnected") }

// drain drains the barriers.
func (g *gateway) drain() {
	synctest.Wait()
	for _, drained := range g.waiting {
		drained()
	}
	g.waiting = nil
}

// runEgress is run with the client of an egress router.
func runEgress(t *testing.T, f func(*world, *gateway)) {
	t.Helper()
	var g *gateway
	change := func(w *world, o *controlclient.Options) {
		g = &gateway{recorder: w.cache}
		o.Egress, o.MaxStale = g, 30*time.Second
		o.Sandboxes, o.Uses, o.Keys, o.Probe = nil, nil, nil, nil
	}
	runChanged(t, []string{"a"}, func(*world) controlclient.Uses { return nil }, change, func(w *world) {
		w.serve("a", nil)
		f(w, g)
	})
}

// Invariant: P36
func TestEgressMessagesAreAcknowledgedWhenTheyAreDrained(t *testing.T) {
	runEgress(t, func(w *world, g *gateway) {
		p, join, nonce := w.accept()
		require.Zero(t, join.GetMaxStaleNanos())
		require.EqualValues(t, 30*time.Second, join.GetEgressMaxStaleNanos())
		require.NotEmpty(t, join.GetGatewayHash())
		p.send(0, snapshot(false, route("one", "10.0.0.1")))
		p.snapshot(route("two", "10.0.0.2"))
		p.pong(nonce)
		require.Equal(t, []string{"replace with 2", "credentials false 0"}, g.events(), "this leader has none")
		require.True(t, g.Fresh())
		g.drain()
		require.EqualValues(t, 1, p.ack())

		p.send(2, push(route("three", "10.0.0.3")))
		p.send(3, release("one", "two"))
		p.send(4, &controlv1.AllocatorMessage{Message: &controlv1.AllocatorMessage_Resolved{Resolved: &controlv1.Resolved{
			SandboxId: "three", Answer: &controlv1.Resolved_Starting{Starting: &controlv1.Starting{}},
		}}})
		require.Equal(t, []string{"set three", "forget one", "forget two", "forget three"}, g.events(), "nothing waits for the barriers")
		require.Len(t, g.waiting, 3)
		time.Sleep(3500 * time.Millisecond)
		for range 3 {
			m, err := p.Recv()
			require.NoError(t, err)
			require.NotNil(t, m.GetPing(), "nothing is acknowledged before its requests have ended")
		}
		g.drain()
		p.acks(4)
	})
}

// Invariant: P38
func TestEgressRouterHasTheValuesOfThisLeader(t *testing.T) {
	runEgress(t, func(w *world, g *gateway) {
		credentials := func(last, unread bool, names ...string) *controlv1.AllocatorMessage {
			c := &controlv1.Credentials{Values: map[string]string{}, Last: last, Unread: unread}
			for _, name := range names {
				c.Values[name] = "v"
			}
			return &controlv1.AllocatorMessage{Message: &controlv1.AllocatorMessage_Credentials{Credentials: c}}
		}
		p, _, nonce := w.accept()
		p.snapshot()
		p.send(0, credentials(false, false, "a/1", "a/2"))
		require.Equal(t, []string{"replace with 0"}, g.events(), "a part replaces nothing")
		p.send(0, credentials(true, false, "b/1"))
		p.pong(nonce)
		p.send(0, credentials(true, false, "c/1"))
		p.send(0, credentials(true, true))
		require.Equal(t, []string{"credentials true 3", "credentials true 1", "credentials false 0"}, g.events())
		g.drain()
		p.acks(1)
	})
}

func TestEgressRouterAsksAndTakesTheAnswer(t *testing.T) {
	runEgress(t, func(w *world, g *gateway) {
		p, _, nonce := w.accept()
		p.snapshot()
		p.pong(nonce)
		g.drain()
		p.acks(1)
		g.events()
		require.True(t, w.client.Ask("one", false))
		for {
			if m := p.any().GetResolve(); m != nil {
				require.Equal(t, "one", m.GetSandboxId())
				require.False(t, m.GetWake())
				break
			}
		}
		for _, answer := range []*controlv1.Resolved{
			{SandboxId: "one", Answer: &controlv1.Resolved_Route{Route: route("one", "10.0.0.1")}},
			{SandboxId: "two", Answer: &controlv1.Resolved_Starting{Starting: &controlv1.Starting{}}},
			{SandboxId: "three", Answer: &controlv1.Resolved_Asleep{Asleep: &controlv1.Asleep{Route: route("three", "10.0.0.3")}}},
		} {
			p.send(0, &controlv1.AllocatorMessage{Message: &controlv1.AllocatorMessage_Resolved{Resolved: answer}})
		}
		require.Equal(t, []string{"set one", "answered one", "answered two", "answered three"}, g.events())
		p.send(0, push(&controlv1.Route{SandboxId: "bad"}))
		require.Equal(t, []string{"set bad", "disconnected"}, g.events(), "what cannot be read ends the stream")
	})
}

func TestEgressRouterAnswersQuestionsAboutUse(t *testing.T) {
	runEgress(t, func(w *world, _ *gateway) {
		p, _, nonce := w.accept()
		p.snapshot()
		p.pong(nonce)
		for number, id := range []string{"", "one", "two"} {
			if number == 0 {
				continue
			}
			p.send(0, &controlv1.AllocatorMessage{Message: &controlv1.AllocatorMessage_AskEgressUsage{
				AskEgressUsage: &controlv1.AskEgressUsage{SandboxId: id, Number: uint64(number)},
			}})
			for {
				if m := p.any().GetEgressUsage(); m != nil {
					require.Equal(t, []any{uint64(number), id == "one"}, []any{m.GetNumber(), m.GetKnown()})
					break
				}
			}
		}
	})
}

func TestEgressRouterReportsNothingAndSaysGoodbye(t *testing.T) {
	runEgress(t, func(w *world, g *gateway) {
		p, _, nonce := w.accept()
		p.snapshot()
		p.pong(nonce)
		g.drain()
		p.acks(1)
		p.send(0, &controlv1.AllocatorMessage{Message: &controlv1.AllocatorMessage_Quiesce{
			Quiesce: &controlv1.Quiesce{Number: 1, Questions: []*controlv1.Question{{SandboxId: "one"}}},
		}})
		w.stop()
		for {
			m := p.any()
			require.Nil(t, m.GetReport(), "%v", m)
			require.Nil(t, m.GetQuiesced(), "%v", m)
			if m.GetGoodbye() != nil {
				break
			}
		}
		p.end <- nil
		require.NoError(t, <-w.ended)
		w.ended <- nil
	})
}

func TestEgressTakesThePlaceOfTheOtherOptions(t *testing.T) {
	_, err := controlclient.New(controlclient.Options{
		Egress: &gateway{}, Probe: func(context.Context, netip.AddrPort, string) bool { return false }, Log: zap.NewNop(),
	})
	require.ErrorContains(t, err, "must not be set with Egress")
	require.NotContains(t, err.Error(), "Uses is required")
}
