package rest

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/api/activity"
	"github.com/berth-sandbox/berth/api/apierror"
)

// The shortest is 6.5 s.
func TestIdleTimeoutBounds(t *testing.T) {
	for idle, ok := range map[string]bool{
		"0": true, "7": true, "300": true, "31536000": true,
		"1": false, "6": false, "-1": false, "31536001": false, "9223372036854775807": false, "9223372036854775808": false,
		"7.5": false, `"60"`: false, "true": false, "[60]": false,
	} {
		f := &fake{}
		w := call(handler(t, f), "POST", "/sandboxes", `{"templateID":"python","idleTimeout":`+idle+`}`)
		if ok {
			require.Equal(t, http.StatusCreated, w.Code, idle)
			require.Equal(t, idle, fmt.Sprint(int(f.claim.IdleTimeout.Seconds())))
			continue
		}
		require.Contains(t, refusal(t, w, 400, apierror.BadRequest).Message, "idleTimeout", idle)
		require.Empty(t, f.pool, "a refused request claimed a pod")
	}
	message := refusal(t, call(handler(t, &fake{}), "POST", "/sandboxes", `{"templateID":"python","idleTimeout":6}`), 400, apierror.BadRequest).Message
	require.Equal(t, "idleTimeout: 6: must be 0, for none, or 7 to 31536000 seconds", message)
}

func TestClaimChoosesItsActivity(t *testing.T) {
	bytes := func(n uint64) *uint64 { return &n }
	for body, want := range map[string]*uint64{
		``:                       nil,
		`,"activity":"Requests"`: bytes(0),
		`,"activity":"Bytes"`:    bytes(1024),
		`,"activity":"Bytes","minBytesPerMinute":2048`:        bytes(2048),
		`,"activity":"Bytes","minBytesPerMinute":1`:           bytes(1),
		`,"activity":"Bytes","minBytesPerMinute":1073741824`:  bytes(1 << 30),
		`,"activity":"Requests","minBytesPerMinute":null`:     bytes(0),
		`,"minBytesPerMinute":4096,"activity":"Bytes"`:        bytes(4096),
		`,"activity":"Bytes","idleTimeout":600,"timeout":900`: bytes(1024),
	} {
		f := &fake{}
		w := call(handler(t, f), "POST", "/sandboxes", `{"templateID":"python"`+body+`}`)
		require.Equal(t, http.StatusCreated, w.Code, body)
		require.Equal(t, want, f.claim.MinBytes, body)
	}
	for body, says := range map[string]string{
		`"activity":"Open"`:        `activity: "Open": must be one of Requests, Bytes`,
		`"activity":"bytes"`:       `activity: "bytes": must be`,
		`"activity":""`:            `activity: "": must be`,
		`"activity":1`:             "activity:",
		`"minBytesPerMinute":2048`: `minBytesPerMinute: 2048: needs "activity":"Bytes"`,
		`"activity":"Requests","minBytesPerMinute":2048`:    "minBytesPerMinute: 2048: has no meaning with activity Requests; leave it out",
		`"activity":"Bytes","minBytesPerMinute":0`:          "minBytesPerMinute: 0: must be at least 1",
		`"activity":"Bytes","minBytesPerMinute":-1`:         "minBytesPerMinute: -1: must be",
		`"activity":"Bytes","minBytesPerMinute":1073741825`: "minBytesPerMinute: 1073741825: must be",
		`"activity":"Bytes","minBytesPerMinute":1.5`:        "minBytesPerMinute:",
		`"activity":"Bytes","minBytesPerMinute":"1k"`:       "minBytesPerMinute:",
		`"openConnections":"BytesOnly","idleTimeout":600`:   "openConnections: unknown field",
	} {
		f := &fake{}
		w := call(handler(t, f), "POST", "/sandboxes", `{"templateID":"python",`+body+`}`)
		require.Contains(t, refusal(t, w, 400, apierror.BadRequest).Message, says, body)
		require.Empty(t, f.pool, "a refused request claimed a pod")
	}
}

