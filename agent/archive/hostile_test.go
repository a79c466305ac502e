package archive_test

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/berth-sandbox/berth/agent/archive"
)

// entry is one entry of an archive that a test builds.
type entry struct {
	tar.Header
	text string
}

func dir(name string) entry {
	return entry{Header: tar.Header{Typeflag: tar.TypeDir, Name: name + "/", Mode: 0o755, Uid: os.Getuid(),
		Gid: os.Getgid()}}
}

func file(name, text string) entry {
	return entry{tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644, Size: int64(len(text)), Uid: os.Getuid(),
		Gid: os.Getgid()}, text}
}

func linked(kind byte, name, target string) entry {
	return entry{Header: tar.Header{Typeflag: kind, Name: name, Linkname: target, Mode: 0o777}}
}

func (e entry) with(record, value string) entry {
	e.Format, e.PAXRecords = tar.FormatPAX, map[string]string{record: value}
	return e
}

// built returns an archive of some paths, with a correct last entry.
func built(paths []string, entries ...entry) []byte {
	records := map[string]string{"BERTH.version": "1"}
	for i, p := range paths {
		records[fmt.Sprintf("BERTH.path.%d", i)] = p
	}
	return builtWith(records, nil, entries...)
}

// builtWith returns an archive with this first entry, and a last entry that has these records changed.
func builtWith(first, last map[string]string, entries ...entry) []byte {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	check(w.WriteHeader(&tar.Header{Typeflag: tar.TypeXGlobalHeader, PAXRecords: first}))
	total := 0
	for _, e := range entries {
		check(w.WriteHeader(&e.Header))
		total += len(e.text)
		_, err := io.WriteString(w, e.text)
		check(err)
	}
	check(w.Flush())
	sum := sha256.Sum256(b.Bytes())
	records := map[string]string{
		"BERTH.entries": strconv.Itoa(len(entries)), "BERTH.bytes": strconv.Itoa(total),
		"BERTH.sha256": hex.EncodeToString(sum[:]),
	}
	for record, value := range last {
		records[record] = value
	}
	check(w.WriteHeader(&tar.Header{Typeflag: tar.TypeXGlobalHeader, PAXRecords: records}))
	check(w.Close())
	return compressed(b.Bytes())
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}

func compressed(plain []byte) []byte {
	w, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1))
	check(err)
	return w.EncodeAll(plain, nil)
}

func decompressed(t testing.TB, stream []byte) []byte {
	t.Helper()
	r, err := zstd.NewReader(bytes.NewReader(stream), zstd.WithDecoderConcurrency(1))
	require.NoError(t, err)
	defer r.Close()
	plain, err := io.ReadAll(r)
	require.NoError(t, err)
	return plain
}

func TestFormatIsTheOneThatIsDocumented(t *testing.T) {
	h := home(t)
	top := h[1:]
	stream := built([]string{h}, dir(top), file(top+"/a", "text"), linked(tar.TypeLink, top+"/b", top+"/a"),
		dir(top+"/d"), file(top+"/d/e", "").with("SCHILY.xattr.user.x", "y"), linked(tar.TypeSymlink, top+"/l", "d"),
		file(top+"/holes", "datadata").with("BERTH.size", "100000"))
	_, err := restore(t, stream, limits(h))
	require.ErrorIs(t, err, archive.ErrCorrupt, "a file with holes says where its data is")
	holes := file(top+"/holes", "datamore").with("BERTH.size", "100000")
	holes.PAXRecords["BERTH.data"] = "5000:4,99996:4"
	s, err := restore(t, built([]string{h}, dir(top), file(top+"/a", "text"), linked(tar.TypeLink, top+"/b", top+"/a"),
		dir(top+"/d"), file(top+"/d/e", "").with("SCHILY.xattr.user.x", "y"), linked(tar.TypeSymlink, top+"/l", "d"),
		holes), limits(h))
	require.NoError(t, err)
	require.Equal(t, 7, s.Entries)
	text, err := os.ReadFile(h + "/holes")
	require.NoError(t, err)
	require.Equal(t, strings.Repeat("\x00", 5000)+"data"+strings.Repeat("\x00", 100000-5008)+"more", string(text))
	require.Equal(t, stat(t, h+"/a").Ino, stat(t, h+"/b").Ino)
	require.Contains(t, attributesOf(h+"/d/e"), `user.x="y"`)

	// What other programs see.
	r := tar.NewReader(bytes.NewReader(decompressed(t, must(write(t, limits(h))))))
	var names []string
	for {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		require.NoError(t, err)
		if h.Typeflag != tar.TypeXGlobalHeader {
			names = append(names, h.Name)
		}
	}
	require.ElementsMatch(t, []string{
		top + "/", top + "/a", top + "/b", top + "/d/", top + "/d/e", top + "/holes", top + "/l",
	}, names)
	require.Equal(t, top+"/", names[0])
}

