package files

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	"github.com/berth-sandbox/berth/agent/accounts"
	filesystempb "github.com/berth-sandbox/berth/agent/agentpb/filesystem"
)

// Kinds of changes.
const (
	created = filesystempb.EventType_EVENT_TYPE_CREATE
	wrote   = filesystempb.EventType_EVENT_TYPE_WRITE
	removed = filesystempb.EventType_EVENT_TYPE_REMOVE
	renamed = filesystempb.EventType_EVENT_TYPE_RENAME
	chmod   = filesystempb.EventType_EVENT_TYPE_CHMOD
)

// change is one event: a kind, and a path relative to the watched directory.
type change struct {
	kind filesystempb.EventType
	name string
}

const watchMask = unix.IN_CREATE | unix.IN_MODIFY | unix.IN_ATTRIB | unix.IN_DELETE | unix.IN_DELETE_SELF |
	unix.IN_MOVED_FROM | unix.IN_MOVED_TO | unix.IN_MOVE_SELF | unix.IN_ONLYDIR

// tree turns the events of one inotify instance into changes. It is not safe for concurrent use.
type tree struct {
	fd        int
	root      string
	account   *accounts.Account
	recursive bool
	// network: directories on file systems of the network are watched too.
	network bool
	// report receives each change.
	report func(change)

	// nodes are the watched directories by watch descriptor.
	nodes map[int]*node
	top   *node
	// moved are directories that have left their name, by cookie, and nil for files that are about to
	// replace another one. The event with their new name follows. Until then a directory keeps its name in
	// the node, but not in its parent.
	moved map[uint32]*node
	// found are entries that a scan has reported. Their own event may follow; it is the same change.
	found map[entryKey]struct{}
	// gone: the watched directory exists no more.
	gone bool
	// lost: the kernel has dropped events.
	lost bool
	// begun: a directory that is not watched yet is new, and nothing in it has been reported.
	begun bool
}

// node is a watched directory. The node of the watched directory itself has no parent.
type node struct {
	wd     int
	name   string
	parent *node
	// children are the watched directories in it, by name.
	children map[string]*node
}

type entryKey struct {
	in   *node
	name string
}

// below returns the path of an entry relative to the watched directory.
func (n *node) below(name string) string {
	for ; n.parent != nil; n = n.parent {
		name = n.name + "/" + name
	}
	return name
}

func (n *node) isBelow(other *node) bool {
	for ; n != nil; n = n.parent {
		if n == other {
			return true
		}
	}
	return false
}

// begin watches the directory and, if the tree is recursive, every directory in it. It reports nothing.
func (t *tree) begin() error {
	t.begun = false
	defer func() { t.begun = true }()
	t.nodes, t.moved, t.found = map[int]*node{}, map[uint32]*node{}, map[entryKey]struct{}{}
	return as(t.account, func() error {
		wd, err := unix.InotifyAddWatch(t.fd, t.root, watchMask)
		if err != nil {
			return watchError(t.root, err)
		}
		t.top = &node{wd: wd, children: map[string]*node{}}
		t.nodes[wd] = t.top
		if !t.recursive {
			return nil
		}
		return t.scan(t.top, t.root, false)
	}, t.root)
}

func watchError(path string, err error) error {
	if errors.Is(err, unix.ENOSPC) {
		return problem(connect.CodeResourceExhausted,
			"watching %s: the node allows no more watched directories for this user (fs.inotify.max_user_watches)", path)
	}
	return &fs.PathError{Op: "watch", Path: path, Err: err}
}

// scan watches every directory below a watched one. If fresh, nothing in it has been reported: scan
// reports every entry as created, and a file with contents as written.
func (t *tree) scan(n *node, path string, fresh bool) error {
	entries, err := os.ReadDir(path)
	if err != nil {
		// Removed or renamed meanwhile, which its own event says; or not the user's to read.
		return nil
	}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), stagingPrefix) {
			continue
		}
		if fresh {
			t.report(change{created, n.below(e.Name())})
			t.found[entryKey{n, e.Name()}] = struct{}{}
			if info, err := e.Info(); err == nil && info.Mode().IsRegular() && info.Size() > 0 {
				t.report(change{wrote, n.below(e.Name())})
			}
		}
		if e.IsDir() {
			if err := t.add(n, e.Name()); err != nil {
				return err
			}
		}
	}
	return nil
}

