package journal

import "errors"

var (
	// ErrDeposed is returned when another leader has written to the log, or may have. The
	// process must end. A commit that was under way may have taken place.
	ErrDeposed = errors.New("journal: another leader has taken over")
	// ErrMissing is returned by Store.Read, and wrapped by Open, when a slot object does not
	// exist.
	ErrMissing = errors.New("journal: slot object is missing")
	// ErrExists is returned by Store.Create when the slot object exists.
	ErrExists = errors.New("journal: slot object exists")
	// ErrDamaged is returned when the slots contradict each other, or when one cannot be
	// decoded.
	ErrDamaged = errors.New("journal: damaged")
	// ErrRestored is returned by Log.Repair, after it repaired the slots, when several slots
	// held an earlier content: the journal was restored from a backup while this leader ran.
	ErrRestored = errors.New("journal: restored from a backup under its leader")
	// ErrFormat is returned when a slot was written in the format of a later version.
	ErrFormat = errors.New("journal: format of a later version")

	// errForeignWrite is returned when a slot was written to, but not under a later term. Of
	// two candidates that take the log over, one may have written under the same term.
	errForeignWrite = errors.New("journal: another client wrote to a slot")
	// errOvertaken is returned when another candidate wrote while the log was taken over.
	errOvertaken = errors.New("journal: another candidate or leader wrote meanwhile")
)

// beginError is an error of Options.Begin that a retry does not change.
type beginError struct{ error }

func (e *beginError) Unwrap() error { return e.error }

// Refuse marks an error of Options.Begin as final. Open retries after any other error.
func Refuse(err error) error { return &beginError{err} }

// final reports whether Open gives up after err.
func final(err error) bool {
	var refused *beginError
	return errors.Is(err, ErrMissing) || errors.Is(err, ErrDamaged) || errors.Is(err, ErrFormat) ||
		errors.Is(err, ErrDeposed) || errors.As(err, &refused)
}
