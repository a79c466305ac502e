package cli

import "errors"

// ErrHelp is returned by Parse when it has printed the help or the version.
var ErrHelp = errors.New("help was printed")
