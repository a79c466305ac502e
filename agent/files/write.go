package files

import (
	"bytes"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/berth-sandbox/berth/agent/accounts"
)

type unixStat = syscall.Stat_t

// maxLinks is the number of symbolic links that the kernel follows in one path.
const maxLinks = 40

// Names of files that become another file when they are complete. Watchers do not show them. The second
// prefix is for a file that takes the place of another one.
const (
	stagingPrefix  = ".berth-upload-"
	newPrefix      = stagingPrefix + "new-"
	replacedPrefix = stagingPrefix + "old-"
)

// openRegular opens a regular file. It neither waits nor acts on anything else: a FIFO has no writer, and
// a device does something when it is opened.
func openRegular(name string, flags int) (*os.File, fs.FileInfo, error) {
	info, err := os.Stat(name)
	if err != nil {
		return nil, nil, err
	}
	if err := regular(name, info.Mode()); err != nil {
		return nil, nil, err
	}
	fd, err := unix.Open(name, flags|unix.O_NONBLOCK|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, nil, &fs.PathError{Op: "open", Path: name, Err: err}
	}
	file := os.NewFile(uintptr(fd), name)
	// The sandbox may have put something else there.
	if info, err = file.Stat(); err == nil {
		err = regular(name, info.Mode())
	}
	if err != nil {
		_ = file.Close()
		return nil, nil, err
	}
	return file, info, nil
}

func regular(name string, mode fs.FileMode) error {
	switch {
	case mode.IsRegular():
		return nil
	case mode.IsDir():
		return invalid("%s is a directory", name)
	default:
		return invalid("%s is not a regular file, but a device, FIFO or socket", name)
	}
}

// target is where an upload goes.
type target struct {
	// name is the file's own path: no symbolic link.
	name string
	// file receives the contents. It is at staged until they are complete, or name itself if staged is "".
	file   *os.File
	staged string
	// dir is set if both are new names in this directory of root, see place.
	dir *os.File
	// mode is what the file gets, 0 to leave it as it is.
	mode fs.FileMode
}

// Write writes a file of the sandbox's configuration for an account, as an upload does. A relative path
// begins at the home. Mode 0 is that of an upload.
func (s *Service) Write(account accounts.Account, path string, contents []byte, mode fs.FileMode) error {
	name, err := resolve(path, &account, "")
	if err == nil {
		err = s.writeFile(&account, name, bytes.NewReader(contents), nil, mode)
	}
	return coded(err)
}

// writeFile makes a file with the contents of body, or gives an existing one new contents. Mode 0 keeps
// that of an existing file.
func (s *Service) writeFile(account *accounts.Account, name string, body io.Reader, metadata map[string]string,
	mode fs.FileMode,
) error {
	rights := as
	t, err := openAs(account, name)
	if errors.Is(err, fs.ErrPermission) {
		t, err = s.openAnywhere(account, name, t.named(err))
	}
	if err != nil {
		return t.named(err)
	}
	if t.dir != nil {
		defer t.dir.Close()
		rights = func(account *accounts.Account, f func() error, _ ...string) error { return making(account, f) }
	}
	if mode != 0 {
		t.mode = mode.Perm()
	}
	copyErr := copyAll(t.file, body)
	err = rights(account, func() error {
		if copyErr == nil {
			return t.commit(metadata)
		}
		t.discard()
		return copyErr
	})
	return t.named(errors.Join(err, t.file.Close()))
}

// named returns an error with the file's own path in place of the staged one, which a caller does not know.
func (t *target) named(err error) error {
	if p := (*fs.PathError)(nil); t != nil && errors.As(err, &p) && p.Path == t.staged {
		p.Path = t.name
	}
	return err
}

// openAs prepares the writing of a file with the rights of an account.
func openAs(account *accounts.Account, name string) (t *target, err error) {
	err = as(account, func() (err error) {
		t, err = openTarget(name)
		return err
	}, name)
	return t, err
}

// openTarget prepares the writing of a file.
func openTarget(name string) (*target, error) {
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		if errors.Is(err, unix.ENOTDIR) {
			return nil, invalid("%s has a parent that is not a directory", name)
		}
		return nil, err
	}
	name, err := followLinks(name)
	if err != nil {
		return nil, err
	}
	t := &target{name: name, mode: 0o644}
	prefix := newPrefix
	info, err := os.Lstat(name)
	switch {
	case err == nil:
		if err := regular(name, info.Mode()); err != nil {
			return nil, err
		}
		if !replaceable(name, info) {
			return t, t.openInPlace()
		}
		prefix, t.mode = replacedPrefix, info.Mode().Perm()
	case !errors.Is(err, fs.ErrNotExist):
		return nil, err
	}
	t.staged = filepath.Join(filepath.Dir(name), prefix+rand.Text())
	t.file, err = os.OpenFile(t.staged, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if prefix == newPrefix {
		return t, err
	}
	if err == nil {
		if err = keepOwner(t.file, info.Sys().(*unixStat)); err != nil {
			_ = t.file.Close()
			t.discard()
		}
	}
	if errors.Is(err, fs.ErrPermission) {
		// The user may make no files in that directory, or none with this owner and group.
		return t, t.openInPlace()
	}
	return t, err
}

