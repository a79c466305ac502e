package main

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestPatchesSayWhatTheyBreakAndWhoMustNotice(t *testing.T) {
	for content, says := range map[string]string{
		"Breaks: x\nTest: ./p TestX -a=1\n\n--- a/f\n+++ b/f\n": "",
		"Test: ./p TestX\n--- a/f\n":                            "Breaks:",
		"Breaks: x\n--- a/f\nTest: ./p TestX\n":                 "Test:",
		"Breaks: x\nTest: TestX\n--- a/f\n":                     "a package and a test",
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
		require.Equal(t, mutation{name: "one", file: filepath.Join(dir, "one.patch"), breaks: "x", pkg: "./p", test: "TestX", flags: []string{"-a=1"}, touches: []string{"f", "f"}}, all[0])
		_, err = read(dir, []string{"two"})
		require.ErrorContains(t, err, "two")
	}
}

// Without that a patch whose test was renamed goes on passing the check, and proves
// nothing.
func TestTheCheckFindsTestsThatDoNotExist(t *testing.T) {
	dir := tree(t, map[string]string{
		"p/p.go":          "package p\n\nfunc F() int { return 1 }\n",
		"p/p_test.go":     "package p\n\nimport \"testing\"\n\nfunc TestIn(t *testing.T) {}\n\ntype s struct{}\n\nfunc (s) TestMethod(t *testing.T) {}\n\nfunc TestInAndMore(t *testing.T) {}\n\nfunc help() {}\n",
		"p/x_test.go":     "package p_test\n\nimport \"testing\"\n\nfunc TestOut(t *testing.T) {}\n",
		"p/other_test.go": "//go:build never\n\npackage p\n\nimport \"testing\"\n\nfunc TestNotBuilt(t *testing.T) {}\n",
		"p.patch":         "--- a/p/p.go\n+++ b/p/p.go\n@@ -1,3 +1,3 @@\n package p\n \n-func F() int { return 1 }\n+func F() int { return 2 }\n",
	})
	for test, there := range map[string]bool{
		"TestIn": true, "TestIn/sub": true, "TestOut": true, "TestMethod": false, "TestNotBuilt": false, "TestI": false, "TestNothing": false, "help": false,
	} {
		m := mutation{name: "p", file: filepath.Join(dir, "p.patch"), breaks: "x", pkg: "./p", test: test}
		_, err := m.check(t.Context(), dir)
		if there {
			require.NoError(t, err, test)
		} else {
			require.ErrorContains(t, err, "there is no test "+test)
		}
	}
}

// tree writes a module and returns its directory.
func tree(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	files["go.mod"] = "module x\n\ngo 1.26\n"
	for name, content := range files {
		require.NoError(t, os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o700))
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600))
	}
	return dir
}

// Patches are compiled together, and a bad one does not hide behind the others.
func TestTheCheckNamesEachPatchThatIsBad(t *testing.T) {
	patch := func(file, with string) string {
		return fmt.Sprintf("Breaks: x\nTest: ./p TestIn\n\n--- a/p/%[1]s.go\n+++ b/p/%[1]s.go\n@@ -1,3 +1,3 @@\n package p\n \n-var %[1]s = 1\n+%[2]s\n", file, with)
	}
	dir := tree(t, map[string]string{
		"p/a.go":                               "package p\n\nvar a = 1\n",
		"p/b.go":                               "package p\n\nvar b = 1\n",
		"p/c.go":                               "package p\n\nvar c = 1\n",
		"p/p_test.go":                          "package p\n\nimport \"testing\"\n\nfunc TestIn(t *testing.T) {}\n",
		"tools/mutate/patches/a-good.patch":    patch("a", "var a = 2"),
		"tools/mutate/patches/a-other.patch":   patch("a", "var a = 3"),
		"tools/mutate/patches/b-broken.patch":  patch("b", "var b = nothing"),
		"tools/mutate/patches/c-good.patch":    patch("c", "var c = 2"),
		"tools/mutate/patches/c-moved.patch":   strings.ReplaceAll(patch("c", "var c = 2"), "-var c", "-var cc"),
		"tools/mutate/patches/c-unnamed.patch": strings.ReplaceAll(patch("c", "var c = 3"), "TestIn", "TestOut"),
	})
	mutations, err := read(filepath.Join(dir, "tools", "mutate", "patches"), nil)
	require.NoError(t, err)
	groups := apart(mutations)
	require.Len(t, groups, 3, "three patches touch one file")
	var bad []string
	for _, m := range inDoubt(t.Context(), dir, mutations) {
		if _, err := m.check(t.Context(), dir); err != nil {
			bad = append(bad, m.name)
		}
	}
	require.Equal(t, []string{"b-broken", "c-moved", "c-unnamed"}, bad)
	good := slices.DeleteFunc(mutations, func(m mutation) bool { return slices.Contains(bad, m.name) })
	require.Empty(t, inDoubt(t.Context(), dir, good), "and the tree is what it was")
}
