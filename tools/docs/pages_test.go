package docs

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// readPages returns the text of README and of every page of the documentation by its path.
func readPages(t *testing.T, root string) map[string]string {
	t.Helper()
	pages, err := filepath.Glob(filepath.Join(root, "*.md"))
	require.NoError(t, err)
	require.NoError(t, filepath.WalkDir(filepath.Join(root, "docs"), func(file string, _ fs.DirEntry, err error) error {
		if strings.HasSuffix(file, ".md") {
			pages = append(pages, file)
		}
		return err
	}))
	all := map[string]string{}
	for _, file := range pages {
		raw, err := os.ReadFile(file)
		require.NoError(t, err)
		name, err := filepath.Rel(root, file)
		require.NoError(t, err)
		all[name] = string(raw)
	}
	require.Contains(t, all, "README.md")
	return all
}

// folders returns the top-level folders of the repository.
func folders(t *testing.T, root string) (names []string) {
	t.Helper()
	entries, err := os.ReadDir(root)
	require.NoError(t, err)
	for _, e := range entries {
		if e.IsDir() && e.Name()[0] != '.' && e.Name() != "bin" {
			names = append(names, e.Name())
		}
	}
	return names
}

// The pages name declarations as "`name` in `file.go`" or "`name` (`file.go`".
func TestDeclarationsThatPagesNameExist(t *testing.T) {
	root, err := Root()
	require.NoError(t, err)
	pair := regexp.MustCompile("((?:`\\w+`(?:, | and ))*`\\w+`) (?:in |\\()`([\\w./-]+\\.go)`")
	found := 0
	for page, text := range readPages(t, root) {
		for _, m := range pair.FindAllStringSubmatch(strings.Join(strings.Fields(text), " "), -1) {
			declared := declarations(t, filepath.Join(root, m[2]))
			for _, name := range regexp.MustCompile(`\w+`).FindAllString(strings.ReplaceAll(m[1], " and ", " "), -1) {
				assert.Contains(t, declared, name, "%s names it in %s", page, m[2])
				found++
			}
		}
	}
	require.Greater(t, found, 30)
}

// declarations returns the names of the functions, methods, types, constants and variables
// of a file.
func declarations(t *testing.T, file string) (names []string) {
	t.Helper()
	parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.SkipObjectResolution)
	require.NoError(t, err)
	for _, d := range parsed.Decls {
		switch d := d.(type) {
		case *ast.FuncDecl:
			names = append(names, d.Name.Name)
		case *ast.GenDecl:
			for _, spec := range d.Specs {
				switch spec := spec.(type) {
				case *ast.TypeSpec:
					names = append(names, spec.Name.Name)
				case *ast.ValueSpec:
					for _, name := range spec.Names {
						names = append(names, name.Name)
					}
				}
			}
		}
	}
	return names
}

func TestTestsAndTargetsThatPagesNameExist(t *testing.T) {
	root, err := Root()
	require.NoError(t, err)
	tests := map[string]bool{}
	function := regexp.MustCompile(`(?m)^func (Test\w+)\(`)
	require.NoError(t, filepath.WalkDir(root, func(file string, _ fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(file, "_test.go") {
			return err
		}
		source, err := os.ReadFile(file)
		for _, m := range function.FindAllSubmatch(source, -1) {
			tests[string(m[1])] = true
		}
		return err
	}))
	makefile, err := os.ReadFile(filepath.Join(root, "Makefile"))
	require.NoError(t, err)
	test, target := regexp.MustCompile("`(Test\\w+)`"), regexp.MustCompile("(?m)(?:`|^    )make ([a-z][\\w-]*)")
	for page, text := range readPages(t, root) {
		for _, m := range test.FindAllStringSubmatch(text, -1) {
			assert.True(t, tests[m[1]], "%s names %s", page, m[1])
		}
		for _, m := range target.FindAllStringSubmatch(text, -1) {
			assert.True(t, strings.Contains(string(makefile), "\n"+m[1]+":"), "%s names make %s", page, m[1])
		}
	}
}

// The last cell of each row of a table about E2B names a test: the page says nothing that none shows.
func TestRowsAboutE2BNameTheirTests(t *testing.T) {
	root, err := Root()
	require.NoError(t, err)
	test, rows := regexp.MustCompile("`Test\\w+`"), 0
	lines := strings.Split(readPages(t, root)["docs/e2b.md"], "\n")
	for i, line := range lines {
		if !strings.HasPrefix(line, "|") || strings.HasPrefix(line, "|---") {
			continue
		}
		cells := strings.Split(strings.Trim(line, "|"), "|")
		last := cells[len(cells)-1]
		if strings.HasPrefix(lines[i+1], "|---") {
			assert.Equal(t, " test ", last, "the head of a table, line %d", i+1)
			continue
		}
		rows++
		assert.Regexp(t, test, last, "line %d", i+1)
	}
	require.Greater(t, rows, 60)
}

