package agents_test

import (
	"context"
	"errors"
	"net/netip"
	"net/url"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/allocator/agents"
	"github.com/berth-sandbox/berth/allocator/core"
)

// lookups answers one look-up after the other, and the last answer from then on.
type lookups []any

func (l *lookups) next(_ context.Context, host string) ([]netip.Addr, error) {
	if host != "berth-egress.berth.svc" {
		return nil, errors.New("another host was asked for")
	}
	answer := (*l)[0]
	if len(*l) > 1 {
		*l = (*l)[1:]
	}
	if err, failed := answer.(error); failed {
		return nil, err
	}
	var all []netip.Addr
	for text := range strings.FieldsSeq(answer.(string)) {
		all = append(all, netip.MustParseAddr(text))
	}
	return all, nil
}

// behind is a caller whose pods reach an egress gateway only. It runs until the test ends.
func behind(t *testing.T, answers ...any) *agents.Caller {
	t.Helper()
	all := lookups(answers)
	c, err := agents.New(agents.Options{
		Key: clusterKey(t), Leads: always, EgressProxy: "http://berth-egress.berth.svc:3128", Lookup: all.next,
	})
	require.NoError(t, err)
	ctx, stop := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { c.Run(ctx) })
	t.Cleanup(func() { stop(); running.Wait() })
	return c
}

// Invariant: P37
func TestSandboxBehindAGatewayGetsItsCredential(t *testing.T) {
	c := behind(t, "fd00::9 10.96.0.9")
	require.Eventually(t, func() bool { return c.EgressGateway() == "[fd00::9]:3128,10.96.0.9:3128" }, time.Minute, time.Millisecond)
	token := func(incarnation int) string {
		h, configs := agentOf(t)
		s := pod(t, h)
		s.Agent.Egress, s.Incarnation = true, incarnation
		require.NoError(t, c.Configure(t.Context(), s, nil))
		proxy := (<-configs).Proxy
		token := clusterKey(t).EgressToken("k3x9", incarnation)
		require.Equal(t, "http://k3x9:"+token+"@10.96.0.9:3128", proxy, "the address is of the family of the pod's")
		return token
	}
	require.NotEqual(t, token(0), token(1), "it was stopped, and has another pod")

	h, configs := agentOf(t)
	require.NoError(t, c.Configure(t.Context(), pod(t, h), nil))
	require.Empty(t, (<-configs).Proxy, "its pod reaches everything")
}

// Invariant: P35
func TestAddressOfTheGatewayIsOfThePodsFamily(t *testing.T) {
	for answer, want := range map[string]struct{ four, six string }{
		"fd00::9 10.96.0.9":       {"10.96.0.9:3128", "[fd00::9]:3128"},
		"::ffff:10.96.0.9 fd00::": {"10.96.0.9:3128", "[fd00::]:3128"},
		"fd00::9":                 {"", "[fd00::9]:3128"},
		"10.96.0.9":               {"10.96.0.9:3128", ""},
	} {
		c := behind(t, answer)
		for pod, want := range map[string]string{"10.244.0.5": want.four, "::ffff:10.244.0.5": want.four, "fd00:10:244::5": want.six} {
			s := core.Sandbox{IP: netip.MustParseAddr(pod)}
			s.ID, s.Agent.Egress = "x", true
			text, err := c.ProxyOf(t.Context(), s)
			if want == "" {
				require.ErrorContains(t, err, "has no address of the family of the pod's, "+pod)
				continue
			}
			require.NoError(t, err)
			proxy, err := url.Parse(text)
			require.NoError(t, err)
			require.Equal(t, want, proxy.Host)
			require.Equal(t, "x", proxy.User.Username())
		}
	}
}

func TestAddressOfTheGatewayOutlivesFailedLookUps(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		broken := errors.New("no answer")
		c := behind(t, broken, "10.96.0.9", broken, "10.96.0.10", "fd00::9")
		proxy := func() (string, error) {
			ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
			defer cancel()
			s := core.Sandbox{IP: netip.MustParseAddr("10.244.0.5")}
			s.ID, s.Agent.Egress = "x", true
			text, err := c.ProxyOf(ctx, s)
			_, at, _ := strings.Cut(text, "@")
			return at, err
		}
		_, err := proxy()
		require.ErrorIs(t, err, broken)
		require.Empty(t, c.EgressGateway())
		require.ErrorContains(t, err, "look up berth-egress.berth.svc, the host of the egress gateway")
		for _, step := range []struct {
			pause time.Duration
			want  string
		}{{time.Second, "10.96.0.9:3128"}, {30 * time.Second, "10.96.0.9:3128"}, {time.Second, "10.96.0.10:3128"}} {
			time.Sleep(step.pause)
			synctest.Wait()
			at, err := proxy()
			require.NoError(t, err)
			require.Equal(t, step.want, at)
		}
		time.Sleep(30 * time.Second)
		synctest.Wait()
		_, err = proxy()
		require.ErrorContains(t, err, "has no address of the family of the pod's, 10.244.0.5")
	})
}

func TestWithoutAGatewayNoSandboxBehindOneIsConfigured(t *testing.T) {
	h, _ := agentOf(t)
	s := pod(t, h)
	s.Agent.Egress = true
	require.ErrorContains(t, caller(t, always).Configure(t.Context(), s, nil), "set --egress-proxy")
}

func TestAddressesOfTheGatewayThatAreRefused(t *testing.T) {
	for _, good := range []string{"http://a:1", "http://berth-egress.berth.svc:65535", "http://[fd00::9]:3128"} {
		require.NoError(t, agents.CheckProxy(good))
	}
	for _, bad := range []string{
		"a:1", "https://a:1", "http://:1", "http://a", "http://a:0", "http://a:65536", "http://u:p@a:1",
		"http://a:1/", "http://a:1?b", "http://a:1#b",
	} {
		require.ErrorContains(t, agents.CheckProxy(bad), "must be http://<host>:<port>", bad)
	}
	_, err := agents.New(agents.Options{Key: clusterKey(t), Leads: always, EgressProxy: "a"})
	require.ErrorContains(t, err, `egress proxy "a"`)
}
