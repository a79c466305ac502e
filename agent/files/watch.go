package files

import (
	"context"
	"crypto/rand"
	"errors"
	"os"
	"slices"
	"strconv"
	"sync"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	"github.com/berth-sandbox/berth/agent/accounts"
	filesystempb "github.com/berth-sandbox/berth/agent/agentpb/filesystem"
)

// Bounds of watches.
const (
	// maxQueued changes, with maxQueuedBytes in their names, wait for a client. More are lost.
	maxQueued      = 16 << 10
	maxQueuedBytes = 2 << 20
	// maxWatches is the number of watches of both kinds. At that number, a new watch takes the place of
	// the one of CreateWatcher that has not been asked longest, if that is abandonedAfter or more.
	maxWatches     = 64
	abandonedAfter = 10 * time.Minute
)

// errLost is the answer to a client for whom changes were lost.
var errLost = problem(connect.CodeDataLoss,
	"changes were lost, because more came than the client read: look at the directory again, and watch fewer files")

// watch collects the changes in a directory until a client takes them.
type watch struct {
	file *os.File
	// finished is closed when the collecting goroutine has ended.
	finished chan struct{}
	// news has an element when there may be something to take.
	news chan struct{}

	mu     sync.Mutex
	tree   *tree
	queue  []change
	bytes  int
	failed error
}

// newWatch watches a directory. close ends it.
func newWatch(account *accounts.Account, path string, recursive, network bool) (*watch, error) {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, problem(connect.CodeResourceExhausted,
			"the node allows no more watches for this user (fs.inotify.max_user_instances): %w", err)
	}
	w := &watch{file: os.NewFile(uintptr(fd), "inotify"), finished: make(chan struct{}), news: make(chan struct{}, 1)}
	w.tree = &tree{fd: fd, root: path, account: account, recursive: recursive, network: network, report: w.add}
	conn, err := w.file.SyscallConn()
	if err == nil {
		err = w.tree.begin()
	}
	if err != nil {
		_ = w.file.Close()
		return nil, err
	}
	go func() {
		defer close(w.finished)
		// Returns when the file is closed, or when there is nothing more to wait for.
		_ = conn.Read(func(uintptr) bool {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.read()
			return w.failed != nil || w.tree.gone
		})
	}()
	return w, nil
}

// close ends the watch. Afterwards take returns an error.
func (w *watch) close() {
	w.mu.Lock()
	if w.failed == nil {
		// Before the descriptor is closed: its number may then be that of another file.
		w.failed = problem(connect.CodeNotFound, "the watch has ended")
	}
	w.mu.Unlock()
	_ = w.file.Close()
	<-w.finished
}

// read collects what the kernel has. w.mu is held.
func (w *watch) read() {
	if w.failed != nil || w.tree.gone {
		return
	}
	if err := w.tree.read(); err != nil {
		w.failed = err
	}
	if len(w.queue) > 0 || w.tree.lost || w.tree.gone || w.failed != nil {
		select {
		case w.news <- struct{}{}:
		default:
		}
	}
}

// add queues a change. w.mu is held.
func (w *watch) add(c change) {
	if w.tree.lost {
		return
	}
	if n := len(w.queue); n > 0 && c.kind == wrote && w.queue[n-1] == c {
		return
	}
	if len(w.queue) == maxQueued || w.bytes+len(c.name) > maxQueuedBytes {
		w.tree.lost = true
		return
	}
	w.queue, w.bytes = append(w.queue, c), w.bytes+len(c.name)
}

// take returns the changes that have happened before the call and were not taken. After a loss it
// returns errLost once and nothing of what came before that. more is false when none can follow. An
// error that ends the watch comes with the last changes, and again after them.
func (w *watch) take() (changes []change, more bool, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.read()
	lost := w.tree.lost
	changes, w.queue, w.bytes, w.tree.lost = w.queue, nil, 0, false
	if lost {
		return nil, true, errLost
	}
	return changes, w.failed == nil && !w.tree.gone, coded(w.failed)
}

// polled is a watch of CreateWatcher.
type polled struct {
	watch   *watch
	account *accounts.Account
	entries bool
	// asked is when the client was there last.
	asked time.Time
}

