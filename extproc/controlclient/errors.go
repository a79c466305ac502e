package controlclient

import "errors"

// ErrDeclaredDead is returned by Run when an operator has declared this router dead, so the
// allocator no longer waits for it before addresses are reused. The process must end. Its
// successor joins with another router ID.
var ErrDeclaredDead = errors.New("controlclient: this router was declared dead")

var (
	// errNotLeader: the replica does not lead.
	errNotLeader = errors.New("it does not lead")
	// errLeft: Goodbye is in the leader's journal, or none must be sent.
	errLeft = errors.New("left")
	// errConnect: the connection was not made in time.
	errConnect = errors.New("no connection")
)
