package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coder/websocket"
	"github.com/stretchr/testify/require"
	"golang.org/x/time/rate"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/devcluster/proc"
	"github.com/berth-sandbox/berth/devcluster/stack"
	"github.com/berth-sandbox/berth/envoy"
	"github.com/berth-sandbox/berth/internal/wait"
)

var (
	rolloutTimes = flag.Int("rollouts.times", 2, "how often each part is restarted as planned; half of it: routers killed")
	rolloutRate  = flag.Float64("rollouts.rate", 50, "requests a second while parts are restarted")
)

const (
	// drainTime is how long an Envoy that drains goes on. The balancer needs a small part of it.
	drainTime = 3 * time.Second
	// endTime bounds how long a part may take to end.
	endTime = 30 * time.Second
	// How many clients send requests: on connections of HTTP/1.1 that they keep, on one of HTTP/2, and on a connection
	// for each request. talkers keep a WebSocket.
	keepers, multiplexers, newcomers, talkers = 6, 2, 4, 4
)

// tally counts what happened while one kind of restart was repeated.
type tally struct {
	event                              string
	times                              int
	requests, failed                   int
	claims, claimsFailed               int
	sockets, socketsEnded, socketsLost int
	samples                            []string
}

// rollouts sends requests through a balancer while parts of Berth are restarted.
type rollouts struct {
	*env
	dial      func(ctx context.Context) (net.Conn, error) // to a gateway that is ready
	sandboxes []openapi.Sandbox

	mu  sync.Mutex
	now *tally
	// ending: an Envoy has drained, and is ended and started again.
	ending bool
	// restarting: the leading allocator is ended and started again. A Service leads no call to a replica that is not ready
	// yet. The gateways of a devcluster have a fixed list of replicas.
	restarting bool
}

// count changes the tally. An error is kept as a sample.
func (r *rollouts) count(what string, err error, change func(*tally)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	change(r.now)
	if err != nil && len(r.now.samples) < 5 {
		r.now.samples = append(r.now.samples, fmt.Sprintf("%s: %v", what, err))
	}
}

// sendOnce sends a request whose body net/http cannot send a second time, so that it repeats nothing.
func (e *env) sendOnce(ctx context.Context, client *http.Client, method, host, path, body string) (answer, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	q, err := http.NewRequestWithContext(ctx, method, "http://gateway"+path, io.NopCloser(strings.NewReader(body)))
	if err != nil {
		return answer{}, err
	}
	q.Host, q.ContentLength = host, int64(len(body))
	q.Header.Set("X-API-Key", e.site.key())
	response, err := client.Do(q)
	if err != nil {
		return answer{}, err
	}
	defer response.Body.Close()
	raw, err := io.ReadAll(response.Body)
	return answer{response.StatusCode, response.Header, string(raw)}, err
}

// use sends one request to a sandbox.
func (r *rollouts) use(ctx context.Context, client *http.Client, method string, s openapi.Sandbox) {
	body := ""
	if method == http.MethodPost {
		body = "x"
	}
	a, err := r.sendOnce(ctx, client, method, r.host(8080, s.SandboxID), "/", body)
	var i identity
	switch {
	case ctx.Err() != nil:
		return // the test is over
	case err != nil:
	case a.code != http.StatusOK:
		err = fmt.Errorf("%d %.300s", a.code, a.body)
	default:
		if err = json.Unmarshal([]byte(a.body), &i); err == nil && i.Pod != s.PodName {
			err = fmt.Errorf("pod %s answered for pod %s", i.Pod, s.PodName)
		}
	}
	r.count(fmt.Sprintf("%s over HTTP/%s", method, protocol(client)), err, func(n *tally) {
		n.requests++
		if err != nil {
			n.failed++
		}
	})
}

func protocol(client *http.Client) string {
	if t := client.Transport.(*http.Transport); t.Protocols != nil {
		return "2"
	} else if t.DisableKeepAlives {
		return "1.1, a new connection"
	}
	return "1.1, a connection that is kept"
}

