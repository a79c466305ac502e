package pods

import "errors"

// ErrPreStop is wrapped by the error of CheckPreStop: a container of the pool's template
// has a preStop action other than sleep. It is shown in the pool's condition, so it has no prefix.
var ErrPreStop = errors.New("a container of a sandbox can have no preStop action but sleep: it must serve on after its deletion until no request can reach it; clean up on SIGTERM, which follows the sleep")
