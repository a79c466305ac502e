package rest

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

func TestCreateAnswersInE2BShape(t *testing.T) {
	for _, path := range []string{"/sandboxes", "/v2/sandboxes"} {
		f := &fake{}
		w := call(handler(t, f), "POST", path, `{"templateID":"python","timeout":60,"metadata":{"user":"ada","":""}}`)
		require.Equal(t, http.StatusCreated, w.Code, w.Body)
		require.JSONEq(t, `{
			"sandboxID": "k3x9", "templateID": "python", "clientID": "berth", "envdVersion": "0.1.0",
			"domain": "sandbox.example.com:8443", "url": "https://8080-k3x9.sandbox.example.com:8443/",
			"state": "running", "startedAt": "2030-01-01T12:00:00Z", "endAt": "2030-01-01T12:01:00Z",
			"metadata": {"user": "ada", "": ""}, "podName": "python-abcdef", "access": "public",
			"alias": "python", "phase": "running", "cpuCount": 0, "memoryMB": 0, "diskSizeMB": 0
		}`, w.Body.String())
		require.Equal(t, "python", f.pool)
		require.Equal(t, map[string]string{"user": "ada", "": ""}, f.claim.Binding.Metadata)
		require.Equal(t, time.Minute, f.claim.Lifetime)
	}
}

func TestCreateFillsInDefaults(t *testing.T) {
	for _, body := range []string{
		`{"templateID":"python"}`,
		`{"templateID":"python","timeout":null,"metadata":null}`,
		// What SDKs send for what their caller has not set.
		`{"templateID":"python","secure":false,"envVars":{},"mcp":null,"volumeMounts":[],"autoResume":{"enabled":false}, "metadata":{}}`,
		`{"templateID":"python","secure":true,"allow_internet_access":true,"autoPause":false,"network":{"allowPublicTraffic":true,"allowOut":[]}}`,
		" \n{ \"templateID\" : \"python\" , \"envVars\" : { } }\n",
	} {
		f := &fake{}
		w := call(handler(t, f), "POST", "/sandboxes", body)
		require.Equal(t, http.StatusCreated, w.Code, body)
		require.Equal(t, core.Claim{
			Binding: core.Binding{RequestHash: sha256.Sum256([]byte(body))}, Lifetime: 300 * time.Second, Wait: claimWait,
		}, f.claim, body)
	}
}

func TestTimeoutBounds(t *testing.T) {
	for timeout, ok := range map[string]bool{
		"1": true, "300": true, "31536000": true,
		"0": false, "-1": false, "31536001": false, "9223372036854775807": false, "9223372036854775808": false,
		"1.5": false, `"60"`: false, "true": false, "[60]": false, "1e2": true, "60.0": true,
	} {
		f := &fake{}
		w := call(handler(t, f), "POST", "/sandboxes", `{"templateID":"python","timeout":`+timeout+`}`)
		if ok {
			require.Equal(t, http.StatusCreated, w.Code, timeout)
			continue
		}
		require.Contains(t, refusal(t, w, 400, apierror.BadRequest).Message, "timeout", timeout)
		require.Empty(t, f.pool, "a refused request claimed a pod")
	}
}

func TestWaitTimeoutBounds(t *testing.T) {
	for wait, want := range map[string]time.Duration{
		"0": 0, "1": time.Second, "300": MaxWait, "null": claimWait, "-1": -1, "301": -1, "9223372036854775807": -1, "1.5": -1, `"1"`: -1,
	} {
		f := &fake{}
		w := call(handler(t, f), "POST", "/sandboxes", `{"templateID":"python","waitTimeout":`+wait+`}`)
		if want >= 0 {
			require.Equal(t, http.StatusCreated, w.Code, wait)
			require.Equal(t, want, f.claim.Wait, wait)
			continue
		}
		require.Contains(t, refusal(t, w, 400, apierror.BadRequest).Message, "waitTimeout", wait)
		require.Empty(t, f.pool, "a refused request claimed a pod")
	}
}

