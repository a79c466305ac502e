package extproc

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/tools/docs"
)

func TestMetricReferenceIsTheGoldenFile(t *testing.T) {
	var registered docs.Metrics
	_, err := newMetrics(&registered, func() int { return 0 }, func() int { return 0 })
	require.NoError(t, err)
	docs.Section(t, "docs/reference/metrics.md", "requests", registered.Table(t))
}
