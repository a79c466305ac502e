// Package journal is the allocator's store of record: a log of batches in the API server.
// A fact is true once it is in the journal, and not before.
//
// # The ring
//
// The log lives in K slot objects. They are created once and never deleted, and each of
// them stores K. The batch at position p replaces the content of slot p mod K, on
// condition of the resource version that was last read. A write is therefore a
// compare-and-swap on the log, and a deposed leader finds the slot changed.
//
// Slots are replaced and not deleted because the resource version of an object never
// returns, while the name of a deleted object can. Otherwise a leader that was paused in
// the middle of a write could still write to a new object of the same name.
//
// One write is under way at a time. The log therefore has no holes, and all records that
// arrive meanwhile go together into the next batch.
//
// # Unknown outcomes
//
// Every answer to a write but success leaves open whether the write took place. A
// conflict does too: the rejected request may be the second copy of one that succeeded.
// The leader then reads the slot:
//
//   - It holds our term, position and nonce: the write took place.
//   - It has not changed: the leader repeats the write.
//   - It is of a later term: this leader is deposed, and [Log.Commit] returns [ErrDeposed].
//   - Anything else was not written by a leader: the slot is repaired first.
//
// Commit returns without an outcome only when its context ends.
//
// # Carried records
//
// A record is the whole state of one thing, named by its key. The last record of a key in
// the log is valid. A slot may be overwritten once each of its records has been replaced
// by a later one, or is settled. Settled means stored elsewhere, such as in a Sandbox
// object ([Log.Settle]). Any other record is carried: the batch that overwrites the slot
// contains it again. The log therefore always holds the latest state of everything that is
// not settled.
//
// # Guarantees
//
//   - After Commit returned nil, all its records are durable. Every later Open finds them,
//     or later records of the same keys, until they are settled.
//   - After Open returned to a new leader, no Commit of an earlier leader succeeds: the
//     term record occupies the position that the earlier leader would have to write.
//   - Records are committed in the order in which they are given.
//   - A missing slot, or a slot of an unknown format, stops Open with an error that names
//     it. Open guesses nothing.
//   - While a leader holds the lease, it restores from memory a slot that another client
//     deleted or wrote to ([Log.Repair]). If several slots hold an earlier content, the
//     journal was restored from a backup and must be begun anew ([ErrRestored]).
//   - Every batch carries the ID of the journal. The ID changes when the journal is begun
//     anew, by [Log.Renew] or, from outside, by [Beginning.Begin].
//
// # What breaks them
//
//   - Slots edited or deleted by another client while no leader runs.
//   - Slots restored one by one from a backup.
//   - Settle for a state that is not stored elsewhere.
//   - An API server that answers reads from a stale store.
package journal
