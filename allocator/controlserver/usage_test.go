package controlserver

import (
	"context"
	"fmt"
	"math"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"google.golang.org/grpc/codes"

	"github.com/berth-sandbox/berth/allocator/core"
	controlv1 "github.com/berth-sandbox/berth/api/control/v1"
	"github.com/berth-sandbox/berth/api/openapi"
)

// egressRouter opens the stream of an egress router. snapshot: it gets one.
func (w *world) egressRouter(name string, snapshot bool) router {
	w.t.Helper()
	stream := w.open()
	m := egressJoin()
	m.GetJoin().RouterId = strings.Replace(testRouter, "router", name, 1)
	require.NoError(w.t, stream.Send(m))
	joined, ok := w.leader.seen()[0].(core.SessionJoined)
	require.True(w.t, ok)
	if snapshot {
		require.True(w.t, w.Deliver(7, core.SendSnapshot{Stream: joined.Stream, Sequence: 1}))
		m, err := stream.Recv()
		require.NoError(w.t, err)
		require.NotNil(w.t, m.GetSnapshot())
		m, err = stream.Recv()
		require.NoError(w.t, err)
		require.NotNil(w.t, m.GetCredentials())
	}
	return stream
}

// asked is the next message to a router, which must be one about the use of a sandbox.
func asked(t *testing.T, r router) *controlv1.AskEgressUsage {
	t.Helper()
	m, err := r.Recv()
	require.NoError(t, err)
	require.Equal(t, []any{uint64(7), "j", uint64(0)}, []any{m.GetTerm(), m.GetJournal(), m.GetSequence()})
	require.NotNil(t, m.GetAskEgressUsage(), "%v", m)
	return m.GetAskEgressUsage()
}

func say(t *testing.T, r router, u *controlv1.EgressUsage) {
	t.Helper()
	require.NoError(t, r.Send(&controlv1.RouterMessage{Message: &controlv1.RouterMessage_EgressUsage{EgressUsage: u}}))
}

// usage begins a question about a sandbox.
func (w *world) usage(id string) <-chan openapi.SandboxEgress {
	result := make(chan openapi.SandboxEgress, 1)
	go func() { result <- w.EgressUsage(context.Background(), id) }()
	return result
}

func to(host, reason string, count, ageMillis uint64) *controlv1.EgressDestination {
	return &controlv1.EgressDestination{Host: host, Port: 443, Reason: reason, Count: count, AgeMillis: ageMillis}
}

// Invariant: P39
func TestUseIsTheSumOfAllGateways(t *testing.T) {
	run(t, func(w *world) {
		w.o.AccessKey = accessKey(t)
		a, b, ingress := w.egressRouter("a", true), w.egressRouter("b", true), w.open()
		require.NoError(t, ingress.Send(join(testRouter, 0)))
		w.leader.seen()
		began, result := time.Now(), w.usage("k3x9")
		qa, qb := asked(t, a), asked(t, b)
		require.Equal(t, "k3x9", qa.GetSandboxId())
		say(t, a, &controlv1.EgressUsage{Number: qa.GetNumber() + 1, Known: true, Admitted: 1000}) // of no question
		say(t, a, &controlv1.EgressUsage{
			Number: qa.GetNumber(), Known: true, Admitted: 3, Refused: 1, Open: 2, SentBytes: 10, ReceivedBytes: math.MaxUint64,
			Destinations: []*controlv1.EgressDestination{to("a.example.com", "", 3, 5000), to("b.example.com", "egress_refused", 1, 9000)},
		})
		say(t, a, &controlv1.EgressUsage{Number: qa.GetNumber(), Known: true, Admitted: 1000}) // a second one
		say(t, b, &controlv1.EgressUsage{
			Number: qb.GetNumber(), Known: true, Admitted: 4, SentBytes: 5,
			Destinations: []*controlv1.EgressDestination{to("a.example.com", "", 4, 1000)},
		})
		got := <-result
		require.Zero(t, time.Since(began))
		require.Equal(t, openapi.SandboxEgress{
			Admitted: 7, Refused: 1, Open: 2, SentBytes: 15, ReceivedBytes: 1 << 53, Gateways: 2,
			Destinations: []openapi.EgressDestination{
				{Host: "a.example.com", Port: 443, Count: 7, LastAt: began.UTC().Add(-time.Second)},
				{Host: "b.example.com", Port: 443, Count: 1, Reason: "egress_refused", LastAt: began.UTC().Add(-9 * time.Second)},
			},
		}, got)
		require.Empty(t, w.questions)
	})
}