func must(stream []byte, _ archive.Summary) []byte { return stream }

// Invariant: P30
func TestHostileArchivesChangeNothingOutside(t *testing.T) {
	h := home(t)
	outside := filepath.Join(filepath.Dir(h), "outside")
	put(t, outside+"/file", "not yours")
	before := described(t, outside)
	top, out := h[1:], outside[1:]
	device := func(kind byte) entry {
		return entry{Header: tar.Header{Typeflag: kind, Name: top + "/dev", Devmajor: 1, Devminor: 3}}
	}
	holes := func(size, data string) entry {
		e := file(top+"/holes", "datamore").with("BERTH.size", size)
		e.PAXRecords["BERTH.data"] = data
		return e
	}
	changed := func(e entry, change func(*tar.Header)) entry { change(&e.Header); return e }
	deep := []entry{dir(top)}
	for i := range 300 {
		deep = append(deep, dir(top+strings.Repeat("/d", i+1)))
	}
	for name, c := range map[string]struct {
		entries []entry
		want    error
	}{
		"parent of the path": {[]entry{dir(top), file(top+"/../outside/new", "x")}, archive.ErrNotAllowed},
		"dots at the end":    {[]entry{dir(top), dir(top + "/..")}, archive.ErrNotAllowed},
		"dot":                {[]entry{dir(top), dir(top + "/.")}, archive.ErrNotAllowed},
		"double slash":       {[]entry{dir(top), dir(top + "//a")}, archive.ErrNotAllowed},
		"empty name":         {[]entry{dir(top), file("", "x")}, archive.ErrNotAllowed},
		"slash only":         {[]entry{dir(top), dir("")}, archive.ErrNotAllowed},
		"only dots": {
			[]entry{dir(top), file("../../../../../../.."+outside+"/new", "x")},
			archive.ErrNotAllowed,
		},
		"absolute":                     {[]entry{dir(top), file(outside+"/new", "x")}, archive.ErrNotAllowed},
		"absolute path of the archive": {[]entry{dir("/" + top)}, archive.ErrNotAllowed},
		"other directory":              {[]entry{dir(out), file(out+"/new", "x")}, archive.ErrNotAllowed},
		"directory with that prefix":   {[]entry{dir(top + "-outside")}, archive.ErrNotAllowed},
		"the directory above":          {[]entry{dir(filepath.Dir(top))}, archive.ErrNotAllowed},
		"file through a symbolic link": {
			[]entry{dir(top), linked(tar.TypeSymlink, top+"/l", outside), file(top+"/l/new", "x")},
			archive.ErrCorrupt,
		},
		"directory over a symbolic link": {
			[]entry{dir(top), linked(tar.TypeSymlink, top+"/l", outside), dir(top + "/l"), file(top+"/l/new", "x")},
			archive.ErrCorrupt,
		},
		"file over a symbolic link": {
			[]entry{dir(top), linked(tar.TypeSymlink, top+"/l", outside+"/file"), file(top+"/l", "x")},
			archive.ErrCorrupt,
		},
		"path that is a symbolic link": {[]entry{linked(tar.TypeSymlink, top, outside)}, archive.ErrNotAllowed},
		"hard link to outside": {
			[]entry{dir(top), linked(tar.TypeLink, top+"/l", out+"/file")},
			archive.ErrNotAllowed,
		},
		"absolute hard link": {
			[]entry{dir(top), linked(tar.TypeLink, top+"/l", outside+"/file")},
			archive.ErrNotAllowed,
		},
		"hard link with dots": {
			[]entry{dir(top), linked(tar.TypeLink, top+"/l", top+"/../outside/file")},
			archive.ErrNotAllowed,
		},
		"hard link through a link": {
			[]entry{dir(top), linked(tar.TypeSymlink, top+"/s", outside), linked(tar.TypeLink, top+"/l", top+"/s/file")},
			archive.ErrCorrupt,
		},
		"hard link to a symbolic link": {
			[]entry{dir(top), linked(tar.TypeSymlink, top+"/s", outside+"/file"), linked(tar.TypeLink, top+"/l", top+"/s")},
			archive.ErrNotAllowed,
		},
		"hard link to a directory": {[]entry{dir(top), linked(tar.TypeLink, top+"/l", top)}, archive.ErrNotAllowed},
		"hard link to nothing": {
			[]entry{dir(top), linked(tar.TypeLink, top+"/l", top+"/nothing")},
			archive.ErrCorrupt,
		},
		"character device": {[]entry{dir(top), device(tar.TypeChar)}, archive.ErrNotAllowed},
		"block device":     {[]entry{dir(top), device(tar.TypeBlock)}, archive.ErrNotAllowed},
		"unknown type":     {[]entry{dir(top), device('Z')}, archive.ErrCorrupt},
		"file twice":       {[]entry{dir(top), file(top+"/a", "x"), file(top+"/a", "y")}, archive.ErrCorrupt},
		"path twice":       {[]entry{dir(top), file(top+"/a", "x"), dir(top)}, archive.ErrCorrupt},
		"directory twice": {
			[]entry{dir(top), dir(top + "/a"), file(top+"/b", "x"), dir(top + "/a")},
			archive.ErrCorrupt,
		},
		"file in a directory that ended": {
			[]entry{dir(top), dir(top + "/a"), file(top+"/b", "x"), file(top+"/a/c", "y")},
			archive.ErrCorrupt,
		},
		"file in no directory": {[]entry{file(top+"/a/b", "x")}, archive.ErrCorrupt},
		"file in a file":       {[]entry{dir(top), file(top+"/a", "x"), file(top+"/a/b", "x")}, archive.ErrCorrupt},
		"deep":                 {deep, archive.ErrCorrupt},
		// the library drops it
		"holes of GNU tar": {
			[]entry{dir(top), file(top+"/a", "").with("GNU.sparse.realsize", "99999999")},
			nil,
		},
		"pieces that overlap":   {[]entry{dir(top), holes("100", "0:4,3:4")}, archive.ErrCorrupt},
		"pieces beyond the end": {[]entry{dir(top), holes("100", "0:4,97:4")}, archive.ErrCorrupt},
		"pieces that overflow":  {[]entry{dir(top), holes("100", "0:4,9223372036854775807:4")}, archive.ErrCorrupt},
		"long pieces": {
			[]entry{dir(top), holes("9223372036854775807", "0:9223372036854775807")},
			archive.ErrCorrupt,
		},
		"negative pieces": {[]entry{dir(top), holes("100", "-4:8")}, archive.ErrCorrupt},
		"negative size":   {[]entry{dir(top), holes("-1", "0:8")}, archive.ErrCorrupt},
		"too little data": {[]entry{dir(top), holes("100", "0:4")}, archive.ErrCorrupt},
		"empty pieces":    {[]entry{dir(top), holes("100", "0:4,4:0,4:4")}, archive.ErrCorrupt},
		"no pieces":       {[]entry{dir(top), holes("100", "x")}, archive.ErrCorrupt},
		"many pieces": {
			[]entry{dir(top), holes("100", strings.Repeat("0:1,", 20_000)+"0:1")},
			archive.ErrCorrupt,
		},
		"attribute of the kernel": {
			[]entry{dir(top), file(top+"/a", "").with("SCHILY.xattr.security.capability", "x")},
			archive.ErrNotAllowed,
		},
		"attribute of overlayfs": {
			[]entry{dir(top).with("SCHILY.xattr.trusted.overlay.redirect", outside)},
			archive.ErrNotAllowed,
		},
		"large attribute": {
			[]entry{dir(top), file(top+"/a", "").with("SCHILY.xattr.user.x", strings.Repeat("x", 300_000))},
			archive.ErrNotAllowed,
		},
		"large access control list": {
			[]entry{dir(top), dir(top+"/a").with("SCHILY.xattr.system.posix_acl_default", strings.Repeat("x", 9000))},
			archive.ErrNotAllowed,
		},
		"user beyond the last": {
			[]entry{dir(top), changed(file(top+"/a", ""), func(h *tar.Header) { h.Uid, h.Format = 1<<32-1, tar.FormatPAX })},
			archive.ErrCorrupt,
		},
		"negative group": {
			[]entry{dir(top), changed(file(top+"/a", ""), func(h *tar.Header) { h.Gid, h.Format = -1, tar.FormatGNU })},
			archive.ErrCorrupt,
		},
		"mode of a device": {
			[]entry{dir(top), changed(file(top+"/a", ""), func(h *tar.Header) { h.Mode = 0o20644 })},
			archive.ErrCorrupt,
		},
		"long name": {[]entry{dir(top), file(top+"/"+strings.Repeat("x", 256), "")}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			stream := built([]string{h}, c.entries...)
			_, err := restore(t, stream, limits(h))
			switch {
			case name == "long name":
				require.ErrorContains(t, err, "file name too long")
			case c.want == nil:
				require.NoError(t, err)
			default:
				require.ErrorIs(t, err, c.want)
				require.Less(t, len(err.Error()), 1000)
			}
			require.Equal(t, before, described(t, outside))
			require.NoFileExists(t, h+"-outside")
		})
	}
}

