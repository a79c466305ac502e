package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/agent"
	"github.com/berth-sandbox/berth/agent/accounts"
	processpb "github.com/berth-sandbox/berth/agent/agentpb/process"
	"github.com/berth-sandbox/berth/agent/children"
	"github.com/berth-sandbox/berth/agent/freeze"
	"github.com/berth-sandbox/berth/agent/initbox"
	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/devcluster"
	"github.com/berth-sandbox/berth/devcluster/hollow"
	"github.com/berth-sandbox/berth/devcluster/stack"
	"github.com/berth-sandbox/berth/e2e/harness"
	"github.com/berth-sandbox/berth/e2e/history"
)

// fileServerEnv makes the test binary a plain file server on the address in it.
const fileServerEnv = "BERTH_BENCH_FILE_SERVER"

func TestMain(m *testing.M) {
	if address := os.Getenv(fileServerEnv); address != "" {
		fmt.Fprintln(os.Stderr, serveFiles(address))
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// serveFiles is the plain HTTP file server: GET of any file, PUT writes the body to a file.
func serveFiles(address string) error {
	files := http.FileServer(http.Dir("/"))
	return http.ListenAndServe(address, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodPut {
			files.ServeHTTP(w, r)
			return
		}
		to, err := os.Create(r.URL.Path)
		if err == nil {
			_, err = io.Copy(to, r.Body)
			_ = to.Close()
		}
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
		}
	}))
}

// sandboxed is a sandbox whose pod has the agent.
type sandboxed struct {
	*testing.B
	berth *harness.Berth
	openapi.Sandbox
	ip   string
	pid  int    // of the agent
	home string // of commands; empty: that of the agent
}

// filesPort is that of the plain file server in the pod.
const filesPort = 9000

func newSandboxed(b *testing.B) *sandboxed {
	bin := b.TempDir()
	require.NoError(b, stack.Build(b.Context(), bin, false, "allocator", "extproc", "demo-sandbox", "agent"))
	berth := harness.NewRun(b, history.Settings{}, "").Start(harness.Options{
		Cluster: devcluster.Options{Nodes: 1, NodePath: []string{bin}}, Stack: stack.Options{BinDir: bin},
	})
	s := &sandboxed{B: b, berth: berth}
	s.Sandbox, s.ip = claimOf(b, berth, func(p *v1alpha1.SandboxPool) {
		p.Spec.Agent = &v1alpha1.PoolAgent{Enabled: true, Port: agent.Port}
		p.Spec.Ports = append(stack.DemoPorts(), filesPort)
	})
	require.NotNil(b, s.EnvdAccessToken)
	s.pid = agentOf(b, s.direct())
	return s
}

func (s *sandboxed) direct() string { return net.JoinHostPort(s.ip, strconv.Itoa(agent.Port)) }

func (s *sandboxed) gateway() string { return s.berth.Gateways[0].Addr.String() }

func (s *sandboxed) host(port int) string {
	return fmt.Sprintf("%d-%s.%s", port, s.SandboxID, s.berth.Stack.Domain)
}

// agentOf returns the process of the agent that listens on an address.
func agentOf(b *testing.B, address string) int {
	entries, err := os.ReadDir("/proc")
	require.NoError(b, err)
	for _, e := range entries {
		line, err := os.ReadFile(filepath.Join("/proc", e.Name(), "cmdline"))
		if err == nil && bytes.Contains(line, []byte("\x00run\x00--listen="+address+"\x00")) {
			pid, err := strconv.Atoi(e.Name())
			require.NoError(b, err)
			return pid
		}
	}
	require.Fail(b, "no agent runs")
	return 0
}

// memory returns a field of /proc/PID/status in MiB.
func memory(b *testing.B, pid int, field string) float64 {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	require.NoError(b, err)
	for line := range strings.Lines(string(text)) {
		if rest, ok := strings.CutPrefix(line, field+":"); ok {
			kib, err := strconv.ParseFloat(strings.Fields(rest)[0], 64)
			require.NoError(b, err)
			return kib / 1024
		}
	}
	require.Fail(b, "no such field", field)
	return 0
}

