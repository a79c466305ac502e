package e2e

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coder/websocket"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/rest"
	"github.com/berth-sandbox/berth/api/activity"
	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/sandboxid"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/devcluster/stack"
	"github.com/berth-sandbox/berth/extproc/admin"
)

const (
	// leastIdle is the shortest idle timeout.
	leastIdle = 5 * time.Second
	// leastBytes is the shortest one that counts where bytes are counted.
	leastBytes = time.Minute
	// lateMost is a guard, and not what is promised: the machine does much else.
	lateMost = time.Minute
)

// in is e for a part of its test.
func (e *env) in(t *testing.T) *env {
	part := *e
	part.t = t
	return &part
}

// allAtOnce runs the parts of a test all at the same time: most of their time is
// waiting, and that is more than test.parallel would let run.
func (e *env) allAtOnce(parts map[string]func(e *env)) {
	e.t.Helper()
	var all sync.WaitGroup
	for name, part := range parts {
		all.Go(func() { e.t.Run(name, func(t *testing.T) { part(e.in(t)) }) })
	}
	all.Wait()
}

// pass lets time pass: what is tested is what happens when nothing does.
func (e *env) pass(d time.Duration) {
	e.t.Helper()
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-e.t.Context().Done():
		e.t.Fatal(e.t.Context().Err())
	}
}

// streaming is a client of requests that may last.
func (e *env) streaming() *http.Client {
	client := e.client()
	client.Timeout = 0
	return client
}

// otherPool creates a pool beside the env's own, and waits for its warm pods.
func (e *env) otherPool(name string, warm int32, change func(*v1alpha1.SandboxPoolSpec)) string {
	e.t.Helper()
	p := e.newPool(e.pool+"-"+name, warm)
	change(&p.Spec)
	e.createPool(p)
	e.eventually(func() error {
		if s := e.readPool(p.Name).Status; s.Warm < warm {
			return fmt.Errorf("%d of %d pods are warm: %+v", s.Warm, warm, s)
		}
		return nil
	})
	return p.Name
}

// claimOf takes a sandbox from a pool, once it has a warm pod, and says when it asked
// for it. more is what else the claim says, as JSON.
func (e *env) claimOf(pool, more string) (s rest.Sandbox, asked time.Time) {
	e.t.Helper()
	var a answer
	e.eventually(func() error {
		asked = time.Now()
		a = e.api(http.MethodPost, "/sandboxes", fmt.Sprintf(`{"templateID":%q,%s}`, pool, more))
		if a.code == http.StatusTooManyRequests || a.code == http.StatusNotFound {
			return fmt.Errorf("%d %s", a.code, a.body)
		}
		return nil
	})
	return sandboxOf(e.t, a), asked
}

// claimIdle takes a sandbox that has an idle timeout and no end.
func (e *env) claimIdle(pool string, idle time.Duration) (s rest.Sandbox, asked time.Time) {
	e.t.Helper()
	s, asked = e.claimOf(pool, fmt.Sprintf(`"idleTimeout":%d`, idle/time.Second))
	require.Equal(e.t, 9999, s.EndAt.Year())
	require.InDelta(e.t, idle.Seconds(), s.IdleTimeout, 0)
	return s, asked
}

// live reports whether the API has the sandbox, which is no use of it.
func (e *env) live(s rest.Sandbox) bool {
	e.t.Helper()
	a := e.api(http.MethodGet, "/sandboxes/"+s.SandboxID, "")
	if a.code == http.StatusOK {
		return true
	}
	require.Equal(e.t, apierror.SandboxGone, a.refusal(e.t).Reason, a.body)
	return false
}

// reaped waits until a sandbox is released for being idle, and not before it was so
// for long enough. used is a moment at which it was in use, at the latest when that
// ended. Then its URL answers so on every router, at once.
func (e *env) reaped(s rest.Sandbox, used time.Time) {
	e.t.Helper()
	idle := time.Duration(s.IdleTimeout * float64(time.Second))
	e.ends(s, core.ReasonIdle, used.Add(idle))
}

