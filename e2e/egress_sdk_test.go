package e2e

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/api/sandboxaccess"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/devcluster"
	"github.com/berth-sandbox/berth/devcluster/stack"
	"github.com/berth-sandbox/berth/e2e/harness"
)

// networkSDKs change what sandboxes may reach.
var networkSDKs = []stockSDK{
	{"2.51.0", devcluster.NPM, []string{"node", "network.cjs"}},
	{"2.63.0", devcluster.PyPI, []string{"python3", "network.py", "sync"}},
	{"2.63.0", devcluster.PyPI, []string{"python3", "network.py", "async"}},
}

// The programs ask what E2B's own tests of egress ask, of origins on this machine.
//
// Invariant: P35, P36
func TestStockSDKsDecideWhatSandboxesReach(t *testing.T) {
	onThisMachine(t, "the names of its hosts are those of a name server of the test")
	one, two := netip.MustParseAddr("127.1.1.1"), netip.MustParseAddr("127.2.2.2")
	port := origins(t, one, two)
	names := harness.NameServer(t, loopback, func(name string) netip.Addr {
		switch {
		case strings.HasSuffix(name, "two.example."):
			return two
		case strings.HasSuffix(name, "one.example."):
			return one
		}
		return netip.Addr{}
	})
	e := startDamaging(t, owners, 0, stack.Options{Egress: &stack.Egress{RouterArgs: []string{
		"--outside-cidrs=" + one.String() + "/32," + two.String() + "/32", "--name-server=" + names,
	}}})
	pool := e.otherPool("network", 4, func(s *v1alpha1.SandboxPoolSpec) {
		s.Agent = &v1alpha1.PoolAgent{Enabled: true, Port: sandboxaccess.AgentPort}
		s.Egress = &v1alpha1.PoolEgress{Mode: v1alpha1.EgressGateway, Ports: []int32{int32(port)}}
	})
	environment := append(e.overHTTP(), "POOL="+pool, "ONE="+one.String(), "TWO="+two.String(),
		fmt.Sprint("PORT=", port))
	t.Run("network", func(t *testing.T) {
		for _, c := range networkSDKs {
			dir := c.installed(t)
			t.Run(strings.Join(c.program, " "), func(t *testing.T) {
				t.Parallel()
				c.run(t, dir, "", slices.Clip(environment))
			})
		}
	})
}

// origins serves HTTPS at these addresses, all at one port.
func origins(t *testing.T, addrs ...netip.Addr) (port uint16) {
	t.Helper()
	for _, addr := range addrs {
		l, err := net.Listen("tcp", netip.AddrPortFrom(addr, port).String())
		require.NoError(t, err)
		port = netip.MustParseAddrPort(l.Addr().String()).Port()
		server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			_, _ = io.WriteString(w, "origin ")
		}))
		require.NoError(t, server.Listener.Close())
		server.Listener = l
		server.StartTLS()
		t.Cleanup(server.Close)
	}
	return port
}
