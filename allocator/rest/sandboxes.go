package rest

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/api/openapi"
)

// NextTokenHeader is the header of a page with the nextToken of the next page. The last page has
// none.
const NextTokenHeader = "X-Next-Token"

// OutstandingHeader is the header of a release's answer with the number of routers that may still
// know the route.
const OutstandingHeader = "Berth-Routers-Outstanding"

func (a *api) get(w *reply, r *http.Request) error {
	id := r.PathValue("sandboxID")
	s, known, err := a.Allocator.Sandbox(r.Context(), id)
	if err != nil {
		return err
	}
	if !known || s.Phase == core.Released || s.Phase == core.Ended {
		return notFound(id, s, known)
	}
	return writeJSON(w, http.StatusOK, a.toSandbox(s))
}

// filter is what a list selects.
type filter struct {
	template     string
	metadata     map[string]string
	startedAfter time.Time
	none         bool // no sandbox has the wanted states
}

func (f *filter) matches(s *core.Sandbox) bool {
	if s.ClaimedAt.Before(f.startedAfter) {
		return false
	}
	for k, v := range f.metadata {
		if own, ok := s.Metadata[k]; !ok || own != v {
			return false
		}
	}
	return true
}

// filterOf reads the parameters of a list.
func filterOf(query url.Values) (f filter, err error) {
	f.template = query.Get("template")
	f.none = query.Has("state") && !slices.Contains(strings.Split(query.Get("state"), ","), string(openapi.SandboxStateRunning))
	if text := query.Get("startedAfter"); text != "" {
		if f.startedAfter, err = time.Parse(time.RFC3339Nano, text); err != nil {
			return f, invalid("startedAfter: %v", err)
		}
	}
	f.metadata, err = decodeMetadata(query.Get("metadata"))
	return f, err
}

// scanned is how many sandboxes a list reads at a time.
const scanned = 500

// list answers with one page.
func (a *api) list(w *reply, r *http.Request) error {
	query := r.URL.Query()
	limit, err := decodeLimit(r, defaultPage)
	if err != nil {
		return err
	}
	after, err := decodeToken(query.Get("nextToken"))
	if err != nil {
		return err
	}
	filter, err := filterOf(query)
	if err != nil {
		return err
	}
	order := core.NewestFirst
	if query.Get("order") == string(openapi.Asc) {
		order = core.OldestFirst
	}
	if err := w.rows(limit); err != nil {
		return err
	}
	page, more, err := a.page(r.Context(), after, order, limit, filter)
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

// page returns at most limit sandboxes that a filter selects, and whether there are more. It reads
// them in parts, so that a filter that selects few of many holds up no other call.
func (a *api) page(ctx context.Context, after core.Mark, order core.Order, limit int, f filter) (page []core.Sandbox, more bool, err error) {
	if f.none {
		return nil, false, nil
	}
	for unread := true; unread; {
		var part []core.Sandbox
		if part, unread, err = a.Allocator.Live(ctx, f.template, after, order, max(scanned, limit)); err != nil {
			return nil, false, err
		}
		for _, s := range part {
			switch {
			case order == core.NewestFirst && s.ClaimedAt.Before(f.startedAfter):
				return page, false, nil
			case !f.matches(&s):
			case len(page) == limit:
				return page, true, nil
			default:
				page = append(page, s)
			}
		}
		if unread {
			last := part[len(part)-1]
			after = core.Mark{ClaimedAt: last.ClaimedAt, ID: last.ID}
		}
	}
	return page, false, nil
}

func (a *api) kill(w *reply, r *http.Request) error {
	id := r.PathValue("sandboxID")
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