// claim takes a sandbox, uses it and gives it back. A call is sent once.
func (r *rollouts) claimOne(ctx context.Context, client *http.Client) {
	call := func(method, path, body string, want int) (answer, bool) {
		a, err := r.sendOnce(ctx, client, method, "api."+r.site.domain(), path, body)
		if ctx.Err() != nil || r.starting() && err == nil && strings.Contains(a.body, string(apierror.APINotReady)) {
			return a, false
		}
		if err == nil && a.code != want {
			err = fmt.Errorf("%d %.300s", a.code, a.body)
		}
		r.count(method+" "+path, err, func(n *tally) {
			n.claims++
			if err != nil {
				n.claimsFailed++
			}
		})
		return a, err == nil
	}
	body := fmt.Sprintf(`{"templateID":%q,"timeout":60,"waitTimeout":50}`, r.pool)
	a, ok := call(http.MethodPost, "/sandboxes", body, http.StatusCreated)
	var s openapi.Sandbox
	if !ok || json.Unmarshal([]byte(a.body), &s) != nil {
		return
	}
	r.use(ctx, client, http.MethodPost, s)
	call(http.MethodDelete, "/sandboxes/"+s.SandboxID, "", http.StatusNoContent)
}

// talk keeps one WebSocket open until ctx ends.
func (r *rollouts) talk(ctx context.Context, client *http.Client, s openapi.Sandbox) {
	url := "ws://" + r.host(8080, s.SandboxID) + "/ws"
	socket, _, err := websocket.Dial(ctx, url, &websocket.DialOptions{HTTPClient: client})
	if ctx.Err() != nil {
		return
	}
	r.count("WebSocket", err, func(n *tally) {
		n.sockets++
		if err != nil {
			n.failed++
		}
	})
	for err == nil {
		if err = socket.Write(ctx, websocket.MessageText, []byte("ahoy")); err == nil {
			_, _, err = socket.Read(ctx)
		}
		wait.Sleep(ctx, 100*time.Millisecond)
	}
	if socket != nil {
		socket.CloseNow()
	}
	if ctx.Err() != nil {
		return
	}
	r.mu.Lock()
	ended := r.ending && errors.Is(err, io.EOF)
	r.mu.Unlock()
	if ended {
		err = nil
	}
	r.count("open WebSocket", err, func(n *tally) {
		if ended {
			n.socketsEnded++
		} else {
			n.socketsLost++
		}
	})
}

// start claims sandboxes if there are less than four, and lets all clients work until the function that it returns is
// called.
func (r *rollouts) start() (stop func()) {
	for range 4 - len(r.sandboxes) {
		r.sandboxes = append(r.sandboxes, r.claim())
	}
	r.waitWarm(4)
	ctx, cancel := context.WithCancel(r.t.Context())
	var all sync.WaitGroup
	client := func(change func(*http.Transport)) *http.Client {
		transport := &http.Transport{
			MaxIdleConnsPerHost: 1,
			DialContext:         func(ctx context.Context, _, _ string) (net.Conn, error) { return r.dial(ctx) },
		}
		change(transport)
		r.t.Cleanup(transport.CloseIdleConnections)
		return &http.Client{Transport: transport}
	}
	limit := rate.NewLimiter(rate.Limit(*rolloutRate/2), 1)
	limitNew := rate.NewLimiter(rate.Limit(*rolloutRate/2), 1)
	for i := range keepers + multiplexers + newcomers {
		limit, method := limit, http.MethodPost
		c := client(func(t *http.Transport) {
			switch {
			case i < keepers:
			case i < keepers+multiplexers:
				t.Protocols = new(http.Protocols)
				t.Protocols.SetUnencryptedHTTP2(true)
			default:
				t.DisableKeepAlives, method = true, http.MethodGet
			}
		})
		if method == http.MethodGet {
			limit = limitNew
		}
		all.Go(func() {
			for n := i; limit.Wait(ctx) == nil; n++ {
				r.use(ctx, c, method, r.sandboxes[n%len(r.sandboxes)])
			}
		})
	}
	for i := range talkers {
		c := client(func(*http.Transport) {})
		all.Go(func() {
			for ctx.Err() == nil {
				r.talk(ctx, c, r.sandboxes[i%len(r.sandboxes)])
			}
		})
	}
	c := client(func(*http.Transport) {})
	all.Go(func() {
		for ok := true; ok; ok = wait.Sleep(ctx, 400*time.Millisecond) {
			r.claimOne(ctx, c)
		}
	})
	return func() { cancel(); all.Wait() }
}

func (r *rollouts) setEnding(ending bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ending = ending
}

// restartEnvoy ends and starts an Envoy as planned, and calls do in between.
func (r *rollouts) restartEnvoy(g *stack.Gateway, between func()) {
	require.NoError(r.t, envoy.Drain(r.t.Context(), g.EnvoyAdmin))
	wait.Sleep(r.t.Context(), drainTime)
	r.setEnding(true)
	defer r.setEnding(false)
	require.NoError(r.t, g.Envoy.Stop(r.t.Context(), endTime))
	between()
	require.NoError(r.t, g.Envoy.Start(r.t.Context()))
}

