package e2e

import (
	"context"
	"encoding/json"
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

	"connectrpc.com/connect"
	"github.com/coder/websocket"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/berth-sandbox/berth/agent/agentpb/process"
	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/api/sandboxaccess"
	"github.com/berth-sandbox/berth/api/sandboxid"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/devcluster/stack"
)

// Invariant I4 as clients see it: the shortest idle timeout, and uses that last two to three
// times as long, or twelve times with -e2e.long.
//
// It takes more than 20 s because each use must outlast idle timeouts of 5 s.
// Invariant: I4
func TestUsedSandboxesStayAndSilentOnesAreReaped(t *testing.T) {
	e := start(t, 8)
	e.allAtOnce(map[string]func(e *env){
		"no request at all":                     (*env).idleFromItsClaim,
		"a silent WebSocket":                    (*env).silentWebSocket,
		"a download whose reader has stopped":   (*env).stoppedDownload,
		"two ports":                             (*env).requestsToTwoPorts,
		"two hundred first requests":            (*env).manyFirstRequests,
		"a computation without a busy probe":    (*env).computationWithoutProbe,
		"server-sent events":                    (*env).serverSentEvents,
		"a slow upload":                         (*env).uploadSlowly,
		"a gRPC stream":                         (*env).grpcStream,
		"a request whose answer takes its time": (*env).slowAnswer,
		"a request now and then":                (*env).requestsNowAndThen,
		"calls that keep it":                    (*env).keepAlives,
	})
}

func (e *env) idleFromItsClaim() {
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
}

func (e *env) silentWebSocket() {
	s, _ := e.claimIdle(e.pool, leastIdle)
	socket := e.open(s)
	e.pass(lasts(3*leastIdle, time.Minute))
	require.True(e.t, e.live(s))
	e.echoes(socket, "still there")
	used := time.Now()
	require.NoError(e.t, socket.Close(websocket.StatusNormalClosure, ""))
	e.reaped(s, used)
}

func (e *env) stoppedDownload() {
	s, _ := e.claimIdle(e.pool, leastIdle)
	response := e.request(s, http.MethodGet, "/download", http.NoBody)
	require.Equal(e.t, http.StatusOK, response.StatusCode)
	e.pass(3 * leastIdle)
	require.True(e.t, e.live(s))
	used := time.Now()
	require.NoError(e.t, response.Body.Close())
	e.reaped(s, used)
}

func (e *env) requestsToTwoPorts() {
	s, _ := e.claimIdle(e.pool, leastIdle)
	var all sync.WaitGroup
	for i, port := range stack.DemoPorts() {
		all.Go(func() { e.sleeps(int(port), s, time.Duration(i+2)*leastIdle) })
	}
	all.Wait()
	e.reaped(s, time.Now())
}

func (e *env) manyFirstRequests() {
	s, _ := e.claimIdle(e.pool, leastIdle)
	var all sync.WaitGroup
	for range 200 {
		all.Go(func() { e.sleeps(8080, s, 2*leastIdle) })
	}
	all.Wait()
	e.reaped(s, time.Now())
}

// sleeps sends a request that is answered after d. It may be called by any goroutine.
func (e *env) sleeps(port int, s openapi.Sandbox, d time.Duration) {
	a, err := do(e.t.Context(), e.streaming(), http.MethodGet, fmt.Sprintf("http://gateway/sleep?ms=%d", d.Milliseconds()),
		e.host(port, s.SandboxID), "")
	assert.NoError(e.t, err)
	assert.Equal(e.t, http.StatusOK, a.code, a.body)
}

func (e *env) computationWithoutProbe() {
	s, _ := e.claimIdle(e.pool, leastIdle)
	a := e.do(http.MethodPost, s, "/busy?for=1h")
	require.Equal(e.t, http.StatusOK, a.code, a.body)
	e.reaped(s, time.Now().Add(-time.Second))
}

func (e *env) serverSentEvents() {
	s, _ := e.claimIdle(e.pool, leastIdle)
	e.sse(s, int(lasts(3*leastIdle, time.Minute)/time.Second))
	e.reaped(s, time.Now())
}

func (e *env) uploadSlowly() {
	s, _ := e.claimIdle(e.pool, leastIdle)
	e.slowUpload(s, lasts(3*leastIdle, time.Minute))
	e.reaped(s, time.Now())
}

