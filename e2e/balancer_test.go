package e2e

import (
	"context"
	"io"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/devcluster/proc"
	"github.com/berth-sandbox/berth/devcluster/stack"
	"github.com/berth-sandbox/berth/internal/wait"
)

// balancer stands for a load balancer in front of the gateways. It leads each new connection to a gateway that is
// ready, and never moves one that is open. A connection that a gateway refuses is lost.
type balancer struct {
	t        *testing.T
	listener net.Listener
	gateways []*stack.Gateway
	ready    []atomic.Bool
	turn     atomic.Uint64
}

const (
	// lookEvery is the pause between two looks at the readiness of a gateway, as probes have.
	lookEvery = 100 * time.Millisecond
	// looks in a row have to agree that a gateway is ready, or is not. One may fail on a busy machine. Envoy's page
	// says that it is ready some milliseconds before it listens.
	looks = 3
)

func startBalancer(t *testing.T, gateways []*stack.Gateway) *balancer {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	b := &balancer{t: t, listener: listener, gateways: gateways, ready: make([]atomic.Bool, len(gateways))}
	ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
	var all sync.WaitGroup
	t.Cleanup(func() {
		stop()
		listener.Close()
		all.Wait()
	})
	for i, g := range gateways {
		all.Go(func() {
			others := 0 // newest looks that differ from what counts
			for ok := true; ok; ok = wait.Sleep(ctx, lookEvery) {
				if ready := isReady(ctx, g); ready == b.ready[i].Load() {
					others = 0
				} else if others++; others == looks {
					b.ready[i].Store(ready)
					others = 0
				}
			}
		})
	}
	all.Go(func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return // it is closed
			}
			all.Go(func() { b.serve(ctx, client) })
		}
	})
	return b
}

// isReady says what the readiness probes of a gateway's pod say: those of Envoy and of the router.
func isReady(ctx context.Context, g *stack.Gateway) bool {
	routers := []*proc.Server{g.Router, g.Successor}
	return g.Envoy.Check(ctx) == nil && slices.ContainsFunc(routers, func(p *proc.Server) bool {
		return p.Running() && p.Check(ctx) == nil
	})
}

// allReady waits until connections are led to every gateway.
func (b *balancer) allReady(ctx context.Context) bool {
	for i := range b.ready {
		for !b.ready[i].Load() {
			if !wait.Sleep(ctx, lookEvery) {
				return false
			}
		}
	}
	return true
}

func (b *balancer) dial(ctx context.Context) (net.Conn, error) {
	return (&net.Dialer{}).DialContext(ctx, "tcp", b.listener.Addr().String())
}

// serve leads one connection to a gateway until both have closed it, or ctx ends.
func (b *balancer) serve(ctx context.Context, client net.Conn) {
	defer client.Close()
	for range b.gateways {
		i := int(b.turn.Add(1) % uint64(len(b.gateways)))
		if !b.ready[i].Load() {
			continue
		}
		gateway, err := dialerOf(b.gateways[i])(ctx)
		if err != nil {
			b.t.Logf("balancer: gateway %d: %v", i, err)
			return
		}
		defer gateway.Close()
		defer context.AfterFunc(ctx, func() { client.Close(); gateway.Close() })()
		var both sync.WaitGroup
		for to, from := range map[net.Conn]net.Conn{client: gateway, gateway: client} {
			both.Go(func() {
				_, _ = io.Copy(to, from)
				_ = to.(*net.TCPConn).CloseWrite()
			})
		}
		both.Wait()
		return
	}
	b.t.Log("balancer: no gateway is ready")
}
