package main

import (
	"bufio"
	"context"
	"encoding/base64"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	matcherv3 "github.com/envoyproxy/go-control-plane/envoy/type/matcher/v3"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"

	"github.com/berth-sandbox/berth/allocator/controlserver"
	"github.com/berth-sandbox/berth/allocator/core"
	controlv1 "github.com/berth-sandbox/berth/api/control/v1"
	"github.com/berth-sandbox/berth/api/sandboxaccess"
	"github.com/berth-sandbox/berth/devcluster"
	"github.com/berth-sandbox/berth/devcluster/proc"
	"github.com/berth-sandbox/berth/e2e/harness"
	"github.com/berth-sandbox/berth/envoy"
	"github.com/berth-sandbox/berth/internal/bootclock"
	"github.com/berth-sandbox/berth/internal/controltls"
)

// The pods of the first and the second sandbox have this address, one after the other.
const podAddr = "127.0.0.2"

// allocator is the real core behind the real control server. Its journal is written at once.
type allocator struct {
	t      *testing.T
	key    *sandboxaccess.Key
	server *controlserver.Server
	addr   string
	// certs is the directory with the certificate of an egress router.
	certs string

	mu      sync.Mutex
	core    *core.Core
	effects []core.Effect // that were not awaited yet
	ids     int
	late    func(core.Effect) bool // which effects are held back; nil: none
	held    []core.Effect
}

func (*allocator) Valid() bool     { return true }
func (*allocator) Term() uint64    { return 1 }
func (*allocator) Journal() string { return "j" }
func (*allocator) Began() uint64   { return 1 }
func (*allocator) Position() uint64 {
	return 1
}
func (*allocator) Restored(uint64) {}

func (a *allocator) Submit(ev core.Event) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for events := []core.Event{ev}; len(events) > 0; events = events[1:] {
		now := core.Instant{Boot: bootclock.Now(), Wall: time.Now()}
		for _, e := range a.core.Step(now, events[0]) {
			switch e := e.(type) {
			case core.Write:
				events = append(events, core.Written{At: now.Boot}, core.WriterReady{})
			case core.Configure:
				events = append(events, core.Configured{ID: e.Sandbox.ID, OK: true})
			case core.WriteObject:
				events = append(events, core.ObjectWritten{ID: e.Sandbox.ID, Revision: e.Sandbox.Revision})
			}
			if a.late != nil && a.late(e) {
				a.held = append(a.held, e)
			} else if !a.server.Deliver(1, e) {
				a.effects = append(a.effects, e)
			}
		}
	}
}

// hold has messages to routers held back, until the next call delivers them. It returns them.
func (a *allocator) hold(late func(core.Effect) bool) (held []core.Effect) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, e := range a.held {
		require.True(a.t, a.server.Deliver(1, e))
	}
	held, a.held, a.late = a.held, nil, late
	return held
}

// holds returns how many messages are held back.
func (a *allocator) holds() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return len(a.held)
}

// came returns the effects of a kind that were not awaited yet.
func came[E core.Effect](a *allocator) (all []E) {
	a.mu.Lock()
	defer a.mu.Unlock()
	var others []core.Effect
	for _, e := range a.effects {
		if e, ok := e.(E); ok {
			all = append(all, e)
			continue
		}
		others = append(others, e)
	}
	a.effects = others
	return all
}

// await returns the next effect of a kind.
func await[E core.Effect](a *allocator) E {
	a.t.Helper()
	var all []E
	require.Eventually(a.t, func() bool { all = came[E](a); return len(all) > 0 }, time.Minute, time.Millisecond)
	require.Len(a.t, all, 1)
	return all[0]
}

var egressPool = core.PoolKey{Namespace: "sandboxes", Name: "python"}

