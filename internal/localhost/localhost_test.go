package localhost_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/internal/localhost"
)

func TestOnlyLoopbackLiteralsAndLocalhostAreLocal(t *testing.T) {
	for _, host := range []string{"127.0.0.1", "127.0.0.1:8081", "127.9.8.7:1", "[::1]", "[::1]:8081", "[::ffff:127.0.0.1]:1", "localhost", "LocalHost:80", "localhost.:80"} {
		require.True(t, localhost.Is(localhost.Hostname(host)), host)
	}
	for _, host := range []string{
		"", ":80", "evil.example", "evil.example:8081", "127.0.0.1.nip.io", "127.0.0.1.evil.example:8081", "localhost.evil.example", "evil.localhost",
		"127.1", "2130706433", "0x7f000001", "0177.0.0.1", "10.0.0.1:80", "0.0.0.0", "[::]", "[fe80::1]", "localhost:80:80", "[localhost]]",
	} {
		require.False(t, localhost.Is(localhost.Hostname(host)), host)
	}
}

func TestHostnameHasNoPortAndNoTrailingDot(t *testing.T) {
	for host, want := range map[string]string{
		"Sandbox.Example.com:8443": "sandbox.example.com", "sandbox.example.com.": "sandbox.example.com", "[::1]:80": "::1", "": "",
	} {
		require.Equal(t, want, localhost.Hostname(host), host)
	}
}
