package rest

import (
	"crypto/sha256"
	"encoding/json"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/openapi"
)

func TestBatchClaimCarriesEveryField(t *testing.T) {
	f := &fake{}
	body := `{"pool":"python","count":3,"atLeast":2,"timeout":60,"idleTimeout":90,"activity":"Bytes","minBytesPerMinute":7,"waitTimeout":5,"metadata":{"a":"b"},"user":"ada"}`
	w := call(handler(t, f), "POST", "/v1/claims", body)
	require.Equal(t, http.StatusCreated, w.Code, w.Body)
	idle, bytes := 90*time.Second, uint64(7)
	require.Equal(t, "python", f.pool)
	require.Equal(t, core.Claim{
		Binding: core.Binding{RequestHash: sha256.Sum256([]byte(body)), Metadata: map[string]string{"a": "b"}, User: "ada"},
		Count:   3, AtLeast: 2, Lifetime: time.Minute, IdleTimeout: &idle, MinBytes: &bytes, Wait: 5 * time.Second,
	}, f.claim)
	var answer openapi.Claims
	require.NoError(t, json.Unmarshal(w.Body.Bytes(), &answer))
	require.Len(t, answer.Sandboxes, 2)
	require.Equal(t, "k3x1", answer.Sandboxes[1].SandboxID)
	require.Equal(t, "https://8080-k3x1.sandbox.example.com:8443/", answer.Sandboxes[1].URL)
	require.Equal(t, []string{"gone0"}, answer.Ended)
}

func TestBatchClaimWantsAllUnlessItSays(t *testing.T) {
	f := &fake{}
	w := call(handler(t, f), "POST", "/v1/claims", `{"pool":"python","count":3}`)
	require.Equal(t, http.StatusCreated, w.Code, w.Body)
	require.Equal(t, 3, f.claim.AtLeast)
	require.Equal(t, claimWait, f.claim.Wait)
	require.Contains(t, w.Body.String(), `"ended":[]`)
}

func TestWrongBatchClaimNamesTheField(t *testing.T) {
	for body, field := range map[string]string{
		`{"count":1}`:                           "pool",
		`{"pool":"p"}`:                          "count",
		`{"pool":"p","count":0}`:                "count",
		`{"pool":"p","count":1001}`:             "count",
		`{"pool":"p","count":2,"atLeast":3}`:    "atLeast",
		`{"pool":"p","count":2,"atLeast":0}`:    "atLeast",
		`{"pool":"p","count":2,"templateID":1}`: "templateID",
		`{"pool":"p","count":1000,"metadata":{"k":"` + strings.Repeat("x", 200) + `"}}`: "metadata",
		`{"pool":"p","count":1,"minBytesPerMinute":5}`:                                  "minBytesPerMinute",
	} {
		f := &fake{}
		e := refusal(t, call(handler(t, f), "POST", "/v1/claims", body), http.StatusBadRequest, apierror.BadRequest)
		require.Contains(t, e.Message, field, body)
		require.Zero(t, f.claims)
	}
}
