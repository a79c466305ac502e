package archive

import "errors"

var (
	// ErrTooManyFiles means that there are more entries than Options.MaxFiles.
	ErrTooManyFiles = errors.New("too many files")
	// ErrTooLarge means that the archive is longer than Options.MaxBytes before compression.
	ErrTooLarge = errors.New("too large")
	// ErrCorrupt means that the stream is not a whole archive: it was cut off or changed, or is something else.
	ErrCorrupt = errors.New("the archive is damaged")
	// ErrVersion means that the archive has a version that this program does not read.
	ErrVersion = errors.New("unknown version of the archive")
	// ErrNotAllowed means that a path or an entry may not be archived or restored: it is outside of Options.Paths, leads
	// through a symbolic link, or is a device.
	ErrNotAllowed = errors.New("not allowed")
	// ErrChanged means that a file has changed while it was archived, so a process runs that should be frozen.
	ErrChanged = errors.New("changed while it was archived")
)
