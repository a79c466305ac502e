package e2e

import (
	"context"
	"iter"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/client"
)

// A stream that continues at the next leader begins with a gap, and has what follows.
func TestEventsContinueAtTheNextLeaderAfterAGap(t *testing.T) {
	e := startHere(t, 2)
	e.waitWarm(2)
	transport := e.clientOf(e.site.api, 0)
	transport.Timeout = 0 // a stream has no end
	c, err := client.New(client.Options{URL: "http://api", Key: e.site.key(), HTTP: transport})
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	begin := "0.0"
	next, stop := iter.Pull2(c.Events(ctx, openapi.StreamEventsParams{Pool: &e.pool, LastEventID: &begin}))
	defer stop()
	event := func() client.Event {
		got, err, ok := next()
		require.NoError(t, err)
		require.True(t, ok, "the stream has ended: %v", ctx.Err())
		return got
	}
	require.NotNil(t, event().Gap, "what was before the stream")

	first := e.claim()
	before := []client.Event{event(), event()}
	for i, kind := range []openapi.SandboxEventType{openapi.SandboxEventTypeCreated, openapi.SandboxEventTypeReady} {
		require.Equal(t, first.SandboxID, before[i].Sandbox.SandboxID)
		require.Equal(t, kind, before[i].Sandbox.Type)
	}
	require.NoError(t, e.site.killLeader(t.Context()))
	require.NoError(t, e.site.waitLeader(t.Context()))
	gap := event()
	require.NotNil(t, gap.Gap, "%+v", gap.Sandbox)
	require.Equal(t, openapi.LeaderChanged, gap.Gap.Reason)
	second := e.claim()
	e.release(first.SandboxID)
	seen := map[string]bool{}
	for len(seen) < 3 {
		got := event().Sandbox
		require.NotNil(t, got, "another gap")
		seen[got.SandboxID+" "+string(got.Type)] = true
	}
	require.Equal(t, map[string]bool{
		second.SandboxID + " created": true, second.SandboxID + " ready": true, first.SandboxID + " released": true,
	}, seen)
}