// keepOwner gives a staged file the owner and the group of the file whose place it takes.
func keepOwner(staged *os.File, old *unixStat) error {
	info, err := staged.Stat()
	if err != nil {
		return err
	}
	if now := info.Sys().(*unixStat); now.Uid == old.Uid && now.Gid == old.Gid {
		return nil
	}
	return staged.Chown(int(old.Uid), int(old.Gid))
}

// followLinks returns the path of what name leads to. The last part need not exist.
func followLinks(name string) (string, error) {
	for range maxLinks {
		dir, err := filepath.EvalSymlinks(filepath.Dir(name))
		if err != nil {
			return "", err
		}
		name = filepath.Join(dir, filepath.Base(name))
		link, err := os.Readlink(name)
		switch {
		case errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENOENT):
			return name, nil
		case err != nil:
			return "", err
		case filepath.IsAbs(link):
			name = link
		default:
			// Not cleaned: ".." after a symbolic link is the parent of where it leads.
			name = dir + "/" + link
		}
	}
	return "", &fs.PathError{Op: "open", Path: name, Err: unix.ELOOP}
}

// replaceable reports whether another file may take the place of this one: not if it has other names, has an
// access control list, or is a mount of its own.
func replaceable(name string, info fs.FileInfo) bool {
	if info.Sys().(*unixStat).Nlink > 1 {
		return false
	}
	if _, err := unix.Lgetxattr(name, "system.posix_acl_access", nil); err == nil {
		return false
	}
	var x unix.Statx_t
	err := unix.Statx(unix.AT_FDCWD, name, unix.AT_SYMLINK_NOFOLLOW, unix.STATX_BASIC_STATS, &x)
	return err == nil && x.Attributes&unix.STATX_ATTR_MOUNT_ROOT == 0
}

// openInPlace empties the existing file, which is then written to.
func (t *target) openInPlace() (err error) {
	t.staged, t.mode = "", 0
	if t.file, _, err = openRegular(t.name, unix.O_WRONLY); err != nil {
		return err
	}
	if err = t.file.Truncate(0); err != nil {
		_ = t.file.Close()
	}
	return err
}

// commit gives the contents their name.
func (t *target) commit(metadata map[string]string) error {
	err := setMetadata(t.file, metadata)
	if err == nil && t.mode != 0 {
		err = t.file.Chmod(t.mode)
	}
	if t.staged == "" {
		return err
	}
	switch {
	case err != nil:
	case t.dir != nil:
		in := int(t.dir.Fd())
		err = unix.Renameat2(in, filepath.Base(t.staged), in, filepath.Base(t.name), unix.RENAME_NOREPLACE)
		if err != nil {
			err = &fs.PathError{Op: "rename", Path: t.name, Err: err}
		}
	default:
		err = os.Rename(t.staged, t.name)
	}
	if err != nil {
		t.discard()
		return err
	}
	// Programs that watch the file expect that it was written to, which a rename does not say.
	_ = t.file.Chmod(t.mode)
	now := [2]unix.Timespec{{Nsec: unix.UTIME_OMIT}, {Nsec: unix.UTIME_NOW}}
	// The file itself, without a path: futimens(3).
	_, _, _ = unix.Syscall6(unix.SYS_UTIMENSAT, t.file.Fd(), 0, uintptr(unsafe.Pointer(&now)), 0, 0, 0)
	return nil
}

// discard removes contents that are not complete. A file that is written in place keeps what it has.
func (t *target) discard() {
	switch {
	case t.staged == "":
	case t.dir != nil:
		_ = unix.Unlinkat(int(t.dir.Fd()), filepath.Base(t.staged), 0)
	default:
		_ = os.Remove(t.staged)
	}
}

// attributePrefix begins the extended attributes that hold the metadata of a file.
const attributePrefix = "user.e2b."

// setMetadata replaces the metadata of a file.
func setMetadata(file *os.File, metadata map[string]string) error {
	fd := int(file.Fd())
	for _, name := range attributes(func(b []byte) (int, error) { return unix.Flistxattr(fd, b) }) {
		if _, keep := metadata[strings.TrimPrefix(name, attributePrefix)]; !keep {
			_ = unix.Fremovexattr(fd, name)
		}
	}
	for key, value := range metadata {
		err := unix.Fsetxattr(fd, attributePrefix+key, []byte(value), 0)
		if errors.Is(err, unix.EOPNOTSUPP) {
			return invalid("header %s%s: the file system of %s keeps no metadata", metadataPrefix, key, file.Name())
		}
		if err != nil {
			return fmt.Errorf("header %s%s: %w", metadataPrefix, key, err)
		}
	}
	return nil
}

// attributes returns the names of the attributes that hold metadata.
func attributes(list func([]byte) (int, error)) []string {
	buffer := make([]byte, 1<<10)
	n, err := list(buffer)
	if errors.Is(err, unix.ERANGE) {
		// The most that the kernel answers.
		buffer = make([]byte, 64<<10)
		n, err = list(buffer)
	}
	if err != nil {
		return nil
	}
	var found []string
	for name := range strings.SplitSeq(string(buffer[:n]), "\x00") {
		if strings.HasPrefix(name, attributePrefix) {
			found = append(found, name)
		}
	}
	return found
}
