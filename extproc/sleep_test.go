package extproc

import (
	"bytes"
	"context"
	"net"
	"net/netip"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/test/bufconn"

	"github.com/berth-sandbox/berth/allocator/controlserver"
	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/api/apierror"
	controlv1 "github.com/berth-sandbox/berth/api/control/v1"
	"github.com/berth-sandbox/berth/api/sandboxaccess"
	"github.com/berth-sandbox/berth/api/sandboxid"
	"github.com/berth-sandbox/berth/envoy"
	"github.com/berth-sandbox/berth/extproc/admission"
	"github.com/berth-sandbox/berth/extproc/controlclient"
	"github.com/berth-sandbox/berth/lastactive"
	"github.com/berth-sandbox/berth/lastactive/look"
	"github.com/berth-sandbox/berth/routecache"
)

// sleepWorld is a router with a session at a leader that the test plays, in a synctest bubble.
type sleepWorld struct {
	*Server
	t       *testing.T
	control *controlserver.Server
	goAway  func() // ends the leader
	// answer answers each Resolve.
	answer func(core.Resolve) core.SendResolved
	// beforeAdmit is called once.
	beforeAdmit func()

	mu       sync.Mutex
	stream   uint64
	routes   []core.Sandbox // of the next snapshot
	resolves []core.Resolve
	acked    uint64
}

// The methods of controlserver.Leader.
func (*sleepWorld) Valid() bool      { return true }
func (*sleepWorld) Term() uint64     { return 1 }
func (*sleepWorld) Journal() string  { return "j" }
func (*sleepWorld) Began() uint64    { return 1 }
func (*sleepWorld) Position() uint64 { return 1 }
func (*sleepWorld) Restored(uint64)  {}

func (w *sleepWorld) Submit(ev core.Event) {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch ev := ev.(type) {
	case core.SessionJoined:
		w.stream = ev.Stream
		w.control.Deliver(1, core.SendSnapshot{Stream: ev.Stream, Sequence: 1, Routes: w.routes})
	case core.SessionPing:
		w.control.Deliver(1, core.SendPong{Stream: ev.Stream, Nonce: ev.Nonce})
	case core.SessionAck:
		w.acked = ev.Sequence
	case core.Resolve:
		w.resolves = append(w.resolves, ev)
		answer := w.answer(ev)
		answer.Stream, answer.ID = ev.Stream, ev.ID
		w.control.Deliver(1, answer)
	}
}

// sends delivers an effect to the stream of the router.
func (w *sleepWorld) sends(of func(stream uint64) core.Effect) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.control.Deliver(1, of(w.stream))
}

// next sets what each Resolve is answered from now on, and the routes of the next snapshot.
func (w *sleepWorld) next(answer func(core.Resolve) core.SendResolved, routes ...core.Sandbox) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.answer, w.routes = answer, routes
}

// asked returns how often the leader was asked for a route, and to wake a sandbox.
func (w *sleepWorld) asked() (routes, wakes int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, r := range w.resolves {
		if r.Wake {
			wakes++
		} else {
			routes++
		}
	}
	w.resolves = nil
	return routes, wakes
}

// noDead reports no dead routers.
type noDead struct{}

func (noDead) Dead() []string        { return nil }
func (noDead) Forget([]string) error { return nil }

// admitting is Sandboxes with something before each admission.
type admitting struct {
	*admission.Sandboxes
	w *sleepWorld
}

func (a admitting) Admit(id sandboxid.Key, route routecache.Route, port uint16, http2 bool) (admission.Admission, admission.Why, time.Duration) {
	if before := a.w.beforeAdmit; before != nil {
		a.w.beforeAdmit = nil
		before()
	}
	return a.Sandboxes.Admit(id, route, port, http2)
}