func (r *rollouts) restart(p *proc.Server) {
	require.NoError(r.t, p.Stop(r.t.Context(), endTime))
	require.NoError(r.t, p.Start(r.t.Context()))
}

// succeed has the other router of a gateway take over the socket, and ends the first one.
func (r *rollouts) succeed(g *stack.Gateway) {
	serving, next := g.Router, g.Successor
	if next.Running() {
		serving, next = next, serving
	}
	require.NoError(r.t, next.Start(r.t.Context()))
	require.NoError(r.t, serving.Stop(r.t.Context(), endTime))
}

// starting reports whether an allocator may not be ready.
func (r *rollouts) starting() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.restarting
}

func (r *rollouts) setStarting(starting bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.restarting = starting
}

// restartLeader ends the leader and starts it again.
func (r *rollouts) restartLeader() {
	r.setStarting(true)
	defer r.setStarting(false)
	leader, err := r.stack.Leader(r.t.Context())
	require.NoError(r.t, err)
	r.restart(leader.Server)
	require.Eventually(r.t, func() bool {
		return proc.GetOK(r.t.Context(), http.DefaultClient, leader.Admin+"/readyz") == nil
	}, endTime, 20*time.Millisecond)
	require.NoError(r.t, r.waitLeader(r.t.Context()))
}

// Behind a balancer that obeys the readiness of gateways, no planned restart of a part of a gateway costs a request, a
// claim or a release. An open WebSocket lasts until its Envoy has drained.
//
// It takes more than 20 s because each Envoy drains for some seconds.
// Invariant: P23
func TestPlannedRestartsFailNoRequest(t *testing.T) {
	r := &rollouts{
		env: startLongAlone(t, 4, stack.Options{Allocators: releaseReplicas, Gateways: releaseReplicas}),
		now: &tally{event: "start"},
	}
	front := startBalancer(t, r.stack.Gateways)
	r.dial = front.dial
	require.True(t, front.allReady(t.Context()))
	stop := r.start()
	defer stop()
	const nothing, killed = "nothing", "router, killed"
	gateway := func(i int) *stack.Gateway { return r.stack.Gateways[i%len(r.stack.Gateways)] }
	var all []*tally
	for _, event := range []struct {
		name string
		do   func(i int)
	}{
		{nothing, func(int) { wait.Sleep(t.Context(), drainTime) }},
		{"gateway: Envoy and its router", func(i int) {
			r.restartEnvoy(gateway(i), func() { r.restart(gateway(i).Router) })
		}},
		{"Envoy alone", func(i int) { r.restartEnvoy(gateway(i), func() {}) }},
		{"router, with a successor", func(i int) { r.succeed(gateway(i / 2)) }},
		{"router, in place", func(i int) { r.restart(gateway(i).Router) }},
		{killed, func(i int) {
			require.NoError(t, gateway(i).Router.Kill())
			require.NoError(t, gateway(i).Router.Start(t.Context()))
		}},
		{"leading allocator", func(int) { r.restartLeader() }},
	} {
		n := &tally{event: event.name, times: *rolloutTimes}
		switch event.name {
		case nothing:
			n.times = 1
		case killed:
			n.times = (n.times + 1) / 2
		}
		all = append(all, n)
		r.begin(n)
		for i := range n.times {
			event.do(i)
			wait.Sleep(t.Context(), drainTime/3) // until the balancer has noticed
			require.True(t, front.allReady(t.Context()))
		}
		for _, g := range r.stack.Gateways { // the number of times may be odd
			if g.Successor.Running() {
				r.succeed(g)
			}
		}
	}
	stop()
	judgeRollouts(t, all)
}

// begin counts for another event from now on.
func (r *rollouts) begin(n *tally) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.now = n
}

// judgeRollouts prints what happened as a table, and fails the test if a request, a claim or a release has failed.
func judgeRollouts(t *testing.T, all []*tally) {
	t.Helper()
	table := "\n| restarted | times | requests | failed | claims and releases | failed |" +
		" WebSockets opened | open to the end of the drain | cut |\n" + strings.Repeat("|---", 9) + "|\n"
	for _, n := range all {
		table += fmt.Sprintf("| %s | %d | %d | %d | %d | %d | %d | %d | %d |\n", n.event, n.times, n.requests, n.failed,
			n.claims, n.claimsFailed, n.sockets, n.socketsEnded, n.socketsLost)
		if n.failed+n.claimsFailed+n.socketsLost > 0 {
			t.Errorf("%s: %s", n.event, strings.Join(n.samples, "\n"))
		}
		if n.requests == 0 || n.claims == 0 {
			t.Errorf("%s: nothing is proven: %d requests, %d claims", n.event, n.requests, n.claims)
		}
	}
	t.Log(table)
}

