package soak

import (
	"bufio"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"
	"golang.org/x/time/rate"

	processpb "github.com/berth-sandbox/berth/agent/agentpb/process"
	"github.com/berth-sandbox/berth/allocator/rest"
	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/api/sandboxaccess"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/devcluster"
	"github.com/berth-sandbox/berth/devcluster/stack"
	"github.com/berth-sandbox/berth/e2e/harness"
	"github.com/berth-sandbox/berth/e2e/history"
	"github.com/berth-sandbox/berth/internal/wait"
)

const (
	// egressTenants claim one sandbox after the other. Their pool has few pods, so addresses are used again soon.
	egressTenants, egressWarm, egressMostPods = 5, 2, 8
	// egressLasts is how long they do, and egressMost if too little happens in that time.
	egressLasts, egressMost = 35 * time.Second, 2 * time.Minute
	// haunts is how long messages are sent from the address of a sandbox that has ended, with its credential, and
	// hauntEvery the pause between two.
	haunts, hauntEvery = 15 * time.Second, 300 * time.Millisecond
	// routerAway is how long the egress gateway has no router.
	routerAway = 4 * time.Second
)

// egressGround is a Berth with an egress gateway, and one origin that has every name.
type egressGround struct {
	*harness.Berth
	*outgoings
	port    string // of the origin
	limiter *rate.Limiter

	alive sync.Map // the host that a sandbox that lives may reach, by its name
}

// tenant is a sandbox that sends through the gateway. The test sends for it, from the address of its pod: so it can
// go on when the sandbox has ended.
type tenant struct {
	*egressGround
	name, id   string
	addr       string
	credential string
	host       atomic.Pointer[string] // that its rules allow
	before     atomic.Pointer[string] // that they allowed before
	released   atomic.Bool
}

func newEgressGround(t *testing.T) *egressGround {
	t.Helper()
	g := &egressGround{outgoings: newOutgoings(), limiter: rate.NewLimiter(200, 5)}
	var connections atomic.Uint64
	type number struct{}
	origin := httptest.NewUnstartedServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		n, err := strconv.Atoi(strings.TrimPrefix(r.URL.Path, "/"))
		if err != nil {
			n = -1
		}
		host, _, _ := strings.Cut(r.Host, ":")
		g.arrive(arrival{message: n, host: host, connection: r.Context().Value(number{}).(uint64)})
	}))
	origin.Config.ConnContext = func(ctx context.Context, _ net.Conn) context.Context {
		return context.WithValue(ctx, number{}, connections.Add(1))
	}
	origin.Start()
	t.Cleanup(origin.Close)
	at := netip.MustParseAddrPort(origin.Listener.Addr().String())
	g.port = strconv.Itoa(int(at.Port()))
	g.Berth = harness.NewRun(t, history.Settings{Suite: history.Soak, Seed: *seedFlag}, "").Start(harness.Options{
		Cluster: devcluster.Options{Nodes: 1, NodePath: []string{binDir}},
		Stack: stack.Options{BinDir: binDir, Egress: &stack.Egress{RouterArgs: []string{
			"--outside-cidrs=" + at.Addr().String() + "/32", "--name-server=" + harness.NameServer(t, at.Addr(), nil),
		}}},
	})
	g.CreatePool(poolName, egressWarm, func(p *v1alpha1.SandboxPool) {
		p.Spec.Agent = &v1alpha1.PoolAgent{Enabled: true, Port: sandboxaccess.AgentPort}
		p.Spec.Egress = &v1alpha1.PoolEgress{Mode: v1alpha1.EgressGateway, Ports: []int32{int32(at.Port())}}
		p.Spec.MaxPods = new(int32)
		*p.Spec.MaxPods = egressMostPods
		p.Spec.Template.Spec.TerminationGracePeriodSeconds = new(int64) // the address is free soon
	})
	return g
}

// Sandboxes come and go at few addresses. Each may reach a host of its own, which changes. It also tries the one of
// before and those of others, and goes on when it has ended. The router is killed once.
//
// Invariant: P35, P36
func TestNothingLeavesUnderTheRulesOfAnotherSandbox(t *testing.T) {
	g := newEgressGround(t)
	working, stop := context.WithCancel(t.Context())
	var worked sync.WaitGroup
	t.Cleanup(func() { stop(); worked.Wait() })
	for i := range egressTenants {
		worked.Go(func() { g.tenants(working, fmt.Sprintf("t%d", i)) })
	}
	wait.Sleep(working, egressLasts/2)
	require.NoError(t, g.Stack.Egress.Router.Kill())
	g.away()
	wait.Sleep(working, routerAway)
	g.back()
	require.NoError(t, g.Stack.Egress.Router.Start(t.Context()))
	wait.Sleep(working, egressLasts/2)
	for end := time.Now().Add(egressMost); time.Now().Before(end) && len(g.lacks()) > 0 && !g.Failed(); {
		wait.Sleep(working, time.Second)
	}
	stop()
	worked.Wait()
	for _, v := range append(g.judge(), g.lacks()...) {
		g.Error(v)
	}
	g.Logf("%d messages, %d arrived, %d addresses were used again, %d changes of rules",
		len(g.sent), len(g.arrived), g.reused, g.changes)
}

