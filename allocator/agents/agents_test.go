package agents_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/berth-sandbox/berth/agent/initbox"
	"github.com/berth-sandbox/berth/allocator/agents"
	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/api/sandboxaccess"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func clusterKey(t *testing.T) *sandboxaccess.Key {
	key, err := sandboxaccess.NewKey([]byte(strings.Repeat("k", 32)))
	require.NoError(t, err)
	return key
}

// pod is a server at the address of an agent.
func pod(t *testing.T, h http.HandlerFunc) core.Sandbox {
	server := httptest.NewServer(h)
	t.Cleanup(server.Close)
	at := netip.MustParseAddrPort(server.Listener.Addr().String())
	return core.Sandbox{Binding: core.Binding{ID: "k3x9", Agent: core.Agent{Port: at.Port(), Public: true}}, IP: at.Addr()}
}

func caller(t *testing.T, leads func() bool) *agents.Caller {
	c, err := agents.New(agents.Options{Key: clusterKey(t), Leads: leads})
	require.NoError(t, err)
	return c
}

func always() bool { return true }

// agentOf is an agent as the protocol says. It sends what it was configured with.
func agentOf(t *testing.T) (http.HandlerFunc, chan *initbox.Config) {
	sealer, err := agents.SealerOf(clusterKey(t))
	require.NoError(t, err)
	keys, err := initbox.NewKeys(sealer.PublicKey())
	require.NoError(t, err)
	configs := make(chan *initbox.Config, 1)
	var id atomic.Value
	id.Store("")
	return func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet {
			_ = json.NewEncoder(w).Encode(initbox.Hello{Version: initbox.Version, PublicKey: keys.PublicKey(), Sandbox: id.Load().(string)})
			return
		}
		raw, _ := io.ReadAll(r.Body)
		c, err := keys.Open(raw)
		if err != nil {
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		id.Store(initbox.SandboxDigest(c.SandboxID))
		configs <- c
		w.WriteHeader(http.StatusNoContent)
	}, configs
}

// Invariant: P16
func TestAgentIsConfiguredWithValuesAndToken(t *testing.T) {
	h, configs := agentOf(t)
	s, c := pod(t, h), caller(t, always)
	configured, err := c.Configured(t.Context(), s)
	require.NoError(t, err)
	require.False(t, configured)
	values := &agents.Values{
		Envs: map[string]string{"A": "1"}, Secrets: map[string]string{"KEY": "canary"}, Files: []initbox.File{{Path: "/a", Data: []byte("b")}},
	}
	require.NoError(t, c.Configure(t.Context(), s, values))
	require.Equal(t, &initbox.Config{
		SandboxID: "k3x9", AccessToken: clusterKey(t).Secret("k3x9").AgentToken("k3x9"), Public: true,
		Envs: values.Envs, Secrets: values.Secrets, Files: values.Files,
	}, <-configs)
	configured, err = c.Configured(t.Context(), s)
	require.NoError(t, err)
	require.True(t, configured)
	s.ID = "other"
	configured, err = c.Configured(t.Context(), s)
	require.NoError(t, err)
	require.False(t, configured, "an earlier sandbox of the pod")
	require.NoError(t, caller(t, always).Configure(t.Context(), s, nil))
	require.Empty(t, (<-configs).Secrets)
}

func TestBadAnswersAreErrorsWithoutTheirText(t *testing.T) {
	hello := `{"version":1,"publicKey":"` + initbox.PublicKey{9}.String() + `"}`
	for want, h := range map[string]http.HandlerFunc{
		"answered 503 when it was asked": func(w http.ResponseWriter, _ *http.Request) {
			http.Error(w, "canary", http.StatusServiceUnavailable)
		},
		"answered 302 when it was asked": func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, "/canary", http.StatusFound)
		},
		"the agent's key cannot be read": func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, `"canary"`) },
		"version 2 of the configuration": func(w http.ResponseWriter, _ *http.Request) {
			_, _ = io.WriteString(w, `{"version":2,"publicKey":"`+initbox.PublicKey{9}.String()+`"}`)
		},
		"the agent's answer cannot be": func(w http.ResponseWriter, _ *http.Request) {
			_, _ = io.WriteString(w, strings.Repeat("canary", 1<<20))
		},
		"answered 401 to its configurati": func(w http.ResponseWriter, r *http.Request) {
			if r.Method == http.MethodGet {
				_, _ = io.WriteString(w, hello)
				return
			}
			http.Error(w, "canary", http.StatusUnauthorized)
		},
	} {
		err := caller(t, always).Configure(t.Context(), pod(t, h), &agents.Values{Secrets: map[string]string{"KEY": "canary"}})
		require.ErrorContains(t, err, want)
		require.NotContains(t, err.Error(), "canary")
	}
}

