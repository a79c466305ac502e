package controlserver

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/proto"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/api/activity"
	controlv1 "github.com/berth-sandbox/berth/api/control/v1"
	"github.com/berth-sandbox/berth/internal/bootclock"
)

const (
	instance = "router-0123456789abcdef"
	maxStale = 15 * time.Minute
)

// fakeLeader notes the events, and plays the core with react.
type fakeLeader struct {
	deposed  atomic.Bool
	restored atomic.Uint64 // the term
	react    func(core.Event)

	mu     sync.Mutex
	events []core.Event
}

func (l *fakeLeader) Submit(ev core.Event) {
	l.mu.Lock()
	l.events = append(l.events, ev)
	l.mu.Unlock()
	if l.react != nil {
		l.react(ev)
	}
}

func (l *fakeLeader) Valid() bool { return !l.deposed.Load() }

func (l *fakeLeader) Term() uint64 { return 7 }

func (l *fakeLeader) Journal() string { return "j" }

func (l *fakeLeader) Began() uint64 { return 100 }

func (l *fakeLeader) Position() uint64 { return 110 }

func (l *fakeLeader) Restored(term uint64) { l.restored.Store(term) }

// seen are the events since the last call.
func (l *fakeLeader) seen() []core.Event {
	synctest.Wait()
	l.mu.Lock()
	defer l.mu.Unlock()
	events := l.events
	l.events = nil
	return events
}

// world is a control server in a synctest bubble, and routers that connect to it.
type world struct {
	*Server
	t      *testing.T
	leader *fakeLeader
	client controlv1.ControlClient
}

type router = grpc.BidiStreamingClient[controlv1.RouterMessage, controlv1.AllocatorMessage]

func run(t *testing.T, f func(*world)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		// The connection's timers keep the bubble's time going also when everybody
		// waits in vain.
		defer time.AfterFunc(time.Hour, func() { panic("what the test waits for does not happen") }).Stop()
		w := &world{t: t, leader: &fakeLeader{}, Server: New(maxStale, func() string { return "10.0.0.9:9090" }, zap.NewNop())}
		w.Lead(w.leader)
		listener := bufconn.Listen(1 << 16)
		server := grpc.NewServer()
		controlv1.RegisterControlServer(server, w.Server)
		served := make(chan error, 1)
		go func() { served <- server.Serve(listener) }()
		conn, err := grpc.NewClient("passthrough:///allocator", grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }))
		require.NoError(t, err)
		w.client = controlv1.NewControlClient(conn)
		defer func() {
			server.Stop()
			conn.Close()
			require.NoError(t, <-served)
		}()
		f(w)
	})
}

// open opens a stream.
func (w *world) open() router {
	w.t.Helper()
	stream, err := w.client.Session(w.t.Context())
	require.NoError(w.t, err)
	return stream
}

