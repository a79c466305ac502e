// Package activity has the words for what made a sandbox be in use. Routers, the allocator,
// its API and the admin pages use the same ones.
package activity

// Kind is what the last use of a sandbox was.
type Kind string

// The kinds of use.
const (
	Claim     Kind = "claim"     // the sandbox was claimed, or began to run
	Record    Kind = "record"    // an earlier leader has written it to the Sandbox object
	Keepalive Kind = "keepalive" // a keep-alive, or a timeout that was set
	Admission Kind = "admission" // a request was admitted
	Open      Kind = "open"      // a request or connection is open, or was
	Bytes     Kind = "bytes"     // bytes moved over an open connection
	Busy      Kind = "busy"      // the busy probe was answered 200
	Unknown   Kind = "unknown"   // the sandbox may have been in use
)
