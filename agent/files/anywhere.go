package files

import (
	"cmp"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	"github.com/berth-sandbox/berth/agent/accounts"
)

// place is a directory of root in which a call makes a name that is missing, although its user may not.
type place struct {
	// dir is what the path names. It was found with the rights of the user, and through no symbolic link.
	dir *os.File
	// missing are the names behind dir that the path has, one at least.
	missing []string
}

// making is [as] for what is made in a [place]. Besides the rights of the account, f may change every directory. So
// f resolves no path: it names entries of open directories, and it only makes names that are new.
func making(account *accounts.Account, f func() error) error {
	return withRights(account, 1<<unix.CAP_DAC_OVERRIDE, f)
}

// placeFor finds the place for a path. denied is how the user's own try to make it has failed. The error is denied,
// with the reason or the advice that helps the caller.
func (s *Service) placeFor(account *accounts.Account, name string, denied error) (*place, error) {
	if !account.Switched {
		if s.o.Anywhere && os.Geteuid() != 0 {
			return nil, because(denied, "the agent does not run as root, so spec.agent.newFiles of the pool changes nothing")
		}
		return nil, denied
	}
	var p place
	err := as(account, func() (err error) {
		p, err = find(name)
		return err
	})
	if err == nil {
		err = makesIn(p.dir)
	}
	switch {
	case err == nil && len(p.missing) > 0 && s.o.Anywhere:
		return &p, nil
	case err == nil && len(p.missing) > 0:
		err = because(denied, "spec.agent.newFiles: Anywhere of the pool lets user %q make it", account.Name)
	case errors.Is(err, errNoPlace) && s.o.Anywhere:
		err = because(denied, "%w", err)
	default:
		err = denied
	}
	if p.dir != nil {
		p.close()
	}
	return nil, err
}

// because returns the refusal of a call with its reason or with advice.
func because(denied error, format string, a ...any) error {
	return problem(connect.CodePermissionDenied, "%w; "+format, append([]any{words(denied)}, a...)...)
}

// errNoPlace is wrapped by the reasons why a path has no place.
var errNoPlace = errors.New("the agent makes files for users in directories of root only, " +
	"not in those of the kernel, and through no symbolic link")

