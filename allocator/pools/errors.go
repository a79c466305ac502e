package pools

import "errors"

// errNoPolicy is returned by Policy.Check of the zero Policy.
var errNoPolicy = errors.New("pools: no policy is set")
