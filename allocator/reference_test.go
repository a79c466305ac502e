package allocator

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/tools/docs"
)

func TestMetricReferenceIsTheGoldenFile(t *testing.T) {
	var registered docs.Metrics
	_, err := newMetrics(&registered, &Allocator{})
	require.NoError(t, err)
	docs.Section(t, "docs/reference/metrics.md", "allocator", registered.Table(t))
}
