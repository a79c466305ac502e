package main

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/internal/bootclock"
	"github.com/berth-sandbox/berth/routecache"
	"github.com/berth-sandbox/berth/tools/docs"
)

func TestFlagReferenceIsTheGoldenFile(t *testing.T) {
	docs.Section(t, "docs/reference/flags.md", "extproc", docs.Flags(t, new(flags), "extproc", "BERTH_ROUTER"))
}

func TestMetricReferenceIsTheGoldenFile(t *testing.T) {
	var registered docs.Metrics
	cache, err := routecache.New(routecache.Options{
		Size: 1, NegativeTTL: 1, Now: bootclock.Now, Ask: func(string) bool { return false },
	})
	require.NoError(t, err)
	r := router{flags: flags{EnvoyAdmin: "envoy-admin.sock"}}
	require.NoError(t, r.wireTracker(&registered))
	require.NoError(t, registerCacheMetrics(&registered, cache, r.tracker))
	docs.Section(t, "docs/reference/metrics.md", "router", registered.Table(t))
}
