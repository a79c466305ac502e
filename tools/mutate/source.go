package main

import (
	"errors"
	"fmt"
	"go/ast"
	"go/build"
	"go/parser"
	"go/scanner"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// tree is a source tree. It reads each file and each package once.
type tree struct {
	dir      string
	files    map[string][]byte // by their name, relative to dir
	packages map[string]*source
}

// source is one package of a tree.
type source struct {
	decls []decl
	tests []string
}

// decl is one declaration at the top level of a package.
type decl struct {
	name     string // "(*T).method", "function", or the name of a type, constant or variable
	file     string
	from, to int // in the file
}

// span is a part of a file.
type span struct{ from, to int }

func newTree(dir string) *tree {
	return &tree{dir: dir, files: map[string][]byte{}, packages: map[string]*source{}}
}

// read reads a file, whose name is relative to the tree.
func (t *tree) read(name string) ([]byte, error) {
	if content, ok := t.files[name]; ok {
		return content, nil
	}
	content, err := os.ReadFile(filepath.Join(t.dir, name))
	if err == nil {
		t.files[name] = content
	}
	return content, err
}

// load reads the declarations and the tests of the package in a folder, of the files that
// are built here.
func (t *tree) load(folder string) (*source, error) {
	folder = filepath.Clean(folder)
	if s, ok := t.packages[folder]; ok {
		return s, nil
	}
	if _, err := os.Stat(filepath.Join(t.dir, folder)); err != nil {
		return nil, fmt.Errorf("no folder %s", folder)
	}
	pkg, err := build.ImportDir(filepath.Join(t.dir, folder), 0)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", folder, err)
	}
	s := &source{}
	for _, name := range pkg.GoFiles {
		file := filepath.Join(folder, name)
		content, err := t.read(file)
		if err != nil {
			return nil, err
		}
		fset := token.NewFileSet()
		parsed, err := parser.ParseFile(fset, file, content, parser.SkipObjectResolution)
		if err != nil {
			return nil, err
		}
		offset := func(p token.Pos) int { return fset.Position(p).Offset }
		add := func(name string, node ast.Node) {
			s.decls = append(s.decls, decl{name: name, file: file, from: offset(node.Pos()), to: offset(node.End())})
		}
		for _, d := range parsed.Decls {
			declared(d, add)
		}
	}
	for _, name := range slices.Concat(pkg.TestGoFiles, pkg.XTestGoFiles) {
		file := filepath.Join(t.dir, folder, name)
		parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.SkipObjectResolution)
		if err != nil {
			return nil, err
		}
		for _, d := range parsed.Decls {
			if f, ok := d.(*ast.FuncDecl); ok && f.Recv == nil && isTest(f.Name.Name) {
				s.tests = append(s.tests, f.Name.Name)
			}
		}
	}
	t.packages[folder] = s
	return s, nil
}

// declared calls add for each name that d declares.
func declared(d ast.Decl, add func(name string, node ast.Node)) {
	switch d := d.(type) {
	case *ast.FuncDecl:
		add(funcName(d), d)
	case *ast.GenDecl:
		for _, spec := range d.Specs {
			switch spec := spec.(type) {
			case *ast.TypeSpec:
				add(spec.Name.Name, spec)
			case *ast.ValueSpec:
				for _, name := range spec.Names {
					add(name.Name, spec)
				}
			}
		}
	}
}

func isTest(name string) bool {
	return strings.HasPrefix(name, "Test") || strings.HasPrefix(name, "Fuzz")
}

func funcName(f *ast.FuncDecl) string {
	if f.Recv == nil {
		return f.Name.Name
	}
	receiver, star := f.Recv.List[0].Type, ""
	if pointer, ok := receiver.(*ast.StarExpr); ok {
		receiver, star = pointer.X, "*"
	}
	switch generic := receiver.(type) {
	case *ast.IndexExpr:
		receiver = generic.X
	case *ast.IndexListExpr:
		receiver = generic.X
	}
	name := receiver.(*ast.Ident).Name
	if star != "" {
		name = "(*" + name + ")"
	}
	return name + "." + f.Name.Name
}

