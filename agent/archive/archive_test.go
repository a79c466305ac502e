package archive_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/berth-sandbox/berth/agent/archive"
)

// everyKind makes one of each kind of file that an archive keeps. Root also makes what only root may.
func everyKind(home string) error {
	in := func(name string) string { return filepath.Join(home, name) }
	stranger := 1234 // owns some files if the test is root
	var errs []error
	do := func(err error) { errs = append(errs, err) }
	for _, dir := range []string{
		"empty", "read-only/deep", "work/a/b/c", "sticky", ".hidden", ".wh.dir", strings.Repeat("x", 255),
	} {
		do(os.MkdirAll(in(dir), 0o755))
	}
	for name, text := range map[string]string{
		"text": "hello\n", "nothing": "", "read-only/deep/file": "1", "work/a/b/c/file": "2", ".wh.text": "no whiteout",
		".wh..wh..opq": "no whiteout either", "a\nb\t\x01\xff\xfe": "any byte", "in  side": "3", "Ünïcödé": "4",
		"-rf": "5", "a=b": "6", strings.Repeat("n", 255): "7", "setuid": "8", "secret": "9", "first": "ten",
		strings.Repeat("x", 255) + "/" + strings.Repeat("y", 200): "11", `back\slash`: "12", "old": "13", "future": "14",
		"large": strings.Repeat("0123456789abcdef", 70_000), "buffer": strings.Repeat("b", 256<<10),
		"block": strings.Repeat("c", 512),
		"zeros": strings.Repeat("\x00", 200_000),
	} {
		do(os.WriteFile(in(name), []byte(text), 0o644))
	}
	for name, target := range map[string]string{
		"link": "text", "dangling": "no/such/file", "up": "../../../..", "absolute": "/etc/passwd", "loop": "loop",
		"bytes": "\xff\n", "long": strings.Repeat("l/", 2000), "work/to-directory": "a",
	} {
		do(os.Symlink(target, in(name)))
	}
	do(os.Link(in("first"), in("second")))
	do(os.Link(in("first"), in("work/a/third")))
	do(os.Link(in("first"), filepath.Join(filepath.Dir(home), "elsewhere")))
	do(unix.Mkfifo(in("fifo"), 0o640))
	for name, value := range map[string]string{"user.text": "value", "user.bytes": "\x00\xff=\n", "user.empty": ""} {
		do(unix.Setxattr(in("text"), name, []byte(value), 0))
		do(unix.Setxattr(in("work"), name, []byte(value), 0))
	}
	// rw for the owner, r for user 1234 and the group.
	acl := "\x02\x00\x00\x00\x01\x00\x06\x00\xff\xff\xff\xff\x02\x00\x04\x00\xd2\x04\x00\x00" +
		"\x04\x00\x04\x00\xff\xff\xff\xff\x10\x00\x04\x00\xff\xff\xff\xff\x20\x00\x00\x00\xff\xff\xff\xff"
	do(unix.Setxattr(in("text"), "system.posix_acl_access", []byte(acl), 0))
	do(unix.Setxattr(in("work/a"), "system.posix_acl_default", []byte(acl), 0))
	for name, pieces := range map[string][]int64{"holes": {0, 8 << 20, 10 << 20}, "hole": nil, "hole-first": {1 << 20}} {
		f, err := os.Create(in(name))
		do(err)
		for _, at := range pieces {
			_, err = f.WriteAt([]byte("data"), at)
			do(err)
		}
		do(f.Truncate(16 << 20))
		do(f.Close())
	}
	do(os.Chmod(in("secret"), 0o600))
	do(os.Chmod(in("setuid"), 0o755|os.ModeSetuid|os.ModeSetgid))
	do(os.Chmod(in("sticky"), 0o777|os.ModeSticky))
	do(os.Chmod(in("read-only/deep"), 0o555))
	do(os.Chmod(in("read-only"), 0o500))
	if os.Getuid() == 0 {
		for _, name := range []string{"secret", "work/a/b", "fifo", "link"} {
			do(os.Lchown(in(name), stranger, stranger+1))
		}
		do(os.Chown(in("nothing"), 1<<31, 1<<31+1))
	}
	at := time.Date(2001, 2, 3, 4, 5, 6, 123456789, time.UTC)
	for name, at := range map[string]time.Time{"text": at, "work/a/b": at, "fifo": at, "old": time.Unix(-1000, 5),
		"future": time.Date(2200, 1, 1, 0, 0, 0, 1, time.UTC), "read-only": at, "link": at, "": at} {
		times := []unix.Timespec{{Nsec: unix.UTIME_OMIT}, {Sec: at.Unix(), Nsec: int64(at.Nanosecond())}}
		do(unix.UtimesNanoAt(unix.AT_FDCWD, in(name), times, unix.AT_SYMLINK_NOFOLLOW))
	}
	return errors.Join(errs...)
}

