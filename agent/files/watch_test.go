package files

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
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
	"github.com/berth-sandbox/berth/internal/pipetest"
)

// watcher is one of CreateWatcher.
type watcher struct {
	*sandbox
	id string
}

func (s *sandbox) watch(r *pb.CreateWatcherRequest) *watcher {
	s.t.Helper()
	made, err := call(s, s.json.CreateWatcher, r)
	require.NoError(s.t, err)
	return &watcher{s, made.GetWatcherId()}
}

func (w *watcher) take() ([]*pb.FilesystemEvent, error) {
	r, err := call(w.sandbox, w.json.GetWatcherEvents, &pb.GetWatcherEventsRequest{WatcherId: w.id})
	if err != nil {
		return nil, err
	}
	return r.GetEvents(), nil
}

// events returns what the watcher has as lines such as "CREATE a/b".
func (w *watcher) events() []string {
	w.t.Helper()
	events, err := w.take()
	require.NoError(w.t, err)
	return eventLines(events)
}

func eventLines(events []*pb.FilesystemEvent) []string {
	lines := make([]string, len(events))
	for i, e := range events {
		lines[i] = strings.TrimPrefix(e.GetType().String(), "EVENT_TYPE_") + " " + e.GetName()
	}
	return lines
}

func (s *sandbox) upload(path, contents string) {
	s.t.Helper()
	answer, text := s.post(path, strings.NewReader(contents))
	require.Equal(s.t, http.StatusOK, answer.StatusCode, text)
}

func TestWatchReportsEachChangeBeforeTheCall(t *testing.T) {
	ok := func(s *sandbox, err error) { s.t.Helper(); require.NoError(s.t, err) }
	for name, c := range map[string]struct {
		flat bool
		do   func(s *sandbox)
		want string
	}{
		"create, write, chmod, remove": {do: func(s *sandbox) {
			s.put("a", "x")
			ok(s, os.Chmod(s.path("a"), 0o600))
			ok(s, os.Remove(s.path("a")))
		}, want: "CREATE a, WRITE a, CHMOD a, REMOVE a"},
		"rename": {
			do: func(s *sandbox) { ok(s, os.Rename(s.path("old"), s.path("new"))) }, want: "RENAME old, CREATE new",
		},
		"upload of a new file":  {do: func(s *sandbox) { s.upload("a", "x") }, want: "CREATE a, CHMOD a, WRITE a"},
		"upload of an old file": {do: func(s *sandbox) { s.upload("old", "x") }, want: "CHMOD old, WRITE old"},
		"upload into a directory": {do: func(s *sandbox) { s.upload("dir/a", "x") },
			want: "CREATE dir/a, CHMOD dir/a, WRITE dir/a"},
		"upload into a directory, not recursive": {flat: true, do: func(s *sandbox) { s.upload("dir/a", "x") }},
		"existing directory below": {
			do: func(s *sandbox) { s.put("dir/sub/a", "x") }, want: "CREATE dir/sub/a, WRITE dir/sub/a",
		},
		"new directory, not recursive": {flat: true, do: func(s *sandbox) { s.put("n/a", "") }, want: "CREATE n"},
		"directory that is moved within": {do: func(s *sandbox) {
			ok(s, os.Rename(s.path("dir"), s.path("moved")))
			s.put("moved/sub/a", "")
		}, want: "RENAME dir, CREATE moved, CREATE moved/sub/a"},
		"directory that is moved out": {do: func(s *sandbox) {
			out := filepath.Join(filepath.Dir(s.home), "out")
			ok(s, os.Rename(s.path("dir"), out))
			_ = os.WriteFile(out+"/unseen", nil, 0o600)
		}, want: "RENAME dir"},
		"directory that is removed": {do: func(s *sandbox) { ok(s, os.RemoveAll(s.path("dir"))) },
			want: "REMOVE dir/sub, REMOVE dir"},
		"link to a directory": {do: func(s *sandbox) {
			ok(s, os.Symlink("dir", s.path("link")))
			s.put("link/a", "")
		}, want: "CREATE link, CREATE dir/a"},
	} {
		t.Run(name, func(t *testing.T) {
			s := start(t)
			s.put("old", "old")
			require.NoError(t, os.MkdirAll(s.path("dir/sub"), 0o755))
			w := s.watch(&pb.CreateWatcherRequest{Recursive: !c.flat})
			c.do(s)
			got := w.events()
			if name == "directory that is moved out" {
				// Whether this is seen depends on when the watch learns that the directory is gone.
				got = without(got, "CREATE dir/unseen")
			}
			require.Equal(t, c.want, strings.Join(got, ", "))
			require.Empty(t, w.events())
		})
	}
}

