package devcluster

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
)

// registry puts an npm onto PATH that says in a file that it was called, and does what else is said.
func registry(t *testing.T, script string) (calls string) {
	t.Helper()
	bin, calls := t.TempDir(), filepath.Join(t.TempDir(), "calls")
	require.NoError(t, os.WriteFile(filepath.Join(bin, "npm"),
		[]byte("#!/bin/sh\necho called >>"+calls+"\n"+script+"\n"), 0o755))
	t.Setenv("PATH", bin+":"+os.Getenv("PATH"))
	return calls
}

func TestConcurrentCallersInstallPackagesOnce(t *testing.T) {
	useCache(t)
	calls := registry(t, `for out; do [ "$before" = --prefix ] && break; before=$out; done
mkdir "$out/node_modules" && sleep 0.2 && echo "$@" >"$out/node_modules/done"`)
	var group errgroup.Group
	for range 8 {
		group.Go(func() error {
			dir, err := NPM("@e2b/sdk", "1.2.3").Dir(t.Context(), nil)
			if err != nil {
				return err
			}
			_, err = os.Stat(filepath.Join(dir, "node_modules", "done"))
			return err
		})
	}
	require.NoError(t, group.Wait())
	log, err := os.ReadFile(calls)
	require.NoError(t, err)
	require.Equal(t, "called\n", string(log))
}

func TestFailedInstallationSaysWhatToDo(t *testing.T) {
	useCache(t)
	calls := registry(t, "echo 'ENOTFOUND the registry' >&2; exit 1")
	for range 2 {
		_, err := NPMProject("example", `{"dependencies":{}}`).Dir(t.Context(), nil)
		require.ErrorContains(t, err, "install npm-example")
		require.ErrorContains(t, err, "ENOTFOUND the registry")
		require.ErrorContains(t, err, "npm must be on PATH and reach its registry")
	}
	log, err := os.ReadFile(calls)
	require.NoError(t, err)
	require.Equal(t, 2, strings.Count(string(log), "called"), "nothing is left of the first attempt")
}
