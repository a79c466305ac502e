package rest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/agent/initbox"
	"github.com/berth-sandbox/berth/allocator/agents"
	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/snapshots"
	_ "github.com/berth-sandbox/berth/allocator/snapshots/drivers"
	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

// withStore is an allocator with a store and a pool whose pods have agents.
func withStore(t *testing.T) *fake {
	t.Helper()
	store, err := snapshots.Open(t.Context(), "file://"+t.TempDir(), snapshots.Options{MaxPerTeam: 3, MaxBytesPerTeam: 1 << 20})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, store.Close()) })
	p := poolOf("python")
	p.Spec.Agent = &v1alpha1.PoolAgent{Enabled: true, Port: 49983}
	p.Spec.Snapshot = &v1alpha1.PoolSnapshot{Paths: []string{"/work"}, MaxFiles: 7}
	return &fake{store: store, status: core.CallOK, pools: []*v1alpha1.SandboxPool{p}}
}

func bodyAs[T any](t *testing.T, body interface{ Bytes() []byte }) (into T) {
	t.Helper()
	require.NoError(t, json.Unmarshal(body.Bytes(), &into))
	return into
}

func TestSnapshotsAreMadeListedAndDeleted(t *testing.T) {
	f := withStore(t)
	h := handler(t, f)
	for _, c := range []struct{ body, id string }{{`{"name":"mine"}`, "mine:default"}, {`{"name":"mine:v2","memory":false}`, "mine:v2"}, {`{}`, ""}} {
		w := call(h, "POST", "/sandboxes/k3x9/snapshots", c.body)
		require.Equal(t, 201, w.Code, w.Body)
		s := bodyAs[openapi.Snapshot](t, w.Body)
		require.Regexp(t, "^[a-z0-9]+:", s.SnapshotID)
		require.Equal(t, []string{s.SnapshotID}, s.Names)
		require.Equal(t, "k3x9", s.SandboxID)
		require.Equal(t, 3, s.Files)
		require.Equal(t, map[string]int{"socket": 1}, s.LeftOut)
		require.WithinDuration(t, time.Now().Add(time.Hour), *s.ExpiresAt, time.Minute)
		if c.id != "" {
			require.Equal(t, c.id, s.SnapshotID)
		}
	}
	for query, want := range map[string]int{
		"": 3, "sandboxID=k3x9": 3, "sandboxID=other": 0, "name=mine": 2, "name=mine:v2": 1, "name=Mine": 0, "name=other/mine": 0,
	} {
		w := call(h, "GET", "/snapshots?"+query, "")
		require.Equal(t, 200, w.Code, w.Body)
		require.Len(t, bodyAs[[]openapi.Snapshot](t, w.Body), want, query)
	}
	seen, token := 0, ""
	for more := true; more; more = token != "" {
		w := call(h, "GET", "/v2/snapshots?limit=2&nextToken="+token, "")
		seen += len(bodyAs[[]openapi.Snapshot](t, w.Body))
		token = w.Header().Get("X-Next-Token")
	}
	require.Equal(t, 3, seen)
	refusal(t, call(h, "POST", "/sandboxes/k3x9/snapshots", `{"name":"fourth"}`), 429, apierror.QuotaExceeded)
	require.Equal(t, 204, call(h, "DELETE", "/templates/mine%3Av2", "").Code)
	refusal(t, call(h, "DELETE", "/templates/mine%3Av2", ""), 404, apierror.SnapshotNotFound)
	refusal(t, call(h, "DELETE", "/templates/python", ""), 501, apierror.NotImplemented)
}

func TestSnapshotErrorsSayWhatToDo(t *testing.T) {
	f := withStore(t)
	h := handler(t, f)
	for body, want := range map[string]struct {
		code   int
		reason apierror.Reason
		text   string
	}{
		`{"name":"A"}`:      {400, apierror.BadRequest, "name:"},
		`{"name":"a/b"}`:    {400, apierror.BadRequest, "name:"},
		`{"name":"a:b:c"}`:  {400, apierror.BadRequest, "tag"},
		`{"name":"../../"}`: {400, apierror.BadRequest, "name:"},
		`{"memory":true}`:   {501, apierror.NotImplemented, "memory"},
	} {
		require.Contains(t, refusal(t, call(h, "POST", "/sandboxes/k3x9/snapshots", body), want.code, want.reason).Message, want.text)
	}
	for err, want := range map[error]struct {
		code   int
		reason apierror.Reason
	}{
		snapshots.ErrFull: {429, apierror.QuotaExceeded}, snapshots.ErrBusy: {503, apierror.Overloaded}, snapshots.ErrTooLarge: {413, apierror.SnapshotTooLarge},
		errors.New("files changed"): {502, apierror.SnapshotFailed}, snapshots.ErrStore: {503, apierror.StoreUnavailable}, fmt.Errorf("x: %w", snapshots.ErrTimeout): {502, apierror.SnapshotFailed},
		&agents.RefusedError{Reason: initbox.TooManyFiles, Why: "too many files"}: {413, apierror.SnapshotTooLarge},
	} {
		f.err = err
		e := refusal(t, call(h, "POST", "/sandboxes/k3x9/snapshots", "{}"), want.code, want.reason)
		require.Equal(t, "k3x9", e.SandboxID)
	}
	f.err = nil
	for status, want := range map[core.CallStatus]struct {
		code   int
		reason apierror.Reason
	}{
		core.CallUnknown: {404, apierror.SandboxNotFound}, core.CallGone: {404, apierror.SandboxGone}, core.CallNotReady: {503, apierror.SandboxBusy},
		core.CallRefused: {502, apierror.SleepFailed}, core.CallUnfit: {501, apierror.NotImplemented},
	} {
		f.status, f.why = status, "because"
		require.Contains(t, refusal(t, call(h, "POST", "/sandboxes/k3x9/snapshots", "{}"), want.code, want.reason).Message, "because")
	}
	without := handler(t, &fake{})
	for _, c := range [][2]string{{"POST", "/sandboxes/k3x9/snapshots"}, {"GET", "/snapshots"}, {"DELETE", "/templates/mine:default"}} {
		require.Contains(t, refusal(t, call(without, c[0], c[1], ""), 501, apierror.NotImplemented).Message, "--snapshots")
	}
}