// A journal that was restored from a backup may have the same leader's term again, or its
// next one, or none as high.
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
		"of a version that does not say":     {"", 7, 0, 0, "", nil},
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
						m := join(instance, c.term)
						m.GetJoin().Journal, m.GetJoin().Position, m.GetJoin().Serving, m.GetJoin().Left = c.journal, c.position, serving, c.left
						require.NoError(t, stream.Send(m))
						events := w.leader.seen()
						switch {
						case deposed:
							require.Empty(t, events)
							require.Zero(t, w.leader.restored.Load(), "who may be deposed begins nothing")
							fails(t, stream, codes.FailedPrecondition, "is not certain to hold the lease")
						case c.restored == 0:
							var want []core.Event
							if serving && c.earlier != "" {
								want = append(want, core.EarlierSeen{Journal: c.earlier})
							}
							joined, ok := events[len(events)-1].(core.SessionJoined)
							require.True(t, ok, "%#v", events)
							require.Equal(t, append(want, core.SessionJoined{Session: instance, Stream: joined.Stream}), events)
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

func TestRefusedRouterOfAnEarlierJournalCounts(t *testing.T) {
	for name, change := range map[string]func(*controlv1.Join){
		"it serves for too long": func(j *controlv1.Join) { j.MaxStaleNanos = uint64(maxStale) + 1 },
	} {
		t.Run(name, func(t *testing.T) {
			run(t, func(w *world) {
				stream := w.open()
				m := join(instance, 3)
				m.GetJoin().Journal, m.GetJoin().Serving = "k", true
				change(m.GetJoin())
				require.NoError(t, stream.Send(m))
				require.Equal(t, []core.Event{core.EarlierSeen{Journal: "k"}}, w.leader.seen())
				_, err := stream.Recv()
				require.Equal(t, codes.FailedPrecondition, status.Code(err))
			})
		})
	}
}

// Later leaders count on from the highest term that was seen.
func TestImpossibleTermIsRefused(t *testing.T) {
	run(t, func(w *world) {
		for _, journal := range []string{"", "j", "k"} {
			stream := w.open()
			m := join(instance, core.TermMost+1)
			m.GetJoin().Journal, m.GetJoin().Left, m.GetJoin().Serving = journal, []string{"j"}, true
			require.NoError(t, stream.Send(m))
			fails(t, stream, codes.InvalidArgument, "join.highest_term 9007199254740993: must be 9007199254740992 at most")
			require.Empty(t, w.leader.seen())
			require.Zero(t, w.leader.restored.Load())
		}
		stream := w.open()
		require.NoError(t, stream.Send(join(instance, core.TermMost)))
		fails(t, stream, codes.FailedPrecondition, "begun anew")
		require.EqualValues(t, core.TermMost, w.leader.restored.Load())
	})
}

func join(id string, term uint64) *controlv1.RouterMessage {
	return &controlv1.RouterMessage{Message: &controlv1.RouterMessage_Join{Join: &controlv1.Join{InstanceId: id, HighestTerm: term}}}
}

func ping(nonce uint64) *controlv1.RouterMessage {
	return &controlv1.RouterMessage{Message: &controlv1.RouterMessage_Ping{Ping: &controlv1.Ping{Nonce: nonce}}}
}

// joined opens a stream that has joined, and returns its number.
func (w *world) joined() (router, uint64) {
	w.t.Helper()
	stream := w.open()
	require.NoError(w.t, stream.Send(join(instance, 0)))
	events := w.leader.seen()
	require.NotEmpty(w.t, events)
	joined, ok := events[len(events)-1].(core.SessionJoined)
	require.True(w.t, ok, "%#v", events)
	require.Equal(w.t, instance, joined.Session)
	return stream, joined.Stream
}

// fails reads up to the end of the stream and requires its status.
func fails(t *testing.T, stream router, code codes.Code, says string) {
	t.Helper()
	for {
		if _, err := stream.Recv(); err != nil {
			require.Equal(t, code, status.Code(err), err)
			require.Contains(t, err.Error(), says)
			return
		}
	}
}

func sandbox(id string) core.Sandbox {
	return core.Sandbox{Binding: core.Binding{ID: id}, IP: netip.MustParseAddr("10.0.0.1"), DefaultPort: 8080}
}

func TestJoinIsValidated(t *testing.T) {
	for name, c := range map[string]struct {
		first *controlv1.RouterMessage
		code  codes.Code
		says  string
	}{
		"not a Join":       {ping(1), codes.InvalidArgument, "Join"},
		"nothing":          {&controlv1.RouterMessage{}, codes.InvalidArgument, "Join"},
		"no instance":      {join("", 0), codes.InvalidArgument, "instance_id"},
		"short instance":   {join("router-01234567", 0), codes.InvalidArgument, "instance_id"},
		"long instance":    {join(strings.Repeat("a", 65), 0), codes.InvalidArgument, "instance_id"},
		"strange instance": {join("router_0123456789", 0), codes.InvalidArgument, "instance_id"},
		"line feed":        {join(instance+"\n", 0), codes.InvalidArgument, "instance_id"},
		"newer term seen":  {join(instance, 8), codes.FailedPrecondition, "begun anew"},
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
			require.Equal(t, []core.Event{core.SessionJoined{Session: id, Stream: 1}}, w.leader.seen())
		})
	}
}

func TestRouterWithALargerMaxStaleIsRefused(t *testing.T) {
	joins := func(nanos uint64) *controlv1.RouterMessage {
		m := join(instance, 0)
		m.GetJoin().MaxStaleNanos = nanos
		return m
	}
	for nanos, says := range map[uint64]string{uint64(maxStale) + 1: "15m0.000000001s", uint64(time.Hour): "1h0m0s", 1<<64 - 1: "18446744073709551615 ns"} {
		run(t, func(w *world) {
			stream := w.open()
			require.NoError(t, stream.Send(joins(nanos)))
			require.Empty(t, w.leader.seen(), "a session that was refused became known")
			fails(t, stream, codes.FailedPrecondition, "the router's --max-stale, "+says+", is larger than the allocators' --max-stale, 15m0s: ")
		})
	}
	// Those of earlier versions do not say.
	for _, nanos := range []uint64{0, 1, uint64(maxStale)} {
		run(t, func(w *world) {
			require.NoError(t, w.open().Send(joins(nanos)))
			require.Equal(t, []core.Event{core.SessionJoined{Session: instance, Stream: 1}}, w.leader.seen())
		})
	}
}

func TestActivityNeedsASandboxOrAnAddress(t *testing.T) {
	for _, address := range []string{"", "10.0.0.300"} {
		run(t, func(w *world) {
			stream, n := w.joined()
			require.NoError(t, stream.Send(&controlv1.RouterMessage{Message: &controlv1.RouterMessage_Report{
				Report: &controlv1.Report{Activities: []*controlv1.Activity{{PodIp: address, Open: 1}}},
			}}))
			fails(t, stream, codes.InvalidArgument, "report.activities: needs sandbox_id or an IP address in pod_ip: ")
			require.Equal(t, []core.Event{core.SessionLeft{Session: instance, Stream: n}}, w.leader.seen())
		})
	}
}