// Invariant: P30
func TestFirstAndLastEntriesAreChecked(t *testing.T) {
	h := home(t)
	put(t, h+"/present", "x")
	outside := filepath.Join(filepath.Dir(h), "outside")
	put(t, outside+"/file", "not yours")
	top := h[1:]
	first := func(records ...string) map[string]string {
		m := map[string]string{}
		for i := 0; i < len(records); i += 2 {
			m[records[i]] = records[i+1]
		}
		return m
	}
	good := first("BERTH.version", "1", "BERTH.path.0", h)
	for name, c := range map[string]struct {
		stream []byte
		want   error
		text   string
	}{
		"nothing":        {nil, archive.ErrCorrupt, "it ends after 0 bytes"},
		"no compression": {bytes.Repeat([]byte("plain text "), 100), archive.ErrCorrupt, ""},
		"no tar":         {compressed(bytes.Repeat([]byte("plain text "), 100)), archive.ErrCorrupt, ""},
		"empty tar":      {compressed(make([]byte, 1024)), archive.ErrCorrupt, "without its last entry"},
		"other tar":      {builtWith(first("comment", "x"), nil), archive.ErrCorrupt, "its first entry is not"},
		"next version": {builtWith(first("BERTH.version", "2", "BERTH.path.0", h), nil), archive.ErrVersion,
			`it is "2", and this agent reads 1`},
		"no paths": {builtWith(first("BERTH.version", "1"), nil), archive.ErrCorrupt, "0 paths"},
		"other record": {builtWith(first("BERTH.version", "1", "BERTH.path.0", h, "BERTH.path.2", h), nil),
			archive.ErrCorrupt, "records"},
		"path twice":     {built([]string{h, h}), archive.ErrNotAllowed, ""},
		"another path":   {built([]string{outside}), archive.ErrNotAllowed, "which is not in archive.Options.Paths"},
		"a second path":  {built([]string{h, outside}), archive.ErrNotAllowed, "which is not in archive.Options.Paths"},
		"the path above": {built([]string{filepath.Dir(h)}), archive.ErrNotAllowed, "which is not in archive.Options.Paths"},
		"a path below":   {built([]string{h + "/present"}), archive.ErrNotAllowed, "which is not in archive.Options.Paths"},
		"the root":       {built([]string{"/"}), archive.ErrNotAllowed, "which is not in archive.Options.Paths"},
		"relative path":  {built([]string{top}), archive.ErrNotAllowed, "which is not in archive.Options.Paths"},
		"large window":   {largeWindow(), archive.ErrCorrupt, "window"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := restore(t, c.stream, limits(h))
			require.ErrorIs(t, err, c.want)
			require.ErrorContains(t, err, c.text)
			require.FileExists(t, h+"/present", "nothing is touched before the first entry is accepted")
			require.FileExists(t, outside+"/file")
		})
	}

	whole := builtWith(good, nil, dir(top))
	plain := decompressed(t, whole)
	again := entry{Header: tar.Header{Typeflag: tar.TypeXGlobalHeader, PAXRecords: good}}
	for name, stream := range map[string][]byte{
		"entries":                    builtWith(good, first("BERTH.entries", "2"), dir(top)),
		"bytes":                      builtWith(good, first("BERTH.bytes", "1"), dir(top)),
		"checksum":                   builtWith(good, first("BERTH.sha256", strings.Repeat("0", 64)), dir(top)),
		"another record":             builtWith(good, first("BERTH.more", "x"), dir(top)),
		"bytes behind the stream":    append(whole[:len(whole):len(whole)], "x"...),
		"a second stream":            append(whole[:len(whole):len(whole)], whole...),
		"bytes behind the tar":       compressed(append(decompressed(t, whole), "x"...)),
		"entries behind the last":    compressed(append(plain[:len(plain)-1024:len(plain)-1024], plain...)),
		"a first entry as the last":  builtWith(good, nil, dir(top), again),
		"checksum of the decompress": append(whole[:len(whole)-1:len(whole)-1], whole[len(whole)-1]^1),
	} {
		t.Run(name, func(t *testing.T) {
			_, err := restore(t, stream, limits(h))
			require.ErrorIs(t, err, archive.ErrCorrupt)
		})
	}
	_, err := restore(t, whole, limits(h))
	require.NoError(t, err)
}