// ends waits until a sandbox is released, at a moment or later.
func (e *env) ends(s rest.Sandbox, reason string, at time.Time) {
	e.t.Helper()
	e.pass(max(0, time.Until(at)-500*time.Millisecond))
	for e.live(s) {
		require.Less(e.t, time.Since(at), lateMost, "it is still there")
		e.pass(20 * time.Millisecond)
	}
	ended := time.Now()
	require.False(e.t, ended.Before(at), "it was released %v too early", at.Sub(ended))
	fronts, err := e.site.fronts(e.t.Context())
	require.NoError(e.t, err)
	require.NotEmpty(e.t, fronts)
	for _, front := range fronts {
		client := e.clientOf(front, 0)
		e.eventually(func() error { // its router may be told a moment later
			a := e.get(client, e.host(8080, s.SandboxID), "/")
			if a.code == http.StatusOK {
				return fmt.Errorf("it is served by %s", a.identity(e.t).Pod)
			}
			require.Equal(e.t, apierror.SandboxGone, a.refusal(e.t).Reason, a.body)
			return nil
		})
	}
	e.t.Logf("%s: gone %v late, 410 on all of %d routers %v late", reason, ended.Sub(at).Round(time.Millisecond),
		len(fronts), time.Since(at).Round(time.Millisecond))
	e.eventually(func() error {
		r, err := e.record(s.SandboxID)
		if err == nil && r.Status.Reason != reason {
			err = fmt.Errorf("reason %q, phase %q", r.Status.Reason, r.Status.Phase)
		}
		return err
	})
}

// open opens a WebSocket to a sandbox.
func (e *env) open(s rest.Sandbox) *websocket.Conn {
	e.t.Helper()
	socket, response, err := websocket.Dial(e.t.Context(), "ws://"+e.host(8080, s.SandboxID)+"/ws",
		&websocket.DialOptions{HTTPClient: e.streaming()})
	require.NoError(e.t, err)
	require.Equal(e.t, http.StatusSwitchingProtocols, response.StatusCode)
	e.t.Cleanup(func() { _ = socket.CloseNow() })
	return socket
}

func (e *env) echoes(socket *websocket.Conn, word string) {
	e.t.Helper()
	require.NoError(e.t, socket.Write(e.t.Context(), websocket.MessageText, []byte(word)))
	_, message, err := socket.Read(e.t.Context())
	require.NoError(e.t, err)
	require.Equal(e.t, word, string(message))
}

// request opens a request to a sandbox that may last.
func (e *env) request(s rest.Sandbox, method, path string, body io.Reader) *http.Response {
	e.t.Helper()
	r, err := http.NewRequestWithContext(e.t.Context(), method, "http://gateway"+path, body)
	require.NoError(e.t, err)
	r.Host = e.host(8080, s.SandboxID)
	response, err := e.streaming().Do(r)
	require.NoError(e.t, err)
	e.t.Cleanup(func() { _ = response.Body.Close() })
	return response
}

// do sends a request to a sandbox and reads its answer.
func (e *env) do(method string, s rest.Sandbox, path string) answer {
	e.t.Helper()
	a, err := do(e.t.Context(), e.client(), method, "http://gateway"+path, e.host(8080, s.SandboxID), "")
	require.NoError(e.t, err)
	return a
}

// sse reads one event each second to the end.
func (e *env) sse(s rest.Sandbox, events int) {
	e.t.Helper()
	response := e.request(s, http.MethodGet, fmt.Sprintf("/sse?interval=1s&count=%d", events), http.NoBody)
	require.Equal(e.t, http.StatusOK, response.StatusCode)
	got := 0
	for lines := bufio.NewScanner(response.Body); lines.Scan(); {
		if strings.HasPrefix(lines.Text(), "id: ") {
			got++
		}
	}
	require.Equal(e.t, events, got)
}

// slowUpload sends a few bytes twice a second.
func (e *env) slowUpload(s rest.Sandbox, d time.Duration) {
	e.t.Helper()
	const pieces, every = "bytes", 500 * time.Millisecond
	body, writes := io.Pipe()
	n := int(d / every)
	written := make(chan error, 1)
	go func() {
		ticker := time.NewTicker(every)
		defer ticker.Stop()
		var err error
		for i := 0; i < n && err == nil; i++ {
			_, err = io.WriteString(writes, pieces)
			<-ticker.C
		}
		written <- errors.Join(err, writes.Close())
	}()
	response := e.request(s, http.MethodPost, "/upload", body)
	require.NoError(e.t, <-written)
	raw, err := io.ReadAll(response.Body)
	require.NoError(e.t, err)
	require.Equal(e.t, http.StatusOK, response.StatusCode, string(raw))
	require.JSONEq(e.t, fmt.Sprintf(`{"bytes":%d}`, n*len(pieces)), string(raw))
}