// add watches a directory in a watched one. Symbolic links are not followed.
func (t *tree) add(parent *node, name string) error {
	path := filepath.Join(t.root, parent.below(name))
	if !t.crosses(parent, path) {
		return nil
	}
	wd, err := unix.InotifyAddWatch(t.fd, path, watchMask|unix.IN_DONT_FOLLOW)
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.EACCES):
		return nil
	case err != nil:
		return watchError(path, err)
	}
	n, fresh := t.nodes[wd], false
	switch {
	case n == nil:
		n = &node{wd: wd, children: map[string]*node{}}
		t.nodes[wd], fresh = n, t.begun
	case parent.isBelow(n):
		// A bind mount of a parent: it would have no end.
		return nil
	default:
		n.detach()
	}
	n.attach(parent, name)
	return t.scan(n, path, fresh)
}

// crosses reports whether the directory at path belongs to the watch: the file systems of the kernel,
// which deliver no events, do not, and those of the network only if the client wants them.
func (t *tree) crosses(parent *node, path string) bool {
	var here, there unix.Stat_t
	if unix.Lstat(filepath.Join(t.root, parent.below("")), &here) != nil || unix.Lstat(path, &there) != nil {
		return false
	}
	if here.Dev == there.Dev {
		return true
	}
	kind, err := fileSystem(path)
	return err == nil && !slices.Contains(kernelFileSystems, kind) &&
		(t.network || !slices.Contains(networkFileSystems, kind))
}

func (n *node) attach(parent *node, name string) {
	n.parent, n.name = parent, name
	parent.children[name] = n
}

func (n *node) detach() {
	if n.parent != nil && n.parent.children[n.name] == n {
		delete(n.parent.children, n.name)
	}
	n.parent = nil
}

// forget stops watching a directory and those below it.
func (t *tree) forget(n *node) {
	n.detach()
	_, _ = unix.InotifyRmWatch(t.fd, uint32(n.wd))
	delete(t.nodes, n.wd)
	for _, child := range n.children {
		t.forget(child)
	}
}

// read handles all events that the kernel has.
func (t *tree) read() error {
	buffer := copyBuffers.Get().(*[copySize]byte)
	defer copyBuffers.Put(buffer)
	waited := false
	for {
		n, err := unix.Read(t.fd, buffer[:])
		switch {
		case errors.Is(err, unix.EINTR):
		case errors.Is(err, unix.EAGAIN) && len(t.moved) > 0 && !waited:
			// The kernel makes the two events of a rename one after the other.
			waited = true
			time.Sleep(time.Millisecond)
		case errors.Is(err, unix.EAGAIN):
			t.settle()
			return nil
		case err != nil:
			return fmt.Errorf("reading events: %w", err)
		default:
			if err := t.handleAll(buffer[:n]); err != nil {
				return err
			}
		}
	}
}

// settle ends what only events that are read by now can need.
func (t *tree) settle() {
	clear(t.found)
	for _, n := range t.moved {
		if n != nil {
			// Moved out of the tree.
			t.forget(n)
		}
	}
	clear(t.moved)
}

// handleAll handles the events in one answer of the kernel, which has whole events only.
func (t *tree) handleAll(events []byte) error {
	for len(events) >= unix.SizeofInotifyEvent {
		wd := int(int32(binary.NativeEndian.Uint32(events)))
		mask := binary.NativeEndian.Uint32(events[4:])
		cookie := binary.NativeEndian.Uint32(events[8:])
		end := unix.SizeofInotifyEvent + int(binary.NativeEndian.Uint32(events[12:]))
		if end > len(events) {
			return errors.New("the kernel answered a part of an event")
		}
		name, _, _ := strings.Cut(string(events[unix.SizeofInotifyEvent:end]), "\x00")
		if err := t.handle(wd, mask, cookie, name); err != nil {
			return err
		}
		events = events[end:]
	}
	return nil
}