// largeWindow returns a stream that has its decompressor keep 1 GiB.
func largeWindow() []byte {
	return append([]byte{0x28, 0xb5, 0x2f, 0xfd, 0x00, 20 << 3}, 0x01, 0, 0)
}

// Invariant: P30
func TestArchiveThatIsCutOffIsNoticed(t *testing.T) {
	h := home(t)
	manyFiles(t, h, 5)
	f, err := os.Create(h + "/large")
	require.NoError(t, err)
	require.NoError(t, text(f, 180<<10))
	require.NoError(t, f.Close())
	stream, _ := write(t, limits(h))
	plain := decompressed(t, stream)
	require.Greater(t, len(stream), 50<<10)
	for at := 0; at < len(stream); at += 1 << 10 {
		_, err := restore(t, stream[:at], limits(h))
		require.ErrorIs(t, err, archive.ErrCorrupt, "%d bytes", at)
	}
	for at := len(stream) - 1; at > len(stream)-40; at-- {
		_, err := restore(t, stream[:at], limits(h))
		require.ErrorIs(t, err, archive.ErrCorrupt, "%d bytes", at)
	}
	// Before it was compressed, so that the decompressor finds nothing.
	for at := 0; at < len(plain); at += 5 << 9 {
		_, err := restore(t, compressed(plain[:at]), limits(h))
		require.ErrorIs(t, err, archive.ErrCorrupt, "%d bytes", at)
	}
	_, err = restore(t, stream, limits(h))
	require.NoError(t, err)
}

