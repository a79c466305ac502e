package archive

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"
)

// remove removes what a directory has under a name, but for the directory that a path itself is, which is emptied.
// What it may not remove stays and is counted: other mounts, and what belongs to another user.
func (s *restorer) remove(dir int, base, name string, t *top, depth int) error {
	err := unix.Unlinkat(dir, base, 0)
	if err == nil || errors.Is(err, unix.ENOENT) {
		return nil
	}
	x, statErr := statAt(dir, base)
	switch {
	case statErr != nil:
		return s.keep(name, t, statErr)
	case !t.mount.has(x):
		return s.keep(name, t, unix.EBUSY)
	case x.Mode&unix.S_IFMT != unix.S_IFDIR:
		return s.keep(name, t, err)
	case depth > maxDepth:
		return pathError("remove", name, unix.ENAMETOOLONG)
	}
	flags := unix.O_RDONLY | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_CLOEXEC
	fd, err := retried(func() (int, error) { return unix.Openat(dir, base, flags, 0) })
	if errors.Is(err, fs.ErrPermission) {
		// An agent that is not root may have to let itself in first.
		letIn(dir, base)
		fd, err = retried(func() (int, error) { return unix.Openat(dir, base, flags, 0) })
	}
	if err != nil {
		return s.keep(name, t, err)
	}
	file := os.NewFile(uintptr(fd), shown(name))
	defer file.Close()
	if err := s.empty(file, name, t, depth); err != nil {
		return err
	}
	if depth > 0 {
		if err = unix.Unlinkat(dir, base, unix.AT_REMOVEDIR); err == nil {
			return nil
		}
		err = s.keep(name, t, err)
	}
	_ = unix.Fchmod(fd, uint32(x.Mode&0o7777))
	return err
}

// letIn gives a directory a mode in which its owner may list it.
func letIn(dir int, base string) {
	fd, err := unix.Openat(dir, base, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err == nil {
		_ = unix.Chmod(fmt.Sprintf("/proc/self/fd/%d", fd), 0o700) // fchmod(2) does not take what is open like this
		_ = unix.Close(fd)
	}
}

// empty removes what is in an open directory.
func (s *restorer) empty(file *os.File, name string, t *top, depth int) error {
	fd := int(file.Fd())
	_ = unix.Fchmod(fd, 0o700) // so that an agent that is not root may remove from it
	for {
		kept := s.LeftOut[Foreign].Count + s.LeftOut[Mount].Count
		seen := 0
		for {
			names, err := file.Readdirnames(listed)
			for _, base := range names {
				if err := s.in.ctx.Err(); err != nil {
					return err
				}
				if err := s.remove(fd, base, name+"/"+base, t, depth+1); err != nil {
					return err
				}
			}
			seen += len(names)
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				return err
			}
		}
		// A directory that is changed while it is read may not list all that it has.
		if seen == 0 || s.LeftOut[Foreign].Count+s.LeftOut[Mount].Count > kept {
			return nil
		}
		if _, err := file.Seek(0, io.SeekStart); err != nil {
			return err
		}
	}
}

// keep counts what stays, or returns the error of removing it if that has another cause.
func (s *restorer) keep(name string, t *top, err error) error {
	switch {
	case errors.Is(err, unix.ENOENT):
		return nil
	case errors.Is(err, unix.EBUSY):
		s.leave(Mount, name)
	case errors.Is(err, fs.ErrPermission), errors.Is(err, unix.EROFS), errors.Is(err, unix.ENOTEMPTY):
		s.leave(Foreign, name)
	default:
		return pathError("remove", name, err)
	}
	t.keeps = true
	return nil
}
