package archive_test

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/berth-sandbox/berth/agent/archive"
)

// role is set in the environment of a test's process that is to do one thing, as another user or to be measured.
const role = "BERTH_TEST_ROLE"

func TestMain(m *testing.M) {
	if name := os.Getenv(role); name != "" {
		if err := roles[name](os.Args[1]); err != nil {
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
	return home
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

// roles are what a test's process can do with a directory.
var roles = map[string]func(string) error{}

func stat(t testing.TB, name string) *syscall.Stat_t {
	t.Helper()
	info, err := os.Lstat(name)
	require.NoError(t, err)
	return info.Sys().(*syscall.Stat_t)
}
