package rest

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

func TestBatchClaimCarriesEveryField(t *testing.T) {
	f := &fake{}
	body := `{"pool":"python","count":3,"atLeast":2,"timeout":60,"idleTimeout":90,"activity":"Bytes","minBytesPerMinute":7,"waitTimeout":5,"metadata":{"a":"b"},"user":"ada","access":"team","secure":true,"network":{"maskRequestHost":"localhost:${PORT}","httpsPorts":[8443,443]}}`
	w := call(handlerWithAccess(t, f), "POST", "/v1/claims", body)
	require.Equal(t, http.StatusCreated, w.Code, w.Body)
	idle, bytes := 90*time.Second, uint64(7)
	require.Equal(t, "python", f.pool)
	require.Equal(t, core.Claim{
		Binding: core.Binding{
			RequestHash: sha256.Sum256([]byte(body)), Metadata: map[string]string{"a": "b"}, User: "ada", Access: core.AccessTeam,
			MaskHost: "localhost:${PORT}", HTTPSPorts: []uint16{443, 8443},
		},
		Count: 3, AtLeast: 2, Lifetime: time.Minute, IdleTimeout: &idle, MinBytes: &bytes, Wait: 5 * time.Second,
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

// manyPorts is the longest list of ports that a claim may have.
func manyPorts() string {
	ports := make([]string, 64)
	for i := range ports {
		ports[i] = strconv.Itoa(60000 + i)
	}
	return "[" + strings.Join(ports, ",") + "]"
}

func TestBatchClaimRefusesWhatASingleClaimRefuses(t *testing.T) {
	for _, fields := range []string{`"autoPause":true`, `"allow_internet_access":false`, `"network":{"allowOut":["a.b"]}`, `"iam":{"a":{}}`} {
		h := handler(t, gatewayPool(v1alpha1.EgressNone))
		one := refusal(t, call(h, "POST", "/sandboxes", `{"templateID":"python",`+fields+`}`), http.StatusNotImplemented, apierror.NotImplemented)
		batch := refusal(t, call(h, "POST", "/v1/claims", `{"pool":"python","count":2,`+fields+`}`), http.StatusNotImplemented, apierror.NotImplemented)
		require.Equal(t, one.Message, batch.Message)
	}
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
		`{"pool":"p","count":1000,"metadata":{"k":"` + strings.Repeat("x", 200) + `"}}`:              "metadata",
		`{"pool":"p","count":1000,"network":{"maskRequestHost":"` + strings.Repeat("x", 200) + `"}}`: "network.maskRequestHost",
		`{"pool":"p","count":1000,"network":{"httpsPorts":` + manyPorts() + `}}`:                     "network.httpsPorts",
		`{"pool":"p","count":1,"network":{"maskRequestHost":"a b"}}`:                                 "network.maskRequestHost",
		`{"pool":"p","count":1,"metadata":{"idle_timeout":"x"}}`:                                     "metadata.idle_timeout",
		`{"pool":"p","count":1,"minBytesPerMinute":5}`:                                               "minBytesPerMinute",
	} {
		f := &fake{}
		e := refusal(t, call(handler(t, f), "POST", "/v1/claims", body), http.StatusBadRequest, apierror.BadRequest)
		require.Contains(t, e.Message, field, body)
		require.Zero(t, f.claims)
	}
}

const largeBatch = `{"pool":"python","count":1000}`

func TestWaitingBatchesReserveNoRoomForAnswers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := handler(t, &fake{blockClaims: true})
		ctx, cancel := context.WithCancel(t.Context())
		var waiting sync.WaitGroup
		for range answerBytes>>20 + 1 {
			waiting.Go(func() {
				serve(h, httptest.NewRecorder(), request(ctx, "POST", "/v1/claims", strings.NewReader(largeBatch)))
			})
		}
		synctest.Wait()
		require.Equal(t, http.StatusOK, call(h, "GET", "/v1/last-active?limit=10000", "").Code)
		cancel()
		waiting.Wait()
	})
}

func TestBatchIsAnsweredBeyondTheBudget(t *testing.T) {
	leader := &fake{}
	at := listen(t, handler(t, leader))
	for name, f := range map[string]*fake{"leader": {}, "follower": {leader: at}} {
		a := &api{
			Options: Options{Allocator: f, PublicScheme: "https", PublicHost: "sandbox.example.com", Log: zap.NewNop()},
			claims:  newClass(2, answerWait), answers: newBudget(0), audit: newAudit(zap.NewNop()), forwarder: newForwarder(nil, zap.NewNop()),
		}
		h := a.handle(action{class: a.claims, f: a.claimBatch, large: true}, operation(t, "claimBatch"))
		w := call(h, "POST", "/v1/claims", largeBatch)
		require.Equal(t, http.StatusCreated, w.Code, "%s: %s", name, w.Body)
		var answer openapi.Claims
		require.NoError(t, json.Unmarshal(w.Body.Bytes(), &answer))
		require.Len(t, answer.Sandboxes, 1000)
		require.Zero(t, a.answers.left, "%s: its room is returned", name)

		// While such answers are sent, a further batch is refused before it claims anything.
		a.answers.overdraw("another", 1)
		f.claims, leader.claims = 0, 0
		refusal(t, call(h, "POST", "/v1/claims", largeBatch), http.StatusServiceUnavailable, apierror.Overloaded)
		require.Zero(t, f.claims+leader.claims)
	}
}
