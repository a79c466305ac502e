package docs

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// source is what the tests read of one Go file.
type source struct {
	file string // relative to the root
	ast  *ast.File
}

// readSources parses the Go files of the repository that are not generated.
func readSources(t *testing.T, root string) (all []source) {
	t.Helper()
	require.NoError(t, filepath.WalkDir(root, func(file string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && file != root && (d.Name()[0] == '.' || d.Name() == "bin" || d.Name() == "node_modules"):
			return filepath.SkipDir
		case !strings.HasSuffix(file, ".go"):
			return nil
		}
		parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.ParseComments|parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		name, err := filepath.Rel(root, file)
		if !ast.IsGenerated(parsed) {
			all = append(all, source{filepath.ToSlash(name), parsed})
		}
		return err
	}))
	require.NotEmpty(t, all)
	return all
}

// foreign has the folders whose comments name files of other projects.
var foreign = []string{"devcluster/processnode"} // files of the kubelet

// A comment names a file relative to its own folder, to the page folder or to the root.
func TestFilesThatCommentsNameExist(t *testing.T) {
	root, err := Root()
	require.NoError(t, err)
	named := regexp.MustCompile(`(?:^|[\s("'])([\w./-]+\.(?:md|go))\b`)
	found := 0
	for _, s := range readSources(t, root) {
		dir := path.Dir(s.file)
		if slices.Contains(foreign, dir) {
			continue
		}
		for _, group := range s.ast.Comments {
			for _, m := range named.FindAllStringSubmatch(group.Text(), -1) {
				exists := func(from string) bool {
					_, err := os.Stat(filepath.Join(root, from, m[1]))
					return err == nil
				}
				assert.True(t, exists(dir) || exists("."), "a comment in %s names %s", s.file, m[1])
				found++
			}
		}
	}
	require.Greater(t, found, 25)
}

// terms are words of package comments that have the form of a name in Go.
var terms = []string{
	"CustomResourceDefinitions", "DataLoss", "GoldenFile", "KiB", "MiB", "NaCl", "OpenAPI", "OpenTelemetry",
	"WebSockets", "gRPC",
}

// A package comment names declarations of Go, fields of formats and methods. Each name with a
// capital letter inside must occur in the code, outside comments.
func TestNamesInPackageCommentsExist(t *testing.T) {
	root, err := Root()
	require.NoError(t, err)
	word := regexp.MustCompile(`[A-Za-z]\w*`)
	name := regexp.MustCompile(`^\w*[a-z0-9][A-Z]\w*$`)
	sources := readSources(t, root)
	code := map[string]bool{}
	for _, s := range sources {
		ast.Inspect(s.ast, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.Comment:
				return false
			case *ast.Ident:
				code[n.Name] = true
			case *ast.BasicLit:
				if n.Kind == token.STRING {
					for _, w := range word.FindAllString(n.Value, -1) {
						code[w] = true
					}
				}
			}
			return true
		})
	}
	found := 0
	for _, s := range sources {
		for _, w := range word.FindAllString(s.ast.Doc.Text(), -1) {
			if name.MatchString(w) && !slices.Contains(terms, w) {
				assert.True(t, code[w], "the package comment in %s names %s", s.file, w)
				found++
			}
		}
	}
	require.Greater(t, found, 100)
}

// A name in brackets in a comment is a declaration of the same package, and a link in its documentation.
func TestLinksOfCommentsAreDeclarations(t *testing.T) {
	root, err := Root()
	require.NoError(t, err)
	link := regexp.MustCompile(`\[\*?([A-Z]\w*(?:\.[A-Z]\w*)?)\]`)
	sources := readSources(t, root)
	declared := map[string]map[string]bool{} // by folder
	for _, s := range sources {
		dir := path.Dir(s.file)
		if declared[dir] == nil {
			declared[dir] = map[string]bool{}
		}
		for _, name := range qualified(s.ast) {
			declared[dir][name] = true
		}
	}
	found := 0
	for _, s := range sources {
		for _, group := range s.ast.Comments {
			for _, m := range link.FindAllStringSubmatch(group.Text(), -1) {
				assert.True(t, declared[path.Dir(s.file)][m[1]], "a comment in %s links %s", s.file, m[1])
				found++
			}
		}
	}
	require.Greater(t, found, 30)
}

// qualified returns what a file declares, with methods, fields and methods of interfaces as
// "Type.Name".
func qualified(file *ast.File) (names []string) {
	for _, d := range file.Decls {
		switch d := d.(type) {
		case *ast.FuncDecl:
			name := d.Name.Name
			if d.Recv != nil {
				name = receiver(d.Recv.List[0].Type) + "." + name
			}
			names = append(names, name)
		case *ast.GenDecl:
			for _, spec := range d.Specs {
				switch spec := spec.(type) {
				case *ast.TypeSpec:
					names = append(names, spec.Name.Name)
					ast.Inspect(spec.Type, func(n ast.Node) bool {
						if f, ok := n.(*ast.Field); ok {
							for _, id := range f.Names {
								names = append(names, spec.Name.Name+"."+id.Name)
							}
						}
						return true
					})
				case *ast.ValueSpec:
					for _, id := range spec.Names {
						names = append(names, id.Name)
					}
				}
			}
		}
	}
	return names
}

// receiver returns the name of the type of a method.
func receiver(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.StarExpr:
		return receiver(e.X)
	case *ast.IndexExpr:
		return receiver(e.X)
	case *ast.IndexListExpr:
		return receiver(e.X)
	case *ast.Ident:
		return e.Name
	}
	return ""
}
