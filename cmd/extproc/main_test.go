package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/berth-sandbox/berth/allocator/controlserver"
	"github.com/berth-sandbox/berth/allocator/core"
	controlv1 "github.com/berth-sandbox/berth/api/control/v1"
	"github.com/berth-sandbox/berth/cmd/internal/cli"
	"github.com/berth-sandbox/berth/internal/controltls"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// try runs the command and expects it to end without a signal.
func try(t *testing.T, args ...string) (stdout string, err error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	var out, errs bytes.Buffer
	err = run(ctx, args, &out, &errs)
	require.NoError(t, ctx.Err(), "it went on with wrong flags")
	require.Empty(t, errs.String())
	return out.String(), err
}

// enough has the flags without a default.
func enough(more ...string) []string {
	args := []string{"--pod-cidrs=10.0.0.0/8"}
	if !slices.Contains(more, "--mode=Egress") {
		args = append(args, "--domain=sandbox.example.com")
	}
	if !slices.ContainsFunc(more, func(arg string) bool { return strings.HasPrefix(arg, "--allocator=") }) {
		args = append(args, "--allocator=127.0.0.1:9090")
	}
	return append(args, more...)
}

func TestHelpAndVersionNeedNoOtherFlag(t *testing.T) {
	stdout, err := try(t, "--version")
	require.ErrorIs(t, err, cli.ErrHelp)
	require.Equal(t, cli.Version()+"\n", stdout)
	stdout, err = try(t, "--help")
	require.ErrorIs(t, err, cli.ErrHelp)
	require.Contains(t, stdout, "BERTH_ROUTER_DOMAIN")
	require.Contains(t, stdout, "--pod-cidrs")
}

func TestMissingFlagsAreAllNamed(t *testing.T) {
	_, err := try(t)
	for _, flag := range []string{"--allocator", "--pod-cidrs"} {
		require.ErrorContains(t, err, flag)
	}
	_, err = try(t, "--allocator=127.0.0.1:9090", "--pod-cidrs=10.0.0.0/8")
	require.EqualError(t, err, "--domain: is required")
}

// enoughOfEgress has the flags without a default of an egress router.
func enoughOfEgress(more ...string) []string { return enough(append(more, "--mode=Egress")...) }

func TestFlagsOfTheOtherModeAreNamed(t *testing.T) {
	_, err := try(t, enoughOfEgress("--domain=sandbox.example.com", "--gateway-hosts=g.example.com", "--paths", "--e2b-statuses", "--cache-size=5",
		"--grpc-go", "--traces-to=http://collector:4317", "--max-stale=19s", "--name-server=dns", "--outside-cidrs=169.254.0.0/16", "--inside-cidrs=x")...)
	for _, wrong := range []string{
		"--domain: has no meaning with --mode=Egress", "--gateway-hosts: has", "--paths: has", "--e2b-statuses: has", "--cache-size: has", "--grpc-go: has",
		"--traces-to: has", "--max-stale 19s: must be 20s to 24h0m0s with --mode=Egress", `--name-server "dns"`, "--outside-cidrs", `--inside-cidrs "x"`,
	} {
		require.ErrorContains(t, err, wrong)
	}
	require.Equal(t, 10, strings.Count(err.Error(), "\n"), "each wrong flag has one line")
	_, err = try(t, enough("--inside-cidrs=192.0.2.0/24", "--outside-cidrs=10.1.0.0/16", "--name-server=127.0.0.1:53")...)
	for _, flag := range []string{"--inside-cidrs", "--outside-cidrs", "--name-server"} {
		require.ErrorContains(t, err, flag+": has no meaning with --mode=Ingress")
	}
}

