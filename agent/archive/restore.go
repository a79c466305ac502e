package archive

import (
	"archive/tar"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"

	"github.com/klauspost/compress/zstd"
	"golang.org/x/sys/unix"
)

// restorer is one Restore.
type restorer struct {
	Summary
	o      Options
	in     *summed
	source *source
	tar    *tar.Reader
	copy   []byte
	tops   []*top
	// stack are the directories that lead to the next entry. All of them are open.
	stack []*level
}

// top is one of the archived paths.
type top struct {
	// name is the path without its first slash.
	name string
	// parent is what it is in. It may be missing until there is an entry for the path.
	parent *level
	mount  mountID
	// keeps: there was something in it that could not be removed.
	keeps bool
	seen  bool
}

// level is a directory. It gets its attributes, owner, mode and time when everything in it is made.
type level struct {
	name string
	// fd is -1 if the directory could not be made, because another user owns the one above.
	fd  int
	top *top
	// meta is nil for the parent of a path, which stays as it is.
	meta *meta
	// foreign: it was there before and belongs to another user, so it stays as it is.
	foreign bool
}

// Restore replaces what is in the archived paths by what the archive has. Those paths must be among o.Paths.
func Restore(ctx context.Context, r io.Reader, o Options) (Summary, error) {
	if err := o.check(); err != nil {
		return Summary{}, err
	}
	s := &restorer{
		o: o, in: newSummed(ctx, withTail(o.MaxBytes)),
		source: &source{ctx: ctx, r: r, n: maxCompressed(o.MaxBytes)}, copy: make([]byte, copySize),
	}
	plain, err := zstd.NewReader(s.source, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true),
		zstd.WithDecoderMaxWindow(maxWindow))
	if err != nil {
		return Summary{}, s.damaged(err)
	}
	defer plain.Close()
	s.in.r = plain
	s.tar = tar.NewReader(s.in)

	if err = s.all(); err != nil {
		s.Size = s.in.n
	}
	for _, l := range s.stack {
		_ = unix.Close(l.fd) // -1 is no file
	}
	for _, t := range s.tops {
		_ = unix.Close(t.parent.fd)
	}
	switch {
	case errors.Is(err, ErrTooLarge):
		err = fmt.Errorf("%w: the archive has more than MaxBytes = %d bytes: raise it", ErrTooLarge, o.MaxBytes)
	case errors.Is(err, ErrTooManyFiles):
		err = fmt.Errorf("%w: the archive has more than MaxFiles = %d: raise it", ErrTooManyFiles, o.MaxFiles)
	}
	return s.Summary, err
}

// damaged returns what an error of the tar reader or the decompressor means: damage, if neither the stream nor a bound
// is the cause.
func (s *restorer) damaged(err error) error {
	switch {
	case s.source.err != nil:
		return s.source.err
	case s.in.refused != nil:
		return s.in.refused
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return fmt.Errorf("%w: it ends after %d bytes, without its last entry", ErrCorrupt, s.in.n)
	}
	return fmt.Errorf("%w: %w", ErrCorrupt, err)
}

func (s *restorer) all() error {
	h, _, err := s.next()
	if err != nil {
		return err
	}
	paths, err := headPaths(h)
	if err == nil {
		err = s.begin(paths)
	}
	if err != nil {
		return err
	}
	for {
		h, start, err := s.next()
		if err != nil {
			return err
		}
		if h.Typeflag == tar.TypeXGlobalHeader {
			return s.end(h, start)
		}
		if err := s.entry(h); err != nil {
			return err
		}
	}
}

// next returns the next entry, and where it begins.
func (s *restorer) next() (*tar.Header, int64, error) {
	start := s.in.mark
	h, err := s.tar.Next()
	if err != nil {
		return nil, 0, s.damaged(err)
	}
	var size int64
	if h.Typeflag == tar.TypeReg {
		size = h.Size
	}
	if size > s.o.MaxBytes-s.in.n && size > 0 {
		return nil, 0, ErrTooLarge
	}
	s.in.markAfter(size)
	return h, start, nil
}

