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

// span is a part of a file.
type span struct {
	file     string
	from, to int
}

// apply returns what the break makes of the files. It does not write anything. Its error
// lists every edit that does not apply.
func (m mutation) apply() (change, error) {
	type replacement struct {
		span
		text string
	}
	var all []replacement
	var errs []error
	for i, e := range m.Edits {
		found, err := e.find()
		if err != nil {
			errs = append(errs, fmt.Errorf("edit %d: %w", i+1, err))
		}
		for _, s := range found {
			all = append(all, replacement{s, strings.TrimSpace(e.New)})
		}
	}
	if len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	// From the end of each file, so that the places before a replacement stay valid.
	slices.SortFunc(all, func(a, b replacement) int { return b.from - a.from })
	changed, begun := change{}, map[string]int{}
	for _, r := range all {
		content, ok := changed[r.file]
		if !ok {
			var err error
			if content, err = os.ReadFile(r.file); err != nil {
				return nil, err
			}
		} else if r.to > begun[r.file] {
			return nil, fmt.Errorf("two edits of %s overlap", r.file)
		}
		changed[r.file] = slices.Replace(content, r.from, r.to, []byte(r.text)...)
		begun[r.file] = r.from
	}
	return changed, nil
}

// find returns the parts of files that the edit replaces.
func (e edit) find() (found []span, err error) {
	places, where := []span{{file: e.File, to: -1}}, e.File
	if e.File == "" {
		where = fmt.Sprintf("%s of %s", e.Decl, e.Package)
		if places, err = declared(e.Package, e.Decl); err != nil {
			return nil, err
		}
	}
	text := pattern(e.Old)
	for _, in := range places {
		content, err := os.ReadFile(in.file)
		if err != nil {
			return nil, fmt.Errorf("file: %w", err)
		}
		if in.to >= 0 {
			content = content[:in.to]
		}
		for _, at := range text.FindAllIndex(content[in.from:], -1) {
			found = append(found, span{in.file, in.from + at[0], in.from + at[1]})
		}
	}
	switch {
	case len(found) == 0:
		return nil, fmt.Errorf("old: not found in %s: %q", where, e.Old)
	case len(found) > 1 && !e.All:
		return nil, fmt.Errorf("old: found %d times in %s: %q; add context, or say all: true", len(found), where, e.Old)
	}
	return found, nil
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

// declared returns the declarations of a name in the package in a folder, tests excluded.
// The name of a method is "(*T).name" or "T.name", whatever its receiver.
func declared(folder, name string) (found []span, err error) {
	name = strings.NewReplacer("(", "", "*", "", ")", "").Replace(name)
	files, err := filepath.Glob(filepath.Join(folder, "*.go"))
	if err != nil {
		return nil, err
	}
	for _, file := range files {
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		set := token.NewFileSet()
		parsed, err := parser.ParseFile(set, file, nil, parser.SkipObjectResolution)
		if err != nil {
			return nil, err
		}
		add := func(declares string, node ast.Node) {
			if declares == name {
				found = append(found, span{file, set.Position(node.Pos()).Offset, set.Position(node.End()).Offset})
			}
		}
		for _, d := range parsed.Decls {
			switch d := d.(type) {
			case *ast.FuncDecl:
				add(funcName(d), d)
			case *ast.GenDecl:
				for _, spec := range d.Specs {
					switch spec := spec.(type) {
					case *ast.TypeSpec:
						add(spec.Name.Name, spec)
					case *ast.ValueSpec:
						for _, declares := range spec.Names {
							add(declares.Name, spec)
						}
					}
				}
			}
		}
	}
	if len(found) == 0 {
		return nil, fmt.Errorf("decl: no %s in %s", name, folder)
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