// Invariant: P30
func TestFlippedBitsAreNoticed(t *testing.T) {
	h := home(t)
	for i := range 8 {
		put(t, fmt.Sprintf("%s/d%d/f", h, i), strings.Repeat(strconv.Itoa(i), i*200))
	}
	require.NoError(t, os.Symlink("d1/f", h+"/link"))
	require.NoError(t, os.Link(h+"/d1/f", h+"/d1/g"))
	require.NoError(t, unix.Setxattr(h+"/d1", "user.x", []byte("y"), 0))
	before := described(t, h)
	stream, s := write(t, limits(h))
	plain := decompressed(t, stream)
	missed := 0
	for i := range 60 {
		// In the stream. Some bits in the header of a frame mean nothing for its contents.
		at := i * len(stream) / 60
		damaged := bytes.Clone(stream)
		damaged[at] ^= 1 << (i % 8)
		if _, err := restore(t, damaged, limits(h)); err == nil {
			missed++
			require.Equal(t, before, described(t, h))
		}
	}
	require.Less(t, missed, 3)
	for i := range 150 {
		// In the archive before it was compressed, so that the decompressor finds nothing.
		at := i * int(s.Size) / 150
		damaged := bytes.Clone(plain)
		damaged[at] ^= 1 << (i % 8)
		_, err := restore(t, compressed(damaged), limits(h))
		require.Error(t, err, "byte %d", at)
	}
}

// repeated is an endless or long stream of the same bytes.
type repeated struct {
	text  []byte
	at    int
	left  int64
	count int64
}

func (r *repeated) Read(p []byte) (int, error) {
	if r.left == 0 {
		return 0, io.EOF
	}
	n := copy(p[:min(int64(len(p)), r.left)], r.text[r.at:])
	r.at = (r.at + n) % len(r.text)
	r.left -= int64(n)
	r.count += int64(n)
	return n, nil
}

