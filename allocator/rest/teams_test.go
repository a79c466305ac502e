package rest

import (
	"encoding/json"
	"fmt"
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/allocator/access"
	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/internal/version"
)

func TestCallerIsThatOfTheKey(t *testing.T) {
	keys := knownKeys{keyOne: {Key: "one", Team: "blue", Role: access.ReadOnly}}
	w := callWith(handlerWithKeys(t, &fake{}, keys), "GET", "/v1/caller", http.Header{"X-Api-Key": {keyOne}})
	require.Equal(t, http.StatusOK, w.Code, w.Body)
	var shown openapi.Caller
	require.NoError(t, json.Unmarshal(w.Body.Bytes(), &shown))
	require.Equal(t, openapi.Caller{
		Key: "one", Team: "blue", Role: openapi.ReadOnly, PublicURL: "https://sandbox.example.com:8443", Version: version.Number,
	}, shown)
	w = call(handler(t, &fake{}), "GET", "/v1/caller", "")
	require.Contains(t, w.Body.String(), `"role":"admin"`)
}

func TestTeamsShowLimitsUseAndNamesOfKeys(t *testing.T) {
	keys := knownKeys{keyOne: {Key: "one", Team: "blue", Role: access.Admin}, keyTwo: {Key: "two", Team: "blue", Role: access.ReadOnly}}
	for i := range 120 {
		name := fmt.Sprintf("k%03d", i)
		keys["many-"+name] = access.Caller{Key: name, Team: "many", Role: access.Member}
	}
	f := &fake{truncated: 3, teams: []core.TeamStatus{{Team: "blue", Use: core.TeamUse{Sandboxes: 4, Waiting: 2}}, {Team: "many"}}}
	f.teams[0].Limits.MaxSandboxes, f.teams[0].Limits.ClaimsPerSecond = 10, 2.5
	w := callWith(handlerWithKeys(t, f, keys), "GET", "/v1/teams?limit=2", http.Header{"X-Api-Key": {keyOne}})
	require.Equal(t, http.StatusOK, w.Code, w.Body)
	require.Equal(t, []int{2}, f.limits)
	require.Equal(t, []string{"blue", "many"}, f.asked)
	var shown openapi.TeamStatuses
	require.NoError(t, json.Unmarshal(w.Body.Bytes(), &shown))
	require.Equal(t, 3, shown.Truncated)
	require.Equal(t, openapi.TeamStatus{
		Team: "blue", Sandboxes: 4, Waiting: 2, Limits: openapi.TeamLimits{MaxSandboxes: 10, ClaimsPerSecond: 2.5},
		Keys: []openapi.KeyOfTeam{{Name: "one", Role: "admin"}, {Name: "two", Role: "read-only"}},
	}, shown.Teams[0])
	require.Len(t, shown.Teams[1].Keys, 100)
	require.Equal(t, 20, shown.Teams[1].KeysOthers)
	require.NotContains(t, w.Body.String(), keyOne)

	member := callWith(handlerWithKeys(t, f, keys), "GET", "/v1/teams", http.Header{"X-Api-Key": {keyTwo}})
	require.Equal(t, http.StatusForbidden, member.Code)
}