func TestPathsAndLinksOfPagesExist(t *testing.T) {
	root, err := Root()
	require.NoError(t, err)
	quoted := regexp.MustCompile("`((?:" + strings.Join(folders(t, root), "|") + `)/[\w.*/-]+)` + "`")
	link := regexp.MustCompile(`\]\(([^)\s:#]*)(?:#([^)\s]*))?\)`)
	pages := readPages(t, root)
	for page, text := range pages {
		for _, m := range quoted.FindAllStringSubmatch(text, -1) {
			files, err := filepath.Glob(filepath.Join(root, m[1]))
			require.NoError(t, err)
			assert.NotEmpty(t, files, "%s names %s", page, m[1])
		}
		for _, m := range link.FindAllStringSubmatch(text, -1) {
			file := page
			if m[1] != "" {
				file = path.Join(path.Dir(page), m[1])
			}
			_, err := os.Stat(filepath.Join(root, file))
			assert.NoError(t, err, "a link of %s", page)
			if m[2] != "" {
				assert.Contains(t, anchors(pages[file]), m[2], "a link of %s to %s", page, file)
			}
		}
	}
}

// anchors returns the fragments by which the headings of a page are linked.
func anchors(page string) (all []string) {
	dropped := regexp.MustCompile(`[^\p{L}\p{N} _-]`)
	for _, m := range regexp.MustCompile(`(?m)^#+ (.*)$`).FindAllStringSubmatch(page, -1) {
		all = append(all, strings.ReplaceAll(dropped.ReplaceAllString(strings.ToLower(m[1]), ""), " ", "-"))
	}
	return all
}

func TestOverviewHasEveryFolder(t *testing.T) {
	root, err := Root()
	require.NoError(t, err)
	text := readPages(t, root)["docs/overview.md"]
	for _, name := range folders(t, root) {
		assert.True(t, strings.Contains(text, "\n| `"+name+"` |"), "no row has the folder %s", name)
	}
}

// The table of imports has each package in one row, or in a more general one, with
// patterns for all that it imports of this module. A pattern that matches no import is stale.
func TestImportTableIsThatOfTheCode(t *testing.T) {
	root, err := Root()
	require.NoError(t, err)
	_, table, ok := strings.Cut(readPages(t, root)["docs/overview.md"], "\n## Which package imports which\n")
	require.True(t, ok)
	table, _, _ = strings.Cut(table, "\n## ")
	type row struct{ packages, imports, matched []string }
	var rows []*row
	quoted := regexp.MustCompile("`([^`]*)`")
	for line := range strings.Lines(table) {
		if cells := strings.Split(line, "|"); strings.HasPrefix(line, "| `") && len(cells) == 4 {
			var r row
			for _, m := range quoted.FindAllStringSubmatch(cells[1], -1) {
				r.packages = append(r.packages, m[1])
			}
			for _, m := range quoted.FindAllStringSubmatch(cells[2], -1) {
				r.imports = append(r.imports, m[1])
			}
			rows = append(rows, &r)
		}
	}
	require.NotEmpty(t, rows)
	for pkg, imports := range importsOf(t, root) {
		var best *row
		longest := ""
		for _, r := range rows {
			if p := match(r.packages, pkg); len(p) > len(longest) {
				best, longest = r, p
			}
		}
		if !assert.NotNil(t, best, "no row has package %s", pkg) {
			continue
		}
		for _, i := range imports {
			pattern := match(best.imports, i)
			assert.NotEmpty(t, pattern, "the row of package %s has no %s", pkg, i)
			best.matched = append(best.matched, pattern)
		}
	}
	for _, r := range rows {
		for _, pattern := range r.imports {
			assert.Contains(t, r.matched, pattern, "none of %v imports it", r.packages)
		}
	}
}

// match returns the pattern that is name, or else the longest one for what is below a
// folder ("folder/*") that matches name.
func match(patterns []string, name string) (found string) {
	if slices.Contains(patterns, name) {
		return name
	}
	for _, p := range patterns {
		if folder, ok := strings.CutSuffix(p, "*"); ok && strings.HasPrefix(name, folder) && len(p) > len(found) {
			found = p
		}
	}
	return found
}

// importsOf returns what each package imports of this module, tests left out.
func importsOf(t *testing.T, root string) map[string][]string {
	t.Helper()
	list := exec.Command("go", "list", "-f", `{{if .GoFiles}}{{.ImportPath}} {{join .Imports " "}}{{end}}`, "./...")
	list.Dir = root
	out, err := list.Output()
	require.NoError(t, err)
	const module = "github.com/berth-sandbox/berth/"
	all := map[string][]string{}
	for line := range strings.Lines(string(out)) {
		fields := strings.Fields(line)
		pkg := strings.TrimPrefix(fields[0], module)
		all[pkg] = nil
		for _, i := range fields[1:] {
			if own, ok := strings.CutPrefix(i, module); ok {
				all[pkg] = append(all[pkg], own)
			}
		}
	}
	require.NotEmpty(t, all)
	return all
}