// watchOptions is what WatchDirRequest and CreateWatcherRequest have in common.
type watchOptions interface {
	GetPath() string
	GetRecursive() bool
	GetIncludeEntry() bool
	GetAllowNetworkMounts() bool
}

// startWatch begins a watch as a request says.
func (s *Service) startWatch(account *accounts.Account, path string, o watchOptions) (*watch, error) {
	err := as(account, func() error {
		info, err := os.Stat(path)
		if err != nil {
			return err
		}
		if !info.IsDir() {
			return invalid("%s is not a directory", path)
		}
		kind, err := fileSystem(path)
		if err == nil && !o.GetAllowNetworkMounts() && slices.Contains(networkFileSystems, kind) {
			return invalid("%s is on a network file system, where changes that others make are not seen: "+
				"set allow_network_mounts to watch it", path)
		}
		return err
	})
	if err != nil {
		return nil, coded(err)
	}
	w, err := newWatch(account, path, o.GetRecursive(), o.GetAllowNetworkMounts())
	return w, coded(err)
}

// WatchDir streams the changes in a directory. The stream ends without an error when the directory is
// gone.
func (s *Service) WatchDir(ctx context.Context, r *connect.Request[filesystempb.WatchDirRequest],
	stream *connect.ServerStream[filesystempb.WatchDirResponse]) error {
	account, path, err := begin(s, r, r.Msg.GetPath())
	if err != nil {
		return err
	}
	if err := s.reserve(); err != nil {
		return err
	}
	defer s.release()
	w, err := s.startWatch(account, path, r.Msg)
	if err != nil {
		return err
	}
	defer w.close()
	start := &filesystempb.WatchDirResponse_Start{Start: &filesystempb.WatchDirResponse_StartEvent{}}
	if err := stream.Send(&filesystempb.WatchDirResponse{Event: start}); err != nil {
		return err
	}
	interval := keepalive(r.Header().Get("Keepalive-Ping-Interval"))
	timer := time.NewTimer(interval)
	defer timer.Stop()
	for more := true; more; {
		var changes []change
		select {
		case <-ctx.Done():
			return coded(ctx.Err())
		case <-s.stop:
			return problem(connect.CodeUnavailable, "the agent ends")
		case <-timer.C:
			alive := &filesystempb.WatchDirResponse_Keepalive{Keepalive: &filesystempb.WatchDirResponse_KeepAlive{}}
			if err := stream.Send(&filesystempb.WatchDirResponse{Event: alive}); err != nil {
				return err
			}
		case <-w.news:
			changes, more, err = w.take()
		}
		for _, e := range events(account, path, changes, r.Msg.GetIncludeEntry()) {
			event := &filesystempb.WatchDirResponse_Filesystem{Filesystem: e}
			if err := stream.Send(&filesystempb.WatchDirResponse{Event: event}); err != nil {
				return err
			}
		}
		if err != nil {
			return err
		}
		timer.Reset(interval)
	}
	return nil
}

// keepalive returns how often a silent stream says that it lives: what the client asks for in seconds,
// or 90 s.
func keepalive(header string) time.Duration {
	seconds, err := strconv.ParseUint(header, 10, 16)
	if err != nil || seconds == 0 {
		seconds = 90
	}
	return time.Duration(seconds) * time.Second
}

// events describes changes for a client. With entries, each event has the entry as it is now, if it is
// still there.
func events(account *accounts.Account, dir string, changes []change, entries bool) []*filesystempb.FilesystemEvent {
	made := make([]*filesystempb.FilesystemEvent, len(changes))
	for i, c := range changes {
		made[i] = &filesystempb.FilesystemEvent{Name: c.name, Type: c.kind}
	}
	if !entries || len(changes) == 0 {
		return made
	}
	described := map[string]*filesystempb.EntryInfo{}
	// An error is that of the account only: then the events have no entry.
	_ = as(account, func() error {
		d := newDescriber()
		for _, e := range made {
			if e.Type == removed || e.Type == renamed {
				continue
			}
			entry, ok := described[e.Name]
			if !ok {
				entry, _ = d.entry(joined(dir, e.Name))
				described[e.Name] = entry
			}
			e.Entry = entry
		}
		return nil
	})
	return made
}

