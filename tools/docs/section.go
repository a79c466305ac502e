package docs

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write the generated parts of the documentation")

// Section compares the named part of a page with content, or writes it if the test runs
// with -update. The page is relative to the root of the repository. The part lies between
// two HTML comments that the page must already have.
//
// Tests of different packages may write to one page, but not at the same time.
func Section(t *testing.T, page, name, content string) {
	t.Helper()
	root, err := Root()
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(root, page)
	raw, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	whole, err := replaceSection(string(raw), name, content)
	switch {
	case err != nil:
		t.Fatalf("%s: %v", page, err)
	case whole == string(raw):
	case *update:
		if err := os.WriteFile(file, []byte(whole), 0o644); err != nil {
			t.Fatal(err)
		}
	default:
		t.Errorf("%s: the part %q is stale: run make golden\n%s", page, name, firstDifference(string(raw), whole))
	}
}

// replaceSection returns the page with content as its named part.
func replaceSection(page, name, content string) (string, error) {
	begin := fmt.Sprintf("<!-- begin %s: make golden writes this part -->\n", name)
	end := fmt.Sprintf("<!-- end %s -->\n", name)
	before, rest, hasBegin := strings.Cut(page, begin)
	_, after, hasEnd := strings.Cut(rest, end)
	if !hasBegin || !hasEnd {
		return "", fmt.Errorf("lines missing: %s%s", begin, end)
	}
	return before + begin + content + end + after, nil
}

// firstDifference returns the first line in which two texts differ.
func firstDifference(have, want string) string {
	a, b := strings.Split(have, "\n"), strings.Split(want, "\n")
	for i := range min(len(a), len(b)) {
		if a[i] != b[i] {
			return fmt.Sprintf("line %d is:        %s\nline %d should be: %s", i+1, a[i], i+1, b[i])
		}
	}
	return fmt.Sprintf("the page has %d lines and should have %d", len(a), len(b))
}

// Root returns the root of the repository that holds the working directory.
func Root() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir, nil
		}
		parent := filepath.Dir(dir)
		if parent == dir {
			return "", errors.New("no go.mod in the working directory or above it")
		}
		dir = parent
	}
}

// cell makes text fit into a cell of a Markdown table.
func cell(text string) string {
	text = strings.Join(strings.Fields(text), " ")
	// Bare angle brackets are HTML, which Markdown does not show.
	var out strings.Builder
	code := false
	for _, r := range text {
		switch {
		case r == '`':
			code = !code
			out.WriteRune(r)
		case r == '|':
			out.WriteString(`\|`)
		case r == '<' && !code:
			out.WriteString("&lt;")
		case r == '>' && !code:
			out.WriteString("&gt;")
		default:
			out.WriteRune(r)
		}
	}
	return out.String()
}

// code formats text as code, and nothing as nothing.
func code(text string) string {
	if text == "" {
		return ""
	}
	return "`" + text + "`"
}
