package main

import (
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/rest"
)

// operated is the HTTP API with a core behind it whose time stands still.
type operated struct {
	rest.Allocator // the calls that are not an operator's
	core           *core.Core
	now            core.Instant
	by             string
}

func (o *operated) Leading() (bool, string) { return true, "" }

func (o *operated) Fences(_ context.Context, most int) ([]core.FenceStatus, int, error) {
	list, others := o.core.View().Fences(most)
	return list, others, nil
}

func (o *operated) Sessions(_ context.Context, most int) ([]core.SessionStatus, int, error) {
	list, others := o.core.View().Sessions(most)
	return list, others, nil
}

func (o *operated) DeclareDead(_ context.Context, session, by, reason string) (answer core.DeadDeclared, err error) {
	o.by = by
	for _, e := range o.step(core.DeclareDead{Session: session, By: by, Reason: reason}) {
		if e, ok := e.(core.DeadDeclared); ok {
			answer = e
		}
	}
	return answer, nil
}

func (o *operated) step(ev core.Event) []core.Effect {
	all := o.core.Step(o.now, ev)
	for i := 0; i < len(all); i++ {
		if _, ok := all[i].(core.Write); ok {
			all = append(all, o.core.Step(o.now, core.Written{})...)
			all = append(all, o.core.Step(o.now, core.WriterReady{})...)
		}
	}
	return all
}

const (
	theKey   = "key-of-the-operators"
	released = "k3x9k3x9k3x9k3x9k3x9"
)

// operate serves the API. A sandbox was released of which router-a, connected, and
// router-b, not heard for 20 s, may know.
func operate(t *testing.T) (o *operated, url string) {
	t.Helper()
	o = &operated{now: core.Instant{Boot: time.Hour, Wall: time.Date(2030, 1, 1, 12, 0, 0, 0, time.UTC)}}
	var err error
	o.core, err = core.New(core.Config{
		Term: 1, MaxStale: 15 * time.Minute, ConnectWindow: 5 * time.Second, Lease: 15 * time.Second, Linger: -1,
		NewID: func() string { return released }, NewSuffix: func() string { return "x" },
	}, o.now)
	require.NoError(t, err)
	pool := core.PoolKey{Namespace: "default", Name: "python"}
	_, err = o.core.Recover(core.State{
		Pools: []core.Pool{{Key: pool, Warm: 1, DefaultPort: 80, Template: "t"}}, Nodes: []string{"n"},
		Pods: []core.Pod{{Key: core.PodKey{Namespace: "default", Name: "python-abcdef", UID: "u"}, Pool: "python", Node: "n", IP: netip.MustParseAddr("10.0.0.1"), Template: "t", Ready: true}},
	})
	require.NoError(t, err)
	o.step(core.SessionJoined{Session: "router-a", Stream: 1, From: "10.1.0.1"})
	o.step(core.SessionJoined{Session: "router-b", Stream: 2, From: "10.1.0.2"})
	o.step(core.Claim{Token: 1, Pool: pool})
	o.step(core.SessionAck{Session: "router-a", Stream: 1, Sequence: 2})
	o.step(core.SessionLeft{Session: "router-b", Stream: 2})
	o.step(core.Release{ID: released, Reason: core.ReasonKilled})
	o.now.Boot += 20 * time.Second
	o.step(core.SessionPing{Session: "router-a", Stream: 1})

	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "ops"), []byte(theKey), 0o600))
	keys, err := rest.NewKeys(dir, time.Now, zap.NewNop())
	require.NoError(t, err)
	h, err := rest.New(rest.Options{Allocator: o, Keys: keys, PublicScheme: "https", PublicHost: "sandbox.example.com", MinIdleTimeout: 5 * time.Second, Log: zap.NewNop()})
	require.NoError(t, err)
	server := httptest.NewServer(h)
	t.Cleanup(server.Close)
	return o, server.URL
}

// lines are those of an output, with single spaces.
func lines(output string) (all []string) {
	for line := range strings.Lines(output) {
		all = append(all, strings.Join(strings.Fields(line), " "))
	}
	return all
}