// tenants claims one sandbox after the other, until ctx ends.
func (g *egressGround) tenants(ctx context.Context, name string) {
	random := g.Random(name)
	var haunting sync.WaitGroup
	defer haunting.Wait()
	for n := 0; ctx.Err() == nil; n++ {
		s := g.claimed(ctx, fmt.Sprintf("%s-%d", name, n))
		if s == nil {
			wait.Sleep(ctx, 100*time.Millisecond+harness.Within(random, 200*time.Millisecond))
			continue
		}
		sending, stop := context.WithCancel(ctx)
		for i := range 2 {
			haunting.Go(func() { s.sends(sending, g.Random(fmt.Sprint(s.name, i)), i == 0) })
		}
		for v := range 1 + random.IntN(2) {
			wait.Sleep(ctx, 200*time.Millisecond+harness.Within(random, 600*time.Millisecond))
			s.change(ctx, v+1)
		}
		wait.Sleep(ctx, 200*time.Millisecond+harness.Within(random, 600*time.Millisecond))
		s.release(ctx)
		haunting.Go(func() { wait.Sleep(ctx, haunts); stop() })
	}
}

// hostOf is the host that a sandbox may reach after so many changes.
func hostOf(name string, version int) string {
	return fmt.Sprintf("%s-v%d.soak.example", name, version)
}

func network(host string) string {
	return fmt.Sprintf(`{"allowOut":[%q],"denyOut":["0.0.0.0/0"]}`, host)
}

// claimed claims a sandbox, nil if no pod is warm, and asks its agent for what its processes know.
func (g *egressGround) claimed(ctx context.Context, name string) *tenant {
	host := hostOf(name, 0)
	g.allow(name, host)
	body := fmt.Sprintf(`{"templateID":%q,"timeout":600,"waitTimeout":3,"network":%s}`, poolName, network(host))
	a, ok := g.call(ctx, http.MethodPost, "/sandboxes", body, http.StatusCreated, http.StatusTooManyRequests)
	if !ok || a.Code != http.StatusCreated {
		return nil
	}
	var got openapi.Sandbox
	require.NoError(g, json.Unmarshal(a.Body, &got))
	t := &tenant{egressGround: g, name: name, id: got.SandboxID}
	t.host.Store(&host)
	environment, err := g.runs(ctx, got, "echo $POD_IP $HTTP_PROXY")
	if err != nil {
		if ctx.Err() == nil {
			g.Errorf("sandbox %s: %v", name, err)
		}
		return nil
	}
	addr, proxy, _ := strings.Cut(strings.TrimSpace(environment), " ")
	at, err := url.Parse(proxy)
	if err != nil || at.User == nil {
		g.Errorf("sandbox %s: no proxy in %q", name, environment)
		return nil
	}
	t.addr, t.credential = addr, "Basic "+base64.StdEncoding.EncodeToString([]byte(at.User.String()))
	g.holds(name, addr)
	g.alive.Store(name, host)
	return t
}

// runs returns what a script prints in a sandbox.
func (g *egressGround) runs(ctx context.Context, s openapi.Sandbox, script string) (out string, err error) {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	q := connect.NewRequest(&processpb.StartRequest{Process: &processpb.ProcessConfig{
		Cmd: "/bin/sh", Args: []string{"-c", script}}})
	q.Header().Set(sandboxaccess.AgentHeader, *s.EnvdAccessToken)
	q.Header().Set("E2b-Sandbox-Id", s.SandboxID)
	q.Header().Set("E2b-Sandbox-Port", strconv.Itoa(sandboxaccess.AgentPort))
	gateway := net.JoinHostPort(g.Stack.Domain, strconv.Itoa(int(g.Gateways[0].Addr.Port())))
	stream, err := processpb.NewProcessClient(g.HTTP, "http://"+gateway).Start(ctx, q)
	if err != nil {
		return "", err
	}
	defer stream.Close()
	for stream.Receive() {
		out += string(stream.Msg().GetEvent().GetData().GetStdout())
	}
	return out, stream.Err()
}