func (t *tree) handle(wd int, mask, cookie uint32, name string) error {
	if mask&unix.IN_Q_OVERFLOW != 0 {
		t.lost = true
		t.settle()
		// Directories may have come and gone unseen. Those that are watched keep their descriptors.
		return t.begin()
	}
	n := t.nodes[wd]
	switch {
	case n == nil:
		if mask&unix.IN_IGNORED == 0 {
			// Left over from before events were lost.
			_, _ = unix.InotifyRmWatch(t.fd, uint32(wd))
		}
		return nil
	case mask&unix.IN_IGNORED != 0:
		n.detach()
		delete(t.nodes, wd)
		t.gone = t.gone || n == t.top
		return nil
	case name == "":
		t.self(n, mask)
		return nil
	case strings.HasPrefix(name, stagingPrefix):
		if mask&unix.IN_MOVED_FROM != 0 && strings.HasPrefix(name, replacedPrefix) {
			t.moved[cookie] = nil
		}
		return nil
	}
	return t.entry(n, mask, cookie, name)
}

// self handles an event of a watched directory itself. The directory above reports those of all but the
// top.
func (t *tree) self(n *node, mask uint32) {
	if n != t.top {
		return
	}
	for _, k := range []struct {
		mask uint32
		kind filesystempb.EventType
	}{{unix.IN_ATTRIB, chmod}, {unix.IN_MOVE_SELF, renamed}, {unix.IN_DELETE_SELF, removed}} {
		if mask&k.mask != 0 {
			t.report(change{k.kind, "."})
		}
	}
}

// entry handles an event of an entry in a watched directory.
func (t *tree) entry(n *node, mask, cookie uint32, name string) error {
	key, c := entryKey{n, name}, change{name: n.below(name)}
	dir := mask&unix.IN_ISDIR != 0 && t.recursive
	switch {
	case mask&unix.IN_CREATE != 0:
		return t.arrived(key, c.name, dir)
	case mask&unix.IN_MOVED_TO != 0:
		was, pending := t.moved[cookie]
		delete(t.moved, cookie)
		switch {
		case pending && was == nil:
			// An upload took the place of a file. That it was written to follows.
			return nil
		case was != nil && dir && !n.isBelow(was):
			if there := n.children[name]; there != nil && there != was {
				t.forget(there)
			}
			was.attach(n, name)
			t.report(change{created, c.name})
			// A directory that was made in it while its path was in doubt could not be watched. That it was made has
			// been reported, and what is in it has not.
			return as(t.account, func() error { return t.scan(was, filepath.Join(t.root, c.name), false) })
		}
		return t.arrived(key, c.name, dir)
	case mask&unix.IN_MODIFY != 0:
		c.kind = wrote
	case mask&unix.IN_ATTRIB != 0:
		c.kind = chmod
	case mask&unix.IN_DELETE != 0:
		delete(t.found, key)
		c.kind = removed
	case mask&unix.IN_MOVED_FROM != 0:
		delete(t.found, key)
		c.kind = renamed
		if child := n.children[name]; dir && child != nil {
			delete(n.children, name)
			t.moved[cookie] = child
		}
	default:
		return nil
	}
	t.report(c)
	return nil
}

// arrived handles a new name.
func (t *tree) arrived(key entryKey, name string, dir bool) error {
	if _, ok := t.found[key]; ok {
		delete(t.found, key)
		return nil
	}
	t.report(change{created, name})
	if !dir {
		return nil
	}
	return as(t.account, func() error { return t.add(key.in, key.name) })
}

// Types of file systems, from linux/magic.h.
var (
	// Others may change what is in these without an event here.
	networkFileSystems = []int64{
		unix.NFS_SUPER_MAGIC, unix.SMB_SUPER_MAGIC, unix.SMB2_SUPER_MAGIC, unix.CIFS_SUPER_MAGIC, unix.FUSE_SUPER_MAGIC,
		unix.V9FS_MAGIC, unix.CEPH_SUPER_MAGIC, unix.AFS_SUPER_MAGIC, unix.CODA_SUPER_MAGIC,
	}
	kernelFileSystems = []int64{
		unix.PROC_SUPER_MAGIC, unix.SYSFS_MAGIC, unix.CGROUP_SUPER_MAGIC, unix.CGROUP2_SUPER_MAGIC, unix.DEVPTS_SUPER_MAGIC,
		unix.DEBUGFS_MAGIC, unix.TRACEFS_MAGIC, unix.SECURITYFS_MAGIC, unix.BPF_FS_MAGIC,
	}
)

func fileSystem(path string) (int64, error) {
	var s unix.Statfs_t
	err := unix.Statfs(path, &s)
	// 32 bits that some kernels extend with their sign.
	return int64(uint32(s.Type)), err
}