func TestFenceLsShowsWhoIsWaitedForAndWhy(t *testing.T) {
	o, url := operate(t)
	keyFile := filepath.Join(t.TempDir(), "key")
	require.NoError(t, os.WriteFile(keyFile, []byte(theKey+"\n"), 0o600))
	fence := func(args ...string) string {
		t.Helper()
		stdout, err := berth(t, append([]string{"fence"}, append(args, "--allocator="+url, "--api-key-file="+keyFile)...)...)
		require.NoError(t, err)
		return stdout
	}
	sandbox := released + " python python-abcdef 10.0.0.1 2030-01-01T12:00:00Z Killed "
	require.Equal(t, []string{
		"SANDBOX POOL POD ADDRESS RELEASED REASON WAITS FOR WHY",
		sandbox + "router-a connected, heard 0s ago; has acknowledged message 2, not yet 3",
		sandbox + "router-b not connected, heard 20s ago; may know the route for 14m49s",
	}, lines(fence("ls")))
	var all rest.Fences
	require.NoError(t, json.Unmarshal([]byte(fence("ls", "-o", "json")), &all))
	require.Len(t, all.Fences, 1)
	require.Len(t, all.Fences[0].WaitsFor, 2)
	require.Equal(t, []string{
		"SESSION ADDRESS CONNECTED LAST HEARD ACKNOWLEDGED EXPIRES IN FENCES",
		"router-a 10.1.0.1 yes 0s ago 2 of 3 15m9s 1",
		"router-b 10.1.0.2 no 20s ago - 14m49s 1",
	}, lines(fence("sessions")))
	require.Equal(t, "1 more; see --limit", lines(fence("sessions", "--limit=1"))[2])

	o.step(core.SessionAck{Session: "router-a", Stream: 1, Sequence: 3})
	stdout := fence("declare-dead", "router-b", "--gone", "--reason=its node burnt")
	require.Contains(t, stdout, "router-b is waited for no more; 1 released sandboxes waited for it.")
	require.Contains(t, stdout, "WARNING")
	require.Equal(t, "ops", o.by)
	require.Equal(t, []string{
		"SANDBOX POOL POD ADDRESS RELEASED REASON WAITS FOR WHY",
		sandbox + "connect window no router can admit a request any more; those admitted may connect for 5s",
	}, lines(fence("ls")))
	o.now.Boot += 5 * time.Second
	o.step(core.Tick{})
	require.Equal(t, "none\n", fence("ls"))
}

func TestFenceCommandsSayWhatIsWrong(t *testing.T) {
	_, url := operate(t)
	elsewhere := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		t.Errorf("the key went to %s", r.Host)
	}))
	defer elsewhere.Close()
	redirects := httptest.NewServer(http.RedirectHandler(elsewhere.URL, http.StatusFound))
	defer redirects.Close()
	key := "--api-key=" + theKey
	for _, c := range []struct {
		args []string
		says string
	}{
		{[]string{"ls", "--allocator=" + url}, "unauthorized: a key is required"},
		{[]string{"ls", "--allocator=" + url, "--api-key=wrong"}, "unauthorized: unknown key"},
		{[]string{"ls", "--allocator=" + url, key, "--limit=0"}, "bad_request: limit"},
		{[]string{"ls", "--allocator=" + url, key, "-o", "yaml"}, `must be one of "table","json"`},
		{[]string{"ls", "--allocator=" + url, key, "--api-key-file=x"}, "only one of them"},
		{[]string{"ls", "--allocator=" + url, "--api-key-file=/nowhere/key"}, "--api-key-file"},
		{[]string{"ls", "--allocator=127.0.0.1:8081", key}, "--allocator"},
		{[]string{"ls", "--allocator=" + redirects.URL, key}, "302 Found"},
		{[]string{"declare-dead", "router-b", "--allocator=" + url, key, "--gone"}, "--reason"},
		{[]string{"declare-dead", "router-b", "--allocator=" + url, key, "--reason=burnt"}, "--gone"},
		{[]string{"declare-dead", "router-b", "--allocator=" + url, key, "--reason=burnt", "--gone=false"}, "--gone"},
		{[]string{"declare-dead", "router-b", "--allocator=" + url, key, "--reason= ", "--gone"}, "bad_request: reason"},
		{[]string{"declare-dead", "router-a", "--allocator=" + url, key, "--reason=burnt", "--gone"}, "session_alive: session router-a is connected"},
		{[]string{"declare-dead", "router-c", "--allocator=" + url, key, "--reason=burnt", "--gone"}, "session_not_found"},
		{[]string{"declare-dead", "../sessions", "--allocator=" + url, key, "--reason=burnt", "--gone"}, "session_not_found"},
	} {
		stdout, err := berth(t, append([]string{"fence"}, c.args...)...)
		require.ErrorContains(t, err, c.says, "%v", c.args)
		require.Empty(t, stdout, "%v", c.args)
	}
}
