package main

import (
	"io"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"github.com/berth-sandbox/berth/api/metric"
	"github.com/berth-sandbox/berth/cmd/internal/cli"
	"github.com/berth-sandbox/berth/tools/docs"
)

func TestFlagReferenceIsTheGoldenFile(t *testing.T) {
	docs.Section(t, "docs/reference/flags.md", "extproc", docs.Flags(t, new(flags), "extproc", "BERTH_ROUTER"))
}

func TestRouterRegistersEveryMetricOfItsTable(t *testing.T) {
	for mode, args := range map[string][]string{"Ingress": enough(), "Egress": enoughOfEgress()} {
		t.Run(mode, func(t *testing.T) {
			var r router
			_, err := cli.Parse(&r.flags, "extproc", "", "BERTH_ROUTER", append(args, "--admin-listen=127.0.0.1:0", "--socket="+filepath.Join(t.TempDir(), "s")), io.Discard, io.Discard)
			require.NoError(t, err)
			r.ranges, err = r.flags.check()
			require.NoError(t, err)
			r.log = zap.NewNop()
			reg := metric.NewRegistry(r.program())
			defer r.close()
			require.NoError(t, r.wire(t.Context(), reg))
			require.Empty(t, reg.Missing())
		})
	}
}