func TestTooManyActivitiesAreRefused(t *testing.T) {
	many := make([]*controlv1.Activity, maxActivities+1)
	for i := range many {
		many[i] = &controlv1.Activity{SandboxId: "k3x9"}
	}
	for name, m := range map[string]*controlv1.RouterMessage{
		"report":   {Message: &controlv1.RouterMessage_Report{Report: &controlv1.Report{Activities: many}}},
		"quiesced": {Message: &controlv1.RouterMessage_Quiesced{Quiesced: &controlv1.Quiesced{Activities: many}}},
	} {
		t.Run(name, func(t *testing.T) {
			run(t, func(w *world) {
				stream, n := w.joined()
				require.NoError(t, stream.Send(m))
				fails(t, stream, codes.InvalidArgument, name+".activities: 5001 exceed the limit of 5000")
				require.Equal(t, []core.Event{core.SessionLeft{Session: instance, Stream: n}}, w.leader.seen())
			})
		})
	}
}

func TestDeathReportsAreValidatedAsAWhole(t *testing.T) {
	const other = "router-of-another-envoy"
	tooMany := make([]string, maxDead+1)
	for i := range tooMany {
		tooMany[i] = fmt.Sprintf("router-%020d", i)
	}
	dead := func(ids ...string) *controlv1.RouterMessage {
		return &controlv1.RouterMessage{Message: &controlv1.RouterMessage_Dead{Dead: &controlv1.Dead{InstanceIds: ids}}}
	}
	for name, c := range map[string]struct {
		ids  []string
		says string
	}{
		"itself":   {[]string{other, instance}, "itself"},
		"empty":    {[]string{other, ""}, "16 to 64"},
		"strange":  {[]string{other, "router_0123456789abcdef"}, "16 to 64"},
		"long":     {[]string{other, strings.Repeat("a", 65)}, "16 to 64"},
		"too many": {tooMany, "1001 exceed the limit of 1000"},
	} {
		t.Run(name, func(t *testing.T) {
			run(t, func(w *world) {
				stream, n := w.joined()
				require.NoError(t, stream.Send(dead(c.ids...)))
				require.Equal(t, []core.Event{core.SessionLeft{Session: instance, Stream: n}}, w.leader.seen())
				fails(t, stream, codes.InvalidArgument, c.says)
			})
		})
	}
	run(t, func(w *world) {
		stream, _ := w.joined()
		require.NoError(t, stream.Send(dead(tooMany[:maxDead]...)))
		events := w.leader.seen()
		require.Len(t, events, maxDead)
		require.Equal(t, core.SessionDead{Session: tooMany[0], By: instance}, events[0])
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
		if err := stream.Send(join(instance, 0)); !errors.Is(err, io.EOF) { // the stream may have ended already
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

func TestRouterMessagesBecomeEventsInOrder(t *testing.T) {
	run(t, func(w *world) {
		stream, n := w.joined()
		for _, m := range []*controlv1.RouterMessage{
			ping(11),
			{Message: &controlv1.RouterMessage_Ack{Ack: &controlv1.Ack{Sequence: 1}}},
			{Message: &controlv1.RouterMessage_Resolve{Resolve: &controlv1.Resolve{SandboxId: "k3x9"}}},
			{Message: &controlv1.RouterMessage_Report{Report: &controlv1.Report{Activities: []*controlv1.Activity{
				{SandboxId: "k3x9", AgeMillis: 1<<64 - 1, Open: 2, PodIp: "10.0.0.7", Kind: "bytes"}, {PodIp: "::ffff:10.0.0.8", Open: 1, Kind: "later"}, {SandboxId: "x7", Kind: "No word"}, {SandboxId: "x8"},
			}}}},
			{Message: &controlv1.RouterMessage_Report{Report: &controlv1.Report{Gateway: "e", Nonce: 7, TookMillis: 3}}},
			{Message: &controlv1.RouterMessage_Report{Report: &controlv1.Report{Blind: strings.Repeat("ü", 200)}}},
			{Message: &controlv1.RouterMessage_Quiesced{Quiesced: &controlv1.Quiesced{Number: 9, Activities: []*controlv1.Activity{{SandboxId: "k3x9", AgeMillis: 3, Kind: strings.Repeat("x", 33)}}, Blind: "the look timed out"}}},
			{Message: &controlv1.RouterMessage_Probed{Probed: &controlv1.Probed{SandboxId: "k3x9", Busy: true}}},
			{Message: &controlv1.RouterMessage_Probed{Probed: &controlv1.Probed{SandboxId: "x7"}}},
			{}, // of a kind that is not known yet
			{Message: &controlv1.RouterMessage_Goodbye{Goodbye: &controlv1.Goodbye{Looked: true}}},
		} {
			require.NoError(t, stream.Send(m))
		}
		synctest.Wait()
		w.Deliver(7, core.CloseStream{Stream: n, Left: true})
		_, err := stream.Recv()
		require.ErrorIs(t, err, io.EOF, "Goodbye ends the stream without an error")
		require.Equal(t, []core.Event{
			core.SessionPing{Session: instance, Stream: n, Nonce: 11},
			core.SessionAck{Session: instance, Stream: n, Sequence: 1},
			core.Resolve{Session: instance, Stream: n, ID: "k3x9"},
			core.Report{Stream: n, Activities: []core.Activity{
				{ID: "k3x9", Addr: netip.MustParseAddr("10.0.0.7"), Age: 100 * 365 * 24 * time.Hour, Open: 2, Kind: activity.Bytes}, {Addr: netip.MustParseAddr("10.0.0.8"), Open: 1, Kind: "later"}, {ID: "x7", Kind: activity.Unknown}, {ID: "x8", Kind: activity.Unknown},
			}},
			core.Report{Stream: n, Activities: []core.Activity{}, Gateway: "e", Nonce: 7, Took: 3 * time.Millisecond},
			core.Report{Stream: n, Activities: []core.Activity{}, Blind: strings.Repeat("ü", 128)},
			core.Quiesced{Stream: n, Number: 9, Activities: []core.Activity{{ID: "k3x9", Age: 3 * time.Millisecond, Kind: activity.Unknown}}, Blind: "the look timed out"},
			core.Probed{Stream: n, ID: "k3x9", Busy: true},
			core.Probed{Stream: n, ID: "x7"},
			core.SessionGoodbye{Session: instance, Stream: n, Looked: true},
			core.SessionLeft{Session: instance, Stream: n},
		}, w.leader.seen())
	})
}

func goodbye() *controlv1.RouterMessage {
	return &controlv1.RouterMessage{Message: &controlv1.RouterMessage_Goodbye{Goodbye: &controlv1.Goodbye{}}}
}

// A router that sees its stream end without an error looks for no other leader.
func TestGoodbyeIsAcknowledgedOnceDurable(t *testing.T) {
	for name, c := range map[string]struct {
		then func(w *world, stream uint64)
		code codes.Code
		says string
	}{
		"it is durable":           {func(w *world, n uint64) { w.Deliver(7, core.CloseStream{Stream: n, Left: true}) }, codes.OK, ""},
		"the replica stops first": {func(w *world, _ uint64) { w.Stop() }, codes.FailedPrecondition, "this replica is stopping"},
	} {
		t.Run(name, func(t *testing.T) {
			run(t, func(w *world) {
				stream, n := w.joined()
				require.NoError(t, stream.Send(goodbye()))
				require.NoError(t, stream.CloseSend())
				require.Equal(t, []core.Event{core.SessionGoodbye{Session: instance, Stream: n}}, w.leader.seen(), "the stream has ended already")
				c.then(w, n)
				if c.code == codes.OK {
					_, err := stream.Recv()
					require.ErrorIs(t, err, io.EOF)
				} else {
					fails(t, stream, c.code, c.says)
				}
			})
		})
	}
	t.Run("the lease may be lost", func(t *testing.T) {
		run(t, func(w *world) {
			stream, n := w.joined()
			w.leader.deposed.Store(true)
			require.NoError(t, stream.Send(goodbye()))
			require.NoError(t, stream.CloseSend())
			require.Equal(t, []core.Event{core.SessionLeft{Session: instance, Stream: n}}, w.leader.seen(), "it may come back")
			fails(t, stream, codes.FailedPrecondition, "is not certain to hold the lease")
		})
	})
	t.Run("the router does not wait", func(t *testing.T) {
		run(t, func(w *world) {
			ctx, cancel := context.WithCancel(w.t.Context())
			defer cancel()
			stream, err := w.client.Session(ctx)
			require.NoError(t, err)
			require.NoError(t, stream.Send(join(instance, 0)))
			require.Len(t, w.leader.seen(), 1)
			require.NoError(t, stream.Send(goodbye()))
			require.Len(t, w.leader.seen(), 1)
			cancel()
			require.Len(t, w.leader.seen(), 1, "its stream stays")
		})
	})
}

func TestEveryJoinedStreamSubmitsItsEnd(t *testing.T) {
	for name, leave := range map[string]func(*world, router, context.CancelFunc){
		"half closed":  func(_ *world, r router, _ context.CancelFunc) { _ = r.CloseSend() },
		"cancelled":    func(_ *world, _ router, cancel context.CancelFunc) { cancel() },
		"joined twice": func(_ *world, r router, _ context.CancelFunc) { _ = r.Send(join(instance, 0)) },
		"stopped":      func(w *world, _ router, _ context.CancelFunc) { w.Stop() },
	} {
		t.Run(name, func(t *testing.T) {
			run(t, func(w *world) {
				ctx, cancel := context.WithCancel(w.t.Context())
				defer cancel()
				stream, err := w.client.Session(ctx)
				require.NoError(t, err)
				require.NoError(t, stream.Send(join(instance, 0)))
				require.Equal(t, []core.Event{core.SessionJoined{Session: instance, Stream: 1}}, w.leader.seen())
				leave(w, stream, cancel)
				require.Equal(t, []core.Event{core.SessionLeft{Session: instance, Stream: 1}}, w.leader.seen())
				require.Empty(t, w.streams)
				require.True(t, w.Deliver(7, core.SendRelease{Stream: 1, IDs: []string{"late"}})) // to nobody
			})
		})
	}
}

func TestEffectsReachTheRouterInOrder(t *testing.T) {
	run(t, func(w *world) {
		stream, n := w.joined()
		k3x9 := sandbox("k3x9")
		k3x9.Ports = []uint16{8080, 49983}
		idle := sandbox("idle")
		idle.IdleTimeout, idle.MinBytes = 90*time.Second, 1024
		narrowed := sandbox("new")
		narrowed.Ports = []uint16{65535}
		for _, e := range []core.Effect{
			core.SendSnapshot{Stream: n, Sequence: 1, Routes: []core.Sandbox{k3x9}},
			core.SendPong{Stream: n, Nonce: 5},
			core.SendRoute{Stream: n, Sequence: 2, Sandbox: sandbox("new")},
			core.SendRoute{Stream: n, Sequence: 3, Sandbox: narrowed},
			core.SendRelease{Stream: n, Sequence: 4, IDs: []string{"k3x9", "x7"}},
			core.SendResolved{Stream: n, ID: "k3x9", Sandbox: &k3x9},
			core.SendResolved{Stream: n, ID: "gone", Gone: true},
			core.SendResolved{Stream: n, ID: "nobody"},
			core.SendResolved{Stream: n, ID: "starting", Starting: true, Hold: 1500 * time.Millisecond},
			core.SendResolved{Stream: n, ID: "idle", Sandbox: &idle},
			core.SendQuiesce{Stream: n, Number: 3, Questions: []core.Question{{ID: "k3x9", IP: netip.MustParseAddr("10.0.0.1")}, {ID: "idle", IP: netip.MustParseAddr("fd00::1"), MinBytes: 2048}}},
			core.SendProbe{Stream: n, ID: "k3x9", To: netip.MustParseAddrPort("10.0.0.1:9000"), Path: "/busy"},
			core.SendResume{Stream: n, IDs: []string{"idle"}},
		} {
			require.True(t, w.Deliver(7, e))
		}
		route := func(id string, ports ...uint32) *controlv1.Route {
			return &controlv1.Route{SandboxId: id, PodIp: "10.0.0.1", DefaultPort: 8080, Ports: ports}
		}
		for _, want := range []*controlv1.AllocatorMessage{
			{Term: 7, Sequence: 1, Message: &controlv1.AllocatorMessage_Snapshot{Snapshot: &controlv1.Snapshot{Last: true, Routes: []*controlv1.Route{route("k3x9", 8080, 49983)}}}},
			{Term: 7, Message: &controlv1.AllocatorMessage_Pong{Pong: &controlv1.Pong{Nonce: 5}}},
			{Term: 7, Sequence: 2, Message: &controlv1.AllocatorMessage_Route{Route: route("new")}},
			{Term: 7, Sequence: 3, Message: &controlv1.AllocatorMessage_Route{Route: route("new", 65535)}},
			{Term: 7, Sequence: 4, Message: &controlv1.AllocatorMessage_Release{Release: &controlv1.Release{SandboxIds: []string{"k3x9", "x7"}}}},
			{Term: 7, Message: &controlv1.AllocatorMessage_Resolved{Resolved: &controlv1.Resolved{SandboxId: "k3x9", Answer: &controlv1.Resolved_Route{Route: route("k3x9", 8080, 49983)}}}},
			{Term: 7, Message: &controlv1.AllocatorMessage_Resolved{Resolved: &controlv1.Resolved{SandboxId: "gone", Answer: &controlv1.Resolved_Gone{Gone: &controlv1.Gone{}}}}},
			{Term: 7, Message: &controlv1.AllocatorMessage_Resolved{Resolved: &controlv1.Resolved{SandboxId: "nobody", Answer: &controlv1.Resolved_Unknown{Unknown: &controlv1.Unknown{}}}}},
			{Term: 7, Message: &controlv1.AllocatorMessage_Resolved{Resolved: &controlv1.Resolved{SandboxId: "starting", Answer: &controlv1.Resolved_Starting{Starting: &controlv1.Starting{HoldMillis: 1500}}}}},
			{Term: 7, Message: &controlv1.AllocatorMessage_Resolved{Resolved: &controlv1.Resolved{SandboxId: "idle", Answer: &controlv1.Resolved_Route{Route: &controlv1.Route{SandboxId: "idle", PodIp: "10.0.0.1", DefaultPort: 8080, MinBytesPerMinute: 1024}}}}},
			{Term: 7, Message: &controlv1.AllocatorMessage_Quiesce{Quiesce: &controlv1.Quiesce{Number: 3, Questions: []*controlv1.Question{
				{SandboxId: "k3x9", PodIp: "10.0.0.1"}, {SandboxId: "idle", PodIp: "fd00::1", MinBytesPerMinute: 2048},
			}}}},
			{Term: 7, Message: &controlv1.AllocatorMessage_Probe{Probe: &controlv1.Probe{SandboxId: "k3x9", PodIp: "10.0.0.1", Port: 9000, Path: "/busy"}}},
			{Term: 7, Message: &controlv1.AllocatorMessage_Resume{Resume: &controlv1.Resume{SandboxIds: []string{"idle"}}}},
		} {
			want.Journal, want.Position = "j", 110
			got, err := stream.Recv()
			require.NoError(t, err)
			require.True(t, proto.Equal(want, got), "want %v, got %v", want, got)
		}
	})
}

func TestDeliverIgnoresOtherEffects(t *testing.T) {
	s := New(maxStale, func() string { return "" }, zap.NewNop())
	require.False(t, s.Deliver(7, core.CreatePod{}))
	require.False(t, s.Deliver(7, core.Claimed{}))
}

func TestOnlyTheLastSnapshotPartIsAcknowledged(t *testing.T) {
	for size, parts := range map[int]int{0: 1, 1: 1, snapshotPart: 1, snapshotPart + 1: 2, 3 * snapshotPart: 3} {
		e := core.SendSnapshot{Sequence: 9, Routes: make([]core.Sandbox, size)}
		for i := range e.Routes {
			e.Routes[i] = sandbox(fmt.Sprint(i))
		}
		messages := snapshot(7, e)
		require.Len(t, messages, parts, "%d routes", size)
		sent := 0
		for i, m := range messages {
			last := i == parts-1
			require.Equal(t, last, m.GetSnapshot().GetLast())
			require.Equal(t, last, m.GetSequence() == 9)
			require.EqualValues(t, 7, m.GetTerm())
			for _, r := range m.GetSnapshot().GetRoutes() {
				require.Equal(t, fmt.Sprint(sent), r.GetSandboxId())
				sent++
			}
		}
		require.Equal(t, size, sent)
	}
}

func TestSnapshotPartFitsTheGRPCLimit(t *testing.T) {
	longest := core.Sandbox{Binding: core.Binding{ID: strings.Repeat("x", 57)}, IP: netip.MustParseAddr("fd00:1111:2222:3333:4444:5555:6666:7777"), DefaultPort: 65535}
	for port := range uint16(64) { // as many as a pool can name
		longest.Ports = append(longest.Ports, 65535-64+port)
	}
	e := core.SendSnapshot{Routes: make([]core.Sandbox, snapshotPart)}
	for i := range e.Routes {
		e.Routes[i] = longest
	}
	require.Less(t, proto.Size(snapshot(1, e)[0]), 2<<20)
}

// A router leaves the journal that it is in for that of a snapshot.
func TestNoSnapshotIsSentWithoutAValidLease(t *testing.T) {
	run(t, func(w *world) {
		stream, n := w.joined()
		w.leader.deposed.Store(true)
		w.Deliver(7, core.SendSnapshot{Stream: n, Sequence: 1})
		m, err := stream.Recv()
		require.Equal(t, codes.FailedPrecondition, status.Code(err), "got %v", m)
	})
}

func TestNoPongWithoutAValidLease(t *testing.T) {
	run(t, func(w *world) {
		stream, n := w.joined()
		w.Deliver(7, core.SendSnapshot{Stream: n, Sequence: 1})
		w.Deliver(7, core.SendPong{Stream: n, Nonce: 1})
		for range 2 {
			_, err := stream.Recv()
			require.NoError(t, err)
		}
		w.leader.deposed.Store(true)
		w.Deliver(7, core.SendPong{Stream: n, Nonce: 2})
		m, err := stream.Recv()
		require.Equal(t, codes.FailedPrecondition, status.Code(err), "got %v", m)
		require.Equal(t, []core.Event{core.SessionLeft{Session: instance, Stream: n}}, w.leader.seen())
	})
}

// Routers try again at once: each attempt would be a join and a leave.
func TestNoRouterJoinsAnUncertainLeader(t *testing.T) {
	seen, logs := observer.New(zap.InfoLevel)
	run(t, func(w *world) {
		w.log = zap.New(seen)
		w.leader.deposed.Store(true)
		for range 10 {
			stream := w.open()
			require.NoError(t, stream.Send(join(instance, 0)))
			require.Empty(t, w.leader.seen(), "a session that was refused became known")
			fails(t, stream, codes.FailedPrecondition, "is not certain to hold the lease")
		}
		require.Zero(t, logs.Len(), "%v", logs.All())
		w.leader.deposed.Store(false)
		w.joined()
	})
}

func TestRoutersCountsConnectionsAndPongAge(t *testing.T) {
	run(t, func(w *world) {
		connected, _ := w.Routers()
		require.Zero(t, connected)
		_, _ = w.joined()
		other := w.open()
		require.NoError(t, other.Send(join("router-of-another-envoy", 0)))
		require.Len(t, w.leader.seen(), 1)
		connected, before := w.Routers()
		require.Equal(t, 2, connected)
		_, age := w.Routers()
		require.Greater(t, age, before, "no router was given a pong since it joined")
		age = bootclock.Now()
		for n := range uint64(2) {
			w.Deliver(7, core.SendPong{Stream: n + 1, Nonce: 1})
		}
		synctest.Wait()
		_, later := w.Routers()
		require.Less(t, later, bootclock.Now()-age, "counted from the last pong")
		require.NoError(t, other.CloseSend())
		w.leader.seen()
		connected, _ = w.Routers()
		require.Equal(t, 1, connected)
	})
}

// The lease is looked at when the pong is sent, not when the core decided on it.
func TestQueuedPongNeedsAValidLeaseWhenSent(t *testing.T) {
	run(t, func(w *world) {
		stream, n := w.joined()
		big := make([]core.Sandbox, 2*snapshotPart) // more than the stream takes while nobody reads
		for i := range big {
			big[i] = sandbox(strings.Repeat("x", 57))
		}
		w.Deliver(7, core.SendSnapshot{Stream: n, Sequence: 1, Routes: big})
		w.Deliver(7, core.SendPong{Stream: n, Nonce: 1})
		synctest.Wait()
		w.leader.deposed.Store(true)
		for {
			m, err := stream.Recv()
			if err != nil {
				require.Equal(t, codes.FailedPrecondition, status.Code(err))
				return
			}
			require.Nil(t, m.GetPong())
		}
	})
}

func TestOnlyTheSlowRouterIsCutOff(t *testing.T) {
	run(t, func(w *world) {
		slow, n := w.joined()
		other := w.open()
		require.NoError(t, other.Send(join("router-of-another-envoy", 0)))
		require.Len(t, w.leader.seen(), 1)
		received := make(chan int, 1)
		go func() {
			count := 0
			for {
				if _, err := other.Recv(); err != nil {
					received <- count
					return
				}
				count++
			}
		}()
		sent := 0
		for ; sent < 10*queueSize; sent++ { // far more than the queue and the stream's window hold
			require.True(t, w.Deliver(7, core.SendRelease{Stream: n, Sequence: uint64(sent), IDs: []string{strings.Repeat("x", 57)}}))
			w.Deliver(7, core.SendRelease{Stream: n + 1, Sequence: uint64(sent), IDs: []string{"x"}})
			synctest.Wait()
			if left := w.leader.seen(); len(left) > 0 {
				require.Equal(t, []core.Event{core.SessionLeft{Session: instance, Stream: n}}, left)
				break
			}
		}
		require.GreaterOrEqual(t, sent, queueSize)
		require.Less(t, sent, 3*queueSize, "what waits for a router is not bounded")
		fails(t, slow, codes.ResourceExhausted, "join again")
		w.Stop()
		require.Equal(t, sent+1, <-received)
	})
}

// There is room again as soon as something was sent, but what comes then would be
// acknowledged together with what is missing.
func TestCutStreamGetsNoMoreMessages(t *testing.T) {
	s := New(maxStale, func() string { return "" }, zap.NewNop())
	st, other := s.add(), s.add()
	push := func(st *stream, sequence uint64) {
		t.Helper()
		require.True(t, s.Deliver(7, core.SendRelease{Stream: st.id, Sequence: sequence, IDs: []string{"x"}}))
	}
	cut := func() bool {
		select {
		case <-st.cut:
			return true
		default:
			return false
		}
	}
	sequence := uint64(0)
	for range queueSize {
		sequence++
		push(st, sequence)
	}
	require.False(t, cut(), "cut off while there was room")
	push(st, sequence+1)
	require.True(t, cut(), "what does not fit into the queue is left out")
	require.Equal(t, codes.ResourceExhausted, status.Code(st.err))
	for range queueSize { // the writer goes on until it learns of that
		<-st.queue
	}
	push(st, sequence+2)
	require.Empty(t, st.queue, "queued after a gap")
	push(other, 1)
	require.Len(t, other.queue, 1)
}

func TestSecondJoinClosesOnlyTheOldStream(t *testing.T) {
	run(t, func(w *world) {
		first, n := w.joined()
		second, m := w.joined()
		require.NotEqual(t, n, m)
		w.Deliver(7, core.CloseStream{Stream: n}) // what the core makes of it
		fails(t, first, codes.Aborted, "another stream")
		require.Equal(t, []core.Event{core.SessionLeft{Session: instance, Stream: n}}, w.leader.seen())
		w.Deliver(7, core.SendRelease{Stream: m, Sequence: 2, IDs: []string{"k3x9"}})
		got, err := second.Recv()
		require.NoError(t, err)
		require.Equal(t, []string{"k3x9"}, got.GetRelease().GetSandboxIds())
	})
}

func TestDeclaredDeadRouterGetsThatError(t *testing.T) {
	run(t, func(w *world) {
		stream, n := w.joined()
		require.True(t, w.Deliver(7, core.CloseStream{Stream: n, Banned: true}))
		_, err := stream.Recv()
		require.True(t, controlv1.IsDeclaredDead(err), "%v", err)
		require.ErrorContains(t, err, "declared this router dead")
	})
	run(t, func(w *world) { // nobody else is
		stream, n := w.joined()
		require.True(t, w.Deliver(7, core.CloseStream{Stream: n}))
		_, err := stream.Recv()
		require.Equal(t, codes.Aborted, status.Code(err))
		require.False(t, controlv1.IsDeclaredDead(err), "%v", err)
	})
}

// With the real core behind it: the second stream gets a snapshot, the first ends.
func TestSecondJoinWithTheRealCore(t *testing.T) {
	run(t, func(w *world) {
		c, err := core.New(core.Config{Term: 7, MaxStale: time.Minute, Window: time.Second, Lease: time.Second, NewID: func() string { return "x" }, NewSuffix: func() string { return "x" }}, core.Instant{})
		require.NoError(t, err)
		_, err = c.Recover(core.State{})
		require.NoError(t, err)
		var mu sync.Mutex
		w.leader.react = func(ev core.Event) {
			mu.Lock()
			defer mu.Unlock()
			for events := []core.Event{ev}; len(events) > 0; events = events[1:] {
				for _, e := range c.Step(core.Instant{Boot: time.Second}, events[0]) {
					if _, ok := e.(core.Write); ok {
						events = append(events, core.Written{}, core.WriterReady{})
					}
					w.Deliver(7, e)
				}
			}
		}
		first, _ := w.joined()
		m, err := first.Recv()
		require.NoError(t, err)
		require.True(t, m.GetSnapshot().GetLast())
		second, _ := w.joinedAfter()
		m, err = second.Recv()
		require.NoError(t, err)
		require.EqualValues(t, 1, m.GetSequence())
		fails(t, first, codes.Aborted, "another stream")
		require.NoError(t, second.Send(ping(3)))
		m, err = second.Recv()
		require.NoError(t, err)
		require.EqualValues(t, 3, m.GetPong().GetNonce(), "the end of the old stream took the session with it")
	})
}

// joinedAfter is joined when the old stream's end may be among the events.
func (w *world) joinedAfter() (router, uint64) {
	w.t.Helper()
	stream := w.open()
	require.NoError(w.t, stream.Send(join(instance, 0)))
	for _, ev := range w.leader.seen() {
		if joined, ok := ev.(core.SessionJoined); ok {
			return stream, joined.Stream
		}
	}
	w.t.Fatal("the stream did not join")
	return nil, 0
}

func TestStopEndsPresentAndLaterStreams(t *testing.T) {
	run(t, func(w *world) {
		stream, _ := w.joined()
		waiting := w.open()
		synctest.Wait()
		began := time.Now()
		w.Stop()
		fails(t, stream, codes.FailedPrecondition, "stopping")
		fails(t, waiting, codes.FailedPrecondition, "stopping")
		fails(t, w.open(), codes.FailedPrecondition, "stopping")
		require.Equal(t, began, time.Now())
	})
}

// A router whose stream takes nothing must still be heard and be let go.
func TestBlockedSendHoldsUpNoOtherRouter(t *testing.T) {
	run(t, func(w *world) {
		stream, n := w.joined()
		big := make([]core.Sandbox, 5*snapshotPart)
		for i := range big {
			big[i] = sandbox(strings.Repeat("x", 57))
		}
		w.Deliver(7, core.SendSnapshot{Stream: n, Sequence: 1, Routes: big})
		synctest.Wait()
		require.NoError(t, stream.Send(ping(1)))
		require.Equal(t, []core.Event{core.SessionPing{Session: instance, Stream: n, Nonce: 1}}, w.leader.seen())
		w.Deliver(7, core.CloseStream{Stream: n})
		require.Equal(t, []core.Event{core.SessionLeft{Session: instance, Stream: n}}, w.leader.seen())
	})
}
