package openapi

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/internal/printable"
)

func operationOf(t testing.TB, id string) Operation {
	t.Helper()
	d, err := Load()
	require.NoError(t, err)
	i := slices.IndexFunc(d.Operations, func(o Operation) bool { return o.ID == id })
	require.GreaterOrEqual(t, i, 0)
	return d.Operations[i]
}

func TestOperationsAreServedBehindEachServer(t *testing.T) {
	require.Equal(t, []string{"/sandboxes", "/v2/sandboxes"}, operationOf(t, "createSandbox").Paths)
	require.Equal(t, []string{"/v1/fences"}, operationOf(t, "listFences").Paths)
	require.NotEmpty(t, operationOf(t, "forkSandbox").Refused)
	require.Len(t, operationOf(t, "listSandboxes").Query, 7)
}

func TestProblemNamesFieldAndFix(t *testing.T) {
	create := operationOf(t, "createSandbox")
	for body, want := range map[string]string{
		`{}`:                                    "templateID: required",
		`[]`:                                    "body: must be an object",
		`null`:                                  "body: must be an object",
		`{"templateID":5}`:                      "templateID: must be a string",
		`{"templateID":""}`:                     "templateID: must not be empty",
		`{"template":"x"}`:                      "template: unknown field; did you mean templateID?",
		`{"templateID":"a","zzz":3}`:            "zzz: unknown field",
		`{"templateID":"a","timeout":"5m"}`:     "timeout: must be a number of seconds, such as 300",
		`{"templateID":"a","timeout":"soon"}`:   "timeout: must be an integer",
		`{"templateID":"a","timeout":3.5}`:      "timeout: must be an integer",
		`{"templateID":"a","timeout":0}`:        "timeout: 0: must be at least 1",
		`{"templateID":"a","waitTimeout":301}`:  "waitTimeout: 301: must be at most 300",
		`{"templateID":"a","metadata":{"x":5}}`: "metadata.x: must be a string",
		`{"templateID":"a","activity":"x"}`:     `activity: "x": must be one of Requests, Bytes`,
		`{"templateID":"a","network":{"allowPublicTrafic":false}}`: "network.allowPublicTrafic: unknown field; did you mean allowPublicTraffic?",
		`{"templateID":"a"} x`: "body: must be one JSON object: invalid character after top-level value",
	} {
		err := create.Body.Check([]byte(body))
		var problem *Problem
		require.ErrorAs(t, err, &problem, body)
		require.Equal(t, want, err.Error(), body)
		require.False(t, problem.Refused)
	}
}

