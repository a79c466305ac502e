package harness

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"sync"
	"time"

	"github.com/berth-sandbox/berth/devcluster/proc"
	"github.com/berth-sandbox/berth/devcluster/stack"
	"github.com/berth-sandbox/berth/internal/wait"
)

// Gateway is one Envoy with the router that serves it, and a second router that can take
// its place.
type Gateway struct {
	*stack.Gateway
	Berth *Berth
	Name  string
	// Client keeps connections. Streams opens one for each request: net/http sends a request
	// without a body again by itself if an idle connection was closed.
	Client, Streams *http.Client

	parts sync.Mutex // held by a fault of its processes
	link  sync.Mutex // held by a fault of the router's connections

	// serving is the router that serves, next the one that may come. They change under parts.
	serving, next *proc.Server
}

func (b *Berth) addGateway(g *stack.Gateway, connections int) {
	transport := &http.Transport{MaxIdleConnsPerHost: connections}
	b.Cleanup(transport.CloseIdleConnections)
	b.mu.Lock()
	defer b.mu.Unlock()
	b.Gateways = append(b.Gateways, &Gateway{
		Gateway: g, Berth: b, Name: fmt.Sprintf("gateway-%d", len(b.Gateways)), serving: g.Router, next: g.Successor,
		Client:  &http.Client{Transport: transport},
		Streams: &http.Client{Transport: &http.Transport{DisableKeepAlives: true}},
	})
}

// Serving is the router that serves. It may be read by a fault of the gateway's processes,
// and when no fault is going on.
func (g *Gateway) Serving() *proc.Server { return g.serving }

// KillRouter kills the router and starts it again.
func KillRouter(_ context.Context, g *Gateway, _ *rand.Rand) error {
	if err := g.serving.Kill(); err != nil {
		return err
	}
	return g.serving.Launch()
}

// Succeed starts the other router on the same socket and returns the one that served.
func (g *Gateway) Succeed() (old *proc.Server, err error) {
	if err := g.next.Launch(); err != nil {
		return nil, err
	}
	old = g.serving
	g.serving, g.next = g.next, old
	return old, nil
}

// PauseFor stops a process as it is and lets it go on after d, or when ctx ends.
func PauseFor(ctx context.Context, p *proc.Server, d time.Duration) error {
	if err := p.Pause(); err != nil {
		return err
	}
	wait.Sleep(ctx, d)
	return p.Resume()
}