func TestClaimRecordsTheTeamAndUser(t *testing.T) {
	f := &fake{}
	h := handlerWithKeys(t, f, keysIn(map[string]string{"ada-team": "0123456789abcdef"}))
	r := request(t.Context(), http.MethodPost, "/sandboxes", strings.NewReader(`{"templateID":"python","user":"ada"}`))
	r.Header.Set("X-API-Key", "0123456789abcdef")
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	require.Equal(t, http.StatusCreated, w.Code, w.Body)
	require.Equal(t, "ada-team", f.claim.Binding.Team)
	require.Equal(t, "ada", f.claim.Binding.User)
	require.Contains(t, w.Body.String(), `"user":"ada"`)
	w = call(handler(t, &fake{}), "POST", "/sandboxes", `{"templateID":"python","user":"`+strings.Repeat("u", 257)+`"}`)
	require.Contains(t, refusal(t, w, 400, apierror.BadRequest).Message, "user")
}

func TestIdempotencyKeyIsValidated(t *testing.T) {
	const body = `{"templateID":"python"}`
	for key, ok := range map[string]bool{
		"k": true, "8e03978e-40d5-43e8-bc93-6894a57f9324": true, "with space": true, strings.Repeat("k", 255): true,
		"": false, strings.Repeat("k", 256): false, "caf\xc3\xa9": false, "tab\t": false,
	} {
		f := &fake{}
		r := request(t.Context(), http.MethodPost, "/sandboxes", strings.NewReader(body))
		r.Header.Set("X-Request-Id", "req-1")
		r.Header["Idempotency-Key"] = []string{key}
		w := httptest.NewRecorder()
		handler(t, f).ServeHTTP(w, r)
		if !ok {
			require.Contains(t, refusal(t, w, 400, apierror.BadRequest).Message, "Idempotency-Key", key)
			require.Empty(t, f.pool)
			continue
		}
		require.Equal(t, http.StatusCreated, w.Code, key)
		require.Equal(t, key, f.claim.Binding.IdempotencyKey)
		require.Equal(t, sha256.Sum256([]byte(body)), f.claim.Binding.RequestHash)
	}
	r := request(t.Context(), http.MethodPost, "/sandboxes", strings.NewReader(body))
	r.Header.Set("X-Request-Id", "req-1")
	r.Header["Idempotency-Key"] = []string{"a", "b"}
	w := httptest.NewRecorder()
	handler(t, &fake{}).ServeHTTP(w, r)
	refusal(t, w, 400, apierror.BadRequest)
}

func TestStartingSandboxHasPhaseStarting(t *testing.T) {
	w := call(handler(t, &fake{phase: core.Starting}), "POST", "/sandboxes", `{"templateID":"python"}`)
	require.Equal(t, http.StatusCreated, w.Code)
	require.Contains(t, w.Body.String(), `"phase":"starting"`)
}

func TestCreateRefusesInvalidBodies(t *testing.T) {
	for body, says := range map[string]string{
		"":                                       "body",
		"null":                                   "body",
		"[]":                                     "body",
		`"python"`:                               "body",
		"{":                                      "body",
		`{"templateID":"python"}{}`:              "body",
		`{"templateID":"python",}`:               "body",
		"{}":                                     "templateID",
		`{"templateID":""}`:                      "templateID",
		`{"templateID":null}`:                    "templateID",
		`{"templateID":7}`:                       "templateID",
		`{"templateID":["python"]}`:              "templateID",
		"{\"templateID\":\"pyth\xffon\"}":        "UTF-8",
		`{"templateID":"python","metadata":"x"}`: "metadata",
		`{"templateID":"python","metadata":["x"]}`:                                                                             "metadata",
		`{"templateID":"python","metadata":{"a":1}}`:                                                                           "metadata",
		`{"templateID":"python","metadata":{"a":null}}`:                                                                        "metadata",
		`{"templateID":"python","metadata":{"a":{}}}`:                                                                          "metadata",
		`{"templateID":"python","metadata":{"a":"` + strings.Repeat("x", 2048) + `"}}`:                                         "metadata",
		`{"templateID":"python","metadata":{"` + strings.Repeat("k", 2049) + `":""}}`:                                          "metadata",
		`{"templateID":"python","metadata":{"a":"` + strings.Repeat("x", 1024) + `","b":"` + strings.Repeat("x", 1023) + `"}}`: "metadata",
	} {
		f := &fake{}
		w := call(handler(t, f), "POST", "/sandboxes", body)
		require.Contains(t, refusal(t, w, 400, apierror.BadRequest).Message, says, body)
		require.Empty(t, f.pool, "a refused request claimed a pod")
	}
}

