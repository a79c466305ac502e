package cli

import "errors"

// ErrHelp is returned by Parse when it has printed the help or the version.
var ErrHelp = errors.New("help was printed")

// ExitUsage is the exit status after wrong arguments.
const ExitUsage = 2

type exitError struct {
	error
	code int
}

func (e *exitError) Unwrap() error { return e.error }

// WithExitCode returns err with an exit status for Main.
func WithExitCode(code int, err error) error { return &exitError{err, code} }

// ExitCode returns the exit status of an error: the outermost of WithExitCode, or 1. It is 0 for
// nil.
func ExitCode(err error) int {
	var e *exitError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &e):
		return e.code
	}
	return 1
}