// find follows a path as far as it exists.
func find(name string) (place, error) {
	names := slices.DeleteFunc(strings.Split(name, "/"), func(n string) bool { return n == "" })
	at := "/"
	fd, err := unix.Open(at, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return place{}, &fs.PathError{Op: "open", Path: at, Err: err}
	}
	dir := os.NewFile(uintptr(fd), at)
	for i, n := range names {
		at = filepath.Join(at, n)
		fd, err := unix.Openat(int(dir.Fd()), n, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		if errors.Is(err, unix.ENOENT) {
			return place{dir, names[i:]}, nil
		}
		_ = dir.Close()
		if err != nil {
			return place{}, &fs.PathError{Op: "open", Path: at, Err: err}
		}
		dir = os.NewFile(uintptr(fd), at)
		if info, err := dir.Stat(); err != nil || info.Mode()&fs.ModeSymlink != 0 {
			_ = dir.Close()
			return place{}, cmp.Or(err, fmt.Errorf("%w: %s is one", errNoPlace, at))
		}
	}
	return place{dir: dir}, nil
}

// kernelTrees are the directories below which the kernel and devices are, also where a tmpfs is between.
var kernelTrees = regexp.MustCompile(`^/(dev|proc|sys)(/|$)`)

// makesIn returns why the agent makes nothing in a directory, or nil.
func makesIn(dir *os.File) error {
	var s unix.Statfs_t
	info, err := dir.Stat()
	if err == nil {
		err = unix.Fstatfs(int(dir.Fd()), &s)
	}
	switch {
	case err != nil:
		return err
	case info.Sys().(*unixStat).Uid != 0, kernelTrees.MatchString(dir.Name()),
		slices.Contains(kernelFileSystems, int64(uint32(s.Type))):
		return fmt.Errorf("%w: %s is not such a directory", errNoPlace, dir.Name())
	}
	return nil
}

func (p *place) close() { _ = p.dir.Close() }

// makeFirst makes the first missing directory on a path in its place. The user can make those below it.
func (s *Service) makeFirst(account *accounts.Account, name string, denied error) error {
	p, err := s.placeFor(account, name, denied)
	if err != nil {
		return err
	}
	defer p.close()
	return p.makeDirectory(account)
}

// openAnywhere is openAs for a path that the user may not make.
func (s *Service) openAnywhere(account *accounts.Account, name string, denied error) (*target, error) {
	p, err := s.placeFor(account, name, denied)
	switch {
	case err != nil:
		return nil, err
	case len(p.missing) == 1:
		return p.stage(account)
	}
	defer p.close()
	if err := p.makeDirectory(account); err != nil {
		return nil, err
	}
	return openAs(account, name)
}

// path returns the path of the first missing name.
func (p *place) path() string { return filepath.Join(p.dir.Name(), p.missing[0]) }

// makeDirectory makes the first missing directory.
func (p *place) makeDirectory(account *accounts.Account) error {
	return making(account, func() error {
		err := unix.Mkdirat(int(p.dir.Fd()), p.missing[0], 0o755)
		if err == nil || errors.Is(err, unix.EEXIST) {
			return nil
		}
		return &fs.PathError{Op: "mkdir", Path: p.path(), Err: err}
	})
}

// stage prepares the writing of the only missing name.
func (p *place) stage(account *accounts.Account) (*target, error) {
	t := &target{name: p.path(), mode: 0o644, dir: p.dir, staged: filepath.Join(p.dir.Name(), newPrefix+rand.Text())}
	err := making(account, func() error {
		flags := unix.O_WRONLY | unix.O_CREAT | unix.O_EXCL | unix.O_NOFOLLOW | unix.O_CLOEXEC
		fd, err := unix.Openat(int(p.dir.Fd()), filepath.Base(t.staged), flags, 0o600)
		if err != nil {
			return &fs.PathError{Op: "open", Path: t.name, Err: err}
		}
		t.file = os.NewFile(uintptr(fd), t.staged)
		return nil
	})
	if err != nil {
		p.close()
	}
	return t, err
}

// receive moves a file or directory to the only missing name. The user moves it into a directory of its own in the
// place first, so that the kernel decides whether the user may take it from where it is.
func (p *place) receive(account *accounts.Account, from string) error {
	to, own, name := int(p.dir.Fd()), stagingPrefix+rand.Text(), p.missing[0]
	if err := making(account, func() error { return unix.Mkdirat(to, own, 0o700) }); err != nil {
		return err
	}
	defer func() {
		// It stays if the sandbox has put something else there.
		_ = making(account, func() error { return unix.Unlinkat(to, own, unix.AT_REMOVEDIR) })
	}()
	var way *os.File
	err := as(account, func() error {
		fd, err := unix.Openat(to, own, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		if err != nil {
			return err
		}
		way = os.NewFile(uintptr(fd), own)
		return unix.Renameat(unix.AT_FDCWD, from, fd, name)
	}, filepath.Dir(from))
	defer way.Close() // nil has nothing to close
	if err != nil {
		return err
	}
	through := int(way.Fd())
	err = making(account, func() error { return unix.Renameat2(through, name, to, name, unix.RENAME_NOREPLACE) })
	if err != nil {
		back := func() error { return unix.Renameat2(through, name, unix.AT_FDCWD, from, unix.RENAME_NOREPLACE) }
		if lost := as(account, back, filepath.Dir(from)); lost != nil {
			return fmt.Errorf("%w; it is %s now", err, filepath.Join(p.dir.Name(), own, name))
		}
	}
	return err
}
