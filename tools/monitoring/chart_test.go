package main

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	monitoring "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	"github.com/stretchr/testify/require"
	"sigs.k8s.io/yaml"
)

// The golden file is what helm makes of the chart, and the rules are the spec of its PrometheusRule, as tests of
// package charts see.
func TestObjectsOfTheOperatorHaveItsFieldsOnly(t *testing.T) {
	golden, err := os.ReadFile("../../charts/testdata/full.golden.yaml")
	require.NoError(t, err)
	var monitors int
	for object := range bytes.SplitSeq(golden, []byte("\n---\n")) {
		var is struct{ APIVersion, Kind string }
		require.NoError(t, yaml.Unmarshal(object, &is))
		if is.Kind == monitoring.PodMonitorsKind {
			require.Equal(t, monitoring.SchemeGroupVersion.String(), is.APIVersion)
			require.NoError(t, yaml.UnmarshalStrict(object, &monitoring.PodMonitor{}))
			monitors++
		}
	}
	require.Equal(t, 1, monitors)
	rules, err := os.ReadFile(filepath.Join(chartFiles, "rules", "berth.yaml"))
	require.NoError(t, err)
	var spec monitoring.PrometheusRuleSpec
	require.NoError(t, yaml.UnmarshalStrict(rules, &spec))
	require.NotEmpty(t, spec.Groups)
}
