package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// writeTree writes a module with the given files and returns its folder.
func writeTree(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	files["go.mod"] = "module x\n\ngo 1.26\n"
	for name, content := range files {
		require.NoError(t, os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o700))
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600))
	}
	return dir
}

const testFile = `package p

import "testing"

func TestF(t *testing.T) {
	if F(1) != 2 {
		t.Fatal("F")
	}
}

type s struct{}

func (s) TestMethod(t *testing.T) {}

func help() {}
`

const goodBreak = `
- name: good
  promise: F counts
  test: ./p TestF
  edits:
  - package: p
    decl: F
    old: n + 1
    new: n + 2
`

func named(name, content string) string {
	return strings.ReplaceAll(content, "name: good", "name: "+name)
}

func replaced(content string, oldnew ...string) string {
	return strings.NewReplacer(oldnew...).Replace(content)
}

func TestBreaksAreReadFromTheirFiles(t *testing.T) {
	dir := writeTree(t, map[string]string{
		"one.yaml": goodBreak,
		"two.yaml": named("other", goodBreak) + named("third", goodBreak),
	})
	for _, c := range []struct {
		args []string
		want []string
	}{
		{nil, []string{"good", "other", "third"}},
		{[]string{"third", "good"}, []string{"good", "third"}},
		{[]string{"two"}, []string{"other", "third"}},
	} {
		all, err := read(dir, c.args)
		require.NoError(t, err)
		var names []string
		for _, m := range all {
			names = append(names, m.Name)
		}
		require.Equal(t, c.want, names, "%v", c.args)
	}
	_, err := read(dir, []string{"good", "nothing"})
	require.ErrorContains(t, err, `"nothing"`)
	_, err = read(t.TempDir(), nil)
	require.ErrorContains(t, err, "no breaks in")
}

func TestBadFieldsOfBreaksAreNamed(t *testing.T) {
	withoutEdits, _, _ := strings.Cut(goodBreak, "  edits")
	for want, content := range map[string]string{
		"name: missing":                      replaced(goodBreak, "name: good", "name: ''"),
		"promise: missing":                   replaced(goodBreak, "promise: F counts", "promise: ''"),
		`test: "TestF"`:                      replaced(goodBreak, "./p TestF", "TestF"),
		"edits: missing":                     withoutEdits,
		"edit 1: needs package":              replaced(goodBreak, "decl: F", ""),
		"edit 1: needs package and decl, or": replaced(goodBreak, "package: p", "file: p/p.go", "decl: F", ""),
		"edit 1: old: missing":               replaced(goodBreak, "old: n + 1", "old: ''"),
		"the name is taken":                  goodBreak + goodBreak,
		`unknown field "functions"`:          replaced(goodBreak, "decl:", "functions:"),
		"one.yaml, break 1 \"good\": edits":  withoutEdits,
	} {
		_, err := read(writeTree(t, map[string]string{"one.yaml": content}), nil)
		require.ErrorContains(t, err, want)
	}
}

// One run lists all breaks that are wrong, so that a refactoring can repair them at once.
func TestCheckNamesEveryBreakThatIsWrong(t *testing.T) {
	t.Chdir(writeTree(t, map[string]string{
		"p/p.go":      "package p\n\nfunc F(n int) int { return n + 1 }\n",
		"p/q.go":      "package p\n\nfunc G(n int) int { return n + 1 + n + 1 }\n",
		"p/p_test.go": testFile,
		"r/r.go":      "package r\n\nimport \"x/p\"\n\nfunc R() int { return p.F(1) }\n",
		"r/r_test.go": "package r\n\nfunc used() int { return R() }\n",
		"tools/mutate/breaks/all.yaml": goodBreak +
			// Compiles only as a whole.
			named("good-in-both", replaced(goodBreak, "  - package: p", `  - package: p
    decl: G
    old: func G(n int) int
    new: func G() int { return H(1) }; func H(n int) int
  - package: r
    decl: R
    old: p.F(1)
    new: p.G()
  - package: p`)) +
			named("test-uses-it", replaced(goodBreak, "package: p", "package: r", "decl: F", "decl: R",
				"n + 1", "R()", "new: n + 2", "new: R(n int)")) +
			named("good-elsewhere", replaced(goodBreak, "decl: F", "decl: G", "new: n + 2", "new: 'n'\n    all: true")) +
			named("bad-code", replaced(goodBreak, "new: n + 2", "new: nothing")) +
			named("no-text", replaced(goodBreak, "old: n + 1", "old: n + 7")) +
			named("twice", replaced(goodBreak, "decl: F", "decl: G")) +
			named("no-decl", replaced(goodBreak, "decl: F", "decl: H")) +
			named("no-package", replaced(goodBreak, "package: p", "package: q")) +
			named("no-test", replaced(goodBreak, "TestF", "TestG")),
	}))
	var out bytes.Buffer
	err := run(t.Context(), []string{"--check"}, &out)
	require.ErrorContains(t, err, "7 of 10: no-text, twice, no-decl, no-package, no-test, test-uses-it, bad-code")
	for _, want := range []string{
		`edit 1: old: not found in F of p: "n + 7"`,
		`edit 1: old: found 2 times in G of p`,
		"edit 1: decl: no H in p",
		"edit 1: decl: no F in q",
		"test: no test TestG in ./p",
		"undefined: nothing",
		"not enough arguments in call to R",
		"3 of 10 breaks apply",
	} {
		require.Contains(t, out.String(), want)
	}

	out.Reset()
	require.NoError(t, run(t.Context(), []string{"--check", "good", "good-elsewhere", "good-in-both"}, &out))
}

func TestRunSeesWhichBreaksTheirTestsNotice(t *testing.T) {
	t.Chdir(writeTree(t, map[string]string{
		"p/p.go":      "package p\n\nfunc F(n int) int { return n + 1 }\n",
		"p/p_test.go": testFile,
	}))
	breaking := func(with string) mutation {
		edits := []edit{{Package: "p", Decl: "F", Old: "n + 1", New: with}}
		return mutation{Name: "x", Promise: "F counts", Test: "./p TestF", Edits: edits}
	}
	good, harmless, broken, unknown := breaking("n + 2"), breaking("1 + n"), breaking("nothing"), breaking("n + 2")
	unknown.Test = "./p TestG"
	verdict, err := good.try(t.Context())
	require.NoError(t, err)
	require.Equal(t, "noticed by TestF", verdict)
	_, err = harmless.try(t.Context())
	require.ErrorContains(t, err, "TestF did not notice: F counts")
	_, err = broken.try(t.Context())
	require.ErrorContains(t, err, "does not compile")
	_, err = unknown.try(t.Context())
	require.ErrorContains(t, err, "no test TestG in ./p")
	after, err := os.ReadFile("p/p.go")
	require.NoError(t, err)
	require.Contains(t, string(after), "n + 1", "the tree is as it was")
}
