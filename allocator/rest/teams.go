package rest

import (
	"net/http"

	"github.com/berth-sandbox/berth/allocator/access"
	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/internal/version"
)

// maxKeysOfTeam bounds the keys of one team in an answer.
const maxKeysOfTeam = 100

// getCaller answers whose key the call has.
func (a *api) getCaller(w *reply, r *http.Request) error {
	c := access.From(r.Context())
	return writeJSON(w, http.StatusOK, openapi.Caller{
		Key: c.Key, Team: c.Team, Role: openapi.CallerRole(c.Role), PublicURL: a.PublicScheme + "://" + a.PublicHost, Version: version.Number,
	})
}

// listTeamStatuses answers with the teams, their limits and what they have of these.
func (a *api) listTeamStatuses(w *reply, r *http.Request) error {
	most, err := decodeLimit(r, defaultLimit)
	if err != nil {
		return err
	}
	var callers []access.Caller
	if a.Keys != nil {
		callers = a.Keys.Callers()
	}
	if err := w.rows(most + len(callers)); err != nil {
		return err
	}
	keys := map[string][]openapi.KeyOfTeam{}
	var names []string
	for _, c := range callers {
		if len(keys[c.Team]) == 0 {
			names = append(names, c.Team)
		}
		keys[c.Team] = append(keys[c.Team], openapi.KeyOfTeam{Name: c.Key, Role: string(c.Role)})
	}
	found, others, err := a.Allocator.Teams(r.Context(), names, most)
	if err != nil {
		return err
	}
	shown := openapi.TeamStatuses{Teams: make([]openapi.TeamStatus, 0, len(found)), Truncated: others}
	for _, t := range found {
		shown.Teams = append(shown.Teams, toTeam(t, keys[t.Team]))
	}
	return writeJSON(w, http.StatusOK, shown)
}

func toTeam(t core.TeamStatus, keys []openapi.KeyOfTeam) openapi.TeamStatus {
	n := min(len(keys), maxKeysOfTeam)
	return openapi.TeamStatus{
		Team: t.Team, Sandboxes: t.Sandboxes, Waiting: t.Waiting,
		Limits: openapi.TeamLimits{MaxSandboxes: t.Limits.MaxSandboxes, MaxWaiting: t.Limits.MaxWaiting, ClaimsPerSecond: t.Limits.ClaimsPerSecond},
		Keys:   append([]openapi.KeyOfTeam{}, keys[:n]...), KeysOthers: len(keys) - n,
	}
}
