package history

import (
	"net/http"
	"slices"
)

// expected are the answers that a caller of the API may get, whatever happens to allocators,
// beside none and 503.
var expected = map[Kind][]int{
	Claim:   {http.StatusCreated, http.StatusGone, http.StatusTooManyRequests},
	Read:    {http.StatusOK, http.StatusNotFound},
	Release: {http.StatusNoContent, http.StatusNotFound},
}

// Refused finds calls that were answered with a status which no caller must get.
func Refused(h *History) []Violation {
	var all found
	for i := range h.Events {
		e := &h.Events[i]
		known, call := expected[e.Kind]
		if !call || e.Code == 0 || e.Code == http.StatusServiceUnavailable || slices.Contains(known, e.Code) {
			continue
		}
		all.add("refused", "%s of %s%s at %v was answered %d: %s", e.Kind, e.Claim, e.Sandbox, e.Ended, e.Code, e.Error)
	}
	return all
}