// Invariant I4, as clients see it: the shortest idle timeout, and uses that are many
// times as long.
// Invariant: I4
func TestUsedSandboxesStayAndSilentOnesAreReaped(t *testing.T) {
	e := startWaiting(t, 8, 2)
	bytes := e.otherPool("bytes", 4, func(p *v1alpha1.SandboxPoolSpec) { p.Activity = v1alpha1.ActivityBytes })
	longest := int32(3600)
	probed := e.otherPool("probed", 2, func(p *v1alpha1.SandboxPoolSpec) {
		p.BusyProbe, p.MaxLifetimeSeconds = &v1alpha1.BusyProbe{Port: p.DefaultPort, Path: "/busy"}, &longest
	})
	e.allAtOnce(map[string]func(e *env){
		"nobody ever asks": func(e *env) {
			s, asked := e.claimIdle(e.pool, leastIdle)
			e.reaped(s, asked)
			e.eventually(func() error { // another pod takes the place of its own
				for _, p := range e.pods(nil) {
					if p.Name == s.PodName {
						return fmt.Errorf("pod %s is still there", p.Name)
					}
				}
				return nil
			})
		},
		"a silent WebSocket": func(e *env) {
			s, _ := e.claimIdle(e.pool, leastIdle)
			socket := e.open(s)
			e.pass(time.Minute)
			require.True(e.t, e.live(s))
			e.echoes(socket, "still there")
			used := time.Now()
			require.NoError(e.t, socket.Close(websocket.StatusNormalClosure, ""))
			e.reaped(s, used)
		},
		"a WebSocket that is only pinged, and bytes count": func(e *env) {
			s, _ := e.claimIdle(bytes, leastBytes)
			socket := e.open(s)
			go func() { _, _, _ = socket.Read(e.t.Context()) }() // for the pongs
			began := time.Now()
			go func() {
				ticker := time.NewTicker(10 * time.Second)
				defer ticker.Stop()
				for socket.Ping(e.t.Context()) == nil {
					<-ticker.C
				}
			}()
			e.reaped(s, began)
		},
		"a WebSocket with two kilobytes a minute, and bytes count": func(e *env) {
			s, _ := e.claimIdle(bytes, leastBytes)
			socket := e.open(s)
			for range 2 * int(leastBytes/time.Second) / 10 {
				e.echoes(socket, strings.Repeat("x", 170)) // and back
				e.pass(10 * time.Second)
			}
			e.echoes(socket, strings.Repeat("x", 1024))
			require.True(e.t, e.live(s))
			e.reaped(s, time.Now().Add(-time.Second))
		},
		"a download whose reader has stopped": func(e *env) {
			s, _ := e.claimIdle(e.pool, leastIdle)
			response := e.request(s, http.MethodGet, "/download", http.NoBody)
			require.Equal(e.t, http.StatusOK, response.StatusCode)
			e.pass(4 * leastIdle)
			require.True(e.t, e.live(s))
			used := time.Now()
			require.NoError(e.t, response.Body.Close())
			e.reaped(s, used)
		},
		"two ports": func(e *env) {
			s, _ := e.claimIdle(e.pool, leastIdle)
			var all sync.WaitGroup
			for i, port := range stack.DemoPorts() {
				all.Go(func() {
					a, err := do(e.t.Context(), e.streaming(), http.MethodGet,
						fmt.Sprintf("http://gateway/sleep?ms=%d", (i+1)*4*int(leastIdle/time.Millisecond)),
						e.host(int(port), s.SandboxID), "")
					assert.NoError(e.t, err)
					assert.Equal(e.t, http.StatusOK, a.code, a.body)
				})
			}
			all.Wait()
			e.reaped(s, time.Now())
		},
		"two hundred first requests": func(e *env) {
			s, _ := e.claimIdle(e.pool, leastIdle)
			var all sync.WaitGroup
			for range 200 {
				all.Go(func() {
					a, err := do(e.t.Context(), e.streaming(), http.MethodGet,
						fmt.Sprintf("http://gateway/sleep?ms=%d", 4*leastIdle/time.Millisecond), e.host(8080, s.SandboxID), "")
					assert.NoError(e.t, err)
					assert.Equal(e.t, http.StatusOK, a.code, a.body)
				})
			}
			all.Wait()
			e.reaped(s, time.Now())
		},
		"a computation that its busy probe tells of": func(e *env) {
			s, _ := e.claimOf(probed, `"idleTimeout":5`)
			a := e.do(http.MethodPost, s, "/busy?for=40s")
			require.Equal(e.t, http.StatusOK, a.code, a.body)
			until := time.Now().Add(40 * time.Second)
			e.pass(30 * time.Second)
			require.True(e.t, e.live(s))
			e.ends(s, core.ReasonIdle, until)
		},
		"a computation without a busy probe": func(e *env) {
			s, _ := e.claimIdle(e.pool, leastIdle)
			a := e.do(http.MethodPost, s, "/busy?for=1h")
			require.Equal(e.t, http.StatusOK, a.code, a.body)
			e.reaped(s, time.Now().Add(-time.Second))
		},
		"server-sent events": func(e *env) {
			s, _ := e.claimIdle(e.pool, leastIdle)
			e.sse(s, 30)
			e.reaped(s, time.Now())
		},
		"a slow upload": func(e *env) {
			s, _ := e.claimIdle(e.pool, leastIdle)
			e.slowUpload(s, time.Minute)
			e.reaped(s, time.Now())
		},
		"a gRPC stream": func(e *env) {
			s, _ := e.claimIdle(e.pool, leastIdle)
			conn, err := grpc.NewClient("passthrough:///gateway", grpc.WithTransportCredentials(insecure.NewCredentials()),
				grpc.WithAuthority(e.host(8080, s.SandboxID)),
				grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return e.site.front(ctx) }))
			require.NoError(e.t, err)
			defer conn.Close()
			stream, err := conn.NewStream(e.t.Context(), &grpc.StreamDesc{ServerStreams: true, ClientStreams: true},
				"/berth.demo.Echo/Echo")
			require.NoError(e.t, err)
			for range 3 {
				require.NoError(e.t, stream.SendMsg(wrapperspb.String("ahoy")))
				var got wrapperspb.StringValue
				require.NoError(e.t, stream.RecvMsg(&got))
				require.Equal(e.t, "ahoy", got.GetValue())
				e.pass(15 * time.Second)
			}
			used := time.Now()
			require.NoError(e.t, stream.CloseSend())
			require.ErrorIs(e.t, stream.RecvMsg(new(wrapperspb.StringValue)), io.EOF)
			e.reaped(s, used)
		},
		"a request whose answer takes its time": func(e *env) {
			s, _ := e.claimIdle(e.pool, leastIdle)
			response := e.request(s, http.MethodGet, "/sleep?ms=30000", http.NoBody)
			raw, err := io.ReadAll(response.Body)
			require.NoError(e.t, err)
			require.Equal(e.t, http.StatusOK, response.StatusCode, string(raw))
			e.reaped(s, time.Now())
		},
		"a request now and then": func(e *env) {
			const idle = 6 * time.Second
			s, _ := e.claimIdle(e.pool, idle)
			client := e.client()
			var used time.Time
			for range 12 {
				used = time.Now()
				a := e.get(client, e.host(8080, s.SandboxID), "/")
				require.Equal(e.t, http.StatusOK, a.code, a.body)
				require.Equal(e.t, s.PodName, a.identity(e.t).Pod)
				e.pass(idle - time.Second)
			}
			e.reaped(s, used)
		},
		"calls for it": func(e *env) {
			const idle = 6 * time.Second
			s, _ := e.claimIdle(e.pool, idle)
			var used time.Time
			for range 10 {
				e.pass(idle / 2)
				used = time.Now()
				a := e.api(http.MethodPost, "/v1/sandboxes/"+s.SandboxID+"/keepalive", "")
				require.Equal(e.t, http.StatusNoContent, a.code, a.body)
			}
			e.reaped(s, used)
			a := e.api(http.MethodPost, "/v1/sandboxes/"+s.SandboxID+"/keepalive", "")
			require.Equal(e.t, apierror.SandboxGone, a.refusal(e.t).Reason, "nothing brings it back")
		},
	})
}

