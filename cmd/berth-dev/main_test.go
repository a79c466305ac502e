package main

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/berth-sandbox/berth/cmd/internal/cli"
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