// BenchmarkAgentRun runs "true" as the SDKs' commands.run does: a server stream of process.Process/Start in
// Connect's JSON with /bin/bash -l -c. The ways take turns: the bare program, the agent directly, and the
// agent through Envoy and the router. The home directory is empty, because the profile of a person's account
// can take longer than all the rest.
func BenchmarkAgentRun(b *testing.B) {
	const rounds, perRound, warmup = 10, 20, 10
	s := newSandboxed(b)
	s.home = b.TempDir()
	bare := func() error {
		c := exec.Command("/bin/bash", "-l", "-c", "true")
		c.Env = append(os.Environ(), "HOME="+s.home)
		return c.Run()
	}
	ways := []struct {
		name string
		run  func() error
		took []time.Duration
	}{
		{name: "bare", run: bare},
		{name: "direct", run: s.commands(s.direct(), "")},
		{name: "direct_again", run: s.commands(s.direct(), "")},
		{name: "berth", run: s.commands(s.gateway(), s.host(agent.Port))},
	}
	run := func(way, n int) {
		for range n {
			began := time.Now()
			require.NoError(b, ways[way].run(), ways[way].name)
			ways[way].took = append(ways[way].took, time.Since(began))
		}
	}
	for i := range ways {
		run(i, warmup)
		ways[i].took = nil
	}
	b.ResetTimer()
	for range b.N {
		for round := range rounds {
			for i := range ways {
				run((i+round)%len(ways), perRound)
			}
			for _, w := range ways {
				took := w.took[round*perRound:]
				b.Logf("round %d, %s: p50 %.1f, least %.1f ms", round, w.name, ms(quantile(took, 0.5)), ms(slices.Min(took)))
			}
		}
	}
	b.StopTimer()
	for _, w := range ways {
		b.ReportMetric(ms(quantile(w.took, 0.5)), w.name+"_p50_ms")
		b.ReportMetric(ms(quantile(w.took, 0.99)), w.name+"_p99_ms")
		b.ReportMetric(ms(slices.Min(w.took)), w.name+"_least_ms")
	}
}

// commands returns commands.run("true") by way of an address.
func (s *sandboxed) commands(address, host string) func() error {
	calls := processpb.NewProcessClient(client(s.B, address), "http://"+address,
		connect.WithProtoJSON(), connect.WithAcceptCompression("gzip", nil, nil))
	no := false
	return func() error {
		r := connect.NewRequest(&processpb.StartRequest{Stdin: &no, Process: &processpb.ProcessConfig{
			Cmd: "/bin/bash", Args: []string{"-l", "-c", "true"}, Envs: map[string]string{"HOME": s.home}}})
		r.Header().Set("Keepalive-Ping-Interval", "50")
		r.Header().Set(agent.TokenHeader, *s.EnvdAccessToken)
		if host != "" {
			r.Header().Set("Host", host)
		}
		ctx, cancel := context.WithTimeout(s.Context(), time.Minute)
		defer cancel()
		stream, err := calls.Start(ctx, r)
		if err != nil {
			return err
		}
		defer stream.Close() // it was read to its end
		for stream.Receive() {
			if end := stream.Msg().GetEvent().GetEnd(); end != nil && end.GetExitCode() != 0 {
				return fmt.Errorf("exit code %d", end.GetExitCode())
			}
		}
		return stream.Err()
	}
}

