package envoy_test

import (
	"context"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"google.golang.org/grpc"

	"github.com/berth-sandbox/berth/extproc"
	"github.com/berth-sandbox/berth/routecache"
)

// retries is how often Envoy has asked the router again.
func (g *gateway) retries() int { return g.counter(`cluster\.router\.upstream_rq_retry`) }

// asks sends a request in the background.
func (g *gateway) asks(clients *sync.WaitGroup, code *atomic.Int64) {
	clients.Go(func() {
		client := &http.Transport{DisableKeepAlives: true}
		response, err := client.RoundTrip(g.request(host, "/", nil))
		if err != nil {
			return
		}
		defer response.Body.Close()
		code.Store(int64(response.StatusCode))
	})
}

// A short absence of the router delays requests and fails none.
func TestRequestWaitsForARestartingRouter(t *testing.T) {
	comesBack := func(t *testing.T, g *gateway) {
		socket, err := net.Listen("unix", g.settings.RouterSocket)
		require.NoError(t, err)
		back := grpc.NewServer()
		router := &script{}
		router.set(admit(g.admitted("abc")))
		extprocv3.RegisterExternalProcessorServer(back, router)
		var serving sync.WaitGroup
		serving.Go(func() { _ = back.Serve(socket) })
		t.Cleanup(func() { back.Stop(); serving.Wait() })
	}
	for name, end := range map[string]func(*gateway){
		"it had not started": nil,
		"it crashed while it decided": func(g *gateway) {
			g.routerServer.Stop()
		},
	} {
		t.Run(name, func(t *testing.T) {
			g := startGatewayWith(t, config{noRouter: end == nil})
			asked := make(chan struct{})
			g.router.set(func(stream extprocv3.ExternalProcessor_ProcessServer, _ *extprocv3.ProcessingRequest) error {
				close(asked)
				<-stream.Context().Done()
				return stream.Context().Err()
			})
			var code atomic.Int64
			var clients sync.WaitGroup
			g.asks(&clients, &code)
			if end != nil {
				<-asked
				end(g)
			}
			require.Eventually(t, func() bool { return g.retries() > 0 || code.Load() != 0 }, time.Minute, 5*time.Millisecond)
			comesBack(t, g)
			clients.Wait()
			require.EqualValues(t, http.StatusOK, code.Load())
			require.Positive(t, g.retries())
			require.EqualValues(t, 1, g.hits.Load())
		})
	}
}

// routerAt starts the real router, which takes over the socket from its predecessor.
func routerAt(t *testing.T, g *gateway) (stop func()) {
	t.Helper()
	server, err := extproc.New(extproc.Options{
		Socket: g.settings.RouterSocket, Hosts: extproc.Hosts{Domain: sandboxDomain}, PodCIDRs: []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")},
		Routes:    &routes{at: map[string]routecache.Route{"abc": {Addr: g.podAddr.Addr(), DefaultPort: g.podAddr.Port()}}},
		Sandboxes: sandboxes(t, g.podAddr), TeamKeys: &extproc.TeamKeys{}, Metrics: prometheus.NewRegistry(), Log: zap.NewNop(),
	})
	require.NoError(t, err)
	socket, err := server.Listen(t.Context())
	require.NoError(t, err)
	var serving sync.WaitGroup
	serving.Go(func() { _ = server.Serve(socket) })
	return sync.OnceFunc(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		server.Stop(ctx)
		serving.Wait()
	})
}

func TestPlannedRouterRestartFailsNoRequest(t *testing.T) {
	for name, inPlace := range map[string]bool{"the next one takes over": false, "the next one comes after a gap": true} {
		t.Run(name, func(t *testing.T) {
			g := startGatewayWith(t, config{noRouter: true})
			stop := routerAt(t, g)
			defer func() { stop() }()
			var served atomic.Int64
			answers := make(chan answer, 10_000)
			ctx, done := context.WithCancel(t.Context())
			defer done()
			var clients sync.WaitGroup
			for range 4 {
				clients.Go(func() {
					client := &http.Client{Transport: &http.Transport{}, Timeout: time.Minute}
					defer client.CloseIdleConnections()
					for ctx.Err() == nil {
						response, err := client.Do(g.request("abc."+sandboxDomain, "/", nil))
						switch {
						case err != nil:
							answers <- answer{body: err.Error()}
							return
						case response.StatusCode != http.StatusOK:
							answers <- answer{code: response.StatusCode, header: response.Header}
						}
						response.Body.Close()
						served.Add(1)
					}
				})
			}
			some := func() {
				before := served.Load()
				require.Eventually(t, func() bool { return served.Load() > before+50 }, time.Minute, time.Millisecond)
			}
			for range 10 {
				some()
				if inPlace {
					stop()
					before := g.retries()
					require.Eventually(t, func() bool { return g.retries() > before+4 || len(answers) > 0 }, time.Minute, time.Millisecond)
					stop = routerAt(t, g)
					continue
				}
				previous := stop
				stop = routerAt(t, g)
				previous()
			}
			some()
			done()
			clients.Wait()
			close(answers)
			for a := range answers {
				t.Errorf("%d %v %s", a.code, a.header, a.body)
			}
			if inPlace {
				require.Positive(t, g.retries())
			}
		})
	}
}