// A sandbox has an end unless its claim chose another one.
func TestIdleTimeoutReplacesTheDefaultEnd(t *testing.T) {
	none := time.Duration(0)
	minute := time.Minute
	for body, want := range map[string]struct {
		lifetime time.Duration
		idle     *time.Duration
	}{
		``:                                  {defaultTimeout, nil},
		`,"idleTimeout":null`:               {defaultTimeout, nil},
		`,"idleTimeout":0`:                  {defaultTimeout, &none},
		`,"idleTimeout":60`:                 {0, &minute},
		`,"idleTimeout":60,"timeout":null`:  {0, &minute},
		`,"idleTimeout":60,"timeout":30`:    {30 * time.Second, &minute},
		`,"idleTimeout":0,"timeout":30`:     {30 * time.Second, &none},
		`,"idleTimeout":null,"timeout":900`: {15 * time.Minute, nil},
	} {
		f := &fake{}
		w := call(handler(t, f), "POST", "/sandboxes", `{"templateID":"python"`+body+`}`)
		require.Equal(t, http.StatusCreated, w.Code, body)
		require.Equal(t, want.lifetime, f.claim.Lifetime, body)
		require.Equal(t, want.idle, f.claim.IdleTimeout, body)
		require.Equal(t, want.lifetime == 0, strings.Contains(w.Body.String(), `"endAt":"9999-12-31T23:59:59Z"`), body)
		require.Equal(t, want.idle == &minute, strings.Contains(w.Body.String(), `"idleTimeout":60,`), body)
	}
}

func TestSandboxShowsItsEarliestEnd(t *testing.T) {
	for _, c := range []struct {
		end, lifetime time.Time
		shown         string
	}{
		{noon, time.Time{}, "12:00:00"},
		{time.Time{}, noon.Add(time.Hour), "13:00:00"},
		{noon, noon.Add(time.Hour), "12:00:00"},
		{noon.Add(2 * time.Hour), noon.Add(time.Hour), "13:00:00"},
	} {
		s := core.Sandbox{Binding: core.Binding{ID: "k3x9", ClaimedAt: noon, EndAt: c.end, LifetimeEnd: c.lifetime}}
		w := call(handler(t, &fake{sandboxes: map[string]core.Sandbox{"k3x9": s}}), "GET", "/sandboxes/k3x9", "")
		require.Contains(t, w.Body.String(), `"endAt":"2030-01-01T`+c.shown+`Z"`)
	}
}

func TestSetTimeoutMovesTheEnd(t *testing.T) {
	for _, path := range []string{"/sandboxes/k3x9/timeout", "/v2/sandboxes/k3x9/timeout"} {
		for body, want := range map[string]string{`{"timeout":1}`: "1s", "{ \"timeout\": 31536000 }\n": "8760h0m0s"} {
			f := &fake{status: core.CallOK}
			w := call(handler(t, f), "POST", path, body)
			require.Equal(t, http.StatusNoContent, w.Code, w.Body)
			require.Empty(t, w.Body.String())
			require.Equal(t, []string{"k3x9 " + want}, f.kept)
		}
	}
}

func TestSetTimeoutRefusesInvalidBodies(t *testing.T) {
	for body, says := range map[string]string{
		"": "body: must be", "{}": "timeout: required", `{"timeout":null}`: "timeout: must be an integer",
		`{"timeout":0}`: "timeout: 0: must be at least 1", `{"timeout":-1}`: "timeout: -1", `{"timeout":31536001}`: "timeout: 31536001",
		`{"timeout":1.5}`: "timeout", `{"timeout":"60"}`: "timeout", `{"timeout":9223372036854775808}`: "timeout",
		`{"timeout":60,"idleTimeout":60}`: "idleTimeout", `{"timeout":60}{}`: "body", `{"timeout":60}}`: "body", "null": "body", "[]": "body", "60": "body", "{": "body",
		"{\"timeout\":60\xff}": "UTF-8",
	} {
		f := &fake{status: core.CallOK}
		require.Contains(t, refusal(t, call(handler(t, f), "POST", "/sandboxes/k3x9/timeout", body), 400, apierror.BadRequest).Message, says, body)
		require.Empty(t, f.kept, body)
	}
	refusal(t, call(handler(t, &fake{}), "POST", "/sandboxes/k3x9/timeout", strings.Repeat(" ", maxBody+1)), 413, apierror.BodyTooLarge)
}

const keepAlivePath = "/v1/sandboxes/k3x9/keepalive"

