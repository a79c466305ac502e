package files

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	"github.com/berth-sandbox/berth/agent/accounts"
	filesystempb "github.com/berth-sandbox/berth/agent/agentpb/filesystem"
	"github.com/berth-sandbox/berth/internal/options"
)

// maxEntries is how many entries one answer of ListDir has at most.
const maxEntries = 100_000

// maxRequest is the size in bytes of a request of filesystem.Filesystem: two paths, with what JSON adds.
const maxRequest = 64 << 10

// Options are what a Service needs.
type Options struct {
	// Account returns the account of a name; the empty name is that of the sandbox's default user. An
	// *accounts.UnknownError refuses the call.
	Account func(name string) (accounts.Account, error)
	// Dir returns the absolute path of the directory in which relative paths begin, or "" for the home
	// of the account. Nil is "".
	Dir func() string
	// Anywhere: what a user may not make is made in directories of root too, see the package comment.
	Anywhere bool
}

// Service serves files and directories. Its methods may be called concurrently.
type Service struct {
	o    Options
	stop chan struct{}

	now func() time.Time

	mu sync.Mutex
	// watchers are those of CreateWatcher. watches counts them, and the streams of WatchDir.
	watchers map[string]*polled
	watches  int
	closed   bool
}

// New makes a Service. Close ends it.
func New(o Options) (*Service, error) {
	if err := options.Require(o, "Account"); err != nil {
		return nil, err
	}
	if o.Dir == nil {
		o.Dir = func() string { return "" }
	}
	return &Service{o: o, stop: make(chan struct{}), watchers: map[string]*polled{}, now: time.Now}, nil
}

// Filesystem returns the handler of filesystem.Filesystem and the path where it is served.
func (s *Service) Filesystem() (string, http.Handler) {
	return filesystempb.NewFilesystemHandler(s, connect.WithReadMaxBytes(maxRequest))
}

func (s *Service) account(name string) (*accounts.Account, error) {
	account, err := s.o.Account(name)
	if err != nil {
		return nil, coded(err)
	}
	return &account, nil
}

// begin returns the account and the path of a call. The user of a call is that of Basic authentication;
// the password is not looked at, because the access token has opened the agent.
func begin[T any](s *Service, r *connect.Request[T], text string) (*accounts.Account, string, error) {
	name, err := accounts.Named(r.Header())
	if err != nil {
		return nil, "", coded(err)
	}
	account, err := s.account(name)
	if err != nil {
		return nil, "", err
	}
	path, err := resolve(text, account, s.o.Dir())
	return account, path, err
}

// describe describes what is at a path.
func describe(account *accounts.Account, path string) (e *filesystempb.EntryInfo, err error) {
	err = as(account, func() (err error) {
		e, err = newDescriber().entry(path)
		return err
	}, filepath.Dir(path))
	return e, coded(err)
}

// Stat describes a file, a directory or a symbolic link.
func (s *Service) Stat(_ context.Context, r *connect.Request[filesystempb.StatRequest],
) (*connect.Response[filesystempb.StatResponse], error) {
	account, path, err := begin(s, r, r.Msg.GetPath())
	if err != nil {
		return nil, err
	}
	e, err := describe(account, path)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&filesystempb.StatResponse{Entry: e}), nil
}

// MakeDir makes a directory and its parents. One that is there is AlreadyExists.
func (s *Service) MakeDir(_ context.Context, r *connect.Request[filesystempb.MakeDirRequest],
) (*connect.Response[filesystempb.MakeDirResponse], error) {
	account, path, err := begin(s, r, r.Msg.GetPath())
	if err != nil {
		return nil, err
	}
	var e *filesystempb.EntryInfo
	create := func() error {
		if err := os.MkdirAll(path, 0o755); err != nil {
			return parentError(err, path)
		}
		e, err = newDescriber().entry(path)
		return err
	}
	err = as(account, func() error {
		// E2B's SDKs take AlreadyExists for an answer, so it must mean a directory.
		switch info, err := os.Stat(path); {
		case err == nil && info.IsDir():
			return problem(connect.CodeAlreadyExists, "directory %s exists", path)
		case err == nil:
			return invalid("%s exists and is not a directory", path)
		case !errors.Is(err, fs.ErrNotExist):
			return parentError(err, path)
		}
		return create()
	}, path)
	if errors.Is(err, fs.ErrPermission) {
		if err = s.makeFirst(account, path, err); err == nil {
			err = as(account, create, path)
		}
	}
	if err != nil {
		return nil, coded(err)
	}
	return connect.NewResponse(&filesystempb.MakeDirResponse{Entry: e}), nil
}

// parentError gives a parent that is a file its sentence. To the kernel it is as if the path did not
// exist.
func parentError(err error, path string) error {
	if errors.Is(err, unix.ENOTDIR) {
		return invalid("%s has a parent that is not a directory", path)
	}
	return err
}