// Every string of a call but the values of variables, secrets and files is a name that others see.
//
// Invariant: P18
func TestUnprintableCharactersAreRefusedOutsideOfData(t *testing.T) {
	const head = `{"templateID":"a",`
	create, batch := operationOf(t, "createSandbox"), operationOf(t, "claimBatch")
	for _, r := range []rune{0, '\n', '\t', 0x1b, 0x7f, 0x85, 0x9b, 0xad, 0x200b, 0x202e, 0x2028, 0x2029, 0x2066, 0xfeff, 0xfffe, 0xffff, 0x1fffe, 0xe0041} {
		raw, err := json.Marshal("x" + string(r) + "y")
		require.NoError(t, err)
		bad := string(raw)
		want := fmt.Sprintf("%U at byte 1: control and format characters are refused; remove it", r)
		shown := strings.Trim(printable.Line("x"+string(r)+"y"), `"`)
		for fields, field := range map[string]string{
			`"user":` + bad: "user", `"metadata":{"k":` + bad + `}`: "metadata.k", `"access":` + bad: "access",
			`"network":{"maskRequestHost":` + bad + `}`: "network.maskRequestHost", `"files":[{"path":` + bad + `,"content":""}]`: "files.0.path",
		} {
			require.EqualError(t, create.Body.Check([]byte(head+fields+`}`)), field+": "+want)
		}
		require.EqualError(t, create.Body.Check([]byte(`{"templateID":`+bad+`}`)), "templateID: "+want)
		require.EqualError(t, batch.Body.Check([]byte(`{"count":2,"pool":`+bad+`}`)), "pool: "+want)
		for fields, field := range map[string]string{
			`"mcp":{"a":{` + bad + `:"v"}}`: "mcp.a." + shown, `"metadata":{` + bad + `:"v"}`: "metadata." + shown, `"envVars":{` + bad + `:"v"}`: "envVars." + shown, bad + `:1`: shown,
		} {
			require.EqualError(t, create.Body.Check([]byte(head+fields+`}`)), field+": the name of the field: "+want)
		}
		for _, fields := range []string{
			`"envVars":{"A":` + bad + `}`, `"secrets":{"A":` + bad + `}`, `"files":[{"path":"/x","content":` + bad + `}]`,
			`"mcp":{"a":[` + bad + `,{"b":` + bad + `}]}`,
		} {
			require.NoError(t, create.Body.Check([]byte(head+fields+`}`)))
		}
		list := operationOf(t, "findSandboxes")
		require.EqualError(t, list.CheckQuery(url.Values{"user": {"x" + string(r) + "y"}}), "user: "+want)
		require.EqualError(t, list.CheckQuery(url.Values{"x" + string(r) + "y": {""}}), shown+": unknown parameter")
	}
	for _, text := range []string{"Grüße 世界", "👩\u200d💻", "می\u200cخواهم", "�"} {
		require.NoError(t, create.Body.Check([]byte(head+`"user":"`+text+`","metadata":{"`+text+`":"`+text+`"}}`)))
	}
}

func TestRepeatedNamesAreRefusedAtEveryDepth(t *testing.T) {
	create := operationOf(t, "createSandbox")
	for body, field := range map[string]string{
		`{"templateID":"a","templateID":"a"}`:                                                         "templateID",
		`{"templateID":"a","timeout":1,"user":"x","timeout":2}`:                                       "timeout",
		`{"templateID":"a","metadata":{"a":"1","b":"2","a":"3"}}`:                                     "metadata.a",
		`{"templateID":"a","metadata":{"a":"1","\u0061":"3"}}`:                                        "metadata.a",
		`{"templateID":"a","metadata":{"\"":"{:","a":"\\","\u0022":"x"}}`:                             `metadata."`,
		`{"templateID":"a","metadata":{"":"1","":"3"}}`:                                               "metadata.",
		`{"templateID":"a","files":[{"path":"a","content":""},{"path":"b","content":"","path":"c"}]}`: "files.1.path",
		`{"templateID":"a","mcp":[[{}],{"x":{"y":[1,{"z":1,"z":{}}]}}]}`:                              "mcp.1.x.y.1.z",
		`{"templateID":"a","envVars":{"A":"1","A":"2"}}`:                                              "envVars.A",
	} {
		require.EqualError(t, create.Body.Check([]byte(body)), field+": is there twice; send it once", body)
	}
	for _, body := range []string{
		`{"templateID":"a","metadata":{"a":":\":{","b":"\\"},"envVars":{"a":"\\\":"}}`, `{ "templateID" : "a:b" }`,
	} {
		require.NoError(t, create.Body.Check([]byte(body)), body)
	}
}

// A short body must not cost the server a long computation or a long answer.
func TestLargeNumbersAndNamesAreRefusedBriefly(t *testing.T) {
	create := operationOf(t, "createSandbox")
	long := strings.Repeat("x", 60_000)
	for _, fields := range []string{
		`"timeout":1e400`, `"timeout":1e999999`, `"timeout":-1e999999`, `"timeout":1e-999999`, `"timeout":0e999999`,
		`"timeout":1e999999999999`, `"timeout":1` + strings.Repeat("0", 60_000), `"metadata":{"a":1e999999}`, `"mcp":{"a":[1e999999]}`,
	} {
		err := create.Body.Check([]byte(`{"templateID":"a",` + fields + `}`))
		require.ErrorContains(t, err, "must be below 1e+18", "refused before the validator computes with it")
		require.Less(t, len(err.Error()), 500)
	}
	for _, fields := range []string{`"activity":"` + long + `"`, `"` + long + `":1`, `"network":{"` + long + `":1}`} {
		err := create.Body.Check([]byte(`{"templateID":"a",` + fields + `}`))
		require.Error(t, err)
		require.Less(t, len(err.Error()), 500)
	}
	require.NoError(t, create.Body.Check([]byte(`{"templateID":"a","timeout":31536000,"idleTimeout":0}`)))
}

