package docs

import (
	_ "embed"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path"
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
				fmt.Fprintf(&out, "%s- [`%s`](../%s): %s\n", heading, r.Name, r.Group, Cell(r.Text))
				heading = ""
			}
		}
	}
	return out.String(), nil
}

// checkInvariants reports everything that does not fit together.
func checkInvariants(all []invariant, tests, breaks []reference) error {
	var errs []error
	known := map[string]bool{}
	for _, i := range all {
		if known[i.ID] || i.ID == "" || i.Title == "" || i.Statement == "" || i.Why == "" {
			errs = append(errs, fmt.Errorf("invariants.yaml: %q needs an id of its own, title, statement and why", i.ID))
		}
		known[i.ID] = true
		if !slices.ContainsFunc(tests, func(r reference) bool { return slices.Contains(r.IDs, i.ID) }) {
			errs = append(errs, fmt.Errorf("%s has no test: put the line \"// Invariant: %s\" directly above one", i.ID, i.ID))
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
	return errors.Join(errs...)
}

var (
	invariantLine = regexp.MustCompile(`(?m)^// Invariant: .*$`)
	invariantTest = regexp.MustCompile(`(?m)^// Invariant: (.*)\nfunc ((?:Test|Fuzz)\w*)\(`)
)

// readTests returns the tests whose comment ends in a line "// Invariant: I1, I2".
func readTests(root string) (all []reference, err error) {
	err = fs.WalkDir(os.DirFS(root), ".", func(path string, d fs.DirEntry, err error) error {
		name := d.Name()
		switch {
		case err != nil:
			return err
		case d.IsDir() && path != "." && (name[0] == '.' || name == "bin" || name == "testdata"):
			return fs.SkipDir
		case d.IsDir() || !strings.HasSuffix(name, "_test.go"):
			return nil
		}
		source, err := os.ReadFile(filepath.Join(root, path))
		if err != nil {
			return err
		}
		found, err := testsOf(path, source)
		all = append(all, found...)
		return err
	})
	return all, err
}

// testsOf returns the tests of one file that name invariants.
func testsOf(file string, source []byte) (all []reference, err error) {
	tests := invariantTest.FindAllSubmatch(source, -1)
	if lines := invariantLine.FindAll(source, -1); len(lines) != len(tests) {
		return nil, fmt.Errorf("%s: a line \"// Invariant: ...\" is not directly above a test", file)
	}
	for _, m := range tests {
		ids := strings.Split(string(m[1]), ", ")
		all = append(all, reference{Group: path.Dir(file), Name: string(m[2]), IDs: ids})
	}
	return all, nil
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