// startAllocator starts one with a pool whose sandboxes may reach these ports.
func startAllocator(t *testing.T, ports ...uint16) *allocator {
	key, err := sandboxaccess.NewKey([]byte(strings.Repeat("k", 32)))
	require.NoError(t, err)
	a := &allocator{t: t, key: key}
	a.server, err = controlserver.New(controlserver.Options{
		MaxStale: 15 * time.Minute, LeaderAddress: func() string { return "" }, AccessKey: key, Log: zap.NewNop(),
	})
	require.NoError(t, err)
	a.core, err = core.New(core.Config{
		Term: 1, MaxStale: 15 * time.Minute, ConnectWindow: time.Second, Lease: time.Millisecond, Linger: -1,
		NewID:     func() string { a.ids++; return fmt.Sprintf("abcdefghij%010d", a.ids) },
		NewSuffix: func() string { return "x" },
	}, core.Instant{Boot: bootclock.Now(), Wall: time.Now()})
	require.NoError(t, err)
	_, err = a.core.Recover(core.State{Nodes: []string{"n1"}})
	require.NoError(t, err)
	a.server.Lead(a)
	a.Submit(core.PoolSeen{Pool: core.Pool{
		Key: egressPool, Template: "t", Warm: 1, MaxPods: 10, DefaultPort: 80, Agent: core.Agent{Port: 49983},
		Egress: &core.PoolEgress{Ports: ports},
	}})
	ours := authority(t)
	a.certs = tlsDir(t, ours, controltls.EgressName)
	security, stop, err := controltls.Server(tlsDir(t, ours, controltls.AllocatorName))
	require.NoError(t, err)
	t.Cleanup(stop)
	s := grpc.NewServer(grpc.Creds(security))
	controlv1.RegisterControlServer(s, a.server)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	a.addr = l.Addr().String()
	var running sync.WaitGroup
	running.Go(func() { _ = s.Serve(l) })
	ctx, cancel := context.WithCancel(context.Background())
	running.Go(func() {
		for ctx.Err() == nil {
			a.Submit(core.Tick{})
			time.Sleep(20 * time.Millisecond)
		}
	})
	t.Cleanup(func() { cancel(); s.Stop(); running.Wait() })
	return a
}

// claim hands a pod at podAddr to a sandbox that may reach these hosts only.
func (a *allocator) claim(n int, allow ...string) core.Sandbox {
	a.t.Helper()
	a.Submit(core.PodSeen{Pod: core.Pod{
		Key:  core.PodKey{Namespace: "sandboxes", Name: fmt.Sprint("python-", n), UID: fmt.Sprintf("0f6bd8a6-5c0c-4a5e-9d0a-%012d", n)},
		Pool: "python", Node: "n1", IP: netip.MustParseAddr(podAddr), Template: "t", Version: strconv.Itoa(n), Ready: true,
		AgentPort: 49983, Egress: true,
	}})
	a.Submit(core.Claim{Token: uint64(n), Pool: egressPool, Wait: time.Minute, Binding: core.Binding{
		Network: core.EgressRules{Allow: allow, Deny: []string{"0.0.0.0/0"}},
	}})
	return await[core.Claimed](a).Sandbox
}

// credential is what the agent gives to the processes of a sandbox.
func (a *allocator) credential(sb *core.Sandbox) string {
	token := a.key.EgressToken(sb.ID, sb.Incarnation)
	return "Basic " + base64.StdEncoding.EncodeToString([]byte(sb.ID+":"+token))
}

// nameServer answers that every name is at 127.0.0.1. asked returns what was asked for.
func nameServer(t *testing.T) (addr string, asked func() []string) {
	var mu sync.Mutex
	names := map[string]bool{}
	addr = harness.NameServer(t, netip.MustParseAddr("127.0.0.1"), func(name string) netip.Addr {
		mu.Lock()
		defer mu.Unlock()
		names[name] = true
		return netip.MustParseAddr("127.0.0.1")
	})
	return addr, func() []string { mu.Lock(); defer mu.Unlock(); return slices.Sorted(maps.Keys(names)) }
}

// origin repeats what it gets.
func origin(t *testing.T) uint16 {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	var serving sync.WaitGroup
	serving.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			serving.Go(func() { defer c.Close(); _, _ = io.Copy(c, c) })
		}
	})
	t.Cleanup(func() { l.Close(); serving.Wait() })
	return netip.MustParseAddrPort(l.Addr().String()).Port()
}

// egressGateway is a real Envoy and a router in egress mode, which runs in this process.
type egressGateway struct {
	t       *testing.T
	addr    string
	envoy   *proc.Process
	router  *process
	port    uint16 // of the origin
	asked   func() []string
	control *allocator
}