// disorder changes a directory, so that nothing is as it was.
func disorder(home string) error {
	in := func(name string) string { return filepath.Join(home, name) }
	var errs []error
	for _, name := range []string{"text", "work/a", "empty"} {
		errs = append(errs, os.RemoveAll(in(name)))
	}
	for _, dir := range []string{"text/is/a/directory", "new/read-only/deep"} {
		errs = append(errs, os.MkdirAll(in(dir), 0o755))
	}
	for _, name := range []string{"new/file", "new/read-only/deep/file", "first", ".new"} {
		errs = append(errs, os.WriteFile(in(name), []byte("new"), 0o600))
	}
	return errors.Join(append(errs, os.Symlink("/etc", in("empty")), os.Chmod(in("new/read-only"), 0o500),
		unix.Setxattr(home, "user.new", []byte("x"), 0), os.Chmod(home, 0o711))...)
}

// roundTrip archives every kind of file and restores it in the same place, after that has changed.
func roundTrip(t testing.TB, home string) {
	require.NoError(t, everyKind(home))
	elsewhere := filepath.Join(filepath.Dir(home), "elsewhere")
	before := described(t, home)
	stream, wrote := write(t, limits(home))
	require.Nil(t, wrote.LeftOut)
	require.Equal(t, before, described(t, home), "a Write changes nothing")

	// What Write has counted as links of a file has one more elsewhere, which a new pod has not.
	require.NoError(t, os.Remove(elsewhere))
	before = described(t, home)
	require.NoError(t, disorder(home))
	restored, err := restore(t, stream, limits(home))
	require.NoError(t, err)
	require.Equal(t, wrote, restored)
	require.Equal(t, before, described(t, home))
	require.Equal(t, len(before), restored.Entries)

	removeAll(t, home)
	_, err = restore(t, stream, limits(home))
	require.NoError(t, err)
	require.Equal(t, before, described(t, home))
}

// Invariant: P30
func TestFilesOfEveryKindAreRestoredAsTheyWere(t *testing.T) {
	roundTrip(t, home(t))
}

func TestFilesWithHolesTakeNoMoreRoomThanBefore(t *testing.T) {
	h := home(t)
	f, err := os.Create(filepath.Join(h, "disk"))
	require.NoError(t, err)
	require.NoError(t, f.Truncate(1<<40))
	for at := int64(0); at < 1<<40; at += 1 << 35 {
		_, err := f.WriteAt([]byte("data"), at)
		require.NoError(t, err)
	}
	require.NoError(t, f.Close())
	before := stat(t, f.Name())
	stream, wrote := write(t, limits(h))
	require.Less(t, wrote.Bytes, int64(1<<20))
	require.NoError(t, os.Remove(f.Name()))
	restored, err := restore(t, stream, limits(h))
	require.NoError(t, err)
	require.Equal(t, wrote, restored)
	after := stat(t, f.Name())
	require.Equal(t, before.Size, after.Size)
	require.Equal(t, before.Blocks, after.Blocks)
	require.Equal(t, before.Mtim, after.Mtim)
}