// No planned restart of pods on a cluster costs a request, a claim or a release: not that of one gateway, and not those
// of all gateways and allocators of an upgrade and of the way back. It is the kubelet's preStop hook, its order of
// ending containers, and the Service that make it true.
// Invariant: P23
func TestUpgradeAndRollbackFailNoRequest(t *testing.T) {
	onACluster(t, "needs a kubelet, Services and helm")
	r := &rollouts{env: startDisturbing(t, 4), now: &tally{event: "start"}}
	if shared.gatewayAddress == "" {
		t.Skip("needs a way to the gateway's Service: set " + envGateway)
	}
	r.dial = shared.front
	stop := r.start()
	defer stop()
	r.setEnding(true) // the kubelet does it
	helm := func(args ...string) error {
		return shared.helm(t.Context(), append(args, "--namespace", releaseNamespace, "--wait", "--timeout", "5m")...)
	}
	var all []*tally
	for _, event := range []struct {
		name string
		do   func() error
	}{
		{"one gateway's pod", func() error {
			pods, err := shared.ready(t.Context(), "gateway")
			if err != nil {
				return err
			}
			all := shared.clients.Kubernetes.CoreV1().Pods(releaseNamespace)
			err = all.Delete(t.Context(), pods[0].Name, metav1.DeleteOptions{})
			return errors.Join(err, shared.waitGone(t.Context(), &pods[0]))
		}},
		{"all pods, by helm upgrade", func() error {
			return helm("upgrade", releaseName, filepath.Join("..", "charts", "berth"), "--reuse-values",
				"--set", "allocator.logLevel=debug,router.logLevel=debug")
		}},
		{"all pods, by helm rollback", func() error {
			return helm("rollback", releaseName, "1")
		}},
	} {
		n := &tally{event: event.name, times: 1}
		all = append(all, n)
		r.begin(n)
		require.NoError(t, event.do())
		require.NoError(t, shared.waitComplete(t.Context()))
		require.NoError(t, shared.waitEnded(t.Context()))
	}
	stop()
	judgeRollouts(t, all)
}

// A node that is cordoned and drained as docs/operations.md says ends the sandboxes that are on it, with the reason
// Evicted. It costs no request to another sandbox, no claim and no release.
func TestDrainedNodeEndsOnlyItsSandboxes(t *testing.T) {
	onACluster(t, "makes a kind cluster with three nodes")
	if where, err := provider(); err != nil || where != onKind || !*longFlag {
		t.Skip("makes a kind cluster with three nodes: only with -e2e.long")
	}
	in, remove, err := createKind(t.Context(), 2)
	t.Cleanup(func() { require.NoError(t, remove()) })
	require.NoError(t, err)
	site, err := in.install(t.Context())
	require.NoError(t, err)
	r := &rollouts{env: startOn(t, site, 4), now: &tally{event: "node that is drained", times: 1}}
	r.dial = site.front
	var drained, others []openapi.Sandbox
	node := ""
	for len(drained) == 0 || len(others) < 4 {
		s := r.claim()
		pod, err := site.clients.Kubernetes.CoreV1().Pods(sandboxNamespace).Get(t.Context(), s.PodName, metav1.GetOptions{})
		require.NoError(t, err)
		if node == "" {
			node = pod.Spec.NodeName
		}
		if pod.Spec.NodeName == node {
			drained = append(drained, s)
		} else {
			others = append(others, s)
		}
		require.Less(t, len(drained)+len(others), 100, "all pods are on one node")
		r.waitWarm(1)
	}
	r.sandboxes = others
	stop := r.start()
	defer stop()
	r.setEnding(true) // a gateway of the node ends too
	kubectl := func(args ...string) {
		require.NoError(t, command(t.Context(), append([]string{"kubectl", "--kubeconfig", in.kubeconfig}, args...)...))
	}
	kubectl("cordon", node)
	kubectl("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=4m")
	require.NoError(t, site.waitComplete(t.Context()))
	client := r.clientOf(site.front, 0)
	for _, s := range drained {
		a, err := do(t.Context(), client, http.MethodGet, "http://gateway/", r.host(8080, s.SandboxID), "")
		require.NoError(t, err)
		require.Equal(t, http.StatusGone, a.code, a.body)
		require.Contains(t, a.body, "Evicted")
	}
	stop()
	judgeRollouts(t, []*tally{r.now})
}
