package charts

import (
	"bytes"
	"flag"
	"os"
	"path/filepath"
	"regexp"
	"testing"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"

	"github.com/berth-sandbox/berth/api/crd"
)

var update = flag.Bool("update", false, "write the golden files anew")

// withoutKey replaces the API key and the access key, which are others each time.
func withoutKey(rendered string) string {
	return regexp.MustCompile(`(?m)^  (default|key): \S{20,}$`).ReplaceAllString(rendered, "  $1: RANDOM")
}

func TestRenderedChartIsTheGoldenFile(t *testing.T) {
	// Where empty lines are left depends on helm's version.
	emptyLines := regexp.MustCompile(`(?m)^\s*\n`)
	for _, values := range []string{"minimal", "full", "closed", "egress"} {
		t.Run(values, func(t *testing.T) {
			golden := filepath.Join("testdata", values+".golden.yaml")
			got := withoutKey(template(t, values, "--set", "crds.install=false"))
			got = emptyLines.ReplaceAllString(got, "")
			if *update {
				require.NoError(t, os.WriteFile(golden, []byte(got), 0o644))
			}
			want, err := os.ReadFile(golden)
			require.NoError(t, err)
			require.Equal(t, string(want), got, "run make golden and read the difference")
		})
	}
}

func TestCRDsAreTheGeneratedOnesAndStayWhenTheReleaseGoes(t *testing.T) {
	rendered := map[string]object{}
	for _, o := range render(t, "minimal") {
		if o.GetKind() == "CustomResourceDefinition" {
			rendered[o.GetName()] = o
		}
	}
	for _, raw := range crd.All() {
		var want unstructured.Unstructured
		require.NoError(t, yaml.Unmarshal(raw, &want.Object))
		got, ok := rendered[want.GetName()]
		require.True(t, ok, want.GetName())
		require.Equal(t, "keep", got.GetAnnotations()["helm.sh/resource-policy"])
		require.Equal(t, want.Object["spec"], got.Object["spec"], "run make generate")
	}
	require.Len(t, rendered, len(crd.All()))
	// Who deletes them, and who finds them being deleted, must know all of them.
	for _, page := range []string{"../docs/operations.md", "berth/templates/_helpers.tpl"} {
		raw, err := os.ReadFile(page)
		require.NoError(t, err)
		for name := range rendered {
			require.Regexp(t, `(kubectl delete crd|list) .*\b`+regexp.QuoteMeta(name), string(raw), page)
		}
	}
	for _, o := range render(t, "minimal", "--set", "crds.install=false") {
		require.NotEqual(t, "CustomResourceDefinition", o.GetKind())
	}
}

func TestChartHoldsTheGeneratedCRDsByteForByte(t *testing.T) {
	files, err := filepath.Glob("berth/files/crds/*.yaml")
	require.NoError(t, err)
	var all [][]byte
	for _, file := range files {
		raw, err := os.ReadFile(file)
		require.NoError(t, err)
		all = append(all, raw)
	}
	require.True(t, bytes.Equal(bytes.Join(crd.All(), nil), bytes.Join(all, nil)), "run make generate")
}

func TestLint(t *testing.T) {
	for _, values := range valueFiles() {
		t.Run(values, func(t *testing.T) {
			helm(t, "lint", "--strict", "berth", "--kube-version", kubeVersion, "--values", valueFile(values))
		})
	}
}
