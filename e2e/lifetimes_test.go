package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/api/activity"
	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

// The next leader keeps what a claim asked for, and an end that was moved.
func TestMovedEndHoldsUnderTheNextLeader(t *testing.T) {
	e := startHere(t, 2)
	e.waitWarm(1)
	s := sandboxOf(t, e.api(http.MethodPost, "/sandboxes", `{"templateID":"`+e.pool+`","idleTimeout":600}`))
	require.EqualValues(t, 600, s.IdleTimeout)
	require.Equal(t, 9999, s.EndAt.Year(), "the claim has no end")
	path := "/sandboxes/" + s.SandboxID
	before := time.Now()
	require.Equal(t, http.StatusNoContent, e.api(http.MethodPost, path+"/timeout", `{"timeout":3000}`).code)
	shown := func() (now openapi.Sandbox) {
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
	var all openapi.LastActive
	require.NoError(t,
		json.Unmarshal([]byte(e.api(http.MethodGet, "/v1/last-active?id="+s.SandboxID, "").body), &all))
	require.Len(t, all.Sandboxes, 1)
	require.Equal(t, e.pool, all.Sandboxes[0].Pool)
	require.EqualValues(t, activity.Keepalive, all.Sandboxes[0].Kind)
	require.NotNil(t, all.Sandboxes[0].Next)
	require.EqualValues(t, "IdleTimeout", all.Sandboxes[0].Next.Reason)

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
		if err == nil && r.Status.Reason != "EndTime" {
			err = fmt.Errorf("reason %q", r.Status.Reason)
		}
		return err
	})
}

func TestFirstBoundOfALifeCounts(t *testing.T) {
	e := start(t, 6)
	short := e.otherPool("short", 1, func(p *v1alpha1.SandboxPoolSpec) {
		seconds := int32(5)
		p.MaxLifetimeSeconds = &seconds
	})
	starting := e.otherPool("starting", 1, func(p *v1alpha1.SandboxPoolSpec) {
		seconds := int32(2)
		p.StartupTimeoutSeconds = &seconds
		p.PostStart = &v1alpha1.PostStartHook{Path: "/sleep?ms=600000", TimeoutSeconds: 120, FailurePolicy: v1alpha1.Fail}
	})
	setTimeout := func(e *env, s openapi.Sandbox, seconds int) time.Time {
		e.t.Helper()
		asked := time.Now()
		a := e.api(http.MethodPost, "/sandboxes/"+s.SandboxID+"/timeout", fmt.Sprintf(`{"timeout":%d}`, seconds))
		require.Equal(e.t, http.StatusNoContent, a.code, a.body)
		return asked.Add(time.Duration(seconds) * time.Second)
	}
	e.allAtOnce(map[string]func(e *env){
		"the end, though it is in use": func(e *env) {
			s, asked := e.claimOf(e.pool, `"timeout":4,"idleTimeout":3600`)
			e.echoes(e.open(s), "in use")
			e.ends(s, fact.ReasonEndTime, asked.Add(4*time.Second))
		},
		"an end that was moved to sooner": func(e *env) {
			s, _ := e.claimOf(e.pool, `"timeout":3600`)
			e.ends(s, fact.ReasonEndTime, setTimeout(e, s, 3))
		},
		"an end that was moved to later": func(e *env) {
			s, _ := e.claimOf(e.pool, `"timeout":4`)
			at := setTimeout(e, s, 10)
			require.Equal(e.t, http.StatusOK, e.get(e.client(), e.host(8080, s.SandboxID), "/").code)
			e.ends(s, fact.ReasonEndTime, at)
		},
		"silence, long before the end": func(e *env) {
			s, asked := e.claimOf(e.pool, `"timeout":3600,"idleTimeout":5`)
			require.WithinDuration(e.t, s.StartedAt.Add(time.Hour), s.EndAt, time.Minute)
			e.ends(s, fact.ReasonIdleTimeout, asked.Add(leastIdle))
		},
		"the longest life, though it is in use and its end was moved": func(e *env) {
			s, asked := e.claimOf(short, `"timeout":4`)
			e.echoes(e.open(s), "in use")
			setTimeout(e, s, 3600)
			e.ends(s, fact.ReasonMaxLifetime, asked.Add(5*time.Second))
		},
		"a hook that does not answer": func(e *env) {
			asked := time.Now()
			r := e.api(http.MethodPost, "/sandboxes", fmt.Sprintf(`{"templateID":%q,"waitTimeout":60}`, starting)).refusal(e.t)
			require.Equal(e.t, apierror.StartFailed, r.Reason)
			require.Contains(e.t, r.Message, fact.ReasonStartupTimeout)
			require.GreaterOrEqual(e.t, time.Since(asked), 2*time.Second)
			e.ends(openapi.Sandbox{SandboxID: r.SandboxID}, fact.ReasonStartupTimeout, asked.Add(2*time.Second))
		},
	})
}