func runAsleep(t *testing.T, routes []core.Sandbox, f func(*sleepWorld)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		// Pings keep the clock of the bubble running, so a test that hangs must be ended.
		defer time.AfterFunc(time.Hour, func() { panic("what the test waits for does not happen") }).Stop()
		began := time.Now()
		now := func() time.Duration { return time.Hour + time.Since(began) }
		w := &sleepWorld{t: t, routes: routes}
		var client *controlclient.Client
		sandboxes, err := admission.New(admission.Options{
			Routes: routecache.Options{Now: now, Ask: func(id string, wake bool) bool { return client.Ask(id, wake) }},
			Uses: lastactive.Options{
				ConnectWindow: envoy.ConnectWindow, Now: now,
				Look: func(context.Context) (look.Look, error) {
					return look.Look{Gateway: "this", Hosts: map[look.Host]int{{AddrPort: netip.AddrPortFrom(podRoute.Addr, 9000)}: 1}}, nil
				},
			},
		})
		require.NoError(t, err)
		require.Empty(t, sandboxes.Uses().FinalReport(t.Context()).LookError) // it has looked
		o := optionsWith("unused", sandboxes)
		o.Sandboxes = admitting{sandboxes, w}
		w.Server, err = New(o)
		require.NoError(t, err)

		w.control, err = controlserver.New(controlserver.Options{
			MaxStale: 15 * time.Minute, LeaderAddress: func() string { return "" }, AccessKey: accessKey(t), Log: zap.NewNop(),
		})
		require.NoError(t, err)
		w.control.Lead(w)
		listener := bufconn.Listen(1 << 16)
		leader := grpc.NewServer()
		controlv1.RegisterControlServer(leader, w.control)
		served := make(chan error, 1)
		go func() { served <- leader.Serve(listener) }()
		w.goAway = leader.Stop
		client, err = controlclient.New(controlclient.Options{
			Allocators: []string{"passthrough:///leader"}, RouterID: "router-0123456789abcdef", MaxStale: 15 * time.Minute,
			Sandboxes: sandboxes, Uses: sandboxes.Uses(), Keys: &TeamKeys{}, DeadRouters: noDead{}, GatewaySecret: bytes.Repeat([]byte("s"), 32),
			Probe: func(context.Context, netip.AddrPort, string) bool { return false },
			Dial: []grpc.DialOption{
				grpc.WithTransportCredentials(insecure.NewCredentials()),
				grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }),
			},
			Now: now, Log: zap.NewNop(),
		})
		require.NoError(t, err)
		ctx, stop := context.WithCancel(context.Background())
		ended := make(chan error, 1)
		go func() { ended <- client.Run(ctx, ctx) }()
		defer func() {
			stop()
			require.NoError(t, <-ended)
			leader.Stop()
			require.NoError(t, <-served)
		}()
		<-client.Ready()
		f(w)
	})
}

// answered is what the client of a request gets.
type answered struct {
	reason, dst string
	code        int
	retry       string
	after       time.Duration
}

// asks has the router decide about a request.
func (w *sleepWorld) asks(m *extprocv3.ProcessingRequest) <-chan answered {
	message := encoded(w.t, m)
	got := make(chan answered, 1)
	began := time.Now()
	go func() {
		reply, err := w.ask(message)
		require.NoError(w.t, err)
		answer := decoded(w.t, reply)
		berth := answer.GetDynamicMetadata().AsMap()["berth"].(map[string]any)
		a := answered{code: int(answer.GetImmediateResponse().GetStatus().GetCode()), after: time.Since(began)}
		a.reason, _ = berth["reply"].(string)
		a.dst, _ = berth["dst"].(string)
		for _, h := range answer.GetImmediateResponse().GetHeaders().GetSetHeaders() {
			if h.GetHeader().GetKey() == "retry-after" {
				a.retry = string(h.GetHeader().GetRawValue())
			}
		}
		got <- a
	}()
	return got
}

// sleeper is a sandbox that a request wakes.
func sleeper(change func(*core.Sandbox)) core.Sandbox {
	sb := core.Sandbox{Binding: core.Binding{ID: "abc"}, IP: podRoute.Addr, DefaultPort: 8080, Wakeable: true}
	if change != nil {
		change(&sb)
	}
	return sb
}