// Move renames a file or directory. It makes the parents of the destination, and replaces a file there
// as rename(2) does.
func (s *Service) Move(_ context.Context, r *connect.Request[filesystempb.MoveRequest],
) (*connect.Response[filesystempb.MoveResponse], error) {
	account, from, err := begin(s, r, r.Msg.GetSource())
	if err != nil {
		return nil, err
	}
	to, err := resolve(r.Msg.GetDestination(), account, s.o.Dir())
	if err != nil {
		return nil, err
	}
	move := func() error {
		if _, err := os.Lstat(from); err != nil {
			return err
		}
		if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
			return parentError(err, to)
		}
		return moveError(from, to, unix.Rename(from, to))
	}
	dirs := []string{filepath.Dir(from), filepath.Dir(to)}
	err = as(account, move, dirs...)
	if errors.Is(err, fs.ErrPermission) {
		var p *place
		if p, err = s.placeFor(account, to, err); err != nil {
			return nil, coded(err)
		}
		defer p.close()
		if len(p.missing) == 1 {
			err = moveError(from, to, p.receive(account, from))
		} else if err = p.makeDirectory(account); err == nil {
			err = as(account, move, dirs...)
		}
	}
	if err != nil {
		return nil, coded(err)
	}
	e, err := describe(account, to)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&filesystempb.MoveResponse{Entry: e}), nil
}

func moveError(from, to string, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.EXDEV):
		return problem(connect.CodeFailedPrecondition,
			"%s and %s are on different file systems; run mv as a command, which copies", from, to)
	case errors.Is(err, unix.EISDIR), errors.Is(err, unix.ENOTEMPTY), errors.Is(err, unix.EEXIST):
		return problem(connect.CodeFailedPrecondition, "directory %s exists", to)
	case errors.Is(err, unix.ENOTDIR):
		return problem(connect.CodeFailedPrecondition, "%s exists and is not a directory", to)
	case errors.Is(err, unix.EINVAL):
		return invalid("%s is below %s, which cannot be moved into itself", to, from)
	}
	return fmt.Errorf("moving %s to %s: %w", from, to, err)
}

// Remove removes a file, a symbolic link, or a directory with everything in it. What is not there is
// removed already.
func (s *Service) Remove(_ context.Context, r *connect.Request[filesystempb.RemoveRequest],
) (*connect.Response[filesystempb.RemoveResponse], error) {
	account, path, err := begin(s, r, r.Msg.GetPath())
	if err != nil {
		return nil, err
	}
	if path == "/" {
		return nil, invalid("/ cannot be removed")
	}
	err = as(account, func() error {
		if err := os.RemoveAll(path); err != nil && !errors.Is(err, unix.ENOTDIR) {
			return err
		}
		return nil
	}, filepath.Dir(path))
	if err != nil {
		return nil, coded(err)
	}
	return connect.NewResponse(&filesystempb.RemoveResponse{}), nil
}

// ListDir describes the entries of a directory, down to a depth. Paths in the answer begin with the
// path of the request. It does not go through symbolic links, but for the path of the request itself.
func (s *Service) ListDir(ctx context.Context, r *connect.Request[filesystempb.ListDirRequest],
) (*connect.Response[filesystempb.ListDirResponse], error) {
	account, path, err := begin(s, r, r.Msg.GetPath())
	if err != nil {
		return nil, err
	}
	depth := max(int(r.Msg.GetDepth()), 1)
	var entries []*filesystempb.EntryInfo
	err = as(account, func() error {
		info, err := os.Stat(path)
		if err != nil {
			return err
		}
		if !info.IsDir() {
			return invalid("%s is not a directory", path)
		}
		entries, err = list(ctx, newDescriber(), path, depth, nil)
		return err
	}, path)
	if err != nil {
		return nil, coded(err)
	}
	return connect.NewResponse(&filesystempb.ListDirResponse{Entries: entries}), nil
}

// list appends the entries below dir to found, in the order of a walk by name.
func list(ctx context.Context, d *describer, dir string, depth int, found []*filesystempb.EntryInfo,
) ([]*filesystempb.EntryInfo, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	entries, err := readDir(dir, maxEntries-len(found))
	if err != nil {
		return nil, err
	}
	for _, child := range entries {
		if strings.HasPrefix(child.Name(), stagingPrefix) {
			continue
		}
		path := filepath.Join(dir, child.Name())
		e, err := d.entry(path)
		if errors.Is(err, fs.ErrNotExist) {
			// Removed since the directory was read.
			continue
		}
		if err != nil {
			return nil, err
		}
		if len(found) == maxEntries {
			return nil, errTooMany
		}
		found = append(found, e)
		if child.IsDir() && depth > 1 && !inAgent(path) {
			below, err := list(ctx, d, path, depth-1, found)
			switch {
			case err == nil:
				found = below
			case errors.Is(err, fs.ErrNotExist), errors.Is(err, fs.ErrPermission):
				// Removed meanwhile, or not the user's to read: the directory itself is listed.
			default:
				return nil, err
			}
		}
	}
	return found, nil
}

var errTooMany = problem(connect.CodeResourceExhausted,
	"more than %d entries: list with a smaller depth, or run find as a command", maxEntries)

// readDir is os.ReadDir for a directory with at most this many entries. Of a larger one it reads no more than
// that, and returns errTooMany.
func readDir(dir string, most int) ([]fs.DirEntry, error) {
	f, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	entries, err := f.ReadDir(most + 1)
	switch {
	case err != nil && !errors.Is(err, io.EOF):
		return nil, err
	case len(entries) > most:
		return nil, errTooMany
	}
	slices.SortFunc(entries, func(a, b fs.DirEntry) int { return strings.Compare(a.Name(), b.Name()) })
	return entries, nil
}
