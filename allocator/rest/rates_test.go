package rest

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/metric"
	"github.com/berth-sandbox/berth/internal/rate"
)

// Invariant: P25
func TestEachKeyHasARateOfItsOwn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		reg := metric.NewRegistry(metric.Allocator)
		core, logs := observer.New(zap.InfoLevel)
		h, err := New(Options{
			Allocator: &fake{}, Keys: keysIn(map[string]string{"one": keyOne, "two": keyTwo}), PublicScheme: "https", PublicHost: "sandbox.example.com",
			MinIdleTimeout: minIdle, Log: zap.New(core), KeyRate: rate.PerSecond(0.5), Metrics: reg,
		})
		require.NoError(t, err)
		call := func(key string) int {
			return callWith(h, "GET", "/v2/sandboxes", http.Header{"X-Api-Key": {key}}).Code
		}
		for range 2000 {
			require.Equal(t, http.StatusOK, call(keyOne))
		}
		limited := func(calls int) {
			t.Helper()
			want := fmt.Sprintf("# HELP %s %s\n# TYPE %[1]s counter\n%[1]s %[3]d\n", metric.RateLimited.Name, metric.RateLimited.Help, calls)
			require.NoError(t, testutil.GatherAndCompare(reg, strings.NewReader(want), metric.RateLimited.Name))
		}
		limited(0)
		for range 3 {
			w := callWith(h, "POST", "/sandboxes", http.Header{"Authorization": {"Bearer " + keyOne}})
			refusal(t, w, http.StatusTooManyRequests, apierror.RateLimited)
			require.Equal(t, "2", w.Header().Get("Retry-After"))
		}
		limited(3)
		lines := logs.FilterMessageSnippet("the key one makes more calls").Len()
		require.Equal(t, 1, lines, "the log has one line a minute for each key")
		require.Equal(t, http.StatusOK, call(keyTwo))
		require.Equal(t, http.StatusUnauthorized, call("wrong-0123456789abcd"))
		require.Equal(t, http.StatusOK, callWith(h, "GET", "/health", nil).Code)
		time.Sleep(2 * time.Second)
		require.Equal(t, http.StatusOK, call(keyOne))
		require.Equal(t, http.StatusTooManyRequests, call(keyOne))
	})
}

func TestKeysAreForgottenWhenTheirBucketsAreFull(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newKeyRates(rate.PerSecond(1), zap.NewNop())
		for i := range 1000 {
			require.Nil(t, k.take(fmt.Sprint("key", i)))
		}
		require.Len(t, k.full, 1000)
		time.Sleep(time.Second)
		require.Nil(t, k.take("another"))
		require.Len(t, k.full, 1)
	})
}

func TestWithoutALimitNoKeyIsRemembered(t *testing.T) {
	k := newKeyRates(rate.Limit{}, zap.NewNop())
	for range 3000 {
		require.Nil(t, k.take(strings.Repeat("k", 20)))
	}
	require.Empty(t, k.full)
}