// sameDecl compares names of declarations. Whether a receiver is a pointer does not matter.
func sameDecl(a, b string) bool {
	plain := strings.NewReplacer("(", "", "*", "", ")", "").Replace
	return plain(a) == plain(b)
}

// apply returns what the break makes of the tree. It does not write anything. Its error
// lists every edit that does not apply.
func (m mutation) apply(t *tree) (change, error) {
	spans := map[string][]replacement{}
	var errs []error
	for i, e := range m.Edits {
		file, found, err := e.find(t)
		if err != nil {
			errs = append(errs, fmt.Errorf("edit %d: %w", i+1, err))
		}
		for _, s := range found {
			spans[file] = append(spans[file], replacement{s, strings.TrimSpace(e.New)})
		}
	}
	if len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	changed := change{}
	for file, list := range spans {
		slices.SortFunc(list, func(a, b replacement) int { return a.from - b.from })
		content, last := []byte{}, 0
		for _, r := range list {
			if r.from < last {
				return nil, fmt.Errorf("two edits of %s overlap", file)
			}
			content = append(append(content, t.files[file][last:r.from]...), r.text...)
			last = r.to
		}
		changed[file] = append(content, t.files[file][last:]...)
	}
	return changed, nil
}

// replacement is the text that takes the place of a part of a file.
type replacement struct {
	span
	text string
}

// find returns the file that the edit changes and the parts that it replaces.
func (e edit) find(t *tree) (file string, found []span, err error) {
	if e.File != "" {
		content, err := t.read(e.File)
		if err != nil {
			return "", nil, fmt.Errorf("file: %w", err)
		}
		found, err = e.only(textSpans(content, e.Old), e.File)
		return e.File, found, err
	}
	d, err := e.locate(t)
	if err != nil {
		return "", nil, err
	}
	found, err = e.only(d.spans(t, tokens([]byte(e.Old))), fmt.Sprintf("%s (%s)", d.name, d.file))
	if err != nil && len(found) == 0 {
		err = fmt.Errorf("%w%s", err, e.hint(t))
	}
	return d.file, found, err
}

// only checks how often the old text occurs.
func (e edit) only(found []span, where string) ([]span, error) {
	switch {
	case len(found) == 0:
		return nil, fmt.Errorf("old: not found in %s: %q", where, e.Old)
	case len(found) > 1 && !e.All:
		return found, fmt.Errorf("old: found %d times in %s: %q; add context, or say all: true", len(found), where, e.Old)
	}
	return found, nil
}

// locate finds the declaration that the edit names.
func (e edit) locate(t *tree) (decl, error) {
	s, err := t.load(e.Package)
	if err != nil {
		return decl{}, fmt.Errorf("package: %w%s", err, e.hint(t))
	}
	var same []decl
	for _, d := range s.decls {
		if sameDecl(d.name, e.Decl) {
			same = append(same, d)
		}
	}
	switch len(same) {
	case 0:
		return decl{}, fmt.Errorf("decl: no %s in %s%s", e.Decl, e.Package, e.hint(t))
	case 1:
		return same[0], nil
	}
	return decl{}, fmt.Errorf("decl: %s has %d declarations called %s", e.Package, len(same), e.Decl)
}

// maxHints bounds what hint lists.
const maxHints = 5

// hint says where in the tree a declaration has the edit's old text, or its name.
func (e edit) hint(t *tree) string {
	wanted := tokens([]byte(e.Old))
	var texts, names []string
	for _, folder := range t.folders() {
		s, err := t.load(folder)
		if err != nil {
			continue
		}
		for _, d := range s.decls {
			where := fmt.Sprintf("%s in %s", d.name, d.file)
			if len(d.spans(t, wanted)) > 0 {
				texts = append(texts, where)
			}
			if sameDecl(d.name, e.Decl) && folder != filepath.Clean(e.Package) {
				names = append(names, where)
			}
		}
	}
	var b strings.Builder
	for _, h := range []struct {
		title string
		found []string
	}{{"that text is in", texts}, {"that name is declared:", names}} {
		if n := len(h.found); n > 0 && n <= maxHints {
			fmt.Fprintf(&b, "\n\t%s %s", h.title, strings.Join(h.found, ", "))
		}
	}
	return b.String()
}

