package docs

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
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
		assert.Equal(t, whole, string(raw), "%s: the part %q is stale: run make golden", page, name)
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

// Root returns the root of the repository that holds the working directory.
func Root() (string, error) {
	mod, err := exec.Command("go", "env", "GOMOD").Output()
	if err != nil {
		return "", fmt.Errorf("go env GOMOD: %w", err)
	}
	return filepath.Dir(string(mod)), nil
}

// Cell makes text fit into a cell of a Markdown table.
func Cell(text string) string {
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
