package main

import (
	"bytes"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/berth-sandbox/berth/cmd/internal/cli"
	"github.com/berth-sandbox/berth/devcluster"
	"github.com/berth-sandbox/berth/devcluster/stack"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// berthDev runs the command with these arguments.
func berthDev(t *testing.T, args ...string) (stdout string, err error) {
	t.Helper()
	var out, errs bytes.Buffer
	err = run(t.Context(), args, &out, &errs)
	require.Empty(t, errs.String())
	return out.String(), err
}

func TestHelpListsTheCommands(t *testing.T) {
	stdout, err := berthDev(t, "--help")
	require.ErrorIs(t, err, cli.ErrHelp)
	for _, command := range []string{"demo", "up", "down", "status", "build"} {
		require.Contains(t, stdout, "  "+command+" ")
	}
	require.NotContains(t, stdout, "  serve ")
}

func TestStatusWithoutClustersNamesTheCommand(t *testing.T) {
	t.Setenv("BERTH_CACHE", t.TempDir())
	stdout, err := berthDev(t, "status")
	require.NoError(t, err)
	require.Equal(t, "no cluster is running; start one with: berth-dev up\n", stdout)
}

func TestUpRefusesClustersThatCannotWork(t *testing.T) {
	t.Setenv("BERTH_CACHE", t.TempDir())
	for says, args := range map[string][]string{
		"use sandbox.box":             {"--tls", "--domain=box"},
		"--replicas 0: must be 1":     {"--replicas=0"},
		"--replicas 11: must be 1 to": {"--replicas=11"},
	} {
		_, err := berthDev(t, append([]string{"up"}, args...)...)
		require.ErrorContains(t, err, says)
	}
	o, err := (&shape{TLS: true, Replicas: 1}).check()
	require.NoError(t, err)
	require.Equal(t, stack.Options{Domain: "sandbox.localhost", TLS: true, Allocators: 1, Gateways: 1}, o)
}

func TestUpOfARunningClusterNamesTheCommands(t *testing.T) {
	t.Setenv("BERTH_CACHE", t.TempDir())
	r, err := devcluster.Acquire("dev", func() {})
	require.NoError(t, err)
	defer r.Close()
	_, err = berthDev(t, "up")
	require.ErrorIs(t, err, devcluster.ErrRunning)
	require.ErrorContains(t, err, "berth-dev down --name dev")
}

// The background process gets the flags of "up".
func TestShapePassesToTheBackgroundProcess(t *testing.T) {
	for _, want := range []shape{
		{GatewayHost: []string{"127.0.0.1"}, Replicas: 1},
		{Domain: "a.b", TLS: true, GatewayHost: []string{"x.y", "127.0.0.1"}, E2BStatuses: true, Replicas: 3, CodeInterpreter: true},
	} {
		var got struct{ shape }
		_, err := cli.Parse(&got, "serve", "", "X", want.args(), nil, nil)
		require.NoError(t, err)
		require.Equal(t, want, got.shape, fmt.Sprint(want.args()))
	}
}