func (e *env) grpcStream() {
	s, _ := e.claimIdle(e.pool, leastIdle)
	conn, err := grpc.NewClient("passthrough:///gateway", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithAuthority(e.host(8080, s.SandboxID)),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return e.site.front(ctx) }))
	require.NoError(e.t, err)
	defer conn.Close()
	stream, err := conn.NewStream(e.t.Context(), &grpc.StreamDesc{ServerStreams: true, ClientStreams: true},
		"/berth.demo.Echo/Echo")
	require.NoError(e.t, err)
	for range 2 {
		require.NoError(e.t, stream.SendMsg(wrapperspb.String("ahoy")))
		var got wrapperspb.StringValue
		require.NoError(e.t, stream.RecvMsg(&got))
		require.Equal(e.t, "ahoy", got.GetValue())
		e.pass(lasts(leastIdle+2*time.Second, 30*time.Second))
	}
	used := time.Now()
	require.NoError(e.t, stream.CloseSend())
	require.ErrorIs(e.t, stream.RecvMsg(new(wrapperspb.StringValue)), io.EOF)
	e.reaped(s, used)
}

func (e *env) slowAnswer() {
	s, _ := e.claimIdle(e.pool, leastIdle)
	e.sleeps(8080, s, lasts(3*leastIdle, 30*time.Second))
	e.reaped(s, time.Now())
}

func (e *env) requestsNowAndThen() {
	const idle = 6 * time.Second
	s, _ := e.claimIdle(e.pool, idle)
	client := e.client()
	end := time.Now().Add(lasts(3*leastIdle, time.Minute))
	var used time.Time
	for used.Before(end) {
		used = time.Now()
		a := e.get(client, e.host(8080, s.SandboxID), "/")
		require.Equal(e.t, http.StatusOK, a.code, a.body)
		require.Equal(e.t, s.PodName, a.identity(e.t).Pod)
		e.pass(idle - time.Second)
	}
	e.reaped(s, used)
}

func (e *env) keepAlives() {
	const idle = 6 * time.Second
	s, _ := e.claimIdle(e.pool, idle)
	end := time.Now().Add(lasts(3*leastIdle, time.Minute))
	var used time.Time
	for used.Before(end) {
		e.pass(idle / 2)
		used = time.Now()
		a := e.api(http.MethodPost, "/v1/sandboxes/"+s.SandboxID+"/keepalive", "")
		require.Equal(e.t, http.StatusNoContent, a.code, a.body)
	}
	e.reaped(s, used)
	a := e.api(http.MethodPost, "/v1/sandboxes/"+s.SandboxID+"/keepalive", "")
	require.Equal(e.t, apierror.SandboxGone, a.refusal(e.t).Reason, "nothing brings it back")
}

// It takes more than a minute because an idle timeout below a minute counts as a minute where
// bytes are counted.
// Invariant: I4
func TestOnlyMovingBytesKeepSandboxesOfTheirPool(t *testing.T) {
	e := startIdle(t, 0)
	bytes := e.otherPool("bytes", 3, func(p *v1alpha1.SandboxPoolSpec) { p.Activity = v1alpha1.ActivityBytes })
	e.allAtOnce(map[string]func(e *env){
		"a WebSocket that is only pinged": func(e *env) {
			s, _ := e.claimIdle(bytes, leastBytes)
			socket := e.open(s)
			go func() { _, _, _ = socket.Read(e.t.Context()) }() // reads the pongs
			began := time.Now()
			go func() {
				ticker := time.NewTicker(10 * time.Second)
				defer ticker.Stop()
				for socket.Ping(e.t.Context()) == nil {
					select {
					case <-ticker.C:
					case <-e.t.Context().Done():
					}
				}
			}()
			e.reaped(s, began)
		},
		"a WebSocket with two kilobytes a minute": func(e *env) {
			s, _ := e.claimIdle(bytes, leastBytes)
			socket := e.open(s)
			for range int(lasts(leastBytes+10*time.Second, 2*leastBytes) / (10 * time.Second)) {
				e.echoes(socket, strings.Repeat("x", 170)) // and back
				e.pass(10 * time.Second)
			}
			e.echoes(socket, strings.Repeat("x", 1024))
			require.True(e.t, e.live(s))
			if *longFlag {
				e.reaped(s, time.Now().Add(-time.Second))
			}
		},
	})
}

// It takes more than 20 s because the computation must outlast an idle timeout of 5 s.
// Invariant: I4
func TestBusyProbeKeepsAComputingSandbox(t *testing.T) {
	e := start(t, 0)
	longest := int32(3600)
	probed := e.otherPool("probed", 1, func(p *v1alpha1.SandboxPoolSpec) {
		p.BusyProbe, p.MaxLifetimeSeconds = &v1alpha1.BusyProbe{Port: p.DefaultPort, Path: "/busy"}, &longest
	})
	s, _ := e.claimOf(probed, `"idleTimeout":5`)
	busy := lasts(4*leastIdle, 40*time.Second)
	a := e.do(http.MethodPost, s, "/busy?for="+busy.String())
	require.Equal(t, http.StatusOK, a.code, a.body)
	until := time.Now().Add(busy)
	e.pass(busy - 8*time.Second)
	require.True(t, e.live(s))
	e.ends(s, fact.ReasonIdleTimeout, until)
}

