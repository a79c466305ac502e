// Package files gives the files of a sandbox to E2B's SDKs: the service filesystem.Filesystem, and
// /files for contents.
//
// # Whose rights
//
// A call acts for one user of the sandbox: the one in Basic authentication or, at /files, in the
// parameter username; else the default user. It can do what a process of that user can do, and no
// more. The kernel decides that: each path is resolved by a thread that has the user's file-system user,
// groups and no capability ([as]). A path is not confined otherwise, and symbolic links lead where they lead
// for a process. An agent that is not root acts as its own user.
//
// [Options.Anywhere] adds one right to it. What is missing on a path is made although the user may not, and belongs to
// the user, if the last directory that exists belongs to root: the first missing directory, or a new file, or the new
// name of what is moved.
//
//   - That directory is found with the rights of the user and without following a symbolic link. It is held open, and
//     what is made is named in it. No path is resolved with more rights than those of the user.
//   - The thread that makes the name is one of the user with CAP_DAC_OVERRIDE, so what it makes has the right owner
//     from the beginning. It makes new names only (O_EXCL, RENAME_NOREPLACE), so nothing that exists is changed.
//   - What is moved is taken away from its old name by a thread without the capability.
//   - Nothing is made below /dev, /proc and /sys, and on file systems of the kernel.
//
// Rules that hold for every call:
//
//   - A path that leads into the agent's own process in /proc, as /proc/self does, is refused: the kernel shows
//     the memory map and the open files of a process to each of its threads. /proc/mounts and /proc/net, which
//     are alike for every process, are served.
//   - A thread that has acted for a user ends afterwards. It never acts for the agent or another user.
//   - Rights are checked when a file is opened. Bytes are then moved by the agent's own threads, so blocks
//     that a file system reserves for root count as free.
//
// # Paths
//
// Absolute, "~", "~/...", or relative to the directory that the configuration names, else to the home of the
// user. NUL bytes and lengths that the kernel refuses are InvalidArgument. Only regular files are read and
// written: FIFOs, devices and sockets are refused without being waited for.
//
// # Writing
//
// An upload is staged beside its file and takes its name when it is complete:
//
//   - A reader sees the old contents or the new ones. An upload that fails leaves the old ones.
//   - The new file has the permissions, the owner and the group of the old one. A new name has 0644 and belongs
//     to the user of the call.
//   - Directories on the way are made. The metadata of the request replaces that of the file.
//   - A form with several files is not atomic. The error of a later one says how many are written.
//
// A file is written in place instead, so that it stays the same file, if it has several names or an access
// control list, is a mount of its own, has an owner or a group that the user cannot give a file, or is in a
// directory in which the user may not make files. Then the first promise does not hold: an upload that fails
// leaves a part. No upload is synced to the disk.
//
// The name of a staged file begins with ".berth-upload-". ListDir and watches do not show such names. One stays
// behind when the agent is killed.
//
// Memory does not depend on the size of a file: one buffer of 256 KiB for each request. A gzip body
// that becomes more than 64 MiB and a hundredfold is refused with 413.
//
// # Watching
//
// Events are those of inotify: CREATE (also for what is moved in), WRITE, CHMOD, REMOVE, RENAME (the old
// name). Names are relative to the watched directory; "." is that directory. Several writes in a row may be one
// WRITE. An upload is CREATE if the file is new, CHMOD, WRITE.
//
//   - Order: as it happened, in one watch.
//   - Completeness: GetWatcherEvents returns every change that was complete before the call.
//   - Recursive watches have no gap: what is made in a new directory before it can be watched is reported
//     as CREATE, and as WRITE if it has contents. What is removed again before that is not reported.
//   - They leave out directories that the user may not read, the file systems of the kernel, and, without
//     allow_network_mounts, those of the network.
//   - Loss: a watch holds 16,384 changes (2 MiB of names) for its client; so does the kernel, by default.
//     When there are more, the stream ends with DataLoss; GetWatcherEvents answers DataLoss once
//     and goes on with what happens after that.
//   - A directory that is removed ends the stream without an error.
//   - There are 64 watches at most. One that has not been polled for 10 minutes makes room for a new one.
//
// # Signatures
//
// [CheckSignature] says what a signature covers. It opens one path for one user and one operation. A
// signature for the empty path opens every path for uploads, because E2B's SDKs sign that for forms.
//
// # What breaks this
//
// A pod whose root lacks CAP_SETUID or CAP_SETGID: calls for other users are then refused. Programs of the sandbox
// that change a path while a call uses it get what they would get with any program; they can also have the call
// follow a link into the agent's process.
package files
