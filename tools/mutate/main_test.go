package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestPatchesSayWhatTheyBreakAndWhoMustNotice(t *testing.T) {
	for content, says := range map[string]string{
		"Breaks: x\nTest: ./p TestX -a=1\n\n--- a/f\n": "",
		"Test: ./p TestX\n--- a/f\n":                   "Breaks:",
		"Breaks: x\n--- a/f\nTest: ./p TestX\n":        "Test:",
		"Breaks: x\nTest: TestX\n--- a/f\n":            "a package and a test",
	} {
		dir := t.TempDir()
		require.NoError(t, os.WriteFile(filepath.Join(dir, "one.patch"), []byte(content), 0o600))
		all, err := read(dir, nil)
		if says != "" {
			require.ErrorContains(t, err, says, content)
			continue
		}
		require.NoError(t, err)
		require.Len(t, all, 1)
		require.Equal(t, mutation{name: "one", file: filepath.Join(dir, "one.patch"), breaks: "x", pkg: "./p", test: "TestX", flags: []string{"-a=1"}}, all[0])
		_, err = read(dir, []string{"two"})
		require.ErrorContains(t, err, "two")
	}
}