// One tenant opens as many requests as it can to its own sandbox, with headers as long as
// they may be, asks for one port after the other, and leaves connections half open. The
// sandboxes of others that are in use stay, and the one that is silent is reaped.
func TestTenantCannotBlindTheLooks(t *testing.T) {
	const others, flood = 8, 1500
	e := startDisturbing(t, others+2, 1)
	attacker, _ := e.claimOf(e.pool, `"timeout":3600`)
	var sockets []*websocket.Conn
	var used []rest.Sandbox
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
	e.pass(5 * leastIdle)
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

// An Envoy that stands still may hold anything open. One that has ended holds nothing, and
// what was open through it counts until then.
func TestPausedEnvoyKeepsSandboxesUntilItEnds(t *testing.T) {
	e := startAlone(t, 3, stack.Options{})
	used, _ := e.claimIdle(e.pool, leastIdle)
	silent, _ := e.claimIdle(e.pool, leastIdle)
	socket := e.open(used)
	front := e.stack.Gateways[0].Envoy

	require.NoError(t, front.Pause())
	e.pass(3 * leastIdle)
	require.True(t, e.live(used))
	require.True(t, e.live(silent))
	shown := e.uses("id=" + silent.SandboxID).Sandboxes
	require.Len(t, shown, 1)
	require.Len(t, shown[0].Awaits, 1, "the router cannot tell what is open")
	require.NoError(t, front.Resume())
	e.reaped(silent, time.Now().Add(-3*leastIdle))
	e.echoes(socket, "still there")

	e.pass(2 * time.Second) // so that a look has shown it
	require.NoError(t, front.Kill())
	ended := time.Now()
	_, _, err := socket.Read(t.Context())
	require.Error(t, err)
	require.NoError(t, front.Launch())
	e.eventually(func() error { return front.Ready(t.Context()) })
	e.reaped(used, ended)
}

// A router is killed, and a moment later stopped in order, beside an Envoy that goes on.
// What stays open stays in use, and what ends meanwhile is reaped.
func TestReplacedRouterForgetsNothingThatIsOpen(t *testing.T) {
	t.Parallel() // else its parts would have ended before other tests begin
	const maxStale = 20 * time.Second
	for name, end := range map[string]func(*stack.Process) error{
		"killed":  (*stack.Process).Kill,
		"stopped": func(p *stack.Process) error { return p.Stop(t.Context(), 10*time.Second) },
	} {
		for _, successor := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, with a successor: %v", name, successor), func(t *testing.T) {
				e := startLasting(t, 3, stack.Options{MaxStale: maxStale})
				stays, _ := e.claimIdle(e.pool, leastIdle)
				ends, _ := e.claimIdle(e.pool, leastIdle)
				lasting, ending := e.open(stays), e.open(ends)
				e.pass(2 * time.Second)
				gateway := e.stack.Gateways[0]
				router := gateway.Router
				if successor {
					require.NoError(t, gateway.Successor.Launch())
					e.eventually(func() error { return gateway.Successor.Ready(t.Context()) })
					router = gateway.Successor
				}
				require.NoError(t, end(gateway.Router))
				require.NoError(t, ending.CloseNow())
				ended := time.Now()
				if !successor {
					e.pass(2 * leastIdle) // no router looks at that Envoy meanwhile
					require.NoError(t, router.Launch())
					e.eventually(func() error { return router.Ready(t.Context()) })
				}
				e.ends(ends, core.ReasonIdle, ended.Add(leastIdle-time.Second))
				e.pass(3 * leastIdle)
				require.True(t, e.live(stays))
				e.echoes(lasting, "still there")
				used := time.Now()
				require.NoError(t, lasting.CloseNow())
				e.ends(stays, core.ReasonIdle, used.Add(leastIdle-time.Second))
			})
		}
	}
}