func TestMoreHolesThanRememberedBecomeZeros(t *testing.T) {
	h := home(t)
	f, err := os.Create(filepath.Join(h, "file"))
	require.NoError(t, err)
	for i := range int64(10_100) {
		_, err := f.WriteAt([]byte{byte(i)}, i*8192)
		require.NoError(t, err)
	}
	require.NoError(t, f.Close())
	before := described(t, h)
	stream, _ := write(t, limits(h))
	require.NoError(t, os.Remove(f.Name()))
	_, err = restore(t, stream, limits(h))
	require.NoError(t, err)
	require.Equal(t, before, described(t, h))
}

// Invariant: P30
func TestSeveralPathsAreKeptAlsoMissingOnes(t *testing.T) {
	h := home(t)
	o := limits(h, h+"-file", h+"-missing", h+"-parent/missing", h+"-file/below", h+"-new/deep/directory")
	_, err := archive.Write(t.Context(), io.Discard, o)
	require.ErrorIs(t, err, archive.ErrNotAllowed, "one is below another")
	o.Paths = append(o.Paths[:4:4], h+"-new/deep/directory", h+"-text/below")
	put(t, h+"/a", "1")
	put(t, h+"-file", "2")
	put(t, h+"-new/deep/directory/b", "3")
	put(t, h+"-text", "not a directory")
	before := described(t, o.Paths...)
	stream, wrote := write(t, o)
	require.Equal(t, 5, wrote.Entries)

	// In the new pod they are something else, or missing, or there. One more path may be restored, but is not archived.
	require.NoError(t, os.RemoveAll(h))
	require.NoError(t, os.RemoveAll(h+"-new"))
	require.NoError(t, os.Remove(h+"-file"))
	require.NoError(t, os.Remove(h+"-text"))
	put(t, h, "a file")
	put(t, h+"-file/in", "a directory")
	put(t, h+"-missing/in/it", "x")
	put(t, h+"-parent/missing", "x")
	put(t, h+"-other/in", "not archived")
	more := limits(append(o.Paths, h+"-other")...)
	restored, err := restore(t, stream, more)
	require.NoError(t, err)
	require.Equal(t, wrote, restored)
	require.Equal(t, before, described(t, o.Paths...))
	require.FileExists(t, h+"-other/in")
	require.NoFileExists(t, h+"-missing")
	require.DirExists(t, h+"-parent")
}

// Invariant: P30
func TestWhatIsNotKeptIsCounted(t *testing.T) {
	h := home(t)
	t.Chdir(h) // the name of a socket is short
	l, err := net.Listen("unix", "socket")
	require.NoError(t, err)
	defer l.Close()
	put(t, h+"/attributes", "x")
	require.NoError(t, unix.Setxattr(h+"/attributes", "user.a=b", []byte("x"), 0))
	deep := h
	for range 260 {
		deep += "/d"
		require.NoError(t, os.Mkdir(deep, 0o755))
	}
	want := map[archive.Reason]archive.LeftOut{
		archive.Socket:    {Count: 1, Example: h + "/socket"},
		archive.Attribute: {Count: 1, Example: h + "/attributes"},
		archive.TooDeep:   {Count: 1, Example: h + strings.Repeat("/d", 257)},
	}
	if os.Getuid() == 0 {
		require.NoError(t, unix.Mknod(h+"/device", unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))))
		put(t, h+"/capability", "x")
		require.NoError(t, unix.Setxattr(h+"/capability", "security.capability",
			[]byte("\x01\x00\x00\x02\x00\x04\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"), 0))
		want[archive.Device] = archive.LeftOut{Count: 1, Example: h + "/device"}
		l := want[archive.Attribute]
		l.Count++
		want[archive.Attribute] = l
	}
	stream, s := write(t, limits(h))
	l2 := s.LeftOut[archive.Attribute]
	l2.Example = h + "/attributes" // whichever the directory has first
	s.LeftOut[archive.Attribute] = l2
	require.Equal(t, want, s.LeftOut)

	require.NoError(t, os.RemoveAll(h))
	s, err = restore(t, stream, limits(h))
	require.NoError(t, err)
	require.Nil(t, s.LeftOut)
	require.NoFileExists(t, h+"/socket")
	require.NoFileExists(t, h+"/device")
}

