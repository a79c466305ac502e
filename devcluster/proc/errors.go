package proc

import "errors"

// ErrClosed is returned by [Supervisor.Start] and [Supervisor.TempDir] after
// [Supervisor.Close].
var ErrClosed = errors.New("proc: supervisor is closed")
