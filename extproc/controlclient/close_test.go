package controlclient_test

import (
	"context"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"

	controlv1 "github.com/berth-sandbox/berth/api/control/v1"
	"github.com/berth-sandbox/berth/api/sandboxid"
	"github.com/berth-sandbox/berth/routecache"
)

// closing is the message that takes the route of a sandbox that goes on to exist.
func closing(id string) *controlv1.AllocatorMessage {
	return &controlv1.AllocatorMessage{Message: &controlv1.AllocatorMessage_Resolved{Resolved: &controlv1.Resolved{
		SandboxId: id, Answer: &controlv1.Resolved_Starting{Starting: &controlv1.Starting{HoldMillis: 10_000}},
	}}}
}

// Routers of earlier versions know no message of its own for this. Whatever they make of it, these promises must hold.
// Invariant: P27
func TestCloseTakesTheRouteAndIsAcknowledgedAsARelease(t *testing.T) {
	run(t, []string{"a"}, func(w *world) {
		w.serve("a", nil)
		p := w.joined(route("one", "10.0.0.1"), route("two", "10.0.0.2"))
		one := sandboxid.MustKey("one")
		found, ok := w.cache.Find(one)
		require.True(t, ok)
		w.admissions.give()
		p.send(2, closing("one")) // and no question was asked
		for range 3 {             // pings go on meanwhile
			m, err := p.Recv()
			require.NoError(t, err)
			require.Nil(t, m.GetAck(), "acknowledged before the answer was read: %v", m)
		}
		require.Equal(t, []string{"two"}, w.ids())
		require.False(t, w.cache.Holds(one, found), "a request between its lookup and its admission would pass")
		w.admissions.read()
		require.EqualValues(t, 2, p.ack())

		p.send(3, push(route("one", "10.0.0.1")))
		p.acks(3)
		require.Equal(t, []string{"one", "two"}, w.ids(), "the sandbox got its route again")
	})
}

// Invariant: I4, P27
func TestCloseLeavesAQuiescedSandboxQuiesced(t *testing.T) {
	run(t, []string{"a"}, func(w *world) {
		w.serve("a", nil)
		p := w.joined(route("one", "10.0.0.1"))
		one := sandboxid.MustKey("one")
		p.send(0, &controlv1.AllocatorMessage{Message: &controlv1.AllocatorMessage_Quiesce{Quiesce: &controlv1.Quiesce{
			Number: 1, Questions: []*controlv1.Question{{SandboxId: "one"}},
		}}})
		require.EqualValues(t, 1, p.next().GetQuiesced().GetNumber())
		p.send(2, closing("one"))
		require.EqualValues(t, 2, p.ack())
		answer, err := w.cache.Lookup(w.t.Context(), one)
		require.NoError(t, err)
		require.Equal(t, routecache.Quiesced, answer.Status)
		p.send(0, &controlv1.AllocatorMessage{Message: &controlv1.AllocatorMessage_Resume{Resume: &controlv1.Resume{SandboxIds: []string{"one"}}}})
		synctest.Wait()
		require.Empty(t, w.ids(), "the end of the question brought the route back")
		require.Zero(t, w.cache.Stats().Quiesced)
	})
}

// The sandbox may be about to sleep because it was idle. A request that comes now tells the leader in time.
func TestRequestAfterACloseAsksAtOnce(t *testing.T) {
	run(t, []string{"a"}, func(w *world) {
		w.serve("a", nil)
		p := w.joined(route("one", "10.0.0.1"))
		p.send(2, closing("one"))
		require.EqualValues(t, 2, p.ack())
		one := sandboxid.MustKey("one")
		answers := make(chan routecache.Answer, 1)
		ask := func(how func(context.Context, sandboxid.Key) (routecache.Answer, error)) *controlv1.Resolve {
			go func() {
				if a, err := how(w.t.Context(), one); err == nil {
					answers <- a
				}
			}()
			return p.next().GetResolve()
		}
		require.False(t, ask(w.cache.Lookup).GetWake())
		terms := route("one", "10.0.0.1")
		terms.Access, terms.AccessSecret = controlv1.Access_ACCESS_TOKEN, make([]byte, 32)
		p.send(0, &controlv1.AllocatorMessage{Message: &controlv1.AllocatorMessage_Resolved{Resolved: &controlv1.Resolved{
			SandboxId: "one", Answer: &controlv1.Resolved_Asleep{Asleep: &controlv1.Asleep{Route: terms, Wakeable: true}},
		}}})
		a := <-answers
		require.Equal(t, routecache.Asleep, a.Status)
		require.Equal(t, routecache.Token, a.Route.Terms.Access)
		require.Equal(t, []bool{true, false}, []bool{a.Wakeable, a.Busy})

		wake := ask(w.cache.Wake)
		require.True(t, wake.GetWake())
		require.Equal(t, "one", wake.GetSandboxId())
		p.send(0, &controlv1.AllocatorMessage{Message: &controlv1.AllocatorMessage_Resolved{Resolved: &controlv1.Resolved{
			SandboxId: "one", Answer: &controlv1.Resolved_Asleep{Asleep: &controlv1.Asleep{Route: terms, Busy: true}},
		}}})
		a = <-answers
		require.Equal(t, []bool{false, true}, []bool{a.Wakeable, a.Busy})
		require.Empty(t, w.ids())
	})
}

func TestSleeperWithAnInvalidRouteEndsTheStream(t *testing.T) {
	run(t, []string{"a"}, func(w *world) {
		w.serve("a", nil)
		p := w.joined()
		p.send(0, &controlv1.AllocatorMessage{Message: &controlv1.AllocatorMessage_Resolved{Resolved: &controlv1.Resolved{
			SandboxId: "one", Answer: &controlv1.Resolved_Asleep{Asleep: &controlv1.Asleep{Wakeable: true}},
		}}})
		<-p.Context().Done()
		w.joined()
	})
}