// Invariant: P30
func TestOtherMountsAreNeitherArchivedNorRemoved(t *testing.T) {
	h := home(t)
	put(t, h+"/a/file", "1")
	put(t, h+"/b", "2")
	mounted := home(t)
	put(t, mounted+"/of-the-volume", "3")
	for _, dir := range []string{"a/volume", "a/same", "a/gone"} {
		require.NoError(t, os.Mkdir(filepath.Join(h, dir), 0o755))
	}
	put(t, h+"/a/bound", "")
	mount(t, "tmpfs", h+"/a/volume", "tmpfs", 0)
	put(t, h+"/a/volume/in", "3")
	mount(t, mounted, h+"/a/same", "", unix.MS_BIND)
	mount(t, mounted+"/of-the-volume", h+"/a/bound", "", unix.MS_BIND)
	stream, s := write(t, limits(h))
	require.Equal(t, 3, s.LeftOut[archive.Mount].Count)
	require.Len(t, s.LeftOut, 1)
	require.Equal(t, 5, s.Entries)

	put(t, h+"/c", "new")
	put(t, h+"/a/new", "new")
	restored, err := restore(t, stream, limits(h))
	require.NoError(t, err)
	require.Equal(t, 5, restored.Entries)
	require.Equal(t, 3, restored.LeftOut[archive.Mount].Count)
	for _, name := range []string{"a/volume/in", "a/same/of-the-volume", "a/bound", "a/file", "b"} {
		require.FileExists(t, filepath.Join(h, name))
	}
	require.DirExists(t, h+"/a/gone")
	require.NoFileExists(t, h+"/c")
	require.NoFileExists(t, h+"/a/new")
	require.EqualValues(t, 0o755, stat(t, h+"/a").Mode&0o7777)
}

func mount(t *testing.T, source, target, kind string, flags uintptr) {
	t.Helper()
	if err := unix.Mount(source, target, kind, flags, ""); err != nil {
		t.Skipf("only root mounts: %v", err)
	}
	t.Cleanup(func() { require.NoError(t, unix.Unmount(target, unix.MNT_DETACH)) })
}

func TestPathThatIsAMountIsRestoredInPlace(t *testing.T) {
	h := home(t)
	mount(t, "tmpfs", h, "tmpfs", 0)
	put(t, h+"/a/file", "1")
	before := described(t, h)
	stream, _ := write(t, limits(h))
	require.NoError(t, os.RemoveAll(h+"/a"))
	put(t, h+"/b", "2")
	_, err := restore(t, stream, limits(h))
	require.NoError(t, err)
	require.Equal(t, before, described(t, h))
}

