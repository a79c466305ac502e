package files

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/berth-sandbox/berth/agent/accounts"
	pb "github.com/berth-sandbox/berth/agent/agentpb/filesystem"
)

// The agent is root in these tests, and acts for nobody.
func TestCallsHaveTheRightsOfTheirUser(t *testing.T) {
	s := startFor(t, stranger(t))
	secret := filepath.Join(filepath.Dir(s.home), "secret")
	require.NoError(t, os.WriteFile(secret, []byte("secret"), 0o600))
	require.NoError(t, os.Mkdir(secret+"s", 0o700))
	require.NoError(t, os.WriteFile(secret+"s/a", nil, 0o644))
	require.NoError(t, os.WriteFile(s.path("roots"), []byte("x"), 0o644))

	for _, c := range []struct {
		method, path string
		status       int
	}{
		{http.MethodGet, secret, 403},
		{http.MethodGet, secret + "s/a", 403},
		{http.MethodGet, s.path("roots"), 200},
		{http.MethodGet, "/proc/1/environ", 403},
		{http.MethodGet, "/proc/self/mem", 403},
		{http.MethodPost, secret, 403},
		{http.MethodPost, s.path("roots"), 403},
		{http.MethodPost, filepath.Dir(s.home) + "/new", 403},
		{http.MethodPost, "/etc/new/file", 403},
		{http.MethodPost, s.path("a/b"), 200},
	} {
		answer, text := s.do(c.method, pathQuery(c.path), strings.NewReader("x"), "Content-Type", "application/octet-stream")
		require.Equal(t, c.status, answer.StatusCode, "%s %s: %s", c.method, c.path, text)
	}
	for _, path := range []string{s.path("a"), s.path("a/b")} {
		info, err := os.Stat(path)
		require.NoError(t, err)
		require.NotZero(t, info.Sys().(*unixStat).Uid, path)
		require.NotZero(t, info.Sys().(*unixStat).Gid, path)
	}

	denied := func(err error) {
		t.Helper()
		require.Equal(t, connect.CodePermissionDenied, connect.CodeOf(err), "%v", err)
	}
	_, err := call(s, s.calls.ListDir, &pb.ListDirRequest{Path: secret + "s"})
	denied(err)
	_, err = call(s, s.calls.Stat, &pb.StatRequest{Path: secret + "s/a"})
	denied(err)
	_, err = call(s, s.calls.MakeDir, &pb.MakeDirRequest{Path: "/etc/berth"})
	denied(err)
	_, err = call(s, s.calls.Remove, &pb.RemoveRequest{Path: secret})
	denied(err)
	_, err = call(s, s.calls.Move, &pb.MoveRequest{Source: secret, Destination: "mine"})
	denied(err)
	_, err = call(s, s.calls.CreateWatcher, &pb.CreateWatcherRequest{Path: secret + "s"})
	denied(err)
	require.FileExists(t, secret)
}

// The kernel shows a process to its own threads, whatever their rights are.
func TestCallsSeeNothingOfTheAgentsProcess(t *testing.T) {
	for name, account := range map[string]func(*testing.T) accounts.Account{
		"as itself":      func(t *testing.T) accounts.Account { return self(t.TempDir()) },
		"as another one": stranger,
	} {
		t.Run(name, func(t *testing.T) {
			runtime.LockOSThread() // it lives as long as its number is used
			defer runtime.UnlockOSThread()
			s := startFor(t, account(t))
			hidden, err := os.Create(filepath.Join(t.TempDir(), "file"))
			require.NoError(t, err)
			defer hidden.Close()
			fd := fmt.Sprintf("/proc/self/fd/%d", hidden.Fd())
			require.NoError(t, os.Symlink("/proc", s.path("proc")))
			require.NoError(t, os.Symlink("proc/self/net/../maps", s.path("maps")))
			require.NoError(t, os.Symlink(fd, s.path("open")))
			for _, path := range []string{
				"/proc/self/maps", "/proc/thread-self/maps", fmt.Sprintf("/proc/%d/maps", os.Getpid()),
				fmt.Sprintf("/proc/%d/maps", unix.Gettid()), "proc/self/maps", "maps", fd, "open",
				fmt.Sprintf("/dev/fd/%d", hidden.Fd()), "/proc/self/root/etc/passwd", "/proc/self/cwd/identity.go",
			} {
				for _, method := range []string{http.MethodGet, http.MethodPost} {
					answer, text := s.do(method, pathQuery(path), nil, "Content-Type", "application/octet-stream")
					require.Equal(t, http.StatusForbidden, answer.StatusCode, "%s %s: %s", method, path, text)
				}
			}
			for _, path := range []string{"/proc/self/fd", "/dev/fd"} {
				_, err = call(s, s.calls.ListDir, &pb.ListDirRequest{Path: path})
				require.Equal(t, connect.CodePermissionDenied, connect.CodeOf(err), "%v", err)
			}
			_, err = call(s, s.calls.Stat, &pb.StatRequest{Path: fd})
			require.Equal(t, connect.CodePermissionDenied, connect.CodeOf(err), "%v", err)
			list, err := call(s, s.calls.ListDir, &pb.ListDirRequest{Path: "/proc/self", Depth: 2})
			require.NoError(t, err)
			require.NotEmpty(t, list.GetEntries())
			for _, e := range list.GetEntries() {
				require.NotContains(t, e.GetPath(), "/fd/")
			}

			for _, path := range []string{"/proc/mounts", "/proc/net/dev", "/proc/version"} {
				answer, text := s.do(http.MethodGet, pathQuery(path), nil)
				require.Equal(t, http.StatusOK, answer.StatusCode, "%s: %s", path, text)
			}
			entry, err := call(s, s.calls.Stat, &pb.StatRequest{Path: "open"})
			require.NoError(t, err)
			require.Equal(t, fd, entry.GetEntry().GetSymlinkTarget(), "what the link says, not where it leads")
			_, err = call(s, s.calls.Remove, &pb.RemoveRequest{Path: "open"})
			require.NoError(t, err)
			require.NoFileExists(t, s.path("open"))
		})
	}
}

