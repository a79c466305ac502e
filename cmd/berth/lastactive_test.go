package main

import (
	"context"
	"encoding/json"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/rest"
	"github.com/berth-sandbox/berth/api/activity"
)

// watched is the HTTP API before an allocator that knows of some activity.
type watched struct {
	rest.Allocator // the other calls
	list           []core.ActivityStatus
	which          rest.Filter
	most           int
}

func (w *watched) Leading() (bool, string) { return true, "" }

func (w *watched) Activities(_ context.Context, which rest.Filter, most int) ([]core.ActivityStatus, int, error) {
	w.which, w.most = which, most
	list := w.list[:min(most, len(w.list))]
	return list, len(w.list) - len(list), nil
}

func (w *watched) serve(t *testing.T, dryRun bool) (url string) {
	t.Helper()
	h, err := rest.New(rest.Options{Allocator: w, PublicScheme: "https", PublicHost: "a", MinIdleTimeout: 5 * time.Second, ReapDryRun: dryRun, Log: zap.NewNop()})
	require.NoError(t, err)
	server := httptest.NewServer(h)
	t.Cleanup(server.Close)
	return server.URL
}

func inUse() *watched {
	sandbox := func(id string, b core.Binding) core.Sandbox {
		b.ID = id
		return core.Sandbox{Binding: b, Pool: core.PoolKey{Namespace: "default", Name: "python"}}
	}
	return &watched{list: []core.ActivityStatus{
		{Sandbox: sandbox("aa1", core.Binding{IdleTimeout: time.Minute}), Age: 12 * time.Second, Kind: activity.Open, Router: "router-a", Open: 2, Next: core.ReasonIdle, In: 48 * time.Second, Awaits: []string{"router-b"}},
		{Sandbox: sandbox("aa2", core.Binding{IdleTimeout: 2 * time.Minute, MinBytes: 2048}), Kind: activity.Keepalive, Next: core.ReasonTimeout, In: time.Hour},
		{Sandbox: sandbox("ab1", core.Binding{}), Age: time.Hour, Kind: activity.Claim},
		{Sandbox: sandbox("ab2", core.Binding{IdleTimeout: time.Minute}), Age: time.Minute, Kind: activity.Unknown, Why: "a router has ended", Next: core.ReasonIdle},
	}}
}

func TestLastActiveShowsWhatIsUsedAndWhatHappensNext(t *testing.T) {
	w := inUse()
	url := w.serve(t, false)
	lastActive := func(args ...string) string {
		t.Helper()
		stdout, err := berth(t, append([]string{"last-active", "--allocator=" + url}, args...)...)
		require.NoError(t, err)
		return stdout
	}
	require.Equal(t, []string{
		"SANDBOX POOL IDLE FOR TIMEOUT OPEN LAST ACTIVITY NEXT",
		"aa1 python 12s 1m0s 2 open at router-a Idle in 48s, waits for router-b",
		"aa2 python 0s 2m0s at 2048 B/min 0 keepalive Timeout in 1h0m0s",
		"ab1 python 1h0m0s - 0 claim stays",
		"ab2 python 1m0s 1m0s 0 unknown (a router has ended) Idle is due",
	}, lines(lastActive()))
	require.Equal(t, 1000, w.most)
	require.Equal(t, rest.Filter{}, w.which)
	require.Equal(t, "2 more; see --limit", lines(lastActive("--limit=2"))[3])
	lastActive("--id=aa1", "--prefix=a", "--pool=python")
	require.Equal(t, rest.Filter{ID: "aa1", Prefix: "a", Pool: "python"}, w.which)
	var all rest.LastActive
	require.NoError(t, json.Unmarshal([]byte(lastActive("-o", "json")), &all))
	require.Len(t, all.Sandboxes, 4)
	w.list = nil
	require.Equal(t, "none\n", lastActive())
}

func TestLastActiveSaysThatNothingIsReaped(t *testing.T) {
	stdout, err := berth(t, "last-active", "--allocator="+inUse().serve(t, true))
	require.NoError(t, err)
	require.Equal(t, "dry run: nothing is released for being idle", lines(stdout)[0])
	require.Contains(t, stdout, "Idle in 48s (dry run), waits for router-b")
}

func TestLastActiveSaysWhatIsWrong(t *testing.T) {
	url := inUse().serve(t, false)
	for _, c := range []struct {
		args []string
		says string
	}{
		{[]string{"--limit=0"}, "bad_request: limit"},
		{[]string{"--limit=10001"}, "bad_request: limit"},
		{[]string{"-o", "yaml"}, `must be one of "table","json"`},
	} {
		stdout, err := berth(t, append([]string{"last-active", "--allocator=" + url}, c.args...)...)
		require.ErrorContains(t, err, c.says, "%v", c.args)
		require.Empty(t, stdout)
	}
}