func TestMeasurementIsAskedForWithTheToken(t *testing.T) {
	now := time.Now().Unix()
	rest := `,"mem_total":4,"mem_used":3,"mem_cache":1,"disk_total":9,"disk_used":8}`
	answer := fmt.Sprintf(`{"ts":%d,"cpu_count":2,"cpu_used_pct":50`, now) + rest
	s := pod(t, func(w http.ResponseWriter, r *http.Request) {
		require.Equal(t, "/metrics", r.URL.Path)
		require.Equal(t, clusterKey(t).Secret("k3x9").AgentToken("k3x9"), r.Header.Get(sandboxaccess.AgentHeader))
		_, _ = io.WriteString(w, answer)
	})
	m, err := caller(t, always).Measure(t.Context(), s)
	require.NoError(t, err)
	require.Equal(t, agents.Measurement{
		Unix: now, CPUCount: 2, CPUUsedPct: 50, MemTotal: 4, MemUsed: 3, MemCache: 1, DiskTotal: 9, DiskUsed: 8,
	}, m)
	for _, impossible := range []string{
		`{"ts":999999999999,"cpu_count":2,"cpu_used_pct":50`, `{"ts":5,"cpu_count":2,"cpu_used_pct":50`,
		fmt.Sprintf(`{"ts":%d,"cpu_count":9223372036854775807,"cpu_used_pct":1e308`, now),
		fmt.Sprintf(`{"ts":%d,"cpu_count":0,"cpu_used_pct":1`, now), fmt.Sprintf(`{"ts":%d,"cpu_count":1,"cpu_used_pct":-1`, now),
		fmt.Sprintf(`{"disk_used":-8,"ts":%d,"cpu_count":1,"cpu_used_pct":1,"mem_total":-1`, now),
	} {
		answer = impossible + strings.Replace(rest, `"mem_total":4,`, "", 1)
		_, err = caller(t, always).Measure(t.Context(), s)
		require.ErrorContains(t, err, "impossible", answer)
	}
	answer = `"canary"`
	_, err = caller(t, always).Measure(t.Context(), s)
	require.ErrorContains(t, err, "cannot be read")
	require.NotContains(t, err.Error(), "canary")
	_, err = caller(t, func() bool { return false }).Measure(t.Context(), s)
	require.ErrorIs(t, err, agents.ErrDeposed)
}

func TestSeriesOfAnAgentIsCheckedAndOrdered(t *testing.T) {
	now := time.Now().Unix()
	answer, old := "", false
	s := pod(t, func(w http.ResponseWriter, r *http.Request) {
		require.Equal(t, clusterKey(t).Secret("k3x9").AgentToken("k3x9"), r.Header.Get(sandboxaccess.AgentHeader))
		if old && r.URL.Path != "/metrics" {
			http.NotFound(w, r)
			return
		}
		_, _ = io.WriteString(w, answer)
	})
	with := func(points string) string {
		return fmt.Sprintf(`{"ts":%d,"cpu_count":2,"cpu_used_pct":50,"mem_total":4,"mem_used":3,"mem_cache":1,"disk_total":9,"disk_used":8%s}`, now, points)
	}
	latest := agents.Measurement{Unix: now, CPUCount: 2, CPUUsedPct: 50, MemTotal: 4, MemUsed: 3, MemCache: 1, DiskTotal: 9, DiskUsed: 8}
	before := latest
	before.Unix, before.CPUUsedPct, before.MemUsed, before.MemCache, before.DiskUsed = now-3500, 1.5, 2, 0, 7
	between := before
	between.Unix = now - 15
	answer = with(fmt.Sprintf(`,"points":[[%d,1.5,2,0,7],[%d,1.5,2,0,7]]`, now-15, now-3500))
	all, err := caller(t, always).MeasureOver(t.Context(), s)
	require.NoError(t, err)
	require.Equal(t, []agents.Measurement{before, between, latest}, all)

	for _, impossible := range []string{
		`[[5,1,1,1,1]]`, `[[1e300,1,1,1,1]]`, fmt.Sprintf(`[[%d,-1,1,1,1]]`, now), fmt.Sprintf(`[[%d,1,-1,1,1]]`, now), fmt.Sprintf(`[[%d]]`, now-3*3600),
		"[" + strings.Repeat(fmt.Sprintf("[%d],", now), 300) + fmt.Sprintf("[%d]]", now),
	} {
		answer = with(`,"points":` + impossible)
		_, err = caller(t, always).MeasureOver(t.Context(), s)
		require.ErrorContains(t, err, "impossible", impossible)
	}
	answer = with(`,"points":"` + strings.Repeat("x", 70<<10) + `"`)
	_, err = caller(t, always).MeasureOver(t.Context(), s)
	require.ErrorContains(t, err, "cannot be read")

	answer, old = with(""), true // of an earlier version
	all, err = caller(t, always).MeasureOver(t.Context(), s)
	require.NoError(t, err)
	require.Equal(t, []agents.Measurement{latest}, all)
}

func TestHangingPodsEndWithTheContext(t *testing.T) {
	release := make(chan struct{})
	defer close(release)
	s := pod(t, func(http.ResponseWriter, *http.Request) { <-release })
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, caller(t, always).Configure(ctx, s, nil), context.DeadlineExceeded)
	_, err := caller(t, always).Configured(ctx, s)
	require.Error(t, err)
}

func TestDeposedLeaderConfiguresAndReportsNothing(t *testing.T) {
	h, configs := agentOf(t)
	s := pod(t, h)
	// It is asked before and after the connection is made, and when the agent has answered.
	for asked, configures := range map[int32]int{1: 0, 2: 0, 3: 1} {
		var n atomic.Int32
		err := caller(t, func() bool { return n.Add(1) < asked }).Configure(t.Context(), s, nil)
		require.ErrorIs(t, err, agents.ErrDeposed)
		require.Len(t, configs, configures)
		if configures > 0 {
			<-configs
		}
	}
	c, err := agents.New(agents.Options{Key: clusterKey(t), Leads: always, Dial: func(context.Context, string, string) (net.Conn, error) {
		return nil, errors.New("no way")
	}})
	require.NoError(t, err)
	require.ErrorContains(t, c.Configure(t.Context(), s, nil), "no way")
}

func TestValuesAreNotPrinted(t *testing.T) {
	v := &agents.Values{Secrets: map[string]string{"KEY": "canary"}}
	ev := core.Claim{Values: v}
	for _, text := range []string{fmt.Sprint(v), fmt.Sprintf("%+v", v), fmt.Sprintf("%#v", v), fmt.Sprintf("%+v", ev), fmt.Sprintf("%+v", core.Configure{Values: v})} {
		require.NotContains(t, text, "canary")
	}
}
