package rest

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/credentials"
	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

func gatewayPool(mode v1alpha1.EgressMode) *fake {
	return &fake{pools: []*v1alpha1.SandboxPool{{
		ObjectMeta: metav1.ObjectMeta{Name: "python"}, Spec: v1alpha1.SandboxPoolSpec{Egress: &v1alpha1.PoolEgress{Mode: mode}},
	}}}
}

func TestClaimTakesTheNetworkRulesOfE2B(t *testing.T) {
	all := []string{"0.0.0.0/0"}
	for body, want := range map[string]core.EgressRules{
		``: {},
		`,"network":{"allowOut":[],"denyOut":null},"allow_internet_access":true`:     {},
		`,"allow_internet_access":false`:                                             {Deny: all},
		`,"allow_internet_access":false,"network":{"denyOut":["0.0.0.0/0"]}`:         {Deny: all},
		`,"allow_internet_access":false,"network":{"allowOut":["*.Example.com"]}`:    {Allow: []string{"*.Example.com"}, Deny: all},
		`,"network":{"denyOut":["192.0.2.0/24","2001:db8::/32"]}`:                    {Deny: []string{"192.0.2.0/24", "2001:db8::/32"}},
		`,"network":{"allowOut":["1.1.1.1","a.example"],"denyOut":["0.0.0.0/0"]}`:    {Allow: []string{"1.1.1.1", "a.example"}, Deny: all},
		`,"allow_internet_access":null,"network":{"allowOut":["1.1.1.1"]}`:           {Allow: []string{"1.1.1.1"}},
		`,"allow_internet_access":true,"network":{"denyOut":["1.1.1.1"],"rules":{}}`: {Deny: []string{"1.1.1.1"}},
	} {
		f := gatewayPool(v1alpha1.EgressGateway)
		require.Equal(t, 201, call(handler(t, f), "POST", "/v2/sandboxes", `{"templateID":"python"`+body+`}`).Code, body)
		require.Equal(t, want, f.claim.Binding.Network, body)
		hash := f.claim.Binding.RequestHash
		require.Equal(t, 201, call(handler(t, f), "POST", "/v1/claims", `{"pool":"python","count":1`+body+`}`).Code, body)
		require.Equal(t, want, f.claim.Binding.Network, body)
		if body != "" {
			require.Equal(t, 201, call(handler(t, f), "POST", "/v2/sandboxes", `{"templateID":"python"}`).Code)
			require.NotEqual(t, hash, f.claim.Binding.RequestHash, body)
		}
	}
}

func TestRulesThatNothingEnforcesAreRefused(t *testing.T) {
	for body, field := range map[string]string{
		`"network":{"allowOut":["1.1.1.1"]}`:                                "network.allowOut",
		`"network":{"denyOut":["1.1.1.1"]}`:                                 "network.denyOut",
		`"network":{"rules":{"a.example":[]}}`:                              "network.rules",
		`"allow_internet_access":false`:                                     "allow_internet_access",
		`"allow_internet_access":false,"network":{"denyOut":["not valid"]}`: "network.denyOut",
	} {
		for _, f := range []*fake{gatewayPool(""), gatewayPool(v1alpha1.EgressNone)} {
			e := refusal(t, call(handler(t, f), "POST", "/sandboxes", `{"templateID":"python",`+body+`}`), 501, apierror.NotImplemented)
			require.Equal(t, field+": "+noGateway, e.Message)
			require.Contains(t, e.Message, "spec.egress.mode of the pool")
			require.Zero(t, f.claims)
		}
	}
}

func TestRulesForAPoolThatIsMissingAreNotUnsupported(t *testing.T) {
	f := &fake{err: apierror.New(apierror.PoolNotFound, "no such pool")}
	for _, rules := range []string{`"network":{"denyOut":["1.1.1.1"]}`, `"allow_internet_access":false`} {
		refusal(t, call(handler(t, f), "POST", "/sandboxes", `{"templateID":"python",`+rules+`}`), 404, apierror.PoolNotFound)
	}
}

