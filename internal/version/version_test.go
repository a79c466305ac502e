package version_test

import (
	"os"
	"regexp"
	"testing"

	"github.com/stretchr/testify/require"
	"sigs.k8s.io/yaml"

	"github.com/berth-sandbox/berth/internal/version"
)

func TestChartHasTheVersionOfThePrograms(t *testing.T) {
	raw, err := os.ReadFile("../../charts/berth/Chart.yaml")
	require.NoError(t, err)
	var chart struct{ Version, AppVersion string }
	require.NoError(t, yaml.Unmarshal(raw, &chart))
	require.Equal(t, version.Number, chart.Version)
	require.Equal(t, version.Number, chart.AppVersion, "the tag of the images")
}

func TestImagesHaveTheVersionOfThePrograms(t *testing.T) {
	for _, file := range []string{"tools/images/Dockerfile", "charts/berth/examples/own-image.yaml"} {
		raw, err := os.ReadFile("../../" + file)
		require.NoError(t, err)
		require.Regexp(t, `(VERSION=|demo-sandbox:)`+regexp.QuoteMeta(version.Number)+"\n", string(raw), file)
	}
}
