package recycle_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/berth-sandbox/berth/agent/recycle"
)

func write(t *testing.T, file, content string) {
	t.Helper()
	require.NoError(t, os.MkdirAll(filepath.Dir(file), 0o755))
	require.NoError(t, os.WriteFile(file, []byte(content), 0o644))
}

func TestCleanRestoresWhatRestartsKeep(t *testing.T) {
	root, dir := t.TempDir(), t.TempDir()
	resolv := filepath.Join(root, "etc/resolv.conf")
	write(t, resolv, "nameserver 10.96.0.10\n")
	for _, name := range []string{"dev/shm", "dev/mqueue"} {
		require.NoError(t, os.MkdirAll(filepath.Join(root, name), 0o755))
		require.NoError(t, os.Chmod(filepath.Join(root, name), 0o777|os.ModeSticky))
	}
	write(t, filepath.Join(root, "proc/sysvipc/shm"), "key shmid perms size cpid lpid nattch uid\n")
	require.NoError(t, recycle.Clean(root, dir))
	for range 2 {
		write(t, resolv, "nameserver 192.0.2.1\n")
		require.NoError(t, os.Chmod(resolv, 0o600))
		if err := unix.Setxattr(resolv, "user.left", []byte("x"), 0); !errors.Is(err, unix.ENOTSUP) {
			require.NoError(t, err)
		}
		write(t, filepath.Join(root, "dev/shm/dir/left"), "x")
		write(t, filepath.Join(root, "dev/mqueue/left"), "x")
		require.NoError(t, os.Chmod(filepath.Join(root, "dev/shm"), 0o700))
		require.NoError(t, recycle.Clean(root, dir))
		content, err := os.ReadFile(resolv)
		require.NoError(t, err)
		require.Equal(t, "nameserver 10.96.0.10\n", string(content))
		info, err := os.Stat(resolv)
		require.NoError(t, err)
		require.Equal(t, os.FileMode(0o644), info.Mode())
		n, err := unix.Listxattr(resolv, nil)
		require.True(t, err == nil && n == 0 || errors.Is(err, unix.ENOTSUP), "%d %v", n, err)
		for _, name := range []string{"dev/shm", "dev/mqueue"} {
			info, err := os.Stat(filepath.Join(root, name))
			require.NoError(t, err)
			require.Equal(t, 0o777|os.ModeSticky|os.ModeDir, info.Mode())
			left, err := os.ReadDir(filepath.Join(root, name))
			require.NoError(t, err)
			require.Empty(t, left)
		}
	}
}

// Invariant: I3
func TestCleanRestoresOwnersAndModesOfFiles(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can give a file to another user")
	}
	for _, name := range []string{"etc/resolv.conf", "etc/hostname", "etc/hosts"} {
		t.Run(name, func(t *testing.T) {
			root, dir := t.TempDir(), t.TempDir()
			file := filepath.Join(root, name)
			write(t, file, "x")
			require.NoError(t, os.Chmod(file, 0o644|os.ModeSetgid))
			require.NoError(t, recycle.Clean(root, dir))
			require.NoError(t, os.Chown(file, 1234, 4321))
			require.NoError(t, os.Chmod(file, 0o666))
			require.NoError(t, recycle.Clean(root, dir))
			var stat unix.Stat_t
			require.NoError(t, unix.Stat(file, &stat))
			require.Equal(t, []uint32{0, 0, 0o2644}, []uint32{stat.Uid, stat.Gid, stat.Mode & 0o7777})
		})
	}
}

// Invariant: I3
func TestCleanRemovesEveryKindOfIPC(t *testing.T) {
	const private = unix.IPC_PRIVATE
	for kind, c := range map[string]struct {
		get, stat uintptr // the calls
		args      [3]uintptr
	}{
		"shm": {unix.SYS_SHMGET, unix.SYS_SHMCTL, [3]uintptr{private, 4096, 0o600}},
		"sem": {unix.SYS_SEMGET, unix.SYS_SEMCTL, [3]uintptr{private, 1, 0o600}},
		"msg": {unix.SYS_MSGGET, unix.SYS_MSGCTL, [3]uintptr{private, 0o600}},
	} {
		t.Run(kind, func(t *testing.T) {
			id, _, errno := unix.Syscall(c.get, c.args[0], c.args[1], c.args[2])
			require.Zero(t, errno, errno)
			root := t.TempDir()
			write(t, filepath.Join(root, "proc/sysvipc", kind), listed(t, kind, strconv.Itoa(int(id))))
			require.NoError(t, recycle.Clean(root, t.TempDir()))
			_, _, errno = unix.Syscall6(c.stat, id, 0, unix.IPC_RMID, 0, 0, 0) // or remove it now
			if kind != "sem" {
				_, _, errno = unix.Syscall(c.stat, id, unix.IPC_RMID, 0)
			}
			require.Contains(t, []unix.Errno{unix.EINVAL, unix.EIDRM}, errno, "the object is left")
		})
	}
}

// listed returns what the kernel lists of one object of a kind. Others may belong to somebody else.
func listed(t *testing.T, kind, id string) string {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join("/proc/sysvipc", kind))
	require.NoError(t, err)
	lines := strings.SplitAfter(string(raw), "\n")
	for _, line := range lines[1:] {
		if columns := strings.Fields(line); len(columns) > 1 && columns[1] == id {
			return lines[0] + line
		}
	}
	t.Fatalf("%s %s is not in /proc/sysvipc", kind, id)
	return ""
}

func TestCleanFailsIfAnythingIsLeft(t *testing.T) {
	root, dir := t.TempDir(), t.TempDir()
	write(t, filepath.Join(root, "proc/sysvipc/msg"), "key msqid uid\n0 x 0\n")
	require.ErrorContains(t, recycle.Clean(root, dir), "sysvipc/msg")
	require.Error(t, recycle.Clean(t.TempDir(), filepath.Join(dir, "none")))
	root, dir = t.TempDir(), t.TempDir()
	require.NoError(t, recycle.Clean(root, dir))
	write(t, filepath.Join(root, "etc/hostname"), "it did not exist")
	require.ErrorContains(t, recycle.Clean(root, dir), "etc/hostname")
}

func TestAwaitEndsWhenItsFileChanges(t *testing.T) {
	file := filepath.Join(t.TempDir(), "life")
	require.ErrorIs(t, recycle.Await(t.Context(), file), os.ErrNotExist)
	write(t, file, "0")
	done := make(chan error, 1)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	go func() { done <- recycle.Await(ctx, file) }()
	for n := 0; ; n++ { // it may not have read the file yet
		write(t, file, string(rune('1'+n%2)))
		select {
		case err := <-done:
			require.NoError(t, err)
			return
		case <-time.After(10 * time.Millisecond):
		}
	}
}
