package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/allocator/rest"
	"github.com/berth-sandbox/berth/api/activity"
)

// What a claim asked for, and an end that was moved, hold under the next leader.
func TestMovedEndHoldsUnderTheNextLeader(t *testing.T) {
	e := startDisturbing(t, 2, 2)
	e.waitWarm(1)
	s := sandboxOf(t, e.api(http.MethodPost, "/sandboxes", `{"templateID":"`+e.pool+`","idleTimeout":600}`))
	require.EqualValues(t, 600, s.IdleTimeout)
	require.Equal(t, 9999, s.EndAt.Year(), "nobody asked for an end")
	path := "/sandboxes/" + s.SandboxID
	before := time.Now()
	require.Equal(t, http.StatusNoContent, e.api(http.MethodPost, path+"/timeout", `{"timeout":3000}`).code)
	shown := func() (now rest.Sandbox) {
		t.Helper()
		a := e.api(http.MethodGet, path, "")
		require.Equal(t, http.StatusOK, a.code, a.body)
		require.NoError(t, json.Unmarshal([]byte(a.body), &now))
		return now
	}
	moved := shown()
	require.WithinRange(t, moved.EndAt, before.Add(40*time.Minute), before.Add(time.Hour)) // clocks may differ
	e.eventually(func() error {
		r, err := e.record(s.SandboxID)
		switch {
		case err != nil:
			return err
		case r.Spec.EndAt == nil || !r.Spec.EndAt.Time.Equal(moved.EndAt.Truncate(time.Microsecond)):
			return fmt.Errorf("its object says that it ends at %v", r.Spec.EndAt)
		}
		require.EqualValues(t, 600, r.Spec.IdleTimeoutSeconds)
		require.Zero(t, r.Spec.MinBytesPerMinute)
		return nil
	})

	require.NoError(t, e.site.killLeader(t.Context()))
	now := shown()
	require.WithinDuration(t, moved.EndAt, now.EndAt, time.Microsecond)
	require.EqualValues(t, 600, now.IdleTimeout)
	require.Equal(t, http.StatusNoContent, e.api(http.MethodPost, "/v1"+path+"/keepalive", "").code)
	var all rest.LastActive
	require.NoError(t,
		json.Unmarshal([]byte(e.api(http.MethodGet, "/v1/admin/last-active?id="+s.SandboxID, "").body), &all))
	require.Len(t, all.Sandboxes, 1)
	require.Equal(t, e.pool, all.Sandboxes[0].Pool)
	require.Equal(t, activity.Keepalive, all.Sandboxes[0].Kind)
	require.NotNil(t, all.Sandboxes[0].Next)
	require.Equal(t, "Idle", all.Sandboxes[0].Next.Reason)

	require.Equal(t, http.StatusNoContent, e.api(http.MethodPost, path+"/timeout", `{"timeout":1}`).code)
	e.eventually(func() error {
		if a := e.api(http.MethodGet, path, ""); a.code != http.StatusNotFound {
			return fmt.Errorf("%d %s", a.code, a.body)
		}
		return nil
	})
	for _, call := range []string{path + "/timeout", "/v2" + path + "/timeout", "/v1" + path + "/keepalive"} {
		body := ""
		if call != "/v1"+path+"/keepalive" {
			body = `{"timeout":3000}`
		}
		require.Equal(t, http.StatusNotFound, e.api(http.MethodPost, call, body).code, "it is gone")
	}
	e.eventually(func() error {
		r, err := e.record(s.SandboxID)
		if err == nil && r.Status.Reason != "Timeout" {
			err = fmt.Errorf("reason %q", r.Status.Reason)
		}
		return err
	})
}
