// Package recycle is what runs in a pod so that its containers can be restarted for another sandbox: one
// command removes what restarts of containers keep ([Clean]), another asks the kubelet for a restart of all
// containers ([Await]).
//
// A restart gives each container a new file system and ends its processes. The kubelet keeps what belongs to
// the pod: the volumes, /dev/shm, System V and POSIX IPC objects, and the files that the container runtime
// mounts into all containers and that root in a container can write, /etc/resolv.conf and /etc/hostname. The
// kubelet itself writes /etc/hosts anew for each container.
package recycle

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// ExitCode is that of Await. A rule of the container restarts all containers of the pod after it.
const ExitCode = 88

// kept are the files and directories that the runtime mounts into every container of a pod. The kubelet writes
// the content of /etc/hosts anew, and does not change its mode.
var kept = []struct {
	name    string
	content bool
}{{"etc/resolv.conf", true}, {"etc/hostname", true}, {"etc/hosts", false}, {"dev/shm", false}, {"dev/mqueue", false}}

// Clean removes what an earlier sandbox may have left in the pod. It runs before every other container of the
// pod, in its first start too: there it saves how the kept files are in dir, which no other container may write.
// Later it restores them. root is "/". An error means that something is left.
func Clean(root, dir string) error {
	var errs []error
	for _, k := range kept {
		errs = append(errs, restore(filepath.Join(root, k.name), filepath.Join(dir, filepath.Base(k.name)), k.content))
	}
	for _, name := range []string{"dev/shm", "dev/mqueue"} {
		errs = append(errs, empty(filepath.Join(root, name)))
	}
	for _, kind := range []string{"shm", "sem", "msg"} {
		errs = append(errs, removeIPC(filepath.Join(root, "proc/sysvipc", kind), kind))
	}
	return errors.Join(errs...)
}

// state is how a file is.
type state struct {
	Exists   bool
	Mode     uint32 // the 12 bits that chmod sets
	UID, GID int
	Attrs    []string // names of its extended attributes
	Content  []byte   // empty: not read
}

func look(file string, content bool) (s state, err error) {
	var stat unix.Stat_t
	switch err := unix.Lstat(file, &stat); {
	case errors.Is(err, unix.ENOENT):
		return s, nil
	case err != nil:
		return s, fmt.Errorf("stat %s: %w", file, err)
	}
	s = state{Exists: true, Mode: stat.Mode & 0o7777, UID: int(stat.Uid), GID: int(stat.Gid)}
	names := make([]byte, 64<<10) // the kernel's bound
	n, err := unix.Llistxattr(file, names)
	if err != nil && !errors.Is(err, unix.ENOTSUP) {
		return s, fmt.Errorf("attributes of %s: %w", file, err)
	}
	if n > 0 {
		s.Attrs = strings.Split(strings.TrimSuffix(string(names[:n]), "\x00"), "\x00")
	}
	if content {
		s.Content, err = os.ReadFile(file)
		return s, err
	}
	return s, nil
}

// restore makes a file as it was saved, or saves how it is if that was not done yet.
func restore(file, saved string, content bool) error {
	now, err := look(file, content)
	if err != nil {
		return err
	}
	raw, err := os.ReadFile(saved)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return save(saved, now)
	case err != nil:
		return err
	}
	var was state
	if err := json.Unmarshal(raw, &was); err != nil {
		return fmt.Errorf("%s: %w", saved, err)
	}
	if now.Exists != was.Exists {
		return fmt.Errorf("%s: exists: %t, before: %t", file, now.Exists, was.Exists)
	}
	var errs []error
	if !bytes.Equal(now.Content, was.Content) {
		errs = append(errs, os.WriteFile(file, was.Content, 0o644))
	}
	for _, name := range now.Attrs {
		if !slices.Contains(was.Attrs, name) {
			if err := unix.Lremovexattr(file, name); err != nil {
				errs = append(errs, fmt.Errorf("attribute %s of %s: %w", name, file, err))
			}
		}
	}
	if now.UID != was.UID || now.GID != was.GID {
		errs = append(errs, os.Lchown(file, was.UID, was.GID))
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	if now, err = look(file, false); err == nil && now.Exists && now.Mode != was.Mode { // an owner's change clears bits
		err = unix.Chmod(file, was.Mode)
	}
	return err
}

// save writes a state at once or not at all, because a later start takes it for whole.
func save(file string, s state) error {
	raw, err := json.Marshal(s)
	if err != nil {
		return err
	}
	if err := os.WriteFile(file+".new", raw, 0o600); err != nil {
		return err
	}
	return os.Rename(file+".new", file)
}

// empty removes everything in a directory that exists.
func empty(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	errs := []error{err}
	for _, e := range entries {
		errs = append(errs, os.RemoveAll(filepath.Join(dir, e.Name())))
	}
	return errors.Join(errs...)
}

// removeIPC removes the System V objects of a kind that a file of /proc/sysvipc lists: second column the ID, and
// the column "uid" their owner.
func removeIPC(list, kind string) error {
	raw, err := os.ReadFile(list)
	if errors.Is(err, os.ErrNotExist) {
		return nil // a kernel without them
	}
	if err != nil {
		return err
	}
	var errs []error
	uid := 0
	for n, line := range strings.Split(strings.TrimSpace(string(raw)), "\n") {
		columns := strings.Fields(line)
		if n == 0 {
			for i, name := range columns {
				if name == "uid" {
					uid = i
				}
			}
			continue
		}
		if len(columns) <= max(1, uid) {
			return fmt.Errorf("%s: cannot be read: %q", list, line)
		}
		id, err1 := strconv.Atoi(columns[1])
		owner, err2 := strconv.Atoi(columns[uid])
		if err := errors.Join(err1, err2); err != nil {
			return fmt.Errorf("%s: %w", list, err)
		}
		if err := asOwner(owner, func() error { return removeObject(kind, id) }); err != nil {
			errs = append(errs, fmt.Errorf("remove %s %d: %w", kind, id, err))
		}
	}
	return errors.Join(errs...)
}

func removeObject(kind string, id int) error {
	var errno unix.Errno
	switch kind {
	case "shm":
		_, _, errno = unix.Syscall(unix.SYS_SHMCTL, uintptr(id), unix.IPC_RMID, 0)
	case "sem":
		_, _, errno = unix.Syscall6(unix.SYS_SEMCTL, uintptr(id), 0, unix.IPC_RMID, 0, 0, 0)
	case "msg":
		_, _, errno = unix.Syscall(unix.SYS_MSGCTL, uintptr(id), unix.IPC_RMID, 0)
	}
	if errno != 0 {
		return errno
	}
	return nil
}

// asOwner calls f, and again as another user if that is refused: only the owner of an object and
// CAP_SYS_ADMIN may remove it.
func asOwner(uid int, f func() error) error {
	if err := f(); !errors.Is(err, unix.EPERM) {
		return err
	}
	back := unix.Geteuid()
	if err := unix.Setresuid(-1, uid, -1); err != nil {
		return err
	}
	return errors.Join(f(), unix.Setresuid(-1, back, -1))
}

// pollEvery is how often Await reads its file.
const pollEvery = 100 * time.Millisecond

// Await returns when the content of a file is another than at its start. The kubelet replaces files of the
// downward API at once, and never shows half of one.
func Await(ctx context.Context, file string) error {
	first, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	ticker := time.NewTicker(pollEvery)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-ticker.C:
		}
		if now, err := os.ReadFile(file); err == nil && !bytes.Equal(now, first) {
			return nil
		}
	}
}
