// Package journal is the allocator's store of record: a log of batches in the
// API server. A fact is true when it is in here, and not before.
//
// # The ring
//
// The log lives in K slot objects, made once and never deleted; K is stored in
// them. The batch at position p replaces the content of slot p mod K under the
// resource version last read, so that a write is a compare-and-swap on the log:
// whoever was deposed finds the slot changed. Slots are replaced and not deleted,
// because the resource version of an object never comes back, while the name of
// a deleted object does: a leader that stood still in the middle of a write could
// write to it after all.
//
// One write is under way at a time. So the log has no holes, and what waits
// meanwhile goes together into the next batch.
//
// # Unknown outcomes
//
// Every answer to a write but success, a conflict too, leaves open whether it
// took place: an answer may be lost, and the request behind a conflict may be the
// second copy of one that succeeded. So the slot is read. It holds our term,
// position and nonce: done. It has not changed: the same write again. It is of a later
// term: this leader is deposed, and [Log.Commit] returns [ErrDeposed]. Anything else was
// not written by a leader, and the slot is put right first. Commit returns without
// knowing only when its context ends.
//
// # What rides along
//
// A record is the whole state of one thing, named by its key; of several the last
// in the log counts. A slot may be overwritten once each record
// in it has been overtaken by a later one, or is settled: safe elsewhere
// ([Log.Settle]), such as in a Sandbox object. A record that is neither goes into
// the batch that overwrites it, as it is. So the log always holds the latest
// state of everything that is not settled.
//
// # Guarantees
//
//   - Commit returns nil only when all records are durable, and after that every
//     Open finds them, or later ones of the same keys, until they are settled.
//   - After Open has returned to a new leader, no Commit of an earlier one
//     succeeds any more: the term record has taken the position that the earlier
//     one would have to write.
//   - Records are committed in the order in which they are given.
//   - A slot that is missing, or of a format that this version does not know,
//     stops Open with an error that says which. Nothing is guessed.
//   - While a leader holds the lease, a slot that something else has deleted or written
//     to is put right from memory ([Log.Repair]). If several hold what they held before,
//     the journal was restored from a backup, and must be begun anew
//     ([ErrRestored]).
//   - Every batch carries the ID of the journal. It changes when the journal is begun
//     anew: by [Log.Renew] or, from outside, by [Beginning.Begin].
//
// # What breaks them
//
// Slots that are edited or deleted by anything else while no leader can repair them, or
// restored one by one from a backup; Settle for something that is not safe; an API server that answers
// reads from a stale store.
package journal