// Invariant: P17
func TestUploadKeepsOwnerAndGroupOfTheFile(t *testing.T) {
	user, root := stranger(t), self(t.TempDir())
	for name, c := range map[string]struct {
		by         *accounts.Account
		group      uint32
		list, same bool // the file has an access control list; it stays the same file
	}{
		"of another user":                   {by: &root, group: user.GID},
		"of another user and another group": {by: &root, group: 33},
		"of a group of the user":            {by: &user, group: 34},
		"of a foreign group":                {by: &user, group: 33, same: true},
		"with an access control list":       {by: &user, group: user.GID, list: true, same: true},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(user.Home, "file")
			require.NoError(t, os.WriteFile(path, []byte("old"), 0o640))
			defer os.Remove(path)
			require.NoError(t, os.Chown(path, int(user.UID), int(c.group)))
			if c.list {
				// Version 2; the owner, user 1, the group, the mask and others.
				list := "\x02\x00\x00\x00" + "\x01\x00\x06\x00\xff\xff\xff\xff" + "\x02\x00\x06\x00\x01\x00\x00\x00" +
					"\x04\x00\x04\x00\xff\xff\xff\xff" + "\x10\x00\x06\x00\xff\xff\xff\xff" + "\x20\x00\x00\x00\xff\xff\xff\xff"
				if err := unix.Setxattr(path, "system.posix_acl_access", []byte(list), 0); err != nil {
					t.Skipf("the file system keeps no access control lists: %v", err)
				}
			}
			before, err := os.Stat(path)
			require.NoError(t, err)
			by := *c.by
			by.Groups = []uint32{34}
			require.NoError(t, startFor(t, user).Write(by, path, []byte("new"), 0))
			after, err := os.Stat(path)
			require.NoError(t, err)
			stat := after.Sys().(*unixStat)
			require.Equal(t, []uint32{user.UID, c.group}, []uint32{stat.Uid, stat.Gid})
			require.Equal(t, before.Mode(), after.Mode())
			require.Equal(t, c.same, os.SameFile(before, after))
			contents, err := os.ReadFile(path)
			require.NoError(t, err)
			require.Equal(t, "new", string(contents))
			left, err := os.ReadDir(user.Home)
			require.NoError(t, err)
			require.Len(t, left, 1)
		})
	}
}

func TestFileThatUserMayWriteInForeignDirectoryIsWrittenInPlace(t *testing.T) {
	s := startFor(t, stranger(t))
	path := filepath.Join(filepath.Dir(s.home), "shared")
	require.NoError(t, os.WriteFile(path, []byte("old contents"), 0o666))
	require.NoError(t, os.Chmod(path, 0o666))
	answer, text := s.post(path, strings.NewReader("new"))
	require.Equal(t, http.StatusOK, answer.StatusCode, text)
	contents, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, "new", string(contents))
	info, err := os.Stat(path)
	require.NoError(t, err)
	require.Zero(t, info.Sys().(*unixStat).Uid, "it stays root's")
}

