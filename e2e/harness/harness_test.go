package harness

import (
	"context"
	"errors"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/berth-sandbox/berth/allocator/rest"
	"github.com/berth-sandbox/berth/e2e/history"
	"github.com/berth-sandbox/berth/envoy"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestLogsOfRacesAndPanicsAreErrors(t *testing.T) {
	for name, c := range map[string]struct {
		file, text string
		want       string // "": no error
	}{
		"race":              {"router-0.log", "one\nWARNING: DATA RACE\nRead at", "router-0.log: WARNING: DATA RACE"},
		"panic":             {"allocator-1.log", "one\npanic: nil map", "allocator-1.log: panic: nil map"},
		"fatal error":       {"envoy-0.log", "one\nfatal error: all goroutines", "envoy-0.log: fatal error"},
		"nothing wrong":     {"router-0.log", "a request with panic: in its path", ""},
		"the control plane": {"kube-apiserver.log", "one\npanic: not ours", ""},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			require.NoError(t, os.WriteFile(filepath.Join(dir, c.file), []byte(c.text), 0o600))
			if err := CheckLogs(dir); c.want == "" {
				require.NoError(t, err)
			} else {
				require.ErrorContains(t, err, c.want)
			}
		})
	}
}

func TestWaitReturnsTheLastErrorOfItsCheck(t *testing.T) {
	calls := 0
	require.NoError(t, Wait(t.Context(), func(context.Context) error {
		if calls++; calls < 3 {
			return errors.New("not yet")
		}
		return nil
	}))
	require.Equal(t, 3, calls)
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	err := Wait(ctx, func(context.Context) error { return errors.New("not yet") })
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.ErrorContains(t, err, "not yet")
}

func TestRandomRoundIsRepeatedByItsSeed(t *testing.T) {
	faults := []Fault{{Name: "a", Share: 1}, {Name: "b", Share: 7}}
	names := func(seed uint64, name string) (all []string) {
		for _, f := range Round(Random(seed, name), faults) {
			all = append(all, f.Name)
		}
		return all
	}
	require.Equal(t, names(1, "faults"), names(1, "faults"))
	require.ElementsMatch(t, []string{"a", "b", "b", "b", "b", "b", "b", "b"}, names(1, "faults"))
	require.NotEqual(t, Random(1, "a").Uint64(), Random(1, "b").Uint64())
	require.NotEqual(t, Random(1, "a").Uint64(), Random(2, "a").Uint64())
}

func TestOccupyTakesWhatIsFree(t *testing.T) {
	var busy, free sync.Mutex
	busy.Lock()
	for seed := range uint64(20) {
		require.Equal(t, 1, occupy(rand.New(rand.NewPCG(seed, 0)), []*sync.Mutex{&busy, &free}))
		free.Unlock()
	}
}

func TestMetricsOfOneNameAreAddedUp(t *testing.T) {
	m, err := ParseMetrics([]byte("# HELP a b\na 1\nb{c=\"d e\"} 2\nb{c=\"f\"} 3.5\nberth_allocator_writes_waiting 4\n"))
	require.NoError(t, err)
	require.Equal(t, Metrics{"a": 1, "b": 5.5, "berth_allocator_writes_waiting": 4}, m)
	require.Equal(t, 4.0, m.Unwritten())
}

func TestHostNamesItsSandboxWithOptionalPort(t *testing.T) {
	require.Equal(t, "abc", SandboxOf("abc.localhost:8080"))
	require.Equal(t, "abc", SandboxOf("8080-abc.localhost"))
}

func TestAnswersOfTheAPIAreRecorded(t *testing.T) {
	api := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/claim":
			w.WriteHeader(http.StatusCreated)
			_, _ = w.Write([]byte(`{"sandboxID":"a","podName":"pod-a","metadata":{"claim":"` + r.Header.Get(keyHeader) + `"}}`))
		case "/release":
			w.Header().Set(rest.OutstandingHeader, "2")
			w.WriteHeader(http.StatusNoContent)
		case "/gone":
			w.WriteHeader(http.StatusGone)
			_, _ = w.Write([]byte(`{"code":410,"reason":"sandbox_gone","message":"it is","sandboxId":"b"}`))
		case "/half":
			w.Header().Set("Content-Length", "10")
			_, _ = w.Write([]byte("{"))
		}
	}))
	defer api.Close()
	b := &Berth{
		Run:  NewRun(t, history.Settings{}, ""),
		HTTP: &http.Client{Transport: &http.Transport{DisableKeepAlives: true}},
	}
	call := func(e history.Event, path string) history.Event {
		e = b.Call(t.Context(), api.URL, e, http.MethodPost, path, "")
		require.Positive(t, e.Began)
		require.GreaterOrEqual(t, e.Ended, e.Began)
		all := b.History.All()
		require.Equal(t, e, all[len(all)-1])
		return e
	}
	e := call(history.Event{Kind: history.Claim, Claim: "c", Key: "k"}, "/claim")
	require.Equal(t, []any{201, "a", "pod-a", "k"}, []any{e.Code, e.Sandbox, e.Pod, e.Owner})
	e = call(history.Event{Kind: history.Release, Sandbox: "a"}, "/release")
	require.Equal(t, []any{204, 2}, []any{e.Code, e.Outstanding})
	e = call(history.Event{Kind: history.Claim, Claim: "c"}, "/gone")
	require.Equal(t, []any{410, "sandbox_gone", "b"}, []any{e.Code, e.Reason, e.Sandbox})
	e = call(history.Event{Kind: history.Read, Sandbox: "a"}, "/half")
	require.Zero(t, e.Code)
	require.NotEmpty(t, e.Error)
}

func TestAnswersToRequestsSayWhoAnswered(t *testing.T) {
	sandbox := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/berth" {
			w.Header().Set(envoy.ReasonHeader, "sandbox_gone")
			w.WriteHeader(http.StatusGone)
		}
		_, _ = w.Write([]byte("hello"))
	}))
	defer sandbox.Close()
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	send := func(path string) (e history.Event, body string) {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, sandbox.URL+path, http.NoBody)
		require.NoError(t, err)
		body = string(Send(&e, client, r))
		require.GreaterOrEqual(t, e.Ended, e.Began)
		return e, body
	}
	e, body := send("/")
	require.Equal(t, []any{200, "", "hello"}, []any{e.Code, e.Reason, body})
	e, _ = send("/berth")
	require.Equal(t, []any{410, "sandbox_gone"}, []any{e.Code, e.Reason})
}