func TestKeepAliveNeedsNoBody(t *testing.T) {
	for _, body := range []string{"", "{}", " { } "} {
		f := &fake{status: core.CallOK}
		w := call(handler(t, f), "POST", keepAlivePath, body)
		require.Equal(t, http.StatusNoContent, w.Code, w.Body)
		require.Equal(t, []string{"k3x9"}, f.kept)
	}
	for _, body := range []string{"null", "[]", `{"timeout":60}`, "{}{}", "x"} {
		f := &fake{status: core.CallOK}
		refusal(t, call(handler(t, f), "POST", keepAlivePath, body), 400, apierror.BadRequest)
		require.Empty(t, f.kept, body)
	}
}

func TestKeepAliveOfUnknownOrGoneSandboxIs404(t *testing.T) {
	for status, reason := range map[core.CallStatus]apierror.Reason{
		core.CallUnknown: apierror.SandboxNotFound, core.CallGone: apierror.SandboxGone,
	} {
		for path, body := range map[string]string{keepAlivePath: "", "/sandboxes/k3x9/timeout": `{"timeout":60}`, "/v2/sandboxes/k3x9/timeout": `{"timeout":60}`} {
			require.Equal(t, "k3x9", refusal(t, call(handler(t, &fake{status: status}), "POST", path, body), 404, reason).SandboxID)
		}
	}
}

// activities are one of each kind.
func activities() []core.ActivityStatus {
	sandbox := func(id string, b core.Binding) core.Sandbox {
		b.ID = id
		return core.Sandbox{Binding: b, Pool: core.PoolKey{Namespace: "default", Name: "python"}}
	}
	at := time.Date(2000, 1, 1, 1, 0, 0, 0, time.UTC) // an hour from now in a synctest bubble
	return []core.ActivityStatus{
		{Sandbox: sandbox("aa1", core.Binding{IdleTimeout: time.Minute}), Age: 12345678 * time.Microsecond, Kind: activity.Open, Router: "router-a", Open: 2, Next: fact.ReasonIdleTimeout, In: 47654 * time.Millisecond, Asks: []string{"router-a", "router-b", "router-c"}, Awaits: []string{"router-b", "router-c"}},
		{Sandbox: sandbox("aa2", core.Binding{IdleTimeout: time.Minute, MinBytes: 2048, EndAt: at, LifetimeEnd: at.Add(time.Hour)}), Kind: activity.Bytes, Router: "router-a", Next: fact.ReasonEndTime, In: time.Hour},
		{Sandbox: sandbox("ab1", core.Binding{MinBytes: 1024}), Age: time.Hour, Kind: activity.Claim},
		{Sandbox: sandbox("ab2", core.Binding{IdleTimeout: time.Minute}), Age: time.Hour, Kind: activity.Unknown, Why: "a router has ended", Next: fact.ReasonIdleTimeout},
	}
}

func TestLastActiveIsTheDocumentedJSON(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fake{activities: activities(), truncated: 3}
		w := call(handler(t, f), "GET", "/v1/last-active", "")
		require.Equal(t, http.StatusOK, w.Code, w.Body)
		require.JSONEq(t, `{"now": "2000-01-01T00:00:00Z", "dryRun": false, "truncated": 3, "sandboxes": [
			{"sandboxID": "aa1", "pool": "python", "lastActive": "1999-12-31T23:59:47.654322Z", "ageSeconds": 12.346, "kind": "open", "router": "router-a", "open": 2,
			 "idleTimeout": 60, "activity": "Requests", "next": {"reason": "IdleTimeout", "at": "2000-01-01T00:00:47.654Z", "inSeconds": 47.654}, "asks": ["router-a", "router-b", "router-c"], "awaits": ["router-b", "router-c"]},
			{"sandboxID": "aa2", "pool": "python", "lastActive": "2000-01-01T00:00:00Z", "ageSeconds": 0, "kind": "bytes", "router": "router-a", "open": 0,
			 "idleTimeout": 60, "activity": "Bytes", "minBytesPerMinute": 2048, "endAt": "2000-01-01T01:00:00Z", "lifetimeEnd": "2000-01-01T02:00:00Z",
			 "next": {"reason": "EndTime", "at": "2000-01-01T01:00:00Z", "inSeconds": 3600}, "asks": [], "awaits": []},
			{"sandboxID": "ab1", "pool": "python", "lastActive": "1999-12-31T23:00:00Z", "ageSeconds": 3600, "kind": "claim", "open": 0, "asks": [], "awaits": []},
			{"sandboxID": "ab2", "pool": "python", "lastActive": "1999-12-31T23:00:00Z", "ageSeconds": 3600, "kind": "unknown", "why": "a router has ended", "open": 0,
			 "idleTimeout": 60, "activity": "Requests", "next": {"reason": "IdleTimeout", "at": "2000-01-01T00:00:00Z", "inSeconds": 0}, "asks": [], "awaits": []}
		]}`, w.Body.String())
		require.Contains(t, call(handler(t, &fake{}), "GET", "/v1/last-active", "").Body.String(), `"sandboxes":[]`, "no list is an empty one")
	})
}