func startEgress(t *testing.T) *egressGateway {
	if testing.Short() {
		t.Skip("needs real Envoy: run without -short")
	}
	bin, err := devcluster.EnvoyBinary(t.Context(), nil)
	require.NoError(t, err)
	g := &egressGateway{t: t, port: origin(t)}
	names, asked := nameServer(t)
	g.asked, g.control = asked, startAllocator(t, g.port)
	dir, err := os.MkdirTemp("", "berth-")
	require.NoError(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	socket, admin := filepath.Join(dir, "s"), filepath.Join(dir, "a")
	ca := filepath.Join(dir, "ca.pem")
	files, err := authority(t).Files()
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(ca, files.CA, 0o600))
	g.router = start(t, "--mode=Egress", "--allocator="+g.control.addr, "--socket="+socket, "--envoy-admin="+admin,
		"--control-tls-dir="+g.control.certs, "--outside-cidrs=127.0.0.0/8", "--name-server="+names)

	bootstrap, err := envoy.EgressBootstrap(envoy.EgressSettings{
		Listen: netip.MustParseAddrPort("127.0.0.1:0"), CAFile: ca, RouterSocket: socket, AdminSocket: admin,
	})
	require.NoError(t, err)
	bootstrap.Admin.AllowPaths = append(bootstrap.Admin.AllowPaths,
		&matcherv3.StringMatcher{MatchPattern: &matcherv3.StringMatcher_Prefix{Prefix: "/listeners"}})
	raw, err := protojson.Marshal(bootstrap)
	require.NoError(t, err)
	config := filepath.Join(dir, "envoy.json")
	require.NoError(t, os.WriteFile(config, raw, 0o600))
	supervisor, err := proc.New()
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, supervisor.Close()) })
	g.envoy, err = supervisor.Start(exec.Command(bin, "-c", config, "--disable-hot-restart", "--concurrency", "1", "--log-level", "error"))
	require.NoError(t, err)
	client := envoy.AdminClient(admin)
	t.Cleanup(client.CloseIdleConnections)
	require.Eventually(t, func() bool {
		r, err := client.Get("http://envoy/listeners")
		if err != nil {
			return false
		}
		defer r.Body.Close()
		page, _ := io.ReadAll(r.Body)
		for line := range strings.Lines(string(page)) {
			if addr, ok := strings.CutPrefix(strings.TrimSpace(line), "egress::"); ok && !strings.HasSuffix(addr, ":0") {
				g.addr = addr
			}
		}
		return g.addr != ""
	}, time.Minute, 20*time.Millisecond)
	return g
}

// connect asks for a tunnel to the origin under a name, with a credential.
func (g *egressGateway) connect(credential, name string) (c net.Conn, status int) {
	g.t.Helper()
	c = g.send(credential, name)
	return c, g.answer(c)
}

// send asks for a tunnel, and answer returns what came back.
func (g *egressGateway) send(credential, name string) (c net.Conn) {
	g.t.Helper()
	dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(podAddr)}}
	c, err := dialer.DialContext(g.t.Context(), "tcp", g.addr)
	require.NoError(g.t, err)
	g.t.Cleanup(func() { c.Close() })
	require.NoError(g.t, c.SetDeadline(time.Now().Add(time.Minute)))
	_, err = fmt.Fprintf(c, "CONNECT %s:%d HTTP/1.1\r\nHost: x\r\nProxy-Authorization: %s\r\n\r\n", name, g.port, credential)
	require.NoError(g.t, err)
	return c
}

func (g *egressGateway) answer(c net.Conn) (status int) {
	g.t.Helper()
	r, err := http.ReadResponse(bufio.NewReaderSize(c, 16), &http.Request{Method: http.MethodConnect})
	require.NoError(g.t, err)
	return r.StatusCode
}

// open opens a tunnel.
func (g *egressGateway) open(credential, name string) net.Conn {
	g.t.Helper()
	c, status := g.connect(credential, name)
	require.Equal(g.t, http.StatusOK, status)
	works(g.t, c)
	return c
}

