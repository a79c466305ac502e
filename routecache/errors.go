package routecache

import "errors"

var (
	// ErrNotFresh: what the cache holds may be out of date, because the
	// allocator has been out of reach for longer than max-stale or was never
	// reached. Try again later.
	ErrNotFresh = errors.New("route cache: not fresh")
	// ErrDisconnected: the answer is not in the cache and there is nobody to
	// ask, or the stream broke while the question was open. Try again later.
	ErrDisconnected = errors.New("route cache: no connection to the allocator")
	// ErrTooManyQuestions: Options.Questions questions are open already.
	// Try again later.
	ErrTooManyQuestions = errors.New("route cache: too many unresolved sandbox IDs")
)
