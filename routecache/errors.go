package routecache

import "errors"

// Errors of Lookup. All of them are temporary: the caller may try again later.
var (
	// ErrNotFresh is returned when the cache may be out of date, because the
	// allocator has not answered a ping for longer than max-stale, or never has.
	ErrNotFresh = errors.New("routecache: not fresh")
	// ErrDisconnected is returned when the cache does not know the ID and has no
	// stream to ask on, or when the stream ended while the question was open.
	ErrDisconnected = errors.New("routecache: no connection to the allocator")
	// ErrTooManyQuestions is returned when Options.MaxQuestions questions are
	// already open.
	ErrTooManyQuestions = errors.New("routecache: too many unresolved sandbox IDs")
)