// begin empties the paths of an archive, when it has found that it may have all of them.
func (s *restorer) begin(paths []string) error {
	for i, p := range paths {
		if !slices.Contains(s.o.Paths, p) || slices.Contains(paths[:i], p) {
			return fmt.Errorf("%w: the archive has %.300q, which is not in archive.Options.Paths", ErrNotAllowed, p)
		}
	}
	s.Paths = paths
	for _, p := range paths {
		t := &top{name: p[1:]}
		parent, err := openParent(p, false)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		t.parent = &level{fd: parent, top: t}
		s.tops = append(s.tops, t)
		if parent < 0 {
			continue
		}
		x, err := statAt(parent, path.Base(p))
		if err == nil && x.Mode&unix.S_IFMT == unix.S_IFLNK {
			return symbolicLink(p)
		}
		t.mount = mountOf(x)
	}
	for _, t := range s.tops {
		if t.parent.fd < 0 {
			continue
		}
		if err := s.remove(t.parent.fd, path.Base(t.name), t.name, t, 0); err != nil {
			return err
		}
	}
	return nil
}

// end handles the last entry, which begins at start.
func (s *restorer) end(h *tar.Header, start int64) error {
	if s.Size = start; start > s.o.MaxBytes {
		return ErrTooLarge
	}
	if err := checkTail(h, s.Summary, s.in.sum); err != nil {
		return err
	}
	if _, err := s.tar.Next(); !errors.Is(err, io.EOF) {
		return s.damaged(cmp.Or(err, errors.New("something follows its last entry")))
	}
	// This also has the decompressor check the end of the stream.
	if n, err := s.in.Read(s.copy[:1]); n > 0 || !errors.Is(err, io.EOF) {
		return s.damaged(cmp.Or(err, errors.New("something follows its end")))
	}
	for len(s.stack) > 0 {
		if err := s.leaveDirectory(); err != nil {
			return err
		}
	}
	for _, t := range s.tops {
		if !t.seen && t.parent.fd >= 0 {
			s.removeEmptied(t)
		}
	}
	return nil
}

// removeEmptied removes the directory that a path is, which is empty but for what could not be removed.
func (s *restorer) removeEmptied(t *top) {
	err := unix.Unlinkat(t.parent.fd, path.Base(t.name), unix.AT_REMOVEDIR)
	if err != nil && !errors.Is(err, unix.ENOENT) {
		s.leave(Foreign, t.name)
	}
}

// entry restores one entry.
func (s *restorer) entry(h *tar.Header) error {
	m, err := metaOf(h)
	if err != nil {
		return err
	}
	name := m.name
	l, err := s.levelOf(name)
	if err != nil {
		return err
	}
	if s.Entries++; s.Entries > s.o.MaxFiles {
		return ErrTooManyFiles
	}
	base := path.Base(name)
	if l == l.top.parent && h.Typeflag != tar.TypeDir {
		if h.Typeflag == tar.TypeSymlink {
			return symbolicLink(shown(name))
		}
		_ = unix.Unlinkat(l.fd, base, unix.AT_REMOVEDIR) // the path was a directory before
	}
	if l.fd < 0 && h.Typeflag != tar.TypeDir && h.Typeflag != tar.TypeReg {
		s.leave(Foreign, name)
		return nil
	}
	switch h.Typeflag {
	case tar.TypeDir:
		return s.directory(l, base, m)
	case tar.TypeReg:
		return s.regular(l, base, h, m)
	case tar.TypeSymlink:
		if err = unix.Symlinkat(h.Linkname, l.fd, base); err == nil {
			err = s.ownLink(l.fd, base, m)
		}
	case tar.TypeFifo:
		err = s.fifo(l, base, m)
	case tar.TypeLink:
		err = s.hardLink(l, base, h.Linkname)
	default:
		return fmt.Errorf("%w: entry %.300q has the type %q", ErrCorrupt, name, h.Typeflag)
	}
	return s.made(l, name, err)
}