func TestClaimOfASnapshotRestoresIt(t *testing.T) {
	f := withStore(t)
	h := handler(t, f)
	require.Equal(t, 201, call(h, "POST", "/sandboxes/k3x9/snapshots", `{"name":"mine"}`).Code)
	for _, c := range [][2]string{
		{"/sandboxes", `{"templateID":"mine:default","envVars":{"A":"1"}}`}, {"/sandboxes", `{"templateID":"mine"}`},
		{"/v1/claims", `{"pool":"mine","count":2}`},
	} {
		f.claim = core.Claim{}
		w := call(h, "POST", c[0], c[1])
		require.Equal(t, 201, w.Code, w.Body)
		require.Equal(t, "python", f.pool)
		require.Equal(t, agents.RestoreFor, f.claim.Configuring)
		values := f.claim.Values.(*agents.Values)
		require.Equal(t, []string{"/work"}, values.Restore.Paths)
		require.Equal(t, 7, values.Restore.MaxFiles)
		in, err := values.Open(t.Context())
		require.NoError(t, err)
		raw, err := io.ReadAll(in)
		require.NoError(t, err)
		require.NoError(t, in.Close())
		require.Equal(t, "files of k3x9", string(raw))
		require.EqualValues(t, len(raw), values.Restore.Size)
	}
	require.Equal(t, 201, call(h, "POST", "/sandboxes", `{"templateID":"python"}`).Code)
	require.Nil(t, f.claim.Values, "a pool restores nothing")
	refusal(t, call(h, "POST", "/sandboxes", `{"templateID":"mine:v9"}`), 404, apierror.SnapshotNotFound)
	pool := f.pools[0]
	pool.Spec.Agent = nil
	require.Contains(t, refusal(t, call(h, "POST", "/sandboxes", `{"templateID":"mine"}`), 501, apierror.NotImplemented).Message, "spec.agent")
	f.pools = nil
	require.Contains(t, refusal(t, call(h, "POST", "/sandboxes", `{"templateID":"mine"}`), 404, apierror.PoolNotFound).Message, `"python"`)
}

// Invariant: P32
func TestNoTeamReachesSnapshotsOfAnother(t *testing.T) {
	f := withStore(t)
	h := handlerWithKeys(t, f, keysIn(map[string]string{"one": keyOne, "two": keyTwo}))
	_, err := f.store.Write(t.Context(), snapshots.Snapshot{Name: "mine", Tag: "default", Team: "one", Pool: "python", SandboxID: "k3x9"}, 1<<20,
		func(_ context.Context, w io.Writer) (snapshots.Contents, error) {
			_, err := io.WriteString(w, "secret")
			return snapshots.Contents{}, err
		})
	require.NoError(t, err)
	as := func(key, method, path, body string) int { return callWithBody(h, method, path, body, key).Code }
	for _, name := range []string{"mine:default", "one/mine:default", "one/mine"} {
		require.Equal(t, http.StatusNotFound, as(keyTwo, "DELETE", "/templates/"+url.PathEscape(name), ""), name)
		f.pool, f.claim = "", core.Claim{}
		as(keyTwo, "POST", "/sandboxes", `{"templateID":"`+name+`"}`)
		require.Nil(t, f.claim.Values, name)
	}
	require.Empty(t, bodyAs[[]openapi.Snapshot](t, callWithBody(h, "GET", "/snapshots", "", keyTwo).Body))
	require.Len(t, bodyAs[[]openapi.Snapshot](t, callWithBody(h, "GET", "/snapshots", "", keyOne).Body), 1)
	require.Equal(t, http.StatusNoContent, as(keyOne, "DELETE", "/templates/"+url.PathEscape("one/mine:default"), ""))
}
