// Package bench measures. Every figure is a ratio within one interleaved run:
// the machines this runs on have few, shared cores, and absolute times mean
// little. Nothing here asserts a time.
package bench

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/devcluster"
	"github.com/berth-sandbox/berth/devcluster/stack"
	"github.com/berth-sandbox/berth/e2e/harness"
	"github.com/berth-sandbox/berth/e2e/history"
)

// path is one way to the same pod.
type path struct {
	name   string
	client *http.Client
	host   string
	took   []time.Duration
}

// BenchmarkLatency sends requests to one pod directly, through an Envoy with a
// static route, and through Berth: keep-alive, a small answer. The ways take
// turns, in rounds of rotating order. "direct again" is the control: its
// distance from "direct" is the noise.
func BenchmarkLatency(b *testing.B) {
	const rounds, perRound, warmup = 20, 500, 200
	bin := b.TempDir()
	require.NoError(b, stack.Build(b.Context(), bin, false, "allocator", "extproc", "demo-sandbox"))
	berth := harness.NewRun(b, history.Settings{}, "").Start(harness.Options{
		Cluster: devcluster.Options{Nodes: 1, NodePath: []string{bin}}, Stack: stack.Options{BinDir: bin},
	})
	s, ip := claim(b, berth)
	pod := net.JoinHostPort(ip, "8080")
	static := staticEnvoy(b, berth.Cluster, pod)
	host := fmt.Sprintf("8080-%s.%s", s.SandboxID, berth.Stack.Domain)

	for _, connections := range []int{1, 16} {
		b.Run(fmt.Sprintf("connections=%d", connections), func(b *testing.B) {
			paths := []*path{
				{name: "direct", client: client(b, pod)}, {name: "direct_again", client: client(b, pod)},
				{name: "envoy_static", client: client(b, static)}, {name: "berth",
					client: client(b, berth.Gateways[0].Addr.String()), host: host},
			}
			for _, p := range paths {
				p.run(b, connections, warmup)
				p.took = nil
			}
			b.ResetTimer()
			for range b.N {
				for round := range rounds {
					for i := range paths {
						paths[(i+round)%len(paths)].run(b, connections, perRound)
					}
				}
			}
			b.StopTimer()
			for _, p := range paths {
				slices.Sort(p.took)
				us := func(q float64) float64 {
					return float64(p.took[int(q*float64(len(p.took)-1))].Nanoseconds()) / 1000
				}
				b.ReportMetric(us(0.50), p.name+"_p50_us")
				b.ReportMetric(us(0.99), p.name+"_p99_us")
			}
		})
	}
}

// run sends n requests over so many connections and notes how long each took.
func (p *path) run(b *testing.B, connections, n int) {
	var mu sync.Mutex
	var all sync.WaitGroup
	for range connections {
		all.Go(func() {
			took := make([]time.Duration, 0, n/connections)
			for range n / connections {
				began := time.Now()
				r, err := http.NewRequestWithContext(b.Context(), http.MethodGet, "http://pod/healthz", http.NoBody)
				if err != nil {
					b.Error(err)
					return
				}
				if p.host != "" {
					r.Host = p.host
				}
				response, err := p.client.Do(r)
				if err != nil {
					b.Errorf("%s: %v", p.name, err)
					return
				}
				_, err = io.Copy(io.Discard, response.Body)
				response.Body.Close()
				if err != nil || response.StatusCode != http.StatusOK {
					b.Errorf("%s: %s, %v", p.name, response.Status, err)
					return
				}
				took = append(took, time.Since(began))
			}
			mu.Lock()
			defer mu.Unlock()
			p.took = append(p.took, took...)
		})
	}
	all.Wait()
}

// client connects to addr, whatever the host.
func client(b *testing.B, addr string) *http.Client {
	t := &http.Transport{
		MaxIdleConnsPerHost: 64, DisableCompression: true,
		DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, network, addr)
		},
	}
	b.Cleanup(t.CloseIdleConnections)
	return &http.Client{Transport: t, Timeout: 30 * time.Second}
}

// claim makes a pool and takes a sandbox from it.
func claim(b *testing.B, berth *harness.Berth) (s openapi.Sandbox, ip string) {
	return claimOf(b, berth, nil)
}

// claimOf is claim for a pool that is changed before.
func claimOf(b *testing.B, berth *harness.Berth, change func(*v1alpha1.SandboxPool)) (s openapi.Sandbox, ip string) {
	berth.CreatePool("pool", 1, change)
	require.Eventually(b, func() bool {
		response, err := http.Post(berth.Stack.Allocators[0].API+"/sandboxes", "application/json",
			strings.NewReader(`{"templateID":"pool","timeout":7200}`))
		if err != nil {
			return false
		}
		defer response.Body.Close()
		return response.StatusCode == http.StatusCreated && json.NewDecoder(response.Body).Decode(&s) == nil
	}, time.Minute, 50*time.Millisecond)
	var record v1alpha1.Sandbox
	require.Eventually(b, func() bool {
		get := berth.Clients.Berth.Get().Namespace(harness.Namespace).Resource("sandboxes").Name(s.SandboxID)
		return get.Do(b.Context()).Into(&record) == nil
	}, time.Minute, 50*time.Millisecond)
	return s, record.Spec.PodIP
}

// staticEnvoy starts an Envoy whose only route leads to pod.
func staticEnvoy(b *testing.B, cluster *devcluster.Cluster, pod string) string {
	bin, err := cluster.EnvoyBin(b.Context())
	require.NoError(b, err)
	listen, err := cluster.FreeAddr()
	require.NoError(b, err)
	host, port, err := net.SplitHostPort(pod)
	require.NoError(b, err)
	config := filepath.Join(b.TempDir(), "envoy.yaml")
	require.NoError(b, os.WriteFile(config, fmt.Appendf(nil, `
static_resources:
  listeners:
  - address: {socket_address: {address: %s, port_value: %d}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: static
          route_config: {virtual_hosts: [{name: all, domains: ["*"], routes: [{match: {prefix: /}, route: {cluster: pod}}]}]}
          http_filters:
          - name: envoy.filters.http.router
            typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}
  clusters:
  - name: pod
    type: STATIC
    connect_timeout: 1s
    load_assignment: {cluster_name: pod, endpoints: [{lb_endpoints: [{endpoint: {address: {socket_address: {address: %s, port_value: %s}}}}]}]}
`, listen.Addr(), listen.Port(), host, port), 0o600))
	log, err := os.Create(filepath.Join(cluster.Dir(), "envoy-static.log"))
	require.NoError(b, err)
	defer log.Close()
	cmd := exec.Command(bin, "-c", config, "--disable-hot-restart", "--concurrency", "2", "--log-level", "warn")
	cmd.Stdout, cmd.Stderr = log, log
	_, err = cluster.Supervisor().Start(cmd)
	require.NoError(b, err)
	require.Eventually(b, func() bool {
		conn, err := net.Dial("tcp", listen.String())
		if err != nil {
			return false
		}
		return conn.Close() == nil
	}, 30*time.Second, 20*time.Millisecond)
	return listen.String()
}
