// Package h2 answers gRPC calls over HTTP/2 on a private socket, with one goroutine per connection.
//
// It exists because of what a call costs. grpc-go hands each call from the goroutine that reads the
// connection to one that handles the call, and from there to one that writes. Here the goroutine that
// reads a message also answers it, if the answer needs no wait, and writes all answers with one system
// call before it reads again. A message whose answer may have to wait gets a goroutine of its own.
//
// # What it serves
//
// A client sends one message per call and gets one or more. A [Handler] answers that message. Further
// messages of the same call are dropped, unless the answer is Reply.Next: then the handler gets the next message, and the
// call has no answer but its status. Compression is not supported. The peer is Envoy, which is
// trusted with the socket, but nothing that it sends makes a connection take unbounded memory.
//
// # States of a stream
//
//	opened    the header block is read            -> asked, ended
//	asked     the message is complete             -> answered, kept, ended, or opened again by Reply.Next
//	kept      the answer is sent, and the peer has not ended the stream: Reply.Open is set -> ending, ended
//	ending    Ending.End was called, and the peer has not ended the stream                 -> ended
//	answered  the last message and the trailers are sent, or wait for a window -> ended
//	ended     the stream is forgotten
//
// [Open.Ended] is called once for each Reply.Open. It says whether the peer has ended the stream: by
// RST_STREAM, or by closing the connection. After either the peer reads nothing more of the stream. After a
// half-close it still may, and a half-close may cross the answer on the socket. So a half-close ends no stream
// that is kept. The server ends a kept stream by [Ending], and then waits for the peer: Envoy resets such a stream when
// it has acted on its end. A peer that half-closes a stream before its answer is known gets no answer that stays open.
//
// # Limits
//
//   - 16,384 streams per connection, those counted that the peer has reset and whose goroutine still
//     runs. A further stream is refused with REFUSED_STREAM, which clients may retry.
//   - 256 KiB per message, and as much window per stream. A longer message is answered with
//     RESOURCE_EXHAUSTED.
//   - 16 MiB of incomplete messages per connection, and 64 KiB and 16 frames per header block. More ends the
//     connection.
//   - Output beyond 64 KiB is written before more input is read. A peer that does not read its answers is
//     not read either. No deadline ends such a connection: the peer may be paused, and its streams must
//     not look as if it had read the answers.
//
// # Errors of the peer
//
// A malformed request (RFC 9113, section 8.1.1) is reset. Each other frame that HTTP/2 does not allow ends the
// connection, also where only the stream would have to end. The server sends GOAWAY, closes its own direction
// and reads until the peer closes. So the end of the connection still means that the peer has seen everything
// that it wants to see. The table in rfc9113_test.go has the cases of the RFC, section by section.
package h2
