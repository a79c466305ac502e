package main

import (
	"bytes"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// change is what an applied break makes of files: their new content by their name,
// relative to the root.
type change map[string][]byte

// apply returns what the break makes of the files. It does not write anything. Its error
// lists every edit that does not apply. An edit applies to what those before it made.
func (m mutation) apply() (change, error) {
	changed := change{}
	var errs []error
	for i, e := range m.Edits {
		if err := e.apply(changed); err != nil {
			errs = append(errs, fmt.Errorf("edit %d: %w", i+1, err))
		}
	}
	return changed, errors.Join(errs...)
}

func (e edit) apply(changed change) error {
	files, where := []string{e.File}, e.File
	if e.File == "" {
		where = fmt.Sprintf("%s of %s", e.Decl, e.Package)
		files, _ = filepath.Glob(filepath.Join(e.Package, "*.go")) // the pattern is valid
		files = slices.DeleteFunc(files, func(f string) bool { return strings.HasSuffix(f, "_test.go") })
	}
	text, declared, found := pattern(e.Old), false, 0
	for _, file := range files {
		content, ok := changed[file]
		if !ok {
			var err error
			if content, err = os.ReadFile(file); err != nil {
				return fmt.Errorf("file: %w", err)
			}
		}
		places := []span{{0, len(content)}}
		if e.File == "" {
			var err error
			if places, err = declarations(content, e.Decl); err != nil {
				return fmt.Errorf("%s: %w", file, err)
			}
		}
		for _, at := range slices.Backward(places) { // the places before a replacement stay valid
			declared = true
			part := content[at.from:at.to]
			if n := len(text.FindAllIndex(part, -1)); n > 0 {
				found += n
				content = slices.Replace(slices.Clone(content), at.from, at.to,
					text.ReplaceAllLiteral(part, []byte(strings.TrimSpace(e.New)))...)
				changed[file] = content
			}
		}
	}
	switch {
	case !declared:
		return fmt.Errorf("decl: no %s in %s", e.Decl, e.Package)
	case found == 0:
		return fmt.Errorf("old: not found in %s: %q", where, e.Old)
	case found > 1 && !e.All:
		return fmt.Errorf("old: found %d times in %s: %q; add context, or say all: true", found, where, e.Old)
	}
	return nil
}

var (
	// lexeme is a word, or one other character.
	lexeme = regexp.MustCompile(`\w+|[^\w\s]`)
	word   = regexp.MustCompile(`^\w`)
)

// pattern matches a text with any white space between its words and other characters. It
// matches no part of a word.
func pattern(text string) *regexp.Regexp {
	var b strings.Builder
	afterWord := false
	for _, l := range lexeme.FindAllString(text, -1) {
		isWord := word.MatchString(l)
		switch {
		case b.Len() == 0 && isWord:
			b.WriteString(`\b`)
		case afterWord && isWord:
			b.WriteString(`\s+`)
		case b.Len() > 0:
			b.WriteString(`\s*`)
		}
		b.WriteString(regexp.QuoteMeta(l))
		afterWord = isWord
	}
	if afterWord {
		b.WriteString(`\b`)
	}
	return regexp.MustCompile(b.String())
}

// span is a part of a file.
type span struct{ from, to int }

// declarations returns the declarations of a name in a Go file. The name of a method is
// "(*T).name" or "T.name", whatever its receiver.
func declarations(content []byte, name string) (found []span, err error) {
	name = strings.NewReplacer("(", "", "*", "", ")", "").Replace(name)
	set := token.NewFileSet()
	parsed, err := parser.ParseFile(set, "", content, parser.SkipObjectResolution)
	if err != nil {
		return nil, err
	}
	for _, d := range parsed.Decls {
		var all []ast.Node
		switch d := d.(type) {
		case *ast.FuncDecl:
			if funcName(d) == name {
				all = append(all, d)
			}
		case *ast.GenDecl:
			for _, spec := range d.Specs {
				is := func(i *ast.Ident) bool { return i.Name == name }
				if t, ok := spec.(*ast.TypeSpec); ok && is(t.Name) {
					all = append(all, spec)
				}
				if v, ok := spec.(*ast.ValueSpec); ok && slices.ContainsFunc(v.Names, is) {
					all = append(all, spec)
				}
			}
		}
		for _, node := range all {
			found = append(found, span{set.Position(node.Pos()).Offset, set.Position(node.End()).Offset})
		}
	}
	return found, nil
}

// funcName returns "name" for a function and "T.name" for a method.
func funcName(f *ast.FuncDecl) string {
	if f.Recv == nil {
		return f.Name.Name
	}
	receiver, _, _ := strings.Cut(types.ExprString(f.Recv.List[0].Type), "[") // type parameters
	return strings.TrimPrefix(receiver, "*") + "." + f.Name.Name
}

// findTest returns an error if the break's test does not exist. Only a run can find a
// subtest, so the part after a slash is not looked for.
func (m mutation) findTest() error {
	pkg, test, _ := m.goTest()
	test, _, _ = strings.Cut(test, "/")
	files, err := filepath.Glob(filepath.Join(pkg, "*_test.go"))
	if err != nil {
		return err
	}
	for _, file := range files {
		source, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		if bytes.Contains(source, []byte("\nfunc "+test+"(")) {
			return nil
		}
	}
	return fmt.Errorf("test: no test %s in %s", test, pkg)
}
