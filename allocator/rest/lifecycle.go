package rest

import (
	"cmp"
	"errors"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	"github.com/berth-sandbox/berth/allocator/access"
	"github.com/berth-sandbox/berth/allocator/eventlog"
	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/openapi"
)

// The log of events, in E2B's shapes.

// defaultEvents is the length of a page of events, as E2B documents it.
const defaultEvents = 10

// listEvents lists the events of all sandboxes, or of the one in the path.
func (a *api) listEvents(w *reply, r *http.Request) error {
	caller, query := access.From(r.Context()), r.URL.Query()
	filter := eventlog.Filter{Sandbox: r.PathValue("sandboxID"), All: caller.Role == access.Admin, Team: caller.Team}
	for _, types := range query["types"] {
		for one := range strings.SplitSeq(types, ",") {
			filter.Types = append(filter.Types, eventlog.Type(one))
		}
	}
	page := eventlog.Page{Ascending: query.Get("orderAsc") == "true"}
	var err1, err2 error
	page.Offset, err1 = number(query, "offset", 0)
	page.Most, err2 = number(query, "limit", defaultEvents)
	if err := errors.Join(err1, err2); err != nil {
		return err
	}
	log, err := a.Allocator.EventLog()
	if err != nil {
		return err
	}
	found, err := log.Read(filter, page)
	if err != nil {
		return noEvents(err)
	}
	shown := make([]openapi.LifecycleEvent, 0, len(found))
	for i := range found {
		e := &found[i]
		shown = append(shown, openapi.LifecycleEvent{
			ID: e.ID(), Version: eventlog.Version, Type: openapi.EventType(e.Type), Timestamp: e.Time(),
			EventCategory: eventlog.Category, EventLabel: e.Label(), EventData: e.Data(),
			SandboxID: e.Sandbox, SandboxExecutionID: e.Sandbox, SandboxTemplateID: e.Pool, SandboxBuildID: e.Build, SandboxTeamID: cmp.Or(e.Team, defaultTeam),
		})
	}
	return writeJSON(w, http.StatusOK, shown)
}

// noEvents says why the log cannot be read.
func noEvents(err error) error {
	if errors.Is(err, eventlog.ErrLoading) || errors.Is(err, eventlog.ErrOff) {
		return apierror.New(apierror.Overloaded, "%v; try again", err)
	}
	return err
}

// number reads a parameter that was checked against its schema.
func number(query url.Values, name string, absent int) (int, error) {
	text := query.Get(name)
	if text == "" {
		return absent, nil
	}
	n, err := strconv.Atoi(text)
	if err != nil {
		return 0, invalid("%s: %q: must be an integer", name, text)
	}
	return n, nil
}