func asleepAs(sb core.Sandbox, busy bool) func(core.Resolve) core.SendResolved {
	return func(core.Resolve) core.SendResolved { return core.SendResolved{Sleeper: &sb, Busy: busy} }
}

// observed returns how many values a histogram without labels has.
func observed(t *testing.T, o Options, name string) int {
	families, err := o.Metrics.(*prometheus.Registry).Gather()
	require.NoError(t, err)
	for _, f := range families {
		if f.GetName() == name {
			return int(f.GetMetric()[0].GetHistogram().GetSampleCount())
		}
	}
	t.Fatal("there is no metric " + name)
	return 0
}

// Invariant: P27
func TestHundredRequestsShareOneWake(t *testing.T) {
	runAsleep(t, nil, func(w *sleepWorld) {
		sb := sleeper(nil)
		w.next(asleepAs(sb, false))
		requests := []*extprocv3.ProcessingRequest{
			fromEnvoy("9000-abc." + domain),
			headersOf(":authority", "9000-abc."+domain, ":path", "/x", ":method", "GET", "upgrade", "websocket"),
			headersOf(":authority", "9000-abc."+domain, ":path", "/x", ":method", "POST", "content-type", "application/grpc"),
			headersOf(":authority", "9000-abc."+domain, ":path", "/x", ":method", "OPTIONS", "origin", "https://a.example", "access-control-request-method", "GET"),
		}
		var all []<-chan answered
		for i := range 100 {
			all = append(all, w.asks(requests[i%len(requests)]))
		}
		time.Sleep(500 * time.Millisecond)
		for range 20 { // they come while the answer to the wake is kept
			all = append(all, w.asks(requests[0]))
		}
		synctest.Wait()
		routes, wakes := w.asked()
		require.Equal(t, []int{1, 1}, []int{routes, wakes})
		require.Equal(t, len(all), w.held.len())
		w.sends(func(stream uint64) core.Effect { return core.SendRoute{Stream: stream, Sequence: 2, Sandbox: sb} })
		for _, got := range all {
			require.Equal(t, "10.1.2.3:9000", (<-got).dst)
		}
		require.Zero(t, w.held.len())
		require.Equal(t, len(all), observed(t, w.decider.o, "berth_router_wake_wait_seconds"))
		require.Zero(t, observed(t, w.decider.o, "berth_router_admission_seconds"))
	})
}