func TestMetadataAndBodyMayReachTheirLimits(t *testing.T) {
	metadata := `{"templateID":"python","metadata":{"a":"` + strings.Repeat("x", 2047) + `"}}`
	require.Equal(t, 201, call(handler(t, &fake{}), "POST", "/sandboxes", metadata).Code)
	full := `{"templateID":"python"}`
	full += strings.Repeat(" ", maxBody-len(full))
	require.Equal(t, 201, call(handler(t, &fake{}), "POST", "/sandboxes", full).Code)
	refusal(t, call(handler(t, &fake{}), "POST", "/sandboxes", full+" "), 413, apierror.BodyTooLarge)
}

func TestUnsupportedFieldsAreRefusedByName(t *testing.T) {
	for body, says := range map[string]string{
		`"autoPause":true`: "autoPause: the pods of this pool have no agent",
		`"autoPause":false,"autoResume":{"enabled":true}`: "autoResume.enabled: the pods of this pool have no agent",
		`"allow_internet_access":false`:                   "allow_internet_access: Use a NetworkPolicy",
		`"network":{"allowPublicTraffic":false}`:          "access: token needs a key",
		`"access":"team"`:                                 "access: team needs a key",
		`"network":{"allowOut":["10.0.0.0/8"]}`:           "network.allowOut: Use a NetworkPolicy",
		`"network":{"denyOut":["10.0.0.0/8"]}`:            "network.denyOut: Use a NetworkPolicy",
		`"network":{"dnsServers":["10.0.0.1"]}`:           "network.dnsServers: Set dnsConfig",
		`"network":{"egressProxy":{"address":"a:1"}}`:     "network.egressProxy: Set the proxy",
		`"volumeMounts":[{"name":"a","path":"/a"}]`:       "volumeMounts: Put volumes",
		`"iam":{"x":1}`:                                   "iam: ",
	} {
		f := gatewayPool(v1alpha1.EgressNone)
		w := call(handler(t, f), "POST", "/v2/sandboxes", `{"templateID":"python",`+body+`}`)
		require.Contains(t, refusal(t, w, 501, apierror.NotImplemented).Message, says)
		require.Empty(t, f.pool)
	}
}

func TestPoolMayAcceptPausesThatAreEnds(t *testing.T) {
	const body = `{"templateID":"python","timeout":60,"autoPause":true,"autoResume":{"enabled":true}}`
	for setting, code := range map[v1alpha1.AcceptPause]int{"": 501, v1alpha1.PauseRefused: 501, v1alpha1.PauseEnds: 201} {
		f := &fake{pools: []*v1alpha1.SandboxPool{{
			ObjectMeta: metav1.ObjectMeta{Name: "python"}, Spec: v1alpha1.SandboxPoolSpec{AcceptPause: setting},
		}}}
		w := call(handler(t, f), "POST", "/sandboxes", body)
		require.Equal(t, code, w.Code, w.Body)
		if code == 201 {
			require.Equal(t, time.Minute, f.claim.Lifetime, "it ends at its timeout")
		}
	}
}

