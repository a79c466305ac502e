package main

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/berth-sandbox/berth/cmd/internal/cli"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// berth runs the command with these arguments.
func berth(t *testing.T, args ...string) (stdout string, err error) {
	t.Helper()
	var out, errs bytes.Buffer
	err = run(t.Context(), args, &out, &errs)
	require.Empty(t, errs.String())
	return out.String(), err
}

func TestVersionAndHelp(t *testing.T) {
	stdout, err := berth(t, "version")
	require.NoError(t, err)
	require.Equal(t, cli.Version()+"\n", stdout)
	stdout, err = berth(t, "--help")
	require.ErrorIs(t, err, cli.ErrHelp)
	for _, command := range []string{
		"envoy-config", "certs ensure", "journal check", "journal begin", "journal dump",
		"fence ls", "fence sessions", "fence declare-dead", "last-active", "version",
	} {
		require.Contains(t, stdout, command)
	}
}
