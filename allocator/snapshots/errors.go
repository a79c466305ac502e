package snapshots

import (
	"errors"
	"fmt"
)

// Errors of calls.
var (
	// ErrNotFound: the team has no such snapshot, or it is expired.
	ErrNotFound = errors.New("there is no such snapshot")
	// ErrGone: the store has not the archive of a stopped sandbox.
	ErrGone = errors.New("the archive of the stopped sandbox is not in the object store")
	// ErrInvalid: a name, a tag, a team or a size is not allowed. The error says which, and what is.
	ErrInvalid = errors.New("not valid")
	// ErrFull: the team has as many snapshots or bytes as it may have. The error says which.
	ErrFull = errors.New("the team has no room for another snapshot: delete one of its snapshots, or raise the bound")
	// ErrTooLarge: the archive has more bytes than the call allows.
	ErrTooLarge = errors.New("the archive is larger than a snapshot may be: keep fewer files, or raise the bound")
	// ErrBusy: as many snapshots are being written, or read, as may be at one time, or one of this name and tag is being
	// written.
	ErrBusy = errors.New("other snapshots are being written or restored: try again later")
	// ErrDamaged: an object is not what this package wrote. The error names the object.
	ErrDamaged = errors.New("damaged")
	// ErrTimeout: the object store, or what an archive is read from, has not answered in time.
	ErrTimeout = errors.New("no progress in time")
	// ErrStore: the object store has failed, which may pass. The text goes on with what the store has said.
	ErrStore = errors.New("the object store has failed, and the log of the allocators says why")
)

// Public returns err as callers may see it: without what the store has said, which can name buckets, hosts and accounts.
func Public(err error) error {
	if errors.Is(err, ErrStore) {
		return ErrStore
	}
	return err
}

// ofStore returns an error that the store has said.
func ofStore(err error) error { return fmt.Errorf("%w: %w", ErrStore, err) }
