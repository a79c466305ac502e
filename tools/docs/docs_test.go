package docs

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/api/crd"
)

func TestCRDReferenceIsTheGoldenFile(t *testing.T) {
	for _, definition := range crd.All() {
		text, err := CRD(definition)
		require.NoError(t, err)
		for _, plural := range []string{"sandboxpools", "sandboxes"} {
			if strings.Contains(text, "for kubectl `"+plural+"`") {
				Section(t, "docs/reference/crds.md", plural, text)
			}
		}
	}
}

// The pages are made of what single packages register. A metric of another package would
// be missing.
func TestMetricReferenceNamesEveryMetric(t *testing.T) {
	root, err := Root()
	require.NoError(t, err)
	page, err := os.ReadFile(filepath.Join(root, "docs/reference/metrics.md"))
	require.NoError(t, err)
	name := regexp.MustCompile(`"(berth_[a-z_]+)"`)
	for _, dir := range []string{"allocator", "cmd/allocator", "cmd/extproc", "extproc", "lastactive", "routecache"} {
		require.NoError(t, filepath.WalkDir(filepath.Join(root, dir), func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return err
			}
			source, err := os.ReadFile(path)
			for _, m := range name.FindAllSubmatch(source, -1) {
				require.Contains(t, string(page), "`"+string(m[1])+"`", path)
			}
			return err
		}))
	}
}

func TestSectionIsReplacedBetweenItsLines(t *testing.T) {
	page := "a\n<!-- begin x: make golden writes this part -->\nold\n<!-- end x -->\nb\n"
	got, err := replaceSection(page, "x", "new\n")
	require.NoError(t, err)
	require.Equal(t, strings.Replace(page, "\nold", "\nnew", 1), got)
	_, err = replaceSection(page, "y", "new\n")
	require.ErrorContains(t, err, "begin y")
}

func TestCellEscapesWhatMarkdownWouldHide(t *testing.T) {
	require.Equal(t, "a &lt;b&gt; \\| `<c>`", Cell("a <b>\n | `<c>`"))
}
