package docs

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// Each field that the code of allocators and routers writes is in docs/reference/logs.md, and no other one.
func TestFieldsOfLogLinesAreInTheTable(t *testing.T) {
	root, err := Root()
	require.NoError(t, err)
	raw, err := os.ReadFile(filepath.Join(root, "docs", "reference", "logs.md"))
	require.NoError(t, err)
	documented := map[string]bool{}
	for line := range strings.Lines(string(raw)) {
		if first, _, ok := strings.Cut(strings.TrimPrefix(line, "| "), " | "); ok && strings.HasPrefix(line, "| `") {
			for _, name := range regexp.MustCompile("`([A-Za-z]+)`").FindAllStringSubmatch(first, -1) {
				require.False(t, documented[name[1]], "%s has two rows", name[1])
				documented[name[1]] = true
			}
		}
	}
	of := []string{"level", "time", "logger", "msg", "error"} // the encoder's, and zap.Error
	field := regexp.MustCompile(`zap\.[A-Z]\w*\(\s*"(\w+)"`)
	for _, dir := range []string{
		"allocator", "cmd/allocator", "cmd/extproc", "cmd/internal", "console", "egress", "extproc", "internal", "lastactive",
		"routecache",
	} {
		require.NoError(t, filepath.WalkDir(filepath.Join(root, dir), func(path string, _ os.DirEntry, err error) error {
			if err != nil || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return err
			}
			source, err := os.ReadFile(path)
			for _, name := range field.FindAllSubmatch(source, -1) {
				require.True(t, documented[string(name[1])], "%s writes the field %s", path, name[1])
				of = append(of, string(name[1]))
			}
			return err
		}))
	}
	for name := range documented {
		require.True(t, slices.Contains(of, name), "no code writes the field %s", name)
	}
}