func TestUnknownFieldsAreRefusedByName(t *testing.T) {
	for body, says := range map[string]string{
		`{"template":"python"}`:                            "template: unknown field; did you mean templateID?",
		`{"templateID":"python","Timeout":5}`:              "Timeout: unknown field; did you mean timeout?",
		`{"templateID":"python","color":"red"}`:            "color: unknown field",
		`{"templateID":"python","network":{"allowIn":[]}}`: "network.allowIn: unknown field; did you mean allowOut?",
	} {
		f := &fake{}
		require.Equal(t, says, refusal(t, call(handler(t, f), "POST", "/sandboxes", body), 400, apierror.BadRequest).Message)
		require.Empty(t, f.pool)
	}
}

func TestMetadataCanSetTheIdleTimeout(t *testing.T) {
	for body, want := range map[string]time.Duration{
		`"metadata":{"idle_timeout":"60"}`:                 time.Minute,
		`"metadata":{"idle_timeout":"0"}`:                  0,
		`"metadata":{"idle_timeout":"60"},"idleTimeout":7`: 7 * time.Second,
	} {
		f := &fake{}
		require.Equal(t, 201, call(handler(t, f), "POST", "/sandboxes", `{"templateID":"python",`+body+`}`).Code)
		require.Equal(t, want, *f.claim.IdleTimeout, body)
		require.Contains(t, f.claim.Binding.Metadata, "idle_timeout", "the SDK finds what it has set")
	}
	for text, says := range map[string]string{"soon": `metadata.idle_timeout: "soon": must be a number of seconds`, "3": "metadata.idle_timeout: 3: must be 0"} {
		w := call(handler(t, &fake{}), "POST", "/sandboxes", `{"templateID":"python","metadata":{"idle_timeout":"`+text+`"}}`)
		require.Contains(t, refusal(t, w, 400, apierror.BadRequest).Message, says)
	}
}

func TestUnknownParametersAreRefused(t *testing.T) {
	f := &fake{sandboxes: map[string]core.Sandbox{"k3x9": {}}}
	for _, c := range [][2]string{{"POST", "/sandboxes"}, {"GET", "/sandboxes"}, {"GET", "/v2/sandboxes"}, {"GET", "/sandboxes/k3x9"}, {"DELETE", "/sandboxes/k3x9"},
		{"POST", "/sandboxes/k3x9/timeout"}, {"POST", "/v1/sandboxes/k3x9/keepalive"}, {"GET", "/v1/sandboxes/k3x9"}} {
		e := refusal(t, call(handler(t, f), c[0], c[1]+"?color=red&zebra=1", `{"templateID":"python"}`), 400, apierror.BadRequest)
		require.Equal(t, "color: unknown parameter", e.Message)
		refusal(t, call(handler(t, f), c[0], c[1]+"?state=%zz", `{"templateID":"python"}`), 400, apierror.BadRequest)
		refusal(t, call(handler(t, f), c[0], c[1]+"?a;b", `{"templateID":"python"}`), 400, apierror.BadRequest)
	}
	require.Empty(t, f.pool)
	require.Empty(t, f.released)
}

func TestClaimRefusalsReachTheClient(t *testing.T) {
	f := &fake{err: fmt.Errorf("claim: %w", &apierror.Error{Code: 429, Reason: apierror.PoolEmpty, Message: "no warm pod", RetryAfter: 1})}
	w := call(handler(t, f), "POST", "/sandboxes", `{"templateID":"python"}`)
	refusal(t, w, 429, apierror.PoolEmpty)
	require.Equal(t, "1", w.Header().Get("Retry-After"))

	f.err = &apierror.Error{Code: 404, Reason: apierror.PoolNotFound, Message: "no such pool"}
	w = call(handler(t, f), "POST", "/sandboxes", `{"templateID":"python"}`)
	refusal(t, w, 404, apierror.PoolNotFound)
	require.Empty(t, w.Header().Get("Retry-After"))

	f.err = errors.New("secret")
	e := refusal(t, call(handler(t, f), "POST", "/sandboxes", `{"templateID":"python"}`), 500, apierror.Internal)
	require.NotContains(t, e.Message, "secret")
}