// call calls the API until it gives one of these answers. It reports false when ctx has ended.
func (g *egressGround) call(ctx context.Context, method, path, body string, codes ...int) (harness.Answer, bool) {
	for ctx.Err() == nil {
		call, cancel := context.WithTimeout(ctx, time.Minute)
		a, err := harness.Do(call, g.HTTP, method, g.Stack.Allocators[0].API+path, "", body)
		cancel()
		for _, code := range codes {
			if err == nil && a.Code == code {
				return a, true
			}
		}
		wait.Sleep(ctx, 100*time.Millisecond)
	}
	return harness.Answer{}, false
}

// change has the sandbox reach another host only.
func (t *tenant) change(ctx context.Context, version int) {
	before, host := *t.host.Load(), hostOf(t.name, version)
	t.allow(t.name, host)
	a, ok := t.call(ctx, http.MethodPut, "/sandboxes/"+t.id+"/network", network(host),
		http.StatusNoContent, http.StatusNotFound)
	if ok && a.Code == http.StatusNoContent {
		t.changed(before)
		t.before.Store(&before)
		t.host.Store(&host)
		t.alive.Store(t.name, host)
	}
}

func (t *tenant) release(ctx context.Context) {
	t.alive.Delete(t.name)
	t.released.Store(true)
	a, ok := t.call(ctx, http.MethodDelete, "/sandboxes/"+t.id, "", http.StatusNoContent, http.StatusNotFound)
	if ok && a.Header.Get(rest.OutstandingHeader) == "0" {
		t.ended(t.name)
	}
}

// sends sends messages until ctx ends, in tunnels or without.
func (t *tenant) sends(ctx context.Context, random *rand.Rand, tunnels bool) {
	for ctx.Err() == nil && t.limiter.Wait(ctx) == nil {
		host := *t.host.Load()
		switch before := t.before.Load(); random.IntN(6) {
		case 0:
			if before != nil {
				host = *before
			}
		case 1:
			t.alive.Range(func(name, other any) bool {
				if name != t.name {
					host = other.(string)
				}
				return name == t.name || random.IntN(2) == 0
			})
		}
		if tunnels {
			t.tunnel(ctx, random, host)
		} else {
			t.request(ctx, host)
		}
		if t.released.Load() {
			wait.Sleep(ctx, hauntEvery)
		}
	}
}

// dial connects to the gateway from the address of the pod. It returns nil when ctx has ended.
func (t *tenant) dial(ctx context.Context) net.Conn {
	dialer := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(netip.MustParseAddr(t.addr), 0))}
	c, err := dialer.DialContext(ctx, "tcp", t.Stack.Egress.Addr.String())
	if err != nil {
		if ctx.Err() == nil {
			t.Errorf("sandbox %s: %v", t.name, err)
		}
		return nil
	}
	return c
}

// request sends a request in absolute form.
func (t *tenant) request(ctx context.Context, host string) {
	c := t.dial(ctx)
	if c == nil {
		return
	}
	defer c.Close()
	n := t.send(t.name, t.addr, host, false)
	_ = c.SetDeadline(time.Now().Add(10 * time.Second))
	_, _ = fmt.Fprintf(c, "GET http://%s:%s/%d HTTP/1.1\r\nHost: x\r\nProxy-Authorization: %s\r\n"+
		"Connection: close\r\n\r\n", host, t.port, n, t.credential)
	_, _ = io.Copy(io.Discard, c)
}

// tunnel sends requests through a tunnel for up to a second.
func (t *tenant) tunnel(ctx context.Context, random *rand.Rand, host string) {
	c := t.dial(ctx)
	if c == nil {
		return
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(10 * time.Second))
	// The first message follows without a wait. If the tunnel is refused, it must be neither passed on nor answered.
	first := t.send(t.name, t.addr, host, true)
	_, _ = fmt.Fprintf(c, "CONNECT %s:%s HTTP/1.1\r\nHost: x\r\nProxy-Authorization: %s\r\n\r\n"+
		"GET /%d HTTP/1.1\r\nHost: %s\r\n\r\n", host, t.port, t.credential, first, host)
	r := bufio.NewReader(c)
	response, err := http.ReadResponse(r, &http.Request{Method: http.MethodConnect})
	if err != nil || response.StatusCode != http.StatusOK {
		return
	}
	for end := time.Now().Add(harness.Within(random, time.Second)); time.Now().Before(end); {
		response, err := http.ReadResponse(r, nil)
		if err != nil {
			return
		}
		_, _ = io.Copy(io.Discard, response.Body)
		if !wait.Sleep(ctx, harness.Within(random, 50*time.Millisecond)) || t.limiter.Wait(ctx) != nil {
			return
		}
		n := t.send(t.name, t.addr, host, true)
		if _, err := fmt.Fprintf(c, "GET /%d HTTP/1.1\r\nHost: %s\r\n\r\n", n, host); err != nil {
			return
		}
	}
}