func without(lines []string, line string) []string {
	kept := []string{}
	for _, l := range lines {
		if l != line {
			kept = append(kept, l)
		}
	}
	return kept
}

func TestRecursiveWatchHasNoGapInNewDirectories(t *testing.T) {
	s := start(t)
	w := s.watch(&pb.CreateWatcherRequest{Recursive: true})
	const trees, depth = 20, 5
	var makers sync.WaitGroup
	for i := range trees {
		makers.Go(func() {
			path := fmt.Sprintf("t%d", i)
			for range depth {
				path += "/d"
				assert.NoError(t, os.MkdirAll(s.path(path), 0o755))
				assert.NoError(t, os.WriteFile(s.path(path+"/f"), []byte("x"), 0o600))
			}
		})
	}
	makers.Wait()
	count := map[string]int{}
	for _, line := range w.events() {
		count[line]++
	}
	for i := range trees {
		path := fmt.Sprintf("t%d", i)
		require.Equal(t, 1, count["CREATE "+path])
		for range depth {
			path += "/d"
			require.Equal(t, 1, count["CREATE "+path], path)
			require.Equal(t, 1, count["CREATE "+path+"/f"], path)
			require.NotZero(t, count["WRITE "+path+"/f"], path)
		}
	}
	// And each of them is watched.
	for i := range trees {
		path := fmt.Sprintf("t%d%s", i, strings.Repeat("/d", depth))
		s.put(path+"/last", "")
		require.Equal(t, []string{"CREATE " + path + "/last"}, w.events())
	}
}

// A directory is made in a watched one, which is moved before the agent has read any event.
func TestContentsOfAMovedNewDirectoryAreReported(t *testing.T) {
	root := t.TempDir()
	path := func(name string) string { return filepath.Join(root, name) }
	require.NoError(t, os.MkdirAll(path("old/in"), 0o755))
	require.NoError(t, os.WriteFile(path("old/in/known"), []byte("x"), 0o600))
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	require.NoError(t, err)
	defer unix.Close(fd)
	count := map[string]int{}
	w := &tree{fd: fd, root: root, account: &accounts.Account{}, recursive: true, report: func(c change) {
		count[strings.TrimPrefix(c.kind.String(), "EVENT_TYPE_")+" "+c.name]++
	}}
	require.NoError(t, w.begin())
	require.NoError(t, os.MkdirAll(path("old/q/deep"), 0o755))
	require.NoError(t, os.WriteFile(path("old/q/deep/r"), []byte("1"), 0o600))
	require.NoError(t, os.Rename(path("old"), path("new")))
	require.NoError(t, os.WriteFile(path("new/q/deep/t"), []byte("2"), 0o600))
	require.NoError(t, w.read())
	require.Equal(t, map[string]int{
		"CREATE old/q": 1, "RENAME old": 1, "CREATE new": 1, "CREATE new/q/deep": 1,
		"CREATE new/q/deep/r": 1, "WRITE new/q/deep/r": 1, "CREATE new/q/deep/t": 1, "WRITE new/q/deep/t": 1,
	}, count)
	require.NoError(t, os.WriteFile(path("new/q/deep/later"), nil, 0o600))
	require.NoError(t, w.read())
	require.Equal(t, 1, count["CREATE new/q/deep/later"])
}

