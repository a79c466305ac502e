package egress_test

import (
	"context"
	"io"
	"net"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/egress"
)

// flooders is how many connections a flood opens at the same time.
const flooders = 8

// flood opens connections from an address, each with these bytes, holds those that stay open, and opens further ones
// until the returned function is called. opened counts them. A connection that is not closed for a moment stays open.
func (g *gateway) flood(from, first string, opened *atomic.Int64) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
	for range flooders {
		running.Go(func() {
			for ctx.Err() == nil {
				c, err := dialer.DialContext(ctx, "tcp", g.addr)
				if err != nil {
					continue
				}
				opened.Add(1)
				ended := make(chan struct{})
				running.Go(func() {
					defer close(ended)
					defer c.Close()
					defer context.AfterFunc(ctx, func() { c.Close() })()
					_, _ = io.WriteString(c, first)
					_, _ = io.Copy(io.Discard, c) // until it is closed
				})
				select {
				case <-ended:
				case <-time.After(10 * time.Millisecond):
				}
			}
		})
	}
	return func() { cancel(); running.Wait() }
}

// stat returns a number of Envoy.
func (g *gateway) stat(name string) int {
	g.Helper()
	page := g.page("/stats?filter=" + name)
	found := regexp.MustCompile(`(?m)` + name + `: (\d+)$`).FindStringSubmatch(page)
	require.Len(g, found, 2, page)
	n, err := strconv.Atoi(found[1])
	require.NoError(g, err)
	return n
}

// served requires that a request of another sandbox is answered. On a busy machine Envoy may wait for the router until
// its deadline, and close the connection, but not again and again.
func served(t *testing.T, request func() answer) {
	t.Helper()
	var a answer
	for range 5 {
		if a = request(); a.code != 0 {
			break
		}
	}
	require.Equal(t, http.StatusOK, a.code, a.body)
}

// Invariant: P40
func TestFloodOfOneSandboxLeavesConnectionsForOthers(t *testing.T) {
	w := newWorld(t)
	target := "127.0.0.1:" + w.echoPort
	noCredential := "GET http://web.example.com/ HTTP/1.1\r\nHost: a\r\n\r\n"
	for name, c := range map[string]struct {
		first string
		opens int64
	}{
		"idle":           {"", 8000},
		"half of a head": {"GET http://web.example.com/ HTTP/1.1\r\n", 8000},
		"tunnels":        {head("CONNECT "+target, "abc"), 8000},
		// Refusals wait for their turn, and so do the connections then.
		"refused":           {noCredential, 100},
		"pipelined refused": {strings.Repeat(noCredential, 1000), 100},
	} {
		t.Run(name, func(t *testing.T) {
			var opened atomic.Int64
			stop := w.flood(abcAddr, c.first, &opened)
			defer stop()
			require.Eventually(t, func() bool { return opened.Load() >= c.opens }, time.Minute, time.Millisecond)
			most := 0
			for range 20 {
				served(t, func() answer { return w.connect(defAddr, "def", target) })
				served(t, func() answer { return w.get(defAddr, "def", "web.example.com:"+w.webPort, "/") })
				most = max(most, w.stat("http.egress.downstream_cx_active"))
			}
			// A busy machine closes late what was refused.
			require.Less(t, most, egress.DefaultConnections/4,
				"the share of one, and those about which the router is being asked")
		})
	}
	require.Zero(t, w.stat("listener.*downstream_cx_overload_reject"), "the bound of all was not reached")
}