func TestWrongRulesAreRefusedByTheirField(t *testing.T) {
	many := `"1.1.1.1"` + strings.Repeat(`,"1.1.1.1"`, 64)
	long := `"` + strings.Repeat("a", 60) + `.example"` + strings.Repeat(`,"`+strings.Repeat("a", 60)+`.example"`, 60)
	for rules, says := range map[string]string{
		`"allowOut":["a.example"]`:                                  "allowOut",
		`"denyOut":["a.example"]`:                                   "denyOut",
		`"denyOut":["1.1.1.1/33"]`:                                  "denyOut",
		`"allowOut":["*"],"denyOut":["0.0.0.0/0"]`:                  "allowOut",
		`"allowOut":["https://a.example/"],"denyOut":["0.0.0.0/0"]`: "allowOut",
		`"allowOut":[` + many + `]`:                                 "allowOut",
		`"denyOut":[` + many + `]`:                                  "denyOut",
		`"allowOut":[` + long + `],"denyOut":["0.0.0.0/0"]`:         "4157 bytes: at most 4096 together",
		`"allowOut":["` + strings.Repeat("a", 1025) + `"]`:          "allowOut",
		`"allowOut":"a.example"`:                                    "allowOut",
	} {
		f := gatewayPool(v1alpha1.EgressGateway)
		e := refusal(t, call(handler(t, f), "POST", "/sandboxes", `{"templateID":"python","network":{`+rules+`}}`), 400, apierror.BadRequest)
		require.Contains(t, e.Message, "network.")
		require.Contains(t, e.Message, says)
		e = refusal(t, call(handler(t, f), "PUT", networkPath, `{`+rules+`}`), 400, apierror.BadRequest)
		require.NotContains(t, e.Message, "network.")
		require.Contains(t, e.Message, says)
		require.Zero(t, f.claims)
		require.Empty(t, f.kept)
	}
}

func TestInternetAccessTakesOneEntryOfTheList(t *testing.T) {
	f := gatewayPool(v1alpha1.EgressGateway)
	deny := `"denyOut":["1.1.1.1"` + strings.Repeat(`,"1.1.1.1"`, 63) + `]`
	body := `{"templateID":"python","allow_internet_access":false,"network":{` + deny + `}}`
	e := refusal(t, call(handler(t, f), "POST", "/sandboxes", body), 400, apierror.BadRequest)
	require.Contains(t, e.Message, "network.denyOut: 65 entries in one list: at most 64")
	e = refusal(t, call(handler(t, f), "PUT", networkPath, `{"allow_internet_access":false,`+deny+`}`), 400, apierror.BadRequest)
	require.Contains(t, e.Message, "denyOut: 65 entries in one list: at most 64")
	require.Zero(t, f.claims)
	require.Empty(t, f.kept)
}

// rulesBody are rules that set a header of each kind.
const rulesBody = `"rules":{"API.example.com":[{"transform":{"headers":{"Authorization":"Bearer canary"}}}],"api.example.com:8443":[{"transform":{"headers":{"X-Key":"k"}}}],"b.example":[{},{"transform":{"headers":null}}]}`

// Invariant: P38
func TestHeadersOfAClaimAreSealedForItsSandbox(t *testing.T) {
	sealer := credentials.NewSealer(accessKey(t))
	want := []credentials.Header{
		{Host: "api.example.com", Port: 443, Name: "authorization", Value: "Bearer canary"}, {Host: "api.example.com", Port: 8443, Name: "x-key", Value: "k"},
	}
	opens := func(id string, sealed []byte) {
		t.Helper()
		got, err := sealer.Open(id, sealed)
		require.NoError(t, err)
		require.Equal(t, want, got)
		_, err = sealer.Open("other", sealed)
		require.Error(t, err)
	}
	f := gatewayPool(v1alpha1.EgressGateway)
	h := handlerWithAccess(t, f)
	body := `{"templateID":"python","network":{` + rulesBody + `}}`
	require.Equal(t, 201, call(h, "POST", "/sandboxes", body).Code)
	require.Empty(t, f.claim.Binding.Network, "the sandbox has no ID yet")
	require.NotEqual(t, sha256.Sum256([]byte(body)), f.claim.Binding.RequestHash, "it would tell whether a guess is right")
	batch := `{"pool":"python","count":1,"network":{` + rulesBody + `}}`
	require.Equal(t, 201, call(h, "POST", "/v1/claims", batch).Code)
	require.NotEqual(t, sha256.Sum256([]byte(batch)), f.claim.Binding.RequestHash)
	opens("k3x9", f.claim.SealHeaders("k3x9"))
	require.Equal(t, 201, call(h, "POST", "/sandboxes", `{"templateID":"python","network":{"rules":{"b.example":[]}}}`).Code)
	require.Nil(t, f.claim.SealHeaders)

	f = &fake{status: core.CallOK}
	require.Equal(t, 204, call(handlerWithAccess(t, f), "PUT", networkPath, `{`+rulesBody+`}`).Code)
	opens("k3x9", f.rules.Headers)

	f = &fake{sandboxes: map[string]core.Sandbox{"k3x9": {Binding: core.Binding{ID: "k3x9", Network: f.rules}, Phase: core.Running}}}
	answer := call(handlerWithAccess(t, f), "GET", "/sandboxes/k3x9", "").Body.String()
	require.Contains(t, answer, `"headers":[{"host":"api.example.com","name":"authorization","port":443},{"host":"api.example.com","name":"x-key","port":8443}]`)
	require.NotContains(t, answer, "canary")
}