func TestLastActiveHasATextForm(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fake{activities: activities(), truncated: 3}
		h, err := New(Options{Allocator: f, PublicScheme: "https", PublicHost: "a", MinIdleTimeout: minIdle, ReapDryRun: true, Log: zap.NewNop()})
		require.NoError(t, err)
		w := call(h, "GET", "/v1/last-active?format=text", "")
		require.Equal(t, "text/plain; charset=utf-8", w.Header().Get("Content-Type"))
		require.Equal(t, `dry run: nothing is released for being idle
aa1  python  1999-12-31T23:59:47Z  12s ago  open at router-a  2 open  IdleTimeout in 48s (dry run), waits for router-b, router-c
aa2  python  2000-01-01T00:00:00Z  0s ago  bytes at router-a  0 open  EndTime in 1h0m0s
ab1  python  1999-12-31T23:00:00Z  3600s ago  claim  0 open  stays
ab2  python  1999-12-31T23:00:00Z  3600s ago  unknown (a router has ended)  0 open  IdleTimeout is due (dry run)
3 more
`, w.Body.String())
		require.Contains(t, call(h, "GET", "/v1/last-active", "").Body.String(), `"dryRun":true`)
	})
}

func TestLastActiveCanBeFiltered(t *testing.T) {
	for query, want := range map[string]Filter{
		"": {}, "id=aa1": {ID: "aa1"}, "prefix=aa": {Prefix: "aa"}, "pool=python": {Pool: "python"}, "format=json": {},
		"id=aa1&prefix=a&pool=python&format=text": {ID: "aa1", Prefix: "a", Pool: "python"}, "ids=aa1,bb2": {IDs: []string{"aa1", "bb2"}},
	} {
		f := &fake{}
		require.Equal(t, http.StatusOK, call(handler(t, f), "GET", "/v1/last-active?"+query, "").Code, query)
		require.Equal(t, []Filter{want}, f.which, query)
		require.Equal(t, []int{defaultActivities}, f.limits)
	}
	for query, says := range map[string]string{
		"id=": "id:", "prefix=": "prefix:", "pool=": "pool:", "format=": "format:", "id=a&id=b": "id:", "format=xml": `format: "xml"`, "format=text&format=text": "format:",
		"limit=0": "limit", "limit=10001": "limit", "limit=": "limit", "limit=x": "limit", "limit=1&limit=2": "limit",
	} {
		f := &fake{}
		require.Contains(t, refusal(t, call(handler(t, f), "GET", "/v1/last-active?"+query, ""), 400, apierror.BadRequest).Message, says, query)
		require.Empty(t, f.which, query)
	}
	refusal(t, call(handler(t, &fake{}), "GET", "/v1/last-active?user=x", ""), 400, apierror.BadRequest)
	f := &fake{}
	require.Equal(t, http.StatusOK, call(handler(t, f), "GET", "/v1/last-active?limit=10000", "").Code)
	require.Equal(t, []int{10_000}, f.limits)
}

func TestFilterMatchesAllItsFields(t *testing.T) {
	s := core.Sandbox{Binding: core.Binding{ID: "aa1"}, Pool: core.PoolKey{Namespace: "ns", Name: "p"}}
	for _, w := range []Filter{{}, {ID: "aa1"}, {Prefix: "aa"}, {Pool: "p"}, {ID: "aa1", Prefix: "aa1", Pool: "p"}} {
		require.True(t, w.Matches(&s), "%+v", w)
	}
	for _, w := range []Filter{{ID: "a"}, {ID: "aa12"}, {Prefix: "b"}, {Prefix: "aa12"}, {ID: "aa1", Prefix: "b"}, {ID: "b", Prefix: "aa"}, {ID: "aa1", Pool: "q"}} {
		require.False(t, w.Matches(&s), "%+v", w)
	}
}
