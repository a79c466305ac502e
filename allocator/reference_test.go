package allocator

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/tools/docs"
)

func TestMetricReferenceIsTheGoldenFile(t *testing.T) {
	var registered docs.Metrics
	_, err := newMetrics(&registered, &Allocator{})
	require.NoError(t, err)
	docs.Section(t, "docs/reference/metrics.md", "allocator", registered.Table(t))
}

func TestReasonReferenceIsTheGoldenFile(t *testing.T) {
	table := "| reason | when | what to do |\n|---|---|---|\n"
	for _, r := range core.Reasons {
		table += fmt.Sprintf("| `%s` | %s | %s |\n", r.Reason, r.When, r.Next)
	}
	docs.Section(t, "docs/reference/reasons.md", "reasons", table)
}