func TestLossIsReportedOnceAndTheWatchGoesOn(t *testing.T) {
	s := start(t)
	w := s.watch(&pb.CreateWatcherRequest{Recursive: true})
	for i := range maxQueued/2 + 10 {
		// Two changes each. A pair of files, because two writes of one file in a row are one change.
		s.put(fmt.Sprintf("f%d", i%2), "")
		require.NoError(t, os.Remove(s.path(fmt.Sprintf("f%d", i%2))))
	}
	require.NoError(t, os.Mkdir(s.path("dir"), 0o755))
	_, err := w.take()
	require.Equal(t, connect.CodeDataLoss, connect.CodeOf(err), "%v", err)
	s.put("dir/a", "")
	require.Equal(t, []string{"CREATE dir/a"}, w.events())
}

// The client reads nothing while the changes happen, and its connection has no buffer.
func TestSlowStreamGetsEachChangeInOrderOrALoss(t *testing.T) {
	s := start(t)
	for _, c := range []struct {
		pairs int // of two changes
		lost  bool
	}{{5000, false}, {3 * maxQueued / 4, true}} {
		listener := pipetest.Listen()
		mux := http.NewServeMux()
		mux.Handle(s.Filesystem())
		server := &http.Server{Handler: mux}
		served := make(chan error, 1)
		go func() { served <- server.Serve(listener) }()
		transport := &http.Transport{DialContext: func(context.Context, string, string) (net.Conn, error) {
			return listener.Connect(), nil
		}}
		calls := pb.NewFilesystemClient(&http.Client{Transport: transport}, "http://pipe")
		stream, err := calls.WatchDir(t.Context(), connect.NewRequest(&pb.WatchDirRequest{}))
		require.NoError(t, err)
		require.True(t, stream.Receive())
		for i := range c.pairs {
			name := s.path(strconv.Itoa(i)) // with the fewest system calls
			require.NoError(t, unix.Mknod(name, unix.S_IFREG|0o600, 0))
			require.NoError(t, unix.Unlink(name))
		}
		n := 0
		for (n < 2*c.pairs || c.lost) && stream.Receive() {
			if e := stream.Msg().GetFilesystem(); e != nil {
				kind := []string{"CREATE", "REMOVE"}[n%2]
				require.Equal(t, []string{fmt.Sprintf("%s %d", kind, n/2)}, eventLines([]*pb.FilesystemEvent{e}))
				n++
			}
		}
		if c.lost {
			require.Equal(t, connect.CodeDataLoss, connect.CodeOf(stream.Err()), "%v", stream.Err())
			require.Less(t, n, 2*c.pairs)
		} else {
			require.NoError(t, stream.Err())
			require.Equal(t, 2*c.pairs, n)
		}
		t.Logf("%d changes, %d were sent", 2*c.pairs, n)
		_ = stream.Close()
		transport.CloseIdleConnections()
		listener.HangUp()
		require.NoError(t, server.Close())
		<-served
	}
	require.Eventually(t, func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.watches == 0
	}, time.Minute, time.Millisecond)
}

func TestEventsCarryTheEntryThatIsStillThere(t *testing.T) {
	s := start(t)
	w := s.watch(&pb.CreateWatcherRequest{IncludeEntry: true})
	s.put("a", "12345")
	s.put("b", "")
	require.NoError(t, os.Remove(s.path("b")))
	events, err := w.take()
	require.NoError(t, err)
	require.Equal(t, []string{"CREATE a", "WRITE a", "CREATE b", "REMOVE b"}, eventLines(events))
	require.EqualValues(t, 5, events[0].GetEntry().GetSize())
	require.Equal(t, s.path("a"), events[1].GetEntry().GetPath())
	require.Nil(t, events[2].Entry)
	require.Nil(t, events[3].Entry)
}

