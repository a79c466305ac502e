package lockfile

import (
	crand "crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/util/rand"
)

const (
	suffix    = ".lock"
	temporary = ".new"
	// secretFile has the secret of the gateway.
	secretFile = "gateway.secret"
	secretSize = 32
)

// routerID matches the IDs that New creates. Other programs have lock files too.
var routerID = regexp.MustCompile(`^router-[a-z0-9]{20}$`)

// File is the lock file of this process. Its methods may be called concurrently.
type File struct {
	id   string
	dir  string
	lock *os.File
	// secret is that of the gateway.
	secret []byte

	mu   sync.Mutex
	dead map[string]*os.File // by router ID, locked by this process
}

// New creates an ID and locks its file in dir, which must exist on a local file system.
func New(dir string) (*File, error) {
	f := &File{id: "router-" + rand.String(20), dir: dir, dead: map[string]*os.File{}}
	// The file gets its final name only when it is locked, so that no other router can take
	// the lock first.
	lock, err := os.OpenFile(f.path(f.id)+temporary, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock file of this router: %w", err)
	}
	err = unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if err == nil {
		err = os.Rename(lock.Name(), f.path(f.id))
	}
	if err != nil {
		err = fmt.Errorf("lock file of this router, %s: %w", lock.Name(), err)
		return nil, errors.Join(err, lock.Close(), os.Remove(lock.Name()))
	}
	f.lock = lock
	if f.secret, err = secretOf(dir); err != nil {
		return nil, errors.Join(err, f.Close(false))
	}
	return f, nil
}

// secretOf returns the secret of the gateway. The first router makes it.
func secretOf(dir string) ([]byte, error) {
	path := filepath.Join(dir, secretFile)
	made := make([]byte, secretSize)
	_, _ = crand.Read(made) // it never fails
	// The file gets its name with all of its content. A link does not replace the file of another router
	// that is starting too.
	file, err := os.CreateTemp(dir, secretFile+temporary)
	if err == nil {
		_, err = file.Write(made)
		err = errors.Join(err, file.Close())
		if linked := os.Link(file.Name(), path); err == nil && !errors.Is(linked, fs.ErrExist) {
			err = linked
		}
		err = errors.Join(err, os.Remove(file.Name()))
	}
	if err != nil {
		return nil, fmt.Errorf("secret of this gateway, %s: %w", path, err)
	}
	secret, err := os.ReadFile(path)
	if err == nil && len(secret) != secretSize {
		err = fmt.Errorf("%d bytes, not %d: delete it and restart all routers of this gateway", len(secret), secretSize)
	}
	if err != nil {
		return nil, fmt.Errorf("secret of this gateway, %s: %w", path, err)
	}
	return secret, nil
}

// Secret is what all routers of this gateway have, and no other process: 32 random bytes. It proves to the
// allocator that a router which Dead lists is one of this gateway.
func (f *File) Secret() []byte { return f.secret }

func (f *File) path(id string) string { return filepath.Join(f.dir, id+suffix) }

// ID is random and identifies this process: 27 characters of [a-z0-9-].
func (f *File) ID() string { return f.id }

// Dead tries to take the locks of all other routers, and returns the sorted IDs of those
// whose locks this process has. A file that cannot be read counts as a living router.
func (f *File) Dead() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	entries, _ := os.ReadDir(f.dir) // after an error no router is listed anew
	for _, e := range entries {
		id, ok := strings.CutSuffix(e.Name(), suffix)
		if !ok || !routerID.MatchString(id) || id == f.id || f.dead[id] != nil {
			continue
		}
		if lock := tryLock(f.path(id)); lock != nil {
			f.dead[id] = lock
		}
	}
	return slices.Sorted(maps.Keys(f.dead))
}

// tryLock returns the file with its lock. It returns nil if another process has the lock, or
// has removed the file since it was opened: such a router must not be reported.
func tryLock(path string) *os.File {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return nil
	}
	var stat unix.Stat_t
	if unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) != nil ||
		unix.Fstat(int(f.Fd()), &stat) != nil || stat.Nlink == 0 {
		f.Close()
		return nil
	}
	return f
}

// Forget removes the files of routers that Dead has listed and that the allocator has
// recorded as dead.
func (f *File) Forget(ids []string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	var errs []error
	for _, id := range ids {
		if lock := f.dead[id]; lock != nil {
			if err := os.Remove(f.path(id)); err != nil && !errors.Is(err, fs.ErrNotExist) {
				errs = append(errs, err)
				continue
			}
			delete(f.dead, id)
			errs = append(errs, lock.Close())
		}
	}
	return errors.Join(errs...)
}

// Close releases all locks. If clean is true, Envoy has read every answer of this router, and
// its file stays for other routers to find. If clean is false, Close removes the file first,
// so that no router reports this one as dead, and the allocator waits until it has expired.
func (f *File) Close(clean bool) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	var errs []error
	if !clean {
		errs = append(errs, os.Remove(f.path(f.id)))
	}
	errs = append(errs, f.lock.Close())
	for _, lock := range f.dead {
		errs = append(errs, lock.Close())
	}
	return errors.Join(errs...)
}
