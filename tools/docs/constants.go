package docs

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

// Constant is a constant of the code. Text is its comment, without its name at the beginning.
type Constant struct {
	Name string
	// Type is the name of its type, and Value the text of a string; "" if it has none.
	Type, Value, Text string
}

// Constants returns the exported constants of a package in the order of the files and in that of
// each file. The folder is relative to the root.
func Constants(t *testing.T, folder string) (all []Constant) {
	t.Helper()
	root, err := Root()
	if err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob(filepath.Join(root, folder, "*.go"))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		source, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		parsed, err := parser.ParseFile(token.NewFileSet(), file, source, parser.ParseComments|parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range parsed.Decls {
			if d, ok := d.(*ast.GenDecl); ok && d.Tok == token.CONST {
				all = append(all, constantsOf(d)...)
			}
		}
	}
	return all
}

func constantsOf(d *ast.GenDecl) (all []Constant) {
	var kind string // a line without a value repeats the type of the line before
	for _, spec := range d.Specs {
		spec := spec.(*ast.ValueSpec)
		var c Constant
		if len(spec.Values) > 0 {
			kind = ""
			if id, ok := spec.Type.(*ast.Ident); ok {
				kind = id.Name
			}
			if text, ok := spec.Values[0].(*ast.BasicLit); ok && text.Kind == token.STRING {
				c.Value, _ = strconv.Unquote(text.Value)
			}
		}
		c.Name, c.Type = spec.Names[0].Name, kind
		c.Text = strings.Join(strings.Fields(spec.Doc.Text()+spec.Comment.Text()), " ")
		c.Text = strings.TrimSuffix(strings.TrimPrefix(c.Text, c.Name+": "), ".")
		if spec.Names[0].IsExported() {
			all = append(all, c)
		}
	}
	return all
}
