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

// Without that a patch whose test was renamed goes on passing the check, and proves
// nothing.
func TestTheCheckFindsTestsThatDoNotExist(t *testing.T) {
	dir := t.TempDir()
	for name, content := range map[string]string{
		"go.mod":          "module x\n\ngo 1.26\n",
		"p/p.go":          "package p\n\nfunc F() int { return 1 }\n",
		"p/p_test.go":     "package p\n\nimport \"testing\"\n\nfunc TestIn(t *testing.T) {}\n\ntype s struct{}\n\nfunc (s) TestMethod(t *testing.T) {}\n\nfunc TestInAndMore(t *testing.T) {}\n\nfunc help() {}\n",
		"p/x_test.go":     "package p_test\n\nimport \"testing\"\n\nfunc TestOut(t *testing.T) {}\n",
		"p/other_test.go": "//go:build never\n\npackage p\n\nimport \"testing\"\n\nfunc TestNotBuilt(t *testing.T) {}\n",
		"p.patch":         "--- a/p/p.go\n+++ b/p/p.go\n@@ -1,3 +1,3 @@\n package p\n \n-func F() int { return 1 }\n+func F() int { return 2 }\n",
	} {
		require.NoError(t, os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o700))
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600))
	}
	for test, there := range map[string]bool{
		"TestIn": true, "TestIn/sub": true, "TestOut": true, "TestMethod": false, "TestNotBuilt": false, "TestI": false, "TestNothing": false, "help": false,
	} {
		m := mutation{name: "p", file: filepath.Join(dir, "p.patch"), breaks: "x", pkg: "./p", test: test}
		_, err := m.try(t.Context(), dir, true)
		if there {
			require.NoError(t, err, test)
		} else {
			require.ErrorContains(t, err, "there is no test "+test)
		}
	}
}
