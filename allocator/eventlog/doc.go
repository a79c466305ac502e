// Package eventlog keeps what happened to sandboxes, across leaders, for GET /events/sandboxes and for webhooks. It
// stores events in EventSegment objects of the API server.
//
// The log derives events and does not remember them. [Log.Tell] gets every durable state of every sandbox, in the order
// of the journal, and one goroutine compares each state with what the log has told of the sandbox: a sandbox that it
// does not know was created, another end is an update, a sleep is a pause, the end of that is a resume, and a release is
// a kill. A new leader gives [Log.Recover] the states that the journal and the Sandbox objects show. The log derives from
// them what the earlier leader did not write any more.
//
// # States
//
//	loading   the segments are being read; [Log.Read] answers ErrLoading, states wait
//	open      events are read and written
//	off       the CRD is missing; states are dropped, and the API server is asked again every 30 s
//
// A segment is filled until it has 1,000 events or 256 KiB of them, by at most one write a second unless a whole
// segment waits, and at most 256 KiB a second. Every write but the first replaces the object on condition of its resource version. The
// oldest segment is deleted when the others have 100,000 events, when all together have more than 16 MiB, or when its newest
// event is 7 days old. The newest one stays.
//
// # The cursor
//
// spec.through of the newest segment is the revision of the last state that was compared. States are compared in the
// order of their revisions, and the events of one state are in one write. So every state of a revision up to through is
// told, and a new leader compares those above it. What it cannot tell it tells again: an event has an ID that is made
// from the sandbox, the type and, for an update, the end, or, for a pause and its resume, the time of the pause. The same
// event has the same ID under every leader.
//
// # Guarantees
//
//   - Every sandbox whose claim was durable has a created event, and a killed event once its release is durable, in this
//     order, also if the leader ends at any moment. A reader may find an event twice, with the same ID.
//   - Updates that a leader did not write before its end collapse to the newest end. After a change of leaders an update
//     may come again.
//   - Pauses and resumes of a sandbox alternate, and the last one tells whether it is asleep. A sleep that has ended before
//     a leader could tell it is not told.
//   - A log that cannot be written delays no claim and no release. [Log.Stored] says what still waits, so that the Sandbox
//     object stays from which the next leader would derive it.
//   - Memory and the bytes in etcd are bounded, also by what metadata a claim can have.
//
// # What breaks them
//
//   - A log that is refused for so long that 20,000 states wait: the oldest are dropped and counted. So are all while
//     the log is off.
//   - The loss of the newest segment, if another client deletes it: what the earlier segments have is derived again
//     only for sandboxes that are on record.
//   - A client that takes the finalizer away and deletes a Sandbox object before its events are stored.
package eventlog
