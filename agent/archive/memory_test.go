package archive_test

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
)

// The bound is that of the package comment. Times are reported only: they are those of the disk.
func TestBothNeedLessThan64MBOfMemory(t *testing.T) {
	if testing.Short() {
		t.Skip("it takes seconds")
	}
	exe := program(t)
	megabytes, files := 100, 5000
	if raced { // memory is not compared, and everything takes long
		megabytes, files = 10, 500
	}
	attribute := bytes.Repeat([]byte("x"), 200<<10)
	for name, fill := range map[string]func(t *testing.T, h string) io.Reader{
		"one large file": func(t *testing.T, h string) io.Reader {
			f, err := os.Create(h + "/large")
			require.NoError(t, err)
			require.NoError(t, text(f, megabytes<<20))
			require.NoError(t, f.Close())
			return nil
		},
		"small files": func(t *testing.T, h string) io.Reader {
			manyFiles(t, h, files)
			return nil
		},
		"records of 1 MB in deep directories": func(_ *testing.T, h string) io.Reader {
			top := h[1:]
			entries := []entry{dir(top)}
			for range files / 25 {
				d := dir(entries[len(entries)-1].Name + fmt.Sprintf("%0250d", 1))
				d.Linkname = string(attribute)
				entries = append(entries, d.with("comment", string(bytes.Repeat(attribute, 3))))
			}
			return bytes.NewReader(built([]string{h}, entries...))
		},
	} {
		t.Run(name, func(t *testing.T) {
			h := home(t)
			stream := fill(t, h)
			if stream == nil {
				b, wrote, err := inProcess(t, exe, "write", h, 0, nil)
				require.NoError(t, err)
				t.Logf("write: %d entries, %d MB -> %d MB, %v, memory %d MB", wrote.Summary.Entries, wrote.Summary.Bytes>>20,
					len(b)>>20, wrote.Took, wrote.Memory>>20)
				require.True(t, raced || wrote.Memory < 64<<20)
				require.NoError(t, os.RemoveAll(h))
				stream = bytes.NewReader(b)
			}
			_, restored, err := inProcess(t, exe, "restore", h, 0, stream)
			require.NoError(t, err)
			t.Logf("restore: %d entries, %v, memory %d MB", restored.Summary.Entries, restored.Took, restored.Memory>>20)
			require.True(t, raced || restored.Memory < 64<<20)
		})
	}
}
