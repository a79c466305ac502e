package archive

import (
	"errors"
	"fmt"
	"io/fs"
	"path"
	"strings"

	"golang.org/x/sys/unix"
)

// The functions here give the kernel names, not paths. None of them follows a symbolic link.

// openParent opens the directory that a path is in. It makes what is missing if it may.
func openParent(p string, makes bool) (int, error) {
	const flags = unix.O_PATH | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_CLOEXEC
	dir, err := unix.Open("/", flags, 0)
	if err != nil {
		return -1, err
	}
	at := "/"
	for base := range strings.SplitSeq(strings.Trim(path.Dir(p), "/"), "/") {
		if base == "" {
			break // the path is in /
		}
		at = path.Join(at, base)
		next, err := retried(func() (int, error) { return unix.Openat(dir, base, flags, 0) })
		if errors.Is(err, unix.ENOENT) && makes {
			if err = unix.Mkdirat(dir, base, 0o755); err == nil {
				next, err = unix.Openat(dir, base, flags, 0)
			}
		}
		if errors.Is(err, unix.ENOTDIR) {
			if x, err := statAt(dir, base); err == nil && x.Mode&unix.S_IFMT == unix.S_IFLNK {
				_ = unix.Close(dir)
				return -1, symbolicLink(at)
			}
			if !makes {
				err = unix.ENOENT
			}
		}
		_ = unix.Close(dir)
		if err != nil {
			return -1, &fs.PathError{Op: "open", Path: at, Err: err}
		}
		dir = next
	}
	return dir, nil
}

func symbolicLink(p string) error {
	return fmt.Errorf("%w: %s is a symbolic link: name the directory that it leads to", ErrNotAllowed, p)
}

// statAt describes what a directory has under a name, or what is open itself if the name is "".
func statAt(dir int, base string) (*unix.Statx_t, error) {
	flags := unix.AT_SYMLINK_NOFOLLOW | unix.AT_NO_AUTOMOUNT
	if base == "" {
		flags |= unix.AT_EMPTY_PATH
	}
	var x unix.Statx_t
	err := unix.Statx(dir, base, flags, unix.STATX_BASIC_STATS|unix.STATX_MNT_ID, &x)
	return &x, err
}

// mountID says which mount something is on: the number of the mount, or the device if the kernel tells no number.
type mountID struct {
	numbered     bool
	number       uint64
	major, minor uint32
}

func mountOf(x *unix.Statx_t) mountID {
	if x.Mask&unix.STATX_MNT_ID != 0 {
		return mountID{numbered: true, number: x.Mnt_id}
	}
	return mountID{major: x.Dev_major, minor: x.Dev_minor}
}

// has reports whether something is on this mount. On overlayfs only directories have the device of their mount.
func (m mountID) has(x *unix.Statx_t) bool {
	return m == mountOf(x) || !m.numbered && x.Mode&unix.S_IFMT != unix.S_IFDIR
}

func readLink(dir int, base string) (string, error) {
	buffer := make([]byte, maxName+1)
	n, err := unix.Readlinkat(dir, base, buffer)
	return string(buffer[:max(n, 0)]), err
}

// attributeNames returns the names of all attributes of an open file. The buffer grows as needed.
func attributeNames(fd int, buffer *[]byte) ([]string, error) {
	if *buffer == nil {
		*buffer = make([]byte, 1<<10)
	}
	n, err := unix.Flistxattr(fd, *buffer)
	if errors.Is(err, unix.ERANGE) {
		*buffer = make([]byte, 64<<10) // XATTR_LIST_MAX
		n, err = unix.Flistxattr(fd, *buffer)
	}
	if errors.Is(err, unix.EOPNOTSUPP) {
		return nil, nil
	}
	if err != nil || n == 0 {
		return nil, err
	}
	return strings.Split(strings.TrimSuffix(string((*buffer)[:n]), "\x00"), "\x00"), nil
}

// shown returns the path of an entry for people. A long one is cut.
func shown(name string) string {
	const most = 1000
	if len(name) > most {
		return "/" + name[:most] + "..."
	}
	return "/" + name
}

func pathError(op, name string, err error) error {
	return &fs.PathError{Op: op, Path: shown(name), Err: err}
}