// Invariant: P38
func TestHeadersThatAreRefusedAreNeverRepeated(t *testing.T) {
	of := func(host, headers string) string {
		return `"rules":{"` + host + `":[{"transform":{"headers":{` + headers + `}}}]}`
	}
	secret := func(n int) string { return `"A":"` + strings.Repeat("canary ", n) + `x"` }
	var many []string
	for i := range 17 {
		many = append(many, fmt.Sprintf(`"a%d":"canary"`, i))
	}
	for rules, says := range map[string]string{
		of("*.a.example", secret(1)):                      "without a wildcard",
		of("1.1.1.1", secret(1)):                          "rules: host",
		of("a.example:80", secret(1)):                     "port 80",
		of("a.example", `"Host":"canary"`):                "proxies read it",
		of("a.example", `"Proxy-Authorization":"canary"`): "proxies read it",
		of("a.example", `"A":"canary\n"`):                 "control and format characters",
		of("a.example", `"A":""`):                         "1 to 4096",
		of("a.example", secret(700)):                      "",
		of("a.example", secret(580)):                      "4096 together",
		of("a.example", `"A":"canary","a":"canary"`):      "twice",
		of("a.example", strings.Join(many, ",")):          "rules",
		of("a.example", `"A":["canary"]`):                 "rules",
		`"rules":{"a.example":[{"canary":1}]}`:            "rules",
		`"rules":{"a.example":{"transform":"canary"}}`:    "rules",
		`"rules":{"A.example":[{"transform":{"headers":{"a":"canary"}}}],"a.example:443":[]}`: "same host",
	} {
		f := gatewayPool(v1alpha1.EgressGateway)
		for _, c := range [][3]string{
			{"POST", "/sandboxes", `{"templateID":"python","network":{` + rules + `}}`}, {"PUT", networkPath, `{` + rules + `}`},
		} {
			e := refusal(t, call(handlerWithAccess(t, f), c[0], c[1], c[2]), 400, apierror.BadRequest)
			require.Contains(t, e.Message, says)
			if !strings.Contains(rules, `"canary"`+":1") {
				require.NotContains(t, e.Message, "canary", rules)
			}
		}
		require.Zero(t, f.claims)
		require.Empty(t, f.kept)
	}
	refusal(t, call(handler(t, gatewayPool(v1alpha1.EgressGateway)), "POST", "/sandboxes",
		`{"templateID":"python","network":{`+rulesBody+`}}`), 501, apierror.NotImplemented) // there is no key
}

func TestRulesOfABatchAreBoundedTogether(t *testing.T) {
	f := gatewayPool(v1alpha1.EgressGateway)
	e := refusal(t, call(handler(t, f), "POST", "/v1/claims", `{"pool":"python","count":1000,"network":{"denyOut":["`+
		strings.Repeat(`10.100.100.100/32","`, 8)+`10.0.0.1"]}}`), 400, apierror.BadRequest)
	require.Contains(t, e.Message, "network.denyOut")
	require.Zero(t, f.claims)
	refusal(t, call(handlerWithAccess(t, f), "POST", "/v1/claims", `{"pool":"python","count":1000,"network":{`+rulesBody+`}}`), 400, apierror.BadRequest)
	require.Zero(t, f.claims)
}

