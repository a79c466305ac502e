package client

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/api/openapi"
)

func sse(text string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = io.WriteString(w, text)
	}
}

func sseEvent(id, kind string) string {
	return fmt.Sprintf("id: %s\nevent: %s\ndata: {\"type\":%q,\"sandboxID\":\"s\"}\n\n", id, kind, kind)
}

func TestEventsGoOnWhereAStreamEnded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, s := scripted(t,
			sse(": heartbeat\nid: 1-4\n\n"+sseEvent("1-5", "created")),
			nil,
			refuse(503, "not_leader"),
			sse("id: 2-0\nevent: gap\ndata: {\"reason\":\"leaderChanged\",\"message\":\"m\"}\n\n"+sseEvent("2-1", "released")),
			sse(": heartbeat\nid: 2-9\n\n"),
			refuse(401, "unauthorized"))
		var seen []string
		var failed error
		for e, err := range c.Events(t.Context(), openapi.StreamEventsParams{Pool: new("demo")}) {
			switch {
			case err != nil:
				failed = err
			case e.Gap != nil:
				seen = append(seen, e.ID+" gap "+string(e.Gap.Reason))
			default:
				seen = append(seen, e.ID+" "+string(e.Sandbox.Type)+" "+e.Sandbox.SandboxID)
			}
		}
		require.Equal(t, []string{"1-5 created s", "2-0 gap leaderChanged", "2-1 released s"}, seen)
		require.True(t, IsRefused(failed))
		var from []string
		for _, r := range s.seen {
			require.Equal(t, "pool=demo", r.URL.RawQuery)
			from = append(from, r.Header.Get("Last-Event-ID"))
		}
		require.Equal(t, []string{"", "1-5", "1-5", "1-5", "2-1", "2-9"}, from)
	})
}

func TestEventsGiveUpWithoutProgressAndStop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, s := scripted(t, nil)
		n := 0
		for _, err := range c.Events(t.Context(), openapi.StreamEventsParams{}) {
			require.Error(t, err)
			n++
		}
		require.Equal(t, 1, n)
		require.Len(t, s.seen, 1+maxRepeats)

		c, s = scripted(t, sse(sseEvent("1-5", "created")+sseEvent("1-6", "ready")))
		for range c.Events(t.Context(), openapi.StreamEventsParams{}) {
			break
		}
		require.Len(t, s.seen, 1)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		for _, err := range c.Events(ctx, openapi.StreamEventsParams{}) {
			require.NoError(t, err)
			cancel()
		}
		for e, err := range func() func(func(Event, error) bool) {
			c, _ := scripted(t, sse("id: 1-1\ndata: nonsense\n\n"))
			return c.Events(t.Context(), openapi.StreamEventsParams{})
		}() {
			require.ErrorContains(t, err, "not Berth's")
			require.Zero(t, e)
		}
	})
}
