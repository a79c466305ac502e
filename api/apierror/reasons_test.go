package apierror_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/tools/docs"
)

func TestDocumentedReasonsAreTheGoldenFile(t *testing.T) {
	docs.Section(t, "docs/reference/errors.md", "reasons", apierror.Table())
}

// Who is said to send a reason is who names it in its code. What Envoy sends is
// compared in package envoy.
func TestReasonsAreSentByWhomTheDocumentationSays(t *testing.T) {
	constants := reasonConstants(t)
	for sender, dirs := range map[apierror.Sender][]string{
		apierror.Router: {"../../egress", "../../extproc"}, apierror.API: {"../../allocator", "../../allocator/rest"}, apierror.Admin: {"../../extproc/admin", "../../internal/adminpages"},
	} {
		named := map[apierror.Reason]bool{}
		for _, dir := range dirs {
			for _, name := range selectors(t, dir) {
				if reason, ok := constants[name]; ok {
					named[reason] = true
				}
			}
		}
		require.NotEmpty(t, named, sender)
		for _, k := range apierror.Kinds() {
			require.Equal(t, named[k.Reason], slices.Contains(k.By, sender), "%s, sent by %s", k.Reason, sender)
		}
	}
}

// Every reason has a Kind, and errors are made from it: a literal could carry
// another status.
func TestErrorsAreMadeFromTheirKind(t *testing.T) {
	for name, reason := range reasonConstants(t) {
		require.Equal(t, reason, apierror.KindOf(reason).Reason, name)
	}
	require.NoError(t, filepath.WalkDir("../..", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") || filepath.Dir(path) == "../../api/apierror" {
			return err
		}
		raw, err := os.ReadFile(path)
		require.NotContains(t, string(raw), "apierror.Error{", path)
		return err
	}))
}

// reasonConstants are the reasons by the names of their constants.
func reasonConstants(t *testing.T) map[string]apierror.Reason {
	t.Helper()
	all := map[string]apierror.Reason{}
	file, err := parser.ParseFile(token.NewFileSet(), "reasons.go", nil, 0)
	require.NoError(t, err)
	ast.Inspect(file, func(n ast.Node) bool {
		v, ok := n.(*ast.ValueSpec)
		if !ok {
			return true
		}
		if kind, ok := v.Type.(*ast.Ident); ok && kind.Name == "Reason" {
			all[v.Names[0].Name] = apierror.Reason(strings.Trim(v.Values[0].(*ast.BasicLit).Value, `"`))
		}
		return true
	})
	require.Len(t, all, len(apierror.Kinds()))
	return all
}

// selectors are the names that the code of a directory uses of this package.
func selectors(t *testing.T, dir string) []string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*.go"))
	require.NoError(t, err)
	var all []string
	for _, path := range files {
		if strings.HasSuffix(path, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, 0)
		require.NoError(t, err)
		ast.Inspect(file, func(n ast.Node) bool {
			if s, ok := n.(*ast.SelectorExpr); ok {
				if x, ok := s.X.(*ast.Ident); ok && x.Name == "apierror" {
					all = append(all, s.Sel.Name)
				}
			}
			return true
		})
	}
	return all
}