// A request that comes when its sandbox is about to be released is answered by the
// sandbox's own pod, or is told that it is gone. What has been answered keeps it.
// Invariant: I4
func TestRequestAtTheReapIsAnsweredOrRefused(t *testing.T) {
	const sandboxes, idle = 32, leastIdle
	e := startDisturbing(t, sandboxes, 2)
	var mu sync.Mutex
	answered, refused, kept := 0, 0, 0
	ask := func(e *env, client *http.Client, s rest.Sandbox) bool {
		e.t.Helper()
		a := e.get(client, e.host(8080, s.SandboxID), "/")
		if a.code == http.StatusGone {
			require.Equal(e.t, apierror.SandboxGone, a.refusal(e.t).Reason)
			return false
		}
		require.Equal(e.t, http.StatusOK, a.code, a.body)
		require.Equal(e.t, s.PodName, a.identity(e.t).Pod)
		return true
	}
	parts := map[string]func(e *env){}
	for i := range sandboxes {
		// A request counts as in use until the next look begins, so that the release comes
		// up to a second after the idle timeout.
		about := idle
		if i%4 != 0 {
			about += time.Second
		}
		parts[fmt.Sprint("sandbox ", i)] = func(e *env) {
			s, _ := e.claimIdle(e.pool, idle)
			client := e.client() // one connection, which stays
			sent := time.Now()
			require.True(e.t, ask(e, client, s))
			e.pass(time.Until(sent.Add(about - 200*time.Millisecond + rand.N(400*time.Millisecond))))
			again := time.Now()
			switch ok := ask(e, client, s); {
			case !ok && time.Since(sent) < idle:
				e.t.Fatalf("it was released after %v", time.Since(sent))
			case !ok:
				mu.Lock()
				defer mu.Unlock()
				refused++
				return
			}
			e.pass(time.Until(again.Add(idle - 500*time.Millisecond)))
			ok := ask(e, client, s)
			late := time.Since(again)
			require.True(e.t, ok || late >= idle, "it was released %v after it was used", late)
			mu.Lock()
			defer mu.Unlock()
			answered++
			if ok {
				kept++
			}
		}
	}
	e.allAtOnce(parts)
	require.Equal(t, sandboxes, answered+refused)
	require.Positive(t, kept)
	t.Logf("%d requests around a release: %d answered, %d refused as gone; %d of the answered sandboxes were read in time",
		sandboxes, answered, refused, kept)
}