// Invariant: P30
func TestBombsEndAtTheBounds(t *testing.T) {
	h := home(t)
	top := h[1:]
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	check(w.WriteHeader(&tar.Header{Typeflag: tar.TypeXGlobalHeader, PAXRecords: map[string]string{
		"BERTH.version": "1", "BERTH.path.0": h,
	}}))
	first := dir(top)
	check(w.WriteHeader(&first.Header))
	begin := bytes.Clone(b.Bytes())
	headers := func(hs ...tar.Header) []byte {
		var b bytes.Buffer
		w := tar.NewWriter(&b)
		for _, h := range hs {
			check(w.WriteHeader(&h))
			check(w.Flush())
		}
		return b.Bytes()
	}
	records := headers(dir(top+"/a").with("comment", strings.Repeat("x", 1<<20-100)).Header)
	records = records[:len(records)-512] // without the entry that they are for
	var names []byte
	for i := range 200_000 {
		link := linked(tar.TypeSymlink, fmt.Sprintf("%s/%d", top, i), "x")
		names = append(names, headers(link.Header)...)
		if len(names) > 20<<20 {
			break
		}
	}
	huge := headers(tar.Header{Typeflag: tar.TypeReg, Name: top + "/huge", Size: 0})
	for name, c := range map[string]struct {
		plain io.Reader
		want  error
	}{
		"zeros for a file": {
			io.MultiReader(bytes.NewReader(sized(huge, 1<<28)), &repeated{text: make([]byte, 1<<16), left: 1 << 28}),
			archive.ErrTooLarge,
		},
		"a huge file without data": {bytes.NewReader(sized(huge, 1<<28)), archive.ErrTooLarge},
		"headers only":             {bytes.NewReader(names), archive.ErrTooManyFiles},
		"records without an entry": {&repeated{text: records, left: 1 << 28}, archive.ErrTooLarge},
		"records without end":      {&repeated{text: records[:len(records)/2/512*512], left: 1 << 28}, archive.ErrCorrupt},
	} {
		t.Run(name, func(t *testing.T) {
			o := limits(h)
			o.MaxBytes, o.MaxFiles = 64<<20, 2000
			pr, pw := io.Pipe()
			ended := make(chan error, 1)
			go func() {
				z, err := zstd.NewWriter(pw, zstd.WithEncoderConcurrency(1), zstd.WithEncoderLevel(zstd.SpeedFastest))
				check(err)
				_, err = io.Copy(z, io.MultiReader(bytes.NewReader(begin), c.plain))
				if err == nil {
					err = z.Close()
				}
				ended <- err
				pw.Close()
			}()
			begun := time.Now()
			_, err := archive.Restore(t.Context(), pr, o)
			t.Logf("%v after %v", err, time.Since(begun))
			require.ErrorIs(t, err, c.want)
			pr.Close()
			<-ended
		})
	}
}

// sized returns the header of a file with another size.
func sized(header []byte, size int64) []byte {
	h := bytes.Clone(header)
	copy(h[124:136], fmt.Sprintf("%011o\x00", size))
	copy(h[148:156], "        ")
	sum := 0
	for _, b := range h[:512] {
		sum += int(b)
	}
	copy(h[148:156], fmt.Sprintf("%06o\x00 ", sum))
	return h
}

// Invariant: P30
func TestStreamWithoutContentsEndsAtABound(t *testing.T) {
	h := home(t)
	// A frame that decompressors skip.
	skipped := append([]byte{0x50, 0x2a, 0x4d, 0x18, 0, 0, 1, 0}, make([]byte, 1<<16)...)
	o := limits(h)
	o.MaxBytes = 8 << 20
	r := &repeated{text: skipped, left: 1 << 40}
	_, err := archive.Restore(t.Context(), r, o)
	require.ErrorIs(t, err, archive.ErrTooLarge)
	require.Less(t, r.count, int64(10<<20))

	// And with its context.
	ctx, cancel := context.WithCancel(t.Context())
	o.MaxBytes = 1 << 40
	r = &repeated{text: skipped, left: 1 << 40}
	_, err = archive.Restore(ctx, readerFunc(func(p []byte) (int, error) {
		if r.count > 1<<20 {
			cancel()
		}
		return r.Read(p)
	}), o)
	require.ErrorIs(t, err, context.Canceled)
	require.Less(t, r.count, int64(2<<20))
}
