package allocator

import "errors"

var (
	// errStepDown: this replica has stopped to lead while the call was under way.
	errStepDown = errors.New("allocator: this replica does not lead any more")
	// ErrLeaseLost ends Run: another replica may lead now, and this process must
	// end.
	ErrLeaseLost = errors.New("allocator: the lease was lost; this process ends, so that nothing of its term is left")
)