// BenchmarkAgentFiles moves files of 100 MB through the same Envoy: to and from the agent, in turn with to
// and from a plain file server in the same pod, which is a process of its own too.
func BenchmarkAgentFiles(b *testing.B) {
	const size, rounds = 100 << 20, 10
	s := newSandboxed(b)
	plain := net.JoinHostPort(s.ip, strconv.Itoa(filesPort))
	server := exec.Command("/proc/self/exe")
	server.Env = append(os.Environ(), fileServerEnv+"="+plain)
	_, err := s.berth.Cluster.Supervisor().Start(server)
	require.NoError(b, err)
	require.Eventually(b, func() bool {
		conn, err := net.Dial("tcp", plain)
		return err == nil && conn.Close() == nil
	}, time.Minute, 10*time.Millisecond)

	http := client(b, s.gateway())
	file := filepath.Join(b.TempDir(), "file")
	contents := bytes.Repeat([]byte("0123456789abcdef"), size/16)
	move := func(method, url, host string, body []byte) float64 {
		began := time.Now()
		r, err := newRequest(b, method, url, host, body)
		require.NoError(b, err)
		r.Header.Set(agent.TokenHeader, *s.EnvdAccessToken)
		r.Header.Set("Content-Type", "application/octet-stream")
		response, err := http.Do(r)
		require.NoError(b, err)
		n, err := io.Copy(io.Discard, response.Body)
		response.Body.Close()
		require.NoError(b, err)
		require.Equal(b, 200, response.StatusCode)
		if body == nil {
			require.EqualValues(b, size, n)
		}
		return float64(size) / (1 << 20) / time.Since(began).Seconds()
	}
	toAgent, toPlain := "http://berth/files?path="+file, "http://berth"+file
	ways := []struct {
		name, method, url, host string
		body                    []byte
		rates                   []float64
	}{
		{name: "agent_up", method: "POST", url: toAgent, host: s.host(agent.Port), body: contents},
		{name: "plain_up", method: "PUT", url: toPlain, host: s.host(filesPort), body: contents},
		{name: "agent_down", method: "GET", url: toAgent, host: s.host(agent.Port)},
		{name: "plain_down", method: "GET", url: toPlain, host: s.host(filesPort)},
	}
	before := memory(b, s.pid, "VmHWM")
	b.ResetTimer()
	for range b.N {
		for round := range rounds + 1 { // the first one opens connections and makes the file
			for i := range ways {
				w := &ways[(i+max(round-1, 0))%len(ways)]
				if rate := move(w.method, w.url, w.host, w.body); round > 0 {
					w.rates = append(w.rates, rate)
				}
			}
		}
	}
	b.StopTimer()
	for i := range ways {
		b.ReportMetric(median(ways[i].rates), ways[i].name+"_MiB/s")
		b.Logf("%s: %.0f", ways[i].name, ways[i].rates)
	}
	b.ReportMetric(median(ways[0].rates)/median(ways[1].rates), "up_ratio")
	b.ReportMetric(median(ways[2].rates)/median(ways[3].rates), "down_ratio")
	b.ReportMetric(before, "agent_rss_before_MiB")
	b.ReportMetric(memory(b, s.pid, "VmHWM"), "agent_rss_peak_MiB")
}

func newRequest(b *testing.B, method, url, host string, body []byte) (*http.Request, error) {
	r, err := http.NewRequestWithContext(b.Context(), method, url, bytes.NewReader(body))
	if err == nil {
		r.Host = host
	}
	return r, err
}

// BenchmarkAgentStart starts agents, one after the other: from the start of the program until a connection is
// accepted and /health answers. Each then idles for a second.
func BenchmarkAgentStart(b *testing.B) {
	const times, idling = 100, 10
	bin := b.TempDir()
	require.NoError(b, stack.Build(b.Context(), bin, false, "agent"))
	sealer, err := initbox.NewSealer([32]byte{1})
	require.NoError(b, err)
	http := client(b, "127.0.0.1:49999")
	for range b.N {
		var took []time.Duration
		var idle []float64
		for i := range times {
			a := exec.Command(filepath.Join(bin, "agent"), "run", "--listen=127.0.0.1:49999",
				"--key="+sealer.PublicKey().String())
			began := time.Now()
			require.NoError(b, a.Start())
			for {
				response, err := http.Get("http://agent/health")
				if err == nil {
					response.Body.Close()
					require.Equal(b, 204, response.StatusCode)
					break
				}
				time.Sleep(200 * time.Microsecond)
			}
			took = append(took, time.Since(began))
			if i < idling {
				time.Sleep(time.Second)
				idle = append(idle, memory(b, a.Process.Pid, "VmRSS"))
			}
			require.NoError(b, a.Process.Kill())
			_ = a.Wait() // killed
			http.CloseIdleConnections()
		}
		b.ReportMetric(ms(quantile(took, 0.5)), "start_p50_ms")
		b.ReportMetric(ms(quantile(took, 0.99)), "start_p99_ms")
		b.ReportMetric(median(idle), "idle_rss_MiB")
	}
}

// agents serves the agents of pods without processes: real handlers of package agent, each with a key pair of
// its own that was made before the claim, in the process of the benchmark. An address has one until that is
// configured, and then the next pod has the address.
type agents struct {
	key   atomic.Pointer[initbox.PublicKey]
	fresh chan *agent.Agent
	mu    sync.Mutex
	given map[string]*agent.Agent // by the address of the pod
}

func (a *agents) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if a.key.Load() == nil { // the pool has no agent
		return
	}
	at := fmt.Sprint(r.Context().Value(http.LocalAddrContextKey))
	a.mu.Lock()
	h := a.given[at]
	if h == nil || r.Method == http.MethodGet && h.Config() != nil {
		h = <-a.fresh
		a.given[at] = h
	}
	a.mu.Unlock()
	h.ServeHTTP(w, r)
}

