// Package fact has what the journal keeps: the state of a sandbox, of a router's session, and the intent to
// delete an idle pod. Its [Outbox] has the facts that are on their way into the journal. The package does no I/O
// and starts no goroutine. One goroutine uses an Outbox.
//
// A fact is a change that others rely on, and that the next leader cannot observe by itself. Core makes no promise
// before its fact is durable.
//
// # States
//
// A fact in the outbox is
//
//	pending    not handed to the writer yet; it can be withdrawn
//	handed     part of the Write under way; its outcome is awaited
//	durable    Written has called its function; the outbox has forgotten it
//
// # Guarantees
//
//   - Facts are handed over and become durable in the order of their commits. So do their functions.
//   - The revision of a fact is higher than all that the outbox has given before.
//   - One Write is under way at a time.
//   - Facts that are joined are in one Write. A withdrawn fact is in none.
//   - A fact that a caller waits for is handed over by the next Flush when the writer is free. Others are held back for
//     the linger of the outbox, unless such a fact follows them.
//
// # What breaks them
//
// Written for facts that are not durable. A second Outbox with the same term. A fact that is joined to one
// that is withdrawn alone.
package fact
