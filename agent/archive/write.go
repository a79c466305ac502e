package archive

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"strconv"
	"strings"
	"time"

	"github.com/klauspost/compress/zstd"
	"golang.org/x/sys/unix"
)

const (
	copySize = 256 << 10
	// window of the compressor. A larger one finds little more at level 1.
	window = 1 << 20
	// listed is how many names of a directory are in memory at once.
	listed = 1000
)

// writer is one Write.
type writer struct {
	Summary
	o    Options
	tar  *tar.Writer
	out  *summed
	copy []byte
	// links has the first name of each file with several names that are not all seen yet.
	links map[fileID]link
	// linkNames is the length of these names.
	linkNames int
	// mount is that of the path that is being archived.
	mount mountID
	// names and value are for attributes.
	names, value []byte
}

type fileID struct {
	major, minor uint32
	inode        uint64
}

type link struct {
	name string
	left uint32
}

// Write archives the files below o.Paths. After an error the stream is no whole archive, which a Restore notices.
func Write(ctx context.Context, w io.Writer, o Options) (Summary, error) {
	if err := o.check(); err != nil {
		return Summary{}, err
	}
	compressed, err := zstd.NewWriter(w, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderConcurrency(1),
		zstd.WithWindowSize(window), zstd.WithLowerEncoderMem(true))
	if err != nil {
		return Summary{}, err
	}
	a := &writer{o: o, out: newSummed(ctx, o.MaxBytes), copy: make([]byte, copySize), links: map[fileID]link{}}
	a.out.w = compressed
	a.tar = tar.NewWriter(a.out)
	if err := a.all(); err != nil {
		a.Size = a.out.n
		return a.Summary, a.explain(err)
	}
	return a.Summary, compressed.Close()
}

func (a *writer) explain(err error) error {
	switch {
	case errors.Is(err, ErrTooLarge):
		return fmt.Errorf("%w: the files need an archive of more than MaxBytes = %d bytes: delete some, or raise it",
			ErrTooLarge, a.o.MaxBytes)
	case errors.Is(err, ErrTooManyFiles):
		return fmt.Errorf("%w: there are more than MaxFiles = %d: delete some, or raise it", ErrTooManyFiles, a.o.MaxFiles)
	}
	return err
}

func (a *writer) all() error {
	a.Paths = a.o.Paths
	if err := a.tar.WriteHeader(head(a.o.Paths)); err != nil {
		return err
	}
	for i := range a.o.Paths {
		if err := a.path(i); err != nil {
			return err
		}
	}
	if err := a.tar.Flush(); err != nil {
		return err
	}
	a.Size = a.out.n
	a.out.limit = withTail(a.out.limit)
	if err := a.tar.WriteHeader(tail(a.Summary, a.out.hash.Sum(nil))); err != nil {
		return err
	}
	return a.tar.Close()
}

func (a *writer) path(i int) error {
	p := a.o.Paths[i]
	parent, err := openParent(p, false)
	var x *unix.Statx_t
	if err == nil {
		defer func() { _ = unix.Close(parent) }()
		x, err = statAt(parent, path.Base(p))
	}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err == nil && x.Mode&unix.S_IFMT == unix.S_IFLNK:
		err = symbolicLink(p)
	}
	if err != nil {
		return fmt.Errorf("archive.Options.Paths[%d]: %w", i, err)
	}
	a.mount = mountOf(x)
	return a.entry(parent, path.Base(p), p[1:], 0)
}

// entry archives what a directory has under a name. The full name is for the archive.
func (a *writer) entry(dir int, base, name string, depth int) error {
	if err := a.out.ctx.Err(); err != nil {
		return err
	}
	x, err := statAt(dir, base)
	if errors.Is(err, fs.ErrPermission) {
		a.leave(Unreadable, name)
		return nil
	}
	if err != nil {
		return changed(name, "stat", err)
	}
	kind := x.Mode & unix.S_IFMT
	if !a.mount.has(x) {
		a.leave(Mount, name)
		return nil
	}
	switch kind {
	case unix.S_IFDIR, unix.S_IFREG:
		return a.opened(dir, base, name, x, depth)
	case unix.S_IFLNK:
		target, err := readLink(dir, base)
		if err != nil {
			return changed(name, "readlink", err)
		}
		h := header(x, tar.TypeSymlink, name)
		h.Linkname = target
		return a.header(h)
	case unix.S_IFIFO:
		return a.header(header(x, tar.TypeFifo, name))
	case unix.S_IFSOCK:
		a.leave(Socket, name)
	default:
		a.leave(Device, name)
	}
	return nil
}

// changed returns an error for a file that was there a moment ago.
func changed(name, op string, err error) error {
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) {
		err = ErrChanged
	}
	return pathError(op, name, err)
}