// Invariant: P35
func TestAddressesOfTheClusterAreNeverOutside(t *testing.T) {
	t.Setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
	f := flags{
		Mode: "Egress", Allocator: []string{"127.0.0.1:1"}, AdminListen: "127.0.0.1:0", CacheSize: defaultCacheSize, ShutdownAfter: 1, LogLevel: "info",
		PodCIDRs: []string{"10.244.0.0/16"}, OutsideCIDRs: []string{"10.0.0.0/8", "fd00::/8"}, InsideCIDRs: []string{"10.0.0.7", "fd00::7", "10.9.0.0/16"},
	}
	r, err := f.check()
	require.NoError(t, err)
	for address, outside := range map[string]bool{
		"10.0.0.6": true, "10.0.0.7": false, "fd00::6": true, "fd00::7": false, "10.9.1.1": false, "10.244.1.1": false, "10.96.0.1": false, "10.96.0.2": true,
	} {
		require.Equal(t, outside, r.reach.Permits(netip.MustParseAddr(address)), address)
	}
	t.Setenv("KUBERNETES_SERVICE_HOST", "api.example.com") // as some clusters have it
	_, err = f.check()
	require.NoError(t, err)
}

func TestDomainOfTheClusterIsThatOfTheSearchDomains(t *testing.T) {
	for text, want := range map[string]string{
		"nameserver 10.96.0.10\nsearch berth-system.svc.cluster.local svc.cluster.local cluster.local corp.example.com\n": "cluster.local",
		"search a.svc.K8S.example.com. svc.K8S.example.com. K8S.example.com.":                                             "k8s.example.com",
		"search corp.example.com\n": "",
		"nameserver 10.96.0.10":     "",
		"":                          "",
	} {
		require.Equal(t, want, clusterDomain([]byte(text)), text)
	}
}

// Invariant: P35
func TestEgressRouterNeedsACertificateOfItsOwn(t *testing.T) {
	a := authority(t)
	c, stop, err := controltls.Server(tlsDir(t, a, controltls.AllocatorName))
	require.NoError(t, err)
	t.Cleanup(stop)
	_, address := lead(t, c)
	for mode, role := range map[string]string{"Egress": controltls.RouterName, "Ingress": controltls.EgressName} {
		args := enough
		if mode == "Egress" {
			args = enoughOfEgress
		}
		_, err := try(t, args("--control-tls-dir="+tlsDir(t, a, role), "--allocator="+address,
			"--socket="+filepath.Join(t.TempDir(), "s"), "--admin-listen=127.0.0.1:0")...)
		require.ErrorContains(t, err, "--control-tls-dir: ")
		require.ErrorContains(t, err, "the certificate is for the DNS names [\""+role)
	}
}

func TestDefaultsDependOnTheMode(t *testing.T) {
	for _, c := range []struct {
		args     []string
		maxStale time.Duration
		requests float64
		open     int
	}{
		{enough(), 15 * time.Minute, 0, 0},
		{enoughOfEgress(), 30 * time.Second, 200, 0},
		{enoughOfEgress("--max-stale=20s", "--sandbox-requests-per-second=5", "--sandbox-open-requests=6"), 20 * time.Second, 5, 6},
	} {
		var f flags
		_, err := cli.Parse(&f, "extproc", "", "BERTH_ROUTER", c.args, io.Discard, io.Discard)
		require.NoError(t, err)
		r, err := f.check()
		require.NoError(t, err)
		require.Equal(t, c.maxStale, f.MaxStale)
		require.Equal(t, c.requests, f.Requests)
		require.Equal(t, c.open, f.OpenRequests)
		require.Equal(t, f.egress(), r.reach != nil)
		require.False(t, r.reach != nil && r.reach.Permits(netip.MustParseAddr("10.0.0.1")), "an address of pods")
	}
}

func TestEgressRouterWithoutAnAllocatorIsNotReady(t *testing.T) {
	p := start(t, "--mode=Egress", "--allocator=127.0.0.1:1")
	for path, code := range map[string]int{"/healthz": 200, "/readyz": 503, "/metrics": 200, "/admin/last-active": 404, "/admin/routes": 200} {
		got, body := get(t, p.listening.Admin, path)
		require.Equal(t, code, got, path)
		if path == "/metrics" {
			require.Contains(t, body, "berth_egress_fresh 0")
		}
	}
	began := time.Now()
	require.NoError(t, p.stop())
	require.Less(t, time.Since(began), 5*time.Second)
}

