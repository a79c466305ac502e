package main

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"regexp"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/cmd/internal/cli"
)

func TestForkDeletesItsSnapshotWhateverHappens(t *testing.T) {
	s, url := serve(t)
	for _, c := range []struct {
		noPods, noStore bool
		code            int
		says            string
	}{
		{}, {noPods: true, code: exitRefused, says: "pool_empty"}, {noStore: true, code: 1, says: "was not deleted"},
		{noPods: true, noStore: true, code: exitRefused, says: "was not deleted"},
	} {
		s.calls, s.noPods, s.noStore = nil, c.noPods, c.noStore
		stdout, _, err := command(t.Context(), "fork", first, "--count=2", "--timeout=1h", "-o", "name", "--api-url="+url)
		require.Equal(t, c.code, cli.ExitCode(err), "%v", err)
		if c.says != "" {
			require.ErrorContains(t, err, c.says)
		}
		if !c.noPods {
			require.Equal(t, first+"\n"+second+"\n", stdout, "what was claimed is shown")
		}
		calls := s.seen()
		require.Len(t, calls, 4)
		require.Equal(t, []string{"GET /sandboxes/" + first, "POST /sandboxes/" + first + "/snapshots", "POST /v1/claims"}, calls[:3])
		name := regexp.MustCompile(`^DELETE /templates/(fork-[a-z2-7]{26}:default)$`).FindStringSubmatch(calls[3])
		require.NotNil(t, name, calls[3])
		require.JSONEq(t, `{"pool":"`+name[1]+`","count":2,"timeout":3600,"waitTimeout":60}`, s.claimed)
	}
}

func TestForkMayReachWhatItsOriginMayReach(t *testing.T) {
	for _, c := range []struct {
		origin *openapi.SandboxNetwork
		flags  []string
		want   string
	}{
		{origin: &openapi.SandboxNetwork{AllowPublicTraffic: true}, want: `{}`},
		{
			origin: &openapi.SandboxNetwork{AllowOut: []string{"a.example"}, DenyOut: []string{"0.0.0.0/0"}, HTTPSPorts: []int{443}},
			want:   `{"network":{"allowOut":["a.example"],"denyOut":["0.0.0.0/0"]}}`,
		},
		{
			origin: &openapi.SandboxNetwork{AllowOut: []string{"a.example"}, DenyOut: []string{"0.0.0.0/0"}},
			flags:  []string{"--deny-out=192.0.2.0/24"}, want: `{"network":{"denyOut":["192.0.2.0/24"]}}`,
		},
	} {
		s, url := serve(t)
		s.live[0].Network = c.origin
		_, _, err := command(t.Context(), append([]string{"fork", first, "-o", "name", "--api-url=" + url}, c.flags...)...)
		require.NoError(t, err)
		var claimed, want struct {
			Network *openapi.NewSandboxNetwork `json:"network"`
		}
		require.NoError(t, json.Unmarshal([]byte(s.claimed), &claimed))
		require.NoError(t, json.Unmarshal([]byte(c.want), &want))
		require.Equal(t, want, claimed)
	}
}

func TestForkNamesTheSnapshotThatMayStay(t *testing.T) {
	isolate(t)
	ctx, cancel := context.WithCancel(t.Context())
	server := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		_, err := io.Copy(io.Discard, r.Body) // from then on the server sees that the client has gone
		assert.NoError(t, err)
		cancel()
		<-r.Context().Done()
	}))
	defer server.Close()
	_, _, err := command(ctx, "fork", first, "--deny-out=192.0.2.1", "--api-url="+server.URL) // so the origin is not asked
	require.ErrorContains(t, err, "may be made all the same; berth snapshot rm fork-")
}

func TestCallsForSnapshotsMayTakeLonger(t *testing.T) {
	_, url := serve(t)
	for _, c := range []struct {
		args []string
		ends bool
	}{
		{[]string{"snapshot", "ls"}, true},
		{[]string{"claim", "python", "--wait=0s"}, true},
		{[]string{"claim", "work:v1", "--wait=0s"}, false},
		{[]string{"snapshot", "create", first}, false},
		{[]string{"pause", first}, true},
		{[]string{"pause", "--stop", first}, false},
		{[]string{"resume", first}, false},
	} {
		_, _, err := command(t.Context(), append(c.args, "--api-url="+url, "--request-timeout=1ns")...)
		require.Equal(t, c.ends, err != nil, "%v: %v", c.args, err)
	}
}
