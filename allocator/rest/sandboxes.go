package rest

import (
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/api/openapi"
)

// NextTokenHeader is the header of a page with the nextToken of the next page. The last page has
// none.
const NextTokenHeader = "X-Next-Token"

// OutstandingHeader is the header of a release's answer with the number of routers that may still
// know the route.
const OutstandingHeader = "Berth-Routers-Outstanding"

func (a *api) get(w *reply, r *http.Request) error {
	s, err := a.live(r)
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, a.withCredentials(r.Context(), a.toSandbox(s), &s))
}

// filter is what a list selects: of its query, what has all the other properties.
type filter struct {
	Query
	metadata map[string]string
	user     string
	prefix   string       // of the ID
	phases   []core.Phase // none: all
	paused   *bool        // nil: all
}

func (f *filter) matches(s *core.Sandbox) bool {
	if s.ClaimedAt.Before(f.Since) || f.user != "" && s.User != f.user || !strings.HasPrefix(s.ID, f.prefix) || len(f.phases) > 0 && !slices.Contains(f.phases, s.Phase) ||
		f.paused != nil && *f.paused != isPaused(s) {
		return false
	}
	for k, v := range f.metadata {
		if own, ok := s.Metadata[k]; !ok || own != v {
			return false
		}
	}
	return true
}

// isPaused reports whether a sandbox is paused in E2B's words.
func isPaused(s *core.Sandbox) bool {
	return s.Phase == core.FallingAsleep || s.Phase == core.Asleep || s.Phase == core.Stopped
}

// podOf returns the name and the address of the pod of a sandbox. One that is stopped has none: its record has those of
// its former pod.
func podOf(s *core.Sandbox) (name, ip string) {
	if s.Phase == core.Stopped {
		return "", ""
	}
	return s.Pod.Name, s.IP.String()
}

// filterOf reads the parameters of a list that all lists have.
func filterOf(r *http.Request) (f filter, err error) {
	query := r.URL.Query()
	if f.Most, err = decodeLimit(r, defaultPage); err != nil {
		return f, err
	}
	if f.After, err = decodeToken(query.Get("nextToken")); err != nil {
		return f, err
	}
	if f.Order = core.NewestFirst; query.Get("order") == string(openapi.ListSandboxesParamsOrderAsc) {
		f.Order = core.OldestFirst
	}
	return f, nil
}

// list answers with one page.
func (a *api) list(w *reply, r *http.Request) error {
	filter, err := filterOf(r)
	if err != nil {
		return err
	}
	query := r.URL.Query()
	filter.Pool = query.Get("template")
	filter.Live = true
	if states := strings.Split(query.Get("state"), ","); query.Has("state") && len(states) < 2 {
		paused := states[0] == string(openapi.SandboxStatePaused)
		filter.paused = &paused
	}
	if text := query.Get("startedAfter"); text != "" {
		if filter.Since, err = time.Parse(time.RFC3339Nano, text); err != nil {
			return invalid("startedAfter: %v", err)
		}
	}
	if filter.metadata, err = decodeMetadata(query.Get("metadata")); err != nil {
		return err
	}
	page, next, err := a.page(w, r, filter)
	if err != nil {
		return err
	}
	if next != "" {
		w.Header().Set(NextTokenHeader, next)
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = io.WriteString(w, "[")
	err = writeEach(w, page, func(s core.Sandbox) any { return a.toSandbox(s) })
	_, _ = io.WriteString(w, "]")
	return err
}

// writeEach encodes entries one by one, so that the answer never exceeds its room.
func writeEach[T any](w *reply, entries []T, show func(T) any) error {
	for i, e := range entries {
		if i > 0 {
			_, _ = io.WriteString(w, ",")
		}
		raw, err := encode(show(e))
		if err != nil {
			return err
		}
		if _, _ = w.Write(raw); w.full {
			return nil
		}
	}
	return nil
}

// page returns the sandboxes of a page, and the token of the next page, "" for none.
func (a *api) page(w *reply, r *http.Request, f filter) (page []core.Sandbox, next string, err error) {
	if err := w.rows(f.Most); err != nil {
		return nil, "", err
	}
	limit := f.Most
	f.Most++
	if len(f.metadata) > 0 || f.user != "" || f.prefix != "" || len(f.phases) > 0 || f.paused != nil || !f.Since.IsZero() {
		f.Keep = f.matches
	}
	if page, err = a.Allocator.List(r.Context(), f.Query); err != nil || len(page) <= limit {
		return page, "", err
	}
	return page[:limit], encodeToken(markOf(&page[limit-1])), nil
}

func markOf(s *core.Sandbox) core.Mark { return core.Mark{ClaimedAt: s.ClaimedAt, ID: s.ID} }

func (a *api) kill(w *reply, r *http.Request) error {
	id := r.PathValue("sandboxID")
	status, outstanding, err := a.Allocator.Release(r.Context(), id, fact.ReasonKilled)
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
