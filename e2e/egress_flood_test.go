package e2e

import (
	"bufio"
	"context"
	"encoding/base64"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/egress"
	"github.com/berth-sandbox/berth/envoy"
)

// floodShare is how many connections an address may have at the gateway if it is alone, and openRequests how many of
// them may have a request open: see the package comment of egress.
const (
	floodShare   = egress.DefaultConnections / 40
	openRequests = egress.DefaultConnections / 50
)

// flood is the connections of one address to the egress gateway. Each asks for a tunnel and stays open until the
// gateway closes it.
type flood struct {
	opened, closed         atomic.Int64
	tunnels, refused, none atomic.Int64 // by the answer: 200, 429, or none before the end
	mu                     sync.Mutex
	strange                []string // other answers
}

// open opens n connections with this credential, and returns what waits until the gateway has decided about all of
// them.
func (f *flood) open(ctx context.Context, from, gateway, target, credential string, n int) (decided func()) {
	dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
	var deciding sync.WaitGroup
	var dialing sync.WaitGroup
	var turn atomic.Int64
	for range 64 {
		dialing.Go(func() {
			for ctx.Err() == nil && turn.Add(1) <= int64(n) {
				c, err := dialer.DialContext(ctx, "tcp", gateway)
				if err != nil {
					f.note(err.Error())
					continue
				}
				f.opened.Add(1)
				deciding.Add(1)
				go f.hold(ctx, c, target, credential, deciding.Done)
			}
		})
	}
	return func() { dialing.Wait(); deciding.Wait() }
}

// hold reads the answer on one connection, calls decided, and reads on until the gateway closes it or ctx ends.
func (f *flood) hold(ctx context.Context, c net.Conn, target, credential string, decided func()) {
	defer c.Close()
	defer context.AfterFunc(ctx, func() { c.Close() })()
	_, _ = fmt.Fprintf(c, "CONNECT %s HTTP/1.1\r\nHost: x\r\nProxy-Authorization: Basic %s\r\n\r\n", target, credential)
	r, err := http.ReadResponse(bufio.NewReaderSize(c, 16), &http.Request{Method: http.MethodConnect})
	switch {
	case err != nil:
		f.none.Add(1)
	case r.StatusCode == http.StatusOK:
		f.tunnels.Add(1)
	case r.StatusCode == http.StatusTooManyRequests && r.Header.Get(envoy.ReasonHeader) == string(apierror.TooManyOpen):
		f.refused.Add(1)
	default:
		f.note(fmt.Sprint(r.StatusCode, " ", r.Header))
	}
	decided()
	_, _ = io.Copy(io.Discard, c)
	f.closed.Add(1)
}

func (f *flood) note(what string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.strange = append(f.strange, what)
}

// proxyOf returns the credential that the processes of a sandbox have for the egress gateway.
func (e *egressEnv) proxyOf(s openapi.Sandbox) string {
	e.t.Helper()
	proxy, err := url.Parse(strings.TrimSpace(e.bash(s, "", "echo $HTTP_PROXY").out))
	require.NoError(e.t, err)
	password, _ := proxy.User.Password()
	return base64.StdEncoding.EncodeToString([]byte(proxy.User.Username() + ":" + password))
}

// sendOut sends a request from an address through the gateway. It repeats one without an answer: on a busy machine
// Envoy may wait for the router until its deadline and close the connection, but not again and again.
func (e *egressEnv) sendOut(from, credential string) (again int) {
	e.t.Helper()
	dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}, Timeout: time.Minute}
	for ; ; again++ {
		c, err := dialer.DialContext(e.t.Context(), "tcp", e.stack.Egress.Addr.String())
		require.NoError(e.t, err)
		require.NoError(e.t, c.SetDeadline(time.Now().Add(time.Minute)))
		_, _ = fmt.Fprintf(c, "GET http://ok.example.com:%s/ HTTP/1.1\r\nHost: x\r\nProxy-Authorization: Basic %s\r\n\r\n",
			e.port, credential)
		r, err := http.ReadResponse(bufio.NewReader(c), nil)
		require.NoError(e.t, c.Close())
		if err == nil {
			require.Equal(e.t, http.StatusOK, r.StatusCode)
			return again
		}
		require.Less(e.t, again, 4, err)
	}
}

// One sandbox opens many connections at once: 2,000, or with -e2e.long 8,000. Another one reaches its host meanwhile,
// and a third one is reached.
//
// Invariant: P40
func TestConnectionsOfOneSandboxTakeNoneOfOthers(t *testing.T) {
	e := startEgress(t)
	hostile, hostileIP := e.claimed(`{}`)
	other, otherIP := e.claimed(`{}`)
	reached, _ := e.claimed(`{}`)
	hostileKey, otherKey := e.proxyOf(hostile), e.proxyOf(other)
	client := e.client()
	again, rounds := 0, 0
	var most [2]int // memory of Envoy and of the router, in bytes
	usage := func() (now [2]int) {
		for i, pid := range []int{e.stack.Egress.Envoy.Pid(), e.stack.Egress.Router.Pid()} {
			now[i] = heldBy(t, strconv.Itoa(pid)).memory
			most[i] = max(most[i], now[i])
		}
		return now
	}
	round := func() {
		again += e.sendOut(otherIP, otherKey)
		require.Equal(t, http.StatusOK, e.get(client, e.host(8080, reached.SandboxID), "/healthz").code)
		usage()
		rounds++
	}
	for range 20 {
		round()
	}
	before, n := usage(), 2000
	if *longFlag {
		n = 8000
	}

	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(cancel)
	var f flood
	decided := f.open(ctx, hostileIP, e.stack.Egress.Addr.String(), "ok.example.com:"+e.port, hostileKey, n)
	done := make(chan struct{})
	go func() { decided(); close(done) }()
	for during := true; during; {
		round()
		select {
		case <-done:
			during = false
		default:
		}
	}
	for range 20 { // what was admitted is open
		round()
	}
	cancel()
	e.eventually(func() error {
		if closed := f.closed.Load(); closed < f.opened.Load() {
			return fmt.Errorf("%d connections of %d have ended", closed, f.opened.Load())
		}
		return nil
	})
	t.Logf("%d connections: %d tunnels, %d refused, %d closed; %d rounds of others, %d repeated; memory %v, at most %v",
		n, f.tunnels.Load(), f.refused.Load(), f.none.Load(), rounds, again, before, most)
	require.Empty(t, f.strange)
	require.EqualValues(t, n, f.opened.Load())
	require.Positive(t, f.tunnels.Load())
	require.LessOrEqual(t, f.tunnels.Load(), int64(openRequests))
	require.LessOrEqual(t, f.tunnels.Load()+f.refused.Load(), int64(n/2), "most are closed without an answer")
	for i, name := range []string{"Envoy", "the router"} {
		require.Less(t, most[i]-before[i], 4*floodShare*envoy.EgressConnectionMemory, name)
	}
}
