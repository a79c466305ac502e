package rest

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strconv"

	"github.com/berth-sandbox/berth/allocator/core"
)

// NextTokenHeader is the header of a page with the nextToken of the next page. The last page has
// none.
const NextTokenHeader = "X-Next-Token"

// OutstandingHeader is the header of a release's answer with the number of routers that may still
// know the route.
const OutstandingHeader = "Berth-Routers-Outstanding"

func (a *api) get(w *reply, r *http.Request) error {
	id := r.PathValue("id")
	s, known, err := a.Allocator.Sandbox(r.Context(), id)
	if err != nil {
		return err
	}
	if !known || s.Phase == core.Released || s.Phase == core.Ended {
		return notFound(id, s, known)
	}
	return writeJSON(w, http.StatusOK, a.toSandbox(s))
}

func (a *api) list(w *reply, r *http.Request) error {
	limit, err := decodeLimit(r, defaultPage, maxPage)
	if err != nil {
		return err
	}
	after, err := decodeToken(r.URL.Query()["nextToken"])
	if err != nil {
		return err
	}
	if err := w.rows(limit); err != nil {
		return err
	}
	page, more, err := a.Allocator.Live(r.Context(), after, limit)
	if err != nil {
		return err
	}
	if more {
		last := page[len(page)-1]
		w.Header().Set(NextTokenHeader, encodeToken(core.Mark{ClaimedAt: last.ClaimedAt, ID: last.ID}))
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = io.WriteString(w, "[")
	for i, s := range page { // one by one, so that the answer never exceeds its room
		if i > 0 {
			_, _ = io.WriteString(w, ",")
		}
		raw, err := json.Marshal(a.toSandbox(s))
		if err != nil {
			return fmt.Errorf("encode answer: %w", err)
		}
		if _, _ = w.Write(raw); w.full {
			return nil
		}
	}
	_, _ = io.WriteString(w, "]")
	return nil
}

func (a *api) kill(w *reply, r *http.Request) error {
	id := r.PathValue("id")
	status, outstanding, err := a.Allocator.Release(r.Context(), id, core.ReasonKilled)
	if err != nil {
		return err
	}
	if err := notLive(id, status); err != nil {
		return err
	}
	w.Header().Set(OutstandingHeader, strconv.Itoa(outstanding))
	w.WriteHeader(http.StatusNoContent)
	return nil
}
