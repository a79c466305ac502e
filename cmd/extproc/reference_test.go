package main

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/tools/docs"
)

func TestFlagReferenceIsTheGoldenFile(t *testing.T) {
	docs.Section(t, "docs/reference/flags.md", "extproc", docs.Flags(t, new(flags), "extproc", "BERTH_ROUTER"))
}

func TestMetricReferenceIsTheGoldenFile(t *testing.T) {
	var registered docs.Metrics
	r := router{flags: flags{EnvoyAdmin: "envoy-admin.sock"}}
	require.NoError(t, r.wireSandboxes(&registered))
	require.NoError(t, registerSandboxMetrics(&registered, r.sandboxes))
	docs.Section(t, "docs/reference/metrics.md", "router", registered.Table(t))
}
