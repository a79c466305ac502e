package envoy

import (
	"flag"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

var update = flag.Bool("update", false, "write the golden files anew")

func defaults() Settings {
	return Settings{
		Listen:       netip.MustParseAddrPort("0.0.0.0:8080"),
		RouterSocket: "/run/berth/router.sock",
		AdminSocket:  "/run/berth/envoy-admin.sock",
	}
}

func TestDefaultBootstrapIsTheGoldenFile(t *testing.T) {
	const golden = "testdata/default.yaml"
	got, err := YAML(defaults())
	require.NoError(t, err)
	if *update {
		require.NoError(t, os.WriteFile(golden, got, 0o644))
	}
	want, err := os.ReadFile(golden)
	require.NoError(t, err)
	require.Equal(t, string(want), string(got), "run go test ./envoy -update and read the difference")
}

func TestSettingsNameTheFieldThatIsWrong(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*Settings)
		want   string
	}{
		"no listen address":      {func(s *Settings) { s.Listen = netip.AddrPort{} }, "listen address"},
		"relative router socket": {func(s *Settings) { s.RouterSocket = "router.sock" }, "router socket"},
		"no admin socket":        {func(s *Settings) { s.AdminSocket = "" }, "admin socket"},
		"flush too short":        {func(s *Settings) { s.AccessLogFlush = time.Millisecond }, "access log flush"},
	} {
		t.Run(name, func(t *testing.T) {
			s := defaults()
			c.change(&s)
			_, err := YAML(s)
			require.ErrorContains(t, err, c.want)
		})
	}
}

func TestWindowCoversEveryAttemptToConnect(t *testing.T) {
	require.Equal(t, 5*time.Second, Window, "the default that design and documentation state")
	require.Greater(t, Window, (1+Retries)*ConnectTimeout+Retries*retryBackOffMax)
}
