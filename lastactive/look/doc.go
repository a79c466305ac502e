// Package look reads what Envoy holds open: one read of the page /clusters on Envoy's admin
// socket. For each upstream host the page counts the requests that are in progress or that
// wait for a connection.
//
// # Guarantees
//
// A look is good only if all of these hold:
//
//   - Envoy has answered 200 with a complete body within 2 s, and both clusters of pods are
//     in it.
//   - The same Envoy process was there before and after the look. The socket file identifies
//     the process: Envoy removes the file that it finds and binds a new one, and the previous
//     Envoy has ended by then.
//   - It is not the first look at that process. The previous process may have been the last
//     to know of other requests, so the first look fails and the caller learns of the change.
//
// If the socket refuses connections and Envoy has no connection to the router either, Envoy
// has ended and holds nothing open. That is a good look without hosts.
//
// # What breaks them
//
// An Envoy that closes its admin socket before it ends. Envoy does not do that.
package look
