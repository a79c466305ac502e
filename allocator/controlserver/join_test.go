package controlserver

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	"google.golang.org/grpc/codes"

	"github.com/berth-sandbox/berth/allocator/core"
	controlv1 "github.com/berth-sandbox/berth/api/control/v1"
)

// After a restore from a backup, the leader's term may be lower than a term that a router has
// seen, or equal to it, or higher.
// Invariant: I3, P12
func TestRouterAheadOfTheJournalRevealsARestore(t *testing.T) {
	for name, c := range map[string]struct {
		journal        string
		term, position uint64
		restored       uint64 // up to this term
		earlier        string
		left           []string
	}{
		"as far as it is":                    {"j", 7, 110, 0, "", nil},
		"an earlier term":                    {"j", 6, 99, 0, "", nil},
		"no journal named":                   {"", 7, 0, 0, "", nil},
		"a later term":                       {"j", 9, 0, 9, "", nil},
		"the same":                           {"", 9, 0, 9, "", nil},
		"another leader's writes":            {"j", 7, 111, 7, "", nil},
		"writes before that are gone":        {"j", 6, 100, 6, "", nil},
		"another journal":                    {"k", 9, 500, 0, "k", nil},
		"another journal, and the same term": {"k", 7, 111, 0, "k", nil},
		"another journal, after this one":    {"k", 3, 5, 3, "", []string{"i", "j"}},
		"another journal, after others":      {"k", 3, 5, 0, "k", []string{"h", "i"}},
	} {
		t.Run(name, func(t *testing.T) {
			run(t, func(w *world) {
				for _, serving := range []bool{true, false} {
					for _, deposed := range []bool{false, true} {
						w.leader.deposed.Store(deposed)
						w.leader.restored.Store(0)
						stream := w.open()
						m := join(testRouter, c.term)
						m.GetJoin().Journal, m.GetJoin().Position, m.GetJoin().Serving, m.GetJoin().LeftJournals = c.journal, c.position, serving, c.left
						require.NoError(t, stream.Send(m))
						events := w.leader.seen()
						switch {
						case deposed:
							require.Empty(t, events)
							require.Zero(t, w.leader.restored.Load(), "a leader that may be deposed must not begin the journal anew")
							fails(t, stream, codes.FailedPrecondition, "is not certain to hold the lease")
						case c.restored == 0:
							var want []core.Event
							if serving && c.earlier != "" {
								want = append(want, core.EarlierSeen{Journal: c.earlier, MaxStale: maxStale})
							}
							joined, ok := events[len(events)-1].(core.SessionJoined)
							require.True(t, ok, "%#v", events)
							require.Equal(t, append(want, core.SessionJoined{Session: testRouter, Stream: joined.Stream, MaxStale: maxStale}), events)
							require.Zero(t, w.leader.restored.Load())
						default:
							require.Equal(t, c.restored, w.leader.restored.Load())
							require.Empty(t, events)
							fails(t, stream, codes.FailedPrecondition, "begun anew")
						}
						_ = stream.CloseSend()
						w.leader.seen()
					}
				}
			})
		})
	}
}

// The next leader counts its term from the highest one that a router has seen.
func TestImpossibleTermIsRefused(t *testing.T) {
	run(t, func(w *world) {
		for _, journal := range []string{"", "j", "k"} {
			stream := w.open()
			m := join(testRouter, core.MaxTerm+1)
			m.GetJoin().Journal, m.GetJoin().LeftJournals, m.GetJoin().Serving = journal, []string{"j"}, true
			require.NoError(t, stream.Send(m))
			fails(t, stream, codes.InvalidArgument, "join.highest_term 9007199254740993: must be 9007199254740992 at most")
			require.Empty(t, w.leader.seen())
			require.Zero(t, w.leader.restored.Load())
		}
		stream := w.open()
		require.NoError(t, stream.Send(join(testRouter, core.MaxTerm)))
		fails(t, stream, codes.FailedPrecondition, "begun anew")
		require.EqualValues(t, core.MaxTerm, w.leader.restored.Load())
	})
}

// Invariant: P12
func TestJoinIsValidated(t *testing.T) {
	for name, c := range map[string]struct {
		first *controlv1.RouterMessage
		code  codes.Code
		says  string
	}{
		"not a Join":        {ping(1), codes.InvalidArgument, "Join"},
		"nothing":           {&controlv1.RouterMessage{}, codes.InvalidArgument, "Join"},
		"no router ID":      {join("", 0), codes.InvalidArgument, "router_id"},
		"short router ID":   {join("router-01234567", 0), codes.InvalidArgument, "router_id"},
		"long router ID":    {join(strings.Repeat("a", 65), 0), codes.InvalidArgument, "router_id"},
		"strange router ID": {join("router_0123456789", 0), codes.InvalidArgument, "router_id"},
		"line feed":         {join(testRouter+"\n", 0), codes.InvalidArgument, "router_id"},
		"reserved router ID": {join(core.EarlierSession("j0"), 0), codes.InvalidArgument,
			`join.router_id "earlier-journal-j0": earlier-journal- is reserved for routers of an earlier journal`},
		"newer term seen": {join(testRouter, 8), codes.FailedPrecondition, "begun anew"},
	} {
		t.Run(name, func(t *testing.T) {
			run(t, func(w *world) {
				stream := w.open()
				require.NoError(t, stream.Send(c.first))
				fails(t, stream, c.code, c.says)
				require.Empty(t, w.leader.seen(), "a session that was refused became known")
			})
		})
	}
	for _, id := range []string{strings.Repeat("a", 16), strings.Repeat("0", 64)} {
		run(t, func(w *world) {
			stream := w.open()
			require.NoError(t, stream.Send(join(id, 7)))
			require.Equal(t, []core.Event{core.SessionJoined{Session: id, Stream: 1, MaxStale: maxStale}}, w.leader.seen())
		})
	}
}

