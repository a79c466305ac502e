package archive

import (
	"archive/tar"
	"fmt"
	"math"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// meta is what the header of an entry says about it. It holds no part of the header, whose records may have 1 MiB.
type meta struct {
	name     string
	mode     uint32
	uid, gid int
	time     time.Time
	// attributes that are kept, by name.
	attributes map[string]string
}

func metaOf(h *tar.Header) (*meta, error) {
	const most = math.MaxUint32 - 1 // the number behind it means no user
	m := &meta{name: strings.Clone(h.Name), mode: uint32(h.Mode), uid: h.Uid, gid: h.Gid, time: h.ModTime}
	switch h.Typeflag {
	case tar.TypeDir:
		m.name = strings.TrimSuffix(m.name, "/")
	case tar.TypeChar, tar.TypeBlock:
		return nil, fmt.Errorf("%w: entry %.300q is a device", ErrNotAllowed, m.name)
	}
	if h.Mode&^0o7777 != 0 || h.Uid < 0 || h.Uid > most || h.Gid < 0 || h.Gid > most {
		return nil, fmt.Errorf("%w: entry %.300q has mode %o, owner %d and group %d",
			ErrCorrupt, m.name, h.Mode, h.Uid, h.Gid)
	}
	total := 0
	for record, value := range h.PAXRecords {
		name, ok := strings.CutPrefix(record, attributeRecord)
		total += len(name) + len(value)
		switch {
		case strings.HasPrefix(record, holesOfOthers):
			return nil, fmt.Errorf("%w: entry %.300q has holes of another format", ErrCorrupt, m.name)
		case !ok:
			total -= len(name) + len(value)
			continue
		case !keptAttribute(name, len(value)) || total > maxAttributes:
			return nil, fmt.Errorf("%w: attribute %.300q of entry %.300q", ErrNotAllowed, name, m.name)
		case m.attributes == nil:
			m.attributes = map[string]string{}
		}
		m.attributes[strings.Clone(name)] = strings.Clone(value)
	}
	return m, nil
}

func isACL(attribute string) bool {
	return attribute == "system.posix_acl_access" || attribute == "system.posix_acl_default"
}

// keptAttribute reports whether an attribute with a value of n bytes is archived and restored.
func keptAttribute(name string, n int) bool {
	return strings.HasPrefix(name, "user.") || isACL(name) && n <= maxACL
}

// times returns the times that an entry gets: that of its last change.
func (m *meta) times() [2]unix.Timespec {
	return [2]unix.Timespec{{Nsec: unix.UTIME_OMIT}, {Sec: m.time.Unix(), Nsec: int64(m.time.Nanosecond())}}
}

// setTime sets the time of an open file.
func setTime(fd int, m *meta) error {
	times := m.times()
	// The file itself, without a path: futimens(3).
	_, _, errno := unix.Syscall6(unix.SYS_UTIMENSAT, uintptr(fd), 0, uintptr(unsafe.Pointer(&times)), 0, 0, 0)
	if errno != 0 {
		return errno
	}
	return nil
}
