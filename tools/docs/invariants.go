package docs

import (
	_ "embed"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"sigs.k8s.io/yaml"
)

//go:embed invariants.yaml
var invariantsYAML []byte

// invariant is one promise of Berth.
type invariant struct {
	ID        string `json:"id"` // "I3" or "P7"
	Title     string `json:"title"`
	Statement string `json:"statement"`
	Why       string `json:"why"`
}

// reference is something that names the IDs of invariants: a test or a break.
type reference struct {
	// Group is the folder of a test's package, or the file of a break, relative to the
	// root.
	Group string
	// Name is that of the test or of the break, and Text is the promise of a break.
	Name, Text string
	IDs        []string
}

// Invariants describes the invariants in Markdown: each with the tests that fail if it is
// broken, and the breaks that prove it. It fails if an invariant has no test, and if a test
// or a break names an ID that does not exist.
func Invariants(root string) (string, error) {
	var all []invariant
	if err := yaml.UnmarshalStrict(invariantsYAML, &all); err != nil {
		return "", fmt.Errorf("invariants.yaml: %w", err)
	}
	tests, errTests := readTests(root)
	breaks, errBreaks := readBreaks(root)
	if err := errors.Join(errTests, errBreaks, checkInvariants(all, tests, breaks)); err != nil {
		return "", err
	}
	var out strings.Builder
	for _, i := range all {
		fmt.Fprintf(&out, "\n## %s: %s\n\n", i.ID, i.Title)
		fmt.Fprintf(&out, "%s\n\nWhy: %s\n\nTests:\n\n", strings.TrimSpace(i.Statement), strings.TrimSpace(i.Why))
		byPackage := map[string][]string{}
		for _, r := range tests {
			if slices.Contains(r.IDs, i.ID) {
				byPackage[r.Group] = append(byPackage[r.Group], code(r.Name))
			}
		}
		for _, pkg := range slices.Sorted(maps.Keys(byPackage)) {
			slices.Sort(byPackage[pkg])
			fmt.Fprintf(&out, "- `%s`: %s\n", pkg, strings.Join(byPackage[pkg], ", "))
		}
		heading := "\nBreaks that `make mutate` applies:\n\n"
		for _, r := range breaks {
			if slices.Contains(r.IDs, i.ID) {
				fmt.Fprintf(&out, "%s- [`%s`](../%s): %s\n", heading, r.Name, r.Group, cell(r.Text))
				heading = ""
			}
		}
	}
	return out.String(), nil
}

// checkInvariants reports everything that does not fit together.
func checkInvariants(all []invariant, tests, breaks []reference) error {
	var errs []error
	tested := map[string]bool{}
	known := map[string]bool{}
	for _, i := range all {
		if known[i.ID] {
			errs = append(errs, fmt.Errorf("invariants.yaml: %s is there twice", i.ID))
		}
		known[i.ID] = true
		if i.ID == "" || i.Title == "" || i.Statement == "" || i.Why == "" {
			errs = append(errs, fmt.Errorf("invariants.yaml: %q needs id, title, statement and why", i.ID))
		}
	}
	for _, r := range slices.Concat(tests, breaks) {
		for _, id := range r.IDs {
			if !known[id] {
				errs = append(errs, fmt.Errorf("%s: %s names the invariant %q, which tools/docs/invariants.yaml does not have",
					r.Group, r.Name, id))
			}
		}
	}
	for _, r := range tests {
		for _, id := range r.IDs {
			tested[id] = true
		}
	}
	for _, i := range all {
		if !tested[i.ID] {
			errs = append(errs, fmt.Errorf("%s has no test: put the line \"// Invariant: %s\" directly above one", i.ID, i.ID))
		}
	}
	return errors.Join(errs...)
}

var (
	invariantLine = regexp.MustCompile(`^// Invariant: (.*)$`)
	testName      = regexp.MustCompile(`^(Test|Fuzz)([^a-z]|$)`)
)

// readTests returns the tests whose comment ends in a line "// Invariant: I1, I2".
func readTests(root string) ([]reference, error) {
	var all []reference
	var errs []error
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		name := d.Name()
		switch {
		case err != nil:
			return err
		case d.IsDir() && path != root && (strings.HasPrefix(name, ".") || name == "bin" || name == "testdata"):
			return filepath.SkipDir
		case d.IsDir() || !strings.HasSuffix(name, "_test.go"):
			return nil
		}
		dir, err := filepath.Rel(root, filepath.Dir(path))
		if err != nil {
			return err
		}
		raw, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		found, err := testsOf(filepath.ToSlash(dir), path, raw)
		all = append(all, found...)
		errs = append(errs, err)
		return nil
	})
	return all, errors.Join(append(errs, err)...)
}

// testsOf returns the tests of one file that name invariants.
func testsOf(dir, file string, source []byte) ([]reference, error) {
	set := token.NewFileSet()
	parsed, err := parser.ParseFile(set, file, source, parser.ParseComments|parser.SkipObjectResolution)
	if err != nil {
		return nil, err
	}
	var all []reference
	used := map[*ast.Comment]bool{}
	for _, decl := range parsed.Decls {
		f, ok := decl.(*ast.FuncDecl)
		if !ok || f.Recv != nil || f.Doc == nil || !testName.MatchString(f.Name.Name) {
			continue
		}
		last := f.Doc.List[len(f.Doc.List)-1]
		if m := invariantLine.FindStringSubmatch(last.Text); m != nil {
			used[last] = true
			all = append(all, reference{Group: dir, Name: f.Name.Name, IDs: strings.Split(m[1], ", ")})
		}
	}
	var errs []error
	for _, group := range parsed.Comments {
		for _, c := range group.List {
			if invariantLine.MatchString(c.Text) && !used[c] {
				errs = append(errs, fmt.Errorf("%s: the line is not directly above a test", set.Position(c.Pos())))
			}
		}
	}
	return all, errors.Join(errs...)
}

// readBreaks returns the breaks of tools/mutate. The promise of each begins with the ID of
// an invariant.
func readBreaks(root string) ([]reference, error) {
	files, err := filepath.Glob(filepath.Join(root, "tools/mutate/breaks/*.yaml"))
	if err != nil {
		return nil, err
	}
	var all []reference
	for _, file := range files {
		raw, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		var breaks []struct{ Name, Promise string }
		if err := yaml.Unmarshal(raw, &breaks); err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		for _, b := range breaks {
			id, promise, ok := strings.Cut(b.Promise, ": ")
			if !ok {
				return nil, fmt.Errorf("%s: %s: the promise does not begin with the ID of an invariant", file, b.Name)
			}
			group := "tools/mutate/breaks/" + filepath.Base(file)
			all = append(all, reference{Group: group, Name: b.Name, Text: promise, IDs: []string{id}})
		}
	}
	return all, nil
}