// folders lists the folders of the tree that may hold packages.
func (t *tree) folders() (folders []string) {
	_ = filepath.WalkDir(t.dir, func(path string, d fs.DirEntry, err error) error {
		switch name := filepath.Base(path); {
		case err != nil || !d.IsDir():
			return nil
		case path != t.dir && (strings.HasPrefix(name, ".") || name == "testdata" || name == "node_modules"):
			return fs.SkipDir
		}
		if folder, err := filepath.Rel(t.dir, path); err == nil {
			folders = append(folders, folder)
		}
		return nil
	})
	return folders
}

// findTest reports whether the break's test exists among the files that are built here.
// Only a run can find a subtest, so the part after a slash is not looked for.
func (m mutation) findTest(t *tree) error {
	pkg, test, _ := m.goTest()
	test, _, _ = strings.Cut(test, "/")
	s, err := t.load(pkg)
	if err == nil && slices.Contains(s.tests, test) {
		return nil
	}
	if err == nil {
		err = fmt.Errorf("no test %s in %s", test, pkg)
	}
	hint := ""
	for _, folder := range t.folders() {
		if s, err := t.load(folder); err == nil && slices.Contains(s.tests, test) {
			hint += fmt.Sprintf("\n\t%s is in ./%s", test, folder)
		}
	}
	return fmt.Errorf("test: %w%s", err, hint)
}

// spans returns where the declaration has these tokens.
func (d decl) spans(t *tree, wanted []lexeme) (found []span) {
	source := tokens(t.files[d.file][d.from:d.to])
	equal := func(a, b lexeme) bool { return a.text == b.text }
	for i := 0; len(wanted) > 0 && i+len(wanted) <= len(source); i++ {
		if part := source[i : i+len(wanted)]; slices.EqualFunc(part, wanted, equal) {
			found = append(found, span{d.from + part[0].from, d.from + part[len(part)-1].to})
			i += len(wanted) - 1
		}
	}
	return found
}

// lexeme is a token and its place in a text.
type lexeme struct {
	text     string
	from, to int
}

// tokens splits Go code into tokens. It leaves out comments, semicolons at either end,
// and semicolons and commas before a closing bracket, because their presence depends on
// line breaks.
func tokens(src []byte) (list []lexeme) {
	fset := token.NewFileSet()
	file := fset.AddFile("", fset.Base(), len(src))
	var s scanner.Scanner
	s.Init(file, src, func(token.Position, string) {}, 0) // code that is wrong matches nothing
	for {
		pos, kind, literal := s.Scan()
		if kind == token.EOF {
			break
		}
		text := literal
		switch {
		case kind == token.SEMICOLON:
			text = ";"
			if len(list) == 0 {
				continue
			}
		case literal == "":
			text = kind.String()
		}
		if kind == token.RPAREN || kind == token.RBRACE || kind == token.RBRACK {
			list = withoutTrailing(list, ";", ",")
		}
		from := file.Offset(pos)
		list = append(list, lexeme{text: text, from: from, to: from + len(text)})
	}
	return withoutTrailing(list, ";")
}

func withoutTrailing(list []lexeme, texts ...string) []lexeme {
	if n := len(list); n > 0 && slices.Contains(texts, list[n-1].text) {
		return list[:n-1]
	}
	return list
}

// textSpans returns where a file has a text. White space in the text stands for any white
// space.
func textSpans(content []byte, text string) (found []span) {
	words := strings.Fields(text)
	for i, word := range words {
		words[i] = regexp.QuoteMeta(word)
	}
	for _, at := range regexp.MustCompile(strings.Join(words, `\s+`)).FindAllIndex(content, -1) {
		found = append(found, span{at[0], at[1]})
	}
	return found
}