const networkPath = "/sandboxes/k3x9/network"

func TestPutReplacesTheRulesOfASandbox(t *testing.T) {
	for body, want := range map[string]core.EgressRules{
		`{}`: {},
		`{"allowOut":["a.example"],"allow_internet_access":false}`: {Allow: []string{"a.example"}, Deny: []string{"0.0.0.0/0"}},
		`{"denyOut":["1.1.1.1"],"allow_internet_access":true}`:     {Deny: []string{"1.1.1.1"}},
	} {
		f := &fake{status: core.CallOK}
		for _, path := range []string{networkPath, "/v2" + networkPath} {
			require.Equal(t, http.StatusNoContent, call(handler(t, f), "PUT", path, body).Code, body)
		}
		require.Equal(t, want, f.rules, body)
		require.Equal(t, []string{"k3x9", "k3x9"}, f.kept)
	}
	for field, says := range map[string]string{
		`"egressProxy":{"address":"a:1"}`: "egressProxy: ", `"dnsServers":["1.1.1.1"]`: "dnsServers: ",
	} {
		f := &fake{}
		require.Contains(t, refusal(t, call(handler(t, f), "PUT", networkPath, `{`+field+`}`), 501, apierror.NotImplemented).Message, says)
		require.Empty(t, f.kept)
	}
	refusal(t, call(handler(t, &fake{}), "PUT", networkPath, `{"allowPublicTraffic":false}`), 400, apierror.BadRequest)
	refusal(t, call(handler(t, &fake{}), "PUT", networkPath, ``), 400, apierror.BadRequest)
}

func TestAnswerOfPutSaysWhetherTheRulesCount(t *testing.T) {
	for _, c := range []struct {
		status core.CallStatus
		why    string
		code   int
		reason apierror.Reason
	}{
		{core.CallUnknown, "", 404, apierror.SandboxNotFound}, {core.CallGone, "", 404, apierror.SandboxGone},
		{core.CallAsleep, "", 409, apierror.SandboxState}, {core.CallUnfit, "", 409, apierror.EgressMissing},
		{core.CallNotReady, "egress gateways that have not acknowledged them within 10s: 2", 503, apierror.EgressPending},
		{core.CallNotReady, "", 503, apierror.SandboxBusy}, // it is being archived
	} {
		f := &fake{status: c.status, why: c.why}
		w := call(handler(t, f), "PUT", networkPath, `{}`)
		e := refusal(t, w, c.code, c.reason)
		require.Equal(t, "k3x9", e.SandboxID)
		require.Equal(t, c.status == core.CallNotReady, w.Header().Get("Retry-After") != "")
		require.Contains(t, e.Message, f.why)
	}
}

func TestAnswersShowTheRulesInE2BsWords(t *testing.T) {
	for name, c := range map[string]struct {
		rules core.EgressRules
		shown string
	}{
		"none":            {core.EgressRules{}, `null,null`},
		"denied":          {core.EgressRules{Deny: []string{"0.0.0.0/0"}}, `false,{"allowPublicTraffic":true,"denyOut":["0.0.0.0/0"]}`},
		"some allowed":    {core.EgressRules{Allow: []string{"a.example"}, Deny: []string{"0.0.0.0/0"}}, `null,{"allowOut":["a.example"],"allowPublicTraffic":true,"denyOut":["0.0.0.0/0"]}`},
		"some are denied": {core.EgressRules{Deny: []string{"1.1.1.1"}}, `null,{"allowPublicTraffic":true,"denyOut":["1.1.1.1"]}`},
	} {
		f := &fake{sandboxes: map[string]core.Sandbox{"k3x9": {Binding: core.Binding{ID: "k3x9", Network: c.rules}, Phase: core.Running}}}
		var shown openapi.Sandbox
		require.NoError(t, json.Unmarshal(call(handler(t, f), "GET", "/sandboxes/k3x9", "").Body.Bytes(), &shown))
		raw, err := json.Marshal([]any{shown.AllowInternetAccess, shown.Network})
		require.NoError(t, err)
		require.Equal(t, "["+c.shown+"]", string(raw), name)
	}
}
