// Package instance gives a router process its name, and finds out which of the
// routers that stood beside the same Envoy have ended.
//
// A process holds a lock on the file <ID>.lock in a directory that all routers of one
// Envoy share, from before it is known to anybody until it has ended, however that
// happens: the kernel lets go of the lock with the process. Whoever gets the lock of
// another one has the proof that it can answer Envoy no more, and the allocator need
// not wait until what it knew must have gone stale.
//
// What it has answered Envoy may read later, if Envoy was stopped in that moment. A
// process that ends in order and knows of such answers takes its file away. One that
// is killed cannot: that Envoy is not stopped just then, for longer than the stall
// budget in the window, is assumed (envoy.StallBudget).
package instance

import (
	"errors"
	"fmt"
	"io/fs"
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
)

// named is what New calls an instance. Other programs have lock files, too.
var named = regexp.MustCompile(`^router-[a-z0-9]{20}$`)

// Instance is this process. Its methods may be called concurrently.
type Instance struct {
	id   string
	dir  string
	lock *os.File

	mu   sync.Mutex
	dead map[string]*os.File // with their locks, which are ours now
}

// New names this process and locks its file in dir, which must be there and on a
// file system of this machine.
func New(dir string) (*Instance, error) {
	i := &Instance{id: "router-" + rand.String(20), dir: dir, dead: map[string]*os.File{}}
	// Under another name until it is locked, so that nobody takes the lock meanwhile.
	lock, err := os.OpenFile(i.path(i.id)+temporary, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock file of this instance: %w", err)
	}
	err = unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if err == nil {
		err = os.Rename(lock.Name(), i.path(i.id))
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("lock file of this instance, %s: %w", lock.Name(), err), lock.Close(), os.Remove(lock.Name()))
	}
	i.lock = lock
	return i, nil
}

func (i *Instance) path(id string) string { return filepath.Join(i.dir, id+suffix) }

// ID is random, made once for a process: 27 characters of [a-z0-9-].
func (i *Instance) ID() string { return i.id }

// Dead lists, in order, the instances whose locks this process has, after it has tried to take
// those of all others. What it cannot read it takes for alive.
func (i *Instance) Dead() []string {
	i.mu.Lock()
	defer i.mu.Unlock()
	entries, err := os.ReadDir(i.dir)
	if err != nil {
		entries = nil
	}
	for _, e := range entries {
		id, ok := strings.CutSuffix(e.Name(), suffix)
		if !ok || !named.MatchString(id) || id == i.id || i.dead[id] != nil {
			continue
		}
		if lock := take(i.path(id)); lock != nil {
			i.dead[id] = lock
		}
	}
	var ids []string
	for id := range i.dead {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	return ids
}

// take returns the file with its lock, or nil if somebody has it, or had it and has taken
// the file away since it was opened: that one may not be reported.
func take(path string) *os.File {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return nil
	}
	if unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) != nil {
		f.Close()
		return nil
	}
	var there unix.Stat_t
	if unix.Fstat(int(f.Fd()), &there) != nil || there.Nlink == 0 {
		f.Close()
		return nil
	}
	return f
}

// Forget removes the files of instances that Dead has listed: the allocator knows.
func (i *Instance) Forget(ids []string) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	var errs []error
	for _, id := range ids {
		if lock := i.dead[id]; lock != nil {
			if err := os.Remove(i.path(id)); err != nil && !errors.Is(err, fs.ErrNotExist) {
				errs = append(errs, err)
				continue
			}
			delete(i.dead, id)
			errs = append(errs, lock.Close())
		}
	}
	return errors.Join(errs...)
}

// Close lets go of all locks. The file of this instance stays for others to find, if
// clean says that its end is all that there is to know: Envoy has read every answer.
// If not, nobody may report it, and the allocator waits until it has expired.
func (i *Instance) Close(clean bool) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	var errs []error
	if !clean {
		errs = append(errs, os.Remove(i.path(i.id)))
	}
	errs = append(errs, i.lock.Close())
	for _, lock := range i.dead {
		errs = append(errs, lock.Close())
	}
	return errors.Join(errs...)
}