func TestFirstBoundOfALifeCounts(t *testing.T) {
	e := startDisturbing(t, 6, 1)
	short := e.otherPool("short", 1, func(p *v1alpha1.SandboxPoolSpec) {
		seconds := int32(5)
		p.MaxLifetimeSeconds = &seconds
	})
	starting := e.otherPool("starting", 1, func(p *v1alpha1.SandboxPoolSpec) {
		seconds := int32(2)
		p.StartupTimeoutSeconds = &seconds
		p.PostStart = &v1alpha1.PostStartHook{Path: "/sleep?ms=600000", TimeoutSeconds: 120, FailurePolicy: v1alpha1.Fail}
	})
	setTimeout := func(e *env, s rest.Sandbox, seconds int) time.Time {
		e.t.Helper()
		asked := time.Now()
		a := e.api(http.MethodPost, "/sandboxes/"+s.SandboxID+"/timeout", fmt.Sprintf(`{"timeout":%d}`, seconds))
		require.Equal(e.t, http.StatusNoContent, a.code, a.body)
		return asked.Add(time.Duration(seconds) * time.Second)
	}
	e.allAtOnce(map[string]func(e *env){
		"the end, though it is in use": func(e *env) {
			s, asked := e.claimOf(e.pool, `"timeout":4,"idleTimeout":3600`)
			e.echoes(e.open(s), "in use")
			e.ends(s, core.ReasonTimeout, asked.Add(4*time.Second))
		},
		"an end that was moved to sooner": func(e *env) {
			s, _ := e.claimOf(e.pool, `"timeout":3600`)
			e.ends(s, core.ReasonTimeout, setTimeout(e, s, 3))
		},
		"an end that was moved to later": func(e *env) {
			s, _ := e.claimOf(e.pool, `"timeout":4`)
			at := setTimeout(e, s, 10)
			require.Equal(e.t, http.StatusOK, e.get(e.client(), e.host(8080, s.SandboxID), "/").code)
			e.ends(s, core.ReasonTimeout, at)
		},
		"silence, long before the end": func(e *env) {
			s, asked := e.claimOf(e.pool, `"timeout":3600,"idleTimeout":5`)
			require.WithinDuration(e.t, s.StartedAt.Add(time.Hour), s.EndAt, time.Minute)
			e.ends(s, core.ReasonIdle, asked.Add(leastIdle))
		},
		"the longest life, though it is in use and its end was moved": func(e *env) {
			s, asked := e.claimOf(short, `"timeout":4`)
			e.echoes(e.open(s), "in use")
			setTimeout(e, s, 3600)
			e.ends(s, core.ReasonMaxLifetime, asked.Add(5*time.Second))
		},
		"a hook that does not answer": func(e *env) {
			asked := time.Now()
			r := e.api(http.MethodPost, "/sandboxes", fmt.Sprintf(`{"templateID":%q,"waitTimeout":60}`, starting)).refusal(e.t)
			require.Equal(e.t, apierror.StartFailed, r.Reason)
			require.Contains(e.t, r.Message, core.ReasonStartup)
			require.GreaterOrEqual(e.t, time.Since(asked), 2*time.Second)
			e.ends(rest.Sandbox{SandboxID: r.SandboxID}, core.ReasonStartup, asked.Add(2*time.Second))
		},
	})
}