// The client of the command disconnects, so the command alone keeps the sandbox, where the pool says so.
//
// It takes more than 20 s because the command must outlast an idle timeout of 5 s.
// Invariant: I4
func TestRunningCommandKeepsTheSandboxOfAPool(t *testing.T) {
	onThisMachine(t, "the agent of a real cluster is in an image")
	e := start(t, 0)
	longest := int32(3600)
	pool := func(busy v1alpha1.AgentBusy) string {
		return e.otherPool(strings.ToLower(string(busy)), 1, func(p *v1alpha1.SandboxPoolSpec) {
			p.Agent = &v1alpha1.PoolAgent{Enabled: true, Port: sandboxaccess.AgentPort, Busy: busy}
			p.MaxLifetimeSeconds = &longest
		})
	}
	commands, none := pool(v1alpha1.BusyCommands), pool(v1alpha1.BusyNone)
	kept, _ := e.claimOf(commands, `"idleTimeout":5`)
	pid, leave := e.runs(kept, "sleep 3600")
	leave()
	reaped, _ := e.claimOf(none, `"idleTimeout":5`)
	used := time.Now()
	_, leave = e.runs(reaped, "sleep 3600")
	leave()
	e.reaped(reaped, used)
	e.pass(2 * leastIdle)
	require.True(t, e.live(kept), "a command runs")
	ended := time.Now()
	_, err := e.agentOf(kept).SendSignal(t.Context(), connect.NewRequest(&processpb.SendSignalRequest{
		Process: &processpb.ProcessSelector{Selector: &processpb.ProcessSelector_Pid{Pid: pid}},
		Signal:  processpb.Signal_SIGNAL_SIGKILL,
	}))
	require.NoError(t, err)
	e.ends(kept, fact.ReasonIdleTimeout, ended)
}

// A request that comes at the moment of the release is answered by the sandbox's own pod, or
// with the reason that the sandbox is gone. An answered request keeps the sandbox.
// Invariant: I4
func TestRequestAtTheReapIsAnsweredOrRefused(t *testing.T) {
	const sandboxes, idle = 32, leastIdle
	e := startHere(t, sandboxes)
	var mu sync.Mutex
	answered, refused, kept := 0, 0, 0
	ask := func(e *env, client *http.Client, s openapi.Sandbox) bool {
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

func TestIdleTimeoutOutOfRangeIsRefused(t *testing.T) {
	e := start(t, 1)
	for _, seconds := range []int{-1, 1, 4, 31_536_001} {
		a := e.api(http.MethodPost, "/sandboxes", fmt.Sprintf(`{"templateID":%q,"idleTimeout":%d}`, e.pool, seconds))
		require.Equal(t, http.StatusBadRequest, a.code, a.body)
		r := a.refusal(t)
		require.Equal(t, apierror.BadRequest, r.Reason)
		want := "must be 0, for none, or 5 to 31536000 seconds"
		switch { // the OpenAPI document has the outer bounds
		case seconds < 0:
			want = "must be at least 0"
		case seconds > 31_536_000:
			want = "must be at most 31536000"
		}
		require.Contains(t, r.Message, fmt.Sprintf("idleTimeout: %d: %s", seconds, want))

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

func TestDryRunReapsNothingAndReportsIt(t *testing.T) {
	e := startDamaging(t, owners, 3, stack.Options{AllocatorArgs: []string{"--reap-dry-run"}})
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
	require.Contains(t, e.api(http.MethodGet, "/v1/last-active?format=text&id="+silent.SandboxID, "").body,
		"(dry run)")
	raw, err := os.ReadFile(filepath.Join(e.cluster.Dir(), "allocator-0.log"))
	require.NoError(t, err)
	var named []string
	for line := range strings.Lines(string(raw)) {
		var l struct{ Msg, SandboxID string }
		if json.Unmarshal([]byte(line), &l) == nil && strings.HasPrefix(l.Msg, "dry run: an idle sandbox would be released") {
			named = append(named, l.SandboxID)
		}
	}
	require.Contains(t, named, sandboxid.Short(silent.SandboxID))
	require.NotContains(t, named, sandboxid.Short(used.SandboxID))
	e.echoes(socket, "still there")
	e.reaches(e.client(), silent)
	e.ends(ending, fact.ReasonEndTime, asked.Add(9*time.Second)) // counts all the same
}
