package devcluster

import "errors"

var (
	// ErrRunning is returned by Acquire for a name whose owner lives.
	ErrRunning = errors.New("a cluster of this name is running")

	// ErrNotRunning is returned by Lookup and RequestStop for a name without a
	// living owner.
	ErrNotRunning = errors.New("no cluster of this name is running")
)
