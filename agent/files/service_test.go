package files

import (
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	pb "github.com/berth-sandbox/berth/agent/agentpb/filesystem"
)

const noError = connect.Code(0)

func TestCallsAnswerTheCodesOfTheSDKs(t *testing.T) {
	type request func(c pb.FilesystemClient, s *sandbox) error
	stat := func(path string) request {
		return func(c pb.FilesystemClient, s *sandbox) error {
			_, err := call(s, c.Stat, &pb.StatRequest{Path: path})
			return err
		}
	}
	makeDir := func(path string) request {
		return func(c pb.FilesystemClient, s *sandbox) error {
			_, err := call(s, c.MakeDir, &pb.MakeDirRequest{Path: path})
			return err
		}
	}
	move := func(from, to string) request {
		return func(c pb.FilesystemClient, s *sandbox) error {
			_, err := call(s, c.Move, &pb.MoveRequest{Source: from, Destination: to})
			return err
		}
	}
	remove := func(path string) request {
		return func(c pb.FilesystemClient, s *sandbox) error {
			_, err := call(s, c.Remove, &pb.RemoveRequest{Path: path})
			return err
		}
	}
	list := func(path string) request {
		return func(c pb.FilesystemClient, s *sandbox) error {
			_, err := call(s, c.ListDir, &pb.ListDirRequest{Path: path})
			return err
		}
	}
	watcher := func(path string) request {
		return func(c pb.FilesystemClient, s *sandbox) error {
			_, err := call(s, c.CreateWatcher, &pb.CreateWatcherRequest{Path: path})
			return err
		}
	}
	user := func(header string) request {
		return func(c pb.FilesystemClient, s *sandbox) error {
			r := connect.NewRequest(&pb.StatRequest{})
			r.Header().Set("Authorization", header)
			_, err := c.Stat(s.t.Context(), r)
			return err
		}
	}
	for name, c := range map[string]struct {
		call request
		want connect.Code
	}{
		"stat file":              {stat("dir/file"), noError},
		"stat nothing":           {stat("none"), connect.CodeNotFound},
		"stat below file":        {stat("dir/file/x"), connect.CodeNotFound},
		"stat NUL":               {stat("a\x00"), connect.CodeInvalidArgument},
		"stat long name":         {stat(strings.Repeat("a", 256)), connect.CodeInvalidArgument},
		"stat loop":              {stat("loop/x"), connect.CodeInvalidArgument},
		"stat loop itself":       {stat("loop"), noError},
		"make dir":               {makeDir("new/below"), noError},
		"make dir again":         {makeDir("dir"), connect.CodeAlreadyExists},
		"make dir through link":  {makeDir("dirlink"), connect.CodeAlreadyExists},
		"make dir at file":       {makeDir("dir/file"), connect.CodeInvalidArgument},
		"make dir below file":    {makeDir("dir/file/x"), connect.CodeInvalidArgument},
		"make dir in /proc":      {makeDir("/proc/x"), connect.CodeNotFound},
		"move":                   {move("dir/file", "other/parent/file"), noError},
		"move over file":         {move("dir/file", "file2"), noError},
		"move nothing":           {move("none", "x"), connect.CodeNotFound},
		"move file over dir":     {move("dir/file", "full"), connect.CodeFailedPrecondition},
		"move dir over full dir": {move("dir", "full"), connect.CodeFailedPrecondition},
		"move dir over file":     {move("dir", "file2"), connect.CodeFailedPrecondition},
		"move into itself":       {move("dir", "dir/x/y"), connect.CodeInvalidArgument},
		"move below file":        {move("dir", "file2/x"), connect.CodeInvalidArgument},
		"move to other system":   {move("file2", "/dev/shm/berth-files-test"), connect.CodeFailedPrecondition},
		"remove file":            {remove("dir/file"), noError},
		"remove full dir":        {remove("full"), noError},
		"remove nothing":         {remove("none/x"), noError},
		"remove below file":      {remove("file2/x"), noError},
		"remove root":            {remove("/"), connect.CodeInvalidArgument},
		"list":                   {list(""), noError},
		"list nothing":           {list("none"), connect.CodeNotFound},
		"list file":              {list("file2"), connect.CodeInvalidArgument},
		"watch nothing":          {watcher("none"), connect.CodeNotFound},
		"watch file":             {watcher("file2"), connect.CodeInvalidArgument},
		"known user":             {user("Basic bWU6"), noError},
		"unknown user":           {user("Basic eHg6"), connect.CodeUnauthenticated},
		"no Basic":               {user("Bearer x"), connect.CodeUnauthenticated},
	} {
		t.Run(name, func(t *testing.T) {
			s := start(t)
			for codec, client := range map[string]pb.FilesystemClient{"protobuf": s.calls, "JSON": s.json} {
				require.NoError(t, os.RemoveAll(s.home))
				s.put("dir/file", "x")
				s.put("full/file", "x")
				s.put("file2", "x")
				require.NoError(t, os.Symlink("loop", s.path("loop")))
				require.NoError(t, os.Symlink("dir", s.path("dirlink")))
				err := c.call(client, s)
				if c.want == noError {
					require.NoError(t, err, codec)
				} else {
					require.Error(t, err)
					require.Equal(t, c.want, connect.CodeOf(err), "%s: %v", codec, err)
				}
			}
		})
	}
}

