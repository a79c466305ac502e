package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"sigs.k8s.io/yaml"
)

// mutation is one break of one promise.
type mutation struct {
	Name    string `json:"name"`
	Promise string `json:"promise"` // one sentence; "I3: ..." where it is an invariant
	Test    string `json:"test"`    // package, test, flags of the test
	Edits   []edit `json:"edits"`

	file string // that lists it
}

// edit replaces text in a declaration of a package, or in a file that is not Go.
type edit struct {
	Package string `json:"package"` // folder, relative to the root of the repository
	Decl    string `json:"decl"`    // "(*Core).startFence", "newThing", "connectWindow"
	File    string `json:"file"`    // relative to the root
	Old     string `json:"old"`
	New     string `json:"new"` // empty to delete
	All     bool   `json:"all"` // replace every occurrence
}

// read reads the breaks of all files in dir. With names it keeps the breaks of these
// names and all breaks of files of these names.
func read(dir string, names []string) (chosen []mutation, err error) {
	files, err := filepath.Glob(filepath.Join(dir, "*.yaml"))
	if err != nil {
		return nil, err
	}
	var errs []error
	seen := map[string]string{} // the file of each name
	known := map[string]bool{}  // names that can be chosen
	for _, file := range files {
		raw, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		var listed []mutation
		if err := yaml.UnmarshalStrict(raw, &listed); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", file, err))
			continue
		}
		group := strings.TrimSuffix(filepath.Base(file), ".yaml")
		known[group] = true
		for i, m := range listed {
			err := m.valid()
			if other, twice := seen[m.Name]; twice {
				err = errors.Join(err, fmt.Errorf("the name is taken by a break of %s", other))
			}
			if err != nil {
				errs = append(errs, fmt.Errorf("%s, break %d %q: %w", file, i+1, m.Name, err))
			}
			m.file, seen[m.Name], known[m.Name] = file, file, true
			if len(names) == 0 || slices.Contains(names, m.Name) || slices.Contains(names, group) {
				chosen = append(chosen, m)
			}
		}
	}
	for _, name := range names {
		if !known[name] {
			errs = append(errs, fmt.Errorf("no break and no file in %s is called %q", dir, name))
		}
	}
	if len(seen) == 0 && len(errs) == 0 {
		errs = append(errs, fmt.Errorf("no breaks in %s", dir))
	}
	return chosen, errors.Join(errs...)
}

var testForm = regexp.MustCompile(`^\./\S+\s+(Test|Fuzz)`)

// valid reports which fields are missing or do not go together.
func (m mutation) valid() error {
	var errs []error
	require := func(ok bool, format string, args ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	require(m.Name != "", "name: missing")
	require(m.Promise != "", "promise: missing")
	require(testForm.MatchString(m.Test), "test: %q is not a package (./...) and a test", m.Test)
	require(len(m.Edits) > 0, "edits: missing")
	for i, e := range m.Edits {
		inGo := e.Package != "" && e.Decl != "" && e.File == ""
		inText := e.Package == "" && e.Decl == "" && e.File != "" && filepath.Ext(e.File) != ".go"
		require(inGo || inText, "edit %d: needs package and decl, or a file that is not Go", i+1)
		require(strings.TrimSpace(e.Old) != "", "edit %d: old: missing", i+1)
	}
	return errors.Join(errs...)
}

// goTest returns the package of the test, its name and its flags.
func (m mutation) goTest() (pkg, test string, flags []string) {
	fields := strings.Fields(m.Test)
	return fields[0], fields[1], fields[2:]
}
