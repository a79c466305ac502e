package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// source is a package as the go command lists it.
type source struct {
	ImportPath, Dir, Export, ForTest   string
	GoFiles, TestGoFiles, XTestGoFiles []string
}

// checker checks the types of changed packages. It takes their imports as the go command has compiled them from the
// tree as it is, so a change of one package costs the check of that package and nothing else.
type checker struct {
	set      *token.FileSet
	imports  types.Importer
	packages map[string]*source   // by their folder, relative to the root
	parsed   map[string]*ast.File // of the tree as it is, by their name relative to the root
}

// newChecker has the go command compile what the packages in these folders and their tests import.
func newChecker(ctx context.Context, folders []string) (*checker, error) {
	root, err := os.Getwd()
	if err != nil {
		return nil, err
	}
	const fields = "ImportPath,Dir,Export,ForTest,GoFiles,TestGoFiles,XTestGoFiles"
	args := []string{"list", "-export", "-test", "-deps", "-json=" + fields}
	for _, folder := range folders {
		args = append(args, "./"+folder)
	}
	cmd := exec.CommandContext(ctx, "go", args...)
	var problems strings.Builder
	cmd.Stderr = &problems
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("the tree does not compile:\n%s", problems.String())
	}
	c := &checker{set: token.NewFileSet(), packages: map[string]*source{}, parsed: map[string]*ast.File{}}
	exports := map[string]string{}
	for list := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p source
		if err := list.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return nil, err
		}
		if p.ForTest != "" || strings.HasSuffix(p.ImportPath, ".test") {
			continue // made for a test
		}
		exports[p.ImportPath] = p.Export
		if folder, err := filepath.Rel(root, p.Dir); err == nil {
			c.packages[folder] = &p
		}
	}
	c.imports = importer.ForCompiler(c.set, "gc", func(path string) (io.ReadCloser, error) {
		if exports[path] == "" {
			return nil, fmt.Errorf("nothing compiled for %s", path)
		}
		return os.Open(exports[path])
	})
	return c, nil
}

// check returns an error if the change leaves one in the package of a folder or in its tests. Tests in a package of
// their own may get the changed package from what they import, too, and then it is two packages. So those that have
// errors in the tree as it is are not checked.
func (c *checker) check(folder string, changed change) error {
	p := c.packages[folder]
	if p == nil {
		return fmt.Errorf("no package in %s", folder)
	}
	found, err := c.types(folder, p.ImportPath, slices.Concat(p.GoFiles, p.TestGoFiles), changed, c.imports)
	if err != nil || len(p.XTestGoFiles) == 0 {
		return err
	}
	_, err = c.types(folder, p.ImportPath+"_test", p.XTestGoFiles, changed, but{c.imports, found})
	if err != nil && changed != nil && c.check(folder, nil) != nil {
		return nil
	}
	return err
}

// types checks files of a folder as a package.
func (c *checker) types(
	folder, path string, names []string, changed change, imports types.Importer,
) (*types.Package, error) {
	var files []*ast.File
	for _, name := range names {
		file, err := c.parse(filepath.Join(folder, name), changed)
		if err != nil {
			return nil, err
		}
		files = append(files, file)
	}
	return (&types.Config{Importer: imports}).Check(path, c.set, files, nil)
}

// but imports one package as it was found.
type but struct {
	types.Importer
	found *types.Package
}

func (b but) Import(path string) (*types.Package, error) {
	if path == b.found.Path() {
		return b.found, nil
	}
	return b.Importer.Import(path)
}

func (c *checker) parse(name string, changed change) (*ast.File, error) {
	if content, ok := changed[name]; ok {
		return parser.ParseFile(c.set, name, content, parser.SkipObjectResolution)
	}
	if file := c.parsed[name]; file != nil {
		return file, nil
	}
	file, err := parser.ParseFile(c.set, name, nil, parser.SkipObjectResolution)
	if err == nil {
		c.parsed[name] = file
	}
	return file, err
}
