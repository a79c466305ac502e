package version_test

import (
	"os"
	"testing"

	"github.com/stretchr/testify/require"
	"sigs.k8s.io/yaml"

	"github.com/berth-sandbox/berth/internal/version"
)

func TestChartHasTheVersionOfThePrograms(t *testing.T) {
	raw, err := os.ReadFile("../../charts/berth/Chart.yaml")
	require.NoError(t, err)
	var chart struct{ Version string }
	require.NoError(t, yaml.Unmarshal(raw, &chart))
	require.Equal(t, version.Number, chart.Version)
}
