package h2

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/net/http2"
	"google.golang.org/grpc/codes"
)

// ended keeps every call, and says when it has ended.
type ended chan bool

func (e ended) Ended(byPeer bool) { e <- byPeer }

// keeper answers every call at once, or later if let is set, and keeps it.
type keeper struct {
	ended
	ending Ending
	let    chan struct{}
}

func (k *keeper) Now(message []byte, _ string) (Reply, Later) {
	reply := Reply{Message: append([]byte(nil), message...), Open: k, Ending: &k.ending}
	if k.let == nil {
		return reply, nil
	}
	return Reply{}, func(context.Context, func([]byte) error) Reply { <-k.let; return reply }
}

// keep serves a keeper to one peer, which has made a call.
func keep(t *testing.T, k *keeper, settings ...http2.Setting) *peer {
	k.ended = make(ended, 2)
	p := connect(t, serve(t, NewServer(map[string]Handler{testMethod: k})), settings...)
	p.call(1, "keep")
	return p
}

func (k *keeper) awaitEnd(t *testing.T) (byPeer bool) {
	select {
	case byPeer = <-k.ended:
	case <-time.After(soon):
		require.Fail(t, "the call has not ended")
	}
	require.Empty(t, k.ended, "it has ended twice")
	return byPeer
}

func TestEndedStreamIsOverWhenThePeerResetsIt(t *testing.T) {
	k := &keeper{}
	p := keep(t, k)
	p.until(func() bool { return len(p.of(1).messages()) == 1 })
	k.ending.End(codes.Aborted, "cut")
	k.ending.End(codes.Internal, "again")
	p.until(p.of(1).over)
	require.Equal(t, ":status 200, grpc-status 10, grpc-message cut, keep, ended", p.of(1).String())
	require.False(t, p.of(1).wasReset, "the peer's reset is the sign that it has acted")
	p.sync()
	require.Empty(t, k.ended)
	require.NoError(t, p.WriteRSTStream(1, http2.ErrCodeNo))
	require.True(t, k.awaitEnd(t))
	k.ending.End(codes.Internal, "after the end")
}

func TestEndedStreamIsOverWhenThePeerHalfCloses(t *testing.T) {
	for name, before := range map[string]bool{"before the end": true, "after the end": false} {
		t.Run(name, func(t *testing.T) {
			k := &keeper{}
			p := keep(t, k)
			p.until(func() bool { return len(p.of(1).messages()) == 1 })
			if before {
				require.NoError(t, p.WriteData(1, true, nil))
				p.sync()
			}
			k.ending.End(codes.Aborted, "")
			if !before {
				p.until(p.of(1).over)
				require.NoError(t, p.WriteData(1, true, nil))
			}
			require.True(t, k.awaitEnd(t))
		})
	}
}

func TestStreamThatEndsEarlyGetsNoAnswer(t *testing.T) {
	k := &keeper{let: make(chan struct{})}
	p := keep(t, k)
	k.ending.End(codes.Aborted, "cut")
	close(k.let)
	p.until(p.of(1).over)
	require.Equal(t, ":status 200, grpc-status 10, grpc-message cut, ended", p.of(1).String())
	require.True(t, k.awaitEnd(t))
}

func TestEndFollowsAnAnswerThatWaitsForAWindow(t *testing.T) {
	k := &keeper{}
	p := keep(t, k, http2.Setting{ID: http2.SettingInitialWindowSize, Val: 2})
	p.until(func() bool { return len(p.of(1).data) == 2 })
	k.ending.End(codes.Aborted, "")
	require.NoError(t, p.WriteWindowUpdate(1, 100))
	p.until(p.of(1).over)
	require.Equal(t, []string{"keep"}, p.of(1).messages())
	require.NoError(t, p.WriteRSTStream(1, http2.ErrCodeNo))
	require.True(t, k.awaitEnd(t))
}

func TestEndingStreamsEndWithTheirConnection(t *testing.T) {
	k := &keeper{}
	p := keep(t, k)
	p.until(func() bool { return len(p.of(1).messages()) == 1 })
	k.ending.End(codes.Aborted, "")
	p.conn.Close()
	require.True(t, k.awaitEnd(t))
}
