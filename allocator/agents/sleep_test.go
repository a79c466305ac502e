package agents_test

import (
	"encoding/json"
	"io"
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/agent/initbox"
	"github.com/berth-sandbox/berth/allocator/agents"
	"github.com/berth-sandbox/berth/allocator/core"
)

// sleeper is an agent that answers orders with answer, and sends what it was ordered. questions counts those for its key.
type sleeper struct {
	keys      *initbox.Keys
	answer    http.HandlerFunc
	orders    chan initbox.Order
	questions int
}

func newSleeper(t *testing.T) *sleeper {
	s := &sleeper{orders: make(chan initbox.Order, 9), answer: func(http.ResponseWriter, *http.Request) {}}
	s.restart(t)
	return s
}

// restart gives the agent another key.
func (s *sleeper) restart(t *testing.T) {
	sealer, err := agents.SealerOf(clusterKey(t))
	require.NoError(t, err)
	s.keys, err = initbox.NewKeys(sealer.PublicKey())
	require.NoError(t, err)
}

func (s *sleeper) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path == initbox.Path {
		s.questions++
		_ = json.NewEncoder(w).Encode(initbox.Hello{Version: initbox.Version, PublicKey: s.keys.PublicKey()})
		return
	}
	sealed, _ := io.ReadAll(r.Body)
	o, err := s.keys.OpenOrder(sealed)
	if err != nil || r.URL.Path != initbox.SleepPath {
		w.WriteHeader(http.StatusUnauthorized)
		return
	}
	s.orders <- *o
	s.answer(w, r)
}

// Invariant: P28
func TestOrderHasRevisionOfTheSandbox(t *testing.T) {
	agent := newSleeper(t)
	s, c := pod(t, agent.ServeHTTP), caller(t, always)
	s.Revision = core.Revision{Term: 3, Counter: 7}
	require.NoError(t, c.Freeze(t.Context(), s, false))
	require.NoError(t, c.Freeze(t.Context(), s, true))
	require.NoError(t, c.Thaw(t.Context(), s))
	for _, kind := range []initbox.Kind{initbox.Freeze, initbox.Keep, initbox.Thaw} {
		require.Equal(t, initbox.Order{SandboxID: "k3x9", Kind: kind, Term: 3, Counter: 7}, <-agent.orders)
	}
	require.Equal(t, 1, agent.questions)

	agent.restart(t)
	for range 2 {
		require.NoError(t, c.Thaw(t.Context(), s))
	}
	require.Equal(t, 2, agent.questions)
	require.ErrorIs(t, caller(t, func() bool { return false }).Freeze(t.Context(), s, true), agents.ErrDeposed)
	require.Len(t, agent.orders, 2)
}

func TestRefusedOrdersAreToldApart(t *testing.T) {
	agent := newSleeper(t)
	s, c := pod(t, agent.ServeHTTP), caller(t, always)
	s.Revision = core.Revision{Term: 3, Counter: 7}
	freeze := func(code int, body string) error {
		agent.answer = func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(code)
			_, _ = io.WriteString(w, body)
		}
		err := c.Freeze(t.Context(), s, false)
		<-agent.orders
		require.Error(t, err)
		require.NotContains(t, err.Error(), "canary")
		return err
	}
	require.ErrorIs(t, freeze(409, `{"message":"canary"}`), agents.ErrSuperseded)
	for body, want := range map[string]string{
		`{"message":"canary","reason":"not_permitted","pid":17,"uid":0}`: "process 17 of user 0 cannot be stopped",
		`{"message":"canary","reason":"still_runs","pid":18,"uid":5}`:    "process 18 of user 5 does not stop",
		`{"message":"canary","reason":"canary","pid":"canary"}`:          "could not stop all processes",
		`canary`: "could not stop all processes",
	} {
		var refused *agents.RefusedError
		require.ErrorAs(t, freeze(422, body), &refused, body)
		require.Contains(t, refused.Why, want)
	}
	require.ErrorAs(t, freeze(404, "canary"), new(*agents.RefusedError), "an agent of an earlier version")
	for _, code := range []int{400, 401, 421, 500, 503} {
		err := freeze(code, "canary")
		require.NotErrorIs(t, err, agents.ErrSuperseded)
		require.False(t, asRefused(err), "it can be repeated")
	}
}

func asRefused(err error) bool {
	_, refused := err.(*agents.RefusedError) //nolint:errorlint // it is not wrapped
	return refused
}