func TestInvalidFlagsAreNamedInOneError(t *testing.T) {
	_, err := try(t, "--domain=Sandbox.Example.com", "--allocator=127.0.0.1:9090,allocator,b:,allocator:9090", "--pod-cidrs=10.0.0.0/8,10.0.0.1,x",
		"--cache-size=0", "--max-stale=999ms", "--shutdown-after=-1s", "--log-level=loud",
		"--sandbox-requests-per-second=0.0001", "--sandbox-open-requests=-1")
	for _, wrong := range []string{
		`--domain, --gateway-hosts: domain "Sandbox.Example.com"`, `--allocator "allocator"`, `--allocator "b:"`, `--allocator "allocator:9090"`, `--pod-cidrs "10.0.0.1"`, `--pod-cidrs "x"`,
		"--cache-size 0", "--max-stale 999ms", "--shutdown-after -1s", `--log-level "loud"`,
		"--sandbox-requests-per-second 0.0001: must be 0, for no limit, or", "--sandbox-open-requests -1",
	} {
		require.ErrorContains(t, err, wrong)
	}
	require.NotContains(t, err.Error(), "127.0.0.1:9090")
	require.NotContains(t, err.Error(), `"10.0.0.0/8"`)
	require.Equal(t, 11, strings.Count(err.Error(), "\n"), "each wrong flag has one line")
}

func TestAllocatorsOutsideLoopbackNeedTLS(t *testing.T) {
	for allocators, loopback := range map[string]bool{
		"127.0.0.1:9090": true, "[::1]:9090,localhost:9090": true,
		"10.0.0.1:9090": false, "allocator.berth.svc:9090": false, "127.0.0.1:9090,10.0.0.1:9090": false, "0.0.0.0:9090": false,
	} {
		for _, tlsDir := range []string{"", "/tls"} {
			var f flags
			_, err := cli.Parse(&f, "extproc", "", "BERTH_ROUTER", enough("--allocator="+allocators, "--control-tls-dir="+tlsDir), io.Discard, io.Discard)
			require.NoError(t, err)
			if _, err = f.check(); loopback || tlsDir != "" {
				require.NoError(t, err, "%s %s", allocators, tlsDir)
			} else {
				require.ErrorContains(t, err, "--control-tls-dir", allocators)
			}
		}
	}
}

func TestAdminListenerStaysOnLoopbackUnlessAllowed(t *testing.T) {
	for address, loopback := range map[string]bool{
		"127.0.0.1:9901": true, "127.1.2.3:1": true, "[::1]:9901": true, "localhost:9901": true,
		":9901": false, "0.0.0.0:9901": false, "[::]:9901": false, "10.0.0.1:9901": false, "router.example.com:9901": false,
	} {
		for _, anywhere := range []string{"false", "true"} {
			var f flags
			_, err := cli.Parse(&f, "extproc", "", "BERTH_ROUTER", enough("--admin-listen="+address, "--admin-anywhere="+anywhere), io.Discard, io.Discard)
			require.NoError(t, err)
			if _, err = f.check(); loopback || anywhere == "true" {
				require.NoError(t, err, address)
			} else {
				require.ErrorContains(t, err, "--admin-listen", address)
				require.ErrorContains(t, err, "--admin-anywhere", address)
			}
		}
	}
}

func TestUnusableTLSDirectoryIsNamed(t *testing.T) {
	a := authority(t)
	for dir, want := range map[string]string{t.TempDir(): controltls.CertFile, tlsDir(t, a, controltls.AllocatorName): controltls.RouterName} {
		_, err := try(t, enough("--control-tls-dir="+dir, "--socket="+filepath.Join(t.TempDir(), "s"), "--admin-listen=127.0.0.1:0")...)
		require.ErrorContains(t, err, "--control-tls-dir: ")
		require.ErrorContains(t, err, want)
	}
}

