package files

import (
	"bytes"
	"fmt"
	"io"
	"io/fs"
	"mime/multipart"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/berth-sandbox/berth/agent/accounts"
	pb "github.com/berth-sandbox/berth/agent/agentpb/filesystem"
)

// roots is a sandbox whose agent makes new files anywhere, and a directory of root that everyone may enter.
func roots(t *testing.T) (s *sandbox, dir string) {
	t.Helper()
	s = startFor(t, stranger(t))
	s.o.Anywhere = true
	return s, filepath.Dir(s.home)
}

// owned describes everything below a directory: type, rights, owner and contents.
func owned(t *testing.T, dir string) map[string]string {
	t.Helper()
	found := map[string]string{}
	require.NoError(t, filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := e.Info()
		if err != nil {
			return err
		}
		stat := info.Sys().(*unixStat)
		text := fmt.Sprintf("%v %d:%d", info.Mode(), stat.Uid, stat.Gid)
		if info.Mode().IsRegular() {
			contents, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			text += " " + string(contents)
		}
		found[strings.TrimPrefix(strings.TrimPrefix(path, dir), "/")] = text
		return nil
	}))
	return found
}

// Invariant: P17
func TestNewFilesInDirectoriesOfRootBelongToTheUser(t *testing.T) {
	s, dir := roots(t)
	before := owned(t, dir)
	answer, text := s.post(dir+"/file", strings.NewReader("x"))
	require.Equal(t, http.StatusOK, answer.StatusCode, text)
	answer, text = s.post(dir+"/app/src/main.py", strings.NewReader("y"), "X-Metadata-Kind", "source")
	require.Equal(t, http.StatusOK, answer.StatusCode, text)
	var form bytes.Buffer
	w := multipart.NewWriter(&form)
	for _, name := range []string{"/form/a", "/b"} {
		part, err := w.CreateFormFile("file", dir+name)
		require.NoError(t, err)
		_, _ = io.WriteString(part, name)
	}
	require.NoError(t, w.Close())
	answer, text = s.do(http.MethodPost, "", &form, "Content-Type", w.FormDataContentType())
	require.Equal(t, http.StatusOK, answer.StatusCode, text)
	for _, path := range []string{"/dir", "/deep/er"} {
		made, err := call(s, s.calls.MakeDir, &pb.MakeDirRequest{Path: dir + path})
		require.NoError(t, err)
		require.Equal(t, "nobody", made.GetEntry().GetOwner())
		_, err = call(s, s.calls.MakeDir, &pb.MakeDirRequest{Path: dir + path})
		require.Equal(t, connect.CodeAlreadyExists, connect.CodeOf(err), "%v", err)
	}
	for from, to := range map[string]string{"m1": "/moved", "m2": "/under/moved"} {
		answer, text = s.post(from, strings.NewReader("m"))
		require.Equal(t, http.StatusOK, answer.StatusCode, text)
		_, err := call(s, s.calls.Move, &pb.MoveRequest{Source: from, Destination: dir + to})
		require.NoError(t, err)
	}
	// A directory of the user in one of root. Moving it away would change the latter.
	_, err := call(s, s.calls.Move, &pb.MoveRequest{Source: dir + "/dir", Destination: dir + "/directory"})
	require.Equal(t, connect.CodePermissionDenied, connect.CodeOf(err), "%v", err)
	require.NoError(t, s.Write(accounts.Account{Name: "nobody", UID: 65534, GID: 65534, Home: s.home, Switched: true},
		dir+"/claimed/file", []byte("z"), 0o600))

	user := " 65534:65534"
	made := owned(t, dir)
	for path, was := range before {
		require.Equal(t, was, made[path], path)
		delete(made, path)
	}
	require.Equal(t, map[string]string{
		"file": "-rw-r--r--" + user + " x",
		"app":  "drwxr-xr-x" + user, "app/src": "drwxr-xr-x" + user, "app/src/main.py": "-rw-r--r--" + user + " y",
		"form": "drwxr-xr-x" + user, "form/a": "-rw-r--r--" + user + " /form/a", "b": "-rw-r--r--" + user + " /b",
		"dir": "drwxr-xr-x" + user, "deep": "drwxr-xr-x" + user, "deep/er": "drwxr-xr-x" + user,
		"moved": "-rw-r--r--" + user + " m", "under": "drwxr-xr-x" + user, "under/moved": "-rw-r--r--" + user + " m",
		"claimed": "drwxr-xr-x" + user, "claimed/file": "-rw-------" + user + " z",
	}, made)
	require.Equal(t, map[string]string{"kind": "source"}, metadataAt(dir+"/app/src/main.py"))
	answer, text = s.post(dir+"/file", strings.NewReader("new"))
	require.Equal(t, http.StatusOK, answer.StatusCode, text)

	s.o.Anywhere = false
	answer, text = s.post(dir+"/other", strings.NewReader("x"))
	require.Equal(t, http.StatusForbidden, answer.StatusCode)
	require.Contains(t, text, "spec.agent.newFiles: Anywhere of the pool lets user")
}

