// Package socket is the unix socket at which Envoy finds its router.
//
// # Guarantees
//
//   - A process that starts takes the path over from its predecessor without a gap. None that ends removes the path.
//   - Only the user and the group of the router can connect, whatever the umask is.
//   - The number of open connections is bounded.
package socket