func works(t *testing.T, c net.Conn) {
	t.Helper()
	_, err := io.WriteString(c, "ping")
	require.NoError(t, err)
	got := make([]byte, 4)
	_, err = io.ReadFull(c, got)
	require.NoError(t, err)
	require.Equal(t, "ping", string(got))
}

func isCut(t *testing.T, c net.Conn) {
	t.Helper()
	_, err := io.Copy(io.Discard, c)
	require.NotErrorIs(t, err, os.ErrDeadlineExceeded, "the tunnel stays open")
}

// pause has Envoy stand still.
func (g *egressGateway) pause() (goOn func()) {
	require.NoError(g.t, syscall.Kill(g.envoy.Pid(), syscall.SIGSTOP))
	require.Eventually(g.t, func() bool { return stands(g.t, g.envoy.Pid()) }, time.Minute, time.Millisecond)
	return func() { require.NoError(g.t, syscall.Kill(g.envoy.Pid(), syscall.SIGCONT)) }
}

// stands reports whether all threads of a process are stopped (proc(5)).
func stands(t *testing.T, pid int) bool {
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
	require.NoError(t, err)
	for _, thread := range threads {
		raw, err := os.ReadFile(thread)
		require.NoError(t, err)
		if _, rest, _ := strings.Cut(string(raw), ") "); !strings.HasPrefix(rest, "T") {
			return false
		}
	}
	return len(threads) > 0
}

// settled is how long the tests watch that something does not happen.
const settled = 300 * time.Millisecond

// Invariant: P35, P36
func TestReleaseIsAcknowledgedAfterTheTunnelsEnd(t *testing.T) {
	g := startEgress(t)
	first := g.control.claim(1, "*.example.com")
	tunnel := g.open(g.control.credential(&first), "echo.example.com")
	_, status := g.connect(g.control.credential(&first), "echo.example.org")
	require.Equal(t, http.StatusForbidden, status)
	require.Equal(t, []string{"echo.example.com."}, g.asked(), "a name that is refused is not looked up")

	goOn := g.pause()
	g.control.Submit(core.Release{Token: 7, Scope: core.Scope{All: true}, ID: first.ID, Reason: "Killed"})
	time.Sleep(settled)
	require.Empty(t, came[core.Acknowledged](g.control), "its tunnel may be open")
	goOn()
	require.Equal(t, first.ID, await[core.Acknowledged](g.control).ID)
	isCut(t, tunnel)

	require.Equal(t, first.Pod, await[core.DeletePod](g.control).Pod)
	g.control.Submit(core.PodGone{Key: first.Pod})
	second := g.control.claim(2, "*.example.com")
	_, status = g.connect(g.control.credential(&first), "echo.example.com")
	require.Equal(t, http.StatusForbidden, status, "another sandbox has the address")
	g.open(g.control.credential(&second), "echo.example.com")
}

// Invariant: P35, P36
func TestNewRulesAreAnsweredAfterTheTunnelsEnd(t *testing.T) {
	g := startEgress(t)
	sb := g.control.claim(1, "*.example.com", "*.example.org")
	credential := g.control.credential(&sb)
	gone, kept := g.open(credential, "a.example.com"), g.open(credential, "a.example.org")
	set := func(token uint64, allow ...string) {
		g.control.Submit(core.SetNetwork{Token: token, Scope: core.Scope{All: true}, ID: sb.ID,
			Rules: core.EgressRules{Allow: allow, Deny: []string{"0.0.0.0/0"}}})
	}
	goOn := g.pause()
	set(8, "*.example.org")
	time.Sleep(settled)
	require.Empty(t, came[core.SandboxCallAnswered](g.control), "a tunnel that they refuse may be open")
	goOn()
	require.Equal(t, core.CallOK, await[core.SandboxCallAnswered](g.control).Status)
	isCut(t, gone)
	works(t, kept)
	_, status := g.connect(credential, "a.example.com")
	require.Equal(t, http.StatusForbidden, status)

	goOn = g.pause()
	set(9, "*.example.org", "*.example.net")
	require.Equal(t, core.CallOK, await[core.SandboxCallAnswered](g.control).Status, "they refuse nothing that is open")
	goOn()
	g.open(credential, "a.example.net")
}

