// Package wire reads and writes ext_proc's messages without an allocation of its own for the
// messages that an Envoy sends which package envoy has configured.
//
// # Guarantees
//
//   - A Request has what the generated types would have read. The quick reader reads only messages whose
//     every byte it understands. All others, and all that are invalid, are left to the generated types.
//   - Keys and values of a Request are views into a buffer of this Request. They are valid until it reads
//     the next message. Who keeps one longer must copy it.
//   - An encoded Admission is the message that the generated types would have written.
//
// # What breaks them
//
// A field that changes the meaning of those that the quick reader knows.
package wire