func (s *restorer) fifo(l *level, base string, m *meta) error {
	if err := unix.Mknodat(l.fd, base, unix.S_IFIFO|0o600, 0); err != nil {
		return err
	}
	flags := unix.O_RDONLY | unix.O_NONBLOCK | unix.O_NOFOLLOW | unix.O_CLOEXEC
	fd, err := retried(func() (int, error) { return unix.Openat(l.fd, base, flags, 0) })
	if err != nil {
		return err
	}
	if x, err := statAt(fd, ""); err != nil || x.Mode&unix.S_IFMT != unix.S_IFIFO {
		_ = unix.Close(fd)
		return cmp.Or(err, error(unix.EBUSY))
	}
	return s.finish(fd, m)
}

// made returns what the error of making an entry means.
func (s *restorer) made(l *level, name string, err error) error {
	exists := errors.Is(err, unix.EEXIST)
	switch {
	case err == nil, errors.Is(err, ErrNotAllowed), errors.Is(err, ErrCorrupt):
		return err
	case l.foreign && errors.Is(err, fs.ErrPermission), l.foreign && errors.Is(err, unix.EROFS), exists && l.top.keeps:
		s.leave(Foreign, name)
		return nil
	case exists:
		return fmt.Errorf("%w: entry %.300q is there twice", ErrCorrupt, name)
	}
	return pathError("restore", name, err)
}

// levelOf returns the directory that an entry is in, and leaves those that it is not in.
func (s *restorer) levelOf(name string) (*level, error) {
	below := false
	for _, t := range s.tops {
		below = below || strings.HasPrefix(name, t.name+"/")
		if name != t.name {
			continue
		}
		if t.seen {
			return nil, fmt.Errorf("%w: entry %.300q is there twice", ErrCorrupt, name)
		}
		t.seen = true
		for len(s.stack) > 0 {
			if err := s.leaveDirectory(); err != nil {
				return nil, err
			}
		}
		var err error
		if t.parent.fd < 0 {
			t.parent.fd, err = openParent("/"+name, true)
		}
		return t.parent, err
	}
	at := strings.LastIndexByte(name, '/')
	if !below || path.Clean(name) != name {
		return nil, fmt.Errorf("%w: entry %.300q is outside of the paths, or has no clean name", ErrNotAllowed, name)
	}
	for n := len(s.stack); n > 0 && s.stack[n-1].name != name[:at]; n = len(s.stack) {
		if err := s.leaveDirectory(); err != nil {
			return nil, err
		}
	}
	if len(s.stack) == 0 {
		return nil, fmt.Errorf("%w: entry %.300q does not follow its directory", ErrCorrupt, name)
	}
	return s.stack[len(s.stack)-1], nil
}

func validBase(base string) bool { return base != "" && base != "." && base != ".." }

// leaveDirectory leaves the innermost directory, in which nothing more is made.
func (s *restorer) leaveDirectory() error {
	last := len(s.stack) - 1
	l := s.stack[last]
	s.stack = s.stack[:last]
	switch {
	case l.fd < 0:
		return nil
	case l.foreign:
		return unix.Close(l.fd)
	}
	if err := s.finish(l.fd, l.meta); err != nil {
		return pathError("restore", l.name, err)
	}
	return nil
}

func (s *restorer) directory(in *level, base string, m *meta) error {
	name := m.name
	if len(s.stack) > maxDepth {
		return fmt.Errorf("%w: entry %.300q is below more than %d directories", ErrCorrupt, name, maxDepth)
	}
	l := &level{name: name, fd: -1, top: in.top, meta: m}
	err := s.openDirectory(l, in, base)
	if err == nil && l.foreign {
		s.leave(Foreign, name)
	}
	if err := s.made(in, name, err); err != nil {
		return err
	}
	s.stack = append(s.stack, l)
	return nil
}

