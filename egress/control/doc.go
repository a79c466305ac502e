// Package control applies what the allocator sends over the control stream to the router of an egress gateway.
//
// # Guarantees
//
//   - A message takes effect at once. It is acknowledged when every request has ended at Envoy that it takes away, and
//     the acknowledgements keep the order of the messages.
//   - A sandbox whose rules the router cannot read, or whose pool is not known, may reach nothing.
//   - The rules may be used until the time of SetFreshUntil, and never after Expire.
//
// # What breaks them
//
// Calls from more than one goroutine at a time, but for Fresh, Unread, Barrier and Dump. Package controlclient makes
// one after the other.
package control
