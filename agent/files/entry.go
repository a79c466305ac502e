package files

import (
	"io/fs"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	filesystempb "github.com/berth-sandbox/berth/agent/agentpb/filesystem"
)

// describer makes descriptions of entries. It remembers the names of users and groups, so it serves one
// call only.
type describer struct{ users, groups map[uint32]string }

func newDescriber() *describer {
	return &describer{map[uint32]string{}, map[uint32]string{}}
}

// entry describes what is at a path. A symbolic link is described itself, but for the type and the mode,
// which are its target's; a link that leads nowhere has the type of a link.
func (d *describer) entry(name string) (*filesystempb.EntryInfo, error) {
	info, err := os.Lstat(name)
	if err != nil {
		return nil, err
	}
	stat := info.Sys().(*unixStat)
	e := &filesystempb.EntryInfo{
		Name:         filepath.Base(name),
		Path:         name,
		Type:         entryType(info.Mode()),
		Size:         info.Size(),
		Mode:         uint32(info.Mode().Perm()),
		Permissions:  info.Mode().String(),
		Owner:        cached(d.users, stat.Uid, userName),
		Group:        cached(d.groups, stat.Gid, groupName),
		ModifiedTime: timestamppb.New(info.ModTime()),
		IsSymlink:    info.Mode()&fs.ModeSymlink != 0,
	}
	if e.IsSymlink {
		describeTarget(name, e)
		return e, nil
	}
	e.Metadata = metadataAt(name)
	return e, nil
}

func describeTarget(name string, e *filesystempb.EntryInfo) {
	if to, err := filepath.EvalSymlinks(name); err == nil && !inAgent(name) {
		if info, err := os.Stat(to); err == nil {
			e.SymlinkTarget, e.Type, e.Mode = proto.String(to), entryType(info.Mode()), uint32(info.Mode().Perm())
			return
		}
	}
	if to, err := os.Readlink(name); err == nil {
		e.SymlinkTarget = proto.String(to)
	}
}

// entryType returns FILE_TYPE_UNSPECIFIED for devices, FIFOs and sockets. E2B's SDKs do not list those.
func entryType(mode fs.FileMode) filesystempb.FileType {
	switch mode.Type() {
	case 0:
		return filesystempb.FileType_FILE_TYPE_FILE
	case fs.ModeDir:
		return filesystempb.FileType_FILE_TYPE_DIRECTORY
	case fs.ModeSymlink:
		return filesystempb.FileType_FILE_TYPE_SYMLINK
	default:
		return filesystempb.FileType_FILE_TYPE_UNSPECIFIED
	}
}

func cached(names map[uint32]string, id uint32, lookup func(string) (string, error)) string {
	name, ok := names[id]
	if !ok {
		number := strconv.FormatUint(uint64(id), 10)
		var err error
		if name, err = lookup(number); err != nil {
			// An image need not have a name for every number.
			name = number
		}
		names[id] = name
	}
	return name
}

func userName(id string) (string, error) {
	u, err := user.LookupId(id)
	if err != nil {
		return "", err
	}
	return u.Username, nil
}

func groupName(id string) (string, error) {
	g, err := user.LookupGroupId(id)
	if err != nil {
		return "", err
	}
	return g.Name, nil
}

// metadataAt returns the metadata that uploads have given a file, nil if there is none.
func metadataAt(name string) map[string]string {
	names := attributes(func(b []byte) (int, error) { return unix.Llistxattr(name, b) })
	if len(names) == 0 {
		return nil
	}
	found := map[string]string{}
	value := make([]byte, 64<<10)
	for _, attribute := range names {
		if n, err := unix.Lgetxattr(name, attribute, value); err == nil {
			// A program in the sandbox can store what is no text. Neither codec can carry that.
			found[strings.TrimPrefix(attribute, attributePrefix)] = strings.ToValidUTF8(string(value[:n]), "\ufffd")
		}
	}
	return found
}
