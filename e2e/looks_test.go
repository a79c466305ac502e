package e2e

import (
	"context"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coder/websocket"
	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/devcluster/proc"
	"github.com/berth-sandbox/berth/devcluster/stack"
)

// One tenant opens as many requests as it can to its own sandbox, with headers of the greatest
// length, and asks for one port after the other. The used sandboxes of others stay, and a silent
// one is reaped.
//
// It takes more than 20 s because the sandboxes must stay for three idle timeouts of 5 s and go
// after another one.
func TestTenantCannotBlindTheLooks(t *testing.T) {
	const others, flood = 8, 1500
	e := startDisturbing(t, others+2)
	attacker, _ := e.claimOf(e.pool, `"timeout":3600`)
	var sockets []*websocket.Conn
	var used []openapi.Sandbox
	for range others {
		s, _ := e.claimIdle(e.pool, leastIdle)
		sockets, used = append(sockets, e.open(s)), append(used, s)
	}
	ctx, end := context.WithCancel(t.Context())
	var all sync.WaitGroup
	defer all.Wait()
	defer end()
	client := e.streaming()
	for range flood {
		all.Go(func() {
			r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://gateway/sleep?ms=30000", http.NoBody)
			if err != nil {
				return
			}
			r.Host = e.host(8080, attacker.SandboxID)
			r.Header.Set("X-Long", strings.Repeat("x", 58<<10))
			if response, err := client.Do(r); err == nil {
				_, _ = io.Copy(io.Discard, response.Body)
				_ = response.Body.Close()
			}
		})
	}
	for range 4 {
		all.Go(func() {
			one := e.client()
			for ctx.Err() == nil { // most of these ports answer nothing
				_, _ = do(ctx, one, http.MethodGet, "http://gateway/", e.host(1+rand.IntN(65535), attacker.SandboxID), "")
			}
		})
	}
	silent, asked := e.claimIdle(e.pool, leastIdle)
	e.reaped(silent, asked)
	e.pass(lasts(2*leastIdle, 5*leastIdle))
	for i, s := range used {
		require.True(t, e.live(s))
		e.echoes(sockets[i], "still there")
	}
	end()
	all.Wait()
	released := time.Now()
	for _, socket := range sockets {
		require.NoError(t, socket.CloseNow())
	}
	for _, s := range used {
		e.reaped(s, released.Add(-time.Second))
	}
}

// A paused Envoy may hold anything open, so nothing is released. After its end nothing is open,
// and what was open counts as use until the end.
//
// It takes more than 20 s because a sandbox must stay for two idle timeouts of 5 s, and then each
// of two goes after another one.
func TestPausedEnvoyKeepsSandboxesUntilItEnds(t *testing.T) {
	e := startAlone(t, 3, stack.Options{})
	used, _ := e.claimIdle(e.pool, leastIdle)
	silent, _ := e.claimIdle(e.pool, leastIdle)
	socket := e.open(used)
	front := e.stack.Gateways[0].Envoy

	require.NoError(t, front.Pause())
	e.pass(2 * leastIdle)
	require.True(t, e.live(used))
	require.True(t, e.live(silent))
	shown := e.uses("id=" + silent.SandboxID).Sandboxes
	require.Len(t, shown, 1)
	require.Len(t, shown[0].Awaits, 1, "the router cannot tell what is open")
	require.NoError(t, front.Resume())
	e.reaped(silent, time.Now().Add(-2*leastIdle))
	e.echoes(socket, "still there")

	e.pass(2 * time.Second) // a look has shown it
	ended := time.Now()     // or later
	require.NoError(t, front.Kill())
	_, _, err := socket.Read(t.Context())
	require.Error(t, err)
	require.NoError(t, front.Launch())
	e.eventually(func() error { return front.Check(t.Context()) })
	e.reaped(used, ended)
}

// A router ends beside an Envoy that goes on, killed or in order, and with or without a
// successor that was started first. What stays open counts as use, and what ends while no router
// looks does not. Each case has a gateway of its own.
//
// It takes more than 20 s because no router looks for two idle timeouts of 5 s, and what is open
// then stays for three.
func TestReplacedRouterForgetsNothingThatIsOpen(t *testing.T) {
	const maxStale = 20 * time.Second
	kill := (*proc.Server).Kill
	stop := func(p *proc.Server) error { return p.Stop(t.Context(), 10*time.Second) }
	e := startLongAlone(t, 8, stack.Options{Gateways: 4, MaxStale: maxStale})
	gateways := e.stack.Gateways
	e.allAtOnce(map[string]func(e *env){
		"killed":                   func(e *env) { e.replaceRouter(gateways[0], kill, false) },
		"killed with a successor":  func(e *env) { e.replaceRouter(gateways[1], kill, true) },
		"stopped":                  func(e *env) { e.replaceRouter(gateways[2], stop, false) },
		"stopped with a successor": func(e *env) { e.replaceRouter(gateways[3], stop, true) },
	})
}

// replaceRouter ends the router of a gateway, through which two sandboxes are used.
func (e *env) replaceRouter(g *stack.Gateway, end func(*proc.Server) error, successor bool) {
	stays, _ := e.claimIdle(e.pool, leastIdle)
	ends, _ := e.claimIdle(e.pool, leastIdle)
	client := e.clientOf(dialerOf(g), 8)
	client.Timeout = 0
	lasting, ending := e.openWith(client, stays), e.openWith(client, ends)
	e.pass(2 * time.Second) // a look has shown both
	router := g.Router
	if successor {
		require.NoError(e.t, g.Successor.Launch())
		e.eventually(func() error { return g.Successor.Check(e.t.Context()) })
		router = g.Successor
	}
	require.NoError(e.t, end(g.Router))
	require.NoError(e.t, ending.CloseNow())
	ended := time.Now()
	if !successor {
		e.pass(2 * leastIdle) // no router looks at that Envoy meanwhile
		require.NoError(e.t, router.Launch())
		e.eventually(func() error { return router.Check(e.t.Context()) })
	}
	e.ends(ends, fact.ReasonIdleTimeout, ended.Add(leastIdle-time.Second))
	e.pass(3 * leastIdle)
	require.True(e.t, e.live(stays))
	e.echoes(lasting, "still there")
	used := time.Now()
	require.NoError(e.t, lasting.CloseNow())
	e.ends(stays, fact.ReasonIdleTimeout, used.Add(leastIdle-time.Second))
}
