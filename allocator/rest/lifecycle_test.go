package rest

import (
	"context"
	"encoding/json"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/berth-sandbox/berth/allocator/access"
	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/eventlog"
	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

// oneSegment is a store for a log that is written once.
type oneSegment struct{ eventlog.Store }

func (oneSegment) List(context.Context, func(*v1alpha1.EventSegment)) error { return nil }

func (oneSegment) Create(_ context.Context, s *v1alpha1.EventSegment) (metav1.ObjectMeta, error) {
	return metav1.ObjectMeta{Name: s.Name, ResourceVersion: "1"}, nil
}

// logOf returns a log that was told these states.
func logOf(t *testing.T, states ...*fact.Sandbox) *eventlog.Log {
	t.Helper()
	l, err := eventlog.New(eventlog.Options{
		Store: oneSegment{}, Term: 7, Valid: func() bool { return true }, Yield: func(context.Context) {},
		Build: func(string) string { return "uid-of-pool" }, Wall: func() time.Time { return noon }, Log: zap.NewNop(),
	})
	require.NoError(t, err)
	l.Tell(states...)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); l.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	require.Eventually(t, func() bool { last, err := l.Last(); return err == nil && last > 0 }, 10*time.Second, time.Millisecond)
	return l
}

func TestEventsHaveTheShapeOfE2B(t *testing.T) {
	claimed := fact.Sandbox{
		Binding: fact.Binding{ID: "a1", Team: "blue", ClaimedAt: noon, EndAt: noon.Add(time.Hour), Metadata: map[string]string{"k": "v"}},
		Pool:    fact.PoolKey{Name: "python"}, Phase: fact.Running, StartedAt: noon.Add(time.Second), Revision: fact.Revision{Term: 7, Counter: 1},
		Workload: &fact.Workload{Limits: fact.Resources{CPU: "1500m", Memory: "512Mi"}},
	}
	moved, released := claimed, claimed
	moved.EndAt, moved.Revision.Counter = noon.Add(2*time.Hour), 2
	released.EndAt, released.Phase, released.ReleasedAt, released.Reason, released.Revision.Counter = moved.EndAt, fact.Released, noon.Add(3*time.Second), fact.ReasonKilled, 3
	other := claimed
	other.ID, other.Team, other.Revision.Counter = "b1", "red", 4
	slept := claimed
	slept.ID, slept.Team, slept.Revision.Counter = "c1", "green", 5
	slept.Phase, slept.AsleepAt, slept.EndAt = fact.Asleep, noon.Add(5*time.Second), time.Time{}
	woken := slept
	woken.Phase, woken.AsleepAt, woken.EndAt, woken.Revision.Counter = fact.Running, time.Time{}, noon.Add(time.Minute), 6
	f := &fake{eventLog: logOf(t, &claimed, &moved, &released, &other, &slept, &woken)}
	read := func(role access.Role, path string) (events []openapi.LifecycleEvent) {
		w := httptest.NewRecorder()
		handler(t, f).ServeHTTP(w, request(access.With(t.Context(), access.Caller{Team: "blue", Role: role}), "GET", path, nil))
		require.Equal(t, 200, w.Code, w.Body.String())
		require.NoError(t, json.Unmarshal(w.Body.Bytes(), &events))
		return events
	}
	w := call(handler(t, f), "GET", "/events/sandboxes/a1?limit=1", "")
	const rest = `"version":"v2","eventCategory":"lifecycle","sandboxId":"a1","sandboxExecutionId":"a1","sandboxTemplateId":"python","sandboxBuildId":"uid-of-pool","sandboxTeamId":"blue"`
	require.JSONEq(t, `[{"id":"`+read(access.Admin, "/events/sandboxes/a1")[0].ID+`","type":"sandbox.lifecycle.killed","eventLabel":"kill","timestamp":"2030-01-01T12:00:03Z",
		"eventData":{"sandbox_metadata":{"k":"v"},"reason":"Killed","execution":{"started_at":"2030-01-01T12:00:01Z","vcpu_count":2,"memory_mb":512,"execution_time":2000}},`+rest+`}]`, w.Body.String())
	w = call(handler(t, f), "GET", "/events/sandboxes?types=sandbox.lifecycle.updated", "")
	require.JSONEq(t, `[{"id":"`+read(access.Admin, "/events/sandboxes/a1")[1].ID+`","type":"sandbox.lifecycle.updated","eventLabel":"update","timestamp":"2030-01-01T12:00:00Z",
		"eventData":{"sandbox_metadata":{"k":"v"},"set_timeout":"2030-01-01T14:00:00Z"},`+rest+`}]`, w.Body.String())
	w = call(handler(t, f), "GET", "/events/sandboxes/c1?limit=2", "")
	pause := read(access.Admin, "/events/sandboxes/c1")
	ofC := strings.NewReplacer("a1", "c1", "blue", "green").Replace(rest)
	require.JSONEq(t, `[{"id":"`+pause[0].ID+`","type":"sandbox.lifecycle.resumed","eventLabel":"resume","timestamp":"2030-01-01T12:00:00Z",
		"eventData":{"sandbox_metadata":{"k":"v"}},`+ofC+`},
		{"id":"`+pause[1].ID+`","type":"sandbox.lifecycle.paused","eventLabel":"pause","timestamp":"2030-01-01T12:00:05Z",
		"eventData":{"sandbox_metadata":{"k":"v"},"execution":{"started_at":"2030-01-01T12:00:01Z","vcpu_count":2,"memory_mb":512,"execution_time":4000}},`+ofC+`}]`, w.Body.String())

	for path, want := range map[string]int{
		"/events/sandboxes": 7, "/events/sandboxes/b1": 1, "/events/sandboxes/none": 0, "/events/sandboxes?offset=6&orderAsc=true": 1,
		"/events/sandboxes?types=sandbox.lifecycle.created&types=sandbox.lifecycle.killed": 4, "/events/sandboxes?types=sandbox.lifecycle.paused,sandbox.lifecycle.killed": 2,
	} {
		require.Len(t, read(access.Admin, path), want, path)
	}
}