func TestUnusableListenAddressesAreNamed(t *testing.T) {
	socket := "--socket=" + filepath.Join(t.TempDir(), "s")
	_, err := try(t, enough(socket, "--admin-anywhere", "--admin-listen=256.0.0.1:1")...)
	require.ErrorContains(t, err, "--admin-listen")
	_, err = try(t, enough(socket, "--admin-listen=127.0.0.1:0", "--health-listen=256.0.0.1:1")...)
	require.ErrorContains(t, err, "--health-listen")
	_, err = try(t, enough("--socket=/nonexistent/s", "--admin-listen=127.0.0.1:0")...)
	require.ErrorContains(t, err, "router socket")
}

func TestEveryFlagCanComeFromTheEnvironment(t *testing.T) {
	for name, value := range map[string]string{
		"MODE": "Ingress", "DOMAIN": "sandbox.example.com", "ALLOCATOR": "a:1,b:2", "POD_CIDRS": "10.0.0.0/8,fd00::/8", "SOCKET": "/s", "ENVOY_ADMIN": "/a", "ADMIN_LISTEN": "127.0.0.1:1",
		"HEALTH_LISTEN": ":2", "CONTROL_TLS_DIR": "/tls", "GATEWAY_HOSTS": "g.example.com,gw.sandbox.example.com", "PATHS": "true",
		"ADMIN_ANYWHERE": "true", "CACHE_SIZE": "5", "MAX_STALE": "1m", "SHUTDOWN_AFTER": "4s", "LOG_LEVEL": "warn",
		"SANDBOX_REQUESTS_PER_SECOND": "2.5", "SANDBOX_OPEN_REQUESTS": "7", "TRACES_TO": "http://collector:4317",
	} {
		t.Setenv("BERTH_ROUTER_"+name, value)
	}
	t.Setenv("BERTH_ROUTER_VERSION", "1.2.3") // not a flag's
	var f flags
	_, err := cli.Parse(&f, "extproc", "", "BERTH_ROUTER", nil, io.Discard, io.Discard)
	require.NoError(t, err)
	require.Equal(t, flags{
		Mode: "Ingress", Domain: "sandbox.example.com", Allocator: []string{"a:1", "b:2"}, PodCIDRs: []string{"10.0.0.0/8", "fd00::/8"}, Socket: "/s",
		AdminListen: "127.0.0.1:1", AdminAnywhere: true, HealthListen: ":2", ControlTLSDir: "/tls", GatewayHosts: []string{"g.example.com", "gw.sandbox.example.com"}, Paths: true, CacheSize: 5, MaxStale: time.Minute,
		EnvoyAdmin: "/a", ShutdownAfter: 4 * time.Second, LogLevel: "warn", Requests: 2.5, OpenRequests: 7,
		TracesTo: "http://collector:4317",
	}, f)
	_, err = f.check()
	require.NoError(t, err)
}

func TestEmptyEnvironmentIsNotAValue(t *testing.T) {
	t.Setenv("BERTH_ROUTER_DOMAIN", "")
	t.Setenv("BERTH_ROUTER_POD_CIDRS", "")
	_, err := try(t, "--allocator=127.0.0.1:9090")
	require.Error(t, err)
}

// process is a router that runs.
type process struct {
	listening struct{ Socket, Admin, Health string }
	// failed receives the addresses of allocators without a session.
	failed chan string
	stop   func() error
}

