package allocator

import "errors"

var (
	// errStepDown: this replica has stopped to lead while the call was under way.
	errStepDown = errors.New("allocator: this replica does not lead any more")
	// ErrLeaseLost ends Run: another replica may lead now, and this process must
	// end.
	ErrLeaseLost = errors.New("allocator: the lease was lost; this process ends, so that nothing of its term is left")
	// errAbandoned is returned by Run with what else it returns: something did not end
	// in time and may still be at work.
	errAbandoned = errors.New("allocator: what was done as the leader has not ended in time and is abandoned; this process must end")
)
