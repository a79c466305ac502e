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

func TestTargetsAreThoseOfAnyPod(t *testing.T) {
	env := map[string]string{"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}
	get := func(name string) string { return env[name] }
	all, err := Targets(get, []byte(
		"search a b\nnameserver 10.96.0.10\nnameserver 127.0.0.1\n\nnameserver\nnameserver x\n# nameserver 1.1.1.1\n"))
	require.NoError(t, err)
	require.Equal(t, []Target{
		{"the API server", "tcp", "[fd00::1]:443"},
		{"the metadata service", "tcp", "169.254.169.254:80"}, {"the metadata service", "tcp", "[fd00:ec2::254]:80"},
		{"a name server", "udp", "10.96.0.10:53"}, {"a name server", "tcp", "10.96.0.10:53"},
	}, all)
	delete(env, "KUBERNETES_SERVICE_HOST")
	_, err = Targets(get, nil)
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
	require.NoError(t, Await(t.Context(), Gateway(away+","+at), closed(t), 0), "it has an address of each family")
	require.NoError(t, listener.Close())
	err = Await(t.Context(), Gateway(at), closed(t), 0)
	require.EqualError(t, err, Failed+"the pod does not reach the egress gateway ("+at+")")
	require.Empty(t, Gateway(""))
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