// Invariant: P27
func TestRefusedRequestsNeverWakeASandbox(t *testing.T) {
	key := accessKey(t)
	private := func(sb *core.Sandbox) { sb.Access = core.AccessToken }
	agent := func(sb *core.Sandbox) { sb.Agent.Port = sandboxaccess.AgentPort }
	at := func(host string, more ...string) *extprocv3.ProcessingRequest {
		return headersOf(append([]string{":authority", host + "." + domain, ":path", "/", ":method", "GET"}, more...)...)
	}
	health := headersOf(":authority", "49983-abc."+domain, ":path", "/health", ":method", "GET", "x-access-token", key.Secret("abc").AgentToken("abc"))
	preflight := func(host string) *extprocv3.ProcessingRequest {
		return headersOf(":authority", host+"."+domain, ":path", "/", ":method", "OPTIONS", "origin", "https://a.example", "access-control-request-method", "GET")
	}
	for name, c := range map[string]struct {
		change  func(*core.Sandbox)
		busy    bool
		request *extprocv3.ProcessingRequest
		reason  string
		code    int
		retry   string
		wakes   int
	}{
		"without the token":       {private, false, at("8080-abc"), "access_denied", 403, "", 0},
		"with a wrong token":      {private, false, at("8080-abc", "e2b-traffic-access-token", "x"), "access_denied", 403, "", 0},
		"at a closed port":        {func(sb *core.Sandbox) { sb.Ports = []uint16{8080} }, false, at("22-abc"), "port_private", 403, "", 0},
		"without a port":          {func(sb *core.Sandbox) { sb.DefaultPort = 0 }, false, at("abc"), "no_route", 503, "1", 0},
		"outside the pods":        {func(sb *core.Sandbox) { sb.IP = netip.MustParseAddr("10.9.9.9") }, false, at("abc"), "no_route", 503, "1", 0},
		"without the agent token": {agent, false, at("49983-abc"), "agent_token", 401, "", 0},
		"for the agent's health":  {agent, false, health, "sandbox_asleep", 503, "", 0},
		"a preflight":             {agent, false, preflight("49983-abc"), "preflight", 204, "", 0},
		"a preflight by default": {func(sb *core.Sandbox) { agent(sb); sb.DefaultPort = sandboxaccess.AgentPort }, false,
			preflight("abc"), "preflight", 204, "", 0},
		"only calls wake it":        {func(sb *core.Sandbox) { sb.Wakeable = false }, false, at("8080-abc"), "sandbox_asleep", 503, "", 0},
		"too many are waking":       {nil, true, at("8080-abc"), "sandbox_asleep", 503, "1", 0},
		"a stranger when many wake": {private, true, at("8080-abc"), "access_denied", 403, "", 0},
		"with the token":            {private, false, at("8080-abc", "e2b-traffic-access-token", key.Token("abc")), "sandbox_asleep", 503, "1", 1},
		"with the agent token":      {agent, false, at("49983-abc", "x-access-token", key.Secret("abc").AgentToken("abc")), "sandbox_asleep", 503, "1", 1},
	} {
		t.Run(name, func(t *testing.T) {
			runAsleep(t, nil, func(w *sleepWorld) {
				w.next(asleepAs(sleeper(c.change), c.busy))
				got := <-w.asks(c.request)
				require.Equal(t, answered{reason: c.reason, code: c.code, retry: c.retry, after: got.after}, got)
				_, wakes := w.asked()
				require.Equal(t, c.wakes, wakes)
				require.Equal(t, c.wakes > 0, got.after == maxWakeWait, got.after)
			})
		})
	}
}

func TestLinkToASleeperIsAnsweredWithoutAWake(t *testing.T) {
	runAsleep(t, nil, func(w *sleepWorld) {
		w.next(asleepAs(sleeper(func(sb *core.Sandbox) { sb.Access = core.AccessToken }), false))
		link := accessKey(t).Secret("abc").Link("abc", 8080, time.Now().Add(time.Hour), "/x")
		got := <-w.asks(headersOf(":authority", "8080-abc."+domain, ":path", "/", ":method", "GET", envoy.LinkHeader, link))
		require.Equal(t, linkReason, got.reason)
		_, wakes := w.asked()
		require.Zero(t, wakes)
	})
}

func TestRefusalOfASleeperIsKeptForASecond(t *testing.T) {
	runAsleep(t, nil, func(w *sleepWorld) {
		w.next(asleepAs(sleeper(nil), true))
		for range 10 {
			require.Equal(t, "sandbox_asleep", (<-w.asks(fromEnvoy("9000-abc." + domain))).reason)
		}
		routes, wakes := w.asked()
		require.Equal(t, []int{1, 0}, []int{routes, wakes})
		time.Sleep(time.Second)
		<-w.asks(fromEnvoy("9000-abc." + domain))
		routes, wakes = w.asked()
		require.Equal(t, []int{1, 0}, []int{routes, wakes})
	})
}

// The leader finds only when it is asked for the wake that too many are waking.
func TestWakeThatIsRefusedIsAnsweredAtOnce(t *testing.T) {
	runAsleep(t, nil, func(w *sleepWorld) {
		sb := sleeper(nil)
		w.next(func(r core.Resolve) core.SendResolved { return core.SendResolved{Sleeper: &sb, Busy: r.Wake} })
		got := <-w.asks(fromEnvoy("9000-abc." + domain))
		require.Equal(t, answered{reason: "sandbox_asleep", code: 503, retry: "1"}, got)
		require.Zero(t, w.held.len())
		require.Equal(t, 1, observed(t, w.decider.o, "berth_router_wake_wait_seconds"))
	})
}

