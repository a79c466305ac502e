package egress_test

import (
	"context"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	bootstrapv3 "github.com/envoyproxy/go-control-plane/envoy/config/bootstrap/v3"
	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	matcherv3 "github.com/envoyproxy/go-control-plane/envoy/type/matcher/v3"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/protobuf/encoding/protojson"

	"github.com/berth-sandbox/berth/devcluster"
	"github.com/berth-sandbox/berth/devcluster/proc"
	"github.com/berth-sandbox/berth/egress"
	"github.com/berth-sandbox/berth/envoy"
)

func TestMain(m *testing.M) {
	if socket := os.Getenv(routerSocket); socket != "" {
		runRouter(socket)
		return
	}
	goleak.VerifyTestMain(m)
}

// gateway is a real Envoy with the real configuration of an egress gateway.
type gateway struct {
	testing.TB
	settings envoy.EgressSettings
	addr     string
	process  *proc.Process
	admin    *http.Client
	log      *output
}

// socketDir returns a directory whose path is short enough for sockets.
func socketDir(t testing.TB) string {
	dir, err := os.MkdirTemp("", "berth-")
	require.NoError(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// startEnvoy starts an Envoy that asks the router at a socket. The patches change its configuration.
func startEnvoy(t testing.TB, socket, caFile string, patches ...func(*bootstrapv3.Bootstrap)) *gateway {
	t.Helper()
	if testing.Short() {
		t.Skip("needs real Envoy: run without -short")
	}
	bin, err := devcluster.EnvoyBinary(t.Context(), nil)
	require.NoError(t, err)
	dir := socketDir(t)
	g := &gateway{TB: t, log: &output{}, settings: envoy.EgressSettings{
		Listen: netip.MustParseAddrPort("127.0.0.1:0"), CAFile: caFile,
		RouterSocket: socket, AdminSocket: filepath.Join(dir, "admin.sock"), MaxConnections: egress.DefaultConnections,
	}}
	bootstrap, err := envoy.EgressBootstrap(g.settings)
	require.NoError(t, err)
	for _, page := range []string{"/listeners", "/stats"} {
		bootstrap.Admin.AllowPaths = append(bootstrap.Admin.AllowPaths,
			&matcherv3.StringMatcher{MatchPattern: &matcherv3.StringMatcher_Prefix{Prefix: page}})
	}
	for _, patch := range patches {
		patch(bootstrap)
	}
	raw, err := protojson.Marshal(bootstrap)
	require.NoError(t, err)
	file := filepath.Join(dir, "envoy.yaml")
	require.NoError(t, os.WriteFile(file, raw, 0o600))
	supervisor, err := proc.New()
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, supervisor.Close()) })
	cmd := exec.Command(bin, "-c", file, "--disable-hot-restart", "--concurrency", "1", "--log-level", "error")
	cmd.Stderr = g.log
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("Envoy: %s", g.log.String())
		}
	})
	g.process, err = supervisor.Start(cmd)
	require.NoError(t, err)
	g.admin = envoy.AdminClient(g.settings.AdminSocket)
	t.Cleanup(g.admin.CloseIdleConnections)
	require.Eventually(t, func() bool {
		select {
		case <-g.process.Done():
			t.Error("Envoy ended")
			return true
		default:
		}
		for line := range strings.Lines(g.page("/listeners")) {
			addr, ok := strings.CutPrefix(strings.TrimSpace(line), "egress::")
			if ok && !strings.HasSuffix(addr, ":0") {
				g.addr = addr
			}
		}
		return g.addr != ""
	}, time.Minute, 20*time.Millisecond)
	require.False(t, t.Failed())
	return g
}

// withManager changes the connection manager of the listener for sandboxes.
func withManager(t testing.TB, change func(*hcmv3.HttpConnectionManager)) func(*bootstrapv3.Bootstrap) {
	return func(config *bootstrapv3.Bootstrap) {
		filters := config.GetStaticResources().GetListeners()[0].GetFilterChains()[0].GetFilters()
		filter := filters[len(filters)-1]
		var manager hcmv3.HttpConnectionManager
		require.NoError(t, filter.GetTypedConfig().UnmarshalTo(&manager))
		change(&manager)
		require.NoError(t, filter.GetTypedConfig().MarshalFrom(&manager))
	}
}

// page returns a page of Envoy's admin interface, "" as long as it does not answer.
func (g *gateway) page(target string) string {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://envoy"+target, http.NoBody)
	require.NoError(g, err)
	response, err := g.admin.Do(r)
	if err != nil {
		return ""
	}
	defer response.Body.Close()
	return readAll(g.TB, response.Body)
}

// dial connects to the gateway from a source address.
func (g *gateway) dial(from string) net.Conn {
	g.Helper()
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
	c, err := d.DialContext(g.Context(), "tcp", g.addr)
	require.NoError(g, err)
	g.Cleanup(func() { c.Close() })
	require.NoError(g, c.SetDeadline(time.Now().Add(time.Minute)))
	return c
}

// output keeps what a process writes.
type output struct {
	mu   sync.Mutex
	text strings.Builder
}

func (o *output) Write(b []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.Write(b)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.String()
}