func TestEntryHasEveryField(t *testing.T) {
	s := start(t)
	s.put("dir/file", "12345")
	require.NoError(t, os.Chmod(s.path("dir/file"), 0o640))
	modified := time.Unix(1_600_000_000, 5000)
	require.NoError(t, os.Chtimes(s.path("dir/file"), modified, modified))
	require.NoError(t, os.Symlink("dir/file", s.path("link")))
	require.NoError(t, os.Symlink("nowhere", s.path("broken")))
	require.NoError(t, unix.Mkfifo(s.path("fifo"), 0o600))
	require.NoError(t, unix.Lsetxattr(s.path("dir/file"), "user.e2b.author", []byte("me"), 0))
	require.NoError(t, unix.Lsetxattr(s.path("dir/file"), "user.other", []byte("hidden"), 0))
	entry := func(path string) *pb.EntryInfo {
		r, err := call(s, s.json.Stat, &pb.StatRequest{Path: path})
		require.NoError(t, err)
		return r.GetEntry()
	}
	names := newDescriber()
	owner := cached(names.users, uint32(os.Getuid()), userName)

	file := entry("dir/file")
	require.Equal(t, "file", file.GetName())
	require.Equal(t, s.path("dir/file"), file.GetPath())
	require.Equal(t, pb.FileType_FILE_TYPE_FILE, file.GetType())
	require.EqualValues(t, 5, file.GetSize())
	require.EqualValues(t, 0o640, file.GetMode())
	require.Equal(t, "-rw-r-----", file.GetPermissions())
	require.Equal(t, owner, file.GetOwner())
	require.NotEmpty(t, file.GetGroup())
	require.True(t, modified.Equal(file.GetModifiedTime().AsTime()))
	require.Nil(t, file.SymlinkTarget)
	require.Equal(t, map[string]string{"author": "me"}, file.GetMetadata())

	dir := entry("dir")
	require.Equal(t, pb.FileType_FILE_TYPE_DIRECTORY, dir.GetType())
	require.Equal(t, "drwxr-xr-x", dir.GetPermissions())

	link := entry("link")
	require.True(t, link.GetIsSymlink())
	require.Equal(t, pb.FileType_FILE_TYPE_FILE, link.GetType())
	require.EqualValues(t, 0o640, link.GetMode())
	require.Equal(t, s.path("dir/file"), link.GetSymlinkTarget())

	broken := entry("broken")
	require.Equal(t, pb.FileType_FILE_TYPE_SYMLINK, broken.GetType())
	require.Equal(t, "nowhere", broken.GetSymlinkTarget())
	require.Equal(t, pb.FileType_FILE_TYPE_UNSPECIFIED, entry("fifo").GetType())
}

func TestListGoesAsDeepAsAsked(t *testing.T) {
	s := start(t)
	s.put("b/c/d/e", "")
	s.put("a", "")
	s.put(stagingPrefix+"x", "")
	require.NoError(t, os.Symlink("b", s.path("link")))
	list := func(path string, depth uint32) (found []string) {
		r, err := call(s, s.calls.ListDir, &pb.ListDirRequest{Path: path, Depth: depth})
		require.NoError(t, err)
		for _, e := range r.GetEntries() {
			name, err := filepath.Rel(s.home, e.GetPath())
			require.NoError(t, err)
			require.Equal(t, filepath.Base(name), e.GetName())
			found = append(found, name)
		}
		return found
	}
	require.Equal(t, []string{"a", "b", "link"}, list("", 0))
	require.Equal(t, []string{"a", "b", "b/c", "link"}, list("", 2))
	require.Equal(t, []string{"a", "b", "b/c", "b/c/d", "b/c/d/e", "link"}, list("", 99))
	require.Equal(t, []string{"link/c", "link/c/d"}, list("link", 2), "the path of the request goes through links")
}

func TestLargeDirectoryIsRefusedBeforeItIsRead(t *testing.T) {
	s := start(t)
	for _, name := range []string{"c", "a", "b"} {
		s.put(name, "")
	}
	entries, err := readDir(s.home, 3)
	require.NoError(t, err)
	require.Len(t, entries, 3)
	require.Equal(t, "a", entries[0].Name())
	for _, most := range []int{2, 0} {
		_, err = readDir(s.home, most)
		require.ErrorIs(t, err, errTooMany)
	}
}

func TestClosedServiceRefusesWatches(t *testing.T) {
	s, err := New(Options{Account: start(t).o.Account})
	require.NoError(t, err)
	require.NoError(t, s.Close())
	_, err = s.CreateWatcher(t.Context(), connect.NewRequest(&pb.CreateWatcherRequest{}))
	require.Equal(t, connect.CodeUnavailable, connect.CodeOf(err))
	require.Error(t, s.Close())
	_, err = New(Options{})
	require.Error(t, err)
	require.Equal(t, http.StatusInsufficientStorage, statuses[connect.CodeOf(coded(unix.ENOSPC))])
}
