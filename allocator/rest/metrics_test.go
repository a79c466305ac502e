package rest

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/api/metric"
)

func TestCallsAreCountedByOperationAndClassOfCode(t *testing.T) {
	reg := metric.NewRegistry(metric.Allocator)
	f := &fake{status: core.CallOK, blockClaims: true}
	h, err := New(Options{
		Allocator: f, Keys: keysIn(map[string]string{"one": keyOne}), PublicScheme: "https", PublicHost: "sandbox.example.com",
		MinIdleTimeout: minIdle, Metrics: reg, Log: zap.NewNop(),
	})
	require.NoError(t, err)
	key := http.Header{"X-Api-Key": {keyOne}}
	for _, c := range []struct {
		method, path string
		header       http.Header
		code         int
	}{
		{"GET", "/sandboxes", key, 200},
		{"DELETE", "/sandboxes/x", key, 204},
		{"DELETE", "/sandboxes/y", key, 204},
		{"DELETE", "/sandboxes/y", nil, 401},
		{"GET", "/no/such/path", key, 404},
		{"GET", "/health", nil, 200},
		{"GET", "/sandboxes", http.Header{"X-Api-Key": {keyOne}, forwardedHeader: {"1"}}, 200}, // the other replica counts it
	} {
		require.Equal(t, c.code, callWith(h, c.method, c.path, c.header).Code, "%s %s", c.method, c.path)
	}
	ctx, leave := context.WithCancel(t.Context())
	r := request(ctx, "POST", "/sandboxes", strings.NewReader(`{"templateID":"python","waitTimeout":300}`))
	r.Header.Set("X-API-Key", keyOne)
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		serve(h, httptest.NewRecorder(), r)
	}()
	used := func(calls int) string {
		text := fmt.Sprintf("# HELP %s %s\n# TYPE %[1]s gauge\n", metric.APISlotsUsed.Name, metric.APISlotsUsed.Help)
		for class, n := range map[string]int{"claims": calls, "others": 0, "sleeps": 0, "wakes": 0, "snapshots": 0, "slow": 0, "streams": 0} {
			text += fmt.Sprintf("%s{class=%q} %d\n", metric.APISlotsUsed.Name, class, n)
		}
		return text
	}
	require.Eventually(t, func() bool {
		return testutil.GatherAndCompare(reg, strings.NewReader(used(1)), metric.APISlotsUsed.Name) == nil
	}, time.Minute, time.Millisecond)
	leave()
	<-gone
	require.NoError(t, testutil.GatherAndCompare(reg, strings.NewReader(used(0)), metric.APISlotsUsed.Name))
	require.NoError(t, testutil.GatherAndCompare(reg, strings.NewReader(fmt.Sprintf(`# HELP %s %s
# TYPE %[1]s counter
%[1]s{code="2xx",operation="health"} 1
%[1]s{code="2xx",operation="killSandbox"} 2
%[1]s{code="2xx",operation="listSandboxes"} 1
%[1]s{code="4xx",operation="killSandbox"} 1
%[1]s{code="4xx",operation="other"} 1
%[1]s{code="none",operation="createSandbox"} 1
`, metric.APICalls.Name, metric.APICalls.Help)), metric.APICalls.Name))
	n, err := testutil.GatherAndCount(reg, metric.APICallSeconds.Name)
	require.NoError(t, err)
	require.Equal(t, 5, n, "one histogram for each operation that was called")
}