// Invariant: P17
func TestNothingOfOthersIsMadeOrChanged(t *testing.T) {
	s, dir := roots(t)
	user := s.home
	other := filepath.Join(dir, "other")
	for _, d := range []string{other, dir + "/closed", dir + "/sticky", dir + "/roots", user + "/roots"} {
		require.NoError(t, os.Mkdir(d, 0o755))
	}
	require.NoError(t, os.Chown(other, 4242, 4242))
	require.NoError(t, os.Chmod(dir+"/closed", 0o700))
	require.NoError(t, os.Chmod(dir+"/sticky", 0o777|fs.ModeSticky))
	for path, uid := range map[string]int{
		dir + "/file": 0, dir + "/sticky/theirs": 4242, dir + "/sticky/mine": 65534, other + "/file": 4242,
		user + "/mine": 65534, user + "/readonly/mine": 65534,
	} {
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
		require.NoError(t, os.WriteFile(path, []byte("old"), 0o600))
		require.NoError(t, os.Chown(path, uid, uid))
	}
	require.NoError(t, os.Chown(user+"/readonly", 65534, 65534))
	require.NoError(t, os.Chmod(user+"/readonly", 0o555))
	require.NoError(t, os.Link(dir+"/file", dir+"/hard"))
	require.NoError(t, os.Link(dir+"/file", user+"/hard"))
	require.NoError(t, unix.Mkfifo(dir+"/fifo", 0o644))
	require.NoError(t, os.Symlink(dir+"/roots", dir+"/link"))
	require.NoError(t, os.Symlink(dir+"/roots", user+"/link"))
	require.NoError(t, os.Symlink(dir+"/roots/new", user+"/dangling"))
	require.NoError(t, os.Symlink(dir+"/roots/new", dir+"/dangling"))
	before := owned(t, dir)

	for _, path := range []string{
		dir + "/file", dir + "/hard", user + "/hard", dir + "/fifo", dir + "/fifo/x", dir + "/file/x",
		other + "/new", other + "/new/x", other + "/file", dir + "/closed/new",
		dir + "/sticky/theirs", dir + "/sticky/theirs/x", user + "/readonly/new", user + "/readonly/new/x",
		dir + "/link/new", user + "/link/new", user + "/link/new/x",
		user + "/dangling", dir + "/dangling", dir + "/dangling/x",
		user + "/roots/../../closed/new", dir + "/roots/../other/new", "//" + other + "//new",
		"/proc/berth", "/proc/self/root" + dir + "/roots/new", "/proc/1/root" + dir + "/roots/new", "/proc/self/cwd/new",
		"/sys/berth/new", "/sys/fs/cgroup/berth/new", "/root/berth",
		"/dev/berth", "/dev/berth/new", "/dev/pts/berth", "/dev/fd/berth",
	} {
		for method, do := range map[string]func() error{
			"write": func() error {
				if answer, text := s.post(path, strings.NewReader("new")); answer.StatusCode == http.StatusOK {
					return nil
				} else if answer.StatusCode >= 500 {
					t.Errorf("write %s: %s", path, text)
				}
				return fs.ErrPermission
			},
			"make": func() error {
				_, err := call(s, s.calls.MakeDir, &pb.MakeDirRequest{Path: path})
				return err
			},
			"move": func() error {
				_, err := call(s, s.calls.Move, &pb.MoveRequest{Source: user + "/mine", Destination: path})
				return err
			},
		} {
			if method == "move" && filepath.Dir(path) == user {
				continue // a name in the user's own directory, which another file may take
			}
			require.Error(t, do(), "%s %s", method, path)
		}
	}
	for _, from := range []string{
		dir + "/file", dir + "/roots", dir + "/link", dir + "/fifo", dir + "/sticky/theirs", other + "/file",
		user + "/roots", user + "/readonly/mine", user + "/missing",
	} {
		for _, to := range []string{"/roots/moved", "/roots/under/moved"} {
			_, err := call(s, s.calls.Move, &pb.MoveRequest{Source: from, Destination: dir + to})
			require.Error(t, err, "%s to %s", from, to)
			_ = os.Remove(dir + "/roots/under") // E2B makes the parents first, too
		}
	}
	require.Equal(t, before, owned(t, dir))
	for _, path := range []string{"/dev/berth", "/sys/berth", "/sys/fs/cgroup/berth", "/root/berth"} {
		require.NoFileExists(t, path)
	}
	for path, says := range map[string]string{
		other + "/new":     other + " is not such a directory",
		user + "/link/new": user + "/link is one", user + "/dangling": user + "/dangling is one",
	} {
		_, text := s.post(path, strings.NewReader("new"))
		require.Contains(t, text, errNoPlace.Error()+": "+says)
	}
}

