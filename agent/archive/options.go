package archive

import (
	"fmt"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/berth-sandbox/berth/internal/options"
)

// Bounds of what a sandbox or a stream chooses.
const (
	maxPaths = 32
	// maxName bounds the length of one of the paths (PATH_MAX).
	maxName = 4095
	// maxDepth bounds the directories between a path and an entry. Each of them is open meanwhile.
	maxDepth = 256
	// maxLinks bounds the files with several names that a Write remembers.
	maxLinks = 100_000
	// maxLinkNames bounds the length of all their names.
	maxLinkNames = 8 << 20
	// maxPieces bounds the pieces of data between holes. The last piece has the rest of the file, with its holes.
	maxPieces = 10_000
	// maxAttributes bounds the attributes of one entry. A tar reader accepts 1 MiB for all records.
	maxAttributes = 256 << 10
	// maxACL bounds an access control list. A Restore remembers those of all directories that it is in.
	maxACL = 8 << 10
	// maxWindow bounds the memory of the decompressor.
	maxWindow = 8 << 20
	// maxTail is longer than what follows the last file.
	maxTail = 8 << 10
)

// Options are for both directions.
type Options struct {
	// Paths are archived, or may be restored. The package comment has the rules.
	Paths []string
	// MaxBytes bounds the archive before compression: contents, and 512 bytes to 2 KiB for most entries.
	MaxBytes int64
	// MaxFiles bounds the entries: files, directories, links and FIFOs.
	MaxFiles int
}

// kernelTrees are the directories below which the kernel and devices are.
var kernelTrees = regexp.MustCompile(`^/(dev|proc|sys)(/|$)`)

func (o *Options) check() error {
	if err := options.Require(*o, "Paths", "MaxBytes", "MaxFiles"); err != nil {
		return err
	}
	if err := CheckPaths(o.Paths); err != nil {
		return fmt.Errorf("archive.Options.Paths%w", err)
	}
	return nil
}

// CheckPaths returns an error if some paths are not allowed. It goes on behind the name of their field: "[0]: ...".
func CheckPaths(paths []string) error {
	if len(paths) > maxPaths {
		return fmt.Errorf(": %d paths: name %d at most", len(paths), maxPaths)
	}
	for i, p := range paths {
		if err := checkPath(p); err != nil {
			return fmt.Errorf("[%d]: %w", i, err)
		}
		for j, other := range paths {
			if i != j && strings.HasPrefix(p+"/", other+"/") {
				return fmt.Errorf("[%d]: %w: %q is in %q: leave it out", i, ErrNotAllowed, p, other)
			}
		}
	}
	return nil
}

func checkPath(p string) error {
	switch {
	case len(p) > maxName:
		return fmt.Errorf("%w: a path of %d bytes: use %d at most", ErrNotAllowed, len(p), maxName)
	case !filepath.IsAbs(p) || filepath.Clean(p) != p || strings.ContainsRune(p, 0):
		return fmt.Errorf("%w: %q is not absolute and clean: use a path such as /home/user", ErrNotAllowed, p)
	case p == "/" || kernelTrees.MatchString(p):
		return fmt.Errorf("%w: %q: use a directory below / that is not in /dev, /proc or /sys", ErrNotAllowed, p)
	}
	return nil
}

// Reason says why something is left out.
type Reason string

// Reasons.
const (
	// Socket: a socket belongs to the process that has made it.
	Socket Reason = "socket"
	// Device: a device is not archived.
	Device Reason = "device"
	// Mount: another mount is not archived, and not removed at a restore.
	Mount Reason = "mount"
	// Unreadable: the agent may not read a file, or may not list a directory. The directory itself is archived.
	Unreadable Reason = "unreadable"
	// TooDeep: a directory below 256 others is not archived.
	TooDeep Reason = "too deep"
	// Attribute: an attribute is not kept, because it is a file capability, is too large, has a name with "=", or is
	// refused by the file system.
	Attribute Reason = "attribute"
	// Link: a hard link has become a file of its own.
	Link Reason = "hard link"
	// Owner: the agent may not give the restored file its owner and group.
	Owner Reason = "owner"
	// Foreign: what is in the new pod belongs to another user, and the agent may not replace it.
	Foreign Reason = "foreign"
)

// LeftOut is how often something was left out for one reason.
type LeftOut struct {
	Count int
	// Example is the first path, of 1,000 bytes at most.
	Example string
}

// Summary is what was archived or restored. After an error it is what had been until then.
type Summary struct {
	// Paths are those of the archive. They may be fewer than the Options of a Restore allow.
	Paths []string
	// Entries is the number of files, directories, links and FIFOs.
	Entries int
	// Bytes is the length of all contents without holes.
	Bytes int64
	// Size is the length of the archive before compression, as MaxBytes bounds it.
	Size int64
	// LeftOut is nil if nothing was left out.
	LeftOut map[Reason]LeftOut
}

func (s *Summary) leave(reason Reason, name string) {
	if s.LeftOut == nil {
		s.LeftOut = map[Reason]LeftOut{}
	}
	l := s.LeftOut[reason]
	if l.Count++; l.Count == 1 {
		l.Example = shown(strings.TrimSuffix(name, "/"))
	}
	s.LeftOut[reason] = l
}