func TestEventsOfOtherTeamsAreNotListed(t *testing.T) {
	state := func(id, team string, n uint64) *fact.Sandbox {
		return &fact.Sandbox{Binding: fact.Binding{ID: id, Team: team, ClaimedAt: noon}, Phase: fact.Running, Revision: fact.Revision{Term: 7, Counter: n}}
	}
	a := &api{Options: Options{Allocator: &fake{eventLog: logOf(t, state("a1", "blue", 1), state("b1", "red", 2))}}}
	for _, c := range []struct {
		caller access.Caller
		path   string
		want   int
	}{
		{access.Caller{Role: access.Admin, Team: "ops"}, "/events/sandboxes", 2},
		{access.Caller{Role: access.Member, Team: "blue"}, "/events/sandboxes", 1},
		{access.Caller{Role: access.ReadOnly, Team: "red"}, "/events/sandboxes/b1", 1},
		{access.Caller{Role: access.Member, Team: "blue"}, "/events/sandboxes/b1", 0},
	} {
		p := &reply{held: held{budget: newBudget(answerBytes), free: smallAnswer}, header: map[string][]string{}}
		r := request(access.With(t.Context(), c.caller), "GET", c.path, nil)
		if c.path != "/events/sandboxes" {
			r.SetPathValue("sandboxID", "b1")
		}
		require.NoError(t, a.listEvents(p, r))
		var events []openapi.LifecycleEvent
		require.NoError(t, json.Unmarshal(p.held.buf.Bytes(), &events))
		require.Len(t, events, c.want, c.path)
	}
}

func TestWrongQueriesForEventsNameTheParameter(t *testing.T) {
	h := handler(t, &fake{})
	for query, want := range map[string]string{
		"limit=101": "limit", "limit=0": "limit", "offset=-1": "offset", "orderAsc=yes": "orderAsc: \"yes\": must be true or false",
		"types=sandbox.lifecycle.born": "types", "types=": "types", "page=2": "page", "limit=1&limit=2": "limit: must be given once",
	} {
		w := call(h, "GET", "/events/sandboxes?"+query, "")
		require.Equal(t, 400, w.Code, query)
		require.Contains(t, w.Body.String(), `"reason":"bad_request"`)
		var e struct{ Message string }
		require.NoError(t, json.Unmarshal(w.Body.Bytes(), &e))
		require.Contains(t, e.Message, want)
	}
}

func TestWrongCallsAboutWebhooksNameTheField(t *testing.T) {
	h := handler(t, &fake{})
	for change, want := range map[string]string{
		`"name":""`: "name", `"url":null`: "url", `"events":["sandbox.lifecycle.born"]`: "events", `"events":[]`: "events", `"color":"red"`: "color: unknown field",
		`"signatureSecret":"seven77"`: "signatureSecret", `"signatureSecret":"` + strings.Repeat("x", 257) + `"`: "signatureSecret",
	} {
		e := refusal(t, call(h, "PATCH", "/events/webhooks/w1", "{"+change+"}"), 400, apierror.BadRequest)
		require.Contains(t, e.Message, want, change)
	}
	require.Contains(t, refusal(t, call(h, "POST", "/events/webhooks", `{"name":"a","url":"https://a.example"}`), 400, apierror.BadRequest).Message, "events: required")
	refusal(t, call(h, "GET", "/events/webhooks/w1/deliveries?cursor=1", ""), 400, apierror.BadRequest)
	refusal(t, call(h, "GET", "/events/webhooks/w1/stats", ""), 404, apierror.NotFound)
}