func start(t *testing.T, args ...string) *process {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	logs, stderr := io.Pipe()
	p := &process{failed: make(chan string, 100)}
	args = enough(append([]string{"--socket=" + filepath.Join(t.TempDir(), "s"), "--admin-listen=127.0.0.1:0"}, args...)...)
	ended := make(chan error, 1)
	go func() {
		ended <- run(ctx, args, io.Discard, stderr)
		stderr.Close()
	}()
	lines := bufio.NewScanner(logs)
	var line struct{ Msg, Address string }
	failed := func() {
		if strings.HasPrefix(line.Msg, "no session") {
			select {
			case p.failed <- line.Address:
			default:
			}
		}
	}
	for line.Msg != "listening" {
		require.True(t, lines.Scan(), "it ended")
		require.NoError(t, json.Unmarshal(lines.Bytes(), &line))
		failed()
	}
	require.NoError(t, json.Unmarshal(lines.Bytes(), &p.listening))
	drained := make(chan struct{})
	go func() {
		defer close(drained)
		for lines.Scan() {
			if json.Unmarshal(lines.Bytes(), &line) == nil {
				failed()
			}
		}
	}()
	p.stop = sync.OnceValue(func() error {
		http.DefaultClient.CloseIdleConnections()
		cancel()
		err := <-ended
		<-drained
		return err
	})
	t.Cleanup(func() { require.NoError(t, p.stop()) })
	return p
}

// soon is what comes next.
func soon(t *testing.T, c <-chan string) string {
	t.Helper()
	select {
	case s := <-c:
		return s
	case <-time.After(time.Minute):
		t.Fatal("nothing within a minute")
		return ""
	}
}

func get(t *testing.T, address, path string) (int, string) {
	t.Helper()
	r, err := http.Get("http://" + address + path)
	require.NoError(t, err)
	defer r.Body.Close()
	body, err := io.ReadAll(r.Body)
	require.NoError(t, err)
	return r.StatusCode, string(body)
}

// A router without an allocator is healthy and not ready, and ends without an error.
func TestRouterRunsWithoutAnAllocatorAndStops(t *testing.T) {
	p := start(t, "--allocator=127.0.0.1:1")
	require.Empty(t, p.listening.Health, "no flag has set it")
	for path, code := range map[string]int{"/healthz": 200, "/readyz": 503, "/metrics": 200, "/admin/last-active": 200} {
		got, body := get(t, p.listening.Admin, path)
		require.Equal(t, code, got, path)
		if path == "/metrics" {
			require.Contains(t, body, "berth_routecache_fresh 0")
		}
	}
	conn, err := grpc.NewClient("unix:"+p.listening.Socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	require.NoError(t, err)
	_, err = healthv1.NewHealthClient(conn).Check(t.Context(), &healthv1.HealthCheckRequest{})
	require.NoError(t, err)
	conn.Close()

	began := time.Now()
	require.NoError(t, p.stop())
	require.Less(t, time.Since(began), 5*time.Second)
}

// envoyAt answers on Envoy's admin socket as an Envoy with two requests open does. posts has the paths of POST requests.
func envoyAt(t *testing.T, socket string) (posts <-chan string) {
	t.Helper()
	l, err := net.Listen("unix", socket)
	require.NoError(t, err)
	posted := make(chan string, 100)
	envoy := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPost {
			posted <- r.URL.Path
		}
		_, _ = io.WriteString(w, "pods_h1::observability_name::pods_h1\npods_h1::10.1.2.3:80::rq_active::2\n"+
			"pods_h2::observability_name::pods_h2\npods_h1_tls::observability_name::pods_h1_tls\n"+
			"pods_h2_tls::observability_name::pods_h2_tls\n")
	})}
	served := make(chan struct{})
	go func() {
		defer close(served)
		_ = envoy.Serve(l)
	}()
	t.Cleanup(func() {
		require.NoError(t, envoy.Close())
		<-served
	})
	return posted
}

// A kubelet that restarts the router alone has begun a drain of its Envoy.
// Invariant: P23
func TestRouterThatStartsEndsTheDrain(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "a")
	posts := envoyAt(t, socket)
	start(t, "--allocator=127.0.0.1:1", "--envoy-admin="+socket)
	require.Equal(t, "/healthcheck/ok", soon(t, posts))
}