// It may have become longer than that of the allocators because theirs was lowered. Its session must go
// on, so that its acknowledgements and its Goodbye arrive.
// Invariant: I3
func TestRouterWithLongerMaxStaleJoinsWithItsOwn(t *testing.T) {
	joins := func(nanos uint64) *controlv1.RouterMessage {
		m := join(testRouter, 0)
		m.GetJoin().MaxStaleNanos = nanos
		return m
	}
	for _, nanos := range []uint64{0, uint64(MaxMaxStale) + 1, 1<<64 - 1} {
		run(t, func(w *world) {
			stream := w.open()
			require.NoError(t, stream.Send(joins(nanos)))
			fails(t, stream, codes.InvalidArgument, "must be 1 to 86400000000000 (24h0m0s)")
			require.Empty(t, w.leader.seen(), "a session that was refused became known")
		})
	}
	for _, nanos := range []uint64{1, uint64(maxStale), uint64(maxStale) + 1, uint64(MaxMaxStale)} {
		seen, logs := observer.New(zap.WarnLevel)
		run(t, func(w *world) {
			w.o.Log = zap.New(seen)
			require.NoError(t, w.open().Send(joins(nanos)))
			require.Equal(t, []core.Event{core.SessionJoined{Session: testRouter, Stream: 1, MaxStale: time.Duration(nanos)}}, w.leader.seen())
		})
		require.Equal(t, nanos > uint64(maxStale), logs.Len() > 0, "%v", logs.All())
	}
}

// The leader learns the hash with the session, and the secret with a report of deaths only.
// Invariant: I3
func TestSecretOfTheGatewayProvesDeaths(t *testing.T) {
	secret := bytes.Repeat([]byte{7}, 32)
	hash := sha256.Sum256(secret)
	run(t, func(w *world) {
		m := join(testRouter, 0)
		m.GetJoin().GatewayHash = hash[:]
		stream := w.open()
		require.NoError(t, stream.Send(m))
		require.Equal(t, []core.Event{core.SessionJoined{Session: testRouter, Stream: 1, MaxStale: maxStale, Gateway: hash}}, w.leader.seen())
		dead := &controlv1.Dead{RouterIds: []string{"router-of-before-0123"}, GatewaySecret: secret}
		require.NoError(t, stream.Send(&controlv1.RouterMessage{Message: &controlv1.RouterMessage_Dead{Dead: dead}}))
		require.Equal(t, []core.Event{core.SessionDead{Session: "router-of-before-0123", By: testRouter, Gateway: hash}}, w.leader.seen())
	})
	run(t, func(w *world) {
		m := join(testRouter, 0)
		m.GetJoin().GatewayHash = hash[:31]
		stream := w.open()
		require.NoError(t, stream.Send(m))
		fails(t, stream, codes.InvalidArgument, "join.gateway_hash: 31 bytes: must have 32, or none")
		require.Empty(t, w.leader.seen())
	})
}

func TestStreamWithoutJoinIsEnded(t *testing.T) {
	run(t, func(w *world) {
		began := time.Now()
		fails(t, w.open(), codes.InvalidArgument, "Join")
		require.Equal(t, joinWait, time.Since(began))
	})
}

func TestFollowerNamesTheLeader(t *testing.T) {
	run(t, func(w *world) {
		w.Lead(nil)
		stream := w.open()
		if err := stream.Send(join(testRouter, 0)); !errors.Is(err, io.EOF) { // the stream may have ended already
			require.NoError(t, err)
		}
		m, err := stream.Recv()
		require.NoError(t, err)
		require.Equal(t, "10.0.0.9:9090", m.GetNotLeader().GetLeaderAddress())
		_, err = stream.Recv()
		require.ErrorIs(t, err, io.EOF)
		require.Empty(t, w.leader.seen())
	})
}

// Routers try again at once, so each attempt would submit a join and a leave.
func TestNoRouterJoinsAnUncertainLeader(t *testing.T) {
	seen, logs := observer.New(zap.InfoLevel)
	run(t, func(w *world) {
		w.o.Log = zap.New(seen)
		w.leader.deposed.Store(true)
		for range 10 {
			stream := w.open()
			require.NoError(t, stream.Send(join(testRouter, 0)))
			require.Empty(t, w.leader.seen(), "a session that was refused became known")
			fails(t, stream, codes.FailedPrecondition, "is not certain to hold the lease")
		}
		require.Zero(t, logs.Len(), "%v", logs.All())
		w.leader.deposed.Store(false)
		w.joined()
	})
}
