package egress_test

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"

	bootstrapv3 "github.com/envoyproxy/go-control-plane/envoy/config/bootstrap/v3"
	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	endpointv3 "github.com/envoyproxy/go-control-plane/envoy/config/endpoint/v3"
	procv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/egress"
	"github.com/berth-sandbox/berth/envoy"
)

// rounds of a benchmark take turns, so that a busy machine hits all arms alike.
const rounds, perRound = 21, 400

// BenchmarkHop is one plain request through an egress gateway on a connection that stays open. Beside it are the same
// request through an Envoy that asks nothing, and through one whose ext_proc, over grpc-go, answers each request
// alike and keeps no stream. The last one is there twice, as the control. The figures are CPU time of Envoy, router,
// client and origin together, by round: what an arm takes above the Envoy that asks nothing, as a ratio to what
// ext_proc takes above it.
func BenchmarkHop(b *testing.B) {
	w := newWorld(b)
	var all []egress.Sandbox
	for i := range rounds { // each round is of another sandbox, because a sandbox has a bound on requests to one origin
		all = append(all, sandbox(b, fmt.Sprint("s", i), fmt.Sprint("127.0.1.", i+1), w.ports, "web.example.com"))
	}
	require.NoError(b, w.replace(all))
	at := w.web.Listener.Addr().String()
	nothing := func() *gateway {
		s, g := startScript(b, w.secure, closesStreams(b))
		s.set(nil, envoy.MetadataDst, at, envoy.MetadataID, "abc", envoy.MetadataIncarnation, "0")
		return g
	}
	bare := startEnvoy(
		b, filepath.Join(socketDir(b), "none.sock"), caFile(b, w.secure), asksNothing(b, w.web.Listener.Addr()))
	type arm struct {
		name string
		take func(round int) time.Duration
	}
	arms := []arm{
		{"bare", bare.measured(b, at)}, {"nothing", nothing().measured(b, at)}, {"control", nothing().measured(b, at)},
		{"egress", w.measured(b, "web.example.com:"+w.webPort)},
	}
	for range b.N {
		took := map[string][]float64{}
		for round := range rounds {
			this := map[string]float64{}
			for _, a := range arms {
				this[a.name] = float64(a.take(round).Nanoseconds()) / perRound
			}
			base := this["nothing"] - this["bare"]
			took["control"] = append(took["control"], (this["control"]-this["bare"])/base)
			took["egress"] = append(took["egress"], (this["egress"]-this["bare"])/base)
			took["bare"], took["hop"] = append(took["bare"], this["bare"]), append(took["hop"], this["egress"]-this["bare"])
		}
		for name, all := range took {
			slices.Sort(all)
			unit := map[string]string{"control": "x", "egress": "x", "bare": "ns", "hop": "ns"}[name]
			b.ReportMetric(all[rounds/4], name+"-quarter-"+unit)
			b.ReportMetric(all[rounds/2], name+"-median-"+unit)
			b.ReportMetric(all[rounds-1-rounds/4], name+"-3quarters-"+unit)
		}
	}
}

// asksNothing makes a plain Envoy of a gateway: no router, no guard, and one origin.
func asksNothing(b *testing.B, origin net.Addr) func(*bootstrapv3.Bootstrap) {
	return func(config *bootstrapv3.Bootstrap) {
		chain := config.GetStaticResources().GetListeners()[0].GetFilterChains()[0]
		chain.Filters = chain.GetFilters()[len(chain.GetFilters())-1:]
		withManager(b, func(manager *hcmv3.HttpConnectionManager) {
			manager.HttpFilters = manager.HttpFilters[len(manager.HttpFilters)-1:]
			manager.AccessLog = nil
		})(config)
		for _, c := range config.GetStaticResources().GetClusters() {
			if c.GetName() != "origins" {
				continue
			}
			at := origin.(*net.TCPAddr)
			c.ClusterDiscoveryType = &clusterv3.Cluster_Type{Type: clusterv3.Cluster_STATIC}
			c.LbConfig, c.LbPolicy, c.CleanupInterval = nil, clusterv3.Cluster_ROUND_ROBIN, nil
			socket := &corev3.SocketAddress{
				Address: at.IP.String(), PortSpecifier: &corev3.SocketAddress_PortValue{PortValue: uint32(at.Port)},
			}
			endpoint := &endpointv3.LbEndpoint{HostIdentifier: &endpointv3.LbEndpoint_Endpoint{Endpoint: &endpointv3.Endpoint{
				Address: &corev3.Address{Address: &corev3.Address_SocketAddress{SocketAddress: socket}},
			}}}
			c.LoadAssignment = &endpointv3.ClusterLoadAssignment{
				ClusterName: "origins",
				Endpoints:   []*endpointv3.LocalityLbEndpoints{{LbEndpoints: []*endpointv3.LbEndpoint{endpoint}}},
			}
		}
	}
}

// closesStreams changes ext_proc so that Envoy ends a stream when it has read the answer.
func closesStreams(b *testing.B) func(*bootstrapv3.Bootstrap) {
	return withManager(b, func(manager *hcmv3.HttpConnectionManager) {
		var proc procv3.ExternalProcessor
		require.NoError(b, manager.HttpFilters[0].GetTypedConfig().UnmarshalTo(&proc))
		proc.ProcessingMode.ResponseTrailerMode = procv3.ProcessingMode_SKIP
		require.NoError(b, manager.HttpFilters[0].GetTypedConfig().MarshalFrom(&proc))
	})
}

// measured returns what sends the requests of a round on a connection of its own, and returns what all processes ran.
func (g *gateway) measured(b *testing.B, host string) func(round int) time.Duration {
	return func(round int) time.Duration {
		c := g.dial(fmt.Sprint("127.0.1.", round+1))
		defer c.Close()
		require.NoError(b, c.SetDeadline(time.Now().Add(time.Minute)))
		r := bufio.NewReader(c)
		request := head("GET http://"+host+"/", fmt.Sprint("s", round))
		once := func() {
			_, err := io.WriteString(c, request)
			require.NoError(b, err)
			response, err := http.ReadResponse(r, nil)
			require.NoError(b, err)
			_, err = io.Copy(io.Discard, response.Body)
			require.NoError(b, err)
			require.Equal(b, http.StatusOK, response.StatusCode)
		}
		once()
		before := cpu(b, g.process.Pid()) + ran(b)
		for range perRound {
			once()
		}
		return cpu(b, g.process.Pid()) + ran(b) - before
	}
}

// cpu returns what the threads of a process have run (proc(5), schedstat).
func cpu(b *testing.B, pid int) (total time.Duration) {
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", pid))
	require.NoError(b, err)
	require.NotEmpty(b, threads)
	for _, thread := range threads {
		raw, err := os.ReadFile(thread)
		require.NoError(b, err)
		var part time.Duration
		_, err = fmt.Sscan(string(raw), &part)
		require.NoError(b, err)
		total += part
	}
	return total
}

// ran returns what this process has run.
func ran(b *testing.B) time.Duration {
	var usage syscall.Rusage
	require.NoError(b, syscall.Getrusage(syscall.RUSAGE_SELF, &usage))
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}
