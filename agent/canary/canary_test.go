package canary

import (
	"context"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// Invariant: P37
func TestTargetsAreWhatNoPodMayReach(t *testing.T) {
	env := map[string]string{"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}
	pod := Pod{
		Getenv: func(name string) string { return env[name] },
		ResolvConf: []byte(
			"search a b\nnameserver 10.96.0.10\nnameserver 127.0.0.1\n\nnameserver\nnameserver x\n# nameserver 1.1.1.1\n"),
		Gateway: "10.96.0.9:3128,[fd00::9]:3128", Node: "10.0.0.7,fd00::7", Public: "1.1.1.1:443,[2606:4700:4700::1111]:443",
	}
	all, err := pod.Targets()
	require.NoError(t, err)
	require.Equal(t, []Target{
		{"the API server", "tcp", "[fd00::1]:443"},
		{"the metadata service", "tcp", "169.254.169.254:80"}, {"the metadata service", "tcp", "[fd00:ec2::254]:80"},
		{"a public address", "tcp", "1.1.1.1:443"}, {"a public address", "tcp", "[2606:4700:4700::1111]:443"},
		{"another port of the egress gateway's pods", "tcp", "10.96.0.9:8082"},
		{"another port of the egress gateway's pods", "tcp", "[fd00::9]:8082"},
		{"a name server", "udp", "169.254.20.10:53"}, {"a name server", "tcp", "169.254.20.10:53"},
		{"a name server", "udp", "10.0.0.7:53"}, {"a name server", "tcp", "10.0.0.7:53"},
		{"a name server", "udp", "[fd00::7]:53"}, {"a name server", "tcp", "[fd00::7]:53"},
		{"a name server", "udp", "10.96.0.10:53"}, {"a name server", "tcp", "10.96.0.10:53"},
	}, all)
	require.Equal(t, []Target{
		{"the egress gateway", "tcp", "10.96.0.9:3128"}, {"the egress gateway", "tcp", "[fd00::9]:3128"},
	}, pod.Reached())
	all, err = (&Pod{Getenv: pod.Getenv}).Targets() // as an earlier allocator starts it
	require.NoError(t, err)
	require.Len(t, all, 5)
	delete(env, "KUBERNETES_SERVICE_HOST")
	_, err = pod.Targets()
	require.ErrorContains(t, err, "KUBERNETES_SERVICE_HOST")
}

// closed returns addresses at which nothing listens.
func closed(t *testing.T) []Target {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	u, err := net.ListenPacket("udp", "127.0.0.1:0")
	require.NoError(t, err)
	defer u.Close()
	return []Target{{"x", "tcp", l.Addr().String()}, {"y", "udp", u.LocalAddr().String()}}
}

func TestPodThatReachesNothingIsLetThrough(t *testing.T) {
	silent, err := net.ListenPacket("udp", "127.0.0.1:0")
	require.NoError(t, err)
	defer silent.Close()
	begin := time.Now()
	require.NoError(t, Await(t.Context(), nil, append(closed(t), Target{"z", "udp", silent.LocalAddr().String()}), 0))
	require.GreaterOrEqual(t, time.Since(begin), attemptTime, "an answer may come late")
}

// Invariant: P37
func TestEachTargetThatAnswersIsNamed(t *testing.T) {
	server, err := net.ListenPacket("udp", "127.0.0.1:0")
	require.NoError(t, err)
	served := make(chan struct{})
	go func() {
		defer close(served)
		for n := 0; ; n++ {
			var b [512]byte
			size, from, err := server.ReadFrom(b[:])
			if err != nil {
				return
			}
			if n > 0 && size == len(query) { // the first datagram is lost
				_, _ = server.WriteTo(b[:2], from)
			}
		}
	}()
	defer func() { _ = server.Close(); <-served }()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer listener.Close()
	for _, open := range []Target{
		{"a name server", "udp", server.LocalAddr().String()}, {"the API server", "tcp", listener.Addr().String()},
	} {
		err := Await(t.Context(), nil, append(closed(t), open), 0)
		require.ErrorContains(t, err, Failed+"the pod reaches "+open.What+" ("+open.Network+" "+open.Address+")")
	}
}

// Invariant: P37
func TestNothingIsShownWithoutTheGateway(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	at := listener.Addr().String()
	away := closed(t)[0].Address
	gateway := func(addresses string) []Target { return (&Pod{Gateway: addresses}).Reached() }
	require.NoError(t, Await(t.Context(), gateway(away+","+at), closed(t), 0), "it has an address of each family")
	require.NoError(t, listener.Close())
	err = Await(t.Context(), gateway(at), closed(t), 0)
	require.EqualError(t, err, Failed+"the pod does not reach the egress gateway ("+at+")")
	require.Empty(t, gateway(""))
}

func TestNetworkThatEnforcesLateIsWaitedFor(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	closing := time.AfterFunc(attemptPause/2, func() { _ = listener.Close() })
	defer closing.Stop()
	require.NoError(t, Await(t.Context(), nil, []Target{{"x", "tcp", listener.Addr().String()}}, time.Minute))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, Await(ctx, nil, closed(t), time.Minute), context.Canceled)
}