// openDirectory makes a directory that is closed to others. One that is there is taken if it could not be removed.
func (s *restorer) openDirectory(l, in *level, base string) error {
	if in.fd < 0 {
		l.foreign = true
		return nil
	}
	isTop := in == in.top.parent
	err := unix.Mkdirat(in.fd, base, 0o700)
	exists := errors.Is(err, unix.EEXIST)
	if err != nil && (!exists || !isTop && !l.top.keeps) {
		return err
	}
	flags := unix.O_RDONLY | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_CLOEXEC
	fd, err := retried(func() (int, error) { return unix.Openat(in.fd, base, flags, 0) })
	switch {
	case exists && errors.Is(err, fs.ErrPermission):
		l.foreign = true
		return nil
	case exists && (errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP)):
		l.foreign = true
		return nil
	case err != nil:
		return err
	}
	l.fd = fd
	x, err := statAt(fd, "")
	if err == nil && isTop {
		l.top.mount = mountOf(x)
	}
	if err == nil && !l.top.mount.has(x) {
		err = fmt.Errorf("%w: entry %.300q is on another mount", ErrNotAllowed, l.name)
	}
	if err == nil && exists {
		switch err = unix.Fchmod(fd, 0o700); {
		case errors.Is(err, fs.ErrPermission), errors.Is(err, unix.EROFS):
			l.foreign, err = true, nil
		case err == nil:
			// A process of its owner could put something else in the way meanwhile.
			_ = unix.Fchown(fd, os.Geteuid(), os.Getegid())
			err = removeAttributes(fd)
		}
	}
	if err == nil && !l.foreign {
		// What is made in it would inherit access control lists. The others would take memory until it is left.
		s.setAttributes(fd, l.meta, func(name string) bool { return !isACL(name) })
	}
	if err != nil {
		_ = unix.Close(fd)
		l.fd = -1
	}
	return err
}

// removeAttributes removes what finish would set.
func removeAttributes(fd int) error {
	var buffer []byte
	names, err := attributeNames(fd, &buffer)
	for _, name := range names {
		if keptAttribute(name, 0) {
			err = cmp.Or(err, unix.Fremovexattr(fd, name))
		}
	}
	return err
}

// regular makes a file.
func (s *restorer) regular(l *level, base string, h *tar.Header, m *meta) error {
	size, pieces, err := contents(h)
	if err != nil {
		return err
	}
	s.Bytes += h.Size
	if l.fd < 0 {
		s.leave(Foreign, m.name)
		return nil
	}
	flags := unix.O_WRONLY | unix.O_CREAT | unix.O_EXCL | unix.O_NOFOLLOW | unix.O_CLOEXEC
	fd, err := retried(func() (int, error) { return unix.Openat(l.fd, base, flags, 0o600) })
	if err != nil {
		return s.made(l, m.name, err)
	}
	if err := s.fill(fd, m.name, size, pieces); err != nil {
		_ = unix.Close(fd)
		return err
	}
	return s.made(l, m.name, s.finish(fd, m))
}

// fill gives a file its contents.
func (s *restorer) fill(fd int, name string, size int64, pieces []piece) error {
	var end int64
	for _, p := range pieces {
		for end = p.offset; end < p.offset+p.length; {
			chunk := s.copy[:min(copySize, p.offset+p.length-end)]
			if _, err := io.ReadFull(s.tar, chunk); err != nil {
				return s.damaged(err)
			}
			if err := writeAt(fd, chunk, end); err != nil {
				return pathError("write", name, err)
			}
			end += int64(len(chunk))
		}
	}
	if end < size {
		if err := unix.Ftruncate(fd, size); err != nil {
			return pathError("truncate", name, err)
		}
	}
	return nil
}