// Invariant: P39
func TestSilentGatewaysAreCountedAndNotWaitedForLong(t *testing.T) {
	run(t, func(w *world) {
		require.Equal(t, openapi.SandboxEgress{Destinations: []openapi.EgressDestination{}}, <-w.usage("k3x9"))
		w.o.AccessKey = accessKey(t)
		a, b, c := w.egressRouter("a", true), w.egressRouter("b", true), w.egressRouter("c", false)
		began, result := time.Now(), w.usage("k3x9")
		qa := asked(t, a)
		say(t, a, &controlv1.EgressUsage{Number: qa.GetNumber()})
		got := <-result
		require.Equal(t, usageWait, time.Since(began))
		require.Equal(t, []int{3, 2}, []int{got.Gateways, got.GatewaysSilent})
		say(t, b, &controlv1.EgressUsage{Number: asked(t, b).GetNumber()}) // too late
		synctest.Wait()
		require.Empty(t, w.questions)
		require.Len(t, w.streams, 3)
		for id, st := range w.streams {
			if !st.hasSnapshot {
				w.Deliver(7, core.SendSnapshot{Stream: id, Sequence: 1})
			}
		}
		m, err := c.Recv()
		require.NoError(t, err)
		require.NotNil(t, m.GetSnapshot(), "the first message is a snapshot")
	})
}

// Invariant: P39
func TestQuestionsAboutUseAreBounded(t *testing.T) {
	s := newServer(t, zap.NewNop())
	s.Lead(&fakeLeader{})
	st := s.add(true)
	st.hasSnapshot = true
	for range 2 * maxQuestions {
		_, _, gateways := s.askEgress("k3x9")
		require.Equal(t, 1, gateways)
	}
	require.Len(t, s.questions, maxQuestions)
	require.Len(t, st.queue, maxQuestions)
	for number := range s.questions {
		s.endQuestion(number)
	}
	for len(st.queue) <= queueSize/2 {
		st.queue <- nil
	}
	_, q, _ := s.askEgress("k3x9")
	require.Zero(t, cap(q.answers), "facts need the rest of the queue")
}

// Invariant: P39
func TestAnswersAboutUseAreCheckedAndCutToTheLatest(t *testing.T) {
	sum := usage{all: map[place]visits{}}
	for i := range 40 {
		for _, reason := range []string{"", "egress_refused"} {
			sum.add(&controlv1.EgressUsage{Destinations: []*controlv1.EgressDestination{to(fmt.Sprintf("%d.example.com", i), reason, 1, uint64(1000*i))}})
		}
	}
	got := sum.result().Destinations
	require.Len(t, got, 64)
	require.Equal(t, "0.example.com", got[0].Host)
	require.Equal(t, "31.example.com", got[63].Host)

	for name, c := range map[string]struct {
		change func(*controlv1.EgressDestination)
		says   string
	}{
		"no host":       {func(d *controlv1.EgressDestination) { d.Host = "" }, "host: 0 bytes"},
		"a long host":   {func(d *controlv1.EgressDestination) { d.Host = strings.Repeat("a", 254) }, "host: 254 bytes"},
		"no port":       {func(d *controlv1.EgressDestination) { d.Port = 0 }, "port 0"},
		"a large port":  {func(d *controlv1.EgressDestination) { d.Port = 1 << 16 }, "port 65536"},
		"not a word":    {func(d *controlv1.EgressDestination) { d.Reason = "<b>" }, "reason"},
		"a long reason": {func(d *controlv1.EgressDestination) { d.Reason = strings.Repeat("a", 65) }, "reason"},
	} {
		t.Run(name, func(t *testing.T) {
			run(t, func(w *world) {
				w.o.AccessKey = accessKey(t)
				stream, d := w.egressRouter("a", true), to("a.example.com", "", 1, 1)
				c.change(d)
				say(t, stream, &controlv1.EgressUsage{Destinations: []*controlv1.EgressDestination{d}})
				fails(t, stream, codes.InvalidArgument, c.says)
			})
		})
	}
	require.ErrorContains(t, checkUsage(&controlv1.EgressUsage{Destinations: make([]*controlv1.EgressDestination, 65)}), "65 exceed the limit of 64")
}