func TestRouterLooksAtItsEnvoy(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "a")
	p := start(t, "--allocator=127.0.0.1:1", "--envoy-admin="+socket)
	metrics := func(line string) func() bool {
		return func() bool {
			_, body := get(t, p.listening.Admin, "/metrics")
			return strings.Contains(body, line)
		}
	}
	require.Eventually(t, metrics("berth_router_look_error 1"), time.Minute, 10*time.Millisecond, "there is no Envoy yet")
	_, body := get(t, p.listening.Admin, "/admin/last-active?format=text")
	require.Contains(t, body, "cannot tell what is open: ")

	envoyAt(t, socket)
	require.Eventually(t, metrics("berth_router_look_error 0"), time.Minute, 10*time.Millisecond)
	require.True(t, metrics("berth_router_look_seconds_count")())
	require.False(t, metrics("berth_router_look_seconds_count 0")())
	_, body = get(t, p.listening.Admin, "/admin/last-active?format=text")
	require.NotContains(t, body, "cannot tell what is open: ")
}

func TestAdminListenerRefusesForeignHostsUnlessAllowed(t *testing.T) {
	for name, c := range map[string]struct {
		args []string
		code int
	}{
		"on loopback": {nil, http.StatusMisdirectedRequest},
		"anywhere":    {[]string{"--admin-anywhere", "--admin-listen=0.0.0.0:0"}, 200},
	} {
		t.Run(name, func(t *testing.T) {
			p := start(t, append(c.args, "--allocator=127.0.0.1:1")...)
			_, port, err := net.SplitHostPort(p.listening.Admin)
			require.NoError(t, err)
			r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://127.0.0.1:"+port+"/admin/routes", http.NoBody)
			require.NoError(t, err)
			r.Host = "evil.example:" + port
			w, err := http.DefaultClient.Do(r)
			require.NoError(t, err)
			require.NoError(t, w.Body.Close())
			require.Equal(t, c.code, w.StatusCode)
		})
	}
}

func TestHealthListenerShowsNoSandboxID(t *testing.T) {
	p := start(t, "--allocator=127.0.0.1:1", "--health-listen=127.0.0.1:0")
	for path, code := range map[string]int{
		"/healthz": 200, "/readyz": 503, "/metrics": 200,
		"/": 404, "/admin/last-active": 404, "/admin/routes": 404, "/admin/": 404, "/debug/pprof/": 404, "/debug/pprof/cmdline": 404, "/debug/pprof/heap": 404,
	} {
		got, body := get(t, p.listening.Health, path)
		require.Equal(t, code, got, "%s: %s", path, body)
	}
	code, _ := get(t, p.listening.Admin, "/admin/routes")
	require.Equal(t, 200, code, "the admin listener is still there")
}

func authority(t *testing.T) *controltls.Authority {
	t.Helper()
	a, err := controltls.NewAuthority(time.Now())
	require.NoError(t, err)
	return a
}

// tlsDir is a certificate of the authority for the role.
func tlsDir(t *testing.T, a *controltls.Authority, role string) string {
	t.Helper()
	f, err := a.Issue(role, time.Now())
	require.NoError(t, err)
	d := t.TempDir()
	for name, content := range map[string][]byte{controltls.CertFile: f.Cert, controltls.KeyFile: f.Key, controltls.CAFile: f.CA} {
		require.NoError(t, os.WriteFile(filepath.Join(d, name), content, 0o600))
	}
	return d
}

// leader replaces the allocator's core: it has no sandboxes and answers every ping.
type leader struct {
	server *controlserver.Server
	joined chan string
}

