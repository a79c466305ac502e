// Package archive writes the files below some paths of a sandbox into a stream, and restores them from it in another
// pod. It knows no orders and no network: [Write] and [Restore] are given a stream.
//
// # Format
//
// One tar archive in PAX format, compressed by zstd at level 1.
//
//	first entry  a global header with the records BERTH.version (1) and BERTH.path.0, BERTH.path.1, ...
//	entries      a directory comes before what is in it, and all of that comes before anything else. Names are absolute
//	             paths without the first slash
//	last entry   a global header with the records BERTH.entries, BERTH.bytes (of contents), and BERTH.sha256: of all
//	             bytes of the tar archive before this entry
//
// Records of an entry: SCHILY.xattr.NAME, as other programs write them. A file with holes has only its data, one piece
// after the other, and the records BERTH.size and BERTH.data: "offset:length" of each piece, with commas between them.
// Other programs unpack everything but files with holes. There are no whiteouts: a name means a file of that name.
//
// # What is kept
//
// Regular files, directories (also empty ones), symbolic links, FIFOs, and hard links between files below the paths. Of
// each of them the name with any bytes, owner, group, all twelve bits of the mode, and the time of the last change with
// its nanoseconds. Of files and directories also the attributes user.* and the access control lists. A file with holes
// keeps them.
//
// # What is left out
//
// [Summary.LeftOut] counts it, with an example for each [Reason]: sockets, devices, what is on another mount than the
// path that it is below, what the agent may not read, directories below more than 256 others, file capabilities, and
// attributes that an entry has no room for. Labels of security modules and times of access are left out without being
// counted.
//
// A hard link whose other name is outside of the paths becomes a file of its own. So does one more, with a count, while
// 100,000 files (8 MiB of names) have names that are still to come. A file of more than 10,000 pieces of data keeps the
// holes before the last of them only, and has zeros in place of the others.
//
// An agent that is not root cannot give a file to another user. The file then belongs to the agent's user, it loses
// setuid and setgid, and it is counted. What is in the new pod already and belongs to another user may stay as it is
// there. It is counted too.
//
// # Paths
//
// Absolute, clean, not "/", not below /dev, /proc or /sys, none below another one, 32 at most. No path is or leads
// through a symbolic link: the sandbox could have made one that leads to files of others. Such a path is refused with
// [ErrNotAllowed].
//
// A path that does not exist is archived as such. [Restore] makes that true again.
//
// # Guarantees
//
//   - After a Restore without an error each archived path is as it was at the Write, but for what both have counted:
//     what is there and not in the archive has been removed. Paths that are not in the archive are not touched.
//   - A stream that was cut off, or changed by accident, makes Restore fail with [ErrCorrupt]. Nothing is removed
//     before the first entry is read and accepted.
//   - A Restore that fails leaves a part of both, and directories that are closed (0700). The pod cannot be used then.
//   - Whatever the stream is, Restore changes nothing but the archived paths, all of which are among [Options.Paths],
//     makes no device, and follows no symbolic link. It gives the kernel no path of more than one name: each directory
//     is opened in the one before.
//   - MaxFiles and MaxBytes bound both. What one Write accepts a Restore with equal options accepts.
//   - Neither of them needs more than 64 MB of memory, whatever the files are.
//   - Both end soon after their context does, unless the stream blocks. Closing the stream ends that.
//
// # What breaks them
//
// Processes that change the files meanwhile. They are frozen during a Write (package freeze). What a Write notices of
// such changes makes it fail with [ErrChanged]. At a Restore a process in the paths can see a part of the files. What
// it makes there meanwhile may stay, or make the Restore fail.
//
// A checksum is no signature. The stream says who owns a file and whether it is setuid, and for an agent that is root
// that is done. So the caller checks that the stream is the one that was written.
//
// Nothing is synced to the disk.
package archive
