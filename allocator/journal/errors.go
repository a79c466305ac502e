package journal

import "errors"

var (
	// ErrDeposed: another leader has written to the log, or may. This process must
	// end; what it was committing may have been committed.
	ErrDeposed = errors.New("journal: another leader has taken over")
	// ErrMissing: a slot object is not there. Store.Read returns it, and wrapped Open
	// does.
	ErrMissing = errors.New("journal: slot object is missing")
	// ErrExists: a slot that was to be made is there. Store.Create returns it.
	ErrExists = errors.New("journal: slot object is there")
	// ErrDamaged: the slots contradict each other, or one cannot be decoded.
	ErrDamaged = errors.New("journal: damaged")
	// ErrRestored: several slots held what they had held before, so the journal was
	// restored from a backup under this leader. Log.Repair returns it when it has put the
	// slots right.
	ErrRestored = errors.New("journal: restored from a backup under its leader")
	// ErrFormat: a slot was written in a format of a later version.
	ErrFormat = errors.New("journal: format of a later version")
)
