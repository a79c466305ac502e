package archive_test

import (
	"archive/tar"
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/agent/archive"
)

// script makes entries of an archive from bytes. Each entry has a kind, a few numbers, and up to four texts.
type script struct{ rest []byte }

func (s *script) number() (n int) {
	if len(s.rest) > 0 {
		n, s.rest = int(s.rest[0]), s.rest[1:]
	}
	return n
}

func (s *script) text() string {
	n := min(s.number(), len(s.rest))
	text := string(s.rest[:n])
	s.rest = s.rest[n:]
	return text
}

// step encodes an entry for a script.
func step(kind, flags byte, texts ...string) []byte {
	b := []byte{kind, flags}
	for _, text := range texts {
		b = append(append(b, byte(len(text))), text...)
	}
	return b
}

// FuzzRestore builds archives of entries that make sense or not, and streams of any bytes. Nothing outside of the path
// changes, and there is no device in it.
func FuzzRestore(f *testing.F) {
	steps := func(steps ...[]byte) []byte { return append([]byte{0}, bytes.Join(steps, nil)...) }
	const inTop, size = 1, 2 // flags
	top := step('5', inTop, "", "", "", "")
	f.Add(steps(top, step('0', inTop, "/a", "text", "", "")))
	f.Add(steps(top, step('5', inTop, "/d/", "", "SCHILY.xattr.user.x", "y"), step('0', inTop, "/d/a", "text", "", ""),
		step('1', inTop, "/l", "/d/a", "", ""), step('2', inTop, "/s", "../../outside", "", ""),
		step('0', inTop, "/s/file", "x", "", "")))
	f.Add(steps(top, step('2', inTop, "/s", "../outside", "", ""), step('5', inTop, "/s/", "", "", ""),
		step('0', inTop, "/s/file", "x", "", "")))
	f.Add(steps(top, step('1', inTop, "/l", "/../outside/file", "", ""), step('0', inTop, "/l", "x", "", "")))
	f.Add(steps(top, step('0', inTop|size, "/h", "data", "BERTH.data", "5:4"), step('6', inTop, "/p", "", "", "")))
	f.Add(steps(top, step('3', inTop, "/dev", "", "", ""), step('0', 0, "../outside/file", "x", "", "")))
	f.Add(steps(step('5', inTop, "/", "", "", ""), step('0', inTop, "/../outside/new", "x", "", "")))
	f.Add(append([]byte{1}, built([]string{"/home/user"}, dir("home/user"), file("home/user/a", "x"))...))
	f.Add(append([]byte{2}, bytes.Repeat([]byte("x"), 600)...))

	h := home(f)
	outside := filepath.Join(filepath.Dir(h), "outside")
	put(f, outside+"/file", "not yours")
	before := described(f, outside)
	o := archive.Options{Paths: []string{h}, MaxBytes: 1 << 20, MaxFiles: 50}
	f.Fuzz(func(t *testing.T, input []byte) {
		s := script{input}
		var stream []byte
		switch s.number() % 3 {
		case 0:
			stream = s.archive(h)
		case 1:
			stream = s.rest
		case 2:
			plain := decompressed(t, built([]string{h}, dir(h[1:])))
			stream = compressed(append(plain[:len(plain)-5*512], s.rest...)) // in place of the last entry
		}
		summary, err := archive.Restore(t.Context(), bytes.NewReader(stream), o)
		require.LessOrEqual(t, summary.Entries, o.MaxFiles+1)
		if err == nil {
			require.LessOrEqual(t, summary.Size, o.MaxBytes)
		}
		require.Equal(t, before, described(t, outside))
		above, err := os.ReadDir(filepath.Dir(h))
		require.NoError(t, err)
		for _, e := range above {
			require.Contains(t, []string{"home", "outside"}, e.Name())
		}
		require.NoError(t, filepath.WalkDir(h, func(name string, e os.DirEntry, err error) error {
			if err == nil {
				require.Zero(t, e.Type()&(os.ModeDevice|os.ModeSocket), name)
			}
			return nil
		}))
	})
}

func (s *script) archive(home string) []byte {
	top := home[1:]
	var entries []entry
	for len(s.rest) > 0 && len(entries) < 60 {
		kind, flags := s.number(), s.number()
		e := entry{tar.Header{Typeflag: byte(kind), Mode: int64(flags >> 2), Name: s.text(), Format: tar.FormatPAX}, ""}
		value := s.text()
		if flags&1 != 0 {
			e.Name = top + e.Name
		}
		switch e.Typeflag {
		case tar.TypeReg:
			e.text, e.Size = value, int64(len(value))
		case tar.TypeLink:
			e.Linkname = top + value
		default:
			e.Linkname = value
		}
		e.PAXRecords = map[string]string{}
		if flags&2 != 0 {
			e.PAXRecords["BERTH.size"] = "1000"
		}
		if record := s.text(); record != "" {
			e.PAXRecords[record] = s.text()
		} else {
			s.text()
		}
		if tar.NewWriter(new(bytes.Buffer)).WriteHeader(&e.Header) == nil {
			entries = append(entries, e)
		}
	}
	return built([]string{home}, entries...)
}

func TestScriptsOfTheFuzzTestCanSucceed(t *testing.T) {
	h := home(t)
	s := script{bytes.Join([][]byte{
		step('5', 1|0o7<<2, "", "", "", ""), step('0', 1, "/a", "text", "SCHILY.xattr.user.x", "y"),
		step('1', 1, "/b", "/a", "", ""),
	}, nil)}
	summary, err := restore(t, s.archive(h), limits(h))
	require.NoError(t, err)
	require.Equal(t, 3, summary.Entries)
	require.FileExists(t, h+"/b")
}