func TestIdleTimeoutOutOfRangeIsRefused(t *testing.T) {
	e := start(t, 1, 1)
	for _, seconds := range []int{-1, 1, 4, 31_536_001} {
		a := e.api(http.MethodPost, "/sandboxes", fmt.Sprintf(`{"templateID":%q,"idleTimeout":%d}`, e.pool, seconds))
		require.Equal(t, http.StatusBadRequest, a.code, a.body)
		r := a.refusal(t)
		require.Equal(t, apierror.BadRequest, r.Reason)
		require.Contains(t, r.Message, fmt.Sprintf("idleTimeout: %d: must be 0, for none, or 5 to 31536000 seconds", seconds))

		p := e.newPool(e.pool+"-hasty", 1)
		of := int32(seconds)
		p.Spec.IdleTimeoutSeconds = &of
		err := e.clients.Berth.Post().Namespace(e.site.namespace()).Resource("sandboxpools").Body(p).Do(t.Context()).Error()
		require.ErrorContains(t, err, "spec.idleTimeoutSeconds")
	}
	require.Equal(t, int32(1), e.readPool(e.pool).Status.Warm, "no refused claim took a pod")
	s, _ := e.claimOf(e.pool, `"idleTimeout":0`)
	require.WithinDuration(t, s.StartedAt.Add(5*time.Minute), s.EndAt, time.Minute, "an end is what ends it then")
	require.Zero(t, s.IdleTimeout)
}

// uses asks the API what it knows of the use of sandboxes.
func (e *env) uses(query string) rest.LastActive {
	e.t.Helper()
	a := e.api(http.MethodGet, "/v1/admin/last-active?"+query, "")
	require.Equal(e.t, http.StatusOK, a.code, a.body)
	var all rest.LastActive
	require.NoError(e.t, json.Unmarshal([]byte(a.body), &all))
	return all
}

// usesThrough asks every router the same.
func (e *env) usesThrough(query string) (all []admin.LastActive, texts []string) {
	e.t.Helper()
	listeners, err := e.site.admins(e.t.Context())
	require.NoError(e.t, err)
	for _, dial := range listeners {
		page := func(query string) answer {
			a, err := do(e.t.Context(), e.clientOf(dial, 0), http.MethodGet, "http://localhost/admin/last-active?"+query, "", "")
			require.NoError(e.t, err)
			require.Equal(e.t, http.StatusOK, a.code, a.body)
			return a
		}
		var of admin.LastActive
		require.NoError(e.t, json.Unmarshal([]byte(page(query).body), &of))
		all, texts = append(all, of), append(texts, page(query+"&format=text").body)
	}
	return all, texts
}