func TestOnlyWhatChangesBehaviourIsRefused(t *testing.T) {
	create := operationOf(t, "createSandbox")
	for _, fields := range []string{
		`"secure":true`, `"allow_internet_access":true`, `"autoPause":false`, `"envVars":{}`, `"autoResume":{"enabled":false}`, `"mcp":null`,
		`"volumeMounts":[]`, `"network":{"allowPublicTraffic":true,"allowOut":[]}`, `"autoPauseMemory":true`,
		`"network":{"allowPublicTraffic":false,"maskRequestHost":"localhost","httpsPorts":[443]}`,
		`"allow_internet_access":false,"network":{"allowOut":["a.b"],"denyOut":["0.0.0.0/0"],"rules":{}}`,
	} {
		require.NoError(t, create.Body.Check([]byte(`{"templateID":"a",`+fields+`}`)), fields)
	}
	for fields, field := range map[string]string{
		`"volumeMounts":[{"name":"a"}]`:  "volumeMounts",
		`"network":{"dnsServers":["a"]}`: "network.dnsServers",
	} {
		var problem *Problem
		require.ErrorAs(t, create.Body.Check([]byte(`{"templateID":"a",`+fields+`}`)), &problem, fields)
		require.Equal(t, field, problem.Field)
		require.True(t, problem.Refused)
		require.NotEmpty(t, problem.Message)
	}
}

func TestQueryParametersAreChecked(t *testing.T) {
	list := operationOf(t, "listSandboxes")
	for query, want := range map[string]string{
		"limit=0": "limit: 0: must be at least 1", "limit=x": `limit: "x": must be an integer`, "limit=101": "limit: 101: must be at most 100",
		"state=x": `state: "x": must be one of running, paused`, "order=desc&order=asc": "order: must be given once", "color=1": "color: unknown parameter",
	} {
		values, err := url.ParseQuery(query)
		require.NoError(t, err)
		require.EqualError(t, list.CheckQuery(values), want)
	}
	values := url.Values{"limit": {"100"}, "state": {"running,paused"}, "order": {"asc"}, "startedAfter": {"2026-01-01T00:00:00.123Z"}, "metadata": {"a=b"}}
	require.NoError(t, list.CheckQuery(values))
}

// A body is either refused with a field, or it is JSON that the schema allows. Nothing panics.
func FuzzCheck(f *testing.F) {
	create := operationOf(f, "createSandbox")
	for _, seed := range []string{`{"templateID":"a","network":{"rules":1}}`, `{"a":[{}]}`, `1e400`, `{"templateID":"a","timeout":1e3}`, `{"":0}`, `{"a":{"b":1,"b":[2]}}`, "{\"a\u009b\":1}"} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		var problem *Problem
		err := create.Body.Check(raw)
		if err != nil && (!errors.As(err, &problem) || problem.Field == "" || problem.Message == "" || printable.Line(err.Error()) != err.Error()) {
			t.Fatalf("%q: %v", raw, err)
		}
	})
}

func BenchmarkCheck(b *testing.B) {
	create := operationOf(b, "createSandbox")
	body := []byte(`{"templateID":"python","timeout":300,"metadata":{"user":"ada"},"envVars":{},"secure":true}`)
	b.ReportAllocs()
	for b.Loop() {
		if err := create.Body.Check(body); err != nil {
			b.Fatal(err)
		}
	}
}