func TestNoThreadKeepsTheRightsOfAUser(t *testing.T) {
	account := stranger(t)
	account.Groups = []uint32{account.GID, 12345}
	groups := func() []int {
		g, err := unix.Getgroups()
		require.NoError(t, err)
		return g
	}
	was := groups()
	var all sync.WaitGroup
	for range 200 {
		all.Go(func() {
			failed := errors.New("what f returns")
			err := as(&account, func() error {
				status, _ := os.ReadFile("/proc/thread-self/status")
				if fields := statusFields(string(status)); fields["Uid"] != "0\t0\t0\t"+fsID(account.UID) ||
					fields["Gid"] != "0\t0\t0\t"+fsID(account.GID) || fields["CapEff"] != "0000000000000000" ||
					!strings.Contains(fields["Groups"], "12345") {
					return errors.New(string(status))
				}
				return failed
			})
			assert.Equal(t, failed, err)
			assert.Equal(t, failed, making(&account, func() error {
				status, _ := os.ReadFile("/proc/thread-self/status")
				const override = "0000000000000002"
				if fields := statusFields(string(status)); fields["CapEff"] != override || fields["CapPrm"] != override {
					return errors.New(string(status))
				}
				return failed
			}))
		})
	}
	all.Wait()
	require.Panics(t, func() { _ = as(&account, func() error { panic("of f") }) })

	// Every thread that there is, and new ones.
	var busy sync.WaitGroup
	for range 4 * runtime.GOMAXPROCS(0) {
		busy.Go(func() { _ = os.WriteFile("/dev/null", nil, 0); runtime.Gosched() })
	}
	busy.Wait()
	tasks, err := filepath.Glob("/proc/self/task/*/status")
	require.NoError(t, err)
	for _, task := range tasks {
		status, err := os.ReadFile(task)
		if err != nil {
			continue // it has ended
		}
		// A thread that has ended its goroutine is on its way out; the first one of a process waits.
		if fields := statusFields(string(status)); fields["Uid"] != "0\t0\t0\t0" {
			require.Contains(t, []string{"0000000000000000", "0000000000000002"}, fields["CapPrm"],
				"a thread that acted for a user is the agent again")
		}
	}
	require.Equal(t, was, groups())
}

func statusFields(status string) map[string]string {
	fields := map[string]string{}
	for line := range strings.Lines(status) {
		name, value, _ := strings.Cut(line, ":")
		fields[name] = strings.TrimSpace(value)
	}
	return fields
}

func fsID(id uint32) string { return strconv.FormatUint(uint64(id), 10) }

// unprivileged is set in a process that runs TestAgentThatIsNotRootActsAsItself.
const unprivileged = "BERTH_TEST_UNPRIVILEGED"

func TestAgentThatIsNotRootActsAsItself(t *testing.T) {
	if os.Getenv(unprivileged) == "" && os.Getuid() == 0 {
		account := stranger(t)
		program := filepath.Join(account.Home, "test")
		executable, err := os.Executable()
		require.NoError(t, err)
		binary, err := os.ReadFile(executable)
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(program, binary, 0o755))
		command := exec.Command(program, "-test.run=^"+t.Name()+"$", "-test.v")
		command.Dir, command.Env = account.Home, append(os.Environ(), unprivileged+"=1", "TMPDIR="+account.Home)
		command.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: account.UID, Gid: account.GID}}
		out, err := command.CombinedOutput()
		require.NoError(t, err, "%s", out)
		require.Contains(t, string(out), "--- PASS")
		return
	}
	s := start(t)
	answer, text := s.post("a/b", strings.NewReader("x"))
	require.Equal(t, http.StatusOK, answer.StatusCode, text)
	answer, _ = s.do(http.MethodGet, pathQuery("/etc/shadow"), nil)
	require.Equal(t, http.StatusForbidden, answer.StatusCode)
	// It lacks the capabilities to act for another user, and does not act as itself instead.
	other := accounts.Account{Name: "other", UID: 4242, GID: 4242, Switched: true}
	called := false
	err := as(&other, func() error { called = true; return nil })
	require.ErrorIs(t, err, unix.EPERM)
	require.ErrorContains(t, err, `user "other"`)
	require.False(t, called)
	s.o.Anywhere = true
	answer, text = s.post("/etc/berth/new", strings.NewReader("x"))
	require.Equal(t, http.StatusForbidden, answer.StatusCode)
	require.Contains(t, text, "the agent does not run as root, so spec.agent.newFiles of the pool changes nothing")
}

func TestRefusedUploadNamesTheFileThatWasAsked(t *testing.T) {
	s := startFor(t, stranger(t))
	s.put("theirs/file", "")
	const advice = `; spec.agent.newFiles: Anywhere of the pool lets user "nobody" make it`
	for name, says := range map[string]string{
		"theirs/new":     s.path("theirs/new") + ": permission denied" + advice,
		"theirs/dir/new": "directory " + s.path("theirs/dir") + " cannot be made: permission denied" + advice,
	} {
		answer, text := s.post(name, strings.NewReader("x"))
		require.Equal(t, http.StatusForbidden, answer.StatusCode, text)
		require.JSONEq(t, fmt.Sprintf(`{"code":403,"message":%q}`, says), text)
	}
}
