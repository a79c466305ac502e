package rest

import (
	"encoding/json"
	"math"
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/allocator/history"
)

func TestHistoryShowsUnknownValuesAsNull(t *testing.T) {
	ring := history.New(noon)
	ring.Put(0, history.Point{
		Claimed: 1, Refused: 2, Failed: 3, Warm: 4, Waited: 5, Empty: 6, Called: 7, Idle: 8, Other: 9, PodsFailed: 10,
		ClaimP50: .0123456, ClaimP99: 2, AcknowledgedP99: .5, Live: 11,
	})
	ring.Put(2, history.Point{ClaimP50: math.NaN(), ClaimP99: math.NaN(), AcknowledgedP99: math.NaN(), Live: -1})
	f := &fake{history: ring}
	w := call(handler(t, f), "GET", "/v1/history", "")
	require.Equal(t, http.StatusOK, w.Code, w.Body)
	require.JSONEq(t, `{
		"since": "2030-01-01T12:00:00Z", "until": "2030-01-01T12:00:30Z", "stepSeconds": 10,
		"claimsClaimed": [1, null, 0], "claimsRefused": [2, null, 0], "claimsFailed": [3, null, 0],
		"claimP50Seconds": [0.01235, null, null], "claimP99Seconds": [2, null, null],
		"poolWarm": [4, null, 0], "poolWaited": [5, null, 0], "poolRefused": [6, null, 0], "live": [11, null, null],
		"releasesCalled": [7, null, 0], "releasesIdle": [8, null, 0], "releasesOther": [9, null, 0],
		"releaseAcknowledgedP99Seconds": [0.5, null, null], "podFailures": [10, null, 0]
	}`, w.Body.String())

	f.history = history.New(noon) // a leader that was elected just now
	w = call(handler(t, f), "GET", "/v1/history", "")
	var empty struct{ Live []int }
	require.NoError(t, json.Unmarshal(w.Body.Bytes(), &empty))
	require.NotNil(t, empty.Live)
	require.Empty(t, empty.Live)
}
