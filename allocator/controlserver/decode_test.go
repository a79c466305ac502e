package controlserver

import (
	"fmt"
	"io"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/api/activity"
	controlv1 "github.com/berth-sandbox/berth/api/control/v1"
)

func TestUnusableActivitiesAreRefused(t *testing.T) {
	many := make([]*controlv1.Activity, maxActivities+1)
	for i := range many {
		many[i] = &controlv1.Activity{SandboxId: "k3x9"}
	}
	for says, all := range map[string][]*controlv1.Activity{
		"5001 exceed the limit of 5000": many,
		"sandbox_id is missing":         {{SandboxId: "k3x9"}, {}},
	} {
		for name, m := range map[string]*controlv1.RouterMessage{
			"report":   {Message: &controlv1.RouterMessage_Report{Report: &controlv1.Report{Activities: all}}},
			"quiesced": {Message: &controlv1.RouterMessage_Quiesced{Quiesced: &controlv1.Quiesced{Activities: all}}},
		} {
			t.Run(name+": "+says, func(t *testing.T) {
				run(t, func(w *world) {
					stream, n := w.joined()
					require.NoError(t, stream.Send(m))
					fails(t, stream, codes.InvalidArgument, name+".activities: "+says)
					require.Equal(t, []core.Event{core.SessionLeft{Session: testRouter, Stream: n}}, w.leader.seen())
				})
			})
		}
	}
}

// Invariant: P12
func TestDeathReportsAreValidatedAsAWhole(t *testing.T) {
	const other = "router-of-another-envoy"
	tooMany := make([]string, maxDead+1)
	for i := range tooMany {
		tooMany[i] = fmt.Sprintf("router-%020d", i)
	}
	dead := func(ids ...string) *controlv1.RouterMessage {
		return &controlv1.RouterMessage{Message: &controlv1.RouterMessage_Dead{Dead: &controlv1.Dead{RouterIds: ids}}}
	}
	for name, c := range map[string]struct {
		ids  []string
		says string
	}{
		"itself":   {[]string{other, testRouter}, "itself"},
		"empty":    {[]string{other, ""}, "16 to 64"},
		"strange":  {[]string{other, "router_0123456789abcdef"}, "16 to 64"},
		"long":     {[]string{other, strings.Repeat("a", 65)}, "16 to 64"},
		"reserved": {[]string{other, core.EarlierSession("")}, "earlier-journal- is reserved"},
		"too many": {tooMany, "1001 exceed the limit of 1000"},
	} {
		t.Run(name, func(t *testing.T) {
			run(t, func(w *world) {
				stream, n := w.joined()
				require.NoError(t, stream.Send(dead(c.ids...)))
				require.Equal(t, []core.Event{core.SessionLeft{Session: testRouter, Stream: n}}, w.leader.seen())
				fails(t, stream, codes.InvalidArgument, c.says)
			})
		})
	}
	run(t, func(w *world) {
		stream, _ := w.joined()
		short := dead(other)
		short.GetDead().GatewaySecret = []byte("secret")
		require.NoError(t, stream.Send(short))
		w.leader.seen()
		fails(t, stream, codes.InvalidArgument, "dead.gateway_secret: 6 bytes: must have 32, or none")
	})
	run(t, func(w *world) {
		stream, _ := w.joined()
		require.NoError(t, stream.Send(dead(tooMany[:maxDead]...)))
		events := w.leader.seen()
		require.Len(t, events, maxDead)
		require.Equal(t, core.SessionDead{Session: tooMany[0], By: testRouter}, events[0])
	})
}

func TestRouterMessagesBecomeEventsInOrder(t *testing.T) {
	run(t, func(w *world) {
		stream, n := w.joined()
		for _, m := range []*controlv1.RouterMessage{
			ping(11),
			{Message: &controlv1.RouterMessage_Ack{Ack: &controlv1.Ack{Sequence: 1}}},
			{Message: &controlv1.RouterMessage_Resolve{Resolve: &controlv1.Resolve{SandboxId: "k3x9"}}},
			{Message: &controlv1.RouterMessage_Resolve{Resolve: &controlv1.Resolve{SandboxId: "k3x9", Wake: true}}},
			{Message: &controlv1.RouterMessage_Report{Report: &controlv1.Report{Activities: []*controlv1.Activity{
				{SandboxId: "k3x9", AgeMillis: 1<<64 - 1, OpenRequests: 2, Kind: "bytes"}, {SandboxId: "x6", OpenRequests: 1, Kind: "later"}, {SandboxId: "x7", Kind: "No word"}, {SandboxId: "x8"},
			}}}},
			{Message: &controlv1.RouterMessage_Report{Report: &controlv1.Report{Gateway: "e", Nonce: 7, TookMillis: 3}}},
			{Message: &controlv1.RouterMessage_Report{Report: &controlv1.Report{LookError: strings.Repeat("ü", 200)}}},
			{Message: &controlv1.RouterMessage_Quiesced{Quiesced: &controlv1.Quiesced{Number: 9, Activities: []*controlv1.Activity{{SandboxId: "k3x9", AgeMillis: 3, Kind: strings.Repeat("x", 33)}}, LookError: "the look timed out"}}},
			{Message: &controlv1.RouterMessage_Probed{Probed: &controlv1.Probed{SandboxId: "k3x9", Busy: true, Number: 5}}},
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
			core.SessionPing{Session: testRouter, Stream: n, Nonce: 11},
			core.SessionAck{Session: testRouter, Stream: n, Sequence: 1},
			core.Resolve{Session: testRouter, Stream: n, ID: "k3x9"},
			core.Resolve{Session: testRouter, Stream: n, ID: "k3x9", Wake: true},
			core.Report{Stream: n, Activities: []core.Activity{
				{ID: "k3x9", Age: 100 * 365 * 24 * time.Hour, Open: 2, Kind: activity.Bytes}, {ID: "x6", Open: 1, Kind: "later"}, {ID: "x7", Kind: activity.Unknown}, {ID: "x8", Kind: activity.Unknown},
			}},
			core.Report{Stream: n, Activities: []core.Activity{}, Gateway: "e", Nonce: 7, Took: 3 * time.Millisecond},
			core.Report{Stream: n, Activities: []core.Activity{}, Blind: strings.Repeat("ü", 128)},
			core.Quiesced{Stream: n, Number: 9, Activities: []core.Activity{{ID: "k3x9", Age: 3 * time.Millisecond, Kind: activity.Unknown}}, Blind: "the look timed out"},
			core.Probed{Stream: n, ID: "k3x9", Busy: true, Number: 5},
			core.Probed{Stream: n, ID: "x7"},
			core.SessionGoodbye{Session: testRouter, Stream: n, Looked: true},
			core.SessionLeft{Session: testRouter, Stream: n},
		}, w.leader.seen())
	})
}