// prepare starts n agents.
func (a *agents) prepare(b *testing.B, n int) {
	directory, err := accounts.New(false)
	require.NoError(b, err)
	freezer, err := freeze.New(freeze.Options{Children: children.New()})
	require.NoError(b, err)
	for range n - len(a.fresh) {
		keys, err := initbox.NewKeys(*a.key.Load())
		require.NoError(b, err)
		h, err := agent.New(agent.Options{Log: slog.New(slog.DiscardHandler), Keys: keys, Accounts: directory,
			Freezer: freezer, WriteFile: func(accounts.Account, initbox.File) error { return nil }})
		require.NoError(b, err)
		a.fresh <- h
	}
}

// BenchmarkAgentClaims: bursts of 300 claims in turn: with 10 environment variables each, the same without,
// and from a pool without agents.
func BenchmarkAgentClaims(b *testing.B) {
	const burst, warm, rounds = 300, 400, 6
	in := &agents{fresh: make(chan *agent.Agent, 2*warm), given: map[string]*agent.Agent{}}
	g := newGroundWith(b, stack.Options{LeaseDuration: 15 * time.Second}, hollow.Options{Nodes: 10, Handler: in})
	g.pool("bare", warm, 0)
	withAgent := func(p *v1alpha1.SandboxPool) {
		p.Spec.Agent = &v1alpha1.PoolAgent{Enabled: true, Port: int32(g.berth.Nodes.Port())}
	}
	g.berth.CreatePool("first", 1, withAgent)
	g.full("first", 1)
	pods, err := g.berth.Pods(b.Context(), "first", "")
	require.NoError(b, err)
	for _, e := range pods[0].Spec.Containers[0].Env {
		if e.Name == initbox.PublicKeyEnv {
			key := new(initbox.PublicKey)
			require.NoError(b, key.UnmarshalText([]byte(e.Value)))
			in.key.Store(key)
		}
	}
	in.prepare(b, 2*warm)
	g.berth.CreatePool("agents", warm, withAgent)
	g.full("agents", warm)
	envs := map[string]string{}
	for i := range 10 {
		envs[fmt.Sprintf("VARIABLE_%d", i)] = strings.Repeat(strconv.Itoa(i), 32)
	}
	text, err := json.Marshal(envs)
	require.NoError(b, err)
	ways := []struct {
		name, pool, more string
		p50, p99, cpu    []float64
	}{
		{name: "vars", pool: "agents", more: `,"envVars":` + string(text)},
		{name: "none", pool: "agents"},
		{name: "bare", pool: "bare"},
	}
	b.ResetTimer()
	for range b.N {
		for round := range rounds {
			for i := range ways {
				w := &ways[(i+round)%len(ways)]
				in.prepare(b, 2*warm)
				g.warmUp(burst)
				ids := make([]string, burst)
				before := g.metrics(g.admin + "/metrics")["process_cpu_seconds_total"]
				took := g.parallel(burst, burst, func(i int) (err error) {
					ids[i], err = g.claimWith(w.pool, w.more)
					return err
				})
				w.cpu = append(w.cpu, 1000*(g.metrics(g.admin + "/metrics")["process_cpu_seconds_total"]-before)/burst)
				g.projectionLag()
				g.parallel(burst, 64, func(i int) error { return g.release(ids[i]) })
				g.full(w.pool, warm)
				w.p50, w.p99 = append(w.p50, ms(quantile(took, 0.5))), append(w.p99, ms(quantile(took, 0.99)))
				b.Logf("round %d, %s: p50 %.1f p99 %.1f ms, allocator's CPU %.2f ms/claim",
					round, w.name, w.p50[round], w.p99[round], w.cpu[round])
			}
		}
	}
	b.StopTimer()
	ratio := func(a, c []float64) float64 {
		all := make([]float64, len(a))
		for i := range a {
			all[i] = a[i] / c[i]
		}
		return median(all)
	}
	for i := range ways {
		b.ReportMetric(median(ways[i].p50), ways[i].name+"_p50_ms")
		b.ReportMetric(median(ways[i].p99), ways[i].name+"_p99_ms")
		b.ReportMetric(median(ways[i].cpu), ways[i].name+"_cpu_ms/claim")
	}
	b.ReportMetric(ratio(ways[0].p50, ways[1].p50), "vars_to_none_p50")
	b.ReportMetric(ratio(ways[0].p50, ways[2].p50), "vars_to_bare_p50")
}