// The body of an upload takes as long as its client wants. What others make meanwhile is theirs.
//
// Invariant: P17
func TestSlowUploadReplacesNothingMadeMeanwhile(t *testing.T) {
	for name, make := range map[string]func(path, elsewhere string) error{
		"a file":          func(path, _ string) error { return os.WriteFile(path, []byte("theirs"), 0o600) },
		"a directory":     func(path, _ string) error { return os.Mkdir(path, 0o700) },
		"a symbolic link": func(path, elsewhere string) error { return os.Symlink(elsewhere, path) },
	} {
		t.Run(name, func(t *testing.T) {
			s, dir := roots(t)
			elsewhere := t.TempDir()
			body, w := io.Pipe()
			done := sync.WaitGroup{}
			done.Go(func() {
				defer w.Close()
				_, _ = io.WriteString(w, "x")
				assert.Eventually(t, func() bool {
					staged, _ := filepath.Glob(dir + "/" + stagingPrefix + "*")
					return len(staged) == 1
				}, time.Minute, time.Millisecond)
				_ = make(dir+"/new", elsewhere+"/new")
			})
			before := owned(t, dir)
			answer, text := s.post(dir+"/new", body)
			done.Wait()
			require.Equal(t, http.StatusConflict, answer.StatusCode, text)
			after := owned(t, dir)
			require.Contains(t, after["new"], " 0:0")
			delete(after, "new")
			require.Equal(t, before, after, "the staged file is gone")
			require.Empty(t, owned(t, elsewhere+"/.")["new"])
		})
	}
}

// A program of the sandbox changes the path all the time: its directory, a link to one of root, a directory of root
// in its own.
//
// Invariant: P17
func TestSwappedDirectoriesLeadToNoOther(t *testing.T) {
	s, dir := roots(t)
	target := filepath.Join(dir, "target")
	require.NoError(t, os.Mkdir(target, 0o755))
	require.NoError(t, os.WriteFile(target+"/file", []byte("old"), 0o600))
	for _, d := range []string{"path", "held"} {
		require.NoError(t, os.Mkdir(s.path(d), 0o755))
		require.NoError(t, os.Chown(s.path(d), 65534, 65534))
	}
	require.NoError(t, os.Mkdir(s.path("held/roots"), 0o755))
	require.NoError(t, os.Symlink(target, s.path("link")))
	before := owned(t, target)
	stop := make(chan struct{})
	var swaps sync.WaitGroup
	swaps.Go(func() {
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
			}
			other := s.path([]string{"link", "held"}[i/2%2]) // there and back
			assert.NoError(t, unix.Renameat2(unix.AT_FDCWD, s.path("path"), unix.AT_FDCWD, other, unix.RENAME_EXCHANGE))
		}
	})
	user := accounts.Account{Name: "nobody", UID: 65534, GID: 65534, Home: s.home, Switched: true}
	count := 300
	if testing.Short() {
		count = 50
	}
	for i := range count {
		path := s.path(fmt.Sprintf("path/new%d", i))
		_, _ = s.post(path, strings.NewReader("x"))
		_, _ = call(s, s.calls.MakeDir, &pb.MakeDirRequest{Path: path + "/a/b"})
		require.NoError(t, s.Write(user, "mine", nil, 0))
		_, _ = call(s, s.calls.Move, &pb.MoveRequest{Source: s.path("mine"), Destination: path + "moved"})
		_, _ = s.post(s.path(fmt.Sprintf("path/roots/new%d", i)), strings.NewReader("x"))
	}
	close(stop)
	swaps.Wait()
	require.Equal(t, before, owned(t, target))
}

func TestMoveThatFailsLeavesTheFileInItsPlace(t *testing.T) {
	s, dir := roots(t)
	user := accounts.Account{Name: "nobody", UID: 65534, GID: 65534, Home: s.home, Switched: true}
	require.NoError(t, s.Write(user, "mine", []byte("x"), 0))
	p, err := s.placeFor(&user, dir+"/new", fs.ErrPermission)
	require.NoError(t, err)
	defer p.close()
	require.NoError(t, os.WriteFile(dir+"/new", []byte("theirs"), 0o600))
	before := owned(t, dir)
	require.ErrorIs(t, p.receive(&user, s.path("mine")), unix.EEXIST)
	require.Equal(t, before, owned(t, dir))
}