func TestStreamBeginsKeepsAliveAndEndsWithTheDirectory(t *testing.T) {
	s := start(t)
	require.NoError(t, os.Mkdir(s.path("dir"), 0o755))
	r := connect.NewRequest(&pb.WatchDirRequest{Path: "dir", Recursive: true})
	r.Header().Set("Keepalive-Ping-Interval", "1")
	stream, err := s.json.WatchDir(t.Context(), r)
	require.NoError(t, err)
	defer stream.Close()
	require.True(t, stream.Receive(), "%v", stream.Err())
	require.NotNil(t, stream.Msg().GetStart())
	s.put("dir/new/a", "")
	var lines []string
	for len(lines) < 2 && stream.Receive() {
		if e := stream.Msg().GetFilesystem(); e != nil {
			lines = append(lines, eventLines([]*pb.FilesystemEvent{e})...)
		}
	}
	require.Equal(t, []string{"CREATE new", "CREATE new/a"}, lines)
	require.True(t, stream.Receive())
	require.NotNil(t, stream.Msg().GetKeepalive())
	require.NoError(t, os.RemoveAll(s.path("dir")))
	last := ""
	for stream.Receive() {
		if e := stream.Msg().GetFilesystem(); e != nil {
			last = eventLines([]*pb.FilesystemEvent{e})[0]
		}
	}
	require.NoError(t, stream.Err())
	require.Equal(t, "REMOVE .", last)
}

func TestStreamEndsWithItsClientAndWithTheAgent(t *testing.T) {
	s := start(t)
	streams := func() int {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.watches
	}
	ctx, cancel := context.WithCancel(t.Context())
	stream, err := s.calls.WatchDir(ctx, connect.NewRequest(&pb.WatchDirRequest{}))
	require.NoError(t, err)
	require.True(t, stream.Receive())
	require.Equal(t, 1, streams())
	cancel()
	require.Eventually(t, func() bool { return streams() == 0 }, time.Minute, time.Millisecond)
	_ = stream.Close()

	again, err := s.calls.WatchDir(t.Context(), connect.NewRequest(&pb.WatchDirRequest{}))
	require.NoError(t, err)
	require.True(t, again.Receive())
	other, err := New(s.o)
	require.NoError(t, err)
	require.NoError(t, other.Close())
	close(s.stop)
	require.False(t, again.Receive())
	require.Equal(t, connect.CodeUnavailable, connect.CodeOf(again.Err()))
	_ = again.Close()
	s.stop = make(chan struct{})
}

func TestAbandonedWatcherMakesRoomForANewOne(t *testing.T) {
	s := start(t)
	now := time.Now()
	s.now = func() time.Time { return now }
	var all []*watcher
	for range maxWatches {
		all = append(all, s.watch(&pb.CreateWatcherRequest{}))
	}
	now = now.Add(abandonedAfter - 1)
	_, err := call(s, s.calls.CreateWatcher, &pb.CreateWatcherRequest{})
	require.Equal(t, connect.CodeResourceExhausted, connect.CodeOf(err), "%v", err)
	for i, w := range all {
		if i != 7 {
			require.Empty(t, w.events())
		}
	}
	now = now.Add(1)
	added := s.watch(&pb.CreateWatcherRequest{})
	require.Empty(t, added.events())
	_, err = all[7].take()
	require.Equal(t, connect.CodeNotFound, connect.CodeOf(err), "%v", err)
	for i, w := range append(all, added) {
		_, err := call(w.sandbox, w.calls.RemoveWatcher, &pb.RemoveWatcherRequest{WatcherId: w.id})
		require.Equal(t, i == 7, err != nil, "%v", err)
	}
	require.Zero(t, s.watches)
}

func TestWatchLeavesOutWhatTheUserMayNotRead(t *testing.T) {
	s := startFor(t, stranger(t))
	require.NoError(t, os.Mkdir(s.path("closed"), 0o700))
	require.NoError(t, os.Mkdir(s.path("open"), 0o755))
	w := s.watch(&pb.CreateWatcherRequest{Recursive: true})
	s.put("closed/a", "")
	s.put("open/a", "")
	require.NoError(t, os.Mkdir(s.path("closed2"), 0o700))
	s.put("closed2/a", "")
	require.Equal(t, []string{"CREATE open/a", "CREATE closed2"}, w.events())
}