// Invariant: P8
func TestWaitForAWakeEndsWithoutALeader(t *testing.T) {
	for name, c := range map[string]struct {
		then   func(w *sleepWorld, sb core.Sandbox)
		reason string
		after  time.Duration
	}{
		"it stays away": {func(w *sleepWorld, _ core.Sandbox) { w.goAway() }, "sandbox_asleep", maxWakeWait},
		"the next one has woken it": {func(w *sleepWorld, sb core.Sandbox) {
			w.next(asleepAs(sb, false), sb)
			w.sends(func(stream uint64) core.Effect { return core.CloseStream{Stream: stream} })
		}, "", 0},
		"the next one is asked again": {func(w *sleepWorld, sb core.Sandbox) {
			w.next(func(core.Resolve) core.SendResolved { return core.SendResolved{Sandbox: &sb} })
			w.sends(func(stream uint64) core.Effect { return core.CloseStream{Stream: stream} })
		}, "", 0},
	} {
		t.Run(name, func(t *testing.T) {
			runAsleep(t, nil, func(w *sleepWorld) {
				sb := sleeper(nil)
				w.next(asleepAs(sb, false))
				got := w.asks(fromEnvoy("9000-abc." + domain))
				time.Sleep(time.Second)
				require.Empty(t, got)
				c.then(w, sb)
				a := <-got
				require.Equal(t, c.reason, a.reason)
				require.Less(t, a.after, maxWakeWait+envoy.MessageTimeout)
				if c.after > 0 {
					require.Equal(t, c.after, a.after)
				} else {
					require.Less(t, a.after, 5*time.Second)
				}
			})
		})
	}
}

// Invariant: P27
func TestCloseBetweenLookupAndAdmissionStopsTheRequest(t *testing.T) {
	sb := sleeper(func(sb *core.Sandbox) { sb.Wakeable = false })
	runAsleep(t, []core.Sandbox{sb}, func(w *sleepWorld) {
		w.next(asleepAs(sb, false))
		require.Equal(t, "10.1.2.3:9000", (<-w.asks(fromEnvoy("9000-abc." + domain))).dst)
		w.beforeAdmit = func() {
			w.sends(func(stream uint64) core.Effect {
				return core.SendClose{Stream: stream, Sequence: 2, ID: "abc"}
			})
			synctest.Wait()
		}
		require.Equal(t, "sandbox_asleep", (<-w.asks(fromEnvoy("9000-abc." + domain))).reason)
		synctest.Wait()
		w.mu.Lock()
		defer w.mu.Unlock()
		require.EqualValues(t, 2, w.acked)
	})
}

// E2B has one answer for what does not run. A sandbox that wakes is about to.
func TestSleeperLooksToE2BAsOneThatDoesNotRun(t *testing.T) {
	asleep := Target{ID: key("abc")}.refuse(apierror.SandboxAsleep, "this sandbox is asleep")
	for _, c := range []struct {
		to     client
		always bool
		code   int32
	}{{e2bSDK, false, 502}, {program, true, 502}, {program, false, 503}, {browser, false, 503}, {grpcClient, true, 502}} {
		require.EqualValues(t, c.code, refused(asleep, c.to, c.always).GetImmediateResponse().GetStatus().GetCode(), c)
	}
	require.Contains(t, string(refused(asleep, e2bSDK, false).GetImmediateResponse().GetBody()), apierror.E2BNotFound)
	waking := Target{ID: key("abc")}.tryWake("it is waking; try again")
	require.EqualValues(t, 503, refused(waking, e2bSDK, true).GetImmediateResponse().GetStatus().GetCode())
}
