package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
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
	Package string `json:"package"` // folder, relative to the tree
	Decl    string `json:"decl"`    // "(*Core).startFence", "newThing", "connectWindow"
	File    string `json:"file"`    // relative to the tree
	Old     string `json:"old"`
	New     string `json:"new"` // empty to delete
	All     bool   `json:"all"` // replace every occurrence
}

// read reads the breaks of all files in dir. With names it keeps the breaks of these
// names and all breaks of files of these names.
func read(dir string, names []string) ([]mutation, error) {
	files, err := filepath.Glob(filepath.Join(dir, "*.yaml"))
	if err != nil {
		return nil, err
	}
	var chosen []mutation
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
			m.file = file
			if err := m.valid(); err != nil {
				errs = append(errs, fmt.Errorf("%s, break %d %q: %w", file, i+1, m.Name, err))
			}
			if other, twice := seen[m.Name]; twice {
				errs = append(errs, fmt.Errorf("%s, break %d %q: the name is taken by a break of %s", file, i+1, m.Name, other))
			}
			seen[m.Name], known[m.Name] = file, true
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

// valid reports which fields are missing or do not go together.
func (m mutation) valid() error {
	var errs []error
	if m.Name == "" {
		errs = append(errs, errors.New("name: missing"))
	}
	if m.Promise == "" {
		errs = append(errs, errors.New("promise: missing"))
	}
	fields := strings.Fields(m.Test)
	if len(fields) < 2 || !strings.HasPrefix(fields[0], "./") {
		errs = append(errs, fmt.Errorf("test: %q is not a package (./...) and a test", m.Test))
	}
	if len(m.Edits) == 0 {
		errs = append(errs, errors.New("edits: missing"))
	}
	for i, e := range m.Edits {
		inGo := e.Package != "" && e.Decl != "" && e.File == ""
		inText := e.Package == "" && e.Decl == "" && e.File != ""
		if !inGo && !inText {
			errs = append(errs, fmt.Errorf("edit %d: needs package and decl, or file", i+1))
		}
		if strings.HasSuffix(e.File, ".go") {
			errs = append(errs, fmt.Errorf("edit %d: file: needs package and decl for a Go file", i+1))
		}
		if strings.TrimSpace(e.Old) == "" {
			errs = append(errs, fmt.Errorf("edit %d: old: missing", i+1))
		}
	}
	return errors.Join(errs...)
}

// goTest returns the package of the test, its name and its flags.
func (m mutation) goTest() (pkg, test string, flags []string) {
	fields := strings.Fields(m.Test)
	return fields[0], fields[1], fields[2:]
}

// change is what an applied break makes of files: their new content by their name,
// relative to the tree.
type change map[string][]byte

// write writes the changed files into the tree.
func (c change) write(t *tree) error {
	var errs []error
	for name, content := range c {
		errs = append(errs, os.WriteFile(filepath.Join(t.dir, name), content, 0o644))
	}
	return errors.Join(errs...)
}

// restore writes the files as the tree has read them first.
func (c change) restore(t *tree) error {
	original := change{}
	for name := range c {
		original[name] = t.files[name]
	}
	return original.write(t)
}

// overlay writes the changed files to a directory of their own and returns the file that
// the go command takes as -overlay.
func (c change) overlay() (file string, remove func(), err error) {
	dir, err := os.MkdirTemp("", "mutate-")
	if err != nil {
		return "", nil, err
	}
	remove = func() { os.RemoveAll(dir) }
	replace := map[string]string{}
	for i, name := range slices.Sorted(maps.Keys(c)) {
		if filepath.Ext(name) != ".go" {
			continue
		}
		real, err := filepath.Abs(name)
		changed := filepath.Join(dir, fmt.Sprintf("%d.go", i))
		if err == nil {
			err = os.WriteFile(changed, c[name], 0o600)
		}
		if err != nil {
			remove()
			return "", nil, err
		}
		replace[real] = changed
	}
	raw, err := json.Marshal(map[string]any{"Replace": replace})
	file = filepath.Join(dir, "overlay.json")
	if err == nil {
		err = os.WriteFile(file, raw, 0o600)
	}
	if err != nil {
		remove()
		return "", nil, err
	}
	return file, remove, nil
}
