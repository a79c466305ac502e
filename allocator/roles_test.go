package allocator

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/berth-sandbox/berth/allocator/access"
	"github.com/berth-sandbox/berth/allocator/pods"
	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/devcluster/stack"
	"github.com/berth-sandbox/berth/internal/bootclock"
)

// callers are keys by themselves: the key is its name.
type callers map[string]access.Caller

func (c callers) Caller(key string) (access.Caller, error) {
	if caller, ok := c[key]; ok {
		return caller, nil
	}
	return access.Caller{}, access.ErrUnknownKey
}

func (callers) Current() context.Context { return context.Background() }

func (c callers) Callers() []access.Caller { return slices.Collect(maps.Values(c)) }

func (c callers) ByTeam() (map[string][][sha256.Size]byte, <-chan struct{}) {
	byTeam := map[string][][sha256.Size]byte{}
	for key, caller := range c {
		byTeam[caller.Team] = append(byTeam[caller.Team], sha256.Sum256([]byte(key)))
	}
	return byTeam, nil
}

// served is a leader with warm pods, called through its HTTP API.
type served struct {
	testing.TB
	api http.Handler
}

// serveLeader runs a leader with a pool "python" of so many warm pods.
func serveLeader(t testing.TB, warm int, keys callers, edits ...func(*memoryAPI)) (s served, stop func()) {
	api := newMemoryAPI()
	_, end, ended := start(t, newReplica(t, api)) // makes the journal, which must come before pods
	end()
	require.NoError(t, <-ended)
	pool := stack.DemoPool(poolKey.Namespace, poolKey.Name, int32(warm))
	pool.UID = "pool"
	api.put(t, "/apis/berth.sh/v1alpha1/namespaces/default/sandboxpools/"+pool.Name, pool)
	ready := []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
	api.put(t, "/api/v1/nodes/n", corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n"}, Status: corev1.NodeStatus{Conditions: ready}})
	a := newReplica(t, api, func(o *Options) {
		if keys != nil {
			o.Keys = keys
		}
	})
	for i := range warm {
		p := pods.Build(pool, fmt.Sprintf("python-%03d", i), a.o.podSettings())
		p.UID, p.Spec.NodeName = types.UID(p.Name), "n"
		p.Status.PodIP, p.Status.Phase = fmt.Sprintf("10.0.%d.%d", i/250, i%250+1), corev1.PodRunning
		p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
		api.put(t, "/api/v1/namespaces/default/pods/"+p.Name, p)
	}
	for _, edit := range edits {
		edit(api)
	}
	tm, end, done := start(t, a)
	return served{t, a.API()}, func() {
		for tm.headStart.until > bootclock.Now() { // it counts real time, which sleeping does not let pass here
			runtime.Gosched()
		}
		end()
		require.NoError(t, <-done)
	}
}

// call makes a call with a key, and returns its answer. A call that streams is cut off.
func (s served) call(key, method, path, body string) *httptest.ResponseRecorder {
	s.Helper()
	ctx, cancel := context.WithTimeout(s.Context(), 2*time.Second)
	defer cancel()
	r := httptest.NewRequestWithContext(ctx, method, path, strings.NewReader(body))
	r.Header.Set("X-API-Key", key)
	w := httptest.NewRecorder()
	func() {
		defer func() {
			if p := recover(); p != nil && p != any(http.ErrAbortHandler) {
				panic(p)
			}
		}()
		s.api.ServeHTTP(w, r)
	}()
	return w
}

// claim claims a sandbox of the key's team.
func (s served) claim(key string) (id string) {
	s.Helper()
	w := s.call(key, "POST", "/sandboxes", `{"templateID":"python","timeout":3600}`)
	require.Equal(s, http.StatusCreated, w.Code, w.Body)
	var made openapi.Sandbox
	require.NoError(s, json.Unmarshal(w.Body.Bytes(), &made))
	return made.SandboxID
}

// example returns a value that a schema of the document allows, with the required properties only.
func example(document map[string]any, schema map[string]any) any {
	if ref, ok := schema["$ref"].(string); ok {
		return example(document, at(document, strings.Split(strings.TrimPrefix(ref, "#/"), "/")...))
	}
	kind := schema["type"]
	if list, ok := kind.([]any); ok {
		kind = list[0]
	}
	switch kind {
	case "object":
		value := map[string]any{}
		required, _ := schema["required"].([]any)
		for _, name := range required {
			value[name.(string)] = example(document, at(schema, "properties", name.(string)))
		}
		for _, pool := range []string{"templateID", "pool"} {
			if _, ok := value[pool]; ok {
				value[pool] = poolKey.Name
			}
		}
		return value
	case "integer", "number":
		if least, ok := schema["minimum"]; ok {
			return least
		}
		return 1
	case "boolean":
		return true
	case "array":
		return []any{}
	}
	if words, ok := schema["enum"].([]any); ok {
		return words[0]
	}
	return "x"
}

func at(value map[string]any, path ...string) map[string]any {
	for _, name := range path {
		value, _ = value[name].(map[string]any)
	}
	return value
}

// operations returns the document's calls that need a key and are not refused, with a body for each.
func operations(t *testing.T) (all []openapi.Operation, bodies map[string]string) {
	t.Helper()
	d, err := openapi.Load()
	require.NoError(t, err)
	var parsed map[string]any
	require.NoError(t, json.Unmarshal(d.JSON, &parsed))
	bodies = map[string]string{}
	for path, item := range at(parsed, "paths") {
		for _, o := range d.Operations {
			if o.Refused != "" || o.ID == "health" || !slices.ContainsFunc(o.Paths, func(p string) bool { return strings.TrimPrefix(p, "/v2") == path }) {
				continue
			}
			call := at(item.(map[string]any), strings.ToLower(o.Method))
			if call["operationId"] != o.ID {
				continue
			}
			all = append(all, o)
			if schema := at(call, "requestBody", "content", "application/json", "schema"); schema != nil {
				raw, err := json.Marshal(example(parsed, schema))
				require.NoError(t, err)
				bodies[o.ID] = string(raw)
			}
		}
	}
	slices.SortFunc(all, func(a, b openapi.Operation) int { return strings.Compare(a.ID, b.ID) })
	return all, bodies
}

var parameter = regexp.MustCompile(`\{(\w+)\}`)

// fill puts the values of a call's path in place.
func fill(path, sandbox string) string {
	return parameter.ReplaceAllStringFunc(path, func(name string) string {
		switch name {
		case "{sandboxID}":
			return sandbox
		case "{sessionID}":
			return "router-x"
		}
		return poolKey.Name
	})
}

const unknownID = "zzzzzzzzzzzzzzzzzzzz"

// Each call of the document, by each role, on a sandbox of the own team, of another team, and on one
// that never existed.
// Invariant: P6
func TestEveryCallKeepsRolesAndTeamsApart(t *testing.T) {
	keys := callers{
		"reader": {Key: "reader", Team: "ours", Role: access.ReadOnly}, "member": {Key: "member", Team: "ours", Role: access.Member},
		"admin": {Key: "admin", Team: "ours", Role: access.Admin}, "stranger": {Key: "stranger", Team: "theirs", Role: access.Member},
	}
	synctest.Test(t, func(t *testing.T) {
		s, stop := serveLeader(t, 250, keys)
		defer stop()
		foreign := s.claim("stranger")
		untouched := s.call("stranger", "GET", "/sandboxes/"+foreign, "").Body.String()
		all, bodies := operations(t)
		require.GreaterOrEqual(t, len(all), 17)
		for _, o := range all {
			for _, path := range o.Paths {
				require.Equal(t, 401, s.call("wrong", o.Method, fill(path, foreign), bodies[o.ID]).Code, o.ID)
				for _, key := range slices.Sorted(maps.Keys(keys)) {
					s.checkCall(keys[key], o, path, bodies[o.ID], foreign)
					require.Equal(t, untouched, s.call("stranger", "GET", "/sandboxes/"+foreign, "").Body.String(), "%s by %s changed the sandbox of another team", o.ID, key)
				}
			}
		}
	})
}

// checkCall makes a call as a caller. foreign is a sandbox of the team "theirs".
func (s served) checkCall(c access.Caller, o openapi.Operation, path, body, foreign string) {
	s.Helper()
	if c.Team == "theirs" {
		return
	}
	what := fmt.Sprintf("%s %s by %s", o.Method, path, c.Key)
	may := c.Role.May(access.Role(o.Role))
	if !strings.Contains(path, "{sandboxID}") {
		w := s.call(c.Key, o.Method, fill(path, ""), body)
		require.Equal(s, !may, w.Code == http.StatusForbidden, "%s: %d %s", what, w.Code, w.Body)
		if c.Role != access.Admin {
			require.NotContains(s, w.Body.String(), foreign, what)
		}
		return
	}
	own := s.call(c.Key, o.Method, fill(path, s.claim("member")), body)
	unknown := s.call(c.Key, o.Method, fill(path, unknownID), body)
	if !may {
		require.Equal(s, http.StatusForbidden, own.Code, "%s: %s", what, own.Body)
		require.Equal(s, own.Body.String(), unknown.Body.String(), what)
		return
	}
	require.NotContains(s, []int{401, 403, 404, 410}, own.Code, "%s: %s", what, own.Body)
	if c.Role == access.Admin {
		theirs := s.call(c.Key, o.Method, fill(path, s.claim("stranger")), body)
		require.Equal(s, own.Code, theirs.Code, "%s: %s", what, theirs.Body)
		return
	}
	theirs := s.call(c.Key, o.Method, fill(path, foreign), body)
	require.Equal(s, unknown.Code, theirs.Code, what)
	require.Equal(s, unknown.Header(), theirs.Header(), what)
	require.Equal(s, strings.ReplaceAll(unknown.Body.String(), unknownID, foreign), theirs.Body.String(), what)
}

func TestIdempotencyKeysBelongToTheTeam(t *testing.T) {
	keys := callers{
		"one": {Key: "one", Team: "ours", Role: access.Member}, "two": {Key: "two", Team: "ours", Role: access.Member},
		"stranger": {Key: "stranger", Team: "theirs", Role: access.Member},
	}
	synctest.Test(t, func(t *testing.T) {
		s, stop := serveLeader(t, 5, keys)
		defer stop()
		claim := func(key string) string {
			r := httptest.NewRequestWithContext(t.Context(), "POST", "/sandboxes", strings.NewReader(`{"templateID":"python"}`))
			r.Header.Set("X-API-Key", key)
			r.Header.Set("Idempotency-Key", "k")
			w := httptest.NewRecorder()
			s.api.ServeHTTP(w, r)
			require.Equal(t, http.StatusCreated, w.Code, w.Body)
			var made openapi.Sandbox
			require.NoError(t, json.Unmarshal(w.Body.Bytes(), &made))
			return made.SandboxID
		}
		first := claim("one")
		require.Equal(t, first, claim("two"))
		require.NotEqual(t, first, claim("stranger"))
	})
}
