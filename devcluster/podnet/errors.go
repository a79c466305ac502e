package podnet

import "errors"

// ErrUnreachable is returned by Relay.Dial if the relay works and the address does
// not accept the connection.
var ErrUnreachable = errors.New("nothing answers at that address")