func TestOptionsNameTheirFieldAndTheFix(t *testing.T) {
	for _, c := range []struct {
		change func(*archive.Options)
		text   string
	}{
		{func(o *archive.Options) { o.Paths = nil }, "archive.Options.Paths is required"},
		{func(o *archive.Options) { o.MaxBytes = 0 }, "archive.Options.MaxBytes is required"},
		{func(o *archive.Options) { o.MaxFiles = -1 }, "archive.Options.MaxFiles is required"},
		{func(o *archive.Options) { o.Paths = []string{"/a", "home"} }, "archive.Options.Paths[1]: not allowed: " +
			"\"home\" is not absolute and clean: use a path such as /home/user"},
		{func(o *archive.Options) { o.Paths = []string{"/home/../etc"} }, "not absolute and clean"},
		{func(o *archive.Options) { o.Paths = []string{"/home/"} }, "not absolute and clean"},
		{func(o *archive.Options) { o.Paths = []string{"/home\x00"} }, "not absolute and clean"},
		{func(o *archive.Options) { o.Paths = []string{"/"} }, "use a directory below /"},
		{func(o *archive.Options) { o.Paths = []string{"/proc/1"} }, "not in /dev, /proc or /sys"},
		{func(o *archive.Options) { o.Paths = []string{"/sys"} }, "not in /dev, /proc or /sys"},
		{func(o *archive.Options) { o.Paths = []string{"/dev/shm"} }, "not in /dev, /proc or /sys"},
		{func(o *archive.Options) { o.Paths = []string{"/a", "/a/b"} }, `"/a/b" is in "/a": leave it out`},
		{func(o *archive.Options) { o.Paths = []string{"/a", "/a"} }, "leave it out"},
		{func(o *archive.Options) { o.Paths = make([]string, 33) }, "name 32 at most"},
		{func(o *archive.Options) { o.Paths = []string{"/" + strings.Repeat("a", 4095)} }, "use 4095 at most"},
	} {
		o := limits("/home/user")
		c.change(&o)
		_, err := archive.Write(t.Context(), io.Discard, o)
		require.ErrorContains(t, err, c.text)
		_, err = restore(t, nil, o)
		require.ErrorContains(t, err, c.text)
	}
}

// Invariant: P30
func TestPathsThroughSymbolicLinksAreRefused(t *testing.T) {
	h := home(t)
	put(t, h+"/tree/file", "x")
	stream, _ := write(t, limits(h+"/tree"))
	require.NoError(t, os.Rename(h+"/tree", h+"/there"))
	require.NoError(t, os.Symlink("there", h+"/tree"))
	above := filepath.Dir(h) + "/above"
	require.NoError(t, os.Symlink("home", above))
	for _, p := range []string{h + "/tree", above + "/there"} {
		_, err := archive.Write(t.Context(), io.Discard, limits(p))
		require.ErrorIs(t, err, archive.ErrNotAllowed)
		require.ErrorContains(t, err, "is a symbolic link: name the directory that it leads to")
	}
	_, err := restore(t, stream, limits(h+"/tree"))
	require.ErrorIs(t, err, archive.ErrNotAllowed)
	require.FileExists(t, h+"/there/file")
}

// Invariant: P30
func TestBoundsAreTheSameInBothDirections(t *testing.T) {
	h := home(t)
	for i := range 9 {
		put(t, filepath.Join(h, strconv.Itoa(i)), strings.Repeat("x", i*1000))
	}
	stream, s := write(t, limits(h))
	require.Equal(t, 10, s.Entries)
	exact := archive.Options{Paths: []string{h}, MaxBytes: s.Size, MaxFiles: s.Entries}
	_, again := write(t, exact)
	require.Equal(t, s, again)
	restored, err := restore(t, stream, exact)
	require.NoError(t, err)
	require.Equal(t, s, restored)

	for name, c := range map[string]struct {
		o    archive.Options
		want error
		text string
	}{
		"files": {archive.Options{Paths: exact.Paths, MaxBytes: s.Size, MaxFiles: s.Entries - 1},
			archive.ErrTooManyFiles, "MaxFiles = 9"},
		"bytes": {archive.Options{Paths: exact.Paths, MaxBytes: s.Size - 1, MaxFiles: s.Entries}, archive.ErrTooLarge,
			fmt.Sprintf("MaxBytes = %d", s.Size-1)},
		"few bytes": {archive.Options{Paths: exact.Paths, MaxBytes: 1, MaxFiles: s.Entries},
			archive.ErrTooLarge, "MaxBytes = 1"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := restore(t, stream, limits(h)) // the other ones leave a part
			require.NoError(t, err)
			_, err = archive.Write(t.Context(), io.Discard, c.o)
			require.ErrorIs(t, err, c.want)
			require.ErrorContains(t, err, c.text)
			_, err = restore(t, stream, c.o)
			require.ErrorIs(t, err, c.want)
			require.ErrorContains(t, err, c.text)
		})
	}
}

