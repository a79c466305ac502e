package sandboxobjects

import "errors"

// errCreatedAgain is returned when a deleted object has been created again before its
// finalizer could be removed.
var errCreatedAgain = errors.New("sandbox objects: the deleted object was created again")