func (l *leader) Submit(ev core.Event) {
	switch ev := ev.(type) {
	case core.SessionJoined:
		l.server.Deliver(1, core.SendSnapshot{Stream: ev.Stream, Sequence: 1})
		l.joined <- ev.Session
	case core.SessionPing:
		l.server.Deliver(1, core.SendPong{Stream: ev.Stream, Nonce: ev.Nonce})
	case core.SessionGoodbye:
		l.server.Deliver(1, core.CloseStream{Stream: ev.Stream, Left: true})
	}
}

func (l *leader) Valid() bool  { return true }
func (l *leader) Term() uint64 { return 1 }

func (*leader) Journal() string { return "j" }

func (*leader) Began() uint64 { return 1 }

func (*leader) Position() uint64 { return 1 }

func (*leader) Restored(uint64) {}

func newControlServer(t *testing.T) *controlserver.Server {
	t.Helper()
	s, err := controlserver.New(controlserver.Options{
		MaxStale: 15 * time.Minute, LeaderAddress: func() string { return "" }, Log: zap.NewNop(),
	})
	require.NoError(t, err)
	return s
}

// lead runs the allocator's own control server.
func lead(t *testing.T, c credentials.TransportCredentials) (*leader, string) {
	t.Helper()
	l := &leader{server: newControlServer(t), joined: make(chan string, 100)}
	l.server.Lead(l)
	s := grpc.NewServer(grpc.Creds(c))
	controlv1.RegisterControlServer(s, l.server)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	served := make(chan error, 1)
	go func() { served <- s.Serve(listener) }()
	t.Cleanup(func() {
		s.Stop()
		require.NoError(t, <-served)
	})
	return l, listener.Addr().String()
}

func TestRoutesArriveOverMutualTLS(t *testing.T) {
	ours := authority(t)
	c, stop, err := controltls.Server(tlsDir(t, ours, controltls.AllocatorName))
	require.NoError(t, err)
	t.Cleanup(stop)
	l, address := lead(t, c)
	p := start(t, "--allocator="+address, "--control-tls-dir="+tlsDir(t, ours, controltls.RouterName), "--health-listen=127.0.0.1:0")
	require.NotEmpty(t, soon(t, l.joined))
	require.Eventually(t, func() bool {
		code, _ := get(t, p.listening.Health, "/readyz")
		return code == 200
	}, time.Minute, 10*time.Millisecond)
}

func TestAllocatorOfAnotherAuthorityIsRefused(t *testing.T) {
	ours, others := authority(t), authority(t)
	credentialsOf := func(dir string) credentials.TransportCredentials {
		c, stop, err := controltls.Server(dir)
		require.NoError(t, err)
		t.Cleanup(stop)
		return c
	}
	routers := "--control-tls-dir=" + tlsDir(t, ours, controltls.RouterName)
	for name, c := range map[string]struct {
		server credentials.TransportCredentials
		router []string
	}{
		"an allocator of another authority": {credentialsOf(tlsDir(t, others, controltls.AllocatorName)), []string{routers}},
		"an allocator without TLS":          {insecure.NewCredentials(), []string{routers}},
		"a router without TLS":              {credentialsOf(tlsDir(t, ours, controltls.AllocatorName)), nil},
	} {
		t.Run(name, func(t *testing.T) {
			l, address := lead(t, c.server)
			p := start(t, append(c.router, "--allocator="+address, "--health-listen=127.0.0.1:0")...)
			for range 2 { // it tries again
				require.Equal(t, address, soon(t, p.failed))
			}
			require.Empty(t, l.joined)
			code, _ := get(t, p.listening.Health, "/readyz")
			require.Equal(t, 503, code)
			code, _ = get(t, p.listening.Health, "/healthz")
			require.Equal(t, 200, code)
		})
	}
}

func TestRouterStopsBeforeItHasStarted(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	require.NoError(t, run(ctx, enough("--allocator=127.0.0.1:1", "--socket="+filepath.Join(t.TempDir(), "s"), "--admin-listen=127.0.0.1:0"), io.Discard, io.Discard))
}
