// Package snapshots owns the snapshots of files of sandboxes in an object store: S3, Google Cloud Storage, Azure Blob
// Storage, or a directory. The store is the only place where a snapshot is remembered. There is no record of it in the
// journal, and no Kubernetes object. It has the archives of stopped sandboxes too. Those are no snapshots: the journal
// names them.
//
// # Objects
//
//	archives/TEAM/KEY                the bytes of one attempt to make a snapshot. KEY has 26 random characters
//	snapshots/TEAM/NAME:TAG.json     the manifest. A snapshot exists if and only if its manifest does
//	stopped/TEAM/ID/KEY              the bytes of one attempt to stop the sandbox with this ID
//	stopped/TEAM/ID/KEY.json         its manifest, as that of a snapshot with the name ID and the tag KEY
//
// A name and a tag have 1 to 63 characters of a-z, 0-9, "_", "." and "-", and begin with a letter or a digit. TEAM is
// "_" for sandboxes without a team, which is the name of no team. So no name leads out of the directory of its team.
//
// A manifest has version 1, the name, tag, team, pool and sandbox ID, the times of its making and of its expiry (none:
// it does not expire), the key, size and SHA-256 of the archive, what the archive has (entries, bytes of contents,
// paths, what was left out and how often), and no field that this package does not know. It has at most 64 KiB. A
// manifest that is otherwise is damaged.
//
// # States
//
//	writing    an archive is being written, or no manifest names it yet. It is no snapshot
//	there      the manifest has been written
//	expired    the time in the manifest has passed. For every call but [Store.Sweep] it is as one that was never made
//	left over  no manifest names the archive any more, or none ever will
//
// [Store.Write] makes a snapshot of what it is given. It streams the archive into a new object, asks the store how
// large that object is, and compares. Then it writes the manifest. The manifest replaces that of an earlier snapshot of
// the same name and tag. [Store.Delete] deletes the manifest and then the archive. [Store.Sweep] deletes what is
// expired, and archives that are left over and older than an hour.
//
// [Store.WriteStopped] writes the archive of a stopped sandbox in the same way. The sandbox is stopped only when the
// journal names the archive. [Store.DropStopped] deletes what no sandbox names any more, and [Store.SweepStopped]
// what is older than an hour and named by no live sandbox.
//
// # Guarantees
//
//   - A call for a team reads, lists, replaces and deletes snapshots of that team only. For a snapshot of another team
//     it answers [ErrNotFound].
//   - A snapshot exists only after the store has confirmed that its archive is there with the size that was written. A
//     Write that fails, or that a crash ends, makes no snapshot, and leaves the earlier one of that name. There is one
//     exception: if the store does not answer to the write of the manifest, the new snapshot may be there. It is whole.
//   - An archive is written once: its key is new for each attempt, and the store refuses to overwrite it. So a late
//     writer never changes what a snapshot has.
//   - Sweep deletes no archive that a manifest names. It lists archives before manifests, and deletes none if it could
//     not read every manifest. A Write takes less than an hour, so an archive of that age has its manifest or gets
//     none.
//   - No call for snapshots reads, lists or deletes the archive of a stopped sandbox. It is read for its team and its
//     sandbox only, and written once, under a key of its own for each attempt.
//   - SweepStopped deletes no archive that a live sandbox names. It lists archives before it asks which are named. An
//     archive of that age is named by then, or never.
//   - A damaged manifest hides no other snapshot. It is told with the name of the object.
//   - Each team has at most so many snapshots and bytes as the [Options] say, also if several are written at once. The
//     bytes are those of its stopped sandboxes too, and those share the places to write and to read with snapshots. At
//     most four are written at once, and a team begins one only while it has fewer than are free. So two at most are of
//     one team. A Write that finds no place ends at once with [ErrBusy].
//   - At most 64 archives are read at once, and 32 at most for one team, by the same rule. So does [Store.Open] end.
//   - A Write needs about 50 MB of memory. Lists are read with eight requests at once.
//   - There can be 100,000 snapshots, as many archives of them, and 50,000 archives of stopped sandboxes. Sweep and
//     SweepStopped fail if there are more.
//   - Each request to the store ends within 30 s. An archive ends when it makes no progress for 60 s, and after 15
//     minutes. A directory has no such bounds, if its file system hangs.
//
// # What breaks them
//
//   - Others that write to the store. Who may write manifests can give a team any archive of its own directory.
//     Give Berth a bucket or a prefix of its own. The bytes are not signed: what restores an archive compares them with
//     the size and SHA-256 of the manifest.
//   - A store whose list lacks an object that was written before, or whose clock differs from that of this machine by
//     more than half an hour. Sweep could then delete an archive that is in use.
//   - Two processes that change the same name at once. Only a leader changes snapshots. If a deposed one does too, its
//     late deletion of an expired manifest can delete the one that has just replaced it, and the bounds of a team count
//     for each process.
//   - A process that stands still for an hour between an archive and its manifest. The manifest then names an archive
//     that was swept. [Store.Open] answers ErrNotFound for it.
//
// # What is left over elsewhere
//
// S3 keeps the parts of an upload that did not end, invisibly. A lifecycle rule of the bucket that aborts incomplete
// multipart uploads after a day removes them.
package snapshots
