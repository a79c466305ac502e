package main

import (
	"testing"

	"github.com/stretchr/testify/require"
)

const packageFile = `package p

import "time"

// limit is a limit.
const (
	limit = 22 << 10
	other = 22
)

type pair[A any] struct {
	a A
	b int
}

var names = []string{
	"a", "b",
}

func (p *pair[A]) sum(more ...int) int {
	total := p.b // of one
	for _, m := range more {
		total += m
	}
	return total
}

func (p pair[A]) wait() { time.Sleep(time.Second); time.Sleep(time.Second) }

func call() int {
	return max(1,
		2)
}
`

func TestEditsAreLocatedByDeclarationAndText(t *testing.T) {
	t.Chdir(writeTree(t, map[string]string{"p/p.go": packageFile, "p/text.txt": "a:\n  b:   c d\n"}))
	for name, c := range map[string]struct {
		e    edit
		want string // of the new file
	}{
		"function":             {edit{Decl: "call", Old: "max(1, 2)", New: "3"}, "return 3\n"},
		"pointer method":       {edit{Decl: "(*pair).sum", Old: "total := p.b", New: "total := 0"}, "total := 0 // of one"},
		"receiver not pointer": {edit{Decl: "pair.sum", Old: "total += m", New: ""}, "{\n\t\t\n\t}"},
		"several lines":        {edit{Decl: "(*pair).sum", Old: "}\nreturn total", New: "}; return 1"}, "}; return 1\n"},
		"lines joined":         {edit{Decl: "(*pair).sum", Old: "+= m } return", New: "+= 1 }; return"}, "+= 1 }; return"},
		"constant":             {edit{Decl: "limit", Old: "22", New: "16"}, "limit = 16 << 10\n\tother = 22"},
		"variable":             {edit{Decl: "names", Old: `{"a", "b"`, New: `{"c"`}, `names = []string{"c",`},
		"type":                 {edit{Decl: "pair", Old: "b int", New: "b int64"}, "b int64\n}"},
		"all":                  {edit{Decl: "pair.wait", Old: "time.Second", New: "0", All: true}, "Sleep(0); time.Sleep(0)"},
		"file":                 {edit{File: "p/text.txt", Old: "b: c", New: "b: e"}, "a:\n  b: e d\n"},
	} {
		t.Run(name, func(t *testing.T) {
			if c.e.File == "" {
				c.e.Package = "p"
			}
			changed, err := mutation{Edits: []edit{c.e}}.apply()
			require.NoError(t, err)
			require.Len(t, changed, 1)
			for _, content := range changed {
				require.Contains(t, string(content), c.want)
			}
		})
	}
}

// A part of a token, such as 2 of 22, is not found.
func TestEditsThatDoNotApplySayWhy(t *testing.T) {
	t.Chdir(writeTree(t, map[string]string{
		"p/p.go": packageFile, "p/text.txt": "c c\n", "q/q.go": "package q\n\nfunc gone() int { return 7 }\n",
	}))
	for want, e := range map[string]edit{
		`old: not found in call of p: "3"`:     {Package: "p", Decl: "call", Old: "3"},
		`old: not found in limit of p: "2"`:    {Package: "p", Decl: "limit", Old: "2"},
		"old: found 2 times in pair.wait of p": {Package: "p", Decl: "pair.wait", Old: "time.Second"},
		"decl: no gone in p":                   {Package: "p", Decl: "gone", Old: "return 7"},
		"decl: no call in r":                   {Package: "r", Decl: "call", Old: "3"},
		"file: ":                               {File: "p/nothing.txt", Old: "c"},
		`old: not found in p/text.txt: "d"`:    {File: "p/text.txt", Old: "d"},
		"old: found 2 times in p/text.txt":     {File: "p/text.txt", Old: "c"},
	} {
		_, err := mutation{Edits: []edit{e}}.apply()
		require.ErrorContains(t, err, want)
		require.ErrorContains(t, err, "edit 1: ")
	}
}

func TestEveryEditOfABreakIsApplied(t *testing.T) {
	t.Chdir(writeTree(t, map[string]string{"p/p.go": packageFile}))
	first := edit{Package: "p", Decl: "limit", Old: "22", New: "1"}
	second := edit{Package: "p", Decl: "call", Old: "2", New: "9"}
	changed, err := mutation{Edits: []edit{second, first}}.apply()
	require.NoError(t, err)
	require.Contains(t, string(changed["p/p.go"]), "limit = 1 << 10")
	require.Contains(t, string(changed["p/p.go"]), "\t\t9)\n")

	_, err = mutation{Edits: []edit{first, {Package: "p", Decl: "limit", Old: "22 << 10", New: "1"}}}.apply()
	require.ErrorContains(t, err, "edit 2: old: not found", "the first edit has replaced a part of it")
	first.Old, second.Old = "7", "8"
	_, err = mutation{Edits: []edit{first, second}}.apply()
	require.ErrorContains(t, err, "edit 1: ")
	require.ErrorContains(t, err, "edit 2: ")
}

func TestCheckFindsTestsThatDoNotExist(t *testing.T) {
	t.Chdir(writeTree(t, map[string]string{
		"p/p.go":      packageFile,
		"p/p_test.go": testFile,
		"p/x_test.go": "package p_test\n\nfunc TestOut(t *testing.T) {}\n\nfunc FuzzOut(f *testing.F) {}\n",
		"q/q.go":      "package q\n",
		"q/q_test.go": "package q\n\nfunc TestMoved(t *testing.T) {}\n",
	}))
	for test, there := range map[string]bool{
		"TestF": true, "TestF/sub": true, "TestOut": true, "FuzzOut": true, "TestMethod": false,
		"Test": false, "TestNothing": false, "TestMoved": false,
	} {
		err := mutation{Test: "./p " + test}.findTest()
		if there {
			require.NoError(t, err, test)
		} else {
			require.ErrorContains(t, err, "no test "+test+" in ./p")
		}
	}
	require.Error(t, mutation{Test: "./r TestMoved"}.findTest())
}
