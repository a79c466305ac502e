package main

import (
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/envoy"
)

func TestEnvoyEgressConfigIsThatOfTheFlags(t *testing.T) {
	want, err := envoy.EgressYAML(envoy.EgressSettings{
		Listen: netip.MustParseAddrPort("[::]:3129"), HealthListen: netip.MustParseAddrPort("127.0.0.1:82"),
		RouterSocket: "/r", AdminSocket: "/a", CAFile: "/ca.crt", MaxHeap: 64 << 20, MaxConnections: 7,
	})
	require.NoError(t, err)
	args := []string{
		"envoy-egress-config", "--listen=[::]:3129", "--health-listen=127.0.0.1:82", "--router-socket=/r", "--admin-socket=/a",
		"--ca-file=/ca.crt", "--max-heap=67108864", "--max-connections=7",
	}
	stdout, err := berth(t, args...)
	require.NoError(t, err)
	require.Equal(t, string(want), stdout)
	file := filepath.Join(t.TempDir(), "envoy.yaml")
	stdout, err = berth(t, append(args, "--output="+file)...)
	require.NoError(t, err)
	require.Empty(t, stdout)
	got, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Equal(t, string(want), string(got))
	for arg, says := range map[string]string{
		"--listen=:3128": "--listen", "--health-listen=x": "--health-listen", "--ca-file=ca.crt": "must be an absolute path",
		"--max-connections=0": "--max-connections", "--max-heap=1": "heap",
	} {
		_, err := berth(t, "envoy-egress-config", arg)
		require.ErrorContains(t, err, says, arg)
	}
}
