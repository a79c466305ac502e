package archive_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/berth-sandbox/berth/agent/archive"
)

// role is set in the environment of a test's process that is to do one thing, as another user or to be measured.
const role = "BERTH_TEST_ROLE"

func TestMain(m *testing.M) {
	if name := os.Getenv(role); name != "" {
		if err := act(name); err != nil {
			fmt.Fprintln(os.Stderr, name+":", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

// home returns a directory that is archived, in a directory of its own.
func home(t testing.TB) string {
	t.Helper()
	dir, err := filepath.EvalSymlinks(t.TempDir())
	require.NoError(t, err)
	home := filepath.Join(dir, "home")
	require.NoError(t, os.Mkdir(home, 0o750))
	t.Cleanup(func() { removeAll(t, home) })
	return home
}

// removeAll is os.RemoveAll that gives itself the rights for it.
func removeAll(t testing.TB, dir string) {
	t.Helper()
	_ = filepath.WalkDir(dir, func(name string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() {
			_ = os.Chmod(name, 0o700)
		}
		return nil
	})
	require.NoError(t, os.RemoveAll(dir))
}

// limits are Options that are no limit for a test.
func limits(paths ...string) archive.Options {
	return archive.Options{Paths: paths, MaxBytes: 1 << 30, MaxFiles: 100_000}
}

func write(t testing.TB, o archive.Options) ([]byte, archive.Summary) {
	t.Helper()
	var b bytes.Buffer
	s, err := archive.Write(t.Context(), &b, o)
	require.NoError(t, err)
	return b.Bytes(), s
}

func restore(t testing.TB, stream []byte, o archive.Options) (archive.Summary, error) {
	t.Helper()
	return archive.Restore(t.Context(), bytes.NewReader(stream), o)
}

// put writes a file, and makes the directories that it is in.
func put(t testing.TB, name, text string) {
	t.Helper()
	require.NoError(t, os.MkdirAll(filepath.Dir(name), 0o755))
	require.NoError(t, os.WriteFile(name, []byte(text), 0o644))
}

// described returns a line for each file below some paths: all that an archive keeps.
func described(t testing.TB, roots ...string) []string {
	t.Helper()
	lines := []string{}
	first := map[uint64]string{}
	for _, root := range roots {
		err := filepath.WalkDir(root, func(name string, _ fs.DirEntry, err error) error {
			if (errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR)) && name == root {
				return nil
			}
			if err != nil {
				return err
			}
			var s unix.Stat_t
			if err := unix.Lstat(name, &s); err != nil {
				return err
			}
			line := fmt.Sprintf("%q %o %d:%d %d.%09d", name, s.Mode, s.Uid, s.Gid, s.Mtim.Sec, s.Mtim.Nsec)
			switch s.Mode & unix.S_IFMT {
			case unix.S_IFLNK:
				target, err := os.Readlink(name)
				if err != nil {
					return err
				}
				line += fmt.Sprintf(" -> %q", target)
			case unix.S_IFREG:
				if s.Nlink > 1 && first[s.Ino] == "" {
					first[s.Ino] = name
				}
				text, err := os.ReadFile(name)
				if err != nil {
					return err
				}
				line += fmt.Sprintf(" %d %x links %d first %q holes %t", s.Size, sha256.Sum256(text), s.Nlink, first[s.Ino],
					s.Blocks*512 < s.Size)
			}
			lines = append(lines, line+attributesOf(name))
			return nil
		})
		require.NoError(t, err)
	}
	return lines
}

func attributesOf(name string) string {
	buffer, value := make([]byte, 64<<10), make([]byte, 64<<10)
	n, err := unix.Llistxattr(name, buffer)
	if err != nil || n == 0 {
		return ""
	}
	names := strings.Split(strings.TrimSuffix(string(buffer[:n]), "\x00"), "\x00")
	slices.Sort(names)
	text := ""
	for _, attribute := range names {
		if n, err := unix.Lgetxattr(name, attribute, value); err == nil && attribute != "security.capability" {
			text += fmt.Sprintf(" %s=%q", attribute, value[:n])
		}
	}
	return text
}

// outcome is what a test's process with a role prints.
type outcome struct {
	Summary archive.Summary
	Took    time.Duration
	// Memory is the most that the process has had, in bytes.
	Memory int64
}

// act writes an archive to the standard output, or restores that of the standard input. The argument is the path. What
// it was is printed to the standard error.
func act(name string) error {
	begun := time.Now()
	var o outcome
	var err error
	if name == "write" {
		o.Summary, err = archive.Write(context.Background(), os.Stdout, limits(os.Args[1]))
	} else {
		o.Summary, err = archive.Restore(context.Background(), os.Stdin, limits(os.Args[1]))
	}
	if err != nil {
		return err
	}
	o.Took = time.Since(begun)
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return err
	}
	_, text, _ := strings.Cut(string(status), "VmHWM:")
	if _, err := fmt.Sscanf(text, "%d kB", &o.Memory); err != nil {
		return err
	}
	o.Memory <<= 10
	return json.NewEncoder(os.Stderr).Encode(o)
}

// program returns a copy of the test's program that another user can run.
func program(t testing.TB) string {
	t.Helper()
	dir := t.TempDir()
	for d := dir; d != os.TempDir() && d != "/"; d = filepath.Dir(d) {
		require.NoError(t, os.Chmod(d, 0o755))
	}
	self, err := os.ReadFile("/proc/self/exe")
	require.NoError(t, err)
	name := filepath.Join(dir, "program")
	require.NoError(t, os.WriteFile(name, self, 0o755))
	return name
}

const unprivileged = 65534

func command(program string, uid uint32, args ...string) *exec.Cmd {
	cmd := exec.Command(program, args...)
	cmd.Dir, cmd.Env = "/", os.Environ()
	if uid != 0 {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
	}
	return cmd
}

// inProcess has a process of a user write or restore an archive.
func inProcess(t testing.TB, program, name, path string, uid uint32, in io.Reader) ([]byte, outcome, error) {
	t.Helper()
	cmd := command(program, uid, path)
	cmd.Env = append(cmd.Env, role+"="+name)
	var out, report bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = in, &out, &report
	err := cmd.Run()
	var o outcome
	if err == nil {
		require.NoError(t, json.Unmarshal(report.Bytes(), &o), report.String())
	} else {
		err = errors.New(strings.TrimSpace(report.String()))
	}
	return out.Bytes(), o, err
}

func stat(t testing.TB, name string) *syscall.Stat_t {
	t.Helper()
	info, err := os.Lstat(name)
	require.NoError(t, err)
	return info.Sys().(*syscall.Stat_t)
}