// It is what a gateway that is taken over can use.
//
// Invariant: P35
func TestCertificateOfAnEgressRouterOpensNoOtherSession(t *testing.T) {
	a := startAllocator(t, 443)
	security, stop, err := controltls.Client(a.certs, controltls.EgressName)
	require.NoError(t, err)
	t.Cleanup(stop)
	conn, err := grpc.NewClient("passthrough:///"+a.addr, grpc.WithTransportCredentials(security))
	require.NoError(t, err)
	t.Cleanup(func() { conn.Close() })
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	session, err := controlv1.NewControlClient(conn).Session(ctx)
	require.NoError(t, err)
	require.NoError(t, session.Send(&controlv1.RouterMessage{Message: &controlv1.RouterMessage_Join{Join: &controlv1.Join{
		RouterId: "router-0123456789abcdef", MaxStaleNanos: uint64(time.Minute), GatewayHash: make([]byte, 32),
	}}}))
	_, err = session.Recv()
	require.Equal(t, codes.PermissionDenied, status.Code(err))
	require.ErrorContains(t, err, "needs a certificate for the DNS name "+controltls.RouterName)
}

func TestEgressRouterThatStopsSaysGoodbye(t *testing.T) {
	g := startEgress(t)
	sb := g.control.claim(1, "*.example.com")
	tunnel := g.open(g.control.credential(&sb), "a.example.com")
	require.Eventually(t, func() bool {
		code, _ := get(t, g.router.listening.Admin, "/readyz")
		return code == 200
	}, time.Minute, 10*time.Millisecond)
	_, body := get(t, g.router.listening.Admin, "/metrics")
	require.Contains(t, body, `berth_egress_requests_total{outcome="admitted"} 1`)
	require.Contains(t, body, "berth_egress_open 1")
	_, body = get(t, g.router.listening.Admin, "/admin/routes")
	require.Contains(t, body, podAddr)
	require.NoError(t, g.router.stop())
	isCut(t, tunnel)
	g.control.Submit(core.Release{Token: 7, Scope: core.Scope{All: true}, ID: sb.ID, Reason: "Killed"})
	released := await[core.ReleaseAnswered](g.control)
	require.Zero(t, released.Outstanding, "the router has said Goodbye")
}

// The rules are late: the router hears of the sandbox by its own question only, or the answer is late, too. A request
// without an answer is refused after a second. One that still waits when the answer comes is let through.
//
// Invariant: P35
func TestRequestAheadOfItsRulesWaitsAndPasses(t *testing.T) {
	g := startEgress(t)
	require.Eventually(t, func() bool {
		code, _ := get(t, g.router.listening.Admin, "/readyz")
		return code == 200
	}, time.Minute, 10*time.Millisecond)
	_, status := g.connect("Basic eDp5", "a.example.com")
	require.Equal(t, http.StatusForbidden, status, "the pod is warm at most: no sandbox has its address")

	pushed := func(e core.Effect) bool { _, is := e.(core.SendRoute); return is }
	g.control.hold(pushed)
	first := g.control.claim(1, "*.example.com")
	require.Equal(t, 1, g.control.holds())
	g.open(g.control.credential(&first), "a.example.com")
	_, status = g.connect(g.control.credential(&first), "a.example.org")
	require.Equal(t, http.StatusForbidden, status)
	g.control.hold(nil)
	g.control.Submit(core.Release{Token: 7, Scope: core.Scope{All: true}, ID: first.ID, Reason: "Killed"})
	require.Equal(t, first.Pod, await[core.DeletePod](g.control).Pod)
	g.control.Submit(core.PodGone{Key: first.Pod})

	g.control.hold(func(e core.Effect) bool { _, answer := e.(core.SendResolved); return answer || pushed(e) })
	second := g.control.claim(2, "*.example.com")
	_, status = g.connect(g.control.credential(&second), "a.example.com")
	require.Equal(t, http.StatusForbidden, status, "there was no answer for a second")
	held := g.control.holds()
	waiting := g.send(g.control.credential(&second), "a.example.com")
	require.Eventually(t, func() bool { return g.control.holds() > held }, time.Minute, time.Millisecond)
	require.NotEmpty(t, g.control.hold(nil))
	require.Equal(t, http.StatusOK, g.answer(waiting))
	works(t, waiting)
}