// opened archives a file or a directory.
func (a *writer) opened(dir int, base, name string, x *unix.Statx_t, depth int) error {
	isDir := x.Mode&unix.S_IFMT == unix.S_IFDIR
	id := fileID{x.Dev_major, x.Dev_minor, x.Ino}
	if first := a.links[id]; !isDir && x.Nlink > 1 && first.name != "" {
		if first.left--; first.left == 0 {
			delete(a.links, id)
			a.linkNames -= len(first.name)
		} else {
			a.links[id] = first
		}
		h := header(x, tar.TypeLink, name)
		h.Linkname = first.name
		return a.header(h)
	}
	flags := unix.O_RDONLY | unix.O_NOFOLLOW | unix.O_NONBLOCK | unix.O_NOCTTY | unix.O_CLOEXEC
	if isDir {
		flags |= unix.O_DIRECTORY
	}
	fd, err := retried(func() (int, error) { return unix.Openat(dir, base, flags, 0) })
	switch {
	case errors.Is(err, fs.ErrPermission):
		a.leave(Unreadable, name)
		if isDir {
			return a.header(header(x, tar.TypeDir, name+"/"))
		}
		return nil
	case err != nil:
		return changed(name, "open", err)
	}
	file := os.NewFile(uintptr(fd), shown(name))
	defer file.Close()
	now, err := statAt(fd, "")
	if err != nil {
		return err
	}
	if (fileID{now.Dev_major, now.Dev_minor, now.Ino}) != id || now.Mode != x.Mode {
		return pathError("open", name, ErrChanged)
	}
	if isDir {
		return a.directory(file, now, name, depth)
	}
	if now.Nlink > 1 {
		if len(a.links) < maxLinks && a.linkNames+len(name) <= maxLinkNames {
			a.links[id] = link{name, now.Nlink - 1}
			a.linkNames += len(name)
		} else {
			a.leave(Link, name)
		}
	}
	return a.regular(file, now, name)
}

func (a *writer) directory(file *os.File, x *unix.Statx_t, name string, depth int) error {
	if depth > maxDepth {
		a.leave(TooDeep, name)
		return nil
	}
	h := header(x, tar.TypeDir, name+"/")
	if err := a.attributes(file, h); err != nil {
		return err
	}
	if err := a.header(h); err != nil {
		return err
	}
	for {
		names, err := file.Readdirnames(listed)
		for _, base := range names {
			if err := a.entry(int(file.Fd()), base, name+"/"+base, depth+1); err != nil {
				return err
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

func (a *writer) regular(file *os.File, x *unix.Statx_t, name string) error {
	h := header(x, tar.TypeReg, name)
	h.Size = int64(x.Size)
	if err := a.attributes(file, h); err != nil {
		return err
	}
	pieces := []piece{{0, h.Size}}
	if int64(x.Blocks)*512 < h.Size {
		if found := data(int(file.Fd()), h.Size); len(found) != 1 || found[0] != pieces[0] {
			pieces = found
			h.PAXRecords[sizeRecord] = strconv.FormatInt(h.Size, 10)
			h.PAXRecords[dataRecord] = piecesRecord(pieces)
			h.Size = 0
			for _, p := range pieces {
				h.Size += p.length
			}
		}
	}
	if h.Size > a.o.MaxBytes-a.out.n {
		return ErrTooLarge
	}
	if err := a.header(h); err != nil {
		return err
	}
	for _, p := range pieces {
		for p.length > 0 {
			n, err := file.ReadAt(a.copy[:min(p.length, copySize)], p.offset)
			if n == 0 && errors.Is(err, io.EOF) {
				return pathError("read", name, ErrChanged)
			}
			if err != nil && !errors.Is(err, io.EOF) {
				return err
			}
			if _, err := a.tar.Write(a.copy[:n]); err != nil {
				return err
			}
			a.Bytes += int64(n)
			p = piece{p.offset + int64(n), p.length - int64(n)}
		}
	}
	return nil
}

// data returns the parts of a file that are no holes.
func data(fd int, size int64) (pieces []piece) {
	for at := int64(0); at < size; {
		from, err := unix.Seek(fd, at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			break // only a hole is left
		}
		to := size
		if err == nil && len(pieces) < maxPieces-1 {
			to, err = unix.Seek(fd, from, unix.SEEK_HOLE)
		}
		if err != nil {
			// The file system does not tell.
			from, to = at, size
		}
		if from = max(from, at); from >= size {
			break
		}
		to = min(max(to, from+1), size)
		pieces = append(pieces, piece{from, to - from})
		at = to
	}
	return pieces
}

// header makes the header of an entry.
func header(x *unix.Statx_t, kind byte, name string) *tar.Header {
	return &tar.Header{
		Format: tar.FormatPAX, Typeflag: kind, Name: name, Mode: int64(x.Mode & 0o7777), Uid: int(x.Uid), Gid: int(x.Gid),
		ModTime: time.Unix(x.Mtime.Sec, int64(x.Mtime.Nsec)), PAXRecords: map[string]string{},
	}
}

func (a *writer) header(h *tar.Header) error {
	if a.Entries == a.o.MaxFiles {
		return ErrTooManyFiles
	}
	if err := a.tar.WriteHeader(h); err != nil {
		return fmt.Errorf("entry %.300q: %w", h.Name, err)
	}
	a.Entries++
	return nil
}

// attributes adds the attributes of an open file to its header.
func (a *writer) attributes(file *os.File, h *tar.Header) error {
	fd, total := int(file.Fd()), 0
	names, err := attributeNames(fd, &a.names)
	if err != nil {
		return pathError("listxattr", h.Name, err)
	}
	for _, name := range names {
		if !keptAttribute(name, 0) {
			if name == "security.capability" {
				a.leave(Attribute, h.Name)
			}
			continue
		}
		if a.value == nil {
			a.value = make([]byte, 64<<10) // XATTR_SIZE_MAX
		}
		n, err := unix.Fgetxattr(fd, name, a.value)
		if total += len(name) + max(n, 0); err != nil || strings.Contains(name, "=") ||
			total > maxAttributes || !keptAttribute(name, n) {
			a.leave(Attribute, h.Name)
			continue
		}
		h.PAXRecords[attributeRecord+name] = string(a.value[:n])
	}
	return nil
}