func TestFileLargerThanTheBoundIsNotRead(t *testing.T) {
	h := home(t)
	f, err := os.Create(h + "/f")
	require.NoError(t, err)
	require.NoError(t, f.Close())
	require.NoError(t, os.Truncate(f.Name(), 1<<40))
	o := limits(h)
	o.MaxBytes = 1 << 20
	_, err = archive.Write(t.Context(), io.Discard, o)
	require.NoError(t, err, "a hole takes no room")
	put(t, h+"/g", strings.Repeat("x", 2<<20))
	var b bytes.Buffer
	_, err = archive.Write(t.Context(), &b, o)
	require.ErrorIs(t, err, archive.ErrTooLarge)
	require.Less(t, b.Len(), 1<<20)
}

// full is a writer or a reader that fails.
type full struct{ after int }

var errFull = errors.New("full")

func (f *full) Write(p []byte) (int, error) {
	if f.after -= len(p); f.after < 0 {
		return 0, errFull
	}
	return len(p), nil
}

func TestErrorsOfTheStreamAreReturnedAsTheyAre(t *testing.T) {
	h := home(t)
	put(t, h+"/a", "x")
	f, err := os.Create(h + "/b")
	require.NoError(t, err)
	require.NoError(t, text(f, 3<<20))
	require.NoError(t, f.Close())
	stream, _ := write(t, limits(h))
	for _, after := range []int{0, 100, len(stream) / 2, len(stream) - 1} {
		_, err := archive.Write(t.Context(), &full{after}, limits(h))
		require.ErrorIs(t, err, errFull)
	}
	for _, after := range []int{0, 100, len(stream) / 2, len(stream) - 1} {
		fails := readerFunc(func([]byte) (int, error) { return 0, errFull })
		failing := io.MultiReader(bytes.NewReader(stream[:after]), fails)
		_, err := archive.Restore(t.Context(), failing, limits(h))
		require.ErrorIs(t, err, errFull)
		require.NotErrorIs(t, err, archive.ErrCorrupt)
	}
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

func TestBothEndWithTheirContext(t *testing.T) {
	h := home(t)
	f, err := os.Create(h + "/b")
	require.NoError(t, err)
	require.NoError(t, text(f, 8<<20))
	require.NoError(t, f.Close())
	stream, _ := write(t, limits(h))

	ctx, cancel := context.WithCancel(t.Context())
	written := 0
	_, err = archive.Write(ctx, writerFunc(func(p []byte) (int, error) {
		written += len(p)
		cancel()
		return len(p), nil
	}), limits(h))
	require.ErrorIs(t, err, context.Canceled)
	require.Less(t, written, len(stream)/2)

	ctx, cancel = context.WithCancel(t.Context())
	read := 0
	_, err = archive.Restore(ctx, readerFunc(func(p []byte) (int, error) {
		n := copy(p, stream[read:])
		if read += n; read > len(stream)/3 {
			cancel()
		}
		return n, nil
	}), limits(h))
	require.ErrorIs(t, err, context.Canceled)
	require.Less(t, read, len(stream)*2/3)

	// Before anything is touched.
	require.NoError(t, os.WriteFile(h+"/new", nil, 0o644))
	_, err = archive.Restore(ctx, bytes.NewReader(stream), limits(h))
	require.ErrorIs(t, err, context.Canceled)
	require.FileExists(t, h+"/new")
}

// Invariant: P30
func TestFileThatShrinksMeanwhileIsNoticed(t *testing.T) {
	h := home(t)
	f, err := os.Create(h + "/b")
	require.NoError(t, err)
	require.NoError(t, text(f, 16<<20))
	require.NoError(t, f.Close())
	cut := writerFunc(func(p []byte) (int, error) { return len(p), os.Truncate(f.Name(), 5) })
	_, err = archive.Write(t.Context(), cut, limits(h))
	require.ErrorIs(t, err, archive.ErrChanged)
	require.ErrorContains(t, err, f.Name())
}