func writeAt(fd int, p []byte, offset int64) error {
	for len(p) > 0 {
		n, err := retried(func() (int, error) { return unix.Pwrite(fd, p, offset) })
		if err != nil {
			return err
		}
		p, offset = p[n:], offset+int64(n)
	}
	return nil
}

// finish gives an open file or directory all that its header says, and closes it.
func (s *restorer) finish(fd int, m *meta) error {
	s.setAttributes(fd, m, func(string) bool { return true })
	mode := m.mode
	err := unix.Fchown(fd, m.uid, m.gid)
	if errors.Is(err, unix.EPERM) || errors.Is(err, unix.EINVAL) {
		s.leave(Owner, m.name)
		_ = unix.Fchown(fd, -1, m.gid)
		// They would give the rights of another user than they gave.
		mode &^= unix.S_ISUID | unix.S_ISGID
		err = nil
	}
	if err == nil {
		err = unix.Fchmod(fd, mode)
	}
	if err == nil {
		err = setTime(fd, m)
	}
	return cmp.Or(err, unix.Close(fd))
}

// setAttributes sets some attributes, and forgets them.
func (s *restorer) setAttributes(fd int, m *meta, some func(string) bool) {
	for name, value := range m.attributes {
		if !some(name) {
			continue
		}
		if unix.Fsetxattr(fd, name, []byte(value), 0) != nil {
			s.leave(Attribute, m.name)
		}
		delete(m.attributes, name)
	}
}

// ownLink is finish for a symbolic link.
func (s *restorer) ownLink(dir int, base string, m *meta) error {
	err := unix.Fchownat(dir, base, m.uid, m.gid, unix.AT_SYMLINK_NOFOLLOW)
	if errors.Is(err, unix.EPERM) || errors.Is(err, unix.EINVAL) {
		s.leave(Owner, m.name)
		_ = unix.Fchownat(dir, base, -1, m.gid, unix.AT_SYMLINK_NOFOLLOW)
		err = nil
	}
	times := m.times()
	return cmp.Or(err, unix.UtimesNanoAt(dir, base, times[:], unix.AT_SYMLINK_NOFOLLOW))
}

// hardLink makes another name of a file that the archive has had before.
func (s *restorer) hardLink(l *level, base, target string) error {
	at := slices.IndexFunc(s.tops, func(t *top) bool { return target == t.name || strings.HasPrefix(target, t.name+"/") })
	switch {
	case at < 0:
		return fmt.Errorf("%w: a hard link to %.300q, which is outside of the paths", ErrNotAllowed, target)
	case !s.tops[at].seen:
		return missing(target, unix.ENOENT)
	}
	t := s.tops[at]
	dir, rest := t.parent.fd, path.Base(t.name)+target[len(t.name):]
	defer func() {
		if dir != t.parent.fd {
			_ = unix.Close(dir)
		}
	}()
	for {
		name, more, inner := strings.Cut(rest, "/")
		if !validBase(name) {
			return fmt.Errorf("%w: a hard link to %.300q", ErrNotAllowed, target)
		}
		x, err := statAt(dir, name)
		if err != nil {
			return missing(target, err)
		}
		if !inner {
			if x.Mode&unix.S_IFMT != unix.S_IFREG || !t.mount.has(x) {
				return fmt.Errorf("%w: a hard link to %.300q, which is no file", ErrNotAllowed, target)
			}
			return unix.Linkat(dir, name, l.fd, base, 0)
		}
		const flags = unix.O_PATH | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_CLOEXEC
		next, err := retried(func() (int, error) { return unix.Openat(dir, name, flags, 0) })
		if err != nil {
			return missing(target, err)
		}
		if dir != t.parent.fd {
			_ = unix.Close(dir)
		}
		dir, rest = next, more
	}
}

func missing(target string, err error) error {
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) {
		return fmt.Errorf("%w: a hard link to %.300q, which it has not", ErrCorrupt, target)
	}
	return err
}