// joined is filepath.Join for a clean directory and a name relative to it.
func joined(dir, name string) string {
	switch {
	case name == ".":
		return dir
	case dir == "/":
		return dir + name
	}
	return dir + "/" + name
}

// CreateWatcher begins a watch for a client that polls.
func (s *Service) CreateWatcher(_ context.Context, r *connect.Request[filesystempb.CreateWatcherRequest],
) (*connect.Response[filesystempb.CreateWatcherResponse], error) {
	account, path, err := begin(s, r, r.Msg.GetPath())
	if err != nil {
		return nil, err
	}
	if err := s.reserve(); err != nil {
		return nil, err
	}
	w, err := s.startWatch(account, path, r.Msg)
	if err != nil {
		s.release()
		return nil, err
	}
	id := "w" + rand.Text()
	s.mu.Lock()
	closed := s.closed
	if !closed {
		s.watchers[id] = &polled{watch: w, account: account, entries: r.Msg.GetIncludeEntry(), asked: s.now()}
	}
	s.mu.Unlock()
	if closed {
		w.close()
		return nil, problem(connect.CodeUnavailable, "the agent ends")
	}
	return connect.NewResponse(&filesystempb.CreateWatcherResponse{WatcherId: id}), nil
}

// GetWatcherEvents returns the changes since the last call. Each change that was complete when the call
// came is among them.
func (s *Service) GetWatcherEvents(_ context.Context, r *connect.Request[filesystempb.GetWatcherEventsRequest],
) (*connect.Response[filesystempb.GetWatcherEventsResponse], error) {
	s.mu.Lock()
	p := s.watchers[r.Msg.GetWatcherId()]
	if p != nil {
		p.asked = s.now()
	}
	s.mu.Unlock()
	if p == nil {
		return nil, noWatcher(r.Msg.GetWatcherId())
	}
	changes, _, err := p.watch.take()
	if err != nil && len(changes) == 0 {
		return nil, err
	}
	made := events(p.account, p.watch.tree.root, changes, p.entries)
	return connect.NewResponse(&filesystempb.GetWatcherEventsResponse{Events: made}), nil
}

func noWatcher(id string) error {
	return problem(connect.CodeNotFound,
		"there is no watcher %.80q: it was removed, or made room for another after %v without a call", id, abandonedAfter)
}

// RemoveWatcher ends a watch.
func (s *Service) RemoveWatcher(_ context.Context, r *connect.Request[filesystempb.RemoveWatcherRequest],
) (*connect.Response[filesystempb.RemoveWatcherResponse], error) {
	s.mu.Lock()
	p := s.watchers[r.Msg.GetWatcherId()]
	delete(s.watchers, r.Msg.GetWatcherId())
	s.mu.Unlock()
	if p == nil {
		return nil, noWatcher(r.Msg.GetWatcherId())
	}
	s.release()
	p.watch.close()
	return connect.NewResponse(&filesystempb.RemoveWatcherResponse{}), nil
}

// reserve makes place for one watch. release gives it back.
func (s *Service) reserve() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.closed:
		return problem(connect.CodeUnavailable, "the agent ends")
	case s.watches < maxWatches:
		s.watches++
		return nil
	}
	oldest := ""
	for id, p := range s.watchers {
		if oldest == "" || p.asked.Before(s.watchers[oldest].asked) {
			oldest = id
		}
	}
	if oldest == "" || s.now().Sub(s.watchers[oldest].asked) < abandonedAfter {
		return problem(connect.CodeResourceExhausted, "the sandbox has %d watches already", maxWatches)
	}
	abandoned := s.watchers[oldest].watch
	delete(s.watchers, oldest)
	// It takes no lock of s.
	abandoned.close()
	return nil
}

func (s *Service) release() {
	s.mu.Lock()
	s.watches--
	s.mu.Unlock()
}

// Close ends all watches. Calls that come later are refused.
func (s *Service) Close() error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return errors.New("files: closed twice")
	}
	s.closed = true
	watchers := s.watchers
	s.watchers = nil
	close(s.stop)
	s.mu.Unlock()
	for _, p := range watchers {
		p.watch.close()
	}
	return nil
}