func TestOperatorsSeeLastUseAndNextRelease(t *testing.T) {
	e := start(t, 2, 2)
	used, _ := e.claimOf(e.pool, `"idleTimeout":6`)
	silent, _ := e.claimOf(e.pool, `"idleTimeout":600,"timeout":3600`)
	socket := e.open(used)
	e.reaches(e.client(), silent)

	var first rest.LastActive
	e.eventually(func() error { // a look shows it, then the router says so
		first = e.uses("id=" + used.SandboxID)
		require.Len(t, first.Sandboxes, 1)
		if first.Sandboxes[0].Open != 1 {
			return fmt.Errorf("%+v", first.Sandboxes[0])
		}
		return nil
	})
	a := first.Sandboxes[0]
	require.False(t, first.DryRun)
	require.Equal(t, e.pool, a.Pool)
	require.InDelta(t, 6, a.IdleTimeout, 0)
	require.Equal(t, v1alpha1.ActivityRequests, a.Activity)
	require.Equal(t, activity.Open, a.Kind)
	require.NotEmpty(t, a.Router)
	require.Nil(t, a.EndAt)
	require.NotNil(t, a.Next)
	require.Equal(t, core.ReasonIdle, a.Next.Reason)
	require.InDelta(t, 6-a.AgeSeconds, a.Next.InSeconds, 0.001)

	open := 0
	pages, texts := e.usesThrough("id=" + used.SandboxID)
	for i, page := range pages {
		for _, s := range page.Sandboxes {
			require.Equal(t, used.SandboxID, s.SandboxID)
			require.Contains(t, texts[i], used.SandboxID)
			if open += s.OpenRequests; s.OpenRequests > 0 {
				require.Zero(t, s.AgeSeconds, "it is in use")
				require.Contains(t, texts[i], "open 1")
			}
		}
		require.Empty(t, page.LookError)
	}
	require.Equal(t, 1, open)

	// What nobody uses counts down; what is used does not, silent or not.
	before := e.uses("prefix=" + silent.SandboxID[:10]).Sandboxes
	require.Len(t, before, 1)
	require.Equal(t, core.ReasonIdle, before[0].Next.Reason, "which is before its end")
	require.NotNil(t, before[0].EndAt)
	e.pass(2 * 6 * time.Second)
	after := e.uses("pool=" + e.pool).Sandboxes
	require.Len(t, after, 2)
	for _, s := range after {
		switch s.SandboxID {
		case silent.SandboxID:
			require.Greater(t, s.AgeSeconds, before[0].AgeSeconds)
			require.Less(t, s.Next.InSeconds, before[0].Next.InSeconds)
			require.Zero(t, s.Open)
		case used.SandboxID:
			require.Less(t, s.AgeSeconds, s.IdleTimeout)
			require.Equal(t, 1, s.Open)
		default:
			t.Fatalf("%+v", s)
		}
	}
	require.Empty(t, e.uses("pool=nosuch").Sandboxes)
	require.Empty(t, e.uses("id="+silent.SandboxID+"&prefix=-").Sandboxes)
	limited := e.uses("pool=" + e.pool + "&limit=1")
	require.Len(t, limited.Sandboxes, 1)
	require.Equal(t, 1, limited.Truncated)
	require.Equal(t, apierror.NotImplemented,
		e.api(http.MethodGet, "/v1/admin/last-active?sandbox=x", "").refusal(t).Reason,
		"what is not understood is not ignored")

	text := e.api(http.MethodGet, "/v1/admin/last-active?format=text&id="+used.SandboxID, "").body
	require.Regexp(t, `^`+used.SandboxID+`  `+e.pool+`  \S+  \d+\.\d{3}s ago  open at \S+  1 open  Idle in \ds\n$`, text)
	out, err := e.berth("last-active", "--pool="+e.pool)
	require.NoError(t, err)
	table := strings.Split(strings.TrimSpace(out), "\n")
	require.Len(t, table, 3)
	require.Regexp(t, `^SANDBOX +POOL +IDLE FOR +TIMEOUT +OPEN +LAST ACTIVITY +NEXT$`, table[0])
	one, err := e.berth("last-active", "--id="+used.SandboxID)
	require.NoError(t, err)
	require.Regexp(t, used.SandboxID+` +`+e.pool+` +\S+ +6s +1 +open at \S+ +Idle in \ds`, one)
	require.NotContains(t, one, silent.SandboxID)
	e.echoes(socket, "still there")
}

func TestDryRunReapsNothingAndReportsIt(t *testing.T) {
	e := startAlone(t, 3, stack.Options{AllocatorArgs: []string{"--reap-dry-run"}})
	silent, _ := e.claimOf(e.pool, `"idleTimeout":5`)
	used, _ := e.claimOf(e.pool, `"idleTimeout":5`)
	ending, asked := e.claimOf(e.pool, `"idleTimeout":5,"timeout":9`)
	socket := e.open(used)
	leader := e.stack.Allocators[0]
	e.eventually(func() error {
		if n := e.metric(leader.Admin, "berth_allocator_would_reap_total"); n < 3 {
			return fmt.Errorf("%v releases were left undone", n)
		}
		return nil
	})
	require.True(t, e.uses("").DryRun)
	require.Contains(t, e.api(http.MethodGet, "/v1/admin/last-active?format=text&id="+silent.SandboxID, "").body,
		"(dry run)")
	raw, err := os.ReadFile(filepath.Join(e.cluster.Dir(), "allocator-0.log"))
	require.NoError(t, err)
	var named []string
	for line := range strings.Lines(string(raw)) {
		var l struct{ Msg, Sandbox string }
		if json.Unmarshal([]byte(line), &l) == nil && strings.HasPrefix(l.Msg, "dry run: an idle sandbox would be released") {
			named = append(named, l.Sandbox)
		}
	}
	require.Contains(t, named, sandboxid.Short(silent.SandboxID))
	require.NotContains(t, named, sandboxid.Short(used.SandboxID))
	e.echoes(socket, "still there")
	e.reaches(e.client(), silent)
	e.ends(ending, core.ReasonTimeout, asked.Add(9*time.Second)) // counts all the same
}
